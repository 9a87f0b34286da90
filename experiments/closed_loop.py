"""A closed loop: so many requests in flight, one that ends makes room for the next."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments.round_log import RoundLog
from spec_jax.core.errors import UserError
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Generation, Settings


@dataclasses.dataclass(frozen=True)
class Job:
    """One request: token ids and settings."""

    prompt: list[int]
    settings: Settings


@dataclasses.dataclass
class Run:
    """One closed loop.

    Attributes:
      seconds: of the steady part: from the moment all c requests have a token to
        the first end that no new request follows.
      tokens: delivered in it.
      rows: rounds booked in it (see `RoundLog`).
      plan_s: the planner's time in it.
      answers: of all requests, in order.
    """

    seconds: float
    tokens: int
    rows: list[dict[str, Any]]
    plan_s: float
    answers: list[Generation]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def closed_loop(
    engine: Engine,
    log: RoundLog,
    jobs: Sequence[Job],
    concurrency: int,
    change: Callable[[Settings], Settings] = lambda settings: settings,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Serves the jobs in order, `concurrency` of them at any time.

    Args:
      engine: idle, and watched by `log`.
      log: of its rounds.
      jobs: more than `concurrency`.
      concurrency: c.
      change: of every request's settings.
      clock: time in seconds.

    Raises:
      UserError: nobody was in flight beside c - 1 others for any time.
    """
    waiting = collections.deque(enumerate(jobs))
    order: dict[int, int] = {}
    answers: list[Any] = [None] * len(jobs)
    told: set[int] = set()
    tokens = 0
    begin = end = None  # (time, tokens, rows, seconds of planning)

    def submit() -> None:
        index, job = waiting.popleft()
        order[engine.submit(job.prompt, change(job.settings))] = index

    def now() -> tuple[float, int, int, float]:
        return clock(), tokens, len(log.rows), log.plan_s

    def on_tokens(handle: int, new: list[int], from_prefill: bool) -> None:
        nonlocal tokens
        del from_prefill
        tokens += len(new)
        told.add(handle)

    while waiting and len(order) < concurrency:
        submit()
    while engine.busy:
        finished = log.step(on_tokens)
        if begin is None and len(told) >= concurrency:
            begin = now()
        for handle, generation in finished:
            answers[order[handle]] = generation
            if waiting:
                submit()
            elif end is None:
                end = now()
    if begin is None or end is None or end[0] <= begin[0] or end[1] <= begin[1]:
        raise UserError(
            f"requests: {len(jobs)} are too few to keep {concurrency} in flight; "
            "ask for more, or raise bench.max_new_tokens"
        )
    return Run(
        seconds=end[0] - begin[0],
        tokens=end[1] - begin[1],
        rows=log.rows[begin[2] : end[2]],
        plan_s=end[3] - begin[3],
        answers=answers,
    )
