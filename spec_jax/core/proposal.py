"""q, the law a proposal was drawn from, and the proposal that carries it.

A law is kept as logits plus, per row, what the one transform decided: inverse
temperature, the lowest scaled logit it keeps, and the log normaliser. Two
queries are all the verifier asks: the probability of a token in each row, and
one row's whole distribution. So no `[B, M, V]` probability array is ever built,
and an all-greedy batch computes none of it.

q is what the drafts were *drawn from*: after correction, after the transform
(article 1.2). Greedy rows are one-hot at their argmax.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from spec_jax.core.shapes import bind


@struct.dataclass
class TokenLaw:
    """A categorical distribution per row, over target ids or a reduced set.

    Attributes:
      logits_BTV: raw logits of each row (V is U for a reduced vocabulary).
      inv_temperature_B: 1 / temperature; 1 for greedy requests.
      floor_BT: lowest scaled logit that the transform keeps.
      log_norm_BT: log of the kept scaled logits' summed exponentials.
      one_hot_BT: -1, or the id (in the rows' own vocabulary) that has all mass.
      target_ids_U: None, or the target id of each reduced id.
    """

    logits_BTV: jnp.ndarray  # [B, T, V]
    inv_temperature_B: jnp.ndarray  # [B]
    floor_BT: jnp.ndarray  # [B, T]
    log_norm_BT: jnp.ndarray  # [B, T]
    one_hot_BT: jnp.ndarray  # [B, T]
    target_ids_U: jnp.ndarray | None = None  # [U]


@struct.dataclass
class Proposal:
    """M draft tokens and the law q that produced them.

    Attributes:
      tokens_BM: target ids, never reduced ids.
      draft_ids_BM: the same tokens in the law's own vocabulary.
      law: q, one row per draft.
      usable_B: drafts before the first row whose logits were not finite; the
        verifier looks at no more (an all -inf row degrades to a plain step).
      confidence_BM: None, or the drafter's estimate that row j is accepted
        given that the rows before it were; it may read d_<j only.
    """

    tokens_BM: jnp.ndarray  # [B, M]
    draft_ids_BM: jnp.ndarray  # [B, M]
    law: TokenLaw
    usable_B: jnp.ndarray  # [B]
    confidence_BM: jnp.ndarray | None = None  # [B, M]


def prob_of(law: TokenLaw, ids_BT):
    """Probability `[B, T]` of one id (own vocabulary) in each row."""
    bind(logits_BTV=law.logits_BTV, ids_BT=ids_BT)
    logit_BT = jnp.take_along_axis(law.logits_BTV, ids_BT[..., None], -1)[..., 0]
    scaled_BT = logit_BT * law.inv_temperature_B[:, None]
    prob_BT = jnp.where(
        scaled_BT >= law.floor_BT, jnp.exp(scaled_BT - law.log_norm_BT), 0.0
    )
    return jnp.where(
        law.one_hot_BT >= 0, (ids_BT == law.one_hot_BT).astype(jnp.float32), prob_BT
    )


def row_probs(law: TokenLaw, row_B, vocab_size: int):
    """The whole distribution `[B, V]` of one row per request, in target ids.

    Args:
      law: the law.
      row_B: [B] which row.
      vocab_size: V; a reduced law is scattered into it, zero elsewhere.
    """
    logits_BV = jnp.take_along_axis(law.logits_BTV, row_B[:, None, None], 1)[:, 0]

    def pick(values_BT):
        return jnp.take_along_axis(values_BT, row_B[:, None], 1)

    scaled_BV = logits_BV * law.inv_temperature_B[:, None]
    prob_BV = jnp.where(
        scaled_BV >= pick(law.floor_BT), jnp.exp(scaled_BV - pick(law.log_norm_BT)), 0.0
    )
    one_hot_B1 = pick(law.one_hot_BT)
    ids_V = jnp.arange(logits_BV.shape[-1])
    prob_BV = jnp.where(
        one_hot_B1 >= 0, (ids_V[None] == one_hot_B1).astype(jnp.float32), prob_BV
    )
    if law.target_ids_U is None:
        return prob_BV
    full_BV = jnp.zeros((prob_BV.shape[0], vocab_size), prob_BV.dtype)
    return full_BV.at[:, law.target_ids_U].set(prob_BV)


def residual(p_BV, q_BV):
    """The normalised positive part of p - q `[B, V]` (article 1.2).

    Where p equals q no rejection can reach it; p itself is returned there, so
    that rounding never produces an empty distribution.
    """
    excess_BV = jnp.maximum(p_BV - q_BV, 0.0)
    mass_B1 = excess_BV.sum(-1, keepdims=True)
    return jnp.where(mass_B1 > 0, excess_BV / jnp.maximum(mass_B1, 1e-30), p_BV)
