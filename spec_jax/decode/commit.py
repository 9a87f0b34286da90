"""Commit: what a round emits becomes history; slots and caches advance."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spec_jax.core import outcome
from spec_jax.core.proposal import Proposal
from spec_jax.core.verify_layout import VerifyLayout
from spec_jax.decode.compact_path import compact
from spec_jax.decode.forward import Weights
from spec_jax.decode.state import DecodeState, RoundResult
from spec_jax.drafters.base import Drafter, Rows
from spec_jax.sampling import penalties


def commit(
    drafter: Drafter | None,
    weights: Weights,
    state: DecodeState,
    layout: VerifyLayout,
    proposal: Proposal,
    verdict,
    output,
):
    """Advances slots, target cache and draft state by the confirmed rows.

    Those of a tree are the accepted path; afterwards both are chains again.
    """
    slots, path_BX = state.slots, verdict.path_BX
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

        def committed(rows_BTX):
            """Rows that become history; the others may hold anything, NaN included."""
            is_kept_BT = jnp.arange(rows_BTX.shape[1]) < done.commit_len_B[:, None]
            shape = is_kept_BT.shape + (1,) * (rows_BTX.ndim - 2)
            return jnp.where(is_kept_BT.reshape(shape), rows_BTX, 0)

        rows = Rows(
            tokens_BT=outcome.along_path(path_BX, layout.tokens_BW),
            next_tokens_BT=following_BW,
            features_BTLD=committed(outcome.along_path(path_BX, output.features_BTLD)),
            hidden_BTD=committed(outcome.along_path(path_BX, output.hidden_BTD)),
            start_B=slots.length_B,
            length_B=done.commit_len_B,
        )
        draft = drafter.extend(weights.draft, weights.frozen, draft, rows)
    cache = output.cache
    if path_BX is not None:
        cache = compact(cache, path_BX, verdict.num_accepted_B, slots.length_B)
    history = slots.history
    if history is not None:
        # Emitted tokens only: what was rejected never counts.
        emitted_BW = done.tokens_BW >= 0
        history = penalties.told(
            history, done.tokens_BW, emitted_BW, jnp.zeros((1, 1), bool)
        )
    advanced = dataclasses.replace(
        slots,
        anchor_B=done.anchor_B,
        length_B=jnp.where(done.finished_B, 0, slots.length_B + done.commit_len_B),
        remaining_B=slots.remaining_B - done.emitted_B,
        active_B=slots.active_B & ~done.finished_B,
        round_B=slots.round_B + slots.active_B.astype(jnp.int32),
        history=history,
    )
    result = RoundResult(
        tokens_BW=done.tokens_BW,
        emitted_B=done.emitted_B,
        num_accepted_B=verdict.num_accepted_B,
        raw_accepted_B=verdict.raw_accepted_B,
        verify_len_B=layout.verify_len_B,
        full_B=verdict.full_B,
        ran_B=slots.active_B,
        finished_B=done.finished_B,
        stopped_B=done.stopped_B,
        bad_B=verdict.bad_B & slots.active_B,
    )
    return DecodeState(cache, draft, advanced), result
