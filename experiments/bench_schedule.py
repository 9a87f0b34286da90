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
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import calibrate, pipeline, profile, runtime, serving
from experiments.closed_loop import Job, closed_loop
from experiments.round_log import RoundLog
from experiments.schedule_numbers import PLAIN, Runs, Way, judge, summary, ways_of
from spec_jax.config import schema
from spec_jax.core import calibration
from spec_jax.core.calibration import CostTable, FlatCost, Source
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder, even_ladder, full_ladder
from spec_jax.data import prompts as prompt_files
from spec_jax.data.prompts import Prompt
from spec_jax.decode.engine import Engine, room_of
from spec_jax.decode.plan import CAP_ACCEPT, COMPACT, STATIC, PlanOptions
from spec_jax.decode.request import Settings
from spec_jax.evals import compiles, cost_tables, identity, sts
from spec_jax.evals.cost_tables import Sample
from spec_jax.evals.ece import reliability
from spec_jax.export.folder import Exported
from spec_jax.target.loading import Target

TEXT_WORDS = 180  # of a prompt cut from a text file
_TEXT_TASK = "Summarise the following text in three sentences.\n\n"
_WARM_TOKENS = 8


def read_set(name: str, path: str, limit: int) -> list[Prompt]:
    """Prompts of one set: a prompt or workload file, a text cut up, or "builtin".

    Raises:
      UserError: the file cannot be read, or has fewer than two prompts.
    """
    if path == "builtin":
        found = prompt_files.builtin_prompts()
    elif path.endswith(".txt"):
        try:
            words = pathlib.Path(runtime.find_file(path)).read_text("utf-8").split()
        except (OSError, ValueError) as error:
            raise UserError(
                f"bench.prompt_sets.{name}={path!r} cannot be read ({error}); name a "
                "text file in UTF-8"
            ) from error
        found = [
            prompt_files.user_prompt(
                _TEXT_TASK + " ".join(words[at : at + TEXT_WORDS]), f"{name}:{at}"
            )
            for at in range(0, len(words), TEXT_WORDS)
        ]
    else:
        found = prompt_files.read_prompts(runtime.find_file(path))
    if len(found) < 2:
        raise UserError(
            f"bench.prompt_sets.{name}={path!r} has {len(found)} prompts; give at "
            "least 2: one half is for fitting"
        )
    random.Random(len(found)).shuffle(found)
    return found[: limit or None]


def split(
    sets: Mapping[str, Sequence[Any]], held_out: int
) -> tuple[list[Any], list[list[Any]]]:
    """`(held out of every set, the rest of each set)`; none is in both."""
    fitting: list[Any] = []
    measured = []
    for values in sets.values():
        count = min(held_out, len(values) // 2)
        fitting += values[:count]
        measured.append(list(values[count:]))
    return fitting, measured


def settings_of(cfg: schema.BenchSchedule, rng: random.Random, cap: int) -> Settings:
    """A request's settings: greedy, or one of the sampled share."""
    changes: dict[str, Any] = {"max_new_tokens": cap, "seed": rng.randrange(2**31)}
    if rng.random() >= cfg.sampled_share:
        changes |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return serving.settings_from(cfg.serve, **changes)


def mixed(
    cfg: schema.BenchSchedule, sets: Sequence[Sequence[list[int]]], count: int
) -> list[Job]:
    """Requests with equal shares of all sets, in turn; their lengths differ.

    A set with too few prompts begins again. Caps are drawn between a half and the
    whole of `bench.max_new_tokens`, so that neighbours do not end together.
    """
    rng = random.Random(cfg.seed)
    turns = itertools.cycle([itertools.cycle(values) for values in sets])
    most = cfg.bench.max_new_tokens
    jobs = []
    for _ in range(count):
        cap = rng.randint((most + 1) // 2, most)
        jobs.append(Job(next(next(turns)), settings_of(cfg, rng, cap)))
    return jobs


def regime_of(cfg: schema.BenchSchedule) -> str:
    """The sampling regime that the temperatures are for."""
    if not cfg.sampled_share:
        return runtime.GREEDY
    return f"{runtime.regime_of(cfg.serve)} in {cfg.sampled_share:g} of requests"


# ---- Engines, and what is fitted before anything is measured.


@contextlib.contextmanager
def as_it_was(engine: Engine) -> Iterator[None]:
    """Takes away what was put before an engine's own methods in the block."""
    try:
        yield
    finally:
        vars(engine.planner).pop("decide", None)
        vars(engine).pop("fetch", None)


@dataclasses.dataclass(frozen=True)
class World:
    """What all engines share."""

    cfg: schema.BenchSchedule
    target: Target
    params: Any
    exported: Exported
    ladder: Ladder

    @property
    def serve(self) -> schema.Serve:
        return dataclasses.replace(self.cfg.serve, slots=self.cfg.concurrency[-1])

    @property
    def num_draft(self) -> int:
        return self.exported.drafter.layout.num_draft

    @property
    def facts(self) -> dict[str, str]:
        return runtime.facts(self.target, self.exported)

    def engine(self, mode: str, temperatures=(), cost: CostTable | None = None):
        """One mode's engine, its programs compiled."""
        sizes = [size for size, _ in self.ladder.buckets]
        full = full_ladder(tuple(sizes), 1 if mode == PLAIN else self.num_draft + 1)
        options: dict[str, Any] = {"ladder": full}
        if mode in (CAP_ACCEPT, COMPACT):
            plan = PlanOptions(mode=mode, temperatures=tuple(temperatures))
            options = {"plan": plan, "ladder": self.ladder, "cost": cost}
        pipeline.say(f"compile: {mode}")
        return serving.make_engine(
            self.target,
            self.params,
            self.serve,
            None if mode == PLAIN else self.exported,
            plain=mode != STATIC,
            chunks_per_tick=self.serve.slots,
            **options,
        )


def temperatures_of(
    world: World, prompts: Sequence[list[int]], workdir: pathlib.Path
) -> tuple[calibration.STS, dict[str, Any]]:
    """Temperatures from the recipe's file, or fitted to `prompts` (`sts.json`).

    Raises:
      UserError: a file for something else, or too few rounds.
    """
    cfg, num_draft = world.cfg, world.num_draft
    if cfg.sts:
        found = calibration.read_sts(runtime.find_file(cfg.sts)).check(
            num_draft,
            **world.facts,
            sampling=regime_of(cfg),
            allow_unmarked=cfg.allow_unmarked,
        )
        return found, {}
    slots = min(cfg.fit_slots, world.serve.slots)
    engine = serving.make_engine(
        world.target,
        world.params,
        dataclasses.replace(cfg.serve, slots=slots),
        world.exported,
        chunks_per_tick=slots,
        plain=False,
        plan=PlanOptions(collect=True),
    )
    rng = random.Random(cfg.seed + 1)
    settings = [settings_of(cfg, rng, cfg.bench.max_new_tokens) for _ in prompts]
    pipeline.say(f"temperatures: {len(prompts)} prompts, {slots} at a time")
    rounds, _ = calibrate.collect(engine, list(prompts), settings)
    logits_NM, mask_NM = rounds.arrays(num_draft)
    if len(logits_NM) < cfg.min_rounds:
        raise UserError(
            f"min_rounds={cfg.min_rounds}: the held-out prompts gave "
            f"{len(logits_NM)} rounds; raise fit_prompts or bench.max_new_tokens"
        )
    found = sts.fit(
        logits_NM,
        mask_NM,
        dataset=f"{regime_of(cfg)}; held out of {', '.join(_sets_of(cfg))}",
        source=Source(**world.facts, sampling=regime_of(cfg), num_draft=num_draft),
    )
    calibration.write(found, str(workdir / calibrate.STS_NAME))
    survivals = {
        "raw": sts.survival(logits_NM, np.ones(num_draft)),
        "calibrated": sts.survival(logits_NM, found.temperatures),
    }
    series = {
        name: reliability(values_NM.ravel(), mask_NM.ravel())
        for name, values_NM in survivals.items()
    }
    return found, series


def cost_of(
    world: World, engine: Engine, workdir: pathlib.Path
) -> tuple[CostTable, dict[str, Any]]:
    """The recipe's table, or one measured with `engine` (`cost.json`).

    Returns:
      The table and what the report says of it.

    Raises:
      UserError: a table for something else.
    """
    cfg = world.cfg
    if cfg.cost:
        table = calibration.read_cost(runtime.find_file(cfg.cost)).check(
            **world.facts,
            num_draft=world.num_draft,
            ladder=world.ladder.buckets,
            allow_unmarked=cfg.allow_unmarked,
        )
        return table, {"file": cfg.cost}
    how = schema.Profile(
        drafter=cfg.drafter,
        warmup=cfg.bench.warmup,
        repeats=cfg.cost_repeats,
        context=cfg.bench.context,
        seed=cfg.seed,
        serve=dataclasses.replace(
            world.serve, max_new_tokens=cfg.bench.max_new_tokens, temperature=0.0
        ),
    )
    with as_it_was(engine):
        medians = {
            shape: statistics.median(values)
            for shape, values in profile.measure(engine, how, pipeline.say).items()
        }
    samples = [Sample(r, t, s) for (r, t), s in medians.items() if t]
    plain = sorted((r, s) for (r, t), s in medians.items() if not t)
    costs = {
        "additive": cost_tables.fit_additive(samples),
        "flat": cost_tables.fit_flat(samples),
    }
    errors = {
        form: dict(
            zip(("max", "median"), cost_tables.relative_errors(c, samples), strict=True)
        )
        for form, c in costs.items()
    }
    form = cfg.form
    if form == "best":
        form = min(errors, key=lambda name: errors[name]["median"])
    source = Source(
        **world.facts, num_draft=world.num_draft, ladder=world.ladder.buckets
    )
    table = CostTable(
        costs[form], tuple(r for r, _ in plain), tuple(s for _, s in plain), source
    )
    calibration.write(table, str(workdir / profile.COST_NAME))
    rows_ms: dict[str, dict[str, float]] = {}
    for sample in samples:
        row = rows_ms.setdefault(str(sample.requests), {})
        row[str(sample.rows)] = 1e3 * sample.seconds
    return table, {
        "form": form,
        "fit_error": errors,
        "round_ms": rows_ms,
        "plain_ms": {str(r): 1e3 * s for r, s in plain},
    }


def make_engines(
    world: World, fitted: calibration.STS, workdir: pathlib.Path
) -> tuple[dict[str, Engine], CostTable, dict[str, Any]]:
    """An engine of each mode, the cost table and what is told of it."""
    # Any table makes the planner weigh its choices while they are timed.
    rows = world.ladder.buckets[-1][1][-1]
    compact = world.engine(
        COMPACT, fitted.temperatures, CostTable(FlatCost((1,), (1.0,), rows))
    )
    table, told = cost_of(world, compact, workdir)
    terms = dataclasses.replace(compact.planner.terms, table=table)
    compact.planner.terms = terms
    engines = {
        PLAIN: world.engine(PLAIN),
        STATIC: world.engine(STATIC),
        CAP_ACCEPT: world.engine(CAP_ACCEPT, fitted.temperatures, table),
        COMPACT: compact,
    }
    return engines, table, told


# ---- The measurement.


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
                    pipeline.say(
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
    ties, compared, difference = 0, 0, ""
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
            if not found.identical and not difference:
                difference = f"{load} at once: {found.first_difference}"
    return {
        "greedy_identical": not difference,
        "compared_texts": compared,
        "near_ties": ties,
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
        for name, path in _sets_of(cfg).items()
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


def rendered(
    target: Target,
    exported: Exported,
    prompts: Mapping[str, Sequence[Prompt]],
    limit: int,
) -> tuple[dict[str, list[list[int]]], int]:
    """Token ids of each set, and how many prompts are too long for a slot.

    Raises:
      UserError: a set of which fewer than two fit.
    """
    mask_id = serving.mask_id_of(exported.drafter)
    made: dict[str, list[list[int]]] = {}
    left_out = 0
    for name, each in prompts.items():
        ids = [prompt_files.render_prompt(target, p, mask_id=mask_id) for p in each]
        made[name] = [i for i in ids if len(i) <= limit]
        left_out += len(ids) - len(made[name])
        if len(made[name]) < 2:
            raise UserError(
                f"bench.prompt_sets.{name}: {len(made[name])} of its prompts fit into "
                f"the {limit} tokens that serve.max_context leaves beside "
                "bench.max_new_tokens, and 2 are needed; raise serve.max_context"
            )
    return made, left_out


def _sets_of(cfg: schema.BenchSchedule) -> dict[str, str]:
    """Sets that have a file.

    Raises:
      UserError: none has.
    """
    named = {name: path for name, path in cfg.bench.prompt_sets if path}
    if not named:
        raise UserError(
            "bench.prompt_sets names no file; say "
            "--config.bench.prompt_sets.gsm8k=<file.jsonl>"
        )
    return named
