"""Losses, gradients, weights and metrics against float64 loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.drafters import base
from spec_jax.drafters.base import Frozen, TrainOutputs
from spec_jax.nn import anchors
from spec_jax.objectives import LossSums, ObjectiveOptions, loss, weights
from spec_jax.objectives.accept import emitted_tokens
from tests.support import drafting, oracles

OPTIONS = [
    ObjectiveOptions("ce"),
    ObjectiveOptions("ce", decay_gamma=3.0),
    ObjectiveOptions("dpace", dpace_alpha=0.3),
    ObjectiveOptions("dpace", decay_gamma=4.0),
    ObjectiveOptions("lk_alpha", decay_gamma=2.0),
    ObjectiveOptions("lk_tv"),
    ObjectiveOptions("lk_lambda", kl_scale=0.8, kl_decay=2.0),
]
KEPT = np.array([1, 2, 5, 8, 9, 12, 20, 21, 29])


@functools.cache
def run(options):
    """(numerator, (sums, metrics)), gradient of the hidden rows."""

    def numerator(hidden, outputs, frozen):
        sums, metrics = loss(outputs.replace(hidden_XMD=hidden), frozen, options)
        return sums.numerator, (sums, metrics)

    return drafting.quick_jit(jax.value_and_grad(numerator, has_aux=True))


def problem(seed=0, size_x=7, size_m=5, size_d=6, reduced=False, sharp=1.0):
    """Random rows; labels cover target ids 0..29."""
    rng = np.random.default_rng(seed)
    size_u = len(KEPT) if reduced else 30
    labels = rng.integers(0, 30, (size_x, size_m)).astype(np.int32)
    valid = (rng.random((size_x, size_m)) < 0.75).astype(np.float32)
    valid[1] = 0.0
    outputs = TrainOutputs(
        hidden_XMD=(sharp * rng.normal(size=(size_x, size_m, size_d))).astype("f4"),
        labels_XM=labels,
        valid_XM=valid,
        anchors_BN=np.zeros((1, size_x), np.int32),
    )
    frozen = Frozen(
        embed_VD=np.zeros((30, size_d), np.float32),
        head_DU=rng.normal(size=(size_d, size_u)).astype(np.float32),
        target_ids_U=KEPT.astype(np.int32) if reduced else None,
    )
    return outputs, frozen


def wanted(outputs, frozen, options):
    """The oracle's numerator, denominator, gradient, and each label's column."""
    table = {int(v): i for i, v in enumerate(KEPT)}
    if frozen.target_ids_U is None:
        table = {v: v for v in range(30)}
    known = np.vectorize(lambda v: int(v) in table)(outputs.labels_XM)
    columns = np.vectorize(lambda v: table.get(int(v), 0))(outputs.labels_XM)
    trained = (outputs.valid_XM > 0) & known
    result = oracles.hard_label_loss(
        outputs.hidden_XMD, frozen.head_DU, columns, trained, options.kind,
        options.decay_gamma, options.dpace_alpha, options.kl_scale, options.kl_decay,
    )  # fmt: skip
    return *result, columns, trained, known


CASES = [(o, False) for o in OPTIONS] + [(OPTIONS[1], True), (OPTIONS[2], True)]


@pytest.mark.parametrize(("options", "reduced"), CASES, ids=str)
def test_loss_and_gradient_match_float64(options, reduced):
    outputs, frozen = problem(reduced=reduced)
    numerator, denominator, gradient, *_ = wanted(outputs, frozen, options)
    (value, (sums, metrics)), got = run(options)(outputs.hidden_XMD, outputs, frozen)
    np.testing.assert_allclose(value, numerator, rtol=2e-5)
    np.testing.assert_allclose(sums.denominator, denominator, rtol=2e-5)
    np.testing.assert_allclose(metrics["loss"], (numerator, denominator), rtol=2e-5)
    scale = np.abs(gradient).max()
    np.testing.assert_allclose(got, gradient, atol=2e-5 * scale)


@pytest.mark.parametrize("kind", ["ce", "lk_tv", "lk_lambda"])
@pytest.mark.parametrize("overlap", [0.5, 0.9, 0.99])
def test_gradients_hold_as_the_drafter_gets_good(kind, overlap):
    """Cancellation near q(label) = 1 must not reach the gradient."""
    size_u = 1000
    logits = np.zeros((1, 1, size_u))
    logits[..., 7] = np.log(overlap / (1 - overlap) * (size_u - 1))
    frozen = Frozen(np.zeros((1, 1), "f4"), np.eye(size_u, dtype="f4"))
    outputs = TrainOutputs(
        (logits + 20.0).astype("f4"),
        np.full((1, 1), 7, np.int32),
        np.ones((1, 1), "f4"),
        np.zeros((1, 1), np.int32),
    )
    want = oracles.hard_label_loss(
        outputs.hidden_XMD, frozen.head_DU, [[7]], [[True]], kind
    )[2]
    _, got = run(ObjectiveOptions(kind))(outputs.hidden_XMD, outputs, frozen)
    assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("chunk_rows", [8, 11, 35])
def test_chunks_change_nothing(chunk_rows):
    outputs, frozen = problem(reduced=True)
    options = ObjectiveOptions("lk_lambda", decay_gamma=3.0)
    want = run(options)(outputs.hidden_XMD, outputs, frozen)
    cut = dataclasses.replace(options, chunk_rows=chunk_rows)
    got = run(cut)(outputs.hidden_XMD, outputs, frozen)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                 got, want)  # fmt: skip


def test_only_one_chunk_of_logits_exists():
    outputs, frozen = problem(size_x=64)

    def numerator(hidden, options):
        rows = outputs.replace(hidden_XMD=hidden)
        return loss(rows, frozen, options)[0].numerator

    def widest(options):
        jaxpr = jax.make_jaxpr(jax.grad(lambda h: numerator(h, options)))(
            outputs.hidden_XMD
        )
        sizes = []

        def walk(jaxpr):
            for eqn in jaxpr.eqns:
                sizes.extend(
                    v.aval.shape[0] for v in eqn.outvars
                    if v.aval.ndim == 2 and v.aval.shape[1] == 30
                )  # fmt: skip
                for sub in jax.tree.leaves(
                    list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
                ):
                    if hasattr(sub, "eqns"):
                        walk(sub)
                    elif hasattr(sub, "jaxpr"):
                        walk(sub.jaxpr)

        walk(jaxpr.jaxpr)
        return max(sizes)

    assert widest(ObjectiveOptions()) == 320
    assert widest(ObjectiveOptions(chunk_rows=40)) == 40


def test_metrics_match_loops():
    for reduced in (False, True):
        outputs, frozen = problem(seed=3, size_x=40, reduced=reduced, sharp=0.3)
        # Make many labels the argmax, so that prefixes are long.
        best = np.argmax(outputs.hidden_XMD @ frozen.head_DU, -1)
        ids = KEPT[best] if reduced else best
        keep = np.random.default_rng(1).random(ids.shape) < 0.7
        labels = np.where(keep, ids, outputs.labels_XM).astype(np.int32)
        outputs = outputs.replace(labels_XM=labels)
        *_, columns, trained, known = wanted(outputs, frozen, ObjectiveOptions())
        logp = oracles.log_softmax(
            outputs.hidden_XMD.astype(np.float64) @ frozen.head_DU
        )
        valid = outputs.valid_XM > 0
        hit = (logp.argmax(-1) == columns) & trained
        prob = np.exp(np.take_along_axis(logp, columns[..., None], -1))[..., 0]
        result, _ = run(ObjectiveOptions())(outputs.hidden_XMD, outputs, frozen)
        metrics = result[1][1]
        blocks = [x for x in range(40) if valid[x, 0]]
        emitted = sum(oracles.emitted(hit[x], valid[x]) for x in blocks)
        want = {
            "acc": (hit.sum(), valid.sum()),
            "label_prob": (prob[trained].sum(), valid.sum()),
            "accept_length": (emitted, len(blocks)),
            "unrepresentable": ((valid & ~known).sum(), valid.sum()),
        }
        for j in range(5):
            want[f"acc_{j + 1}"] = (hit[:, j].sum(), valid[:, j].sum())
        assert set(metrics) == {*want, "loss", "ce_loss"}
        for name, pair in want.items():
            np.testing.assert_allclose(metrics[name], pair, rtol=1e-5, err_msg=name)
        assert emitted > 1.5 * len(blocks)
        assert ((valid & ~known).sum() > 0) == reduced


def test_emitted_tokens_stop_where_the_text_does():
    hit = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 1, 0], [0, 0, 0]])
    valid = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]])
    got, blocks = drafting.quick_jit(emitted_tokens)(hit * 1.0, valid * 1.0)
    np.testing.assert_array_equal(got[:5], [4, 2, 1, 2, 1])
    np.testing.assert_array_equal(blocks, [1, 1, 1, 1, 1, 0])
    want = [oracles.emitted(h, v) for h, v in zip(hit[:5], valid[:5], strict=True)]
    np.testing.assert_array_equal(got[:5], want)


def test_a_tie_is_not_a_hit():
    outputs, frozen = problem()
    _, (_, metrics) = run(ObjectiveOptions())(
        np.zeros_like(outputs.hidden_XMD), outputs, frozen
    )[0]
    assert metrics["acc"][0] == 0


def test_labels_outside_the_draft_vocabulary_have_no_gradient():
    outputs, frozen = problem(reduced=True)
    *_, trained, known = wanted(outputs, frozen, ObjectiveOptions())
    assert (~known & (outputs.valid_XM > 0)).any()
    _, got = run(ObjectiveOptions())(outputs.hidden_XMD, outputs, frozen)
    has = np.abs(got).max(-1) > 0
    np.testing.assert_array_equal(has, trained)


def test_nothing_supervised_is_zero_and_finite():
    outputs, frozen = problem()
    outputs = outputs.replace(valid_XM=np.zeros_like(outputs.valid_XM))
    for options in OPTIONS:
        (value, (sums, _)), got = run(options)(outputs.hidden_XMD, outputs, frozen)
        assert value == 0 and sums.denominator == 0 and sums.mean() == 0
        assert not np.asarray(got).any()


@pytest.mark.parametrize("gamma", [0.0, 2.0, 7.0])
def test_decay_weights(gamma):
    got = weights.decay_weights(6, gamma)
    np.testing.assert_allclose(got, oracles.decay(6, gamma), rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_match_loops_and_carry_no_gradient(alpha):
    rng = np.random.default_rng(0)
    prob = rng.random((9, 6)).astype("f4")
    valid = (rng.random((9, 6)) < 0.7).astype("f4")
    got = weights.dpace_weights(prob, valid, alpha)
    want = [oracles.dpace(p, v, alpha) for p, v in zip(prob, valid, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    slope = jax.grad(lambda p: weights.dpace_weights(p, valid, alpha).sum())(prob)
    assert not np.asarray(slope).any()


@functools.cache
def drafter_sums():
    """DFlash and its loss: params, frozen, batch, key -> numerator, rest; grads."""
    options = {"mask_id": 3, "num_draft": 4, "num_anchors": 6}
    programs = drafting.Programs(base.load("dflash", options, drafting.TINY))
    params = drafting.stir(programs.init(jax.random.key(0)))

    def numerator(params, frozen, batch, key):
        outputs = programs.drafter.train_outputs(params, frozen, batch, key)
        sums, metrics = loss(outputs, frozen, ObjectiveOptions("dpace"))
        return sums.numerator, (sums, metrics)

    step = drafting.quick_jit(jax.value_and_grad(numerator, has_aux=True))
    return programs.drafter, params, step


def added(parts):
    """Sums the results of pieces."""
    return jax.tree.map(
        lambda *each: sum(np.asarray(x, np.float64) for x in each), *parts
    )


def assert_same(got, want):
    """Each leaf to 2e-5 of its largest entry: sums in another order, no more."""

    def check(a, b):
        scale = max(np.abs(np.asarray(b)).max(), 1.0)
        np.testing.assert_allclose(a, b, atol=2e-5 * scale, rtol=0)

    jax.tree.map(check, got, want)


def test_sums_do_not_depend_on_how_the_batch_is_cut():
    drafter, params, step = drafter_sums()
    frozen = drafting.make_frozen()
    lengths = [20, 9, 14, 20, 3, 20, 11, 2]  # the last has nothing to train on
    batch = drafting.make_batch(drafter, lengths, 20)
    key = jax.random.key(3)
    keys = anchors.row_keys(key, 8)
    want = step(params, frozen, batch, key)
    assert want[0][0] > 0
    parts = [
        step(
            params,
            frozen,
            jax.tree.map(lambda x, i=i: x[i : i + 4], batch),
            keys[i : i + 4],
        )
        for i in (0, 4)
    ]
    assert_same(added(parts), want)


def test_a_row_without_supervision_and_padding_add_nothing():
    drafter, params, step = drafter_sums()
    frozen = drafting.make_frozen()
    batch = drafting.make_batch(drafter, [20, 13, 20, 9], 20)
    keys = anchors.row_keys(jax.random.key(3), 5)
    want = step(params, frozen, batch, keys[:4])

    def padded(x):
        if x.ndim == 1:
            return np.pad(x, (0, 1), constant_values=15)
        return np.pad(x, [(0, 1), (0, 6)] + [(0, 0)] * (x.ndim - 2))

    wider = jax.tree.map(padded, batch)
    assert_same(step(params, frozen, wider, keys), want)


def test_sums_add_and_divide_once():
    total = LossSums(jnp.float32(3.0), jnp.float32(1.0)) + LossSums(
        jnp.float32(1.0), jnp.float32(7.0)
    )
    assert total.mean() == 0.5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "kl"}, "objective.kind='kl'"),
        ({"decay_gamma": -1.0}, "decay_gamma=-1"),
        ({"decay_gamma": float("nan")}, "decay_gamma=nan"),
        ({"dpace_alpha": 1.5}, "dpace_alpha=1.5"),
        ({"chunk_rows": -2}, "chunk_rows=-2"),
    ],
)
def test_bad_options_are_named(changes, says):
    with pytest.raises(UserError, match=says):
        ObjectiveOptions(**changes)
