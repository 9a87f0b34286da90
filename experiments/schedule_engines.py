"""The engines of `bench_schedule`, and what is fitted before anything is measured.

Temperatures and the cost table come from the recipe's files, or are made on
prompts that are not measured and in the very programs that are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import calibrate, profile, progress, runtime, serving
from experiments.schedule_numbers import PLAIN
from experiments.schedule_workload import regime_of, settings_of
from spec_jax.config import schema
from spec_jax.core import calibration
from spec_jax.core.calibration import CostTable, FlatCost, Source
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder, full_ladder
from spec_jax.decode import regimes
from spec_jax.decode.engine import Engine
from spec_jax.decode.plan import CAP_ACCEPT, COMPACT, STATIC
from spec_jax.evals import sts
from spec_jax.export.folder import Exported
from spec_jax.target.loading import Target


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
            planning = runtime.planning(self.cfg.plan, mode, temperatures)
            options = planning | {"ladder": self.ladder, "cost": cost}
        progress.say(f"compile: {mode}")
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
    serve = dataclasses.replace(cfg.serve, slots=slots)
    engine = calibrate.collecting_engine(
        world.target, world.params, serve, world.exported
    )
    rng = random.Random(cfg.seed + 1)
    settings = [settings_of(cfg, rng, cfg.bench.max_new_tokens) for _ in prompts]
    progress.say(f"temperatures: {len(prompts)} prompts, {slots} at a time")
    rounds, _ = calibrate.collect(engine, list(prompts), settings)
    logits_NM, mask_NM = rounds.arrays(num_draft)
    if len(logits_NM) < cfg.min_rounds:
        raise UserError(
            f"min_rounds={cfg.min_rounds}: the held-out prompts gave "
            f"{len(logits_NM)} rounds; raise fit_prompts or bench.max_new_tokens"
        )
    regime, sets = regime_of(cfg), ", ".join(runtime.prompt_sets(cfg.bench))
    found = sts.fit(
        logits_NM,
        mask_NM,
        dataset=f"{regime}; held out of {sets}",
        source=Source(**world.facts, sampling=regime, num_draft=num_draft),
    )
    calibration.write(found, str(workdir / calibrate.STS_NAME))
    survival = calibrate.survivals(logits_NM, mask_NM)
    return found, calibrate.reliabilities(survival, mask_NM)


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
        table = runtime.read_cost(
            cfg.cost,
            world.facts,
            world.num_draft,
            world.ladder,
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
        fitted = profile.fit(profile.measure(engine, how, progress.say))
    form = fitted.best_form if cfg.form == "best" else cfg.form
    source = Source(
        **world.facts,
        sampling=regimes.GREEDY,
        num_draft=world.num_draft,
        ladder=world.ladder.buckets,
    )
    table = fitted.table(form, source)
    calibration.write(table, str(workdir / profile.COST_NAME))
    return table, {"form": form, **fitted.numbers}


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
