"""Features: planes as captured for training, against those that serving gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from spec_jax.evals.why.findings import DIFFERS, OK, SKIPPED, Finding

# A row's features may differ by so much of its norm: reordered sums, or what
# rounding to the stored type leaves (`2**-9 / sqrt(3)` and less).
FEATURE_TOLERANCE = {"float32": 3e-4, "float16": 1e-3, "bfloat16": 8e-3}


@dataclasses.dataclass(frozen=True)
class Gap:
    """Two planes of features `[S, D]`, row by row.

    Attributes:
      cosine: the smallest.
      ratio: of norms, the one farthest from 1.
      max_abs: largest difference of an entry.
      relative: largest difference of a row, of its norm.
      row: where that is.
    """

    cosine: float
    ratio: float
    max_abs: float
    relative: float
    row: int

    @property
    def words(self) -> str:
        return (
            f"cosine {self.cosine:.6f}, norm ratio {self.ratio:.5f}, "
            f"max abs {self.max_abs:.2e}"
        )


def gap_of(found_SD: np.ndarray, expected_SD: np.ndarray) -> Gap:
    """How far two planes are apart; what is not finite is infinitely far."""
    one, two = found_SD.astype(np.float64), expected_SD.astype(np.float64)
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        bad = ~(np.isfinite(one).all(-1) & np.isfinite(two).all(-1))
        return Gap(0.0, np.inf, np.inf, np.inf, int(np.argmax(bad)))
    size_one = np.linalg.norm(one, axis=-1)
    size_two = np.linalg.norm(two, axis=-1)
    tiny = 1e-30
    cosine = (one * two).sum(-1) / np.maximum(size_one * size_two, tiny)
    ratio = size_one / np.maximum(size_two, tiny)
    relative = np.linalg.norm(one - two, axis=-1) / np.maximum(size_two, tiny)
    row = int(np.argmax(relative))
    return Gap(
        float(cosine.min()),
        float(ratio[np.argmax(np.abs(ratio - 1))]),
        float(np.abs(one - two).max()),
        float(relative[row]),
        row,
    )


def constant_plane(plane_SD: np.ndarray) -> str:
    """Says that a plane holds one number, or one row throughout; else ""."""
    if plane_SD.size and (plane_SD == plane_SD.flat[0]).all():
        return f"all entries are {plane_SD.flat[0]:g}"
    if len(plane_SD) > 1 and (plane_SD == plane_SD[:1]).all():
        return "every position has the same features"
    return ""


def plane_finding(
    item: str,
    found_SD: np.ndarray,
    served_SD: np.ndarray,
    tolerance: float,
    others: Mapping[str, np.ndarray],
) -> Finding:
    """A captured plane against the served one (A3, A4, A8, A9, A17).

    Args:
      item: names the plane and the way it was served.
      found_SD: as captured for training.
      served_SD: as the drafter gets it when serving.
      tolerance: of a row's difference, relative to its norm.
      others: name -> plane, what it may have been mistaken for.
    """
    for path, plane in (("training", found_SD), ("serving", served_SD)):
        constant = constant_plane(plane)
        if constant:
            detail = f"{constant} on the {path} path"
            return Finding("features", item, DIFFERS, detail)
    gap = gap_of(found_SD, served_SD)
    if gap.relative <= tolerance:
        return Finding("features", item, OK, gap.words)
    hints = []
    for name, other in others.items():
        if other.shape == found_SD.shape and gap_of(found_SD, other).relative <= max(
            tolerance, 1e-3
        ):
            hints.append(f"it is {name}")
    for step, name in ((-1, "before"), (1, "after")):
        moved = np.roll(served_SD, -step, 0)[2:-2]
        if gap_of(found_SD[2:-2], moved).relative <= tolerance:
            hints.append(f"it is the row {name} the right one")
    if not hints and gap.cosine > 0.99:
        unscaled = gap_of(found_SD / _scale(found_SD, served_SD), served_SD)
        if unscaled.relative < 0.2 * gap.relative:
            hints.append("one is scaled, which the cosine does not see")
        elif gap.relative < 0.2:
            hints.append("one is rounded to a narrower type")
    said = f"; {', '.join(hints)}" if hints else ""
    return Finding(
        "features", item, DIFFERS, f"at position {gap.row}: {gap.words}{said}"
    )


def _scale(found_SD: np.ndarray, expected_SD: np.ndarray) -> float:
    """The one factor between two planes, or 1."""
    size = float(np.square(expected_SD, dtype=np.float64).sum())
    scale = float((found_SD.astype(np.float64) * expected_SD).sum()) / max(size, 1e-30)
    return scale or 1.0


def teacher_finding(
    logits_SV: np.ndarray, tokens_S: np.ndarray, first: int, margin: float = 1e-3
) -> Finding:
    """The stored last hidden rows through the head give the target's own tokens.

    Args:
      logits_SV: stored rows times the target's head.
      tokens_S: the text; greedy from `first` + 1 on.
      first: the row that drew the first greedy token.
      margin: rows whose best two logits are closer are left out.
    """
    item = "last hidden x head"
    rows = logits_SV[first:-1]
    if not len(rows):
        return Finding("features", item, SKIPPED, "the target chose nothing")
    best = rows.max(-1)
    chosen = np.take_along_axis(rows, tokens_S[first + 1 :, None], -1)[:, 0]
    wrong = np.nonzero(best - chosen > margin * max(1.0, float(np.abs(best).max())))[0]
    if wrong.size:
        at, token = first + int(wrong[0]), int(rows[wrong[0]].argmax())
        return Finding(
            "features",
            item,
            DIFFERS,
            f"at position {at} the stored row's best token is {token}, the "
            f"target chose {int(tokens_S[at + 1])}: it is not the last hidden "
            "after the final norm",
        )
    return Finding("features", item, OK, f"the target's choice in {len(rows)} rows")
