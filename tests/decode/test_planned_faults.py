"""Bad input where a budget decides: its request ends, its neighbours notice nothing.

Neighbours are greedy, or have a window of their own: a budget that others share
less of may cut a sampled text elsewhere, and only those are the same to the bit.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decode.request import Settings
from tests.support import asking, planned, tiny

M, V = planned.M, 23
MODES = ["cap_accept", "compact"]
GREEDY = Settings(max_new_tokens=12)
OWN = dataclasses.replace(GREEDY, num_draft=2)
SEEDED = dataclasses.replace(OWN, temperature=0.9, seed=5, max_new_tokens=20)
CUT = [5, 2, 4, 3]  # never all of three requests' drafts


@pytest.fixture(params=MODES)
def engine(request):
    """A shared engine under planted budgets; weights as they were afterwards."""
    made = planned.engine(request.param)
    weights = made.weights
    made.planner.decide = planned.replay(made, CUT)
    yield made
    del made.planner.decide
    made.weights = weights
    assert asking.is_idle(made)


def drafting(engine, table):
    engine.weights = dataclasses.replace(engine.weights, draft=table)


def poisoned(engine, token):
    """The target breaks wherever it runs this token."""
    params = jax.tree.map(lambda x: x, engine.weights.target)
    embed = params["params"]["embed"]
    params["params"]["embed"] = embed.at[token].set(jnp.nan)
    engine.weights = dataclasses.replace(engine.weights, target=params)


def victim_of(texts):
    """(victim, two neighbours, x, poison) of texts by their one-token prompts.

    x comes up inside the victim's answer and nowhere in the neighbours' texts,
    poison in nobody's.
    """
    for victim, text in texts.items():
        for x in text[1:8]:
            others = [p for p, t in texts.items() if x not in (p, *t) and p != victim]
            for two in itertools.combinations(others if x != victim else (), 2):
                used = {x, victim, *text, *two, *(t for p in two for t in texts[p])}
                free = sorted(set(range(V)) - used)
                if free:
                    return victim, two, x, free[0]
    raise AssertionError("no such texts")


def test_a_target_that_breaks_inside_a_block(engine):
    """NaN in the row of a draft, within the plan: an error after its last token."""
    prompts = list(range(V - 1))
    made = engine.generate([[p] for p in prompts], GREEDY)
    texts = {p: g.tokens for p, g in zip(prompts, made, strict=True)}
    victim, two, x, poison = victim_of(texts)
    # Nobody drafts x or poison but after x, and there it is certain of poison.
    table = engine.weights.draft.at[:, jnp.asarray([x, poison])].set(-1e9)
    drafting(engine, table.at[x, poison].set(1e3))
    each = [GREEDY, GREEDY, OWN]
    lined = [[victim], *([p] for p in two)]
    whole = engine.generate(lined, each)
    assert [g.tokens for g in whole] == [texts[p] for p in (victim, *two)]
    poisoned(engine, poison)
    broken, *neighbours = engine.generate(lined, each)
    assert broken.finish_reason == "error"
    assert broken.tokens == texts[victim][: texts[victim].index(x) + 1]
    assert [g.tokens for g in neighbours] == [texts[p] for p in two]
    assert [g.finish_reason for g in neighbours] == ["length"] * 2
    assert [g.accepted for g in neighbours[1:]] == [g.accepted for g in whole[2:]]


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_drafts_without_a_law(engine, value):
    """Nothing to plan with is a plain step; half of it costs no greedy token."""
    prompts = tiny.prompts_of(3, V, seed=70)
    each = [GREEDY, SEEDED, dataclasses.replace(SEEDED, num_draft=None, seed=6)]
    plain = engine.generate(prompts, [asking.off(s) for s in each])
    table = engine.weights.draft
    drafting(engine, jnp.full_like(table, value))
    broken = engine.generate(prompts, each)
    assert [g.tokens for g in broken] == [g.tokens for g in plain]
    assert all(set(g.accepted) == {0} for g in broken)
    assert set(broken[0].drafted) == set(broken[2].drafted) == {0}  # never admitted
    drafting(engine, table.at[::2].set(value))
    partly = engine.generate(prompts, each)
    assert partly[0].tokens == plain[0].tokens
    assert all(
        len(g.tokens) == s.max_new_tokens for g, s in zip(partly, each, strict=True)
    )


@pytest.mark.parametrize("least", [0, 4])
def test_abort_inside_a_block(engine, least):
    """With its round in flight: neighbours go on, to the bit."""
    prompts = tiny.prompts_of(4, V, seed=71)
    each = [dataclasses.replace(GREEDY, max_new_tokens=20), SEEDED, GREEDY]
    clean = engine.generate(prompts[:3], each)
    handles = [engine.submit(p, s) for p, s in zip(prompts, each, strict=False)]
    victim = engine.submit(prompts[3], dataclasses.replace(GREEDY, max_new_tokens=40))
    done = {}
    asking.until(engine, done, lambda: asking.tokens_so_far(engine, victim) >= least)
    assert engine._pending and engine.abort(victim)
    done.update(engine.run())
    assert done[victim].finish_reason == "abort" and len(done[victim].tokens) < 40
    made = [done[h] for h in handles]
    assert [g.tokens for g in made] == [g.tokens for g in clean]
    assert made[1].accepted == clean[1].accepted
    assert np.mean([n for g in made for n in g.drafted]) < M
