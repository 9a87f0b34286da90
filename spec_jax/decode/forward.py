"""The verify forward: the frozen target runs a round's rows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

from spec_jax.core.verify_layout import VerifyLayout
from spec_jax.decode.state import DecodeState
from spec_jax.drafters.base import Frozen
from spec_jax.target import model
from spec_jax.target.spec import TargetSpec


@struct.dataclass
class Weights:
    """Everything a round reads and never changes.

    Attributes:
      target: target parameters.
      draft: drafter parameters (None without a drafter).
      frozen: what the drafter borrows from the target (None without one).
    """

    target: Any
    draft: Any = None
    frozen: Frozen | None = None


def stored(output: model.TargetOutput):
    """Requests `[B]` whose rows the forward wrote: all of them finite."""
    return jnp.isfinite(output.hidden_BTD).all((1, 2))


def target_rows(
    spec: TargetSpec, weights: Weights, state: DecodeState, layout: VerifyLayout, taps
):
    """The verify forward: logits `[B, W, V]` float32, features, new cache."""
    slots = state.slots
    # Idle and filling slots run too: what they write lies past their length.
    history_B = slots.length_B
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
    logits_BWV = model.logits(weights.target, output.hidden_BTD)
    return logits_BWV, output
