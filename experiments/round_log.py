"""A record of every round of an engine: what was planned and what came of it.

The engine's own trace says what a round was to do and how long it took; the
result that the host reads says what came of it. Both come in the order of the
rounds, so that the log pairs them after every tick.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments import runtime
from spec_jax.decode.engine import Engine
from spec_jax.decode.jobs import RoundRecord
from spec_jax.decode.state import RoundResult


class RoundLog:
    """Rows of an engine's rounds, in the order they ran.

    A row has `round`, `draft`, `R`, `K`, `T` (of the chosen program and budget; a
    plain step has K = 0), `planned` (requests that share K), `verify_lens`,
    `raw_accepted`, `accepted` and `emitted` of the live slots, `not_ready`, `stale`
    (requests without history), `filled` (a prompt may have been filled before it:
    that time is in the round's), `predicted_s` and `measured_s`.

    Attributes:
      rows: those rows.
      plan_s: seconds that the planner took, all rounds together.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter):
        """Watches an idle engine from now on."""
        self.rows: list[dict[str, Any]] = []
        self.plan_s = 0.0
        self._engine = engine
        self._results: list[RoundResult] = []
        # Of the rounds in flight: (planned requests, filled).
        self._in_flight: list[tuple[int, bool]] = []
        self._planned = 0
        decide = engine.planner.decide

        def timed(round_index, live, own_rows):
            start = clock()
            choice = decide(round_index, live, own_rows)
            self.plan_s += clock() - start
            self._planned = len(live) - len(own_rows)
            return choice

        engine.planner.decide = timed  # type: ignore[method-assign]
        runtime.watch(engine, self._results.append)

    def step(self, on_tokens: Callable | None = None) -> list:
        """`engine.step`; then books the rounds whose results it read."""
        engine = self._engine
        before = engine.metrics()
        filled = before["queued"] > 0 and before["running"] < engine.options.slots
        self._planned = 0
        finished = engine.step(on_tokens)
        if engine.rounds > before["rounds"]:
            self._in_flight.append((self._planned, filled))
        count = len(self._results)
        trace = list(engine.trace)[len(engine.trace) - count :]
        for record, result in zip(trace, self._results, strict=True):
            self.rows.append(self._row(record, result, *self._in_flight.pop(0)))
        self._results.clear()
        return finished

    def _row(
        self, record: RoundRecord, result: RoundResult, planned: int, filled: bool
    ) -> dict[str, Any]:
        live_B = np.asarray(result.ran_B)

        def live(values_B) -> list[int]:
            return np.asarray(values_B)[live_B].tolist()

        choice = record.choice
        return {
            "round": len(self.rows),
            "draft": choice.draft,
            "R": choice.requests,
            "K": choice.budget,
            "T": choice.rows,
            "planned": planned,
            "verify_lens": live(result.verify_len_B),
            "raw_accepted": live(result.raw_accepted_B),
            "accepted": live(result.num_accepted_B),
            "emitted": live(result.emitted_B),
            "not_ready": record.late,
            "stale": record.stale,
            "filled": filled,
            "predicted_s": choice.seconds,
            "measured_s": record.seconds,
        }
