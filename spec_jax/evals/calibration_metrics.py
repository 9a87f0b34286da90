"""Calibration of a confidence head, read from training's own metrics.

Training keeps, for each draft and each of ten bins of the confidence, the mean
confidence, the mean acceptance and the bin's share of the rows
(`objectives.confidence`). They add over batches and devices, and what is left of
them in a record is all that the expected calibration error needs.
"""

from __future__ import annotations

import numpy as np

NAMES = ("calibration_confidence", "calibration_accept", "calibration_share")


def ece_of_metrics(means) -> list[float] | None:
    """Expected calibration error of each draft; `evals.ece` from binned means.

    Args:
      means: name -> mean, as a record's `metrics` or `train.metrics.means`.

    Returns:
      M numbers (0 for a draft without rows), or None without a confidence head.

    Raises:
      ValueError: some but not all of the three metrics, or of different shapes.
    """
    present = [name for name in NAMES if name in means]
    if not present:
        return None
    missing = [name for name in NAMES if name not in means]
    if missing:
        raise ValueError(
            f"metrics hold {present[0]} but not {missing[0]}; calibration needs "
            f"{', '.join(NAMES)}"
        )
    confidence, accept, share = (np.asarray(means[n], np.float64) for n in NAMES)
    if not confidence.shape == accept.shape == share.shape or share.ndim != 2:
        raise ValueError(
            f"calibration metrics have shapes {confidence.shape}, {accept.shape} and "
            f"{share.shape}; all must be [drafts, bins]"
        )
    return (share * np.abs(confidence - accept)).sum(1).tolist()
