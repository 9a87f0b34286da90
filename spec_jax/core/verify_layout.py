"""Rows of a verify: tokens, parents, positions and how many of them count.

One representation for chains and trees: each row has a `parent` row. A chain
is the tree whose parent is the row before (`parents = -1, 0, 1, ...`), so its
visibility is causal and its position is its index.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from spec_jax.core import masks
from spec_jax.core.shapes import bind


@struct.dataclass
class VerifyLayout:
    """What one target forward runs.

    Attributes:
      tokens_BW: row 0 is the anchor, the rest are drafts.
      parents_W: row index of each row's parent, -1 for the root.
      depth_W: distance from the root; position = committed length + depth.
      verify_len_B: rows that count, anchor included; later ones are padding.
    """

    tokens_BW: jnp.ndarray  # [B, W]
    parents_W: jnp.ndarray  # [W]
    depth_W: jnp.ndarray  # [W]
    verify_len_B: jnp.ndarray  # [B]

    def positions(self, length_B):
        """Absolute positions `[B, W]`."""
        return length_B[:, None] + self.depth_W[None]

    def visible(self):
        """In-block visibility `[W, W]`: ancestors and self."""
        return masks.ancestors(self.parents_W)


def chain(anchor_B, drafts_BM, verify_len_B) -> VerifyLayout:
    """The anchor followed by a chain of drafts; M may be 0 (plain decoding)."""
    bind(anchor_B=anchor_B, drafts_BM=drafts_BM, verify_len_B=verify_len_B)
    tokens_BW = jnp.concatenate([anchor_B[:, None], drafts_BM], 1)
    row_W = jnp.arange(tokens_BW.shape[1])
    return VerifyLayout(tokens_BW, row_W - 1, row_W, verify_len_B)
