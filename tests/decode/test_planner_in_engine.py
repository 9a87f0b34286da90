"""The host's planner in a running engine: what is late, and what is shared."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spec_jax.core.calibration import AdditiveCost, CostTable
from spec_jax.decode.budget import BudgetOptions, Planner
from spec_jax.decode.request import Settings
from tests.support import planned, tiny

M = planned.M
GREEDY = Settings(max_new_tokens=20)
# Rows cost much: a budget is worth making.
COST = CostTable(AdditiveCost(1e-3, (2, 4), (0.0, 1e-4), (4, 16), (0.0, 2e-3)))


@pytest.fixture
def replanned():
    """The shared `compact` engine with another planner."""
    engine = planned.engine("compact")
    planner, weights = engine.planner, engine.weights

    def give(**changes):
        options = BudgetOptions(may_stop=False, **changes)
        terms = dataclasses.replace(planner.terms, table=COST)
        engine.planner = Planner(terms, options)
        engine.trace.clear()
        return engine

    yield give
    engine.planner, engine.weights = planner, weights


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_only_a_lag_of_one_can_be_late(replanned, monkeypatch, lag):
    """On the slowest of devices: nothing is there before the engine reads it."""
    engine, read = replanned(lag=lag), set()
    fetch = engine.fetch

    def noted(tree):
        read.update(id(leaf) for leaf in jax.tree.leaves(tree))
        kept.append(tree)  # an id is an object's only while it lives
        return fetch(tree)

    kept = []
    monkeypatch.setattr(engine, "fetch", noted)
    kind = type(jnp.zeros(1))
    monkeypatch.setattr(kind, "is_ready", lambda self: id(self) in read)
    prompts = tiny.prompts_of(4, 23, seed=37)
    made = engine.generate(prompts, GREEDY)
    assert tiny.greedy_faults(tiny.world("bigram", M), made) == []
    counts, trace = engine.planner.counts, list(engine.trace)
    assert counts.decisions == len(trace) > 6
    assert counts.no_budget == lag or lag == 1
    assert [r.late for r in trace] == [lag == 1 and n > 0 for n in range(len(trace))]
    assert counts.not_ready == (len(trace) - 1 if lag == 1 else 0)
    for record in trace:
        if lag == 1:
            assert record.choice.budget == record.running * M
    if lag > 1:
        assert any(r.choice.budget < r.running * M for r in trace)


@pytest.mark.parametrize(
    "options", [{"newcomers": "mean", "feedback": True}, {}], ids=["shared", "apart"]
)
def test_a_request_that_lies_about_its_drafts(replanned, options):
    """Sure of drafts that all fail, beside others: they keep their texts (e50)."""
    engine = replanned(wait=True, **options)
    liar, lie = 21, 22
    table = engine.weights.draft.at[jnp.asarray([liar, lie])].set(0.0)
    table = table.at[jnp.asarray([liar, lie]), lie].set(1e3)
    engine.weights = dataclasses.replace(engine.weights, draft=table)
    prompts = tiny.prompts_of(9, 20, seed=38)
    own = dataclasses.replace(GREEDY, logit_bias={liar: -100.0, lie: -100.0})
    alone = [engine.generate([prompt], own)[0] for prompt in prompts]
    false = dataclasses.replace(GREEDY, max_new_tokens=60, logit_bias={liar: 100.0})
    engine = replanned(wait=True, **options)
    made = engine.generate([[liar], *prompts], [false, *[own] * 9])
    assert set(made[0].tokens) == {liar}
    assert set(made[0].accepted) == {0}
    assert [g.tokens for g in made[1:]] == [g.tokens for g in alone]
    # It gets no more than a window, and everyone keeps an anchor.
    assert max(made[0].drafted) <= M
    for record in engine.trace:
        assert all(1 <= rows <= M + 1 for rows in record.verify_lens)
        assert sum(record.verify_lens) <= record.choice.rows
    assert max(n for g in made[1:] for n in g.drafted) > 0
    if options:
        assert engine.planner.kept < 1
    else:
        assert max(made[0].drafted) == M  # the lie is believed
