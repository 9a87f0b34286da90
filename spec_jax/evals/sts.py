"""Fits sequential temperatures to confidence (article 5.4).

Position after position, from the left: the temperature of a position is the one
of a fixed grid under which the *survival* up to it (the product of calibrated
confidences, earlier temperatures fixed) is best calibrated against "all drafts
up to here were accepted". Survival is what a planner ranks, so survival and not
confidence is what is calibrated. What is reported after it is of rounds that were
not fitted: of each half under the other half's temperatures. numpy float64; pure
functions of their input.
"""

from __future__ import annotations

import numpy as np

from spec_jax.core.calibration import STS, Source
from spec_jax.core.errors import UserError
from spec_jax.evals.ece import NUM_BINS, ece, ece_by_position

NUM_TEMPERATURES = 41
GRID = np.logspace(-1, 1, NUM_TEMPERATURES)  # 0.1 to 10, 1 in the middle


def prefix_mask(accepted_N, num_draft: int) -> np.ndarray:
    """`[N, M]`: 1 where the position is below the number of accepted drafts.

    Args:
      accepted_N: raw accepted drafts of each round, before any cut or trim.
      num_draft: M.
    """
    accepted_N = np.asarray(accepted_N)
    return (np.arange(num_draft)[None] < accepted_N[:, None]).astype(np.float64)


def survival(logits_NM, temperatures_M) -> np.ndarray:
    """Products of calibrated confidences up to each position, `[N, M]`."""
    logits_NM = np.asarray(logits_NM, np.float64)
    return np.cumprod(_sigmoid(logits_NM / np.asarray(temperatures_M)[None]), axis=1)


def fit(
    logits_NM,
    prefix_mask_NM,
    *,
    dataset: str = "",
    source: Source | None = None,
    num_bins: int = NUM_BINS,
) -> STS:
    """Sequential temperatures of held-out rounds of one sampling regime.

    They are fitted to all rounds; the errors after it are `held_out_survival`'s.

    Args:
      logits_NM: confidence log-odds of each round before any calibration.
      prefix_mask_NM: see `prefix_mask`.
      dataset: what the rounds are, for the record.
      source: what they were measured on, for the record.
      num_bins: bins of the calibration error.

    Returns:
      Temperatures, with the errors of each position before and after.

    Raises:
      UserError: fewer than two rounds, other shapes, logits that are not finite, or
        a mask that is not a prefix.
    """
    logits_NM = np.asarray(logits_NM, np.float64)
    hits_NM = np.asarray(prefix_mask_NM, np.float64)
    _check(logits_NM, hits_NM)
    num_rounds, num_draft = logits_NM.shape
    raw_NM = survival(logits_NM, np.ones(num_draft))
    unseen_NM = held_out_survival(logits_NM, hits_NM, num_bins)
    return STS(
        temperatures=tuple(_fitted(logits_NM, hits_NM, num_bins).tolist()),
        dataset=dataset,
        num_samples=num_rounds,
        ece_before=tuple(ece_by_position(raw_NM, hits_NM, num_bins)),
        ece_after=tuple(ece_by_position(unseen_NM, hits_NM, num_bins)),
        source=source,
    )


def held_out_survival(
    logits_NM, prefix_mask_NM, num_bins: int = NUM_BINS
) -> np.ndarray:
    """Calibrated survival `[N, M]` of rounds that were not fitted.

    Every other round is of one half, and each half has the other's temperatures.

    Raises:
      UserError: as `fit`.
    """
    logits_NM = np.asarray(logits_NM, np.float64)
    hits_NM = np.asarray(prefix_mask_NM, np.float64)
    _check(logits_NM, hits_NM)
    found_NM = np.empty_like(logits_NM)
    for half in (0, 1):
        mine, others = slice(half, None, 2), slice(1 - half, None, 2)
        temperatures_M = _fitted(logits_NM[others], hits_NM[others], num_bins)
        found_NM[mine] = survival(logits_NM[mine], temperatures_M)
    return found_NM


def _fitted(logits_NM: np.ndarray, hits_NM: np.ndarray, num_bins: int) -> np.ndarray:
    """Temperatures `[M]`; of equally good ones the nearest to 1."""
    num_rounds, num_draft = logits_NM.shape
    # Nearest to 1 first: `argmin` takes the first of equals.
    grid_X = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    temperatures = np.ones(num_draft)
    before_N = np.ones(num_rounds)
    for j in range(num_draft):
        found_XN = before_N * _sigmoid(logits_NM[:, j] / grid_X[:, None])
        errors = [ece(found_N, hits_NM[:, j], num_bins) for found_N in found_XN]
        best = int(np.argmin(errors))
        temperatures[j], before_N = grid_X[best], found_XN[best]
    return temperatures


def _sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _check(logits_NM: np.ndarray, hits_NM: np.ndarray) -> None:
    is_table = logits_NM.ndim == 2 and logits_NM.shape == hits_NM.shape
    if not is_table or len(logits_NM) < 2 or not logits_NM.size:
        raise UserError(
            f"logits {logits_NM.shape} and prefix mask {hits_NM.shape} must both be "
            "[rounds, drafts], with at least two rounds (errors are of those that were "
            "not fitted) and one draft"
        )
    if not np.isfinite(logits_NM).all():
        raise UserError(
            "logits hold values that are not finite; leave out rounds whose draft "
            "rows were not usable"
        )
    falls = (np.diff(hits_NM, axis=1) <= 0).all()
    if not (np.isin(hits_NM, (0.0, 1.0)).all() and falls):
        raise UserError(
            "the prefix mask must be ones and then zeros in every round: 1 where the "
            "position is below the number of accepted drafts"
        )
