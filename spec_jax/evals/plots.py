"""The report's pictures: plain series in, SVG text out.

No pyplot and no global state, so a test or a notebook may draw while anything
else does. matplotlib is the `report` extra; without it there are no pictures.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

COLOURS = ("#2f6fde", "#e07b39", "#2e9e6b", "#8b5fbf", "#9aa3af", "#c2415b")
_INK, _FAINT = "#374151", "#e5e7eb"


def acceptance(series: Mapping[str, Sequence[float]]) -> str:
    """Bars: label -> share of rounds whose draft j was accepted, j = 1..M."""

    def draw(axes):
        _grouped_bars(axes, series)
        axes.set_ylim(0, 1)
        axes.set_xlabel("draft position")
        axes.set_ylabel("share of rounds")
        _legend(axes, series)

    return _figure("Accepted drafts by position", draw)


def accept_length(series: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Lines: label -> [[step, served accept length], ...]; 1.0 is plain decoding."""

    def draw(axes):
        axes.axhline(1.0, color=_INK, linewidth=0.8, linestyle=":")
        _lines(axes, series, marker="o")
        axes.set_ylabel("tokens per round")

    return _figure("Accept length while training", draw)


def loss(series: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Lines: label -> [[step, loss], ...]."""

    def draw(axes):
        _lines(axes, series)
        axes.set_ylabel("loss (nats)")

    return _figure("Training loss", draw)


def cost(series: Mapping[str, Mapping[str, float]]) -> str:
    """Stacked bars: way of decoding -> part -> milliseconds per emitted token."""
    parts = list(dict.fromkeys(part for bar in series.values() for part in bar))

    def draw(axes):
        rows = list(series)[::-1]
        left = [0.0] * len(rows)
        for i, part in enumerate(parts):
            sizes = [float(series[row].get(part, 0.0)) for row in rows]
            axes.barh(rows, sizes, 0.55, left, label=part, color=_colour(i))
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        for y, total in enumerate(left):
            axes.annotate(
                f"{total:.1f}",
                (total, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=_INK,
            )
        axes.set_xlim(0, max(left, default=1.0) * 1.15 or 1.0)
        axes.set_xlabel("ms per emitted token")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=_FAINT)
        axes.legend(
            frameon=False,
            ncols=max(1, len(parts)),
            loc="lower center",
            bbox_to_anchor=(0.45, -0.42),
            columnspacing=1.2,
            handlelength=1.0,
        )

    return _figure("Where the time goes", draw)


def histogram(series: Mapping[str, Sequence[float]]) -> str:
    """Bars: label -> number of rounds that emitted 1, 2, ... tokens."""

    shares = {k: [c / (sum(v) or 1) for c in v] for k, v in series.items()}

    def draw(axes):
        _grouped_bars(axes, shares)
        axes.set_xlabel("tokens emitted by a round")
        axes.set_ylabel("share of rounds")
        _legend(axes, series)

    return _figure("Tokens per round", draw)


def verify_len(series: Mapping[str, Sequence[float]]) -> str:
    """Bars: label -> number of verifies of 1, 2, ... rows of one request."""
    shares = {k: [c / (sum(v) or 1) for c in v] for k, v in series.items()}

    def draw(axes):
        _grouped_bars(axes, shares)
        axes.set_xlabel("rows verified of one request, anchor included")
        axes.set_ylabel("share of verifies")
        _legend(axes, series)

    return _figure("Verify lengths", draw)


def reliability(series: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Lines: label -> [[mean survival of a bin, share accepted, count], ...]."""

    def draw(axes):
        axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, linestyle=":")
        for i, (label, rows) in enumerate(series.items()):
            means, shares, _ = zip(*rows, strict=True) if rows else ((), (), ())
            axes.plot(
                means,
                shares,
                label=label,
                color=_colour(i),
                linewidth=1.6,
                marker="o",
                markersize=3.5,
            )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("survival, predicted")
        axes.set_ylabel("survival, measured")
        _legend(axes, series)

    return _figure("Calibration of the survival", draw)


def throughput(series: Mapping[str, Mapping[str, float]]) -> str:
    """Bars: way of decoding -> requests at once -> tokens per second."""
    loads = list(dict.fromkeys(load for bar in series.values() for load in bar))
    rates = {
        label: [float(bar.get(load, 0.0)) for load in loads]
        for label, bar in series.items()
    }

    def draw(axes):
        _grouped_bars(axes, rates)
        axes.set_xticks(range(1, len(loads) + 1), loads)
        axes.set_xlabel("requests at once")
        axes.set_ylabel("tokens per second")
        _legend(axes, series)

    return _figure("Speed under load", draw)


# Series a run may report, in the order they are shown.
PLOTS: dict[str, Callable[[Any], str]] = {
    "acceptance": acceptance,
    "accept_length": accept_length,
    "loss": loss,
    "cost": cost,
    "throughput": throughput,
    "histogram": histogram,
    "verify_len": verify_len,
    "reliability": reliability,
}


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _grouped_bars(axes, series: Mapping[str, Sequence[float]]):
    """One group of bars at each of 1, 2, ...; one bar of it for each label."""
    width = 0.8 / max(1, len(series))
    for i, (label, heights) in enumerate(series.items()):
        shift = 1 + (i - (len(series) - 1) / 2) * width
        at = [j + shift for j in range(len(heights))]
        axes.bar(at, heights, width * 0.92, label=label, color=_colour(i))
    axes.set_xticks(range(1, max(map(len, series.values()), default=0) + 1))


def _lines(axes, series: Mapping[str, Sequence[Sequence[float]]], marker: str = ""):
    for i, (label, points) in enumerate(series.items()):
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(
            steps,
            values,
            label=label,
            color=_colour(i),
            linewidth=1.6,
            marker=marker,
            markersize=3.5,
        )
    axes.set_xlabel("optimiser step")
    _legend(axes, series)


def _legend(axes, series: Mapping[str, Any]):
    if len(series) > 1:
        axes.legend(frameon=False)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _figure(title: str, draw: Callable[[Any], None]) -> str:
    """One figure as an `<svg>` element with real text."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style = {
        "font.family": "sans-serif",
        "font.size": 9,
        "svg.fonttype": "none",
        # Ids that differ from picture to picture and not from run to run.
        "svg.hashsalt": title,
        "axes.edgecolor": "#9ca3af",
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "text.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.4, 3.1), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.grid(axis="y", color=_FAINT)
        draw(axes)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
