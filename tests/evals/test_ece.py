"""Calibration error against an oracle of loops."""

import numpy as np
import pytest

from spec_jax.evals import ece


def by_loops(values, hits, num_bins):
    """Bin by bin, value by value."""
    total = 0.0
    for b in range(num_bins):
        low, high = b / num_bins, (b + 1) / num_bins
        last = b == num_bins - 1
        inside = [
            (v, h)
            for v, h in zip(values, hits, strict=True)
            if low <= v and (v < high or last)
        ]
        if inside:
            mean = sum(v for v, _ in inside) / len(inside)
            share = sum(h for _, h in inside) / len(inside)
            total += len(inside) / len(values) * abs(mean - share)
    return total


@pytest.mark.parametrize("num_bins", [1, 4, 15])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_loops(seed, num_bins):
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.beta(0.5, 0.7, size=200), [0.0, 1.0, 1.0]])
    hits = (rng.random(values.size) < values**1.7).astype(float)
    found = ece.ece(values, hits, num_bins)
    assert found == pytest.approx(by_loops(values, hits, num_bins), abs=1e-12)
    assert found > 0.01
    both = ece.ece_by_position(np.stack([values, hits], 1), np.stack([hits] * 2, 1))
    assert both == [ece.ece(values, hits), 0.0]


def test_known_values():
    # Always 0.8, right half the time; and a bin at each end.
    assert ece.ece([0.8] * 4, [1, 0, 1, 0]) == pytest.approx(0.3)
    assert ece.ece([0.0, 1.0], [1, 0]) == 1.0
    # 1.0 is in the last bin, not in one of its own.
    assert ece.ece([1.0, 0.95], [0, 1]) == pytest.approx(0.475)
    # Opposite gaps of one bin cancel, of two bins do not.
    assert ece.ece([0.5, 0.5], [1, 0], 1) == 0.0
    assert ece.ece([0.25, 0.75], [1, 0], 1) == 0.0
    assert ece.ece([0.25, 0.75], [1, 0], 2) == 0.75


def test_reliability_rows_give_the_error_back():
    rng = np.random.default_rng(5)
    values = rng.random(300)
    hits = (rng.random(300) < 0.5).astype(float)
    rows = ece.reliability(values, hits)
    assert sum(count for *_, count in rows) == 300
    error = sum(n * abs(mean - share) for mean, share, n in rows) / 300
    assert error == pytest.approx(ece.ece(values, hits))


def test_wrong_input_is_refused():
    for values, hits in (([], []), ([0.5], [1, 0]), ([1.5], [1]), ([np.nan], [1])):
        with pytest.raises(ValueError):
            ece.ece(values, hits)
    with pytest.raises(ValueError, match=r"\[N, M\]"):
        ece.ece_by_position(np.zeros(3), np.zeros(3))
