"""Penalties and logit bias: what a request adds to its logits, row by row.

In order: repetition penalty (over prompt and answer), frequency and presence
penalties (over the answer), then bias. A verify's row counts the tokens before
it: the history, and the drafts on its own path (the rows before it in a chain,
its ancestors in a tree). A draft that is rejected never enters the history, so
speculation cannot change what a penalty means (known failures 20, 21).

A batch in which nobody asks for any of these computes nothing; rows of requests
that do not ask keep their logits bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.core.shapes import bind


@struct.dataclass
class Rules:
    """Penalties and biases of each request.

    Attributes:
      repetition_B: > 0; positive logits of seen tokens are divided by it,
        negative ones multiplied. 1 is off.
      presence_B: subtracted once from tokens in the answer. 0 is off.
      frequency_B: subtracted per occurrence in the answer. 0 is off.
      bias_ids_BX: target ids, padded with -1.
      bias_BX: added to their logits.
    """

    repetition_B: jnp.ndarray  # [B] float32
    presence_B: jnp.ndarray  # [B] float32
    frequency_B: jnp.ndarray  # [B] float32
    bias_ids_BX: jnp.ndarray  # [B, X] int32
    bias_BX: jnp.ndarray  # [B, X] float32


@struct.dataclass
class History:
    """Emitted and given tokens of each request, the anchor included.

    Attributes:
      prompt_BV: the token is in the prompt.
      output_BV: how often it is in the answer.
    """

    prompt_BV: jnp.ndarray  # [B, V] bool
    output_BV: jnp.ndarray  # [B, V] int32


@struct.dataclass
class Past:
    """The tokens before each row.

    Attributes:
      history: before the block.
      path_ids_BX: ids of the block's rows that may precede others (X may be 0).
      on_path_BTX: which of them precede (or are) row t.
    """

    history: History
    path_ids_BX: jnp.ndarray  # [B, X] int32
    on_path_BTX: jnp.ndarray  # [B, T, X] bool


def no_rules(batch: int, num_biases: int) -> Rules:
    """Nobody asks for anything; every leaf is a buffer of its own."""
    return Rules(
        repetition_B=jnp.ones((batch,), jnp.float32),
        presence_B=jnp.zeros((batch,), jnp.float32),
        frequency_B=jnp.zeros((batch,), jnp.float32),
        bias_ids_BX=jnp.full((batch, num_biases), -1, jnp.int32),
        bias_BX=jnp.zeros((batch, num_biases), jnp.float32),
    )


def no_history(batch: int, vocab_size: int) -> History:
    """Nothing given, nothing emitted."""
    return History(
        prompt_BV=jnp.zeros((batch, vocab_size), bool),
        output_BV=jnp.zeros((batch, vocab_size), jnp.int32),
    )


def only_history(history: History, num_rows: int) -> Past:
    """Every row stands right after the history."""
    batch = history.output_BV.shape[0]
    return Past(
        history,
        jnp.zeros((batch, 0), jnp.int32),
        jnp.zeros((batch, num_rows, 0), bool),
    )


def of_block(history: History, tokens_BW, visible_BWW) -> Past:
    """Rows of a verify: each after its own ancestors.

    Args:
      history: with the anchor (row 0) counted.
      tokens_BW: the rows' tokens.
      visible_BWW: [B or 1, W, W] ancestors and self.
    """
    bind(tokens_BW=tokens_BW)
    size_b, size_w = tokens_BW.shape
    visible_BWW = jnp.broadcast_to(visible_BWW, (size_b, size_w, size_w))
    return Past(history, tokens_BW[:, 1:], visible_BWW[:, :, 1:])


def told(history: History, tokens_BT, counted_BT, given_BT) -> History:
    """The history with more tokens.

    Args:
      history: so far.
      tokens_BT: ids (anything where not counted).
      counted_BT: [B, T] bool, tokens that exist.
      given_BT: [B or 1, T] bool, of the prompt (else of the answer).
    """
    size_v = history.output_BV.shape[1]
    b_B1 = jnp.arange(tokens_BT.shape[0])[:, None]
    prompt_at = jnp.where(counted_BT & given_BT, tokens_BT, size_v)
    output_at = jnp.where(counted_BT & ~given_BT, tokens_BT, size_v)
    return History(
        prompt_BV=history.prompt_BV.at[b_B1, prompt_at].set(True, mode="drop"),
        output_BV=history.output_BV.at[b_B1, output_at].add(1, mode="drop"),
    )


def _weighed(logits_BTX, rules: Rules, given_BTX, count_BTX):
    """Penalised logits of tokens that occur `count` times in the answer."""

    def of(value_B):
        return value_B[:, None, None]

    repetition_B11 = of(rules.repetition_B)
    cut = jnp.where(
        logits_BTX > 0, logits_BTX / repetition_B11, logits_BTX * repetition_B11
    )
    made = count_BTX > 0
    out = jnp.where(given_BTX | made, cut, logits_BTX)
    out = out - of(rules.frequency_B) * count_BTX.astype(jnp.float32)
    return out - jnp.where(made, of(rules.presence_B), 0.0)


def adjusted(logits_BTV, rules: Rules, past: Past, target_ids=None):
    """Logits after penalties and bias.

    Args:
      logits_BTV: float32 logits.
      rules: one per request.
      past: what stands before each row.
      target_ids: target id of each column `[U]`, or of each row's candidates
        `[B, T, K]`, or None (the columns are the target's vocabulary). With ids
        the block's own rows are not counted: X must be 0.
    """
    bind(logits_BTV=logits_BTV, repetition_B=rules.repetition_B)
    size_b, size_v = past.history.output_BV.shape
    b_B1 = jnp.arange(size_b)[:, None]

    def columns(dense_BV):
        if target_ids is None:
            return dense_BV[:, None]
        if target_ids.ndim == 1:
            return dense_BV[:, target_ids][:, None]
        flat = target_ids.reshape(size_b, -1)
        return jnp.take_along_axis(dense_BV, flat, 1).reshape(target_ids.shape)

    def apply(logits_BTV):
        given_BV, made_BV = past.history.prompt_BV, past.history.output_BV
        out_BTV = _weighed(logits_BTV, rules, columns(given_BV), columns(made_BV))
        ids_BX = past.path_ids_BX
        if ids_BX.shape[1]:
            # Columns that the block itself names, once more with its own counts.
            # An id that stands twice gives the same value twice.
            same_BXX = ids_BX[:, :, None] == ids_BX[:, None, :]
            extra_BTX = jnp.einsum(
                "btx,bxy->bty",
                past.on_path_BTX.astype(jnp.int32),
                same_BXX.astype(jnp.int32),
            )
            at = (size_b, logits_BTV.shape[1], ids_BX.shape[1])
            ids_BTX = jnp.broadcast_to(ids_BX[:, None], at)
            value_BTX = _weighed(
                jnp.take_along_axis(logits_BTV, ids_BTX, -1),
                rules,
                given_BV[b_B1, ids_BX][:, None],
                made_BV[b_B1, ids_BX][:, None] + extra_BTX,
            )
            t_1T1 = jnp.arange(at[1])[None, :, None]
            out_BTV = out_BTV.at[b_B1[..., None], t_1T1, ids_BTX].set(value_BTX)
        bias_at = jnp.where(rules.bias_ids_BX >= 0, rules.bias_ids_BX, size_v)
        bias_BV = jnp.zeros((size_b, size_v), jnp.float32)
        bias_BV = bias_BV.at[b_B1, bias_at].add(rules.bias_BX, mode="drop")
        return out_BTV + columns(bias_BV)

    if target_ids is not None and past.path_ids_BX.shape[1]:
        raise ValueError("past.path_ids_BX must be empty where target_ids are given")
    wanted = (
        (rules.repetition_B != 1).any()
        | (rules.presence_B != 0).any()
        | (rules.frequency_B != 0).any()
        | (rules.bias_ids_BX >= 0).any()
    )
    return jax.lax.cond(wanted, apply, lambda logits: logits, logits_BTV)
