"""Logits: labels, and draft logits of training and serving, slot by slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from spec_jax.core import verify_layout
from spec_jax.evals.why.findings import DIFFERS, OK, SKIPPED, Finding
from spec_jax.evals.why.runner import Runner
from spec_jax.evals.why.text import Text


def label_finding(runner: Runner, text: Text) -> Finding:
    """Row j of a block is taught the token that draft j stands for (A1)."""
    size, vocab = len(text.tokens_S), runner.frozen.embed_VD.shape[0]
    # Neighbours differ, whatever the text repeats.
    ramp = dataclasses.replace(
        text, tokens_S=(np.arange(size) % vocab).astype(text.tokens_S.dtype)
    )
    rows = runner.train(ramp, 1, text.length - 1)
    num_draft = runner.drafter.layout.num_draft
    for x, anchor in enumerate(rows.anchors_X):
        place = _draft_places(int(anchor), rows.labels_XM.shape[1])
        for slot, at in enumerate(place):
            if rows.valid_XM[x, slot] and rows.labels_XM[x, slot] != ramp.tokens_S[at]:
                off = int(rows.labels_XM[x, slot]) - int(ramp.tokens_S[at])
                return Finding(
                    "logits",
                    "labels",
                    DIFFERS,
                    f"slot {slot} of the block anchored at {int(anchor)} is taught the "
                    f"token at position {at + off}; its draft is verified at {at}",
                )
    if not (rows.valid_XM > 0).any():
        return Finding("logits", "labels", DIFFERS, "no row is supervised")
    return Finding("logits", "labels", OK, f"of {num_draft} slots")


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
    yield label_finding(runner, text)
    for name, (source, anchor) in positions.items():
        yield position_finding(runner, name, source, anchor)


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
