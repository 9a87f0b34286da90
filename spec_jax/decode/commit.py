"""Commit: what a round emits becomes history; slots and caches advance."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spec_jax.core import outcome
from spec_jax.core.proposal import Proposal
from spec_jax.core.verify_layout import VerifyLayout
from spec_jax.decode.forward import Weights
from spec_jax.decode.state import DecodeState, RoundResult
from spec_jax.drafters.base import Drafter, Rows


def commit(
    drafter: Drafter | None,
    weights: Weights,
    state: DecodeState,
    layout: VerifyLayout,
    proposal: Proposal,
    verdict,
    output,
):
    """Advances slots, target cache and draft state by the confirmed rows."""
    slots = state.slots
    done = outcome.settle(
        verdict,
        proposal.tokens_BM,
        slots.anchor_B,
        slots.active_B,
        slots.remaining_B,
        slots.stop_ids_BX,
    )
    draft = state.draft
    if drafter is not None:
        following_BW = jnp.where(done.tokens_BW >= 0, done.tokens_BW, 0)
        rows = Rows(
            tokens_BT=layout.tokens_BW,
            next_tokens_BT=following_BW,
            features_BTLD=output.features_BTLD,
            hidden_BTD=output.hidden_BTD,
            start_B=slots.length_B,
            length_B=done.commit_len_B,
        )
        draft = drafter.extend(weights.draft, weights.frozen, draft, rows)
    advanced = dataclasses.replace(
        slots,
        anchor_B=done.anchor_B,
        length_B=jnp.where(done.finished_B, 0, slots.length_B + done.commit_len_B),
        remaining_B=slots.remaining_B - done.emitted_B,
        active_B=slots.active_B & ~done.finished_B,
        round_B=slots.round_B + slots.active_B.astype(jnp.int32),
    )
    result = RoundResult(
        tokens_BW=done.tokens_BW,
        emitted_B=done.emitted_B,
        num_accepted_B=verdict.num_accepted_B,
        raw_accepted_B=verdict.raw_accepted_B,
        verify_len_B=layout.verify_len_B,
        ran_B=slots.active_B,
        finished_B=done.finished_B,
        stopped_B=done.stopped_B,
        bad_B=verdict.bad_B & slots.active_B,
    )
    return DecodeState(output.cache, draft, advanced), result
