"""The parts of the comparison that need no drafter."""

import ml_dtypes
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.evals import report, why
from spec_jax.evals.why import DIFFERS, OK, SKIPPED, Finding

RNG = np.random.default_rng(0)
PLANE = RNG.standard_normal((12, 16)).astype(np.float32)


def test_the_first_difference_is_said_and_later_ones_are_not_computed():
    def findings():
        yield Finding("contract", "a", OK, "1")
        yield Finding("template", "b", DIFFERS, "2 for 3")
        raise AssertionError("computed after the first difference")

    found = list(why.until_first(findings()))
    assert why.first_difference(found).item == "b"
    assert why.sentence(found) == "first difference: template, b: 2 for 3"
    assert why.sentence(found[:1]).startswith("training and serving agree")
    (table,) = report.tables({"checks": why.table(found)})
    assert table.header == ("", "result", "detail")
    assert table.rows[1] == ("template: b", "differs", "2 for 3")


def test_vocabulary_maps():
    kept = np.zeros(10, bool)
    kept[[1, 4, 6]] = True
    offsets = np.array([1, 3, 4])

    def finding(d2t, t2d, said=None):
        return why.vocabulary_finding(d2t, t2d, 10, said)

    assert finding(offsets, kept, 3).status == OK
    assert finding(None, None).status == SKIPPED
    for found, word in (
        (finding(None, None, 3), "no map"),
        (finding(offsets, None), "t2d is missing"),
        (finding(None, kept), "d2t is missing"),
        (finding(np.array([1, 4, 6]), kept), "offsets"),
        (finding(offsets + np.array([0, 1, 0]), kept), "from draft id 1 on"),
        (finding(offsets[:2], kept), "from draft id 2 on"),
        (finding(offsets, kept[:9]), "9 entries"),
        (finding(offsets, kept, 4), "draft_vocab_size is 4"),
    ):
        assert found.status == DIFFERS and word in found.detail


@pytest.mark.parametrize(
    "config, used, word",
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, 1e4, "1e+06"),
        ({"rope_theta": 1e4}, 1e6, "the drafter uses 1e+06"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, 1e4, "0.25"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, None, "'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, None, "0.5"),
    ],
)
def test_rope_keys_that_one_side_ignores(config, used, word):
    found = why.rope_finding(config, used)
    assert found.status == DIFFERS and word in found.detail


def test_rope_keys_that_agree():
    both = {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4}}
    assert why.rope_finding(both, 1e4).status == OK
    assert why.rope_finding({"rope_scaling": None}, None).status == SKIPPED


def finding(found, tolerance=3e-4, **others):
    return why.plane_finding("plane", found, PLANE, tolerance, others)


def test_planes_that_agree_up_to_reordered_sums():
    assert finding(PLANE * np.float32(1 + 1e-6)).status == OK
    half = PLANE.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert finding(half).status == DIFFERS
    assert finding(half, why.FEATURE_TOLERANCE["bfloat16"]).status == OK
    small = PLANE.astype(np.float16).astype(np.float32)
    assert finding(small, why.FEATURE_TOLERANCE["float16"]).status == OK


def test_the_cosine_is_blind_to_scale_and_the_ratio_is_not():
    gap = why.gap_of(PLANE * 50.6, PLANE)
    assert gap.cosine == pytest.approx(1) and gap.ratio == pytest.approx(50.6)
    assert "scaled" in finding(PLANE * 50.6).detail


@pytest.mark.parametrize(
    "found, word",
    [
        (np.zeros_like(PLANE), "all entries are 0"),
        (np.broadcast_to(PLANE[:1], PLANE.shape), "same features"),
        (np.roll(PLANE, 1, 0), "the row before"),
        (np.roll(PLANE, -1, 0), "the row after"),
        (PLANE.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), "rounded"),
        (np.where(np.arange(12)[:, None] == 5, np.nan, PLANE), "position 5"),
        (PLANE[::-1], "cosine"),
    ],
)
def test_what_a_wrong_plane_looks_like(found, word):
    made = finding(found)
    assert made.status == DIFFERS and word in made.detail


def test_a_plane_of_another_layer_is_recognised():
    other = RNG.standard_normal(PLANE.shape).astype(np.float32)
    assert "it is layer 3" in finding(other, **{"layer 3": other}).detail


def test_stored_rows_give_the_tokens_that_the_target_chose():
    logits = RNG.standard_normal((12, 9)).astype(np.float32)
    tokens = np.concatenate([[0], logits.argmax(-1)[:-1]])
    assert why.teacher_finding(logits, tokens, 4).status == OK
    # Before the final norm another token is best somewhere.
    scaled = logits * np.linspace(-1, 2, 9, dtype=np.float32)
    found = why.teacher_finding(scaled, tokens, 4)
    assert found.status == DIFFERS and "final norm" in found.detail
    assert why.teacher_finding(scaled, tokens, 11).status == SKIPPED


def test_templates():
    def findings(trained, served):
        made = why.template_findings(
            trained, served, lambda ids: " ".join(map(str, ids)), {1, 2}
        )
        return {f.item: f for f in made}

    same = findings([1, 5, 2], [1, 5, 2])
    assert {f.status for f in same.values()} == {OK}
    marks = findings([1, 5, 2], [5])
    assert marks["special tokens"].status == DIFFERS
    text = findings([1, 5, 2, 6], [1, 5, 2, 7])
    assert text["special tokens"].status == OK
    assert "from token 3 on" in text["token ids"].detail
    cut = findings([1, 5, 2, 6], [1, 5, 2])
    assert "from token 3 on" in cut["token ids"].detail


def weights(tensors=None, leaves=None, initial=None, dtype="float32"):
    first = np.ones(8, np.float32)
    rest = RNG.standard_normal((4, 8)).astype(np.float32)
    start = {"norm": first, "fc": rest}
    moved = {"norm": first + 0.01 * np.arange(1, 9), "fc": rest + 0.1}
    tensors = {"fc.weight": rest} if tensors is None else tensors
    leaves = moved if leaves is None else leaves(start, moved)
    made = why.weight_findings(tensors, leaves, initial or start, dtype)
    return {f.item: f for f in made}


def test_weights():
    assert {f.status for f in weights().values()} == {OK}
    bad = {"a": np.array([1.0, np.inf], np.float32)}
    assert "a: not finite" in weights(bad)["finite"].detail
    assert "float32, not bfloat16" in weights(dtype="bfloat16")["dtype"].detail
    still = weights(leaves=lambda start, moved: moved | {"norm": start["norm"]})
    assert "100% of the entries" in still["norms"].detail
    most = np.ones(8, np.float32)
    most[:2] = 1.1
    still = weights(leaves=lambda start, moved: moved | {"norm": most})
    assert "75% of the entries" in still["norms"].detail
    head = weights(leaves=lambda start, moved: moved | {"fc": start["fc"]})
    assert head["norms"].status == OK
    assert "fc: still as initialised" in head["initial values"].detail
    (nothing,) = weights(tensors={}).values()
    assert nothing.status == SKIPPED


def test_weights_that_were_rounded_at_export_are_recognised():
    start = {"head": RNG.standard_normal((4, 8)).astype(np.float32)}
    half = {k: w.astype(ml_dtypes.bfloat16) for k, w in start.items()}
    leaves = {k: w.astype(np.float32) for k, w in half.items()}
    made = list(why.weight_findings(half, leaves, start, "bfloat16"))
    assert made[-1].item == "initial values" and made[-1].status == DIFFERS


def test_slots_leave_out_what_is_no_candidate():
    served = np.array([[1.0, -np.inf], [2.0, 3.0]], np.float32)
    trained = np.array([[1.5, 9.0], [2.0, np.nan]], np.float32)
    assert why.slot_gaps(served, trained).tolist() == [0.5, np.inf]


def test_a_text_that_is_too_short():
    with pytest.raises(UserError, match="gives 5 rows, and the checks need 9; raise"):
        why.require_rows(5, 9, "the prompt")
