"""The one transform against a float64 oracle that sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.proposal import prob_of, row_probs
from spec_jax.sampling import transform
from tests.support import laws

# greedy, temperature, top_k, top_p, min_p
SETTINGS = [
    (False, 1.0, 0, 1.0, 0.0),
    (False, 0.3, 0, 1.0, 0.0),
    (False, 2.5, 0, 1.0, 0.0),
    (False, 1.0, 1, 1.0, 0.0),
    (False, 0.7, 3, 1.0, 0.0),
    (False, 1.0, 10_000, 1.0, 0.0),
    (False, 0.9, 0, 0.9, 0.0),
    (False, 1.0, 0, 1e-6, 0.0),
    (False, 1.3, 0, 0.5, 0.0),
    (False, 1.0, 0, 1.0, 0.1),
    (False, 0.6, 0, 1.0, 0.99999),
    (False, 0.8, 5, 0.85, 0.05),
    (False, 1.5, 4, 0.6, 0.3),
    (True, 1.0, 0, 1.0, 0.0),
    (True, 1.0, 3, 0.5, 0.2),
]


def sampling_of(settings):
    greedy, temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    return transform.Sampling(
        greedy_B=jnp.asarray(greedy),
        temperature_B=jnp.asarray(temperature, jnp.float32),
        top_k_B=jnp.asarray(top_k, jnp.int32),
        top_p_B=jnp.asarray(top_p, jnp.float32),
        min_p_B=jnp.asarray(min_p, jnp.float32),
    )


@jax.jit
def probabilities(logits_BTV, sampling):
    """Every row's law twice: whole, and token by token."""
    law = transform.law_of(logits_BTV, sampling)
    size_b, size_t, size_v = logits_BTV.shape
    whole = [
        row_probs(law, jnp.full((size_b,), t, jnp.int32), size_v) for t in range(size_t)
    ]
    single = jax.vmap(
        lambda v: prob_of(law, jnp.full((size_b, size_t), v, jnp.int32)), out_axes=-1
    )(jnp.arange(size_v))
    return jnp.stack(whole, 1), single, law


def expected(logits, settings):
    return np.stack(
        [
            [laws.law(row, g, t, k, p, m) for row in rows]
            for rows, (g, t, k, p, m) in zip(logits, settings, strict=True)
        ]
    )


@pytest.mark.parametrize(("size", "scale"), [(5, 2.0), (37, 30.0), (300, 3.0)])
def test_laws_equal_the_oracle(size, scale):
    """Every setting in one batch, greedy rows among them."""
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(len(SETTINGS), 2, size)).astype(np.float32) * scale
    whole, single, _ = probabilities(jnp.asarray(logits), sampling_of(SETTINGS))
    want = expected(logits, SETTINGS)
    # float32 logits scaled by 1/0.3: |x| < 350, half an ulp 1.5e-5, so a
    # probability is known to 5e-5 relative at worst.
    np.testing.assert_allclose(whole, want, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(single, want, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(np.asarray(whole).sum(-1), 1, atol=1e-4)


def test_ties_are_kept_together():
    logits = np.asarray([[[2.0, 1.0, 2.0, 1.0, 0.0, 1.0]]] * len(SETTINGS), np.float32)
    whole, _, law = probabilities(jnp.asarray(logits), sampling_of(SETTINGS))
    np.testing.assert_allclose(whole, expected(logits, SETTINGS), atol=1e-6)
    # Equal maxima: greedy takes the first.
    assert law.one_hot_BT[-1, 0] == 0
    assert whole[3, 0].tolist() == pytest.approx([0.5, 0, 0.5, 0, 0, 0], abs=1e-6)


def test_all_greedy_batch_is_one_hot_at_the_first_maximum():
    logits = jnp.asarray([[[0.0, 3.0, 3.0], [-1.0, -2.0, -1.0]]])
    law = jax.jit(transform.law_of)(logits, transform.all_greedy(1))
    assert law.one_hot_BT.tolist() == [[1, 0]]


@pytest.mark.parametrize("greedy", [True, False])
def test_rows_that_define_no_law(greedy):
    """One-hot somewhere legal, and reported; their neighbours are exact."""
    nan, inf = float("nan"), float("inf")
    rows = np.asarray(
        [
            [0.0, nan, 1.0],
            [nan, nan, nan],
            [inf, 0.0, 0.0],
            [-inf, -inf, -inf],
            [-inf, 0.5, -0.5],
            [0.5, 0.25, 0.0],
        ],
        np.float32,
    )
    settings = [(greedy, 0.8, 0, 0.9, 0.0)]
    whole, _, law = probabilities(jnp.asarray(rows[None]), sampling_of(settings))
    finite = transform.finite_rows(jnp.asarray(rows[None]))
    assert finite.tolist() == [[False, False, False, False, True, True]]
    one_hot = np.asarray(law.one_hot_BT)[0]
    assert ((one_hot[:4] >= 0) & (one_hot[:4] < 3)).all()
    np.testing.assert_allclose(
        whole[0, 4:], expected(rows[None, 4:], settings)[0], atol=1e-6
    )


def test_no_setting_drops_the_maximum():
    """Weights are measured from the maximum itself, so it always survives."""
    rng = np.random.default_rng(3)
    size = 64
    logits = (rng.normal(size=(size, 1, 50)) * 40).astype(np.float32)
    settings = [
        (False, float(t), 0, 1e-40, 0.9999999)
        for t in np.exp(rng.uniform(np.log(1e-3), np.log(10), size))
    ]
    whole, _, _ = probabilities(jnp.asarray(logits), sampling_of(settings))
    best = np.asarray(logits)[:, 0].argmax(-1)
    got = np.asarray(whole)[np.arange(size), 0]
    assert (got.argmax(-1) == best).all()
    assert (got[np.arange(size), best] > 0.9).all()
