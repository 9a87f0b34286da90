"""Exact enumeration of a round over three tokens, in float64.

A round is a piecewise-constant function of its uniforms: the middle of every
interval, weighed by its width, stands for all of it. The law of the next token
given what the round has emitted so far must be p, at every prefix.
"""

import itertools

import jax.numpy as jnp
import numpy as np

from spec_jax.sampling.transform import Sampling
from tests.support import laws

V, DEPTH = 3, 3
LEVEL = (0, 1, 4, 13)  # first table row of each prefix length
PREFIXES = [p for k in range(DEPTH + 1) for p in itertools.product(range(V), repeat=k)]

# greedy, temperature, top_k, top_p, min_p
PLAIN = (False, 1.0, 0, 1.0, 0.0)
WARM = (False, 1.4, 0, 1.0, 0.0)
TOP_K = (False, 0.8, 2, 1.0, 0.0)  # p(d) = 0 happens
TOP_P = (False, 1.0, 0, 0.7, 0.0)
MIN_P = (False, 1.1, 0, 1.0, 0.3)
GREEDY = (True, 1.0, 0, 1.0, 0.0)


def row_of(prefix):
    """Table row of the law that follows a prefix."""
    index = 0
    for token in prefix:
        index = index * V + int(token)
    return LEVEL[len(prefix)] + index


def middles(edges):
    """Middle and width of each interval of [0, 1] between `edges`."""
    edges = np.unique(np.clip([0.0, *edges, 1.0], 0, 1))
    keep = np.diff(edges) > 1e-12
    return [
        ((a + b) / 2, b - a)
        for a, b, k in zip(edges[:-1], edges[1:], keep, strict=True)
        if k
    ]


def worst_bias(emitted, weights, p):
    """Largest |P(next | emitted so far) - p| over prefixes the round goes past.

    Returns:
      The bias, and how many prefixes were gone past.
    """
    mass = {}
    for tokens, weight in zip(emitted.tolist(), weights, strict=True):
        count = tokens.index(-1) if -1 in tokens else len(tokens)
        for k in range(1, count + 1):
            key = tuple(tokens[:k])
            mass[key] = mass.get(key, 0.0) + weight
    worst, seen = 0.0, 0
    for prefix in PREFIXES:
        each = np.asarray([mass.get((*prefix, t), 0.0) for t in range(V)])
        if each.sum() > 1e-3:
            seen += 1
            worst = max(worst, np.abs(each / each.sum() - p[row_of(prefix)]).max())
    return worst, seen


def laws_of(table, setting, target_ids=None):
    """The law `[rows, V]` of each table row under one setting."""
    greedy, temperature, top_k, top_p, min_p = setting
    out = np.zeros((len(table), V))
    ids = list(range(V)) if target_ids is None else list(target_ids)
    for row, logits in enumerate(table):
        out[row, ids] = laws.law(logits, greedy, temperature, top_k, top_p, min_p)
    return out


def as_sampling(setting):
    """The setting as a batch of one."""
    greedy, temperature, top_k, top_p, min_p = setting
    return Sampling(
        jnp.asarray([greedy]),
        jnp.asarray([temperature], jnp.float32),
        jnp.asarray([top_k], jnp.int32),
        jnp.asarray([top_p], jnp.float32),
        jnp.asarray([min_p], jnp.float32),
    )
