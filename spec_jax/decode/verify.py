"""The accept law: probabilities without randomness, and a thin sampler.

Accept draft d with min(1, p(d) / q(d)); after a rejection draw from the
normalised positive part of p - q; when nothing was rejected draw from the next
row of p (article 1.2). The accepted branch gives min(p, q), the rejected one
fills [p - q]+: together exactly p. q is the *recorded* law of the proposal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.core import keys
from spec_jax.core.outcome import Verdict, cut
from spec_jax.core.proposal import Proposal, TokenLaw, prob_of, residual, row_probs
from spec_jax.core.shapes import bind
from spec_jax.core.verify_layout import VerifyLayout
from spec_jax.sampling import draws, transform


def accept_terms(p_law: TokenLaw, proposal: Proposal):
    """p(d_j) and q(d_j) of each draft `[B, M]`; acceptance is min(1, p / q)."""
    num_draft = proposal.tokens_BM.shape[1]
    head = TokenLaw(
        logits_BTV=p_law.logits_BTV[:, :num_draft],
        inv_temperature_B=p_law.inv_temperature_B,
        floor_BT=p_law.floor_BT[:, :num_draft],
        log_norm_BT=p_law.log_norm_BT[:, :num_draft],
        one_hot_BT=p_law.one_hot_BT[:, :num_draft],
    )
    return (
        prob_of(head, proposal.tokens_BM),
        prob_of(proposal.law, proposal.draft_ids_BM),
    )


def next_law(p_law: TokenLaw, proposal: Proposal, row_B, rejected_B):
    """The distribution `[B, V]` of the token that follows row r.

    Args:
      p_law: target law, W rows.
      proposal: the drafts and q (M may be 0).
      row_B: r.
      rejected_B: draft r was examined and refused (else: bonus or cut).
    """
    size_v = p_law.logits_BTV.shape[-1]
    p_BV = row_probs(p_law, row_B, size_v)
    num_draft = proposal.tokens_BM.shape[1]
    if num_draft == 0:
        return p_BV
    q_BV = row_probs(proposal.law, jnp.minimum(row_B, num_draft - 1), size_v)
    return jnp.where(rejected_B[:, None], residual(p_BV, q_BV), p_BV)


def judge(
    p_law: TokenLaw,
    finite_BW,
    proposal: Proposal,
    verify_len_B,
    accept_uniform_BM,
    next_uniform_B,
) -> Verdict:
    """Decides r and draws the correction or bonus.

    Args:
      p_law: target law of the W rows, after the one transform.
      finite_BW: rows whose target logits define a law.
      proposal: drafts and q.
      verify_len_B: rows the plan granted, anchor included (1..W).
      accept_uniform_BM: one uniform per draft; u = 0 with p = 0 rejects.
      next_uniform_B: uniform of the final draw.
    """
    bind(
        finite_BW=finite_BW,
        tokens_BM=proposal.tokens_BM,
        accept_uniform_BM=accept_uniform_BM,
        verify_len_B=verify_len_B,
    )
    num_draft = proposal.tokens_BM.shape[1]
    p_BM, q_BM = accept_terms(p_law, proposal)
    accept_BM = (accept_uniform_BM * q_BM < p_BM) & finite_BW[:, :num_draft]
    accept_BM &= jnp.arange(num_draft)[None] < proposal.usable_B[:, None]
    raw_B = jnp.cumprod(accept_BM.astype(jnp.int32), 1).sum(1)
    r_B = cut(raw_B, verify_len_B)
    examined_B = jnp.minimum(verify_len_B - 1, proposal.usable_B)
    rejected_B = r_B < examined_B

    def sampled(_):
        mass_BV = next_law(p_law, proposal, r_B, rejected_B)
        return draws.inverse_cdf(mass_BV, next_uniform_B)

    best_B = jnp.take_along_axis(p_law.one_hot_BT, r_B[:, None], 1)[:, 0]
    drawn_B = jax.lax.cond(
        (p_law.one_hot_BT < 0).any(), sampled, lambda _: best_B, operand=None
    )
    return Verdict(
        raw_accepted_B=raw_B,
        num_accepted_B=r_B,
        next_token_B=jnp.where(best_B >= 0, best_B, drawn_B).astype(jnp.int32),
        full_B=~rejected_B,
        bad_B=~jnp.take_along_axis(finite_BW, r_B[:, None], 1)[:, 0],
    )


def accept(logits_BWV, stored_B, slots, proposal: Proposal, layout: VerifyLayout):
    """The verdict of a chain under each request's settings.

    `stored_B` is false where the forward kept no rows (see `TargetOutput`):
    such a request ends with an error, whichever row was not finite.
    """
    num_draft = proposal.tokens_BM.shape[1]
    p_law = transform.law_of(logits_BWV, slots.sampling)
    sampled = ~slots.sampling.greedy_B.all()

    def uniforms(use, rows):
        return keys.round_uniforms(
            slots.seed_B, slots.round_B, use, rows, needed=sampled
        )

    uniform = uniforms(keys.Use.ACCEPT, num_draft)
    final = uniforms(keys.Use.TARGET, 1)
    return judge(
        p_law,
        transform.finite_rows(logits_BWV) & stored_B[:, None],
        proposal,
        layout.verify_len_B,
        uniform,
        final[:, 0],
    )
