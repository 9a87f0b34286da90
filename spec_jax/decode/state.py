"""Device state of a batch of slots; one record, donated every round."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

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
      ran_B: the slot was live in this round.
      finished_B, stopped_B, bad_B: how it ended, if it did.
    """

    tokens_BW: jnp.ndarray  # [B, W]
    emitted_B: jnp.ndarray  # [B]
    num_accepted_B: jnp.ndarray  # [B]
    raw_accepted_B: jnp.ndarray  # [B]
    verify_len_B: jnp.ndarray  # [B]
    ran_B: jnp.ndarray  # [B]
    finished_B: jnp.ndarray  # [B]
    stopped_B: jnp.ndarray  # [B]
    bad_B: jnp.ndarray  # [B]


def empty_slots(batch: int, num_stop_ids: int) -> Slots:
    """No request anywhere. Every leaf is a buffer of its own: state is donated."""

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
        sampling=all_greedy(batch),
        stop_ids_BX=jnp.full((batch, num_stop_ids), -1, jnp.int32),
    )
