"""Prefill: a chunk of one slot's prompt fills target KV and draft context.

Both in the same program, so that no slot is ever live with one of them missing
(known failures a2, a6). Chunks are padded to a bucket; the token after a
chunk's edge is the next *known* token. The last chunk draws the first token
through the same transform and makes the slot live.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.core import keys, masks
from spec_jax.decode.forward import Weights, stored, target_logits
from spec_jax.decode.state import DecodeState, Slots
from spec_jax.drafters.base import Drafter, Rows
from spec_jax.sampling import draws, logprobs, penalties, transform
from spec_jax.sampling.logprobs import Logprobs
from spec_jax.target import model
from spec_jax.target.spec import TargetSpec


@struct.dataclass
class Chunk:
    """One padded piece of a prompt for one slot (all scalars but the tokens).

    Attributes:
      tokens_T: prompt ids, padded.
      next_token: the known token after the chunk; ignored on the last chunk
        unless `known`.
      start: prompt rows already filled.
      count: real tokens in this chunk.
      slot: where the request lives.
      is_last: this chunk ends the prompt.
      known: the last chunk's next token was emitted before (a request that was
        retracted): it becomes the anchor, nothing is drawn or counted.
      prompt_len: tokens of the prompt proper; later ones are the answer.
      request: the request's slot record with B = 1 (length_B etc. are set here).
    """

    tokens_T: jnp.ndarray  # [T]
    next_token: jnp.ndarray
    start: jnp.ndarray
    count: jnp.ndarray
    slot: jnp.ndarray
    is_last: jnp.ndarray
    known: jnp.ndarray
    prompt_len: jnp.ndarray
    request: Slots


@struct.dataclass
class PrefillResult:
    """First token of a finished prompt (-1 where none was drawn)."""

    token: jnp.ndarray
    finished: jnp.ndarray
    stopped: jnp.ndarray
    bad: jnp.ndarray
    logprobs: Logprobs | None = None


def _take_slot(tree, slot):
    """Slices slot `b` out of arrays whose axis 1 is B."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=1), tree
    )


def _put_slot(tree, part, slot):
    return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, axis=1), tree, part
    )


def _history_with(history: penalties.History | None, chunk: Chunk):
    """The slot's history `[1, V]` with this chunk's tokens; a first one clears it."""
    if history is None:
        return None
    kept = jax.tree.map(
        lambda x: jnp.where(
            chunk.start > 0,
            jax.lax.dynamic_slice_in_dim(x, chunk.slot, 1, axis=0),
            jnp.zeros((), x.dtype),
        ),
        history,
    )
    row_1T = jnp.arange(chunk.tokens_T.shape[0])[None]
    return penalties.told(
        kept,
        chunk.tokens_T[None],
        row_1T < chunk.count,
        chunk.start + row_1T < chunk.prompt_len,
    )


def prefill_step(
    spec: TargetSpec,
    drafter: Drafter | None,
    taps: tuple[int, ...],
    weights: Weights,
    state: DecodeState,
    chunk: Chunk,
    *,
    top_logprobs: int = 0,
    num_ids: int = 0,
):
    """Runs one chunk: `(state, PrefillResult)`; donate the state."""
    size_t = chunk.tokens_T.shape[0]
    start_B = chunk.start[None]
    row_T = jnp.arange(size_t)
    cache = _take_slot(state.cache, chunk.slot)
    output = model.forward(
        spec,
        weights.target,
        cache,
        chunk.tokens_T[None],
        start_B[:, None] + row_T[None],
        masks.causal(row_T[:, None], row_T[None, :])[None],
        start_B,
        taps,
    )
    last = chunk.count - 1
    hidden_BTD = jax.lax.dynamic_slice_in_dim(output.hidden_BTD, last, 1, axis=1)
    logits_BTV = target_logits(weights, hidden_BTD, num_ids)
    request = chunk.request
    history, past = _history_with(state.slots.history, chunk), None
    if history is not None:
        past = penalties.only_history(history, 1)
    law = transform.law_of(logits_BTV, request.sampling, past=past)
    uniform = keys.round_uniforms(request.seed_B, request.round_B, keys.Use.FIRST, 1)
    first_B = jnp.where(chunk.known, chunk.next_token, draws.draw(law, uniform)[:, 0])
    draft = state.draft
    if drafter is not None:
        following_T = jnp.concatenate([chunk.tokens_T[1:], chunk.tokens_T[:1]])
        edge = jnp.where(chunk.is_last, first_B[0], chunk.next_token)
        following_T = jnp.where(row_T == last, edge, following_T)
        rows = Rows(
            tokens_BT=chunk.tokens_T[None],
            next_tokens_BT=following_T[None],
            features_BTLD=output.features_BTLD,
            hidden_BTD=output.hidden_BTD,
            start_B=start_B,
            length_B=chunk.count[None],
        )
        part = _take_slot(draft, chunk.slot)
        part = drafter.prefill(weights.draft, weights.frozen, part, rows)
        draft = _put_slot(draft, part, chunk.slot)
    # A chunk that was not finite left the length behind, so
    # the chunks after it, and the request, are bad too.
    held = jax.lax.dynamic_index_in_dim(state.slots.length_B, chunk.slot, 0, False)
    gap = (chunk.start > 0) & (held != chunk.start)
    stored_B = stored(output, chunk.count[None])
    bad_B = ~transform.finite_rows(logits_BTV)[:, 0] | ~stored_B | gap
    stopped_B = (first_B[:, None] == request.stop_ids_BX).any(1) & ~chunk.known
    drawn_B = jnp.where(chunk.known, 0, 1)[None]
    finished_B = stopped_B | (request.remaining_B <= drawn_B) | bad_B
    if history is not None:
        history = penalties.told(
            history,
            first_B[:, None],
            jnp.broadcast_to(chunk.is_last, (1, 1)),
            jnp.zeros((1, 1), bool),
        )
    new = dataclasses.replace(
        request,
        anchor_B=first_B,
        length_B=jnp.where(
            bad_B | (finished_B & chunk.is_last), 0, start_B + chunk.count
        ),
        remaining_B=request.remaining_B - drawn_B,
        active_B=chunk.is_last & ~finished_B,
        round_B=request.round_B + drawn_B,
        history=history,
    )
    slots = jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_slice_in_dim(
            x, y.astype(x.dtype), chunk.slot, axis=0
        ),
        state.slots,
        new,
    )
    result = PrefillResult(
        token=jnp.where(chunk.is_last & ~chunk.known, first_B[0], -1),
        finished=chunk.is_last & finished_B[0],
        stopped=stopped_B[0],
        bad=chunk.is_last & bad_B[0],
    )
    if request.logprobs_B is not None:
        wanted_B = request.logprobs_B & chunk.is_last
        result = dataclasses.replace(
            result,
            logprobs=logprobs.of_tokens(
                logits_BTV, first_B[:, None], wanted_B, top_logprobs
            ),
        )
    cache = _put_slot(state.cache, output.cache, chunk.slot)
    return DecodeState(cache, draft, slots), result
