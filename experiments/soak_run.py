"""The soak itself: requests come, leave and are taken back, tick after tick."""

from __future__ import annotations

import dataclasses
import gc
import random

import jax

from experiments.closed_loop import Job
from experiments.progress import say
from experiments.soak_watch import Watch
from experiments.soak_workload import Part
from spec_jax.config import schema
from spec_jax.decode.auto_off import AutoOff
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Generation, Settings
from spec_jax.evals import machine

PHASE = 150  # ticks between the loads of `_phase`
LIMITED = 40  # ticks with a limit on the load; as many follow without
SAMPLES = 20  # looks at memory at least, where a request takes a tick


@dataclasses.dataclass
class Log:
    """What a soak left behind.

    Attributes:
      asked: handle -> request.
      done: handle -> generation.
      aborted, retracted: calls that found their request.
      rss_mb, buffers: resident memory and live device arrays, sampled.
    """

    asked: dict[int, Job] = dataclasses.field(default_factory=dict)
    done: dict[int, Generation] = dataclasses.field(default_factory=dict)
    aborted: int = 0
    retracted: int = 0
    rss_mb: list[float] = dataclasses.field(default_factory=list)
    buffers: list[int] = dataclasses.field(default_factory=list)


def soak(part: Part, cfg: schema.BenchSoak, watch: Watch) -> Log:
    """Runs every request of a part, and then what the programs still lack."""
    engine, rng, log = part.engine, random.Random(cfg.seed + 2), Log()
    waiting = list(reversed(part.requests))
    tick, told = 0, 0
    limits = engine.options.auto_off
    _look_at_memory(log)
    while waiting or engine.busy:
        join = _phase(tick, cfg.join)
        if limits is not None and tick % LIMITED == 0:
            is_limited = tick // LIMITED % 2 == 0
            most = limits.max_active if is_limited else None
            _limit(engine, dataclasses.replace(limits, max_active=most))
        while waiting and rng.random() < join:
            if engine.metrics()["queued"] > 2 * engine.options.slots:
                break
            request = waiting.pop()
            handle = engine.submit(request.prompt, request.settings)
            log.asked[handle] = request
        for chance, leave in (
            (cfg.abort, engine.abort),
            (cfg.retract, engine.retract),
        ):
            if rng.random() < chance:
                newest = engine._next_handle
                recent = range(max(0, newest - 40), newest)
                open_now = [h for h in recent if h in log.asked and h not in log.done]
                if leave == engine.retract:  # of one that waits it is no change
                    held = [h for h in open_now if not engine.table.waits(h)]
                    open_now = held or open_now
                if open_now:
                    left = leave(rng.choice(open_now))
                    log.aborted += left and leave == engine.abort
                    log.retracted += left and leave == engine.retract
        log.done.update(engine.step())
        tick += 1
        if tick % max(len(part.requests) // SAMPLES, 1) == 0:
            _look_at_memory(log)
        if len(log.done) - told >= max(len(part.requests) // 10, 1):
            told = len(log.done)
            say(f"{part.name}: {told} of {len(part.requests)} requests")
    _limit(engine, None)
    force(engine, watch, log)
    _limit(engine, limits)
    _look_at_memory(log)
    return log


def force(engine: Engine, watch: Watch, log: Log, token: int = 0) -> None:
    """Requests that fill R slots, so that what was not visited is."""
    for requests, _ in engine.ladder.buckets:
        for kind in ("plain", "rows"):
            wanted = [e for e in watch.missing if e[:2] == (kind, requests)]
            if not wanted:
                continue
            settings = Settings(
                max_new_tokens=engine.room - 2,
                speculate=kind == "rows",
                ignore_eos=True,
            )
            for _ in range(requests):
                request = Job([token, token + 1], settings)
                log.asked[engine.submit(request.prompt, settings)] = request
            watch.wanted = [e for e in wanted if kind == "rows"]
            while engine.busy:
                log.done.update(engine.step())
                if not [e for e in watch.missing if e in wanted]:
                    for handle in set(log.asked) - set(log.done):
                        log.aborted += engine.abort(handle)
            watch.wanted = []


def warm_up(engine: Engine, requests: list[Job]) -> None:
    """Everything that a request can meet, and every program, once.

    A program takes what memory it needs when it first runs.
    """
    engine.generate([list(r.prompt) for r in requests], [r.settings for r in requests])
    for leave in (engine.retract, engine.abort):
        handle = engine.submit([0, 1], Settings(max_new_tokens=8))
        for _ in range(3):
            engine.step()
        leave(handle)
    engine.run()
    watch, limits = Watch(engine), engine.options.auto_off
    _limit(engine, None)
    try:
        force(engine, watch, Log())
    finally:
        watch.close()
        _limit(engine, limits)


def _limit(engine: Engine, limits: AutoOff | None) -> None:
    """Other limits from now on; no program depends on them."""
    engine.options = dataclasses.replace(engine.options, auto_off=limits)


def _look_at_memory(log: Log) -> None:
    gc.collect()
    log.rss_mb.append(machine.resident_mb())
    log.buffers.append(len(jax.live_arrays()))


def _phase(tick: int, join: float) -> float:
    """The chance of a join: full, half and few, in turn."""
    return join * (1.0, 0.5, 0.08)[tick // PHASE % 3]
