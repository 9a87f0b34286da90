"""A drafter that is given rounded features: what it loses by their precision.

A server may hold the target's features in fewer bits than the drafter was trained
on (training notes, A17). The drafter's record is wrapped: each row of a layer is
rounded before `prefill` and `extend` read it, and so is the last hidden row, the
feature of EAGLE. The target, the engine and what is verified stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter, Rows

_INT8_MAX = 127.0
# Of float8_e4m3fn: mantissa bits, exponent of the smallest normal number, and the
# largest number.
_FLOAT8 = (3, -6, 448.0)


# Casts there and back would be no rounding: a compiler may leave both out.
def _to_bfloat16(x_XD):
    info = jnp.finfo(jnp.bfloat16)
    return jax.lax.reduce_precision(x_XD, info.nexp, info.nmant)


def _to_float8(x_XD):
    """Without a scale: what lies beyond the type's largest number becomes that."""
    bits, smallest, largest = _FLOAT8
    _, exponent_XD = jnp.frexp(x_XD)  # of a mantissa in [0.5, 1)
    step_XD = jnp.ldexp(1.0, jnp.maximum(exponent_XD - 1, smallest) - bits)
    return jnp.clip(jnp.round(x_XD / step_XD) * step_XD, -largest, largest)


def _to_int8(x_XD):
    """Symmetric: a row's largest magnitude is 127 steps."""
    step_X1 = jnp.abs(x_XD).max(-1, keepdims=True) / _INT8_MAX
    steps_XD = jnp.round(x_XD / jnp.where(step_X1 > 0, step_X1, 1.0))
    return steps_XD * step_X1


# (rows [..., D] float32) -> the same rows, as the type can hold them, in float32.
ROUNDINGS: dict[str, Callable] = {
    "bfloat16": _to_bfloat16,
    "float8_e4m3": _to_float8,
    "int8": _to_int8,
}


def rounded(rows_XD, kind: str):
    """Rows `[..., D]` rounded to `kind`, in the float type they came in.

    Args:
      rows_XD: features or last hidden rows.
      kind: a key of `ROUNDINGS`.
    """
    return ROUNDINGS[kind](rows_XD.astype(jnp.float32)).astype(rows_XD.dtype)


def reads_features(drafter: Drafter) -> bool:
    """Whether a drafter conditions on anything that the target computed."""
    return bool(drafter.needs.layer_ids) or drafter.needs.teacher


def with_rounded_features(drafter: Drafter, kind: str) -> Drafter:
    """The same drafter, told of the target's rows as `kind` can hold them.

    Args:
      drafter: one that reads features; its weights stay as they are.
      kind: a key of `ROUNDINGS`.

    Raises:
      UserError: no such kind.
    """
    if kind not in ROUNDINGS:
        raise UserError(
            f"roundings={kind!r} is not known; use some of {', '.join(ROUNDINGS)}"
        )

    def told(rows: Rows) -> Rows:
        return rows.replace(
            features_BTLD=rounded(rows.features_BTLD, kind),
            hidden_BTD=rounded(rows.hidden_BTD, kind),
        )

    def prefill(params, frozen, state, rows):
        return drafter.prefill(params, frozen, state, told(rows))

    def extend(params, frozen, state, rows):
        return drafter.extend(params, frozen, state, told(rows))

    return dataclasses.replace(drafter, prefill=prefill, extend=extend)
