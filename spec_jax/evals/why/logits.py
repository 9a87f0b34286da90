"""Logits: labels, and draft logits of training and serving, slot by slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from spec_jax.core import verify_layout
from spec_jax.evals.why.findings import DIFFERS, OK, SKIPPED, Finding, verdict
from spec_jax.evals.why.runner import SHORT, Runner
from spec_jax.evals.why.text import Text


def label_findings(runner: Runner, text: Text) -> Iterator[Finding]:
    """What row j of a block is taught, by the token and by the teacher (A1, A3, A7).

    Draft j's token is its label, the target's row before that token its teacher,
    and of the rows whose token is supervised every slot has some.
    """
    size, vocab = len(text.tokens_S), runner.frozen.embed_VD.shape[0]
    # Neighbours differ, whatever the text repeats.
    tokens_S = (np.arange(size) % vocab).astype(text.tokens_S.dtype)
    hidden_SD = np.broadcast_to(np.arange(size)[:, None], text.hidden_SD.shape)
    ramp = dataclasses.replace(
        text, tokens_S=tokens_S, hidden_SD=hidden_SD.astype(text.hidden_SD.dtype)
    )
    rows = runner.train(ramp, 1, text.length - 1)
    size_m = rows.labels_XM.shape[1]
    taught_XM = rows.valid_XM > 0
    places_XM = np.array([_draft_places(int(a), size_m) for a in rows.anchors_X])
    wrong_XM = taught_XM & (rows.labels_XM != tokens_S[places_XM % size])
    # Anchor 0 stands for a block that was not sampled.
    inside_XM = (rows.anchors_X > 0)[:, None] & (places_XM < text.length)
    never_M = inside_XM.any(0) & ~taught_XM.any(0)
    fault = ""
    if wrong_XM.any():
        x, slot = np.argwhere(wrong_XM)[0]
        at = places_XM[x, slot]
        off = int(rows.labels_XM[x, slot]) - int(tokens_S[at])
        fault = (
            f"slot {slot} of the block anchored at {rows.anchors_X[x]} is taught the "
            f"token at position {at + off}; its draft is verified at {at}"
        )
    elif not taught_XM.any():
        fault = "no row is supervised"
    elif never_M.any():
        fault = (
            f"slot {np.argmax(never_M)} is never supervised, though its tokens are: "
            "its draft is served untrained"
        )
    yield verdict("logits", "labels", fault, f"of {size_m} slots")
    if rows.teacher_XM is None:
        return
    wrong_XM = taught_XM & (rows.teacher_XM != places_XM - 1)
    fault = ""
    if wrong_XM.any():
        x, slot = np.argwhere(wrong_XM)[0]
        fault = (
            f"slot {slot} of the block anchored at {rows.anchors_X[x]} is taught the "
            f"target's row {rows.teacher_XM[x, slot]:g}; row {places_XM[x, slot] - 1} "
            "predicts its token"
        )
    yield verdict("logits", "teacher rows", fault, f"of {size_m} slots")


def _draft_places(anchor: int, num_draft: int) -> list[int]:
    """Positions at which the target verifies the drafts of a round."""
    layout = verify_layout.chain(
        jnp.zeros((1,), jnp.int32),
        jnp.zeros((1, num_draft), jnp.int32),
        jnp.full((1,), num_draft + 1, jnp.int32),
    )
    return np.asarray(layout.positions(np.array([anchor])))[0, 1:].tolist()


def logit_findings(
    runner: Runner, text: Text, positions: Mapping[str, tuple[Text, int]]
) -> Iterator[Finding]:
    """Labels, then draft logits of training and serving at each position.

    Training gets the text with the drafts that serving chose in it, so that rows
    that depend on earlier drafts have the same prefix.

    Args:
      runner: the drafter.
      text: for the labels.
      positions: name -> (text, anchor).
    """
    if not runner.trains:
        yield Finding("logits", "training", SKIPPED, "there is nothing to train")
        return
    yield from label_findings(runner, text)
    for name, (source, anchor) in positions.items():
        yield position_finding(runner, name, source, anchor)
    yield short_finding(runner, text)


def short_finding(runner: Runner, text: Text) -> Finding:
    """A row of few tokens beside the text: finite, and as served (A15, A16).

    What no block is trained on is multiplied by 0 in the loss, which a NaN survives.
    """
    _, rows = runner.train_beside(text, 1, text.length - 1)
    item, anchor = "a short row in the batch", SHORT - 2
    bad_X = ~np.isfinite(rows.logits_XMU).all((-1, -2))
    index = rows.at(anchor)
    if bad_X.any():
        where = int(rows.anchors_X[np.argmax(bad_X)])
        detail = f"the block anchored at {where or 'none of its tokens'} is not finite"
        return Finding("logits", item, DIFFERS, detail)
    if index is None:
        detail = f"training has no block anchored at {anchor} of its {SHORT} tokens"
        return Finding("logits", item, DIFFERS, detail)
    # Later slots may follow tokens that this text does not have.
    served = runner.serve(text.cut(SHORT), anchor).logits_MU[:1]
    gaps, allowed, slot = slots_apart(runner, served, rows.logits_XMU[index][:1])
    fault = ""
    if slot is not None:
        fault = (
            f"slot 0 at position {anchor} of {SHORT} tokens differs by {gaps[0]:.3g} "
            f"(allowed {allowed:.2g}), though it is served alike"
        )
    return verdict("logits", item, fault, f"finite, max abs {gaps[0]:.1e}")


def position_finding(runner: Runner, name: str, text: Text, anchor: int) -> Finding:
    """Training logits against serving logits of one block, slot by slot."""
    served = runner.serve(text, anchor)
    tokens_S = text.tokens_S.copy()
    tokens_S[_draft_places(anchor, len(served.tokens_M))] = served.tokens_M
    follows = dataclasses.replace(text, tokens_S=tokens_S)
    trained = runner.train(follows, anchor, anchor + 1)
    index = trained.at(anchor)
    if index is None:
        detail = f"training has no block anchored at {anchor}"
        return Finding("logits", name, DIFFERS, detail)
    gaps, allowed, slot = slots_apart(
        runner, served.logits_MU, trained.logits_XMU[index]
    )
    slots = len(gaps)
    if slot is not None:
        every = ", ".join(f"{g:.3g}" for g in gaps)
        detail = (
            f"slot {slot} differs first at position {anchor} (by slot: {every}; "
            f"allowed {allowed:.2g})"
        )
        return Finding("logits", name, DIFFERS, detail)
    if served.confidence_M is not None and trained.confidence_XM is not None:
        apart = served.confidence_M[:slots] - trained.confidence_XM[index][:slots]
        if not np.abs(apart).max() <= allowed:
            slot = int(np.argmax(~(np.abs(apart) <= allowed)))
            detail = f"the confidence of slot {slot} differs by {apart[slot]:.3g}"
            return Finding("logits", name, DIFFERS, detail)
    return Finding("logits", name, OK, f"{slots} slots, max abs {gaps.max():.1e}")


def slots_apart(
    runner: Runner, served_MU: np.ndarray, other_MU: np.ndarray
) -> tuple[np.ndarray, float, int | None]:
    """How far two proposals are apart, over the slots that both have.

    Returns:
      (gap of each slot, the largest that is allowed, the first slot beyond it or
      None).
    """
    slots = min(len(served_MU), len(other_MU))
    gaps = slot_gaps(served_MU[:slots], other_MU[:slots])
    size = np.abs(served_MU[np.isfinite(served_MU)]).max(initial=1.0)
    allowed = runner.tolerance * float(size)
    bad = np.nonzero(~(gaps <= allowed))[0]
    return gaps, allowed, int(bad[0]) if bad.size else None


def slot_gaps(served_MU: np.ndarray, trained_MU: np.ndarray) -> np.ndarray:
    """Largest difference of each slot; columns that are no candidate are left out."""
    here = ~np.isneginf(served_MU)
    good = np.isfinite(served_MU) & np.isfinite(trained_MU)
    gap = np.full(served_MU.shape, np.inf)
    gap[good] = np.abs(served_MU[good].astype(np.float64) - trained_MU[good])
    return np.where(here, gap, 0.0).max(-1)
