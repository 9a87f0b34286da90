"""Which drafts a budget buys: rank, ties, clamps, and where confidence is from."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import verify_layout
from spec_jax.core.errors import UserError
from spec_jax.core.proposal import Proposal, one_hot_law
from spec_jax.decode import plan
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.state import empty_slots
from spec_jax.sampling import transform

B, M = 3, 4
COMPACT = PlanOptions(mode="compact")


def oracle_rows(survival, budget, planned, options):
    """Verify rows by a sort of tuples, in plain Python."""
    size_b, num_draft = survival.shape
    least = min(options.min_verify_len, options.max_verify_len or num_draft + 1)
    most = min(options.max_verify_len or num_draft + 1, num_draft + 1)
    due, open_ = [], []
    for b, j in itertools.product(range(size_b), range(num_draft)):
        if planned[b] and j < least - 1:
            due.append((-9.0, j, b))
        elif planned[b] and j < most - 1 and survival[b, j] > options.survival_eps:
            open_.append((-float(survival[b, j]), j, b))
    granted = [0] * size_b
    for _, _, b in (sorted(due) + sorted(open_))[: max(budget, 0)]:
        granted[b] += 1
    return granted


def survivals(seed, ties):
    rng = np.random.default_rng(seed)
    confidence = rng.random((B, M)).astype(np.float32)
    if ties:
        confidence = np.where(rng.random((B, M)) < 0.6, 1.0, np.round(confidence, 1))
    return np.cumprod(confidence, 1, dtype=np.float32)


CLAMPS = [
    COMPACT,
    PlanOptions(mode="compact", min_verify_len=2),
    PlanOptions(mode="compact", max_verify_len=3),
    PlanOptions(mode="compact", min_verify_len=2, max_verify_len=4),
    PlanOptions(mode="compact", survival_eps=0.2),
]


@pytest.mark.parametrize("options", CLAMPS)
def test_admission_equals_a_sort(options):
    admit = jax.jit(plan.admit, static_argnums=3)
    cut = set()
    for seed, ties, budget in itertools.product(
        range(6), (False, True), range(B * M + 2)
    ):
        survival = survivals(seed, ties)
        planned = np.array([True, seed % 3 > 0, True])
        rows = np.asarray(admit(survival, budget, planned, options)).tolist()
        assert rows == oracle_rows(survival, budget, planned, options)
        assert sum(rows) <= budget
        cut.add(tuple(rows))
    assert len(cut) > 15


def test_ties_go_to_the_earlier_position_then_the_earlier_request():
    survival = jnp.asarray([[0.5, 0.5, 0.25, 0.25], [0.5, 0.5, 0.5, 0.5]])
    place = np.asarray(plan.rank(survival))
    assert place.tolist() == [[0, 2, 6, 7], [1, 3, 4, 5]]


def slots_of(**changes):
    return empty_slots(B, 1).replace(
        active_B=jnp.ones((B,), bool), speculate_B=jnp.ones((B,), bool), **changes
    )


def test_windows_of_their_own_are_outside_the_budget():
    survival = jnp.asarray(np.full((B, M), 0.5, np.float32))
    slots = slots_of(window_B=jnp.asarray([0, 5, 0], jnp.int32))
    slots = slots.replace(active_B=jnp.asarray([True, True, False]))
    rows = plan.planned_window(slots, survival, 3, COMPACT)
    assert rows.tolist() == [4, 5, 0]
    # Rows that do not fit are taken from the budget, never from a window.
    rows = plan.planned_window(slots, survival, 3, COMPACT, rows=8)
    assert rows.tolist() == [3, 5, 0]
    slots = slots_of().replace(speculate_B=jnp.asarray([True, False, True]))
    rows = plan.planned_window(slots, survival, 99, COMPACT)
    assert rows.tolist() == [M + 1, 1, M + 1]


def proposal_of(logits, confidence=None, greedy=False):
    sampling = transform.all_greedy(logits.shape[0])
    if not greedy:
        sampling = sampling.replace(greedy_B=~sampling.greedy_B)
    ids = jnp.zeros(logits.shape[:2], jnp.int32)
    law = transform.law_of(logits, sampling)
    usable = jnp.full(logits.shape[:1], logits.shape[1], jnp.int32)
    return Proposal(ids, ids, law, usable, confidence)


@pytest.mark.parametrize("greedy", [True, False])
def test_confidence_is_the_odds_of_the_likeliest_draft(greedy):
    """Of the untempered law, whatever the request's settings."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, M, 9)).astype(np.float32) * 3
    logits[0, 1, 3:] = -np.inf
    logits[1, 2] = [80.0, *[0.0] * 8]  # certain: odds beyond float32's 1 - q
    logits[1, 3, :2] = 50.0  # two maxima
    q = np.exp(logits.astype(np.float64))
    q = (q / q.sum(-1, keepdims=True)).max(-1)
    drafts = proposal_of(jnp.asarray(logits), greedy=greedy)
    got = np.asarray(plan.confidence_logit(drafts))
    rest = np.exp(logits[1, 2].astype(np.float64) - 80).sum() - 1
    q[1, 2] = 0.5
    want = np.log(q / (1 - q))
    want[1, 2] = 80 - np.log(8)
    assert rest < 1e-30
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    # The drafter's own estimate goes first.
    own = jnp.asarray(rng.normal(size=(2, M)), jnp.float32)
    got = plan.confidence_logit(proposal_of(jnp.asarray(logits), own, greedy))
    assert (got == own).all()


def test_survival_is_calibrated_and_survives_nan():
    logit = jnp.asarray([[0.0, 2.0, -1.0], [1.0, jnp.nan, 3.0], [jnp.inf, 0.0, 0.0]])
    got = np.asarray(plan.survival(logit, (1.0, 2.0, 0.5)))
    one, two = 1 / (1 + np.exp([-1.0, 2.0]))
    want = np.cumprod([[0.5, one, two], [one, 0, 1], [1.0, 0.5, 0.5]], 1)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    with pytest.raises(UserError, match="2 values.*3 drafts"):
        plan.survival(logit, (1.0, 2.0))
    # Each request by its own temperatures.
    own = np.array([[1.0, 2.0, 0.5], [2.0, 1.0, 1.0]], np.float32)
    got = np.asarray(plan.survival(logit[:2], (), own))
    for row, scale in enumerate(own):
        one = plan.survival(logit[:2], tuple(scale.tolist()))
        np.testing.assert_array_equal(got[row], np.asarray(one)[row])


def test_a_round_plans_each_request_by_its_own_temperatures():
    """Equal confidence, other temperatures: other survival, and other rows."""
    logits = jnp.zeros((2, M, 5)).at[..., 1].set(2.0)
    own = jnp.full((2, M), 2.0, jnp.float32)
    proposal = proposal_of(logits, own)
    sts = np.array([[0.5] * M, [5.0] * M], np.float32)
    slots = empty_slots(2, 1, num_sts=M).replace(
        active_B=jnp.ones(2, bool), speculate_B=jnp.ones(2, bool)
    )
    assert slots.sts_BM.shape == (2, M)
    regimes = (("greedy", (1.0,) * M), ("temperature=1", (2.0,) * M))
    options = PlanOptions(mode="compact", by_regime=regimes)
    budget = jnp.asarray(M, jnp.int32)
    alike, _ = plan.windows(slots, proposal, options, budget)
    lengths, seen = plan.windows(
        slots.replace(sts_BM=jnp.asarray(sts)), proposal, options, budget
    )
    want = np.cumprod(1 / (1 + np.exp(-2.0 / sts)), 1)
    np.testing.assert_allclose(np.asarray(seen.survival_BM), want, rtol=1e-6)
    # The first request's drafts are the surer ones to be reached.
    assert lengths[0] > alike[0] and lengths[1] < alike[1]
    assert lengths.sum() == alike.sum() == 2 + M


def test_temperatures_of_regimes_are_whole_and_named_once():
    one, two = ("greedy", (1.0, 2.0)), ("temperature=1", (3.0, 4.0))
    made = PlanOptions(by_regime=(one, two))
    assert made.num_own == 2
    assert made.temperatures_of("temperature=1") == (3.0, 4.0)
    assert made.temperatures_of("else") == (1.0, 1.0)
    for wrong in ((one, one), (one, ("else", ())), (("else", ()), one)):
        with pytest.raises(UserError, match="one non-empty list for each"):
            PlanOptions(by_regime=wrong)
    with pytest.raises(UserError, match=r"differ in length, \[2, 1\]"):
        PlanOptions(by_regime=(one, ("else", (1.0,))))


def test_options_are_refused_as_the_recipe_spells_them():
    for field, value in [
        ("survival_eps", 1.0),
        ("min_verify_len", 0),
        ("max_verify_len", 1),
    ]:
        options = {"min_verify_len": 2, field: value}
        with pytest.raises(UserError, match=rf"^plan\.{field}={value}"):
            PlanOptions(mode="compact", **options)
    with pytest.raises(UserError, match="^mode='packed'"):
        PlanOptions(mode="packed")


def test_what_cannot_be_planned_is_refused():
    tokens = jnp.zeros((1, M), jnp.int32)
    lookup = Proposal(tokens, tokens, one_hot_law(tokens), jnp.full((1,), M))
    with pytest.raises(UserError, match=r"^mode must be.*not drawn from a law"):
        plan.windows(empty_slots(1, 1), lookup, COMPACT, 3)
    tree = lookup.replace(parents_BW=jnp.arange(M + 1)[None] - 1)
    with pytest.raises(UserError, match=r"^mode must be.*tree"):
        plan.windows(empty_slots(1, 1), tree, COMPACT, 3)
    rows, seen = plan.windows(empty_slots(1, 1), tree, PlanOptions())
    assert rows.tolist() == [1] and seen.survival_BM is None
    for bad in (
        {"mode": "ragged"},
        {"survival_eps": 1.0},
        {"min_verify_len": 0},
        {"min_verify_len": 3, "max_verify_len": 2},
        {"temperatures": (1.0, 0.0)},
    ):
        with pytest.raises(UserError):
            PlanOptions(**bad)


def test_packing_round_trip_of_every_layout():
    """Every combination of lengths fits, comes back, and padding is nobody's."""
    window, size_b = 3, 3
    pack = jax.jit(verify_layout.pack, static_argnums=(1, 2))
    to_rows = jax.jit(lambda p, x: verify_layout.packed(p, x, jnp.nan))
    to_windows = jax.jit(lambda p, x: verify_layout.unpacked(p, x, -1.0))
    for lengths in itertools.product(range(window + 1), repeat=size_b):
        total = sum(lengths)
        for rows in sorted({r for r in (1, 4, 9) if r >= total})[:2]:
            p = pack(jnp.asarray(lengths), window, rows)
            want = [(b, w) for b in range(size_b) for w in range(lengths[b])]
            got = list(zip(p.request_T.tolist(), p.row_T.tolist(), strict=True))
            assert got[:total] == want
            assert got[total:] == [(size_b, 0)] * (rows - total)
            values = jnp.arange(size_b * window * 2.0).reshape(size_b, window, 2)
            flat = to_rows(p, values)
            assert flat.shape == (rows, 2) and jnp.isnan(flat[total:]).all()
            back = np.asarray(to_windows(p, flat))
            inside = np.arange(window)[None] < np.asarray(lengths)[:, None]
            want_back = np.where(inside[..., None], np.asarray(values), -1)
            np.testing.assert_array_equal(back, want_back)


def test_ladders():
    ladder = verify_layout.even_ladder((1, 4), 4, 3)
    assert ladder.buckets == ((1, (1, 2, 3, 4)), (4, (4, 8, 12, 16)))
    assert ladder.check(4, 4) is ladder
    assert [ladder.requests(n) for n in (1, 2, 4)] == [1, 4, 4]
    assert [ladder.rows(4, n) for n in (4, 5, 9, 16)] == [4, 8, 12, 16]
    with pytest.raises(UserError, match="4 slots"):
        ladder.check(8, 4)
    with pytest.raises(UserError, match="full window of 5"):
        ladder.check(4, 5)
    for bad in (((2, (2,)), (1, (1,))), ((2, (1, 4)),), ((2, (4, 4)),), ()):
        with pytest.raises(UserError, match=r"serve\.ladder"):
            verify_layout.Ladder(bad)
