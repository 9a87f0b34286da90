"""Every term's loss, gradient and metrics against float64 loops; what must not move."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Frozen, Selector, TrainOutputs
from spec_jax.evals import ece
from spec_jax.evals.calibration_metrics import ece_of_metrics
from spec_jax.objectives import ObjectiveOptions, loss
from spec_jax.objectives.confidence import NUM_BINS
from spec_jax.train import metrics as train_metrics
from tests.objectives import term_oracles
from tests.support import drafting, oracles

VOCAB, KEPT = 11, np.array([0, 2, 3, 5, 6, 8, 10])
DSPARK = {"ce": 0.1, "l1": 0.9, "confidence": 1.0}
EAGLE = {"smooth_l1": 1.0, "soft_ce": 0.1}
DFLASH2 = {"ce": 1.0, "selector": 0.5}
EVERY = dict.fromkeys(("ce", "soft_ce", "l1", "lk", "smooth_l1"), 0.5) | {
    "confidence": 1.0,
    "selector": 0.7,
}

# (terms, options, the drafter's trained arrays, reduced vocabulary)
CASES = {
    "soft_ce": ({"soft_ce": 1.0}, {}, ("own_head",), False),
    "l1": ({"l1": 1.0}, {"decay_gamma": 2.0}, (), False),
    "lk_alpha": ({"lk": 2.0}, {}, (), False),
    "lk_lambda": (
        {"lk": 1.0},
        {"lk_kind": "lambda", "kl_scale": 0.7, "kl_decay": 2.0},
        ("correction",),
        False,
    ),
    "lk_tv": ({"lk": 1.0}, {"lk_kind": "tv"}, (), False),
    "eagle": (EAGLE, {}, ("feature",), False),
    "dspark": (DSPARK, {"decay_gamma": 4.0}, ("correction", "confidence"), False),
    "dflash2": (DFLASH2, {"kind": "dpace"}, ("selector", "correction"), False),
    "dflash2_lk": (
        DFLASH2,
        {"kind": "lk_lambda", "selector_stop_gradient": True},
        ("selector",),
        True,
    ),
    "eagle3_draft_mass": ({"soft_ce": 1.0, "ce": 0.2}, {}, ("own_head",), True),
    "dspark_draft_mass": (
        DSPARK | {"lk": 0.5},
        {"kind": "dpace", "lk_kind": "lambda"},
        ("correction", "confidence"),
        True,
    ),
    "eagle_draft_mass": (EAGLE, {}, ("feature",), True),
    "label_rows": (
        DSPARK | {"soft_ce": 0.3},
        {"teacher_rows": "label"},
        ("correction", "confidence"),
        True,
    ),
    "full_mass": (
        DSPARK | {"lk": 0.5},
        {"teacher_mass": "full", "kind": "dpace"},
        ("correction", "confidence"),
        True,
    ),
    "every": (
        EVERY,
        {"lk_kind": "lambda", "teacher_mass": "full", "decay_gamma": 3.0},
        ("own_head", "correction", "confidence", "feature", "selector"),
        True,
    ),
}


def problem(parts=(), reduced=False, seed=0, size_x=4, size_m=3, wild=0.8):
    """A random case: what is given, and what is trained, in float64."""
    rng = np.random.default_rng(seed)
    d, e, u = 4, 2, len(KEPT) if reduced else VOCAB
    normal = lambda *shape: rng.normal(size=shape)
    full = normal(d, VOCAB)
    case = {
        "vocab": VOCAB,
        "labels": rng.integers(0, VOCAB, (size_x, size_m)),
        "valid": (rng.random((size_x, size_m)) < 0.8).astype(float),
        "target_ids": KEPT if reduced else None,
        "full_head": full,
        "frozen_head": full[:, KEPT] if reduced else full,
        "teacher": normal(size_x, size_m, d),
        "size_k": 4,
        "feature_target": normal(size_x, size_m, 5),
    }
    case["valid"][1] = 0.0
    case["valid"][0] = 1.0
    # Near the teacher: overlaps and hits of every size.
    v = {"hidden": case["teacher"] + wild * normal(size_x, size_m, d)}
    if "own_head" in parts:
        v["head"] = case["frozen_head"] + 0.3 * normal(d, u)
    if "correction" in parts:
        v["correction"] = normal(size_x, size_m, e)
        v["correction_head"] = 0.5 * normal(e, u)
    if "confidence" in parts:
        v["confidence"] = 1.5 * normal(size_x, size_m)
    if "feature" in parts:
        v["feature"] = case["feature_target"] + normal(size_x, size_m, 5)
    if "selector" in parts:
        v["query"], v["successor"] = normal(size_x, size_m, e), normal(u, e)
    # The selector's labels are often candidates, and the draft's often hits.
    logits = case["teacher"] @ case["frozen_head"]
    best = logits.argmax(-1)
    likely = rng.random((size_x, size_m)) < 0.5
    ids = KEPT[best] if reduced else best
    case["labels"] = np.where(likely, ids, case["labels"])
    if reduced:  # ids that no column stands for
        case["labels"][0, 2], case["labels"][2, 1], case["valid"][2, 1] = 1, 4, 1.0
    return case, v


def records(case, v, options):
    """The library's records of a case, float32."""
    f4 = lambda a: None if a is None else np.asarray(a, np.float32)
    select = None
    if "query" in v:
        detached = f4(v["query"]) if options.selector_stop_gradient else None
        select = Selector(f4(v["query"]), f4(v["successor"]), case["size_k"], detached)
    outputs = TrainOutputs(
        hidden_XMD=f4(v["hidden"]),
        labels_XM=case["labels"].astype(np.int32),
        valid_XM=f4(case["valid"]),
        anchors_BN=np.zeros((1, len(case["labels"])), np.int32),
        head_DU=f4(v.get("head")),
        correction_XME=f4(v.get("correction")),
        correction_EU=f4(v.get("correction_head")),
        teacher_XMD=f4(case["teacher"]),
        feature_XMD=f4(v.get("feature")),
        feature_target_XMD=f4(case["feature_target"]),
        confidence_XM=f4(v.get("confidence")),
        selector=select,
    )
    reduced = case["target_ids"] is not None
    frozen = Frozen(
        np.zeros((VOCAB, 4), np.float32),
        f4(case["frozen_head"]),
        KEPT.astype(np.int32) if reduced else None,
        f4(case["full_head"]) if reduced else None,
    )
    return outputs, frozen


def slopes_by_name(grads, options):
    """The gradient of a TrainOutputs under the oracle's names."""
    named = {
        "hidden": grads.hidden_XMD,
        "head": grads.head_DU,
        "correction": grads.correction_XME,
        "correction_head": grads.correction_EU,
        "confidence": grads.confidence_XM,
        "feature": grads.feature_XMD,
    }
    if grads.selector is not None:
        query = grads.selector.query_XME
        if options.selector_stop_gradient:
            query = grads.selector.detached_query_XME
        named |= {"query": query, "successor": grads.selector.successor_UE}
    return {name: np.asarray(g) for name, g in named.items() if g is not None}


@functools.cache
def program(options, terms):
    """(numerator, (sums, metrics)), gradients of outputs and of frozen."""

    def numerator(outputs, frozen, progress):
        sums, metrics = loss(outputs, frozen, options, terms, progress)
        return sums.numerator, (sums, metrics)

    return drafting.quick_jit(
        jax.value_and_grad(numerator, argnums=(0, 1), has_aux=True, allow_int=True)
    )


def run(outputs, frozen, options, weights, progress=None):
    return program(options, tuple(weights.items()))(outputs, frozen, progress)


def oracle_options(options):
    return dataclasses.asdict(options)


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_match_float64(name):
    weights, changes, parts, reduced = CASES[name]
    options = ObjectiveOptions(**changes)
    case, v = problem(parts, reduced, seed=len(name))
    outputs, frozen = records(case, v, options)
    o = oracle_options(options)
    numerator, denominator, metrics = term_oracles.everything(case, o, weights, v)
    (value, (sums, got)), (grads, frozen_grads) = run(outputs, frozen, options, weights)

    np.testing.assert_allclose(value, numerator, rtol=2e-5)
    np.testing.assert_allclose(sums.denominator, denominator, rtol=2e-5)
    bins = {k for k in got if k.startswith("calibration_")}
    assert bool(bins) == ("confidence" in weights)
    assert set(got) - bins == set(metrics)
    for key, pair in metrics.items():
        np.testing.assert_allclose(got[key], pair, rtol=3e-5, atol=1e-6, err_msg=key)

    wanted = term_oracles.gradient(case, o, weights, v)
    ours = slopes_by_name(grads, options)
    assert set(ours) >= set(wanted)
    for key, slope in wanted.items():
        scale = max(np.abs(slope).max(), 1e-3)
        np.testing.assert_allclose(
            ours[key], slope, atol=5e-5 * scale, rtol=0, err_msg=key
        )
    for leaf in jax.tree.leaves(frozen_grads):
        assert leaf.dtype == jax.dtypes.float0 or not np.asarray(leaf).any()
    assert not np.asarray(grads.teacher_XMD).any()
    assert not np.asarray(grads.feature_target_XMD).any()


def test_the_cases_see_hits_misses_and_labels_outside():
    """The oracle comparison above is about something."""
    o = oracle_options(ObjectiveOptions())
    for name in ("dflash2", "dflash2_lk", "every"):
        _, _, parts, reduced = CASES[name]
        case, v = problem(parts, reduced, seed=len(name))
        _, _, named = term_oracles.everything(case, o, DFLASH2, v)
        seen = ["acc", "selector_coverage"] + ["unrepresentable"] * reduced
        for key in seen:
            assert 0 < named[key][0] < named[key][1], (name, key, named[key])


# id -> whether it has a column: 8 has, 4 has not.
@pytest.mark.parametrize(
    ("label", "best", "ce_rows", "taught"),
    [(8, 8, 1, 1), (8, 4, 1, 0), (4, 8, 0, 1), (4, 4, 0, 0)],
)
def test_p_counts_where_the_targets_favourite_can_be_proposed(
    label, best, ce_rows, taught
):
    """EAGLE-3's mask: the teacher's argmax decides, not the label."""
    case, v = problem(("own_head",), True)
    case["valid"][:], case["valid"][0, 0], case["labels"][0, 0] = 0.0, 1.0, label
    case["teacher"][0, 0] = 9 * case["full_head"][:, best]
    case["full_head"][:, best] *= 9  # the likeliest, whatever the other columns
    case["frozen_head"] = case["full_head"][:, KEPT]
    options = ObjectiveOptions()
    outputs, frozen = records(case, v, options)
    (_, (sums, metrics)), (grads, _) = run(outputs, frozen, options, {"soft_ce": 1.0})
    assert sums.denominator == taught and bool(sums.numerator) == bool(taught)
    assert np.asarray(grads.head_DU).any() == bool(taught)
    assert bool(metrics["overlap"][0]) == bool(taught) and metrics["overlap"][1] == 1
    # One denominator for all terms: the rows that any of them can use.
    weights = {"soft_ce": 1.0, "ce": 1.0}
    (_, (both, found)), _ = run(outputs, frozen, options, weights)
    assert both.denominator == max(taught, ce_rows)
    for term, used in (("soft_ce", taught), ("ce", ce_rows)):
        total, count = found[f"{term}_loss"]
        assert bool(total) == bool(used) and count == max(taught, ce_rows)
    by_label = dataclasses.replace(options, teacher_rows="label")
    _, (sums, _) = run(outputs, frozen, by_label, {"soft_ce": 1.0})[0]
    assert sums.denominator == ce_rows


# Two drafts; p over four tokens, of which the first two can be drafted. The second
# row's favourite, which is its label, cannot.
LAW = np.array([[0.36, 0.24, 0.2, 0.2], [0.2, 0.1, 0.4, 0.3]])
# (teacher_mass, teacher_rows) -> A of each draft, and the rows of `l1`.
OVERLAPS = {
    ("full", "argmax"): ([0.6, 0.3], [1, 1]),
    ("draft", "argmax"): ([1.0, 0.0], [1, 0]),
    ("draft", "label"): ([1.0, 0.0], [1, 0]),
}


@pytest.mark.parametrize(("mass", "rows"), OVERLAPS)
def test_acceptance_with_and_without_the_mass_outside(mass, rows):
    """q = (.6, .4): sum min(p, q) is .6, and 1 of a p that was renormalised."""
    overlap, taught = OVERLAPS[mass, rows]
    hidden = np.log([[0.6, 0.4, 1, 1]] * 2).astype("f4")
    outputs = TrainOutputs(
        hidden_XMD=hidden[None],
        labels_XM=np.array([[0, 2]], np.int32),
        valid_XM=np.ones((1, 2), "f4"),
        anchors_BN=np.zeros((1, 1), np.int32),
        teacher_XMD=np.log(LAW).astype("f4")[None],
        confidence_XM=np.zeros((1, 2), "f4"),
    )
    eye = np.eye(4, dtype="f4")
    frozen = Frozen(eye, eye[:, :2], np.array([0, 1], np.int32), eye)
    options = ObjectiveOptions(teacher_mass=mass, teacher_rows=rows)
    (_, (sums, got)), (grads, _) = run(
        outputs, frozen, options, {"l1": 1.0, "confidence": 1.0}
    )
    a = np.array(overlap)
    close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    assert sums.denominator == 2
    close(got["l1_loss"][0], (2 * (1 - a) * taught).sum())
    close([float(got[f"overlap_{j}"][0]) for j in (1, 2)], a)
    close(got["tau_probabilistic"][0], 1 + a[0] + a[0] * a[1])
    # Half is said everywhere: the slope of BCE at 0 is .5 - A.
    close(grads.confidence_XM, [0.5 - a])
    close(got["confidence_bias"], (np.sum(0.5 - a), 2))
    close(got["confidence_abs_error"], (np.abs(0.5 - a).sum(), 2))
    close(got["confidence_cumprod_bias"], (0.5 - a[0] + 0.25 - a[0] * a[1], 2))
    assert (np.asarray(got["calibration_accept"][1]).sum(1) == 1).all()
    close(np.asarray(got["calibration_accept"][0]).sum(1), a)


def with_rows(outputs, fill):
    """The same with `fill` in every array of every unsupervised row."""
    off = outputs.valid_XM == 0

    def one(array):
        if array is None or array.shape[:2] != off.shape or array.dtype.kind != "f":
            return array
        array = np.array(array)
        array[off] = fill
        return array

    return jax.tree.map(one, outputs).replace(valid_XM=outputs.valid_XM)


def every_case(chunk_rows=0, size_x=5, name="every"):
    weights, changes, parts, reduced = CASES[name]
    options = ObjectiveOptions(**changes, chunk_rows=chunk_rows)
    case, v = problem(parts, reduced, seed=3, size_x=size_x)
    return (*records(case, v, options), options, weights)


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_rows_without_supervision_may_hold_anything(fill):
    outputs, frozen, options, weights = every_case()
    want = run(outputs, frozen, options, weights)
    got = run(with_rows(outputs, fill), frozen, options, weights)
    jax.tree.map(
        lambda a, b: (
            None
            if a.dtype == jax.dtypes.float0
            else np.testing.assert_array_equal(a, b)
        ),
        got,
        want,
    )
    off = outputs.valid_XM == 0
    assert off.any() and not np.asarray(got[1][0].hidden_XMD)[off].any()


@pytest.mark.parametrize(
    ("name", "chunk_rows"),
    [
        ("every", 4),
        ("every", 15),
        ("eagle_draft_mass", 4),
        ("eagle3_draft_mass", 4),
        ("dspark_draft_mass", 4),
        ("dflash2_lk", 4),
    ],
)
def test_chunks_change_nothing(name, chunk_rows):
    outputs, frozen, options, weights = every_case(name=name)
    want = run(outputs, frozen, options, weights)
    cut = dataclasses.replace(options, chunk_rows=chunk_rows)
    got = run(outputs, frozen, cut, weights)
    assert_same(got, want, 1e-5)


def assert_same(got, want, tolerance):
    def one(a, b):
        if a.dtype != jax.dtypes.float0:
            scale = max(np.abs(np.asarray(b)).max(), 1.0)
            np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0)

    jax.tree.map(one, got, want)


def equations(jaxpr):
    """All equations, those of inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(sub, "eqns"):
                yield from equations(sub)
            elif hasattr(sub, "jaxpr"):
                yield from equations(sub.jaxpr)


def traced(outputs, frozen, options, weights):
    terms = tuple(weights.items())

    def numerator(outputs):
        return loss(outputs, frozen, options, terms)[0].numerator

    grad = jax.grad(numerator, allow_int=True)
    return list(equations(jax.make_jaxpr(grad)(outputs).jaxpr))


def test_only_one_chunk_of_either_vocabulary_exists():
    outputs, frozen, options, weights = every_case(size_x=20)

    def widest(chunk_rows):
        cut = dataclasses.replace(options, chunk_rows=chunk_rows)
        shapes = {
            var.aval.shape
            for eqn in traced(outputs, frozen, cut, weights)
            for var in eqn.outvars
        }
        wide = [s for s in shapes if len(s) == 2 and s[1] in (VOCAB, len(KEPT))]
        return max(rows for rows, _ in wide)

    assert widest(0) == 60
    assert widest(6) == 6


def test_plain_ce_does_no_teacher_work():
    outputs, frozen, options, _ = every_case()
    plain = outputs.replace(
        teacher_XMD=None, feature_XMD=None, confidence_XM=None, selector=None
    )

    def names(outputs, weights):
        return [e.primitive.name for e in traced(outputs, frozen, options, weights)]

    given, bare = names(outputs, {"ce": 1.0}), names(plain, {"ce": 1.0})
    assert given.count("dot_general") == bare.count("dot_general")
    assert "top_k" not in given
    assert names(outputs, {"l1": 1.0}).count("dot_general") > len(
        [n for n in given if n == "dot_general"]
    )
    assert "top_k" in names(outputs, {"selector": 1.0})


def test_sums_do_not_depend_on_how_the_blocks_are_cut():
    """1 x 8, 2 x 4 and 8 x 1: loss, every metric, every gradient."""
    outputs, frozen, options, weights = every_case(size_x=8)
    shared = ("head_DU", "correction_EU")

    def piece(index):
        def one(path, array):
            name = jax.tree_util.keystr(path)
            if any(word in name for word in (*shared, "successor", "anchors")):
                return array
            return array[index]

        return jax.tree_util.tree_map_with_path(one, outputs)

    (_, (want_sums, want_metrics)), (want, _) = run(outputs, frozen, options, weights)
    for count in (2, 8):
        size = 8 // count
        parts = [
            run(piece(slice(i * size, (i + 1) * size)), frozen, options, weights)
            for i in range(count)
        ]
        added = jax.tree.map(
            lambda *each: sum(np.asarray(x, np.float64) for x in each),
            *[p[0][1] for p in parts],
        )
        assert_same(added, (want_sums, want_metrics), 2e-5)
        for name in shared:
            total = sum(np.asarray(getattr(p[1][0], name)) for p in parts)
            np.testing.assert_allclose(total, getattr(want, name), atol=1e-5)
        total = sum(np.asarray(p[1][0].selector.successor_UE) for p in parts)
        np.testing.assert_allclose(total, want.selector.successor_UE, atol=1e-5)
        rows = np.concatenate([p[1][0].hidden_XMD for p in parts])
        np.testing.assert_allclose(rows, want.hidden_XMD, atol=1e-5)


def test_nothing_supervised_is_zero_and_finite():
    outputs, frozen, options, weights = every_case()
    outputs = with_rows(
        outputs.replace(valid_XM=np.zeros_like(outputs.valid_XM)), np.nan
    )
    (value, (sums, metrics)), (grads, _) = run(outputs, frozen, options, weights)
    assert value == 0 and sums.denominator == 0 and sums.mean() == 0
    for pair in metrics.values():
        assert not np.asarray(pair[0]).any() and not np.asarray(pair[1]).any()
    for leaf in jax.tree.leaves(grads):
        assert leaf.dtype == jax.dtypes.float0 or not np.asarray(leaf).any()


# ---- Precision.


def near_law(overlap, size_u, seed=0):
    """Logits of p and q, float32, with that overlap."""
    rng = np.random.default_rng(seed)
    p = rng.normal(size=size_u) * 2
    noise = rng.normal(size=size_u)
    law = lambda z: np.exp(oracles.log_softmax(z))
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        shared = np.minimum(law(p), law(p + middle * noise)).sum()
        low, high = (middle, high) if shared > overlap else (low, middle)
    return (p + 15.0).astype("f4"), (p + low * noise + 20.0).astype("f4")


@pytest.mark.parametrize("term", ["soft_ce", "l1", "alpha", "lambda", "tv"])
@pytest.mark.parametrize("overlap", [0.5, 0.9, 0.99])
def test_gradients_hold_as_the_drafter_gets_good(term, overlap):
    """Cancellation near p = q must not reach the gradient: error below 1e-3."""
    size_u = 2000
    p_logits, q_logits = near_law(overlap, size_u)
    logp, logq = oracles.log_softmax(p_logits), oracles.log_softmax(q_logits)
    p, q = np.exp(logp), np.exp(logq)
    below = (q < p).astype(np.float64)
    accept = np.minimum(p, q).sum()
    assert abs(accept - overlap) < 1e-3
    accept_slope = q * (below - (below * q).sum())
    sign = np.sign(q - p)
    mix = 0.7 * np.exp(-2.0 * accept)
    want = {
        "soft_ce": q - p,
        "l1": q * (sign - (sign * q).sum()),
        "alpha": -accept_slope / accept,
        "tv": -accept_slope,
        "lambda": mix * (q - p) - (1 - mix) * accept_slope,
    }[term]
    kind = term if term in ("alpha", "lambda", "tv") else "alpha"
    options = ObjectiveOptions(lk_kind=kind, kl_scale=0.7, kl_decay=2.0)
    outputs = TrainOutputs(
        q_logits[None, None],
        np.zeros((1, 1), np.int32),
        np.ones((1, 1), "f4"),
        np.zeros((1, 1), np.int32),
        teacher_XMD=p_logits[None, None],
    )
    frozen = Frozen(np.zeros((1, 1), "f4"), np.eye(size_u, dtype="f4"))
    name = term if term in ("soft_ce", "l1") else "lk"
    _, (grads, _) = run(outputs, frozen, options, {name: 1.0})
    error = np.linalg.norm(np.ravel(grads.hidden_XMD) - want) / np.linalg.norm(want)
    assert error < 1e-3, error


# ---- The confidence.


def test_the_confidence_moves_itself_alone():
    case, v = problem(("confidence", "correction"))
    options = ObjectiveOptions()
    outputs, frozen = records(case, v, options)
    _, (grads, _) = run(outputs, frozen, options, {"confidence": 1.0})
    assert np.asarray(grads.confidence_XM).any()
    for leaf in (grads.hidden_XMD, grads.correction_XME, grads.correction_EU):
        assert not np.asarray(leaf).any()


def test_calibration_is_the_error_of_the_whole_data():
    """Bins summed over batches give what raw values of all of them give."""
    options, total, raw = ObjectiveOptions(), {}, []
    for seed in range(3):
        case, v = problem(("confidence",), seed=seed, size_x=4)
        outputs, frozen = records(case, v, options)
        (_, (_, metrics)), _ = run(outputs, frozen, options, {"confidence": 1.0})
        total = train_metrics.add(total, train_metrics.to_host(metrics))
        q = np.exp(oracles.log_softmax(v["hidden"] @ case["frozen_head"]))
        p = np.exp(oracles.log_softmax(case["teacher"] @ case["frozen_head"]))
        overlap = np.minimum(p, q).sum(-1)
        raw.append((1 / (1 + np.exp(-v["confidence"])), overlap, case["valid"] > 0))
    means = train_metrics.means(total)
    got = ece_of_metrics(means)
    values, accepts, valid = (np.concatenate(part) for part in zip(*raw, strict=True))
    for j in range(3):
        keep = valid[:, j]
        want = ece.ece(values[keep, j], accepts[keep, j], NUM_BINS)
        np.testing.assert_allclose(got[j], want, atol=1e-5)
        assert want > 0.01
    assert ece_of_metrics({"loss": 1.0}) is None
    with pytest.raises(ValueError, match="not calibration_share"):
        ece_of_metrics({k: v for k, v in means.items() if k != "calibration_share"})


# ---- The selector.


def ties(size_k=3, labels=(0, 2, 3, 9)):
    """Four rows of equal logits; the candidates are columns 0 .. K - 1."""
    outputs = TrainOutputs(
        np.zeros((1, 4, 4), "f4"),
        np.array([labels], np.int32),
        np.ones((1, 4), "f4"),
        np.zeros((1, 1), np.int32),
        selector=Selector(
            np.ones((1, 4, 1), "f4"), np.arange(VOCAB, dtype="f4")[:, None], size_k
        ),
    )
    return outputs, Frozen(np.zeros((VOCAB, 4), "f4"), np.ones((4, VOCAB), "f4"))


def test_labels_outside_the_candidates_leave_the_numerator_only():
    """Candidates of equal rows: the lower column first."""
    outputs, frozen = ties()
    (_, (sums, metrics)), (grads, _) = run(
        outputs, frozen, ObjectiveOptions(), {"selector": 1.0}
    )
    scores = oracles.log_softmax([0.0, 1.0, 2.0])
    np.testing.assert_allclose(sums.numerator, -scores[0] - scores[2], rtol=1e-6)
    assert sums.denominator == 4
    assert [float(x) for x in metrics["selector_coverage"]] == [2, 4]
    assert [float(x) for x in metrics["selector_accuracy"]] == [1, 2]
    moved = np.abs(np.asarray(grads.selector.query_XME))[0, :, 0] > 0
    np.testing.assert_array_equal(moved, [True, True, False, False])
    assert not np.asarray(grads.selector.successor_UE)[3:].any()


def test_the_walk_goes_on_while_candidates_are_right():
    outputs, frozen = ties(labels=(2, 2, 9, 2))
    (_, (_, metrics)), _ = run(outputs, frozen, ObjectiveOptions(), DFLASH2)
    assert [float(x) for x in metrics["walk_accept_length"]] == [3, 1]
    assert [float(x) for x in metrics["accept_length"]] == [1, 1]


@pytest.mark.parametrize("stop", [False, True])
def test_the_selector_can_be_trained_alone(stop):
    case, v = problem(("selector", "correction"))
    options = ObjectiveOptions(selector_stop_gradient=stop)
    outputs, frozen = records(case, v, options)
    _, (grads, _) = run(outputs, frozen, options, {"selector": 1.0})
    assert np.asarray(grads.selector.successor_UE).any()
    for leaf in (grads.hidden_XMD, grads.correction_EU, grads.selector.query_XME):
        assert np.asarray(leaf).any() != stop
    if stop:
        assert np.asarray(grads.selector.detached_query_XME).any()


@pytest.mark.parametrize(
    ("warmup", "length", "progress", "want"),
    [
        (0.2, 0.4, 0.1, 0.0),
        (0.2, 0.4, 0.3, 0.25),
        (0.2, 0.4, 0.9, 1.0),
        (0.2, 0.0, 0.19, 0.0),
        (0.2, 0.0, 0.2, 1.0),
        (0.0, 0.5, 0.25, 0.5),
    ],
)
def test_the_selector_warms_up(warmup, length, progress, want):
    case, v = problem(("selector",))
    options = ObjectiveOptions(selector_warmup=warmup, selector_ramp=length)
    outputs, frozen = records(case, v, options)
    terms = tuple(DFLASH2.items())
    sums, metrics = loss(outputs, frozen, options, terms, jnp.float32(progress))
    o = oracle_options(options)
    numerator, _, named = term_oracles.everything(case, o, DFLASH2, v, ramp=want)
    np.testing.assert_allclose(sums.numerator, numerator, rtol=2e-5)
    np.testing.assert_allclose(
        metrics["selector_loss"], named["selector_loss"], rtol=2e-5
    )


# ---- Options and refusals.


def test_options_go_before_the_drafters_weights():
    outputs, frozen, options, weights = every_case()
    own = tuple(weights.items())
    changed = dataclasses.replace(options, l1=0.0, soft_ce=2.0)
    as_written = weights | {"soft_ce": 2.0}
    del as_written["l1"]
    got, metrics = loss(outputs, frozen, changed, own)
    want, _ = loss(outputs, frozen, options, tuple(as_written.items()))
    np.testing.assert_allclose(got.numerator, want.numerator, rtol=1e-6)
    assert "l1_loss" not in metrics and "soft_ce_loss" in metrics
    parts = sum(w * metrics[f"{t}_loss"][0] for t, w in as_written.items())
    np.testing.assert_allclose(parts, metrics["loss"][0], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "kl"}, "objective.kind='kl'"),
        ({"lk_kind": "beta"}, "objective.lk_kind='beta'"),
        ({"teacher_mass": "half"}, "objective.teacher_mass='half'"),
        ({"teacher_rows": "some"}, "objective.teacher_rows='some'"),
        (
            {"teacher_mass": "full", "teacher_rows": "label"},
            "teacher_rows='label' has no place beside objective.teacher_mass='full'",
        ),
        ({"l1": -1.0}, "objective.l1=-1.0"),
        ({"ce": float("nan")}, "objective.ce=nan"),
        ({"selector_warmup": 1.5}, "selector_warmup=1.5"),
        ({"selector_warmup": 0.6, "selector_ramp": 0.5}, "more than the whole"),
    ],
)
def test_bad_options_are_named(changes, says):
    with pytest.raises(UserError, match=says):
        ObjectiveOptions(**changes)


@pytest.mark.parametrize(
    ("changes", "terms", "says"),
    [
        ({}, {"mse": 1.0}, "drafter.terms names 'mse'"),
        ({"ce": 0.0}, {"ce": 1.0}, "every loss term off"),
        ({"kind": "lk_tv"}, {"l1": 1.0}, "shapes the term ce, which is off"),
        ({"l1": 0.9}, {"ce": 1.0}, "objective.l1=0.9 needs teacher_XMD.*l1=0"),
        ({"smooth_l1": 1.0}, {"ce": 1.0}, "smooth_l1=1.0 needs feature_XMD"),
        ({"confidence": 1.0}, {"ce": 1.0}, "confidence=1.0 needs confidence_XM"),
        ({"selector": 1.0}, {"ce": 1.0}, "selector=1.0 needs selector"),
    ],
)
def test_a_term_without_its_inputs_is_refused(changes, terms, says):
    case, v = problem()
    outputs, frozen = records(case, v, ObjectiveOptions())
    outputs = outputs.replace(teacher_XMD=None)
    with pytest.raises(UserError, match=says):
        loss(outputs, frozen, ObjectiveOptions(**changes), tuple(terms.items()))


def test_what_does_not_fit_is_refused():
    case, v = problem(("selector", "correction"), True)
    options = ObjectiveOptions(teacher_mass="full")
    outputs, frozen = records(case, v, options)
    bare = frozen.replace(full_head_DV=None)
    for asked, says in ((options, "teacher_mass='full'"), (None, "teacher_rows='argm")):
        with pytest.raises(UserError, match=f"{says}.*full_head_DV is None"):
            loss(outputs, bare, asked or ObjectiveOptions(), (("l1", 1.0),))
    by_label = ObjectiveOptions(teacher_rows="label")
    assert loss(outputs, bare, by_label, (("l1", 1.0),))[0].denominator > 0
    wide = outputs.replace(selector=outputs.selector.replace(size_k=8))
    with pytest.raises(UserError, match="size_k=8 candidates of 7"):
        loss(wide, frozen, options, (("selector", 1.0),))
    alone = dataclasses.replace(options, selector_stop_gradient=True)
    with pytest.raises(UserError, match="detached_query_XME"):
        loss(outputs, frozen, alone, (("selector", 1.0),))
    ramped = dataclasses.replace(options, selector_ramp=0.5)
    with pytest.raises(UserError, match="selector_ramp=0.5 needs the progress"):
        loss(outputs, frozen, ramped, (("selector", 1.0),))
    with pytest.raises(ValueError, match="belong together"):
        loss(outputs.replace(correction_EU=None), frozen, options)
