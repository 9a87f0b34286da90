"""The verify forward: the frozen target runs a round's rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct

from spec_jax.core import verify_layout
from spec_jax.core.verify_layout import VerifyLayout
from spec_jax.decode.state import DecodeState
from spec_jax.target import model
from spec_jax.target.spec import TargetSpec


@struct.dataclass
class Weights:
    """Everything a round reads and never changes.

    Attributes:
      target: target parameters.
      draft: drafter parameters (None without a drafter).
      frozen: what the drafter borrows from the target, a `Frozen` (None without one).
    """

    target: Any
    draft: Any = None
    frozen: Any = None


def stored(output: model.TargetOutput, count_B):
    """Requests `[B]` whose first `count_B` rows the forward wrote: all of them finite.

    Rows behind them (padding, drafts outside the plan) run too, and may be anything.
    """
    finite_BT = jnp.isfinite(output.hidden_BTD).all(-1)
    is_used_BT = jnp.arange(finite_BT.shape[1]) < count_B[:, None]
    return (finite_BT | ~is_used_BT).all(1)


def target_logits(weights: Weights, hidden_XD, num_ids: int = 0):
    """The target's logits `[..., V]` float32, from which everything is decoded.

    Args:
      weights: parameters.
      hidden_XD: after the final norm.
      num_ids: ids from here on are padding of the vocabulary, which no tokenizer
        knows: -inf, so that no law gives them mass. 0 (or V): there are none.
    """
    logits_XV = model.logits(weights.target, hidden_XD)
    if num_ids in (0, logits_XV.shape[-1]):
        return logits_XV
    return jnp.where(jnp.arange(logits_XV.shape[-1]) < num_ids, logits_XV, -jnp.inf)


def target_rows(
    spec: TargetSpec,
    weights: Weights,
    state: DecodeState,
    layout: VerifyLayout,
    taps,
    rows: int | None = None,
    num_ids: int = 0,
):
    """The verify forward: logits `[B, W, V]` float32, features, new cache.

    Args:
      spec, taps: static.
      weights, state: parameters and slots; the cache may have slots behind B.
      layout: the rows.
      rows: T: run the rows that count alone, packed into T; None runs every
        window in full. What was not run has NaN logits, which define no law,
        zero features, and writes nothing.
      num_ids: see `target_logits`.
    """
    # Idle and filling slots run too: what they write lies past their length.
    history_B = state.slots.length_B
    if rows is not None:
        return _packed_rows(spec, weights, state, layout, taps, rows, num_ids)
    output = model.forward(
        spec,
        weights.target,
        state.cache,
        layout.tokens_BW,
        layout.positions(history_B),
        layout.visible(),
        history_B,
        taps,
    )
    return target_logits(weights, output.hidden_BTD, num_ids), output


def _packed_rows(spec, weights, state, layout: VerifyLayout, taps, rows, num_ids):
    """`target_rows` of a ragged chain."""
    history_B = state.slots.length_B
    size_b, window = layout.tokens_BW.shape
    packing = verify_layout.pack(layout.verify_len_B, window, rows)
    positions_BW = jnp.broadcast_to(layout.positions(history_B), (size_b, window))
    output = model.forward(
        spec,
        weights.target,
        state.cache,
        verify_layout.packed(packing, layout.tokens_BW)[None],
        verify_layout.packed(packing, positions_BW)[None],
        layout.visible(),
        history_B,
        taps,
        packing,
    )
    logits_TV = target_logits(weights, output.hidden_BTD[0], num_ids)
    logits_BWV = verify_layout.unpacked(packing, logits_TV, jnp.nan)
    return logits_BWV, dataclasses.replace(
        output,
        hidden_BTD=verify_layout.unpacked(packing, output.hidden_BTD[0]),
        features_BTLD=verify_layout.unpacked(packing, output.features_BTLD[0]),
    )
