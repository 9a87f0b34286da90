"""Which positions of a training sequence become anchors.

A static number per sequence, drawn anew at each step, uniformly and without
replacement among the candidates. Every draw is folded from its row and its
position, so a row's anchors depend on neither the padding of the batch nor the
number of devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.core import block_layout
from spec_jax.core.shapes import bind


def row_keys(key, num_rows: int, first_row=0):
    """One key per row of the global batch.

    A trainer that cuts a global batch into pieces passes each piece the keys of
    its own rows; anchors then do not depend on the cut.

    Args:
      key: the step's key.
      num_rows: rows of the piece.
      first_row: the piece's first row in the global batch.
    """
    rows_B = first_row + jnp.arange(num_rows)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)


def sample_anchors(key, supervised_BS, length_B, num_anchors: int):
    """Draws anchors, ascending.

    Args:
      key: one key (rows fold their index into it), or `[B]` keys of the rows.
      supervised_BS: bool, tokens the target itself produced.
      length_B: real tokens of each row; nothing past them may anchor.
      num_anchors: N, static.

    Returns:
      anchors_BN: int32 positions; 0 where a row had too few candidates.
      real_BN: bool, False for those missing ones.
    """
    sizes = bind(supervised_BS=supervised_BS, length_B=length_B)
    size_b, size_s = sizes["B"], sizes["S"]
    keys_B = row_keys(key, size_b) if key.ndim == 0 else key
    position_S = jnp.arange(size_s)
    inside_BS = position_S[None] < length_B[:, None]
    may_BS = block_layout.anchor_candidates(supervised_BS.astype(bool) & inside_BS)

    def scores(row_key):
        return jax.vmap(lambda at: jax.random.uniform(jax.random.fold_in(row_key, at)))(
            position_S
        )

    score_BS = jnp.where(may_BS, jax.vmap(scores)(keys_B), -1.0)
    count = min(num_anchors, size_s)
    best_BN, at_BN = jax.lax.top_k(score_BS, count)
    at_BN = jnp.sort(jnp.where(best_BN >= 0, at_BN, size_s), axis=1)
    at_BN = jnp.pad(at_BN, ((0, 0), (0, num_anchors - count)), constant_values=size_s)
    real_BN = at_BN < size_s
    return jnp.where(real_BN, at_BN, 0).astype(jnp.int32), real_BN
