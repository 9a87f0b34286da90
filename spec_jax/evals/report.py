"""One run's record: `report.json` for machines, `report.html` for people.

Series are plain dicts, each optional; `plots.PLOTS` says what each holds:

    acceptance     {label: [share of rounds whose draft j was accepted, ...]}
    accept_length  {label: [[step, served accept length], ...]}
    loss           {label: [[step, loss], ...]}
    cost           {way of decoding: {part: ms per emitted token}}
    throughput     {way of decoding: {requests at once: tokens per second}}
    histogram      {label: [rounds that emitted 1, 2, ... tokens]}
    verify_len     {label: [verifies of 1, 2, ... rows of one request]}
    reliability    {label: [[mean survival, share accepted, count] of a bin, ...]}
    samples        [{"title": str, "pieces": [[text, kind], ...]}, ...] with kind
                   "prompt", "accepted" (a draft that was accepted) or "target"

Both files appear whole or not at all, the HTML first: where `report.json` is,
the run is done.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import rich.console
import rich.table
import rich.text

from spec_jax.evals import machine, plots

JSON_NAME, HTML_NAME = "report.json", "report.html"

# Shown large at the top of the page, where a run has them.
CARDS = (
    "accept_length",
    "accept_length_shuffled",
    "speedup",
    "greedy_identical",
    "compiles_after_warmup",
    "verify8_over_plain",
    "overhead_fraction",
    "plain_over_transformers",
    "wall_s",
)
KNOWN_SERIES = ", ".join(plots.PLOTS)
KINDS = ("prompt", "accepted", "target")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of a row is its name."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def write_report(
    workdir: str | os.PathLike,
    recipe: str,
    cfg_hash: str,
    metrics: Mapping[str, Any],
    series: Mapping[str, Any] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    changes: Sequence[tuple[str, Any, Any]] = (),
    load: machine.Load | None = None,
    max_load: float = 1.0,
    started: float | None = None,
    root: str | os.PathLike = ".",
) -> dict[str, Any]:
    """Writes both files and returns what `report.json` holds.

    Args:
      workdir: folder, made if absent.
      recipe: what a person calls the recipe ("quickstart").
      cfg_hash: hash of the resolved configuration.
      metrics: numbers, texts and nested dicts of them; keys become strings and
        numbers that are not finite become null.
      series: see the module.
      config: the resolved configuration as plain values.
      changes: (field, default, value) of every value that is not the default.
      load: the machine's load during the run.
      max_load: share that other processes may use before `valid` is false.
      started: unix time of the start, in seconds.
      root: checkout whose commit is recorded.

    Raises:
      ValueError: an unknown series or kind of sample text, or a value that has
        no place in JSON.
    """
    series = dict(series or {})
    samples = series.pop("samples", [])
    unknown = sorted(set(series) - set(plots.PLOTS))
    if unknown:
        raise ValueError(
            f"series {unknown[0]!r} is not known; use samples or one of {KNOWN_SERIES}"
        )
    for sample in samples:
        for _, kind in sample["pieces"]:
            if kind not in KINDS:
                raise ValueError(
                    f"sample text of kind {kind!r}; use {', '.join(KINDS)}"
                )
    config = dict(config or {})
    report = _json_safe(
        {
            "recipe": recipe,
            "config_hash": cfg_hash,
            "metrics": metrics,
            "valid": load is None or load.valid(max_load),
            "load": dataclasses.asdict(load) if load else None,
            "max_load": max_load,
            **machine.revision(root),
            "versions": machine.versions(),
            "device": machine.device(),
            "dtype": (config.get("target") or {}).get("dtype", "float32"),
            "started": _time(started),
            "finished": _time(None),
            "changes": list(changes),
            "config": config,
            "series": {**series, "samples": samples},
        }
    )
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(workdir / HTML_NAME, render(report))
    write_atomically(
        workdir / JSON_NAME, json.dumps(report, indent=1, allow_nan=False) + "\n"
    )
    return report


def read_report(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """The report of a finished run; None without one or with an unreadable one."""
    try:
        found = json.loads((pathlib.Path(workdir) / JSON_NAME).read_text())
        return found if isinstance(found.get("metrics"), dict) else None
    except (OSError, ValueError, AttributeError):
        return None


def render(report: Mapping[str, Any]) -> str:
    """The page of a report as `write_report` returns it; nothing is fetched."""
    series = dict(report["series"])
    samples = series.pop("samples", [])
    names = [n for n in plots.PLOTS if series.get(n)]
    drawn = [plots.PLOTS[n](series[n]) for n in names] if plots.available() else []
    load = report["load"] or {}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = pathlib.Path(__file__).with_name("report_template.html")
    metrics = report["metrics"]
    return environment.from_string(template.read_text("utf-8")).render(
        report=report,
        cards=[(n, format_value(metrics[n])) for n in CARDS if n in metrics],
        plots=drawn,
        series_names=names,
        samples=samples,
        tables=tables(metrics),
        config_text=json.dumps(report["config"], indent=1),
        load_words=load_words(load, report["max_load"]),
    )


def load_words(load: Mapping[str, Any], max_load: float) -> str:
    """One clause about the load, for the page and the terminal."""
    if not load:
        return "the load was not measured"
    if load["others"] is None:
        return f"load per core {load['before']:.2f} before, bound {max_load:.2f}"
    return (
        f"others used {load['others']:.0%} of the cores, bound {max_load:.0%}; load "
        f"average per core {load['before']:.2f} before, {load['after']:.2f} after"
    )


def print_report(
    report: Mapping[str, Any], console: rich.console.Console | None = None
):
    """The metrics as tables on the terminal, then whether they count."""
    console = console or rich.console.Console()
    for table in tables(report["metrics"]):
        shown = rich.table.Table(
            title=table.title or report["recipe"],
            title_justify="left",
            title_style="bold",
            show_header=bool(table.header),
        )
        width = max(len(row) for row in table.rows)
        header = (*table.header, *[""] * width)[:width]
        for i, name in enumerate(header):
            shown.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*map(rich.text.Text, row))
        console.print(shown)
    words = load_words(report["load"] or {}, report["max_load"])
    if not report["valid"]:
        words = f"[bold red]valid: false[/] ({words}): measure again when idle"
    else:
        words = f"[green]valid[/] ({words})"
    console.print(words, soft_wrap=True, highlight=False)


def tables(metrics: Mapping[str, Any], title: str = "") -> list[Table]:
    """Metrics as tables: numbers first, then one table for each nested dict.

    A dict whose values are all flat dicts is one table, a row for each key.
    """
    flat = {k: v for k, v in metrics.items() if not isinstance(v, Mapping)}
    nested = {k: v for k, v in metrics.items() if isinstance(v, Mapping) and v}
    found = []
    if flat:
        rows = tuple((str(k), format_value(v)) for k, v in flat.items())
        found.append(Table(title, (), rows))
    if nested and not flat and title and all(_is_flat(v) for v in nested.values()):
        columns = list(dict.fromkeys(c for v in nested.values() for c in v))
        if len(columns) <= 8:
            rows = tuple(
                (str(k), *(format_value(v[c]) if c in v else "" for c in columns))
                for k, v in nested.items()
            )
            return [Table(title, ("", *map(str, columns)), rows)]
    for name, value in nested.items():
        found += tables(value, f"{title}.{name}" if title else str(name))
    return found


def _is_flat(value: Mapping[str, Any]) -> bool:
    return not any(isinstance(v, Mapping) for v in value.values())


def format_value(value: Any) -> str:
    """A number as a person reads it: yes/no, thousands, four significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value and not 1e-3 <= abs(value) < 1e6:
            return f"{value:.2e}"
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(v) for v in value)
    return str(value)


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Replaces `path` in one step; a reader sees the old text or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def _json_safe(value: Any) -> Any:
    """Plain JSON values; numpy and JAX scalars and arrays included."""
    if isinstance(value, Mapping):
        return {str(k): _json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(v) for v in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "__array__"):
        return _json_safe(np.asarray(value).tolist())
    raise ValueError(f"{value!r} ({type(value).__name__}) has no place in a report")


def _time(seconds: float | None) -> str:
    moment = (
        datetime.datetime.now(datetime.UTC)
        if seconds is None
        else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    )
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
