"""A soak: thousands of requests come, leave and are taken back at random.

One engine in `compact` mode with a cost table, on a random float32 target, and
a shorter one on a real target. Requests differ in everything a request may ask
for. Afterwards every greedy answer is compared with a plain engine's, and what
the run must leave as it was (slots, programs, memory, counts) is looked at.

    soak_workload    the engines and their requests
    soak_run         requests come, leave and are taken back
    soak_watch       which programs ran, at which edges of their buckets
    soak_checks      what must be true afterwards
"""

from __future__ import annotations

import gc
import pathlib
from typing import Any

from experiments.progress import say
from experiments.soak_checks import check_books, check_outputs, check_seeds, growth
from experiments.soak_run import soak, warm_up
from experiments.soak_watch import Watch
from experiments.soak_workload import Part, random_part, real_part
from spec_jax.config import schema
from spec_jax.evals import compiles


def run_part(part: Part, cfg: schema.BenchSoak) -> dict[str, Any]:
    """Soaks one engine and checks what is left."""
    warm_up(part.engine, part.requests[: part.engine.options.slots])
    watch = Watch(part.engine)
    before = part.engine.metrics()
    try:
        with compiles.counting() as count:
            log = soak(part, cfg, watch)
    finally:
        watch.close()
    books = check_books(part, log, before)
    grown = growth(log.rss_mb)
    programs = {key for key in part.engine._programs if isinstance(key, tuple)}
    visited = sum(bool(n) for n in watch.visited.values())
    return {
        "requests": len(part.requests),
        "forced_requests": len(log.asked) - len(part.requests),
        **check_outputs(part, log, cfg.reference_share),
        **check_seeds(part, log),
        "compiles_after_warmup": count.compiles,
        **books,
        "aborted": log.aborted,
        "retracted": log.retracted,
        "programs": len(programs),
        "programs_run": len(watch.programs),
        "buckets_visited": visited,
        "buckets_total": len(watch.visited),
        "buckets_planted": watch.planted,
        "memory_growth_mb": grown,
        "memory_mb": log.rss_mb[-1],
        "buffers_growth": log.buffers[-1] - log.buffers[0],
        "passed": bool(
            books["slots_returned"]
            and books["metrics_balanced"]
            and books["auto_off_met"]
            and books["stop_strings_met"]
            and not count.compiles
            and visited == len(watch.visited)
            and grown <= cfg.max_growth_mb
            # The relay's ring may have been empty before.
            and log.buffers[-1] - log.buffers[0] <= part.engine.planner.relay.lag + 1
        ),
    }


def main(cfg: schema.BenchSoak, workdir: pathlib.Path) -> dict[str, Any]:
    """Soaks the random target, then the real one where it is asked for."""
    del workdir  # nothing is kept but the report
    makers = [random_part] + ([real_part] if cfg.real_requests else [])
    parts: dict[str, dict[str, Any]] = {}
    for make in makers:
        part = make(cfg)
        say(f"{part.name}: {len(part.requests)} requests, compiled")
        found = run_part(part, cfg)
        found["passed"] = (
            found["passed"]
            and not found["wrong_outputs"]
            and not found["seeds_not_reproduced"]
        )
        parts[part.name] = found
        say(
            f"{part.name}: {found['wrong_outputs']} wrong, {found['near_ties']} near "
            f"ties, {found['compiles_after_warmup']} compiles"
        )
        del part
        gc.collect()

    def total(name: str) -> Any:
        return sum(found[name] for found in parts.values())

    summed = (
        "requests",
        "wrong_outputs",
        "near_ties",
        "compiles_after_warmup",
        "aborted",
        "retracted",
        "buckets_visited",
        "buckets_total",
        "seeds_not_reproduced",
    )
    reasons = ("stop", "length", "error", "abort")
    return {
        **{name: total(name) for name in summed},
        "slots_returned": all(found["slots_returned"] for found in parts.values()),
        "metrics_balanced": all(found["metrics_balanced"] for found in parts.values()),
        "memory_growth_mb": max(f["memory_growth_mb"] for f in parts.values()),
        "finished": {r: sum(f["finished"][r] for f in parts.values()) for r in reasons},
        "passed": all(found["passed"] for found in parts.values()),
        **parts,
    }
