"""Float64 sampling laws, written from the definitions by sort.

Nothing here is imported from the library: see `oracles`.
"""

import math

import numpy as np


def softmax(logits, temperature=1.0):
    """Row-wise, float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def law(logits, greedy=False, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """One row's law `[V]`: temperature, top-k, top-p of the rest, min-p.

    Every filter keeps what ties with the last token it keeps.
    """
    logits = np.asarray(logits, np.float64)
    if greedy:
        best = max(range(len(logits)), key=lambda v: (logits[v], -v))
        return np.eye(len(logits))[best]
    prob = softmax(logits, temperature)
    if 0 < top_k < len(prob):
        edge = sorted(prob, reverse=True)[top_k - 1]
        prob = np.where(prob >= edge, prob, 0.0)
        prob = prob / prob.sum()
    if top_p < 1:
        mass = 0.0
        for value in sorted(prob, reverse=True):
            mass += value
            if mass >= top_p:
                break
        prob = np.where(prob >= value, prob, 0.0)
        prob = prob / prob.sum()
    prob = np.where(prob >= min_p * prob.max(), prob, 0.0)
    return prob / prob.sum()


def residual(p, q):
    """Normalised positive part of p - q, or None where it is empty."""
    excess = np.maximum(p - q, 0.0)
    return excess / excess.sum() if excess.sum() > 1e-12 else None


def pit(p, tokens, uniform):
    """Randomised probability integral transform of draws `[N]` from rows of p.

    Uniform in [0, 1) and independent of the past exactly when the tokens have
    law p given it, whatever that past is.
    """
    upto = np.cumsum(p, -1)
    rows = np.arange(len(tokens))
    mass = p[rows, tokens]
    return upto[rows, tokens] - mass + uniform * mass


def chi_square(counts, expected):
    """p-value (survival) of a chi-square test; cells under 5 are pooled."""
    from scipy import stats

    counts, expected = np.ravel(counts), np.ravel(expected)
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5 and len(expected) > 1:
        counts = np.append(counts[:-2], counts[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    assert math.isclose(counts.sum(), expected.sum(), rel_tol=1e-6)
    value = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(value, len(expected) - 1))
