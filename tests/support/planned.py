"""Engines in each mode over one tiny world, and planted budgets."""

import functools

from spec_jax.core.verify_layout import Ladder
from spec_jax.decode.budget import BudgetOptions, Choice
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.step import RoundOptions
from tests.support import tiny

M = 3
LADDER = Ladder(((2, (2, 5, 8)), (4, (4, 8, 12, 16))))


@functools.cache
def engine(mode) -> Engine:
    """An engine of four slots; every test leaves it idle.

    `compact` alone has the plain program, the whole ladder, penalties and
    log-probabilities.
    """
    world = tiny.world("bigram", M)
    return Engine(
        world.spec,
        world.weights,
        EngineOptions(
            slots=4,
            max_context=128,
            prefill_buckets=(64,),
            plain=mode == "compact",
            round=RoundOptions(plan=PlanOptions(mode=mode)),
            ladder=LADDER if mode == "compact" else Ladder(LADDER.buckets[1:]),
            budget=BudgetOptions(wait=True),
            penalties=mode == "compact",
            logprobs=2 if mode == "compact" else None,
        ),
        world.drafter,
        world.mask_id,
    )


def replay(engine, budgets):
    """A `decide` that plants the n-th round's K, whatever was seen."""
    calls = iter(range(10**6))

    def decide(round_index, live, own_rows):
        del round_index
        requests = engine.ladder.requests(max(live) + 1)
        planned = len(live) - len(own_rows)
        budget = min(budgets[next(calls) % len(budgets)], planned * M)
        rows = planned + budget + sum(own_rows.values())
        return Choice(True, budget, requests, engine.ladder.rows(requests, rows))

    return decide
