"""Vocabulary-wide terms, computed some rows at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.drafters.base import Frozen, TrainOutputs


def in_chunks(fn, chunk_rows: int, *arrays):
    """`fn(*arrays)` over the leading axis, at most `chunk_rows` rows at a time.

    Each chunk is rematerialised in the backward pass, so only one chunk's
    logits ever exist; a single chunk is not. Chunk i takes every n-th row from
    row i: a leading axis that is sharded stays sharded inside every chunk.

    Args:
      fn: row-wise function of arrays `[rows, ...]` to a tree of `[rows, ...]`.
      chunk_rows: rows at a time; 0: all.
      *arrays: share their leading axis.
    """
    rows = arrays[0].shape[0]
    if chunk_rows == 0 or rows <= chunk_rows:
        return fn(*arrays)
    chunks = -(-rows // chunk_rows)
    size = -(-rows // chunks)

    def cut(array):
        pad = [(0, size * chunks - rows)] + [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, pad).reshape(size, chunks, *array.shape[1:])
        return jnp.moveaxis(padded, 1, 0)

    def body(carry, chunk):
        return carry, jax.checkpoint(fn)(*chunk)

    _, out = jax.lax.scan(body, None, tuple(cut(array) for array in arrays))
    return jax.tree.map(
        lambda a: jnp.moveaxis(a, 0, 1).reshape(-1, *a.shape[2:])[:rows], out
    )


def draft_columns(frozen: Frozen, labels_X):
    """Head column of each target id, and whether it has one.

    The draft vocabulary's ids ascend, so a binary search is the whole map.

    Returns:
      columns_X: int32, 0 where the id is not in the draft vocabulary.
      known_X: bool.
    """
    if frozen.target_ids_U is None:
        return labels_X, jnp.ones(labels_X.shape, bool)
    ids_U = jnp.asarray(frozen.target_ids_U)
    at_X = jnp.minimum(jnp.searchsorted(ids_U, labels_X), ids_U.shape[0] - 1)
    known_X = ids_U[at_X] == labels_X
    return jnp.where(known_X, at_X, 0), known_X


def output_logits(outputs: TrainOutputs, frozen: Frozen):
    """Logits of every row a drafter trains on, `[X, M, U]`, as it is to draft.

    Of a selector that drafts, the scores of all tokens: the candidates' are among
    them.
    """
    head_DU = frozen.head_DU if outputs.head_DU is None else outputs.head_DU
    logits_XMU = row_logits(
        head_DU, outputs.hidden_XMD, outputs.correction_EU, outputs.correction_XME
    )
    if outputs.selector is not None and outputs.selector.drafts:
        logits_XMU += outputs.selector.query_XME @ outputs.selector.successor_UE.T
    return logits_XMU


def row_logits(head_DU, hidden_XD, correction_EU=None, correction_XE=None):
    """`hidden @ head`, and the low-rank correction where there is one; float32."""
    logits_XU = jnp.matmul(hidden_XD, head_DU, preferred_element_type=jnp.float32)
    if correction_EU is not None:
        logits_XU += jnp.matmul(
            correction_XE, correction_EU, preferred_element_type=jnp.float32
        )
    return logits_XU.astype(jnp.float32)
