"""The golden round: draft logits that travel with the weights.

At export the drafter, read back from the files just written, drafts once at every
anchor of a probe (`rounds`), greedily; top logits, random projections of whole
rows, tokens and confidences are stored. A reader drafts again and compares, so
that a wrong transpose, rotary base, mask or precision is found at load time and
not as a poor accept length.

The same probe answers whether training and serving see the same drafter:
`train_outputs` and `prefill` + `propose` must give equal logits for the same
prefix.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.export.rounds import (
    Probe,
    Round,
    probe_from_target,
    serve,
    serving_logits,
    train,
    training_logits,
)

__all__ = [
    "LOOSE_TOLERANCE",
    "TOLERANCE",
    "Probe",
    "Round",
    "check",
    "parity_max_abs",
    "probe_from_target",
    "record",
    "serve",
    "serving_logits",
    "train",
    "training_logits",
]

# Largest difference of a float32 logit that reordered sums explain.
TOLERANCE = 1e-3
# Embedding and head in another float type than at export: relative to the
# largest logit, about eight bits of mantissa through the whole drafter.
LOOSE_TOLERANCE = 0.05

_TOP = 32
_PROJECTIONS = 8
# Of so many candidates one may be another one: unary logits that nearly tie.
_EDGE = 8


def parity_max_abs(drafter: Drafter, params: Any, probe: Probe) -> float:
    """Largest difference of training-time and serving-time logits and confidences.

    Training follows the drafts that serving chose. A drafter may train on fewer
    rows than it serves (EAGLE trains one); those are compared.
    """
    served = serve(drafter, params, probe)
    logits_KRU, confidence_KR = train(drafter, params, probe, served.tokens_KM)
    rows = min(logits_KRU.shape[1], served.tokens_KM.shape[1])
    served_KRU = served.logits_KMU[:, :rows]
    gap_KRU = _gap(served_KRU, logits_KRU[:, :rows])
    worst = np.where(np.isneginf(served_KRU), 0.0, gap_KRU).max()
    if served.confidence_KM is not None and confidence_KR is not None:
        gap_KR = _gap(served.confidence_KM[:, :rows], confidence_KR[:, :rows])
        worst = max(worst, gap_KR.max())
    return float(worst)


def record(drafter: Drafter, params: Any, probe: Probe) -> dict[str, np.ndarray]:
    """Arrays to store beside the weights.

    Raises:
      UserError: the drafter offers no usable draft, or logits are not finite:
        such weights must not be exported.
    """
    made = serve(drafter, params, probe)
    num_draft = drafter.layout.num_draft
    # A row of -inf and numbers is a row of candidates; NaN and +inf are neither.
    bad = np.isnan(made.logits_KMU).any() or np.isposinf(made.logits_KMU).any()
    if bad or (made.usable_K < num_draft).any():
        raise UserError(
            f"drafter {drafter.name!r} gives {made.usable_K.tolist()} usable drafts of "
            f"{num_draft} at golden positions {list(probe.anchors)}; its weights are "
            "not finite, so keep an earlier checkpoint"
        )
    kept = min(_TOP, int(np.isfinite(made.logits_KMU).sum(-1).min()))
    top_ids_KMT = np.argsort(-made.logits_KMU, -1, kind="stable")[..., :kept]
    head = probe.frozen.head_DU
    arrays = {
        "tokens": probe.tokens_S.astype(np.int32),
        "features": probe.features_SLD.astype(np.float32),
        "hidden": probe.hidden_SD.astype(np.float32),
        "anchors": np.asarray(probe.anchors, np.int32),
        "top_ids": top_ids_KMT.astype(np.int32),
        "top_logits": np.take_along_axis(made.logits_KMU, top_ids_KMT, -1),
        "projections": _project(made.logits_KMU),
        "draft_tokens": made.tokens_KM.astype(np.int32),
        # Not a string: safetensors stores numbers only.
        "head_bits": np.asarray([jnp.finfo(head.dtype).bits], np.int32),
    }
    if made.confidence_KM is not None:
        arrays["confidence"] = made.confidence_KM.astype(np.float32)
    return arrays


def check(
    stored: dict[str, np.ndarray],
    drafter: Drafter,
    params: Any,
    frozen: Frozen,
    where: str,
) -> float:
    """Drafts the stored round again and compares.

    Where two logits nearly tie, another draft may be taken; the rows after it have
    another prefix and are not compared.

    Args:
      stored: arrays that `record` made.
      drafter: rebuilt from the folder, at its trained block size.
      params: read from the folder.
      frozen: the target's embedding and head columns.
      where: names the folder in errors.

    Returns:
      The largest absolute difference of a logit.

    Raises:
      UserError: the round is damaged, or the logits differ by more than
        `TOLERANCE` (`LOOSE_TOLERANCE` with a head of another float type).
    """
    try:
        probe = Probe(
            stored["tokens"],
            stored["features"],
            stored["hidden"],
            tuple(int(a) for a in stored["anchors"]),
            frozen,
        )
        top_logits, tokens_KM = stored["top_logits"], stored["draft_tokens"]
        top_ids, projections = stored["top_ids"], stored["projections"]
        bits = int(stored["head_bits"][0])
    except (KeyError, IndexError) as error:
        raise UserError(
            f"{where}: the golden round lacks {error}; export the drafter again"
        ) from error
    made = serve(drafter, params, probe)
    size_u = made.logits_KMU.shape[-1]
    if top_ids.max() >= size_u or top_ids.shape[:2] != made.tokens_KM.shape:
        raise UserError(
            f"{where}: the golden round was made for another block size or vocabulary; "
            "export the drafter again"
        )
    allowed = TOLERANCE
    if bits != jnp.finfo(frozen.head_DU.dtype).bits:
        allowed = LOOSE_TOLERANCE * float(np.abs(top_logits).max())
    # Rows up to the first other draft have the prefix they had.
    same_KM = made.tokens_KM == tokens_KM
    first_K1 = np.ones((same_KM.shape[0], 1), bool)
    prefix_KM = np.concatenate([first_K1, np.cumprod(same_KM[:, :-1], 1) > 0], 1)
    gap = top_logits[..., 0] - top_logits[..., 1] if top_logits.shape[-1] > 1 else 1.0
    moved = ~same_KM & prefix_KM & (gap > 2 * allowed)

    found = np.take_along_axis(made.logits_KMU, top_ids, -1)
    absent = np.isneginf(found)
    if np.isneginf(made.logits_KMU).any():
        edge = max(1, top_ids.shape[-1] // _EDGE)
        excused = absent & (absent.sum(-1, keepdims=True) <= edge)
        found = np.where(excused, top_logits, found)
        projected = projections
    else:
        projected = _project(made.logits_KMU)
    off_KM = np.maximum(
        _gap(found, top_logits).max(-1), _gap(projected, projections).max(-1)
    )
    if "confidence" in stored:
        if made.confidence_KM is None:
            raise UserError(
                f"{where}: its golden round has confidences, but the drafter gives "
                "none; export the drafter again"
            )
        off_KM = np.maximum(off_KM, _gap(made.confidence_KM, stored["confidence"]))
    worst = float(np.where(prefix_KM, off_KM, 0).max())
    if (
        worst > allowed
        or moved.any()
        or (made.usable_K < drafter.layout.num_draft).any()
    ):
        raise UserError(
            f"{where}: its golden round differs by {worst:.3g} in the draft logits "
            f"(allowed {allowed:.3g}), so these weights do not compute here what they "
            "did when exported; export the drafter again, or use the target and "
            "version it was made with"
        )
    return worst


def _project(logits_KMU: np.ndarray) -> np.ndarray:
    """Random projections `[K, M, R]` of whole rows: any entry moves them.

    Of rows that have candidates only, zeros: which ones they are may differ.
    """
    if np.isneginf(logits_KMU).any():
        return np.zeros((*logits_KMU.shape[:2], _PROJECTIONS), np.float32)
    size = logits_KMU.shape[-1]
    noise_UR = np.random.default_rng(0).standard_normal((size, _PROJECTIONS))
    return (logits_KMU.astype(np.float64) @ (noise_UR / size**0.5)).astype(np.float32)


def _gap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Absolute differences; what is not finite on either side counts as infinite."""
    good = np.isfinite(one) & np.isfinite(other)
    gap = np.subtract(one, other, out=np.zeros(one.shape, np.float32), where=good)
    return np.where(good, np.abs(gap), np.inf)
