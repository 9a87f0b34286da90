"""Device state of a batch of slots; one record, donated every round."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.sampling.logprobs import Logprobs
from spec_jax.sampling.penalties import History, no_history, no_rules
from spec_jax.sampling.transform import Sampling, all_greedy
from spec_jax.target.cache import KVCache


@struct.dataclass
class Slots:
    """Per-slot request state.

    Attributes:
      anchor_B: emitted, not run by the target.
      length_B: committed rows of target KV; also the anchor's position. A slot
        that is still filling holds the rows filled so far (rounds of its
        neighbours write behind them), an ended one 0.
      remaining_B: tokens the request may still emit.
      active_B: live.
      speculate_B: this request's speculation switch.
      seed_B, round_B: what its random streams fold (see `core.keys`).
      sampling: its settings.
      stop_ids_BX: ids that end it, padded with -1.
      window_B: rows verified every round, anchor included, whatever the plan
        grants others; 0: the plan decides.
      history: tokens so far, for penalties; None where none were compiled.
      logprobs_B: it wants log-probabilities; None where none were compiled.
      sts_BM: temperatures of its confidence; None where all requests have the same.
    """

    anchor_B: jnp.ndarray  # [B] int32
    length_B: jnp.ndarray  # [B] int32
    remaining_B: jnp.ndarray  # [B] int32
    active_B: jnp.ndarray  # [B] bool
    speculate_B: jnp.ndarray  # [B] bool
    seed_B: jnp.ndarray  # [B] int32
    round_B: jnp.ndarray  # [B] int32
    sampling: Sampling
    stop_ids_BX: jnp.ndarray  # [B, X] int32
    window_B: jnp.ndarray  # [B] int32
    history: History | None = None
    logprobs_B: jnp.ndarray | None = None  # [B] bool
    sts_BM: jnp.ndarray | None = None  # [B, M] float32


@struct.dataclass
class DecodeState:
    """Everything a round takes and returns."""

    cache: KVCache
    draft: Any
    slots: Slots


@struct.dataclass
class RoundResult:
    """What the host reads, one round late; small arrays only.

    Attributes:
      tokens_BW: emitted tokens, -1 past `emitted_B`.
      emitted_B: tokens emitted this round.
      num_accepted_B: r after the cut; raw_accepted_B before it.
      verify_len_B: rows verified, anchor included.
      full_B: every draft inside the plan was accepted: the next token is a bonus,
        else a correction.
      ran_B: the slot was live in this round.
      finished_B, stopped_B, bad_B: how it ended, if it did.
      logprobs: of the emitted tokens, where compiled.
      survival_BM: current survival of the drafts, for later rounds' budgets; None
        where nothing was planned.
      confidence_logit_BM: raw log-odds of confidence, where it was asked for.
    """

    tokens_BW: jnp.ndarray  # [B, W]
    emitted_B: jnp.ndarray  # [B]
    num_accepted_B: jnp.ndarray  # [B]
    raw_accepted_B: jnp.ndarray  # [B]
    verify_len_B: jnp.ndarray  # [B]
    full_B: jnp.ndarray  # [B]
    ran_B: jnp.ndarray  # [B]
    finished_B: jnp.ndarray  # [B]
    stopped_B: jnp.ndarray  # [B]
    bad_B: jnp.ndarray  # [B]
    logprobs: Logprobs | None = None
    survival_BM: jnp.ndarray | None = None  # [B, M]
    confidence_logit_BM: jnp.ndarray | None = None  # [B, M]


def take_slots(state: DecodeState, requests: int) -> DecodeState:
    """The state as a round of slots 0..R-1 sees it.

    KV caches stay whole: whoever attends or writes touches the slots of its rows
    only, and a slice would be a copy. Everything else is cut.
    """
    cut = jax.tree.map(
        lambda x: x if isinstance(x, KVCache) else x[:, :requests],
        state.draft,
        is_leaf=_is_cache,
    )
    slots = jax.tree.map(lambda x: x[:requests], state.slots)
    return DecodeState(state.cache, cut, slots)


def put_slots(state: DecodeState, part: DecodeState) -> DecodeState:
    """The state after a round of slots 0..R-1; the slots behind are untouched."""

    def put(axis):
        def one(whole, new):
            if isinstance(whole, KVCache):
                return new
            return jax.lax.dynamic_update_slice_in_dim(whole, new, 0, axis)

        return one

    return DecodeState(
        part.cache,
        jax.tree.map(put(1), state.draft, part.draft, is_leaf=_is_cache),
        jax.tree.map(put(0), state.slots, part.slots),
    )


def _is_cache(node) -> bool:
    return isinstance(node, KVCache)


def empty_slots(
    batch: int,
    num_stop_ids: int,
    *,
    num_biases: int = 0,
    vocab_size: int | None = None,
    logprobs: bool = False,
    num_sts: int = 0,
) -> Slots:
    """No request anywhere. Every leaf is a buffer of its own: state is donated.

    Args:
      batch: B.
      num_stop_ids: width of the list of ids that end a request.
      num_biases: width of the list of biased ids.
      vocab_size: V, to keep what penalties and biases need; None keeps nothing.
      logprobs: requests may ask for log-probabilities.
      num_sts: M, where requests have temperatures of their own; 0 keeps none.
    """

    def zeros():
        return jnp.zeros((batch,), jnp.int32)

    return Slots(
        anchor_B=zeros(),
        length_B=zeros(),
        remaining_B=zeros(),
        active_B=jnp.zeros((batch,), bool),
        speculate_B=jnp.zeros((batch,), bool),
        seed_B=zeros(),
        round_B=zeros(),
        sampling=dataclasses.replace(
            all_greedy(batch),
            rules=None if vocab_size is None else no_rules(batch, num_biases),
        ),
        stop_ids_BX=jnp.full((batch, num_stop_ids), -1, jnp.int32),
        window_B=zeros(),
        history=None if vocab_size is None else no_history(batch, vocab_size),
        logprobs_B=jnp.zeros((batch,), bool) if logprobs else None,
        sts_BM=jnp.ones((batch, num_sts), jnp.float32) if num_sts else None,
    )
