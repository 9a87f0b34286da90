"""Log-probabilities against a float64 log-softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.sampling import logprobs


def log_softmax(rows):
    rows = np.asarray(rows, np.float64)
    top = rows.max(-1, keepdims=True)
    return rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))


@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize("num_top", [0, 3])
def test_chosen_and_alternatives(num_top, paths):
    rng = np.random.default_rng(num_top)
    logits = rng.normal(size=(2, 4, 19)).astype(np.float32) * 9
    rows = np.asarray([[0, 2, 3], [0, 1, 1]]) if paths else None
    size_t = 3 if paths else 4
    tokens = rng.integers(0, 19, (2, size_t))
    tokens[1, -1] = -1  # padding
    made = jax.jit(logprobs.of_tokens, static_argnums=3)(
        jnp.asarray(logits),
        jnp.asarray(tokens),
        jnp.asarray([False, True]),
        num_top,
        rows,
    )
    assert made.top_BTN.shape == (2, size_t, num_top)
    for b in range(2):
        for t in range(size_t):
            if tokens[b, t] < 0:
                continue
            want = log_softmax(logits[b, rows[b, t] if paths else t])
            np.testing.assert_allclose(
                made.chosen_BT[b, t], want[tokens[b, t]], rtol=1e-5, atol=1e-5
            )
            best = np.argsort(-want)[:num_top]
            np.testing.assert_array_equal(made.top_ids_BTN[b, t], best)
            np.testing.assert_allclose(
                made.top_BTN[b, t], want[best], rtol=1e-5, atol=1e-5
            )


def test_nobody_asking_computes_nothing():
    made = logprobs.of_tokens(
        jnp.full((1, 2, 5), jnp.nan), jnp.zeros((1, 2), int), jnp.zeros(1, bool), 2
    )
    assert not np.asarray(made.chosen_BT).any()
    jaxpr = jax.make_jaxpr(
        lambda x: logprobs.of_tokens(x, jnp.zeros((1, 2), int), x[0, :1, 0] > 0, 2)
    )(jnp.zeros((1, 2, 5)))
    assert {e.primitive.name for e in jaxpr.jaxpr.eqns}.isdisjoint(
        {"exp", "top_k", "log"}
    )


def test_more_alternatives_than_tokens_are_refused():
    logits, tokens = jnp.zeros((1, 2, 5)), jnp.zeros((1, 2), jnp.int32)
    wanted = jnp.ones((1,), bool)
    assert logprobs.of_tokens(logits, tokens, wanted, 5).top_BTN.shape == (1, 2, 5)
    with pytest.raises(UserError, match="top_logprobs=6 is more than the target's 5"):
        logprobs.of_tokens(logits, tokens, wanted, 6)
