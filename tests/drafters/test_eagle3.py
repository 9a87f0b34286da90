"""EAGLE-3: unrolled training rows and their gradient, against float64 loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.drafters import base, eagle3
from tests.support import drafting, oracles
from tests.support.feedback import SMALL, rollout, wide

KEY = jax.random.key(0)
SIZE_S, SIZE_J, SIZE_N = 10, 3, 5
LENGTHS = (SIZE_S, 7)


@functools.cache
def build(fc_norm=False):
    options = {"num_starts": SIZE_N, "ttt_length": SIZE_J, "fc_norm": fc_norm}
    drafter = base.load("eagle3", options, SMALL)
    params = drafting.stir(drafter.init(KEY), scale=0.4)
    batch = drafting.make_batch(drafter, LENGTHS, SIZE_S, spec=SMALL)
    return drafter, params, drafting.make_frozen(spec=SMALL), batch


@functools.cache
def train(fc_norm=False):
    return drafting.quick_jit(build(fc_norm)[0].train_outputs)


def oracle_rows(w, frozen, batch, b, start):
    """Post-norm rows `[J, D]` of one rollout, float64."""
    eps = SMALL.norm_eps
    features = []
    for layers in np.asarray(batch.features_BSLD[b], np.float64):
        if "fc_norm" in w:
            layers = [
                oracles.rms_norm(x, s, eps)
                for x, s in zip(layers, w["fc_norm"], strict=True)
            ]
        features.append(np.concatenate(list(layers)) @ w["fc"])

    def fuse(e, f):
        normed = (
            oracles.rms_norm(e, w["embed_norm"], eps),
            oracles.rms_norm(f, w["hidden_norm"], eps),
        )
        return np.concatenate(normed), f

    embed = np.asarray(frozen.embed_VD, np.float64)
    rows = rollout(
        w["layer"], fuse, embed, features, batch.tokens_BS[b], start, SIZE_J, SMALL
    )
    return np.stack([oracles.rms_norm(row, w["norm"], eps) for row in rows])


@pytest.mark.parametrize("fc_norm", [False, True])
def test_rows_are_the_formulas(fc_norm):
    _, params, frozen, batch = build(fc_norm)
    out = train(fc_norm)(params, frozen, batch, KEY)
    w = wide(params["params"])
    seen = 0
    for b in range(2):
        anchors = np.asarray(out.anchors_BN[b])
        ids, valid = oracles.labels(
            batch.tokens_BS[b], batch.supervised_BS[b], LENGTHS[b], anchors, SIZE_J
        )
        rows = slice(SIZE_N * b, SIZE_N * (b + 1))
        real = valid[:, :1]  # a missing start is one at 0, in the prompt
        np.testing.assert_array_equal(out.valid_XM[rows], valid & real)
        kept = valid & real
        np.testing.assert_array_equal(np.asarray(out.labels_XM[rows])[kept], ids[kept])
        for n, j in np.argwhere(kept):
            x = SIZE_N * b + n
            label_at = anchors[n] + 1 + j
            np.testing.assert_array_equal(
                out.teacher_XMD[x, j], batch.teacher_BSD[b, label_at - 1]
            )
            seen += 1
        for n in np.flatnonzero(real[:, 0]):
            count = int(kept[n].sum())
            text = batch.replace(
                tokens_BS=np.pad(batch.tokens_BS, ((0, 0), (0, SIZE_J)))
            )
            want = oracle_rows(w, frozen, text, b, int(anchors[n]) - 1)[:count]
            got = out.hidden_XMD[SIZE_N * b + n, :count]
            np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-4)
    assert seen > 12
    np.testing.assert_array_equal(out.head_DU, params["params"]["head"])


def test_the_gradient_goes_through_every_feedback():
    """Directional derivative of the last step's row by central differences."""
    drafter, params, frozen, batch = build()
    anchors_BN = train()(params, frozen, batch, KEY).anchors_BN
    n = 1
    start = int(anchors_BN[0, n]) - 1

    @drafting.quick_jit
    @jax.grad
    def gradient(params):
        out = drafter.train_outputs(params, frozen, batch, KEY)
        return jnp.sin(out.hidden_XMD[n, SIZE_J - 1]).sum()

    grads = gradient(params)["params"]
    rng = np.random.default_rng(3)
    w = wide(params["params"])
    for group in ("fc", "layer"):
        way = jax.tree.map(lambda x: rng.normal(size=x.shape), w[group])

        def value(step, group=group, way=way):
            moved = dict(w)
            moved[group] = jax.tree.map(lambda x, d: x + step * d, w[group], way)
            return np.sin(oracle_rows(moved, frozen, batch, 0, start)[-1]).sum()

        want = (value(1e-5) - value(-1e-5)) / 2e-5
        dots = jax.tree.map(lambda g, d: float((g * d).sum()), grads[group], way)
        np.testing.assert_allclose(sum(jax.tree.leaves(dots)), want, rtol=2e-3)


@pytest.mark.parametrize(
    ("num_layers", "want"),
    [(36, (1, 17, 32)), (30, (1, 14, 26)), (6, (1, 2)), (4, (0, 1)), (2, (0,))],
)
def test_default_layers(num_layers, want):
    assert eagle3.default_layer_ids(num_layers) == want


def test_its_own_head_over_a_draft_vocabulary():
    kept = np.array([1, 4, 5, 9, 12])
    drafter = base.load("eagle3", {"draft_vocab_size": 5, "ttt_length": 2}, SMALL)
    params = jax.eval_shape(drafter.init, KEY)
    assert params["params"]["head"].shape == (8, 5)
    batch = drafting.make_batch(drafter, LENGTHS, SIZE_S, spec=SMALL)
    lent = drafting.make_frozen(spec=SMALL, target_ids=kept)
    out = jax.eval_shape(drafter.train_outputs, params, lent, batch, KEY)
    assert out.head_DU.shape == (8, 5)
    whole = drafting.make_frozen(spec=SMALL)
    with pytest.raises(UserError, match="draft_vocab_size"):
        jax.eval_shape(drafter.train_outputs, params, whole, batch, KEY)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ttt_length": 0}, "ttt_length=0"),
        ({"layer_ids": (1, 5)}, "layer_ids"),
        ({"draft_vocab_size": 14}, "draft_vocab_size=14"),
        ({"draft_vocab_size": -1}, "draft_vocab_size=-1"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, match):
    with pytest.raises(UserError, match=match):
        base.load("eagle3", changes, SMALL)
