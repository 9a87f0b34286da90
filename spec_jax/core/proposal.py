"""q, the law a proposal was drawn from, and the proposal that carries it.

A law is kept as logits plus, per row, what the one transform decided: inverse
temperature, the lowest scaled logit it keeps, and the log normaliser. Two
queries are all the verifier asks: the probability of a token in each row, and
one row's whole distribution. So verifying builds no `[B, M, V]` probabilities,
drawing sampled drafts builds them once, and an all-greedy batch computes none.

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
      target_ids: None, the target id of each reduced id `[U]`, or of each
        candidate of each row `[B, T, K]` (a sparse law: K ids hold all mass).
    """

    logits_BTV: jnp.ndarray  # [B, T, V]
    inv_temperature_B: jnp.ndarray  # [B]
    floor_BT: jnp.ndarray  # [B, T]
    log_norm_BT: jnp.ndarray  # [B, T]
    one_hot_BT: jnp.ndarray  # [B, T]
    target_ids: jnp.ndarray | None = None  # [U] or [B, T, K]

    @property
    def is_sparse(self) -> bool:
        """Each row lists its own candidates."""
        return self.target_ids is not None and self.target_ids.ndim == 3

    @property
    def is_certain(self) -> bool:
        """One candidate a row, whatever the settings (see `one_hot_law`)."""
        return self.is_sparse and self.logits_BTV.shape[-1] == 1


@struct.dataclass
class Proposal:
    """M draft tokens and the law q that produced them.

    Attributes:
      tokens_BM: target ids, never reduced ids.
      draft_ids_BM: the same tokens in the law's own vocabulary.
      law: q, one row per draft.
      usable_B: drafts before the first row whose logits were not finite; the
        verifier looks at no more (an all -inf row degrades to a plain step).
      confidence_logit_BM: None, or the log-odds of the drafter's estimate that
        row j is accepted given that the rows before it were, before any
        calibration; it may read d_<j only (and drafts that were not drawn, which
        are a function of the text).
      parents_BW: None for a chain. For a tree the parent row of each verify row
        (row 0 is the anchor, parent -1; row i + 1 is draft i); parents precede
        their children, and siblings stand in the order they are tried.
    """

    tokens_BM: jnp.ndarray  # [B, M]
    draft_ids_BM: jnp.ndarray  # [B, M]
    law: TokenLaw
    usable_B: jnp.ndarray  # [B]
    confidence_logit_BM: jnp.ndarray | None = None  # [B, M]
    parents_BW: jnp.ndarray | None = None  # [B, W]


def first_request(proposal: Proposal):
    """What the first request of a batch was proposed.

    Returns:
      Logits `[M, U]` (of a sparse law `[M, K]`), the target ids of a sparse law's
      candidates or None, drafts `[M]`, usable drafts, confidence `[M]` or None.
    """
    law, confidence = proposal.law, proposal.confidence_logit_BM
    return (
        law.logits_BTV[0],
        law.target_ids[0] if law.target_ids is not None and law.is_sparse else None,
        proposal.tokens_BM[0],
        proposal.usable_B[0],
        None if confidence is None else confidence[0],
    )


def join_rows(laws: list[TokenLaw]) -> TokenLaw:
    """One law from laws of consecutive rows (drafts sampled one at a time)."""

    def rows(name):
        return jnp.concatenate([getattr(law, name) for law in laws], axis=1)

    ids = laws[0].target_ids
    return TokenLaw(
        logits_BTV=rows("logits_BTV"),
        inv_temperature_B=laws[0].inv_temperature_B,
        floor_BT=rows("floor_BT"),
        log_norm_BT=rows("log_norm_BT"),
        one_hot_BT=rows("one_hot_BT"),
        target_ids=rows("target_ids") if laws[0].is_sparse else ids,
    )


def one_hot_law(tokens_BM) -> TokenLaw:
    """The law of drafts that were chosen, not drawn: all mass on each token.

    Sparse with one candidate a row, so it costs nothing: lookup drafts and the
    nodes of a tree.
    """
    zeros_BM = jnp.zeros(tokens_BM.shape, jnp.float32)
    return TokenLaw(
        logits_BTV=zeros_BM[..., None],
        inv_temperature_B=jnp.ones(tokens_BM.shape[:1], jnp.float32),
        floor_BT=zeros_BM,
        log_norm_BT=zeros_BM,
        one_hot_BT=jnp.zeros(tokens_BM.shape, jnp.int32),
        target_ids=tokens_BM[..., None],
    )


def target_ids_of(law: TokenLaw, ids_BT):
    """Target ids `[B, T]` of ids in the law's own vocabulary."""
    if law.target_ids is None:
        return ids_BT
    if law.is_sparse:
        return jnp.take_along_axis(law.target_ids, ids_BT[..., None], -1)[..., 0]
    return law.target_ids[ids_BT]


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


def prob_at(law: TokenLaw, row_BX, ids_BX):
    """Probability `[B, X]` of one id (own vocabulary) in each chosen row."""
    b_B1 = jnp.arange(row_BX.shape[0])[:, None]
    scaled_BX = law.logits_BTV[b_B1, row_BX, ids_BX] * law.inv_temperature_B[:, None]
    prob_BX = jnp.where(
        scaled_BX >= law.floor_BT[b_B1, row_BX],
        jnp.exp(scaled_BX - law.log_norm_BT[b_B1, row_BX]),
        0.0,
    )
    one_hot_BX = law.one_hot_BT[b_B1, row_BX]
    return jnp.where(
        one_hot_BX >= 0, (ids_BX == one_hot_BX).astype(jnp.float32), prob_BX
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
    if law.target_ids is None:
        return prob_BV
    full_BV = jnp.zeros((prob_BV.shape[0], vocab_size), prob_BV.dtype)
    if not law.is_sparse:
        return full_BV.at[:, law.target_ids].set(prob_BV)
    ids_BK = jnp.take_along_axis(law.target_ids, row_B[:, None, None], 1)[:, 0]
    row_B1 = jnp.arange(prob_BV.shape[0])[:, None]
    return full_BV.at[row_B1, ids_BK].add(prob_BV)


def residual(p_BV, q_BV):
    """The normalised positive part of p - q `[B, V]` (article 1.2).

    Where p equals q no rejection can reach it; p itself is returned there, so
    that rounding never produces an empty distribution.
    """
    excess_BV = jnp.maximum(p_BV - q_BV, 0.0)
    mass_B1 = excess_BV.sum(-1, keepdims=True)
    return jnp.where(mass_B1 > 0, excess_BV / jnp.maximum(mass_B1, 1e-30), p_BV)
