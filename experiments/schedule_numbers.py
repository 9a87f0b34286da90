"""What `bench_schedule`'s runs say: ways of decoding, their numbers, the verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import serve_offline
from experiments.closed_loop import Run
from spec_jax.config import schema
from spec_jax.decode.plan import CAP_ACCEPT, COMPACT, STATIC
from spec_jax.decode.request import Settings

PLAIN = "plain"
MODES = (PLAIN, STATIC, CAP_ACCEPT, COMPACT)

# (name of a way, requests in flight) -> its runs, one of each turn.
Runs = dict[tuple[str, int], list[Run]]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of decoding.

    Attributes:
      name: a mode, or "fixed<w>".
      engine: which engine decodes so.
      window: drafts of a fixed window; None: the engine decides.
    """

    name: str
    engine: str
    window: int | None = None

    def change(self, settings: Settings) -> Settings:
        """A request's settings under this way."""
        if self.window is None:
            return settings
        if self.window == 0:
            return dataclasses.replace(settings, speculate=False)
        return dataclasses.replace(settings, num_draft=self.window)


def fixed(window: int) -> str:
    """The name of a fixed window."""
    return f"fixed{window}"


def ways_of(windows: Sequence[int]) -> list[Way]:
    """Every mode, and every fixed window."""
    return [
        *(Way(mode, mode) for mode in MODES),
        *(Way(fixed(w), COMPACT, w) for w in windows),
    ]


def ratio(runs: Runs, one: str, other: str, load: int) -> float:
    """Median over the turns of `one`'s tokens per second over `other`'s."""
    pairs = zip(runs[one, load], runs[other, load], strict=True)
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)


def way_metrics(runs: Sequence[Run]) -> dict[str, Any]:
    """One way at one load: medians over its runs.

    `decode_tokens_per_s` is of the rounds before which no prompt was filled.
    """
    rates, decode = [run.tokens_per_s for run in runs], []
    emitted = slots = 0
    for run in runs:
        apart = [row for row in run.rows if not row["filled"]]
        seconds = sum(row["measured_s"] for row in apart)
        if seconds > 0:
            decode.append(sum(sum(row["emitted"]) for row in apart) / seconds)
        emitted += sum(sum(row["emitted"]) for row in run.rows)
        slots += sum(len(row["emitted"]) for row in run.rows)
    return {
        "tokens_per_s": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "decode_tokens_per_s": statistics.median(decode) if decode else None,
        "accept_length": emitted / slots if slots else None,
        "steady_s": statistics.median(run.seconds for run in runs),
    }


def summary(
    cfg: schema.BenchSchedule, runs: Runs, windows: Sequence[int], num_draft: int
) -> dict[str, Any]:
    """Every number of the report but the verdict; keys of loads are texts."""
    loads = {str(load): load for load in cfg.concurrency}
    modes = {
        mode: {text: way_metrics(runs[mode, load]) for text, load in loads.items()}
        for mode in MODES
    }
    fixed_rates = {
        str(w): {
            text: way_metrics(runs[fixed(w), load])["tokens_per_s"]
            for text, load in loads.items()
        }
        for w in windows
    }
    best: dict[str, Any] = {}
    over: dict[str, dict[str, float]] = {"best_fixed": {}, STATIC: {}, PLAIN: {}}
    rounds, counted, plans = {}, {}, {}
    for text, load in loads.items():
        # The ends of the sweep are also run by engines that can do nothing else.
        rivals = {fixed(w): w for w in windows} | {PLAIN: 0, STATIC: num_draft}
        name = max(
            rivals,
            key=lambda way: statistics.median(r.tokens_per_s for r in runs[way, load]),
        )
        best[text] = {
            "window": rivals[name],
            "tokens_per_s": way_metrics(runs[name, load])["tokens_per_s"],
            "engine": name if name in MODES else COMPACT,
        }
        over["best_fixed"][text] = ratio(runs, COMPACT, name, load)
        over[STATIC][text] = ratio(runs, COMPACT, STATIC, load)
        over[PLAIN][text] = ratio(runs, COMPACT, PLAIN, load)
        rows = [row for run in runs[COMPACT, load] for row in run.rows]
        rounds[text] = serve_offline.round_metrics(rows, num_draft)
        took = sum(row["measured_s"] for row in rows)
        plans[text] = sum(run.plan_s for run in runs[COMPACT, load]) / max(took, 1e-9)
        budgets = [row["K"] for row in rows]
        drafting = [row["K"] for row in rows if row["K"]]
        counted[text] = {
            "rounds": len(rows),
            "mean": float(np.mean(budgets)) if budgets else None,
            "distinct": len(set(budgets)),
            "drafting_rounds": len(drafting),
            "distinct_drafting": len(set(drafting)),
        }
    verified = {
        f"{text} at once": [
            found["verify_len_histogram"].get(str(n), 0)
            for n in range(1, num_draft + 2)
        ]
        for text, found in rounds.items()
    }
    rates = {
        mode: {text: each[text]["tokens_per_s"] for text in loads}
        for mode, each in modes.items()
    }
    rates["best fixed"] = {text: best[text]["tokens_per_s"] for text in loads}
    return {
        "modes": modes,
        "fixed": fixed_rates,
        "best_fixed": best,
        "compact_over_best_fixed": over["best_fixed"],
        "compact_over_static": over[STATIC],
        "compact_over_plain": over[PLAIN],
        "plan_fraction": max(plans.values()),
        "plan_fraction_at": plans,
        "verify_len_histogram": {
            text: found["verify_len_histogram"] for text, found in rounds.items()
        },
        "programs": {text: found["programs"] for text, found in rounds.items()},
        "shares": {text: found["shares"] for text, found in rounds.items()},
        "budgets": counted,
        "only_plain_at": [
            text for text, each in counted.items() if not each["drafting_rounds"]
        ],
        "predicted_over_measured": {
            text: found["predicted_over_measured"] for text, found in rounds.items()
        },
        "series": {"verify_len": verified, "throughput": rates},
    }


def judge(
    cfg: schema.BenchSchedule,
    found: Mapping[str, Any],
    identical: bool,
    compiled: int,
) -> dict[str, dict[str, Any]]:
    """Each claim: what it requires, what was measured, and whether it holds.

    A claim about loads that were not run holds neither way (None), and neither does
    one about rounds that draft where none did: `only_plain_at` names those loads.
    """

    def at(name: str, low: int = 1, high: float = math.inf) -> list[float]:
        return [found[name][str(c)] for c in cfg.concurrency if low <= c <= high]

    drafting = [str(c) for c in cfg.concurrency if str(c) not in found["only_plain_at"]]
    shares = [found["shares"][text]["partial_budget"] for text in drafting]
    varied = [found["budgets"][text]["distinct_drafting"] for text in drafting]

    def offs(kind: str, needed: Sequence[str]) -> list[float]:
        """How far the loads' medians are off; [] where a needed one is not known."""
        each = {text: x[kind] for text, x in found["predicted_over_measured"].items()}
        if not all(each[text] for text in needed):
            return []
        return [abs(x["p50"] - 1.0) for x in each.values() if x]

    def least(values, bound: float) -> dict[str, Any]:
        return _claim(min(values, default=None), f">= {bound:g}", lambda x: x >= bound)

    def most(values, bound: float) -> dict[str, Any]:
        return _claim(max(values, default=None), f"<= {bound:g}", lambda x: x <= bound)

    gained = max(at("compact_over_best_fixed", 2, 8), default=None)
    claims = {
        "compact over best fixed, lowest": least(at("compact_over_best_fixed"), 0.95),
        "compact over best fixed, highest of 2..8": _claim(
            gained, ">= 1.05", lambda x: x >= 1.05
        ),
        "compact over static, lowest from 16": least(
            at("compact_over_static", 16), 1.2
        ),
        "compact over plain, lowest": least(at("compact_over_plain"), 0.97),
        "rounds with 0 < K < R x M, lowest share where any drafts": _claim(
            min(shares, default=None), "> 0", lambda x: x > 0
        ),
        "different budgets K of rounds that draft, fewest": least(varied, 2),
        "planning of the round, highest": most(at("plan_fraction_at"), 0.02),
        "predicted over measured round that drafts, median off by": most(
            offs("draft", drafting), 0.15
        ),
        "greedy texts are the plain ones": _claim(identical, "yes", bool),
        "compiles after warm-up": _claim(compiled, "0", lambda x: x == 0),
    }
    if any(x["rounds"] > x["drafting_rounds"] for x in found["budgets"].values()):
        claims["predicted over measured plain round, median off by"] = most(
            offs("plain", found["only_plain_at"]), 0.15
        )
    return claims


def _claim(value, required: str, holds: Callable[[Any], bool]) -> dict[str, Any]:
    is_known = value is not None
    return {
        "required": required,
        "measured": value,
        "holds": bool(holds(value)) if is_known else None,
    }
