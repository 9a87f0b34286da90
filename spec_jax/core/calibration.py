"""Two measured files a planner reads: confidence temperatures and round times.

`STS` holds one temperature per draft position (calibrated confidence is
`sigmoid(logit / T_j)`), `CostTable` the seconds of a whole round. Both are read
and written in SGLang's JSON forms; what this project adds (which model, drafter,
device and shapes they were measured on, the plain step's time) stands under the
one key `spec_jax`, which other readers ignore. Fitting and profiling live in
`evals`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.core import json_fields
from spec_jax.core.errors import UserError

EXTRAS = "spec_jax"  # the one key that holds what SGLang's forms do not


@dataclasses.dataclass(frozen=True)
class Source:
    """What a file was measured on; "" and () mean not recorded.

    Attributes:
      model: fingerprint of the target.
      drafter: hash of the drafter's weights.
      device: kind of the device (`jax.devices()[0].device_kind`).
      processor: name and number of cores of the processor beside it.
      dtype: of the target's weights.
      sampling: regime of the measured requests, e.g. "greedy".
      num_draft: M (cost tables; an STS file's is its length).
      ladder: the (R, T) programs, pairs (R, (T, ...)) (cost tables).
    """

    model: str = ""
    drafter: str = ""
    device: str = ""
    processor: str = ""
    dtype: str = ""
    sampling: str = ""
    num_draft: int = 0
    ladder: tuple[tuple[int, tuple[int, ...]], ...] = ()


def _compare(what: str, source: Source | None, wanted: dict, allow_unmarked: bool):
    """Refuses a file measured on something else (None is not compared)."""
    for name, value in wanted.items():
        mine = getattr(source or Source(), name)
        if value is None:
            continue
        if not mine:
            if allow_unmarked:
                continue
            raise UserError(
                f"the {what} does not say which {name} it was measured on (here: "
                f"{value!r}); measure it again, or allow unmarked files"
            )
        if mine != value:
            raise UserError(
                f"the {what} was measured for {name} {mine!r}, but this run has "
                f"{value!r}; measure it again"
            )


@dataclasses.dataclass(frozen=True)
class STS:
    """Sequential temperature scaling of a drafter's confidence.

    Attributes:
      temperatures: one per draft position, all positive.
      dataset: what it was fitted on (one file per sampling regime).
      num_samples: rounds it was fitted on.
      ece_before: expected calibration error of the survival per position, raw.
      ece_after: the same calibrated (ours: of rounds that were not fitted).
      source: what was measured, or None (a file of another program).
    """

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    source: Source | None = None

    def __post_init__(self):
        given = self.temperatures
        if not given or not all(math.isfinite(t) and t > 0 for t in given):
            raise UserError(
                f"sts.temperatures={list(given)} must be positive numbers, one per "
                "draft position"
            )
        for name in ("ece_before", "ece_after"):
            if len(getattr(self, name)) not in (0, len(given)):
                raise UserError(
                    f"sts.{name} has {len(getattr(self, name))} values for "
                    f"{len(given)} temperatures; give one per position, or none"
                )

    def check(self, length: int, *, allow_unmarked: bool = False, **facts: Any) -> STS:
        """Itself, if it fits a proposal of `length` drafts and what is named.

        Args:
          length: M of this run.
          allow_unmarked: accept a file that does not say (other programs').
          facts: fields of `Source`; None is not compared.

        Raises:
          UserError: naming what differs.
        """
        if len(self.temperatures) != length:
            raise UserError(
                f"the STS file has {len(self.temperatures)} temperatures, but the "
                f"proposal has {length} drafts; fit it for this length"
            )
        _compare("STS file", self.source, facts, allow_unmarked)
        return self

    def to_json(self) -> dict:
        """SGLang's STS object, and the extras."""
        out: dict[str, Any] = {
            "temperatures": list(self.temperatures),
            "dataset": self.dataset,
            "num_samples": self.num_samples,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
        }
        if self.source is not None:
            out[EXTRAS] = _source_json(self.source)
        return out


def identity_sts(length: int) -> STS:
    """Temperatures of one: confidence as the drafter gives it."""
    return STS((1.0,) * length)


def sts_from_json(data: Mapping) -> STS:
    """Reads `STS.to_json`, or SGLang's own object.

    Raises:
      UserError: a field is missing or has the wrong form.
    """
    return STS(
        temperatures=json_fields.numbers(data, "sts", "temperatures"),
        dataset=json_fields.text(data, "sts", "dataset", ""),
        num_samples=json_fields.whole(data, "sts", "num_samples", 0),
        ece_before=json_fields.numbers(data, "sts", "ece_before", ()),
        ece_after=json_fields.numbers(data, "sts", "ece_after", ()),
        source=_source_of(data, "sts"),
    )


@dataclasses.dataclass(frozen=True)
class FlatCost:
    """Steps per second by rows of the whole batch; the floor sample counts.

    Attributes:
      sample_batch_tokens: verified rows of each sample, strictly increasing.
      sample_steps_per_sec: rounds per second at each.
      max_batch_tokens: the most rows ever run; at least the last sample.
    """

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int

    def __post_init__(self):
        _increasing("sample_batch_tokens", self.sample_batch_tokens)
        _same_length(self, "sample_batch_tokens", "sample_steps_per_sec", positive=True)
        if self.max_batch_tokens < self.sample_batch_tokens[-1]:
            raise UserError(
                f"cost.max_batch_tokens={self.max_batch_tokens} is below the last "
                f"sample, {self.sample_batch_tokens[-1]} rows"
            )

    def seconds(self, requests, rows):
        """Seconds of a round; the number of requests plays no part."""
        del requests
        probes = np.asarray(self.sample_batch_tokens)
        at = np.searchsorted(probes, np.asarray(rows), side="right") - 1
        at = np.clip(at, 0, len(probes) - 1)
        return 1.0 / np.asarray(self.sample_steps_per_sec, np.float64)[at]


@dataclasses.dataclass(frozen=True)
class AdditiveCost:
    """bias + alpha(requests) + theta(rows), linear between probes, clamped.

    Attributes:
      bias_seconds: positive.
      bs_probes, alpha_seconds: by requests.
      m_probes, theta_seconds: by rows of the whole batch.
    """

    bias_seconds: float
    bs_probes: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[int, ...]
    theta_seconds: tuple[float, ...]

    def __post_init__(self):
        if not (math.isfinite(self.bias_seconds) and self.bias_seconds > 0):
            raise UserError(f"cost.bias_seconds={self.bias_seconds} must be positive")
        _increasing("bs_probes", self.bs_probes)
        _increasing("m_probes", self.m_probes)
        _same_length(self, "bs_probes", "alpha_seconds")
        _same_length(self, "m_probes", "theta_seconds")
        for size in self.bs_probes:
            if not (self.seconds(size, np.asarray(self.m_probes)) > 0).all():
                raise UserError(
                    f"cost.bias_seconds={self.bias_seconds} with alpha_seconds and "
                    f"theta_seconds gives no positive time at {size} requests"
                )

    def seconds(self, requests, rows):
        """Seconds of a round of `requests` live slots and `rows` rows."""
        return (
            self.bias_seconds
            + np.interp(requests, self.bs_probes, self.alpha_seconds)
            + np.interp(rows, self.m_probes, self.theta_seconds)
        )


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds of whole rounds: draft, verify, state and scheduling.

    Attributes:
      cost: one of the two forms.
      plain_requests: requests at which the plain step was timed, ascending.
      plain_seconds: its seconds (the choice not to draft), () where unknown.
      source: what was measured, or None (a file of another program).
    """

    cost: FlatCost | AdditiveCost
    plain_requests: tuple[int, ...] = ()
    plain_seconds: tuple[float, ...] = ()
    source: Source | None = None

    def __post_init__(self):
        if self.plain_requests or self.plain_seconds:
            _increasing("plain_requests", self.plain_requests)
            _same_length(self, "plain_requests", "plain_seconds", positive=True)

    def round_time(self, requests, rows):
        """Seconds of a speculative round.

        Args:
          requests: R, live requests (or their bucket).
          rows: R + K, verified rows (or their bucket); may be an array.
        """
        return self.cost.seconds(requests, rows)

    def plain_time(self, requests) -> float | None:
        """Seconds of a step that drafts nothing, or None where not measured."""
        if not self.plain_requests:
            return None
        return float(np.interp(requests, self.plain_requests, self.plain_seconds))

    def check(self, *, allow_unmarked: bool = False, **facts: Any) -> CostTable:
        """Itself, if it was measured on what is named.

        Args:
          allow_unmarked: accept a table that does not say (other programs').
          facts: fields of `Source`; None is not compared.

        Raises:
          UserError: naming what differs.
        """
        _compare("cost table", self.source, facts, allow_unmarked)
        return self

    def check_reach(self, ladder: tuple) -> CostTable:
        """Itself, if its probes reach the largest program: it says nothing beyond.

        Args:
          ladder: the (R, T) programs, R ascending.

        Raises:
          UserError: naming the probes that end too early.
        """
        slots, rows = ladder[-1][0], ladder[-1][1][-1]
        for name, most, unit in (
            ("sample_batch_tokens", rows, "rows"),
            ("m_probes", rows, "rows"),
            ("bs_probes", slots, "requests"),
            ("plain_requests", slots, "requests"),
        ):
            probes = getattr(self.cost, name, getattr(self, name, ()))
            if probes and probes[-1] < most:
                raise UserError(
                    f"cost.{name}={list(probes)} ends before the {most} {unit} of the "
                    "largest program; measure a table that reaches them"
                )
        return self

    def to_json(self) -> dict:
        """SGLang's flat or additive object, and the extras."""
        out: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self.cost).items()
        }
        extras: dict[str, Any] = {}
        if self.source is not None:
            extras |= _source_json(self.source)
        if self.plain_requests:
            extras["plain_requests"] = list(self.plain_requests)
            extras["plain_seconds"] = list(self.plain_seconds)
        if extras:
            out[EXTRAS] = extras
        return out


def cost_from_json(data: Mapping) -> CostTable:
    """Reads `CostTable.to_json`, or SGLang's own object.

    The form is told by the presence of `bias_seconds`.

    Raises:
      UserError: a field is missing or has the wrong form.
    """

    def numbers(name):
        return json_fields.numbers(data, "cost", name)

    def wholes(name):
        return json_fields.wholes(data, "cost", name)

    cost: FlatCost | AdditiveCost
    if "bias_seconds" in data:
        cost = AdditiveCost(
            bias_seconds=json_fields.number(data, "cost", "bias_seconds"),
            bs_probes=wholes("bs_probes"),
            alpha_seconds=numbers("alpha_seconds"),
            m_probes=wholes("m_probes"),
            theta_seconds=numbers("theta_seconds"),
        )
    else:
        probes = wholes("sample_batch_tokens")
        last = max(probes, default=0)
        cost = FlatCost(
            sample_batch_tokens=probes,
            sample_steps_per_sec=numbers("sample_steps_per_sec"),
            max_batch_tokens=json_fields.whole(data, "cost", "max_batch_tokens", last),
        )
    extras = json_fields.section(data, "cost", EXTRAS) or {}
    where = f"cost.{EXTRAS}"
    return CostTable(
        cost=cost,
        plain_requests=json_fields.wholes(extras, where, "plain_requests", ()),
        plain_seconds=json_fields.numbers(extras, where, "plain_seconds", ()),
        source=_source_of(data, "cost"),
    )


def read_sts(path: str) -> STS:
    """The STS file at `path`.

    Raises:
      UserError: it is missing, not JSON, or has the wrong form.
    """
    return sts_from_json(_read(path, "STS file"))


def read_cost(path: str) -> CostTable:
    """The cost table at `path`, flat or additive.

    Raises:
      UserError: it is missing, not JSON, or has the wrong form.
    """
    return cost_from_json(_read(path, "cost table"))


def write(record: STS | CostTable, path: str) -> None:
    """Writes a record; a reader sees the old file or the whole new one."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.write_text(json.dumps(record.to_json(), indent=2) + "\n")
    os.replace(part, target)


def _read(path: str, what: str) -> dict:
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise UserError(f"the {what} {path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the {what} {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"the {what} {path} must hold one JSON object")
    return data


def _increasing(name: str, values: tuple[int, ...]) -> None:
    if not values or any(b <= a for a, b in itertools.pairwise(values)):
        raise UserError(
            f"cost.{name}={list(values)} must be a strictly increasing list"
        )


def _same_length(record, keys: str, name: str, positive: bool = False) -> None:
    values = getattr(record, name)
    if len(values) != len(getattr(record, keys)):
        raise UserError(
            f"cost.{name} has {len(values)} values for {len(getattr(record, keys))} "
            f"{keys}; give one each"
        )
    if not all(math.isfinite(x) and (x > 0 or not positive) for x in values):
        kind = "positive" if positive else "finite"
        raise UserError(f"cost.{name}={list(values)} must be {kind} numbers")


def _source_json(source: Source) -> dict:
    out = {k: v for k, v in dataclasses.asdict(source).items() if v}
    if source.ladder:
        out["ladder"] = [[size, list(rows)] for size, rows in source.ladder]
    return out


def _source_of(data: Mapping, what: str) -> Source | None:
    extras = json_fields.section(data, what, EXTRAS)
    if extras is None:
        return None
    where = f"{what}.{EXTRAS}"
    names = ("model", "drafter", "device", "processor", "dtype", "sampling")
    return Source(
        **{name: json_fields.text(extras, where, name, "") for name in names},
        num_draft=json_fields.whole(extras, where, "num_draft", 0),
        ladder=json_fields.ladder(extras, where, "ladder"),
    )
