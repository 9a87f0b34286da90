"""A plan does not bias: it never reads a drawn draft that it could cut.

By enumeration of every draft of V = 3, M = 3 beside a neighbour whose survival
competes for the budget: whether draft j is verified is a function of the drafts
before it, and the law of the round's tokens is exactly p. The temptations must be
caught: ties that go to the later position, a confidence that reads its own token,
and random streams folded by position under a lagged budget.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.calibration import AdditiveCost, CostTable
from spec_jax.core.proposal import Proposal, prob_of
from spec_jax.core.verify_layout import Ladder
from spec_jax.decode import budget, plan
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.state import empty_slots
from spec_jax.sampling import transform
from tests.laws import test_accept_law as exact
from tests.laws import test_round_keys as rounds
from tests.support.enumeration import row_of

V, M = exact.V, exact.M
DRAFTS = list(itertools.product(range(V), repeat=M))
SETTING = (False, 1.0, 0, 1.0, 0.0)
# Confidence as it is; and so sharp that it saturates, which makes ties.
SHARP = (1.0, 0.01, 0.01)
OPTIONS = {
    "free": PlanOptions(mode="compact"),
    "sharp": PlanOptions(mode="compact", temperatures=SHARP),
    "least": PlanOptions(mode="compact", min_verify_len=2),
    "most": PlanOptions(mode="compact", max_verify_len=3, temperatures=SHARP),
    "eps": PlanOptions(mode="compact", survival_eps=0.3, temperatures=SHARP),
}
NEIGHBOURS = [(0.5, 0.4, 0.3), (0.6, 0.6, 0.6), (0.9, 0.2, 0.1)]


def proposal_of(q_table):
    """Every draft of the table drafter, one request each."""
    ids = jnp.asarray(DRAFTS, jnp.int32)
    rows = [[row_of(d[:j]) for j in range(M)] for d in DRAFTS]
    sampling = transform.all_greedy(len(DRAFTS))
    law = transform.law_of(
        q_table[jnp.asarray(rows)], sampling.replace(greedy_B=~sampling.greedy_B)
    )
    return Proposal(ids, ids, law, jnp.full((len(DRAFTS),), M))


def every_cut(q_table, options):
    """`verify_len` of each draft beside a neighbour, for every budget and neighbour.

    Returns:
      [budgets * neighbours, drafts].
    """
    slots = empty_slots(2, 1).replace(
        active_B=jnp.ones((2,), bool), speculate_B=jnp.ones((2,), bool)
    )
    survival = plan.survival(
        plan.confidence_logit(proposal_of(q_table)), options.temperatures
    )
    first = survival[0, 0]  # the same for every draft: nothing is before it

    def one(mine, other, count):
        # The neighbour, in the first slot, ties with the first draft.
        both = jnp.stack([other * first / other[0], mine])
        return plan.planned_window(slots, both, count, options)[1]

    others = jnp.repeat(jnp.asarray(NEIGHBOURS, jnp.float32), 2 * M, 0)
    counts = jnp.tile(jnp.arange(2 * M), len(NEIGHBOURS))
    each = jax.vmap(one, (0, None, None))
    return jax.vmap(each, (None, 0, 0))(survival, others, counts)


def all_cuts(seeds=range(4), names=tuple(OPTIONS)):
    """Pairs (seed, cut of every draft); traced anew each time."""
    for name in names:
        program = jax.jit(lambda q_table, o=OPTIONS[name]: every_cut(q_table, o))
        for seed in seeds:
            made = np.asarray(program(jnp.asarray(exact.tables(seed)[1])))
            yield from ((seed, cut) for cut in np.unique(made, axis=0))


def anticipations(cut_X):
    """(draft prefix, position) whose verification depends on later tokens."""
    found = set()
    for j in range(M):
        granted = {}
        for drafts, rows in zip(DRAFTS, np.asarray(cut_X).tolist(), strict=True):
            granted.setdefault(drafts[:j], set()).add(rows > j + 1)
        found |= {(prefix, j) for prefix, seen in granted.items() if len(seen) > 1}
    return found


def worst(monkeypatch, cut_X, seed):
    """Largest bias of the round's law under these cuts."""
    monkeypatch.setattr(exact, "cut_table", lambda name: jnp.asarray(cut_X))
    return exact.enumerate_law(monkeypatch, exact.PLAIN, "planned", seed=seed)[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_inclusion_depends_on_earlier_drafts_only(name):
    seen, ragged = set(), 0
    for seed, cut in all_cuts(names=(name,)):
        assert anticipations(cut) == set(), (seed, cut)
        seen |= set(cut.tolist())
        ragged += len(set(cut.tolist())) > 1
    assert seen == set(range(1, (3 if name == "most" else M + 1) + 1))
    assert ragged > 1


@pytest.mark.parametrize("name", OPTIONS)
def test_planned_rounds_have_the_targets_law(monkeypatch, name):
    done = 0
    for seed, cut in all_cuts((0, 2), (name,)):
        if len(set(cut.tolist())) > 1 and done < 4:
            done += 1
            assert worst(monkeypatch, cut, seed) < 1e-6
    assert done > 0


def later_position_first(survival_BM):
    """The mutant: ties go to the later position."""
    size_b, num_draft = survival_BM.shape
    flat_X = survival_BM.T[::-1].reshape(-1)
    order_X = jnp.argsort(-flat_X, stable=True)
    place_X = jnp.zeros_like(order_X).at[order_X].set(jnp.arange(order_X.size))
    return place_X.reshape(num_draft, size_b)[::-1].T


def own_token(proposal):
    """The mutant: log-odds of q(d_j) itself."""
    q_BM = prob_of(proposal.law, proposal.draft_ids_BM)
    return jnp.log(q_BM) - jnp.log1p(-q_BM)


MUTANTS = {"rank": later_position_first, "confidence_logit": own_token}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    """The plan reads what it cuts, and the law shows it."""
    monkeypatch.setattr(plan, name, MUTANTS[name])
    bias, caught = 0.0, 0
    for seed, cut in all_cuts(names=("free", "sharp")):
        if anticipations(cut):
            caught += 1
            if caught % 3 == 1 and caught < 12:
                with monkeypatch.context() as patch:
                    bias = max(bias, worst(patch, cut, seed))
    assert caught > 3
    assert bias > 0.02


LIVE = {0: 1}
GOOD, POOR = np.array([0.9, 0.8]), np.array([0.1, 0.05])


def lagged_terms(ladder=(1, 2, 3), plain=(), per_row=0.5):
    cost = AdditiveCost(1.0, (1,), (0.0,), (1, 2), (0.0, per_row))
    table = CostTable(cost, *plain)
    return budget.Terms(Ladder(((1, ladder),)), 2, PlanOptions(mode="compact"), table)


def by_survival(drafted):
    """Only where the unreached draft's survival is high is a row worth its time."""
    return budget.choose(lagged_terms(), 1, [GOOD if drafted else POOR])


def or_plainly(drafted):
    """Not drafting at all is a choice of the same survival."""
    terms = lagged_terms(plain=((1,), (1.0,)))
    choice = budget.choose(terms, 1, [GOOD if drafted else POOR])
    assert choice.draft == bool(drafted)
    return choice


def aligned(drafted):
    """One draft that is worth its time, and a program that has rows for two."""
    terms = lagged_terms((1, 3), per_row=0.2)
    survival = np.array([0.99 if drafted else 0.1, 0.0])
    free = budget.choose(terms, 1, [survival])
    assert free.budget == (1 if drafted else 0)
    terms = dataclasses.replace(terms, align_rows=True)
    return budget.choose(terms, 1, [survival])


def by_feedback(drafted):
    """The same survival, after promises that were kept and that were not."""
    planner = budget.Planner(lagged_terms(), budget.BudgetOptions(feedback=True))
    tried = budget.Choice(True, rounds.M, 1, 3, promised=GOOD.sum(), planned=(0,))
    for _ in range(300):
        accepted = np.array([rounds.M if drafted else 0])
        planner.observe(tried, accepted, np.array([True]))
    planner.dispatched(0, LIVE, GOOD[None])
    return planner.decide(2, LIVE, {})


def by_others_mean(drafted):
    """A newcomer, planned with what the request before it had."""
    options = budget.BudgetOptions(newcomers=budget.MEAN)
    planner = budget.Planner(lagged_terms(), options)
    planner.dispatched(0, {0: 9}, (GOOD if drafted else POOR)[None])
    choice = planner.decide(2, LIVE, {})
    assert planner.counts.stale == 1
    return choice


@pytest.mark.parametrize(
    "choose", [by_survival, or_plainly, aligned, by_feedback, by_others_mean]
)
@pytest.mark.parametrize(
    ("fold", "biased"), [(rounds.by_round, False), (rounds.by_position, True)]
)
def test_a_lagged_budget_needs_keys_of_their_own(fold, biased, choose):
    """The host's K follows a draft that was not reached and is drawn again."""
    # What `two_rounds` grants: the anchor alone, or the whole window.
    assert [choose(token).budget for token in (0, 1)] == [0, rounds.M]
    count, share = rounds.two_rounds(fold)
    assert 3_500 < int(count) < 4_500
    assert (float(share) > 0.6) if biased else (abs(float(share) - 0.5) < 0.032)
