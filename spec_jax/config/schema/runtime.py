"""Recipes of the decode runtime: what it is measured with, and what it serves."""

from __future__ import annotations

import dataclasses
from typing import Any

from spec_jax.config.schema.checks import check, needs_drafter
from spec_jax.config.schema.recipes import TREE_FIELDS, Common
from spec_jax.config.schema.serving import AutoOff, Plan, Serve, needs_drafts

MODES = ("static", "cap_accept", "compact")
FORMS = ("additive", "flat")
PACES = ("arrival", "fast")
# Of `Serve`: what only rounds that draft read.
_DRAFTS = (
    "num_draft",
    "topology",
    *TREE_FIELDS,
    "one_hot_draft",
)
# Of `Plan`: what every planned round reads, and what needs round times.
_SHARED = ("survival_eps", "min_verify_len", "max_verify_len")
_TIMED = (
    "align_rows",
    "lag",
    "extra_lag",
    "probe_every",
    "probe_share",
    "newcomers",
    "feedback",
)


@dataclasses.dataclass(frozen=True)
class Calibrate(Common):
    """Fits STS temperatures to a drafter's confidence, for one sampling regime.

    Attributes:
      drafter: an exported drafter folder.
      prompts: held-out prompts: a `.jsonl` file, or "builtin".
      max_prompts: prompts taken of it; 0 is all.
      dataset: what the file says it was fitted on; "" is regime and prompts.
      num_bins: bins of the calibration error.
      min_rounds: rounds below which nothing is fitted.
      serve: its sampling values are the regime; its slots decode together.
    """

    task: str = "calibrate"
    drafter: str = ""
    prompts: str = "builtin"
    max_prompts: int = 0
    dataset: str = ""
    num_bins: int = 15
    min_rounds: int = 200
    serve: Serve = Serve()

    def __post_init__(self):
        super().__post_init__()
        needs_drafter(self.drafter)
        needs_drafts(self.serve)
        _top(self, 0, "max_prompts")
        _top(self, 1, "num_bins", "min_rounds")
        check(bool(self.prompts), "prompts", self.prompts, 'is empty; try "builtin"')


@dataclasses.dataclass(frozen=True)
class Profile(Common):
    """Measures whole rounds over live requests and verified rows.

    Attributes:
      drafter: an exported drafter folder.
      form: of `cost.json`: "additive" or "flat"; the other one lies beside it.
      row_buckets: row buckets T of each R, beside T = R.
      warmup: rounds of each shape that are thrown away.
      repeats: timed rounds of each shape; medians count.
      context: tokens of every request before the first timed round.
      serve: `slots` is the largest R; R doubles up to it. Its sampling values are
        those of the timed rounds.
    """

    task: str = "profile"
    drafter: str = ""
    form: str = "additive"
    row_buckets: int = 4
    warmup: int = 2
    repeats: int = 12
    context: int = 128
    serve: Serve = Serve()

    def __post_init__(self):
        super().__post_init__()
        needs_drafter(self.drafter)
        needs_drafts(self.serve)
        check(self.form in FORMS, "form", self.form, f"must be one of {list(FORMS)}")
        _top(self, 1, "row_buckets", "repeats", "context")
        _top(self, 0, "warmup")


@dataclasses.dataclass(frozen=True)
class ServeOffline(Common):
    """A workload file through the engine, with a record of every round.

    Attributes:
      drafter: an exported drafter folder; "" decodes plainly.
      workload: a workload file (see `data.workload`).
      pace: "arrival" keeps the file's arrival times, "fast" submits all at once.
      mode: "static" verifies full windows, "compact" spends a budget on the drafts
        most likely to be reached, "cap_accept" verifies full windows and commits
        inside that budget only.
      cost: a cost table that `configs/profile.py` made; "" has no budget and
        verifies everything.
      sts: temperatures that `configs/calibrate.py` made, of one sampling regime,
        or of several, separated by commas: each request has those of its own regime
        (the first file's, where none is: the order counts); "" leaves the
        confidence as the drafter gives it.
      allow_unmarked: accept a table or temperatures that do not say what they were
        measured on (other programs').
      row_buckets: row buckets T of each R, beside T = R, in the modes that have a
        budget; as in the cost table.
      plan: how a budget is made and shared, in the modes that have one.
      auto_off: when speculation switches itself off for a request.
      serve: what requests do not say themselves.
    """

    task: str = "serve_offline"
    drafter: str = ""
    workload: str = "configs/workloads/mixed.jsonl"
    pace: str = "arrival"
    mode: str = "static"
    cost: str = ""
    sts: str = ""
    allow_unmarked: bool = False
    row_buckets: int = 4
    plan: Plan = Plan()
    auto_off: AutoOff = AutoOff()
    serve: Serve = Serve()

    def __post_init__(self):
        super().__post_init__()
        check(
            not self.auto_off.used or bool(self.drafter),
            "auto_off",
            self.auto_off,
            "switches speculation off, and there is none without a drafter; name one, "
            "or leave it out",
        )
        check(self.pace in PACES, "pace", self.pace, f"must be one of {list(PACES)}")
        check(self.mode in MODES, "mode", self.mode, f"must be one of {list(MODES)}")
        _top(self, 1, "row_buckets")
        check(bool(self.workload), "workload", self.workload, "is empty; name a file")
        if not self.drafter:
            name = _changed(self.serve, Serve(), _DRAFTS)
            check(
                not name,
                f"serve.{name}",
                getattr(self.serve, name, None),
                "is for drafts, and there are none without a drafter; name one with "
                "--config.drafter=<folder>, or leave it out",
            )
        check(
            not self.allow_unmarked or bool(self.cost or self.sts),
            "allow_unmarked",
            self.allow_unmarked,
            "is about files, and neither cost nor sts names one; leave it out",
        )
        if self.mode != "static":
            check(
                bool(self.drafter),
                "mode",
                self.mode,
                "plans drafts and needs a drafter; name one, or use 'static'",
            )
            check(
                self.serve.topology == "chain",
                "mode",
                self.mode,
                "plans with the drafts' confidence, and "
                f"serve.topology={self.serve.topology!r} has none; use "
                "--config.mode=static or --config.serve.topology=chain",
            )
            if not self.cost:
                self._check_unused(_TIMED, "needs round times; name --config.cost")
            return
        rule = "is for the modes with a budget; say --config.mode=compact"
        self._check_unused((*_SHARED, *_TIMED), rule)
        name = _changed(self, ServeOffline, ("cost", "sts", "row_buckets"))
        check(not name, name, getattr(self, name, None), f"{rule}, or leave it out")

    def _check_unused(self, names: tuple[str, ...], rule: str) -> None:
        name = self.plan.changed(*names)
        value = getattr(self.plan, name) if name else None
        check(not name, f"plan.{name}", value, f"{rule}, or leave it out")


def _changed(record: Any, default: Any, names: tuple[str, ...]) -> str:
    """The first of these fields that is not its default's, or ""."""
    return next((n for n in names if getattr(record, n) != getattr(default, n)), "")


def _top(record, low: int, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        check(value >= low, name, value, f"must be {low} or more")
