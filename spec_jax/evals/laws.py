"""Exact laws of a small target's next tokens, and the test that samples keep them.

The law is written from the definitions, by sorting, in float64: it shares no code
with `sampling.transform`, which it is there to judge. The joint law of the tokens
that follow a text is the product of the target's own laws along every way to go
on, all of them run teacher-forced.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from spec_jax.core import masks
from spec_jax.target import model
from spec_jax.target.cache import init_cache
from spec_jax.target.spec import TargetSpec

LEAST_EXPECTED = 5.0  # of a cell of its own


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sampling values of a request, in the words of `Settings`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class Test:
    """A chi-square test.

    Attributes:
      chi2: sum of (observed - expected)^2 / expected.
      dof: cells minus one, of every sample that was added.
      p: probability of a value as large, if the law is right.
      impossible: observations whose probability is zero; any makes p zero.
    """

    chi2: float
    dof: int
    p: float
    impossible: int = 0


def token_law(logits_XV, setting: Setting) -> np.ndarray:
    """The law `[..., V]` of rows of logits: temperature, top-k, top-p, min-p.

    Each filter works on what the one before it left, renormalised, and keeps
    every token that ties with the last one it keeps.
    """
    scaled_XV = np.asarray(logits_XV, np.float64) / setting.temperature
    p_XV = np.exp(scaled_XV - scaled_XV.max(-1, keepdims=True))
    p_XV /= p_XV.sum(-1, keepdims=True)
    size_v = p_XV.shape[-1]

    def keep_from(edge_X):
        kept_XV = np.where(p_XV >= edge_X[..., None], p_XV, 0.0)
        return kept_XV / kept_XV.sum(-1, keepdims=True)

    if 0 < setting.top_k < size_v:
        p_XV = keep_from(np.sort(p_XV, -1)[..., size_v - setting.top_k])
    if setting.top_p < 1:
        sorted_XV = np.sort(p_XV, -1)[..., ::-1]
        last_X = np.argmax(sorted_XV.cumsum(-1) >= setting.top_p, -1)
        p_XV = keep_from(np.take_along_axis(sorted_XV, last_X[..., None], -1)[..., 0])
    return keep_from(setting.min_p * p_XV.max(-1))


@functools.partial(jax.jit, static_argnums=0)
def plain_logits(spec: TargetSpec, params, tokens_BT):
    """Logits `[B, T, V]` of whole texts, each in one causal forward from nothing."""
    row_T = jnp.arange(tokens_BT.shape[1])
    output = model.forward(
        spec,
        params,
        init_cache(spec, *tokens_BT.shape),
        tokens_BT,
        jnp.broadcast_to(row_T[None], tokens_BT.shape),
        masks.causal(row_T[:, None], row_T[None])[None],
        jnp.zeros(tokens_BT.shape[:1], jnp.int32),
    )
    return model.logits(params, output.hidden_BTD)


def continuations(spec: TargetSpec, params, text: Sequence[int], depth: int):
    """Logits of every way to go on with a text.

    Args:
      spec, params: a target of few tokens.
      text: token ids.
      depth: tokens that follow.

    Returns:
      (ways_XK, logits_XKV): all V ** depth ways in the order of their numbers in
      base V, and the logits that predict each of their tokens.
    """
    size_v = spec.vocab_size
    ways_XK = np.asarray(list(itertools.product(range(size_v), repeat=depth)))
    # The last token predicts nothing: ways that differ in it alone share a row.
    heads_YK = ways_XK[::size_v, : depth - 1]
    text_YT = np.broadcast_to(np.asarray(text), (len(heads_YK), len(text)))
    tokens_YT = jnp.asarray(np.concatenate([text_YT, heads_YK], 1), jnp.int32)
    logits_YTV = np.asarray(plain_logits(spec, params, tokens_YT))
    return ways_XK, np.repeat(logits_YTV[:, len(text) - 1 :], size_v, 0)


def joint_law(ways_XK, logits_XKV, setting: Setting) -> np.ndarray:
    """Probability `[X]` of each way, from `continuations`."""
    p_XKV = token_law(logits_XKV, setting)
    chosen_XK1 = np.take_along_axis(p_XKV, ways_XK[..., None], -1)
    return chosen_XK1[..., 0].prod(1)


def cell_of(tokens_XK, size_v: int) -> np.ndarray:
    """The number of each way `[X]` in base V."""
    size_k = tokens_XK.shape[1]
    return np.asarray(tokens_XK) @ (size_v ** np.arange(size_k)[::-1])


def chi_square(counts_X, p_X) -> Test:
    """Whether counts are draws from p.

    Cells expected fewer than five times are one cell together; if that one still
    is, it joins the rarest of the others. The rule reads the law alone, never the
    counts. A count where p is zero is no rare event but a fault.
    """
    counts_X, p_X = np.asarray(counts_X, np.float64), np.asarray(p_X, np.float64)
    impossible = int(counts_X[p_X == 0].sum())
    expected_X = counts_X.sum() * p_X / p_X.sum()
    order_X = np.argsort(-expected_X, kind="stable")
    counts, expected = counts_X[order_X], expected_X[order_X]
    own = int((expected >= LEAST_EXPECTED).sum())
    starts = list(range(own))
    rest = expected[own:].sum()
    if rest >= LEAST_EXPECTED or (rest > 0 and own == 0):
        starts.append(own)  # else the last of its own cell takes the rest in
    counts = np.add.reduceat(counts, starts)
    expected = np.add.reduceat(expected, starts)
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    return test_of(chi2, len(starts) - 1, impossible)


def test_of(chi2: float, dof: int, impossible: int = 0) -> Test:
    """The test of a statistic; without freedom only the impossible can fail."""
    p = float(special.gammaincc(dof / 2, chi2 / 2)) if dof else 1.0
    return Test(chi2, dof, 0.0 if impossible else p, impossible)


def bonferroni(p_values: Sequence[float]) -> float:
    """The smallest of several p-values, corrected for their number."""
    return min(1.0, min(p_values) * len(p_values)) if len(p_values) else 1.0
