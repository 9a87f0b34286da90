"""Fits a cost table to measured round times (article 5.3, 8.2).

Two forms of one thing, the seconds of a whole round of R requests that verify T
rows together: `additive` (bias + alpha(R) + theta(T), each part rising and
piecewise linear between its probes) and `flat` (one time for each T, whatever
R). Both are fitted to relative errors: what counts is which choice is faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from spec_jax.core.calibration import AdditiveCost, FlatCost
from spec_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measured shape.

    Attributes:
      requests: R, live requests.
      rows: T, rows the program verifies, anchors included.
      seconds: of the whole round, a median.
    """

    requests: int
    rows: int
    seconds: float


def fit_additive(samples: Sequence[Sample]) -> AdditiveCost:
    """Non-negative least squares over the rises between neighbouring probes.

    Rises are not negative, so alpha and theta never fall; both begin at 0, and
    the bias is the time of the smallest shape. Probes are the measured ones.

    Raises:
      UserError: nothing was measured, or a time that is not positive.
    """
    requests_N, rows_N, seconds_N = _columns(samples)
    sizes, heights = np.unique(requests_N), np.unique(rows_N)
    steps = [
        np.ones((len(samples), 1)),
        requests_N[:, None] >= sizes[None, 1:],
        rows_N[:, None] >= heights[None, 1:],
    ]
    design = np.concatenate([x.astype(np.float64) for x in steps], axis=1)
    # Divided by the measured time: the residuals are relative errors.
    rises, _ = nnls(design / seconds_N[:, None], np.ones(len(samples)))
    alpha = np.concatenate([[0.0], np.cumsum(rises[1 : len(sizes)])])
    theta = np.concatenate([[0.0], np.cumsum(rises[len(sizes) :])])
    return AdditiveCost(
        bias_seconds=max(float(rises[0]), 1e-9),
        bs_probes=tuple(sizes.tolist()),
        alpha_seconds=tuple(alpha.tolist()),
        m_probes=tuple(heights.tolist()),
        theta_seconds=tuple(theta.tolist()),
    )


def fit_flat(samples: Sequence[Sample]) -> FlatCost:
    """Median rounds per second at each number of rows.

    Raises:
      UserError: nothing was measured, or a time that is not positive.
    """
    _, rows_N, seconds_N = _columns(samples)
    heights = np.unique(rows_N)
    medians = [float(np.median(seconds_N[rows_N == t])) for t in heights]
    return FlatCost(
        sample_batch_tokens=tuple(heights.tolist()),
        sample_steps_per_sec=tuple(1.0 / s for s in medians),
        max_batch_tokens=int(heights[-1]),
    )


def predicted_over_measured(
    cost: AdditiveCost | FlatCost, samples: Sequence[Sample]
) -> dict[str, dict[str, float]]:
    """R -> T -> predicted seconds over measured seconds; keys are texts."""
    table: dict[str, dict[str, float]] = {}
    for s in samples:
        ratio = float(cost.seconds(s.requests, s.rows)) / s.seconds
        table.setdefault(str(s.requests), {})[str(s.rows)] = ratio
    return table


def relative_errors(
    cost: AdditiveCost | FlatCost, samples: Sequence[Sample]
) -> tuple[float, float]:
    """(largest, median) of |predicted / measured - 1|."""
    table = predicted_over_measured(cost, samples)
    off = [abs(ratio - 1.0) for row in table.values() for ratio in row.values()]
    return max(off), float(np.median(off))


def _columns(samples: Sequence[Sample]):
    if not samples:
        raise UserError("no round was measured; name at least one shape")
    for s in samples:
        if not (np.isfinite(s.seconds) and s.seconds > 0):
            raise UserError(
                f"the round of {s.requests} requests and {s.rows} rows took "
                f"{s.seconds} seconds; a time must be positive"
            )
    shapes = {(s.requests, s.rows) for s in samples}
    if len(shapes) < len(samples):
        raise UserError("a shape was measured twice; give one median for each")
    return (
        np.array([s.requests for s in samples]),
        np.array([s.rows for s in samples]),
        np.array([s.seconds for s in samples], np.float64),
    )
