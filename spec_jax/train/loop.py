"""The training loop: batches in, checkpoints and records out.

The loop dispatches step n + 1 before it reads the numbers of step n, so the
device never waits for the host. Everything it needs to go on is in a
checkpoint: state, data iterator, the running sums of the open record, elapsed
time and evaluation history. A run killed anywhere goes on with the same
batches and ends with the same bits.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.train import metrics as metrics_lib
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.optimiser import (
    OptimiserOptions,
    make_optimiser,
    make_schedule,
    require_float32,
)
from spec_jax.train.state import TrainState, abstract_state, init_state
from spec_jax.train.step import check_batch, make_train_step

# What a recipe calls an option where the names differ, or none has it.
_SAID = {
    "save_every": "train.checkpoint_every",
    "max_skipped_in_row": "max_skipped_in_row",
}


class TrainingStopped(UserError):
    """Training cannot go on; the message says why."""


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long to train and how often to look.

    Attributes:
      steps: batches to train on.
      seed: of weights and anchors.
      accumulation: micro-batches per step.
      log_every: steps per training record.
      eval_every: steps between evaluations; 0: only at the end.
      save_every: steps between checkpoints; 0: at evaluations and the end.
      max_seconds: also stop after this much training time, added up over
        resumes; None for no limit. Schedules count steps, not seconds.
      max_skipped_in_row: steps in a row that may be skipped as not finite.
      keep_last: newest checkpoints kept beside the best.
      metric_name: name of what `evaluate` returns.
    """

    steps: int
    seed: int = 0
    accumulation: int = 1
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    max_seconds: float | None = None
    max_skipped_in_row: int = 10
    keep_last: int = 1
    metric_name: str = "served_accept_length"

    def __post_init__(self):
        for name, low in (
            ("steps", 1),
            ("accumulation", 1),
            ("log_every", 1),
            ("eval_every", 0),
            ("save_every", 0),
            ("max_skipped_in_row", 0),
        ):
            if getattr(self, name) < low:
                said = _SAID.get(name, f"train.{name}")
                raise UserError(f"{said}={getattr(self, name)} must be at least {low}")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise UserError(
                f"max_seconds={self.max_seconds} must be above 0, or None; the "
                "recipe's is train.max_minutes"
            )


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves.

    Attributes:
      params: the kept weights: of the best evaluated step (averaged weights if
        the optimiser has them), of the last step without evaluation.
      step: steps trained.
      best_step: the step `params` come from.
      best_metric: its metric, or None.
      history: [{"step", "metric", "seconds"}], in order.
      seconds: training time, evaluations and saves included, over all resumes.
      eval_seconds: the part spent in `evaluate`.
      slots: supervised (anchor, offset) slots seen.
      skipped: updates skipped because a value was not finite.
      stopped: "steps" or "time".
      state: the last state.
    """

    params: Any
    step: int
    best_step: int
    best_metric: float | None
    history: list[dict]
    seconds: float
    eval_seconds: float
    slots: float
    skipped: int
    stopped: str
    state: TrainState


@dataclasses.dataclass
class _Progress:
    """The loop's own values; all of them are in a checkpoint."""

    seconds: float = 0.0
    eval_seconds: float = 0.0
    slots: float = 0.0
    since: float = 0.0  # `seconds` when the open record began
    open_sums: dict = dataclasses.field(default_factory=dict)
    history: list = dataclasses.field(default_factory=list)
    stopped: str | None = None


def _now() -> float:
    """The clock that training time is measured with, in seconds."""
    return time.monotonic()


def _signature(batch) -> list:
    """Structure, shapes and dtypes: what a compiled step is made for."""
    named = jax.tree_util.tree_leaves_with_path(batch)
    return [
        (jax.tree_util.keystr(path, simple=True), np.shape(leaf), np.result_type(leaf))
        for path, leaf in named
    ]


def _agree(stop: bool) -> bool:
    """Process 0's decision, on every process (clocks differ)."""
    if jax.process_count() == 1:
        return stop
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(stop)))


def train(
    drafter: Drafter,
    frozen: Frozen,
    loss: Callable,
    optimiser_options: OptimiserOptions,
    make_iterator: Callable[[], Any],
    folder,
    options: LoopOptions,
    *,
    recipe_hash: str,
    contract: Contract | None = None,
    mesh: Mesh | None = None,
    evaluate: Callable[[Any, int], float] | None = None,
    log: Callable[[dict], None] | None = None,
    init_params=None,
) -> TrainResult:
    """Trains a drafter, or goes on where the folder's last checkpoint ends.

    Args:
      drafter: gives `init` and `train_outputs`.
      frozen: the target's embedding and head; never changed.
      loss: (TrainOutputs, Frozen, progress=...) -> (numerator and denominator,
        metrics); `progress` is the share of `options.steps` done.
      optimiser_options: how weights move.
      make_iterator: makes a fresh data iterator that yields `Batch` records of
        host arrays, all of one shape, without end; it has `get_state()` (bytes
        or JSON-able) and `set_state(state)`. It is closed at the end if it can be.
      folder: `checkpoints/` and `metrics.jsonl` are kept there.
      options: how long and how often.
      recipe_hash: identifies the recipe; another recipe's folder is refused.
      contract: what features and weights are made under.
      mesh: where to run; all devices along `data` by default.
      evaluate: (params, step) -> validation metric, higher is better: the
        served accept length of a real decode loop. It must not keep `params`:
        the next step reuses their memory.
      log: receives each record as it is written.
      init_params: float32 weights to start from instead of `drafter.init`.

    Returns:
      The kept weights and what happened.

    Raises:
      UserError: a foreign or damaged folder, an unfit batch, the data ended.
      TrainingStopped: too many steps in a row were not finite.
      SaveFailed: a checkpoint could not be written.
    """
    folder = pathlib.Path(folder)
    mesh = mesh_lib.make_mesh() if mesh is None else mesh
    optimiser = make_optimiser(optimiser_options)
    schedule = make_schedule(optimiser_options, np)
    use_ema = optimiser_options.ema > 0
    template = abstract_state(
        drafter, optimiser, mesh, use_ema=use_ema, params=init_params
    )
    checkpoints = Checkpoints(
        folder / "checkpoints",
        recipe_hash=recipe_hash,
        contract=contract,
        keep_last=options.keep_last,
    )
    iterator = None
    try:
        progress = _Progress()
        iterator = make_iterator()
        restored = checkpoints.restore(template)
        if restored is None:
            step = 0
            state = init_state(
                drafter,
                optimiser,
                options.seed,
                mesh,
                use_ema=use_ema,
                params=init_params,
            )
        else:
            step, state = restored.entry.step, restored.state
            progress = _Progress(**restored.extra)
            iterator.set_state(restored.iterator)
            require_float32((state.params, state.opt_state), "checkpoint")
        runner = _Runner(
            state=state,
            step=step,
            progress=progress,
            train_step=make_train_step(
                drafter,
                loss,
                optimiser,
                mesh,
                template=template,
                accumulation=options.accumulation,
                total_steps=options.steps,
                ema=optimiser_options.ema,
            ),
            frozen=mesh_lib.shard_params(frozen, mesh),
            iterator=iterator,
            checkpoints=checkpoints,
            records=metrics_lib.MetricsFile(folder / "metrics.jsonl", step=step),
            options=options,
            schedule=schedule,
            mesh=mesh,
            evaluate=evaluate,
            log=log or (lambda record: None),
        )
        runner.run()
        checkpoints.settle()
        best = checkpoints.best()
        kept = runner.state
        if best.step != runner.step:
            kept = checkpoints.restore(template, best).state
        progress = runner.progress
        return TrainResult(
            params=kept.eval_params(),
            step=runner.step,
            best_step=best.step,
            best_metric=best.metric,
            history=list(progress.history),
            seconds=progress.seconds,
            eval_seconds=progress.eval_seconds,
            slots=progress.slots,
            skipped=int(runner.state.skipped),
            stopped=progress.stopped,
            state=runner.state,
        )
    finally:
        if hasattr(iterator, "close"):
            iterator.close()
        checkpoints.close()


@dataclasses.dataclass
class _Runner:
    """One call of `train` between its start and its end."""

    state: TrainState
    step: int
    progress: _Progress
    train_step: Callable
    frozen: Frozen
    iterator: Any
    checkpoints: Checkpoints
    records: metrics_lib.MetricsFile
    options: LoopOptions
    schedule: Callable
    mesh: Mesh
    evaluate: Callable | None
    log: Callable
    pending: Any = None  # (step, metrics) not read yet
    signature: Any = None
    clock: float = 0.0

    def run(self) -> None:
        self.progress.stopped = None
        if self._must_stop():
            return  # done before; unless more steps or time are asked for now
        self.clock = _now()
        first = self.step + 1
        while True:
            self.checkpoints.check()
            before = self.progress.seconds
            self._one_step()
            if self.step == first:  # compiles; records give the speed without it
                self.progress.since += self.progress.seconds - before
            stopped = self._must_stop()
            due = self._due(self.options.eval_every)
            evaluated = None
            if stopped or due:
                evaluated = self._evaluate()
            if stopped or due or self._due(self.options.save_every):
                self._save(evaluated)
            if stopped:
                return

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _must_stop(self) -> bool:
        if self.step >= self.options.steps:
            self.progress.stopped = "steps"
        limit = self.options.max_seconds
        if limit is not None and _agree(self.progress.seconds >= limit):
            self.progress.stopped = self.progress.stopped or "time"
        return self.progress.stopped is not None

    def _tick(self) -> None:
        now = _now()
        self.progress.seconds += now - self.clock
        self.clock = now

    def _next_batch(self):
        try:
            batch = next(self.iterator)
        except StopIteration:
            raise UserError(
                f"data ended after {self.step} of {self.options.steps} steps; the "
                "training iterator must repeat its data"
            ) from None
        signature = _signature(batch)
        if self.signature is None:
            check_batch(
                batch, self.mesh, self.options.accumulation, jax.process_count()
            )
            self.signature = signature
        elif signature != self.signature:
            raise UserError(
                f"data: batch {self.step + 1} is {signature}, the first one was "
                f"{self.signature}; pad every batch to one shape and drop remainders"
            )
        return mesh_lib.place_batch(batch, self.mesh)

    def _one_step(self) -> None:
        batch = self._next_batch()
        self.state, metrics = self.train_step(self.state, self.frozen, batch)
        metrics_lib.start_copy(metrics)
        self.step += 1
        before, self.pending = self.pending, (self.step, metrics)
        if before is not None:
            self._read(*before)
        self._tick()

    def _flush(self) -> None:
        """Reads the newest step too."""
        if self.pending is not None:
            before, self.pending = self.pending, None
            self._read(*before)
        self._tick()

    def _read(self, step: int, metrics) -> None:
        """Takes in one step's numbers and writes the record it completes."""
        progress = self.progress
        values = metrics_lib.to_host(metrics)
        in_row = values.pop("skipped_in_row")[0]
        if in_row > self.options.max_skipped_in_row:
            raise TrainingStopped(
                f"loss or gradient was not finite in {in_row:.0f} steps in a row (up "
                f"to step {step}, at most {self.options.max_skipped_in_row} are left "
                "out); lower train.lr or look for broken features"
            )
        progress.slots += values["slots"][0]
        if values["skipped"][0]:
            values = {name: values[name] for name in ("skipped", "slots")}
        progress.open_sums = metrics_lib.add(progress.open_sums, values)
        if step % self.options.log_every == 0 or step == self.options.steps:
            self._tick()
            self._record(step)

    def _record(self, step: int) -> None:
        progress = self.progress
        sums, progress.open_sums = progress.open_sums, {}
        means = metrics_lib.means(sums)
        num_steps = sums["skipped"][1]
        spent = max(progress.seconds - progress.since, 1e-9)
        progress.since = progress.seconds
        eta = (self.options.steps - step) * spent / num_steps
        if self.options.max_seconds is not None:
            eta = min(eta, max(self.options.max_seconds - progress.seconds, 0.0))
        own = ("loss", "grad_norm", "skipped", "slots")
        record = {
            "kind": "train",
            "step": step,
            "steps": self.options.steps,
            "loss": means.get("loss"),
            "grad_norm": means.get("grad_norm"),
            "lr": float(self.schedule(step - 1)),
            "skipped": sums["skipped"][0],
            "slots": progress.slots,
            "slots_per_s": sums["slots"][0] / spent,
            "seconds": progress.seconds,
            "eta_s": eta,
            "metrics": {name: means[name] for name in means if name not in own},
        }
        self._write(record)

    def _write(self, record: dict) -> None:
        if jax.process_index() == 0:
            self.records.append(record)
            self.log(record)

    def _evaluate(self) -> float | None:
        if self.evaluate is None:
            return None
        self._flush()
        progress, before = self.progress, self.progress.seconds
        value = float(self.evaluate(self.state.eval_params(), self.step))
        if not np.isfinite(value):
            raise TrainingStopped(
                f"{self.options.metric_name}={value} at step {self.step} is not a "
                "finite number; the drafter or its evaluation is broken"
            )
        self._tick()
        spent = progress.seconds - before
        progress.eval_seconds += spent
        progress.since += spent  # records give the speed of training alone
        seen = [past["metric"] for past in progress.history]
        progress.history.append({"step": self.step, "metric": value, "seconds": spent})
        self._write(
            {
                "kind": "eval",
                "step": self.step,
                "metric_name": self.options.metric_name,
                "metric": value,
                "best": all(value > past for past in seen),
                "seconds": spent,
            }
        )
        return value

    def _save(self, metric: float | None) -> None:
        self._flush()
        self.checkpoints.save(
            self.state,
            self.step,
            iterator=self.iterator.get_state(),
            metric=metric,
            extra=dataclasses.asdict(self.progress),
        )
