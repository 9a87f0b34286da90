"""The host's choice of K and program, the relay, and the two cold starts."""

import itertools

import numpy as np
import pytest

from spec_jax.core.calibration import AdditiveCost, CostTable, FlatCost
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder, even_ladder
from spec_jax.decode.budget import (
    OLDEST_LAGS,
    BudgetOptions,
    Choice,
    Planner,
    Terms,
    choose,
)
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.relay import Relay

M = 3
LADDER = Ladder(((2, (2, 4, 6, 8)), (4, (4, 6, 8, 12, 16))))
PLAN = PlanOptions(mode="compact")
LINEAR = CostTable(AdditiveCost(1.0, (1, 4), (0.0, 0.3), (2, 16), (0.0, 1.4)))
# Steps: cheap up to 5 rows, dear up to 8, and nearly flat from there.
STEPPED = CostTable(FlatCost((1, 6, 9), (1.0, 1 / 2.6, 1 / 2.7), 16))


def oracle(terms, requests, history, stop=True, fixed=0, fixed_rows=0):
    """Every K by loops, float64."""
    plan = terms.plan
    most = min(plan.max_verify_len or M + 1, M + 1)
    least = plan.min_verify_len
    rows = [[1.0] * M if h is None else [float(x) for x in h] for h in history]
    paid = sum(sum(r[: least - 1]) for r in rows)
    values = sorted(
        (x for r in rows for x in r[least - 1 : most - 1] if x >= plan.survival_eps),
        reverse=True,
    )
    best, found = -1.0, None
    plain = terms.table.plain_time(requests)
    if stop and plain is not None:
        best, found = (len(rows) + fixed) / plain, (False, 0, requests)
    for extra in range(len(values) + 1):
        k = extra + len(rows) * (least - 1)
        need = len(rows) + fixed_rows + k
        t = min(t for t in dict(terms.ladder.buckets)[requests] if t >= need)
        tokens = len(rows) + fixed + paid + sum(values[:extra])
        rate = tokens / terms.table.round_time(requests, t)
        if rate > best + 1e-12:
            best, found = rate, (True, k, t)
    return found


TABLES = [LINEAR, STEPPED, CostTable(LINEAR.cost, (1, 4), (0.7, 1.1))]
PLANS = [
    PLAN,
    PlanOptions(mode="compact", min_verify_len=2),
    PlanOptions(mode="compact", max_verify_len=3, survival_eps=0.05),
]


@pytest.mark.parametrize(("table", "plan"), itertools.product(TABLES, PLANS))
def test_choice_equals_a_search_over_every_budget(table, plan):
    terms = Terms(LADDER, M, plan, table)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        count = int(rng.integers(1, 5))
        history = [
            None
            if rng.random() < 0.2
            else np.cumprod(rng.random(M) ** rng.choice([1, 4]))
            for _ in range(count)
        ]
        requests = LADDER.requests(count)
        got = choose(terms, requests, history)
        want = oracle(terms, requests, history)
        assert (got.draft, got.budget, got.rows) == want
        assert got.requests == requests
        if got.draft:
            assert got.seconds == table.round_time(requests, got.rows)
        else:
            assert got.seconds == table.plain_time(requests)
        seen.add(want)
    assert len(seen) > 3


def test_the_global_maximum_wins_over_the_first_one():
    """A dear step, then flat time: no local search gets past it."""
    history = [np.full(M, 0.9)] * 4
    rates = []
    for k in range(13):
        t = min(t for t in (4, 6, 8, 12, 16) if t >= 4 + k)
        rates.append((4 + 0.9 * k) / STEPPED.round_time(4, t))
    assert rates[0] > rates[1] and max(rates) == rates[12] > rates[0]
    got = choose(Terms(LADDER, M, PLAN, STEPPED), 4, history)
    assert (got.budget, got.rows) == (12, 16)


def test_ties_take_the_smaller_budget():
    flat = CostTable(FlatCost((1,), (1.0,), 16))
    # Nothing above eps: every K buys nothing.
    got = choose(Terms(LADDER, M, PLAN, flat), 2, [np.zeros(M)] * 2)
    assert (got.draft, got.budget) == (True, 0)
    same = CostTable(flat.cost, (1,), (1.0,))
    assert not choose(Terms(LADDER, M, PLAN, same), 2, [np.zeros(M)] * 2).draft


def test_alignment_fills_the_program():
    history = [np.array([0.9, 0.01, 0.001]), np.array([0.9, 0.9, 0.9])]
    slow = CostTable(AdditiveCost(1.0, (1,), (0.0,), (2, 8), (0.0, 3.0)))
    ladder = Ladder(((2, (5, 8)),))
    free = choose(Terms(ladder, M, PLAN, slow), 2, history)
    aligned = choose(Terms(ladder, M, PLAN, slow, align_rows=True), 2, history)
    assert free.rows == aligned.rows == 5
    assert free.budget == aligned.budget == 3
    few = [np.array([0.9, 0.0, 0.0]), np.array([0.9, 0.0, 0.0])]
    assert choose(Terms(ladder, M, PLAN, slow), 2, few).budget == 2
    assert choose(Terms(ladder, M, PLAN, slow, align_rows=True), 2, few).budget == 3


def test_no_table_verifies_everything():
    got = choose(Terms(LADDER, M, PLAN), 4, [np.zeros(M)] * 3)
    assert got == Choice(True, 9, 4, 12)
    clamped = PlanOptions(mode="compact", max_verify_len=2)
    assert choose(Terms(LADDER, M, clamped), 4, [np.zeros(M)] * 3).budget == 3


def test_windows_of_their_own_need_rows_but_no_budget():
    terms = Terms(LADDER, M, PLAN, LINEAR)
    history = [np.array([0.8, 0.5, 0.1])] * 2
    got = choose(terms, 4, history, fixed=2, fixed_rows=8)
    want = oracle(terms, 4, history, fixed=2, fixed_rows=8)
    assert (got.draft, got.budget, got.rows) == want
    assert got.rows >= 10


def planner_of(table=LINEAR, **changes):
    return Planner(Terms(LADDER, M, PLAN, table), BudgetOptions(**changes))


def test_relay_keeps_the_lag_and_the_ring():
    relay = Relay(2)
    for n in range(6):
        history, late = relay.read(n)
        assert not late
        assert (history is None) == (n < 2)
        if history is not None:
            assert history.round_index == n - 2
            assert history.survival_RM[0, 0] == n - 2
        relay.push(n, np.full((1, M), n, np.float32), {0: 7})
    # Round 6 drafted nothing: nothing to plan round 8 with.
    assert relay.read(7)[0].round_index == 5
    assert relay.read(8) == (None, False)
    with pytest.raises(UserError, match=r"^plan\.lag=0"):
        Relay(0)


def test_late_entries_give_no_budget_and_are_counted(monkeypatch):
    import jax

    planner = planner_of()
    arrays = [jax.numpy.full((2, M), 0.01) for _ in range(4)]
    live = {0: 1, 1: 2}
    full = 2 * M
    assert planner.decide(0, live, {}).budget == full  # no relay yet
    planner.dispatched(0, live, arrays[0])
    assert planner.decide(1, live, {}).budget == full
    planner.dispatched(1, live, arrays[1])
    assert planner.decide(2, live, {}).budget < full
    planner.dispatched(2, live, arrays[2])
    monkeypatch.setattr(type(arrays[0]), "is_ready", lambda self: False)
    assert planner.decide(3, live, {}).budget == full
    assert planner.counts.not_ready == 1 and planner.counts.no_budget == 2
    waiting = planner_of(wait=True)
    waiting.dispatched(0, live, arrays[0])
    assert waiting.decide(2, live, {}).budget < full
    assert waiting.counts.not_ready == 0


def test_a_new_request_counts_one_beside_known_neighbours():
    planner = planner_of()
    planner.dispatched(0, {0: 1, 1: 2}, np.full((2, M), 1e-9))
    kept = planner.decide(2, {0: 1, 1: 2}, {})
    assert kept.budget == 0
    fresh = planner_of()
    fresh.dispatched(0, {0: 1, 1: 2}, np.full((2, M), 1e-9))
    renewed = fresh.decide(2, {0: 1, 1: 3}, {})
    want = choose(fresh.terms, 2, [np.full(M, 1e-9), None])
    assert renewed == want and renewed.budget == M
    assert (fresh.counts.stale, fresh.counts.slots) == (1, 2)
    # A slot that no program of that round covered.
    assert fresh.decide(2, {0: 1, 3: 9}, {}).requests == 4


def test_a_newcomer_counts_the_mean_where_that_is_asked_for():
    """Beside neighbours with poor drafts one request does not raise the budget."""
    poor, live = np.full((2, M), 0.02), {0: 1, 1: 2}
    budgets = {}
    for newcomers in ("optimistic", "mean"):
        planner = planner_of(may_stop=False, newcomers=newcomers)
        for n in range(3):
            planner.decide(n, live, {})
            planner.dispatched(n, live, poor)
        budgets[newcomers] = planner.decide(3, {0: 1, 1: 3}, {}).budget
        assert planner.counts.stale == 1
    assert budgets["optimistic"] >= M and budgets["mean"] == 0
    # The mean follows what is seen, a tenth a round, over the slots that took part.
    planner = planner_of(newcomers="mean")
    for n, level in enumerate((0.2, 0.8)):
        survival = np.asarray([[level] * M, [9.0] * M])
        planner.dispatched(n, {0: 1}, survival)
        planner.decide(n + 2, {0: 1}, {})
    np.testing.assert_allclose(planner._mean_M, 0.2 + 0.1 * 0.6)
    # Known from before, it also plans the first rounds of a new batch.
    later = planner.decide(1000, {0: 7, 1: 8}, {})
    assert later == choose(planner.terms, 2, [None, None], newcomer_M=np.full(M, 0.26))
    assert planner.counts.no_budget == 1
    with pytest.raises(UserError, match=r"plan\.newcomers='eager'"):
        BudgetOptions(newcomers="eager")


@pytest.mark.parametrize(
    ("share", "least", "rounds"),
    [(0.0, 5, 5), (0.45, 1, 2), (0.06, 1, 12), (0.06, 15, 15)],
)
def test_looking_again_costs_a_share_of_the_plain_time(share, least, rounds):
    """Two rounds of T = R, each a third longer than the plain one."""
    cost = AdditiveCost(0.8, (2, 4), (0.0, 0.1), (2, 16), (0.0, 1.4))
    table = CostTable(cost, (2, 4), (0.6, 0.7))
    planner = planner_of(table, probe_every=least, probe_share=share)
    live, none = {0: 1, 1: 2}, np.full((2, M), 1e-9)
    drafts = []
    for n in range(60):
        choice = planner.decide(n, live, {})
        planner.dispatched(n, live, none if choice.draft else None)
        drafts.append(choice.draft)
    trace = "".join(".#"[draft] for draft in drafts)
    stops = [len(stop) for stop in trace.split("#") if stop]
    assert set(stops[:-1]) == {rounds}
    with pytest.raises(UserError, match=r"plan\.probe_share=2"):
        BudgetOptions(probe_share=2)


def test_a_fit_that_draws_anchors_for_less_than_plain_is_not_believed():
    """T = R drafts and verifies nothing: never faster than the plain program."""
    cheap = CostTable(LINEAR.cost, (1, 4), (9.0, 9.0))
    terms = Terms(LADDER, M, PLAN, cheap)
    hopeless = [np.full(M, 1e-3)] * 2
    assert not choose(terms, 2, hopeless).draft
    looked = choose(terms, 2, hopeless, may_stop=False)
    assert looked.draft and (looked.budget, looked.rows) == (0, 2)
    assert choose(terms, 2, [np.full(M, 0.9)] * 2).budget > 0


def test_feedback_scales_what_survival_promises():
    """Confident drafts that fail cost their budget; without feedback they do not."""
    live, sure = {0: 1, 1: 2}, np.full((2, M), 0.7)
    none, ran = np.zeros(2, np.int32), np.ones(2, bool)
    budgets = {}
    for feedback in (False, True):
        planner = planner_of(may_stop=False, feedback=feedback)
        for n in range(60):
            choice = planner.decide(n, live, {})
            budgets[feedback] = choice.budget
            planner.dispatched(n, live, sure)
            if n < 2:  # without a history nothing is promised, and nothing broken
                assert choice.promised is None
            elif not feedback:
                assert choice.promised == pytest.approx(2 * M * 0.7)
                assert choice.planned == (0, 1)
            planner.observe(choice, none, ran)
    assert budgets == {False: 2 * M, True: 0}
    assert 0.25 <= planner.kept < 0.6
    # Rounds that verify nothing teach nothing: in time drafts are tried again.
    for n in range(60, 300):
        choice = planner.decide(n, live, {})
        planner.dispatched(n, live, sure)
        if choice.budget:
            break
        planner.observe(choice, none, ran)
    assert choice.budget > 0
    assert n < 200
    # A request that did not run kept nothing; one with a window of its own, and a
    # round without drafts, promised nothing.
    planner = planner_of(feedback=True)
    tried = Choice(True, 4, 4, 8, promised=3.0, planned=(0, 2))
    for _ in range(2000):
        accepted, took_part = np.asarray([1, 2, 2, 9]), np.asarray([1, 1, 0, 1]) > 0
        planner.observe(tried, accepted, took_part)
        planner.observe(Choice(False, 0, 4, 4), accepted, took_part)
    np.testing.assert_allclose(planner.kept, 1 / 3, rtol=0.02)
    # With what `kept` is, the choice is that of survival so scaled.
    terms, history = planner.terms, [np.full(M, 0.8), np.full(M, 0.4)]
    scaled = choose(terms, 2, [0.5 * h for h in history])
    assert choose(terms, 2, history, kept=0.5) == scaled


def test_stopping_probes_again():
    """Hopeless drafts stop; every few rounds they run until news is back."""
    table = CostTable(LINEAR.cost, (1, 4), (0.6, 0.6))
    planner = planner_of(table, probe_every=4)
    live, trace = {0: 1, 1: 2}, []
    for n in range(24):
        choice = planner.decide(n, live, {})
        good = n >= 14  # drafts become perfect
        survival = np.full((2, M), 1.0 if good else 1e-9)
        planner.dispatched(n, live, survival if choice.draft else None)
        trace.append(choice.draft)
    # Two cold rounds; four without; probes until their own confidence is there.
    assert trace[:6] == [True, True, False, False, False, False]
    assert trace[6:9] == [True, True, False]
    assert sum(trace[2:14]) <= 5
    assert all(trace[-6:])
    assert planner.counts.probes >= 2
    never = planner_of(table, may_stop=False)
    never.dispatched(0, live, np.full((2, M), 1e-9))
    assert never.decide(2, live, {}).draft


def test_an_old_history_is_counted_and_then_forgotten():
    """Rounds that nobody drafts in leave none: what was known has a last day."""
    live, oldest = {0: 1, 1: 2}, OLDEST_LAGS * 2
    full = 2 * M
    for age in (3, oldest, oldest + 1, 10_000):
        planner = planner_of()
        planner.dispatched(0, live, np.full((2, M), 1e-9))
        assert planner.decide(2, live, {}).budget == 0
        assert planner.counts.aged == 0  # exactly the lag
        budget = planner.decide(age, live, {}).budget
        is_kept = age <= oldest
        assert budget == (0 if is_kept else full)
        assert planner.counts.aged == is_kept
        assert planner.counts.no_budget == (not is_kept)
        assert planner.counts.slots == (4 if is_kept else 2)
    # A longer lag ages more slowly.
    slow = planner_of(extra_lag=2)
    slow.dispatched(0, live, np.full((2, M), 1e-9))
    assert slow.decide(4, live, {}).budget == 0
    assert slow.decide(4 * OLDEST_LAGS, live, {}).budget == 0
    assert slow.decide(4 * OLDEST_LAGS + 1, live, {}).budget == full


def test_a_stop_holds_until_its_probe_is_back_and_no_longer():
    table = CostTable(LINEAR.cost, (1, 4), (0.6, 0.6))
    live, hopeless = {0: 1, 1: 2}, np.full((2, M), 1e-9)

    def stopped(probe_every=100):
        planner = planner_of(table, probe_every=probe_every)
        for n in range(3):
            choice = planner.decide(n, live, {})
            planner.dispatched(n, live, hopeless if choice.draft else None)
        assert not choice.draft
        return planner

    planner = stopped()
    drafted = [planner.decide(n, live, {}).draft for n in range(3, 102)]
    assert not any(drafted)  # long past `OLDEST_LAGS`, and no cold start
    assert planner.counts.no_budget == 2 and planner.counts.aged > 90
    assert planner.decide(102, live, {}).draft  # the probe
    assert planner.counts.no_budget == 2
    # Others decoded plainly for long in between: nothing is known any more.
    planner = stopped()
    assert planner.decide(100 + 2 * OLDEST_LAGS + 2, live, {}).budget == 2 * M
    assert planner.counts.no_budget == 3


def test_static_has_no_budget():
    terms = Terms(LADDER, M, PlanOptions(), LINEAR)
    planner = Planner(terms, BudgetOptions())
    planner.relay.push(0, np.zeros((2, M)), {0: 1})
    assert planner.decide(2, {0: 1, 2: 5}, {}).rows == 8
    assert planner.counts.slots == 0


def test_options_are_checked():
    for name in ("probe_every", "lag"):
        with pytest.raises(UserError, match=rf"^plan\.{name}=0"):
            BudgetOptions(**{name: 0})
    with pytest.raises(UserError, match=r"^plan\.extra_lag=-1"):
        BudgetOptions(extra_lag=-1)
    assert planner_of(extra_lag=2).relay.lag == 4
    assert even_ladder((2,), M + 1).buckets[0][1][-1] == 8
