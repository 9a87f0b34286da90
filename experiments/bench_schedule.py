"""Plain decoding, fixed windows and planned budgets, under several loads.

One process holds the target and its drafter. Temperatures and the cost table are
made first, on prompts that are not measured and in the very programs that are;
then every way of decoding serves the same requests as a closed loop: exactly c
of them are in flight, and one that ends makes room for the next. Ways take turns
and their order rotates; ratios are of runs of the same turn.

A fixed window w is a request's own window: M tokens are drafted and w of them
verified, every round, in the exact program for that many rows. Window 0 drafts
nothing but keeps the drafter's state; `plain` is an engine without a drafter, and
`static` one without a planner.

    schedule_workload    prompts of every set, mixed
    schedule_engines     an engine of each mode, temperatures and cost table
    schedule_numbers     ways of decoding, their numbers, the verdict
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import progress, runtime, serving
from experiments.closed_loop import Job, closed_loop
from experiments.round_log import RoundLog
from experiments.schedule_engines import World, as_it_was, make_engines, temperatures_of
from experiments.schedule_numbers import PLAIN, Runs, Way, judge, summary, ways_of
from experiments.schedule_workload import mixed, read_set, regime_of, rendered, split
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import even_ladder
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import room_of
from spec_jax.decode.plan import COMPACT
from spec_jax.evals import compiles, identity

_WARM_TOKENS = 8


def measure(
    cfg: schema.BenchSchedule,
    engines: Mapping[str, Engine],
    ways: Sequence[Way],
    jobs: Sequence[Job],
) -> tuple[Runs, int]:
    """Every way at every load, in turn; the runs, and compilations in them."""
    runs: Runs = collections.defaultdict(list)
    for way, load in itertools.product(ways, cfg.concurrency):
        warm_up(engines[way.engine], way, jobs[:load])
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(as_it_was(engine))
        logs = {name: RoundLog(engine) for name, engine in engines.items()}
        turns = list(itertools.product(range(cfg.bench.repeats), cfg.loads))
        start, done, total = time.perf_counter(), 0, len(turns) * len(ways)
        with compiles.counting() as counted:
            for turn, (_, (load, count)) in enumerate(turns):
                shift = turn * (len(ways) // 2 + 1) % len(ways)
                for way in [*ways[shift:], *ways[:shift]]:
                    log = logs[way.engine]
                    run = closed_loop(
                        engines[way.engine], log, jobs[:count], load, way.change
                    )
                    log.rows.clear()
                    runs[way.name, load].append(run)
                    done += 1
                    left = (time.perf_counter() - start) * (total / done - 1) / 60
                    progress.say(
                        f"{way.name}, {load} at once: {run.tokens_per_s:.1f} tokens/s "
                        f"({done}/{total}, about {left:.0f} min left)"
                    )
    return runs, counted.compiles


def warm_up(engine: Engine, way: Way, jobs: Sequence[Job]) -> None:
    """A few tokens at one load: the first calls of a program are slower."""
    short = [
        dataclasses.replace(way.change(job.settings), max_new_tokens=_WARM_TOKENS)
        for job in jobs
    ]
    engine.generate([job.prompt for job in jobs], short)


def same_texts(
    cfg: schema.BenchSchedule,
    world: World,
    engine: Engine,
    jobs: Sequence[Job],
    runs: Runs,
) -> dict[str, Any]:
    """Greedy answers of `compact` against plain ones, at every load."""
    ties, compared, difference, first_tie = 0, 0, "", ""
    for load in cfg.concurrency:
        plain, ours = (runs[name, load][0].answers for name in (PLAIN, COMPACT))
        for job, expected, got in zip(jobs, plain, ours, strict=False):
            if job.settings.temperature > 0:
                continue
            found = identity.compare(
                world.target.spec,
                world.params,
                engine,
                [job.prompt],
                [expected.tokens],
                [got.tokens],
                job.settings,
            )
            compared += 1
            ties += found.near_ties
            first_tie = first_tie or found.first_tie
            if not found.identical and not difference:
                difference = f"{load} at once: {found.first_difference}"
    return {
        "greedy_identical": not difference,
        "compared_texts": compared,
        "near_ties": ties,
        "first_tie": first_tie,
        "first_difference": difference,
    }


def main(cfg: schema.BenchSchedule, workdir: pathlib.Path) -> dict[str, Any]:
    """Fits, measures and judges; returns the report's metrics.

    Raises:
      UserError: no such drafter or prompts, a drafter without confidence, or
        files that were made for something else.
    """
    prompts = {
        name: read_set(name, path, cfg.bench.max_prompts)
        for name, path in runtime.prompt_sets(cfg.bench).items()
    }
    target, params = serving.load_serving_target(cfg.target)
    exported = serving.load_drafter(cfg.drafter, target, num_draft=cfg.serve.num_draft)
    num_draft = exported.drafter.layout.num_draft
    windows = cfg.windows or tuple(range(num_draft + 1))
    if max(windows) > num_draft:
        raise UserError(
            f"windows={windows} go beyond the drafter's {num_draft} drafts; leave "
            "them out"
        )
    ladder = even_ladder(cfg.concurrency, num_draft + 1, cfg.row_buckets or num_draft)
    world = World(cfg, target, params, exported, ladder)
    room = room_of(cfg.serve.max_context, num_draft + 1, target.spec)
    limit = room - cfg.bench.max_new_tokens
    if cfg.bench.context > limit:
        raise UserError(
            f"bench.context={cfg.bench.context} and bench.max_new_tokens="
            f"{cfg.bench.max_new_tokens} are more than the {room} tokens a slot can "
            "hold; lower them, or raise serve.max_context"
        )
    ids, left_out = rendered(target, exported, prompts, limit)
    fitting, measured = split(ids, cfg.fit_prompts)
    fitted, calibrated = temperatures_of(world, fitting, workdir)
    engines, table, told = make_engines(world, fitted, workdir)
    jobs = mixed(cfg, measured, max(cfg.requests))
    runs, compiled = measure(cfg, engines, ways_of(windows), jobs)
    found = summary(cfg, runs, windows, num_draft)
    same = same_texts(cfg, world, engines[COMPACT], jobs, runs)
    verdict = judge(cfg, found, same["greedy_identical"], compiled)
    lengths = [len(job.prompt) for job in jobs]
    series = found.pop("series")
    if calibrated:
        series["reliability"] = calibrated
    return {
        "verdict_holds": all(row["holds"] is True for row in verdict.values()),
        "verdict": verdict,
        **found,
        **same,
        "compiles_after_warmup": compiled,
        "cost_table": told | {"table": table.to_json()},
        "sts": {
            "temperatures": list(fitted.temperatures),
            "ece_before": list(fitted.ece_before),
            "ece_after": list(fitted.ece_after),
            "num_samples": fitted.num_samples,
            "sampling": regime_of(cfg),
        },
        "ladder": {str(size): list(rows) for size, rows in ladder.buckets},
        "workload": {
            "sets": ", ".join(ids),
            "distinct_prompts": len({tuple(job.prompt) for job in jobs}),
            "fitting_prompts": len(fitting),
            "too_long": left_out,
            "prompt_tokens_mean": float(np.mean(lengths)),
            "prompt_tokens_max": max(lengths),
            "max_new_tokens": cfg.bench.max_new_tokens,
            "sampled_share": cfg.sampled_share,
        },
        "series": series,
    }
