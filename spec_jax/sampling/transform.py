"""The one transform: penalties, bias, temperature, top-k, top-p, min-p.

Plain decoding, verification and drafting all call `law_of`, so speculation
cannot change what a request's settings mean. Order: penalties and bias (see
`sampling.penalties`), temperature, then top-k, then top-p over what top-k kept,
then min-p. Each keeps an upper set of the
scaled logits (ties at the edge are kept), so a row's law needs only the lowest
logit kept and a normaliser. Thresholds come from a bisection over the bits of
the row's weights: no full-vocabulary sort. Greedy is a boolean mask, never a
temperature, and a batch without sampled requests computes an argmax only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.core.proposal import TokenLaw
from spec_jax.core.shapes import bind
from spec_jax.sampling import penalties


@struct.dataclass
class Sampling:
    """Sampling settings of each request.

    Attributes:
      greedy_B: take the argmax; temperature and filters are then ignored.
      temperature_B: > 0 (1 for greedy requests).
      top_k_B: 0 for off.
      top_p_B: in (0, 1]; 1 is off.
      min_p_B: in [0, 1); 0 is off.
      rules: penalties and biases, which greedy requests obey too; None where
        none were compiled.
    """

    greedy_B: jnp.ndarray  # [B] bool
    temperature_B: jnp.ndarray  # [B] float32
    top_k_B: jnp.ndarray  # [B] int32
    top_p_B: jnp.ndarray  # [B] float32
    min_p_B: jnp.ndarray  # [B] float32
    rules: penalties.Rules | None = None


def all_greedy(batch: int) -> Sampling:
    """Settings of a batch of greedy requests."""
    return Sampling(
        greedy_B=jnp.ones((batch,), bool),
        temperature_B=jnp.ones((batch,), jnp.float32),
        top_k_B=jnp.zeros((batch,), jnp.int32),
        top_p_B=jnp.ones((batch,), jnp.float32),
        min_p_B=jnp.zeros((batch,), jnp.float32),
    )


def argmax(logits_XV):
    """First index of the maximum, `[...]` int32, and the maximum itself.

    Two vectorised passes; XLA's variadic argmax is scalar on a CPU.
    """
    top_X = logits_XV.max(-1)
    size = logits_XV.shape[-1]
    ids_V = jnp.arange(size, dtype=jnp.int32)
    at_XV = jnp.where(logits_XV == top_X[..., None], ids_V, size)
    return jnp.minimum(at_XV.min(-1), size - 1), top_X


def _largest_edge(weights_XV, enough):
    """Largest float t with `enough(weights >= t)`, by bisection over bits.

    Positive float32 order is the order of their bit patterns, so thirty halvings
    of the pattern find the exact edge.

    Args:
      weights_XV: in [0, 1].
      enough: [..., V] bool -> [...] bool, true for t = 0, monotone.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        edge_X = jax.lax.bitcast_convert_type(middle, jnp.float32)
        good = enough(weights_XV >= edge_X[..., None])
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    shape = weights_XV.shape[:-1]
    above_one = jnp.int32(0x3F800001)
    bounds = (jnp.zeros(shape, jnp.int32), jnp.full(shape, above_one))
    low, _ = jax.lax.fori_loop(0, 30, halve, bounds)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _filtered_edge(weights_BTV, sampling: Sampling):
    """Lowest weight that top-k, top-p and min-p keep, `[B, T]`."""
    top_k_B1 = sampling.top_k_B[:, None]
    top_p_B1 = sampling.top_p_B[:, None]

    def by_count(_):
        wanted = jnp.where(top_k_B1 > 0, top_k_B1, weights_BTV.shape[-1])
        edge = _largest_edge(weights_BTV, lambda keep: keep.sum(-1) >= wanted)
        return jnp.where(top_k_B1 > 0, edge, 0.0)

    zeros = jnp.zeros(weights_BTV.shape[:2], jnp.float32)
    edge_BT = jax.lax.cond((sampling.top_k_B > 0).any(), by_count, lambda _: zeros, 0)

    def by_mass(edge_BT):
        kept = jnp.where(weights_BTV >= edge_BT[..., None], weights_BTV, 0.0)
        wanted = top_p_B1 * kept.sum(-1)
        edge = _largest_edge(
            kept, lambda keep: jnp.where(keep, kept, 0.0).sum(-1) >= wanted
        )
        return jnp.where(top_p_B1 < 1.0, jnp.maximum(edge, edge_BT), edge_BT)

    edge_BT = jax.lax.cond(
        (sampling.top_p_B < 1.0).any(), by_mass, lambda edge: edge, edge_BT
    )
    return jnp.maximum(edge_BT, sampling.min_p_B[:, None])


def law_of(
    logits_BTV,
    sampling: Sampling,
    target_ids=None,
    past: penalties.Past | None = None,
) -> TokenLaw:
    """The law each row is decoded under.

    Args:
      logits_BTV: float32 logits.
      sampling: one setting per request.
      target_ids: target id of each column `[U]` of a reduced vocabulary, or of
        each row's candidates `[B, T, K]`, or None.
      past: the tokens before each row, for the rules; None leaves the rules out
        (drafts of columns whose target ids are not known here).

    Returns:
      TokenLaw over the rows' own vocabulary. A row without a finite maximum
      (NaN, +inf, all -inf) is one-hot at some id; `finite_rows` tells.
    """
    bind(logits_BTV=logits_BTV, greedy_B=sampling.greedy_B)
    if sampling.rules is not None and past is not None:
        logits_BTV = penalties.adjusted(logits_BTV, sampling.rules, past, target_ids)
    best_BT, top_BT = argmax(logits_BTV)
    inv_temperature_B = jnp.where(sampling.greedy_B, 1.0, 1.0 / sampling.temperature_B)
    scale_B11 = inv_temperature_B[:, None, None]

    def sampled(_):
        scaled_BTV = logits_BTV * scale_B11
        peak_BT = top_BT * inv_temperature_B[:, None]
        # Subtracted before scaling: the maximum weighs exactly 1, even where the
        # compiler fuses the multiplication, so no filter drops it.
        weights_BTV = jnp.exp((logits_BTV - top_BT[..., None]) * scale_B11)
        needs = (sampling.top_k_B > 0) | (sampling.top_p_B < 1) | (sampling.min_p_B > 0)

        def filtered(weights_BTV):
            return _filtered_edge(weights_BTV, sampling)

        edge_BT = jax.lax.cond(
            (needs & ~sampling.greedy_B).any(),
            filtered,
            lambda w: jnp.zeros(w.shape[:2], jnp.float32),
            weights_BTV,
        )
        keep_BTV = weights_BTV >= edge_BT[..., None]
        floor_BT = jnp.where(keep_BTV, scaled_BTV, jnp.inf).min(-1)
        total_BT = jnp.where(keep_BTV, weights_BTV, 0.0).sum(-1)
        return floor_BT, peak_BT + jnp.log(total_BT)

    def greedy(_):
        zeros = jnp.zeros(top_BT.shape, jnp.float32)
        return zeros, zeros

    floor_BT, log_norm_BT = jax.lax.cond(
        sampling.greedy_B.all(), greedy, sampled, operand=None
    )
    one_hot_BT = jnp.where(
        sampling.greedy_B[:, None] | ~jnp.isfinite(top_BT), best_BT, -1
    )
    return TokenLaw(
        logits_BTV=logits_BTV,
        inv_temperature_B=inv_temperature_B,
        floor_BT=floor_BT,
        log_norm_BT=log_norm_BT,
        one_hot_BT=one_hot_BT,
        target_ids=target_ids,
    )


def finite_rows(logits_BTV):
    """Rows `[B, T]` that define a law: a finite maximum and no NaN."""
    return jnp.isfinite(logits_BTV.max(-1))
