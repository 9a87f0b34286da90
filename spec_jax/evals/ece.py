"""Expected calibration error: how far confidence is from what happened.

Values in [0, 1] are put into bins of equal width; a bin's gap is the difference
of its mean value and its share of hits, and the error is the gaps' mean,
weighted by the bins' counts (article 5.4). numpy float64 throughout.
"""

from __future__ import annotations

import numpy as np

NUM_BINS = 15


def ece(values_N, hits_N, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error of one position.

    Args:
      values_N: predicted probabilities, in [0, 1].
      hits_N: 1 where it happened, else 0.
      num_bins: bins of equal width; 1.0 itself falls into the last one.

    Raises:
      ValueError: nothing to measure, other shapes, or a value outside [0, 1].
    """
    values_N = np.asarray(values_N, np.float64)
    hits_N = np.asarray(hits_N, np.float64)
    if values_N.ndim != 1 or values_N.shape != hits_N.shape or not values_N.size:
        raise ValueError(
            f"values {values_N.shape} and hits {hits_N.shape} must be two equally long "
            "lists that hold something"
        )
    if not ((values_N >= 0) & (values_N <= 1)).all():
        raise ValueError("every value must lie in [0, 1]; give probabilities")
    bin_N = np.minimum((values_N * num_bins).astype(np.int64), num_bins - 1)
    gap_X = np.bincount(bin_N, values_N - hits_N, num_bins)
    return float(np.abs(gap_X).sum() / values_N.size)


def ece_by_position(values_NM, hits_NM, num_bins: int = NUM_BINS) -> list[float]:
    """`ece` of each of M positions."""
    values_NM, hits_NM = np.asarray(values_NM), np.asarray(hits_NM)
    if values_NM.ndim != 2 or values_NM.shape != hits_NM.shape:
        raise ValueError(
            f"values {values_NM.shape} and hits {hits_NM.shape} must both be [N, M]"
        )
    return [
        ece(values_NM[:, j], hits_NM[:, j], num_bins) for j in range(values_NM.shape[1])
    ]


def reliability(
    values_N, hits_N, num_bins: int = NUM_BINS
) -> list[tuple[float, float, int]]:
    """(mean value, share of hits, count) of every bin that is not empty."""
    values_N = np.asarray(values_N, np.float64)
    hits_N = np.asarray(hits_N, np.float64)
    bin_N = np.minimum((values_N * num_bins).astype(np.int64), num_bins - 1)
    rows = []
    for index in range(num_bins):
        inside_N = bin_N == index
        if inside_N.any():
            mean, share = values_N[inside_N].mean(), hits_N[inside_N].mean()
            rows.append((float(mean), float(share), int(inside_N.sum())))
    return rows
