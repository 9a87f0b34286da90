"""What must be true after a soak."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from experiments.soak_run import Log
from experiments.soak_workload import Part
from spec_jax.evals import identity

REPEATED = 40  # seeded requests that are decoded again, alone


def check_outputs(part: Part, log: Log, share: float) -> dict[str, Any]:
    """Greedy answers against plain decoding's; an aborted one is a beginning."""
    greedy = [h for h, r in log.asked.items() if r.settings.temperature == 0]
    greedy = greedy[: round(share * len(greedy))]
    expected = part.reference.generate(
        [list(log.asked[h].prompt) for h in greedy],
        [
            dataclasses.replace(
                log.asked[h].settings, num_draft=None, logprobs=False, top_logprobs=0
            )
            for h in greedy
        ],
    )
    wrong, ties, first, first_tie = 0, 0, "", ""
    for handle, plain in zip(greedy, expected, strict=True):
        got, request = log.done[handle], log.asked[handle]
        is_whole = got.finish_reason != "abort"
        want = plain.tokens if is_whole else plain.tokens[: len(got.tokens)]
        same_end = not is_whole or got.finish_reason == plain.finish_reason
        if got.tokens == want and same_end:
            continue
        found = identity.compare(
            part.engine.spec,
            part.engine.weights.target,
            part.engine,
            [request.prompt],
            [want],
            [got.tokens],
            dataclasses.replace(request.settings, max_new_tokens=max(len(want), 1))
            if not is_whole
            else request.settings,
        )
        ties += found.near_ties
        first_tie = first_tie or found.first_tie
        if not found.identical or (got.tokens == want and not same_end):
            wrong += 1
            first = first or (
                f"request {handle}: {found.first_difference or got.finish_reason}"
            )
    return {
        "greedy_compared": len(greedy),
        "wrong_outputs": wrong,
        "near_ties": ties,
        "first_tie": first_tie,
        "first_wrong": first,
    }


def check_seeds(part: Part, log: Log) -> dict[str, int]:
    """Seeded requests with a window of their own, again and alone."""
    own = [
        handle
        for handle, request in log.asked.items()
        if request.settings.temperature > 0
        and request.settings.seed is not None
        and (request.settings.num_draft is not None or not request.settings.speculate)
    ][:REPEATED]
    differ = 0
    for handle in own:
        request, got = log.asked[handle], log.done[handle]
        again = part.engine.generate([list(request.prompt)], request.settings)[0]
        differ += again.tokens[: len(got.tokens)] != got.tokens
    return {"seeds_repeated": len(own), "seeds_not_reproduced": differ}


def check_books(part: Part, log: Log, before: dict) -> dict[str, Any]:
    """Slots, queue and counts after the last request.

    `auto_off_met` and `stop_strings_met` tell whether everything that the engine
    offers there happened: each reason to stop drafting, and an end by a stop string.
    """
    engine, after = part.engine, part.engine.metrics()
    finished = {
        reason: count - before["finished"][reason]
        for reason, count in after["finished"].items()
    }
    emitted = sum(len(g.tokens) for g in log.done.values())
    is_balanced = (
        set(log.done) == set(log.asked)
        and sum(finished.values()) == len(log.asked)
        and after["emitted"] - before["emitted"] == emitted
        and finished["abort"] == after["aborted"] - before["aborted"] == log.aborted
        and after["retracted"] - before["retracted"] == log.retracted
        and finished["error"] == 0
        and all(g.finish_reason for g in log.done.values())
    )
    auto_off = {
        reason: count - before["auto_off"][reason]
        for reason, count in after["auto_off"].items()
    }
    stopped_by_text = sum(isinstance(g.stopped_by, str) for g in log.done.values())
    idle = after["running"] == after["queued"] == 0 and not engine.busy
    slots = engine.state.slots
    device_idle = not bool(np.asarray(slots.active_B).any())
    return {
        "finished": finished,
        "emitted": emitted,
        "rounds": after["rounds"] - before["rounds"],
        "auto_off": auto_off,
        "auto_off_met": engine.options.auto_off is None or all(auto_off.values()),
        "stopped_by_text": stopped_by_text,
        "stop_strings_met": engine.tokenizer is None or stopped_by_text > 0,
        "metrics_balanced": bool(is_balanced),
        "slots_returned": sorted(engine.table.free) == list(range(engine.options.slots))
        and idle
        and device_idle,
    }


def growth(values: list[float]) -> float:
    """How much the last value exceeds those of the first fifth."""
    return values[-1] - max(values[: max(len(values) // 5, 1)])
