"""The accept law: probabilities without randomness, and a thin sampler.

Accept draft d with min(1, p(d) / q(d)); after a rejection draw from the
normalised positive part of p - q; when nothing was rejected draw from the next
row of p (article 1.2). The accepted branch gives min(p, q), the rejected one
fills [p - q]+: together exactly p. q is the *recorded* law of the proposal.

A tree's nodes were chosen, not drawn (one-hot q), and min(1, p / q) is p: the
children of a node are tried in order, each rejection takes its token's mass out
of p, and what is left of p after the last child gives the next token. Where the
walk would go from every node is decided at once, from p of each node's token in
its parent's row; no `[B, W, V]` array of probabilities is built.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.core import keys
from spec_jax.core.outcome import Verdict, cut
from spec_jax.core.proposal import (
    Proposal,
    TokenLaw,
    prob_at,
    prob_of,
    residual,
    row_probs,
)
from spec_jax.core.shapes import bind
from spec_jax.core.verify_layout import VerifyLayout
from spec_jax.sampling import draws, penalties, transform


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


def earlier_siblings(parents_BW):
    """`[B, M, M]` bool: draft j is a child of draft i's parent, tried before it."""
    parent_BM = parents_BW[:, 1:]
    same_BMM = parent_BM[:, :, None] == parent_BM[:, None, :]
    return same_BMM & jnp.tril(jnp.ones(same_BMM.shape[-2:], bool), -1)


def child_terms(p_law: TokenLaw, proposal: Proposal, tried_BM):
    """What each node has to beat when its turn among its siblings comes.

    Args:
      p_law: target law, W rows.
      proposal: the nodes and their parents.
      tried_BM: nodes that exist for the walk.

    Returns:
      (mass_BM, left_BM): mass of the node's token that is still in p, and all
      the mass that is; the node is accepted with probability mass / left. A
      token that an earlier sibling named has no mass any more.
    """
    tokens_BM, parents_BW = proposal.tokens_BM, proposal.parents_BW
    assert parents_BW is not None
    earlier_BMM = earlier_siblings(parents_BW) & tried_BM[:, None, :]
    p_BM = prob_at(p_law, parents_BW[:, 1:], tokens_BM)
    again_BMM = earlier_BMM & (tokens_BM[:, :, None] == tokens_BM[:, None, :])
    mass_BM = jnp.where(tried_BM & ~again_BMM.any(-1), p_BM, 0.0)
    gone_BM = jnp.where(earlier_BMM, mass_BM[:, None, :], 0.0).sum(-1)
    # Rounding can leave less than nothing, which any uniform would beat.
    return mass_BM, jnp.maximum(1.0 - gone_BM, 0.0)


def after_children(p_law: TokenLaw, proposal: Proposal, row_B, refused_BM):
    """The distribution `[B, V]` (not normalised) that follows a node.

    Args:
      p_law: target law, W rows.
      proposal: the nodes.
      row_B: the node's row.
      refused_BM: its children, all of them tried and rejected.
    """
    size_v = p_law.logits_BTV.shape[-1]
    p_BV = row_probs(p_law, row_B, size_v)
    b_B1 = jnp.arange(row_B.shape[0])[:, None]
    gone_BM = jnp.where(refused_BM, proposal.tokens_BM, size_v)
    left_BV = p_BV.at[b_B1, gone_BM].set(0.0, mode="drop")
    # Children that hold all of p are refused by rounding only.
    return jnp.where(left_BV.sum(-1, keepdims=True) > 0, left_BV, p_BV)


def judge_tree(
    p_law: TokenLaw,
    finite_BW,
    proposal: Proposal,
    layout: VerifyLayout,
    accept_uniform_BM,
    next_uniform_B,
) -> Verdict:
    """Walks from the root, then draws the correction or bonus.

    Args:
      p_law: target law of the W rows, after the one transform.
      finite_BW: rows whose target logits define a law.
      proposal: the nodes, with one candidate each (`one_hot_law`).
      layout: the rows; `verify_len_B` cuts the path like a chain's, so that 1
        leaves the root.
      accept_uniform_BM: one uniform per node; u = 0 with p = 0 rejects.
      next_uniform_B: uniform of the final draw.

    Raises:
      ValueError: the nodes were drawn from a law.
    """
    if not proposal.law.is_certain:
        raise ValueError(
            "proposal.law of a tree must be one_hot_law(tokens_BM), nodes chosen and "
            f"not drawn; got rows of {proposal.law.logits_BTV.shape[-1]} candidates: "
            "propose a chain to draft from a law"
        )
    parents_BW = proposal.parents_BW
    assert parents_BW is not None
    bind(
        finite_BW=finite_BW,
        parents_BW=parents_BW,
        tokens_BM=proposal.tokens_BM,
        accept_uniform_BM=accept_uniform_BM,
    )
    num_draft = proposal.tokens_BM.shape[1]
    tried_BM = jnp.take_along_axis(finite_BW, parents_BW[:, 1:], 1)
    tried_BM &= jnp.arange(num_draft)[None] < proposal.usable_B[:, None]
    mass_BM, left_BM = child_terms(p_law, proposal, tried_BM)
    wins_BM = accept_uniform_BM * left_BM < mass_BM
    beaten_BM = (earlier_siblings(parents_BW) & wins_BM[:, None, :]).any(-1)
    root_B1 = jnp.ones_like(wins_BM[:, :1])
    chosen_BW = jnp.concatenate([root_B1, wins_BM & ~beaten_BM], 1)
    # On the path: chosen, and so are all of its ancestors.
    on_path_BW = (~layout.visible() | chosen_BW[:, None, :]).all(-1)
    raw_B = on_path_BW[:, 1:].sum(1, dtype=jnp.int32)
    r_B = jnp.minimum(cut(raw_B, layout.verify_len_B), layout.levels)
    depth_X = jnp.arange(layout.levels + 1)
    here_BXW = (layout.depth_BW[:, None, :] == depth_X[:, None]) & on_path_BW[:, None]
    path_BX = jnp.argmax(here_BXW, -1)
    last_B = jnp.take_along_axis(path_BX, r_B[:, None], 1)[:, 0]
    # A path that reached the cut has children nobody tried.
    ended_B = r_B < jnp.minimum(layout.verify_len_B - 1, layout.levels)
    refused_BM = tried_BM & (parents_BW[:, 1:] == last_B[:, None]) & ended_B[:, None]

    def sampled(_):
        mass_BV = after_children(p_law, proposal, last_B, refused_BM)
        return draws.inverse_cdf(mass_BV, next_uniform_B)

    best_B = jnp.take_along_axis(p_law.one_hot_BT, last_B[:, None], 1)[:, 0]
    drawn_B = jax.lax.cond(
        (p_law.one_hot_BT < 0).any(), sampled, lambda _: best_B, operand=None
    )
    return Verdict(
        raw_accepted_B=raw_B,
        num_accepted_B=r_B,
        next_token_B=jnp.where(best_B >= 0, best_B, drawn_B).astype(jnp.int32),
        full_B=~refused_BM.any(1),
        bad_B=~jnp.take_along_axis(finite_BW, last_B[:, None], 1)[:, 0],
        path_BX=path_BX.astype(jnp.int32),
    )


def accept(logits_BWV, stored_B, slots, proposal: Proposal, layout: VerifyLayout):
    """The verdict of a chain or a tree under each request's settings.

    `stored_B` is false where a row of the plan was not finite (see
    `forward.stored`): such a request ends with an error, whichever row it was.
    """
    num_draft = proposal.tokens_BM.shape[1]
    past = None
    if slots.history is not None:
        past = penalties.of_block(slots.history, layout.tokens_BW, layout.visible())
    p_law = transform.law_of(logits_BWV, slots.sampling, past=past)
    finite_BW = transform.finite_rows(logits_BWV) & stored_B[:, None]
    sampled = ~slots.sampling.greedy_B.all()

    def uniforms(use, rows):
        return keys.round_uniforms(
            slots.seed_B, slots.round_B, use, rows, needed=sampled
        )

    parents_BW = proposal.parents_BW
    if parents_BW is None:
        uniform = uniforms(keys.Use.ACCEPT, num_draft)
        final = uniforms(keys.Use.TARGET, 1)
        return judge(
            p_law, finite_BW, proposal, layout.verify_len_B, uniform, final[:, 0]
        )
    # The row that judges a node is its parent's, its rank among siblings the child.
    uniform = keys.child_uniforms(
        slots.seed_B,
        slots.round_B,
        keys.Use.ACCEPT,
        parents_BW[:, 1:],
        earlier_siblings(parents_BW).sum(-1),
        needed=sampled,
    )
    final = uniforms(keys.Use.TARGET, 1)
    return judge_tree(p_law, finite_BW, proposal, layout, uniform, final[:, 0])
