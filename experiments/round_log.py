"""A record of every round of an engine: what was planned and what came of it.

The engine's own trace says what a round was to do and how long it took; the
result that the host reads says what came of it. Both come in the order of the
rounds, so that the log pairs them after every tick.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments import runtime
from spec_jax.decode.budget import Choice
from spec_jax.decode.engine import Engine
from spec_jax.decode.jobs import RoundRecord
from spec_jax.decode.state import RoundResult


class RoundLog:
    """Rows of an engine's rounds, in the order they ran.

    A row has `round`, `draft`, `R`, `K` (of a plain step 0), `T` (rows that the
    program ran: full windows wherever the rows are not packed), `planned` (requests
    that share K), the lists below, `not_ready`, `looked_up` (planned requests whose
    history was looked up) and `stale` (of them those that had none), `filled` (a
    prompt may have been filled before it: that time is in the round's),
    `predicted_s` (of the program that ran) and `measured_s`.

    The lists have one value for each live slot; lengths that are easily taken for
    one another stay apart (article 5.6):

        requests      its handle
        verify_lens   rows verified, the anchor included
        cutoff        drafts the plan let through, verify_len - 1
        raw_accepted  drafts the target accepted, whatever the plan
        accepted      r, of them those inside the cutoff
        trim          raw_accepted - accepted
        bonus         the next token follows full acceptance; else it is a correction
        committed     rows of KV and features that became history: the anchor's and
                      those of r, fewer where the answer ended inside them
        block         committed + trim
        emitted       tokens that came out: as many as `committed`, another set

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
        # Of the rounds in flight: what `_row` has of them beside the engine's record.
        self._in_flight: list[dict[str, Any]] = []
        self._planned = self._looked_up = 0
        decide = engine.planner.decide

        def timed(round_index, live, own_rows):
            slots = engine.planner.counts.slots
            start = clock()
            choice = decide(round_index, live, own_rows)
            self.plan_s += clock() - start
            self._planned = len(live) - len(own_rows)
            self._looked_up = engine.planner.counts.slots - slots
            return choice

        engine.planner.decide = timed  # type: ignore[method-assign]
        runtime.watch(engine, self._results.append)

    def step(self, on_tokens: Callable | None = None) -> list:
        """`engine.step`; then books the rounds whose results it read.

        Raises:
          Exception: what `on_tokens` raised; nothing is lost by it.
        """
        engine = self._engine
        before = engine.metrics()
        filled = before["queued"] > 0 and before["running"] < engine.options.slots
        self._planned = self._looked_up = 0
        try:
            return engine.step(on_tokens)
        finally:  # a listener may have raised: the round ran all the same
            self._book(engine.rounds > before["rounds"], filled)

    def _book(self, is_new: bool, filled: bool) -> None:
        """Notes a dispatched round, and the rows of those that were read."""
        engine = self._engine
        if is_new:
            self._in_flight.append(
                {
                    "planned": self._planned,
                    "looked_up": self._looked_up,
                    "filled": filled,
                }
            )
        count = len(self._results)
        trace = list(engine.trace)[len(engine.trace) - count :]
        for record, result in zip(trace, self._results, strict=True):
            self.rows.append(self._row(record, result, self._in_flight.pop(0)))
        self._results.clear()

    def _row(
        self, record: RoundRecord, result: RoundResult, asked: dict[str, Any]
    ) -> dict[str, Any]:
        live_B = np.asarray(result.ran_B)

        def live(values_B) -> list[int]:
            return np.asarray(values_B)[live_B].tolist()

        choice = ran(self._engine, record.choice)
        verify_lens, emitted = live(result.verify_len_B), live(result.emitted_B)
        raw, accepted = live(result.raw_accepted_B), live(result.num_accepted_B)
        trim = [max(a - b, 0) for a, b in zip(raw, accepted, strict=True)]
        return {
            "round": len(self.rows),
            "draft": choice.draft,
            "R": choice.requests,
            "K": choice.budget,
            "T": choice.rows,
            "planned": asked["planned"],
            "requests": [record.handles[slot] for slot in np.flatnonzero(live_B)],
            "verify_lens": verify_lens,
            "cutoff": [n - 1 for n in verify_lens],
            "raw_accepted": raw,
            "accepted": accepted,
            "trim": trim,
            "bonus": live(result.full_B),
            "committed": emitted,
            "block": [a + b for a, b in zip(emitted, trim, strict=True)],
            "emitted": emitted,
            "not_ready": record.late,
            "looked_up": asked["looked_up"],
            "stale": record.stale,
            "filled": asked["filled"],
            "predicted_s": choice.seconds,
            "measured_s": record.seconds,
        }


def ran(engine: Engine, choice: Choice) -> Choice:
    """The choice with the rows that its program runs, and the time for those.

    A budget is chosen by what packed rows would cost; where they are not packed
    (`cap_accept`) every window runs in full.
    """
    if not choice.draft or engine.options.round.plan.is_packed:
        return choice
    rows, table = choice.requests * engine.window, engine.planner.terms.table
    seconds = None
    if table is not None:
        seconds = float(table.round_time(choice.requests, rows))
    return dataclasses.replace(choice, rows=rows, seconds=seconds)
