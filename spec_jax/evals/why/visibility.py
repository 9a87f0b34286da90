"""Visibility: which features may and do move a block, by perturbation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spec_jax.evals.why.findings import DIFFERS, SKIPPED, Finding, verdict
from spec_jax.evals.why.runner import NUM_ANCHORS, Runner
from spec_jax.evals.why.text import Text, noised


def visibility_findings(runner: Runner, text: Text) -> Iterator[Finding]:
    """Which features move a block, in training and in serving (A1, A15).

    The feature at p may move no block with anchor <= p, bit for bit; every plane
    before the anchor must move one.

    Args:
      runner: the drafter.
      text: padded, with `NUM_ANCHORS` + M real rows after its middle.
    """
    if not runner.reads:
        yield Finding("visibility", "features", SKIPPED, "it reads none")
        return
    first = max(2, min(text.length // 2, text.length - NUM_ANCHORS - 2))
    last = first + NUM_ANCHORS
    if runner.trains:
        yield from _training_visibility(runner, text, first, last)
    yield from _serving_visibility(runner, text, last)


def _training_visibility(runner: Runner, text: Text, first: int, last: int):
    clean = runner.train(text, first, last)
    wanted = list(range(first, last))
    absent = [a for a in wanted if clean.at(a) is None]
    if absent:
        yield Finding(
            "visibility",
            "training anchors",
            DIFFERS,
            f"tokens {first} to {last} are supervised, but no block is anchored at "
            f"{absent[0]}",
        )
        return
    leak = ""
    for edge in (last - 1, first + 3):
        moved = runner.train(noised(text, slice(edge, None)), first, last)
        for anchor in wanted[: edge - first + 1]:
            one, other = clean.logits_XMU[clean.at(anchor)], moved.logits_XMU
            slot = _first_moved(one, other[moved.at(anchor)])
            if slot is not None and not leak:
                leak = (
                    f"features from position {edge} on move slot {slot} of the block "
                    f"anchored at {anchor}, which must not see them"
                )
    item = "training, features from the anchor on"
    yield verdict("visibility", item, leak, "move nothing")
    # Padding may hold anything (A16).
    junk = text.padded(len(text.tokens_S))
    if junk.length < len(junk.tokens_S):
        junk.features_SLD[junk.length :] = np.nan
        junk.hidden_SD[junk.length :] = np.nan
        moved = runner.train(junk, first, last)
        leak = ""
        for anchor in wanted:
            one, other = clean.logits_XMU[clean.at(anchor)], moved.logits_XMU
            if _first_moved(one, other[moved.at(anchor)]) is not None:
                leak = f"NaN behind the text moves the block anchored at {anchor}"
        yield verdict("visibility", "training, padding", leak, "moves nothing")
    for plane in runner.reads:
        moved = runner.train(noised(text, slice(0, first), plane), first, last)
        alive = any(
            _first_moved(clean.logits_XMU[clean.at(a)], moved.logits_XMU[moved.at(a)])
            is not None
            for a in wanted
        )
        yield _alive(runner, "training", plane, alive)


def _serving_visibility(runner: Runner, text: Text, anchor: int):
    clean = runner.serve(text, anchor)
    moved = runner.serve(noised(text, slice(anchor, None)), anchor)
    slot = _first_moved(clean.logits_MU, moved.logits_MU)
    leak = (
        ""
        if slot is None
        else f"rows from position {anchor} on, which do not count, move slot {slot} of "
        f"the block anchored there"
    )
    item = "serving, features from the anchor on"
    yield verdict("visibility", item, leak, "move nothing")
    for plane in runner.reads:
        moved = runner.serve(noised(text, slice(0, anchor), plane), anchor)
        slot = _first_moved(clean.logits_MU, moved.logits_MU)
        yield _alive(runner, "serving", plane, slot is not None)


def _first_moved(one_MU: np.ndarray, other_MU: np.ndarray) -> int | None:
    moved_M = (one_MU != other_MU).any(-1)
    return int(np.argmax(moved_M)) if moved_M.any() else None


def _alive(runner: Runner, path: str, plane: int, alive: bool) -> Finding:
    name = _plane_name(runner, plane)
    dead = "" if alive else f"no block moves when {name} before it does: a dead plane"
    return verdict("visibility", f"{path}, {name} before the anchor", dead, "moves it")


def _plane_name(runner: Runner, plane: int) -> str:
    if plane == -1:
        return "last hidden"
    return f"layer {runner.drafter.needs.layer_ids[plane]}"
