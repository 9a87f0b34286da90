"""Rows of a verify: tokens, parents, positions and how many of them count.

One representation for chains and trees: each row has a `parent` row. A chain
is the tree whose parent is the row before (`parents = -1, 0, 1, ...`), so its
visibility is causal and its position is its index.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from spec_jax.core import masks
from spec_jax.core.proposal import Proposal
from spec_jax.core.shapes import bind


@struct.dataclass
class VerifyLayout:
    """What one target forward runs.

    Attributes:
      tokens_BW: row 0 is the anchor, the rest are drafts.
      parents_BW: row index of each row's parent, -1 for the root (B may be 1:
        every request has the same shape).
      depth_BW: distance from the root; position = committed length + depth.
      verify_len_B: rows that count, anchor included; later ones are padding.
    """

    tokens_BW: jnp.ndarray  # [B, W]
    parents_BW: jnp.ndarray  # [B or 1, W]
    depth_BW: jnp.ndarray  # [B or 1, W]
    verify_len_B: jnp.ndarray  # [B]

    def positions(self, length_B):
        """Absolute positions `[B, W]`."""
        return length_B[:, None] + self.depth_BW

    def visible(self):
        """In-block visibility `[B or 1, W, W]`: ancestors and self."""
        return masks.ancestors(self.parents_BW)


def chain(anchor_B, drafts_BM, verify_len_B) -> VerifyLayout:
    """The anchor followed by a chain of drafts; M may be 0 (plain decoding)."""
    bind(anchor_B=anchor_B, drafts_BM=drafts_BM, verify_len_B=verify_len_B)
    tokens_BW = jnp.concatenate([anchor_B[:, None], drafts_BM], 1)
    row_1W = jnp.arange(tokens_BW.shape[1])[None]
    return VerifyLayout(tokens_BW, row_1W - 1, row_1W, verify_len_B)


def tree(anchor_B, drafts_BM, parents_BW, verify_len_B) -> VerifyLayout:
    """The anchor as the root of a tree of drafts.

    Args:
      anchor_B: the root.
      drafts_BM: tokens of rows 1..M.
      parents_BW: parent row of every row (root: -1); parents come first.
      verify_len_B: rows that count: all of them, or the anchor alone.
    """
    bind(anchor_B=anchor_B, drafts_BM=drafts_BM, parents_BW=parents_BW)
    tokens_BW = jnp.concatenate([anchor_B[:, None], drafts_BM], 1)
    depth_BW = masks.ancestors(parents_BW).sum(-1) - 1
    return VerifyLayout(tokens_BW, parents_BW, depth_BW, verify_len_B)


def of_proposal(anchor_B, proposal: Proposal, verify_len_B) -> VerifyLayout:
    """The rows of a round: a chain, or the proposal's own tree."""
    if proposal.parents_BW is None:
        return chain(anchor_B, proposal.tokens_BM, verify_len_B)
    return tree(anchor_B, proposal.tokens_BM, proposal.parents_BW, verify_len_B)
