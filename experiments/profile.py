"""Times of whole rounds, over live requests R and verified rows T.

The engine that will serve is what is timed: drafting, verifying, the state's
upkeep and the host's planning, in the very programs of its ladder. The planner
is asked as always, and its choice is replaced by the shape whose turn it is;
shapes take turns round by round, so that a busy moment of the machine meets all
of them alike. Results come one round late, as in serving: what is timed is the
pace of rounds and not one round alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import progress, runtime, serving
from experiments.round_log import RoundLog
from spec_jax.config import schema
from spec_jax.core import calibration
from spec_jax.core.calibration import AdditiveCost, CostTable, FlatCost, Source
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import even_ladder
from spec_jax.decode import regimes
from spec_jax.decode.budget import Choice
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import room_of
from spec_jax.decode.plan import COMPACT, PlanOptions
from spec_jax.evals import cost_tables
from spec_jax.evals.cost_tables import Sample

COST_NAME = "cost.json"

# A shape is (R, T), or (R, 0) for the plain step.
Shape = tuple[int, int]


class Turns:
    """Stands in for the planner's choice: each shape of one R in turn.

    Attributes:
      shapes: whose turns they are.
      next: index of the shape whose turn is next, modulo their number.
    """

    def __init__(self, engine: Engine):
        """Takes the place of the engine's decisions from now on."""
        self.shapes: list[Shape] = []
        self.next = 0
        decide = engine.planner.decide

        def forced(round_index, live, own_rows) -> Choice:
            decide(round_index, live, own_rows)  # its time is part of a round
            requests, rows = self.shapes[self.next % len(self.shapes)]
            self.next += 1
            return Choice(
                draft=rows > 0,
                budget=max(rows - requests, 0),
                requests=requests,
                rows=rows or requests,
            )

        engine.planner.decide = forced  # type: ignore[method-assign]


def measure(
    engine: Engine,
    cfg: schema.Profile,
    say=lambda text: None,
) -> dict[Shape, list[float]]:
    """Seconds of the timed rounds of every shape of the engine's ladder.

    A round counts if all R requests were live in it and no prompt was filled
    before it. Each pass of R requests begins with another shape: the first round of
    a pass, which never counts, is not the same shape's every time.

    Args:
      engine: idle, in `compact` mode.
      cfg: how often, from which context, under which sampling.
      say: progress.

    Raises:
      UserError: requests end before a round of some shape is timed.
    """
    turns, log = Turns(engine), RoundLog(engine)
    rng = np.random.default_rng(cfg.seed)
    allowed = [t for t in range(engine.spec.vocab_size) if t != engine.mask_id]
    settings = serving.settings_from(
        cfg.serve, max_new_tokens=cfg.serve.max_new_tokens, ignore_eos=True
    )
    seconds: dict[Shape, list[float]] = {}
    needed = cfg.warmup + cfg.repeats
    for requests, rows in engine.ladder.buckets:
        turns.shapes = [(requests, 0), *((requests, t) for t in rows)]
        found: dict[Shape, list[float]] = {shape: [] for shape in turns.shapes}
        barren = 0  # passes in a row that gave nothing to a shape that lacks rounds
        for first in itertools.count():
            turns.next = first
            lacking = [shape for shape in found if len(found[shape]) < needed]
            if not lacking:
                break
            had = sum(len(found[shape]) for shape in lacking)
            for _ in range(requests):
                prompt = rng.choice(allowed, cfg.context).tolist()
                seed = int(rng.integers(2**31))
                engine.submit(prompt, dataclasses.replace(settings, seed=seed))
            seen = len(log.rows)
            while engine.busy:
                log.step()
            for row in log.rows[seen:]:
                if len(row["verify_lens"]) == requests and not row["filled"]:
                    shape = (requests, row["T"] if row["draft"] else 0)
                    found[shape].append(row["measured_s"])
            is_barren = sum(len(found[shape]) for shape in lacking) == had
            barren = barren + 1 if is_barren else 0
            if barren == len(found):
                raise UserError(
                    f"serve.max_new_tokens={cfg.serve.max_new_tokens} ends every "
                    f"request before {_words(lacking[0])} is timed; raise it"
                )
        for shape in turns.shapes:
            seconds[shape] = found[shape][cfg.warmup :]
        say(
            f"profile: {requests} requests, "
            + ", ".join(
                f"{t or 'plain'} rows {1e3 * statistics.median(seconds[r, t]):.2f} ms"
                for r, t in turns.shapes
            )
        )
    return seconds


def _words(shape: Shape) -> str:
    requests, rows = shape
    kind = f"a round of {rows} rows" if rows else "a plain step"
    return f"{kind} for {requests} requests"


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the round times of a ladder's shapes give.

    Attributes:
      samples: medians of the programs that draft.
      plain: (R, seconds) of the plain steps, R ascending.
      costs: form -> the cost in that form.
      errors: form -> "max" and "median" of |predicted / measured - 1|.
    """

    samples: list[Sample]
    plain: list[tuple[int, float]]
    costs: dict[str, AdditiveCost | FlatCost]
    errors: dict[str, dict[str, float]]

    @property
    def best_form(self) -> str:
        """The form that is nearer to the measured times in the median."""
        return min(self.errors, key=lambda form: self.errors[form]["median"])

    def table(self, form: str, source: Source) -> CostTable:
        """The cost table in one form, saying what it was measured on."""
        sizes, seconds = [r for r, _ in self.plain], [s for _, s in self.plain]
        return CostTable(self.costs[form], tuple(sizes), tuple(seconds), source)

    @property
    def numbers(self) -> dict[str, Any]:
        """What a report has of it; keys are texts, times in milliseconds."""
        rows_ms: dict[str, dict[str, float]] = {}
        for sample in self.samples:
            row = rows_ms.setdefault(str(sample.requests), {})
            row[str(sample.rows)] = 1e3 * sample.seconds
        return {
            "fit_error": self.errors,
            "round_ms": rows_ms,
            "plain_ms": {str(r): 1e3 * s for r, s in self.plain},
        }


def fit(seconds: Mapping[Shape, Sequence[float]]) -> Fit:
    """Fits both forms to the medians of what `measure` returned.

    Raises:
      UserError: nothing was measured, or a time that is not positive.
    """
    medians = {shape: statistics.median(values) for shape, values in seconds.items()}
    samples = [Sample(r, t, s) for (r, t), s in medians.items() if t]
    costs = {
        "additive": cost_tables.fit_additive(samples),
        "flat": cost_tables.fit_flat(samples),
    }
    errors = {}
    for form, cost in costs.items():
        largest, median = cost_tables.relative_errors(cost, samples)
        errors[form] = {"max": largest, "median": median}
    plain = sorted((r, s) for (r, t), s in medians.items() if not t)
    return Fit(samples, plain, costs, errors)


def main(cfg: schema.Profile, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes `cost.json` (and the other form beside it); returns metrics.

    Raises:
      UserError: no such drafter, one without confidence, or too little context.
    """
    target, params = serving.load_serving_target(cfg.target)
    exported = serving.load_drafter(cfg.drafter, target, num_draft=cfg.serve.num_draft)
    layout = exported.drafter.layout
    room = room_of(cfg.serve.max_context, layout.window, target.spec)
    if cfg.context + cfg.serve.max_new_tokens > room:
        raise UserError(
            f"context={cfg.context} and serve.max_new_tokens="
            f"{cfg.serve.max_new_tokens} are more than the {room} tokens a slot can "
            "hold; lower them, or raise serve.max_context"
        )
    ladder = even_ladder(
        runtime.slot_buckets(cfg.serve.slots), layout.window, cfg.row_buckets
    )
    # Any table makes the planner weigh its choices; what it says is not used.
    table = CostTable(FlatCost((1,), (1.0,), cfg.serve.slots * layout.window))
    engine = serving.make_engine(
        target,
        params,
        cfg.serve,
        exported,
        chunks_per_tick=cfg.serve.slots,
        plan=PlanOptions(mode=COMPACT),
        ladder=ladder,
        cost=table,
    )
    progress.say(f"profile: ladder {ladder.buckets}")
    fitted = fit(measure(engine, cfg, progress.say))
    source = Source(
        **runtime.facts(target, exported),
        sampling=regimes.regime_of(cfg.serve),
        num_draft=layout.num_draft,
        ladder=ladder.buckets,
    )
    for form in fitted.costs:
        name = COST_NAME if form == cfg.form else f"cost.{form}.json"
        calibration.write(fitted.table(form, source), str(workdir / name))
    return {
        "form": cfg.form,
        **fitted.numbers,
        "table": {
            "predicted_over_measured": cost_tables.predicted_over_measured(
                fitted.costs[cfg.form], fitted.samples
            )
        },
        "window": layout.window,
        "context": cfg.context,
        "repeats": cfg.repeats,
        "sampling": regimes.regime_of(cfg.serve),
    }
