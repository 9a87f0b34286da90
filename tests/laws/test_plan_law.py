"""A plan does not bias: it never reads the draft it could cut.

By enumeration of every draft of V = 3, M = 3 beside a neighbour whose survival
competes for the budget: whether draft j is verified is a function of the drafts
before it, and the law of the round's tokens is exactly p. The temptations must be
caught: ties that go to the later position, a confidence that reads its own token,
and random streams folded by position under a lagged budget.
"""

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


def all_cuts(seeds=range(4)):
    """Pairs (seed, cut of every draft); traced anew each time."""
    for sharp in ((), SHARP):
        options = PlanOptions(mode="compact", temperatures=sharp)
        program = jax.jit(lambda q_table, o=options: every_cut(q_table, o))
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


def test_inclusion_depends_on_earlier_drafts_only():
    seen, ragged = set(), 0
    for seed, cut in all_cuts():
        assert anticipations(cut) == set(), (seed, cut)
        seen |= set(cut.tolist())
        ragged += len(set(cut.tolist())) > 1
    assert seen == set(range(1, M + 2))
    assert ragged > 10


def test_planned_rounds_have_the_targets_law(monkeypatch):
    done = 0
    for seed, cut in all_cuts((0, 2)):
        if len(set(cut.tolist())) > 1 and done < 8:
            done += 1
            assert worst(monkeypatch, cut, seed) < 1e-6
    assert done > 3


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
    for seed, cut in all_cuts():
        if anticipations(cut):
            caught += 1
            if caught % 3 == 1 and caught < 12:
                with monkeypatch.context() as patch:
                    bias = max(bias, worst(patch, cut, seed))
    assert caught > 3
    assert bias > 0.02


def lagged_budget(drafted):
    """K of the next round from the survival that an unreached draft decided.

    The third draft's confidence reads the second draft; only where it is high
    is another row worth its time.
    """
    table = CostTable(AdditiveCost(1.0, (1,), (0.0,), (1, 2), (0.0, 0.5)))
    terms = budget.Terms(
        Ladder(((1, (1, 2, 3)),)), 2, PlanOptions(mode="compact"), table
    )
    survival = np.array([0.9, 0.8]) if drafted else np.array([0.1, 0.05])
    return budget.choose(terms, 1, [survival]).budget


@pytest.mark.parametrize(
    ("fold", "biased"), [(rounds.by_round, False), (rounds.by_position, True)]
)
def test_a_lagged_budget_needs_keys_of_their_own(fold, biased):
    """The host's K follows a draft that was not reached and is drawn again."""
    # What `two_rounds` grants: the anchor alone, or the whole window.
    assert [lagged_budget(token) for token in (0, 1)] == [0, rounds.M]
    count, share = rounds.two_rounds(fold)
    assert 3_500 < int(count) < 4_500
    assert (float(share) > 0.6) if biased else (abs(float(share) - 0.5) < 0.032)
