"""The anchor contract: which rows a draft block has and what each predicts.

One round, with M = 4 (article 1.1, 4.1, 5.2):

    target has run      A B C
    anchor                    D            emitted, not run: no KV, no feature
    fill-in rows        D _ _ _ _          DFlash: Q = M + 1, row j predicts its
                          E F G H          own position; the anchor row nothing
    anchor-first rows   D _ _ _            DSpark: Q = M, row j predicts the
                        E F G H            position after its own
    paired rows         a b c              EAGLE: features of A B C, each with the
                        B C D              token after it; row C, at the position
                            E              of its feature, predicts E
    fed-back rows             c' e' f'     its next rows take the drafter's own
                              E  F  G      output for a feature, and their draft;
                              F  G  H      they stand at the positions of D E F

Every `+1` / `-1` on a token or label axis lives here or in `outcome.py`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spec_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Rows of one draft block.

    Attributes:
      num_draft: M, tokens proposed (the anchor is not one of them).
      anchor_predicts: the anchor row predicts too (DSpark's
        `sample_from_anchor`); False is DFlash's fill-in layout.
    """

    num_draft: int
    anchor_predicts: bool = False

    def __post_init__(self):
        if self.num_draft < 1:
            raise UserError(f"layout.num_draft={self.num_draft} must be at least 1")

    @property
    def num_query(self) -> int:
        """Q, rows the drafter runs."""
        return self.num_draft + (0 if self.anchor_predicts else 1)

    @property
    def window(self) -> int:
        """W = M + 1, rows the target verifies: the anchor and the drafts."""
        return self.num_draft + 1

    @property
    def block_size(self) -> int:
        """The public checkpoints' `block_size`: rows of a block, Q."""
        return self.num_query

    def with_num_draft(self, num_draft: int) -> BlockLayout:
        """The same layout serving fewer drafts; more than trained is refused."""
        if num_draft > self.num_draft:
            raise UserError(
                f"serve.num_draft={num_draft} is more than the {self.num_draft} "
                "this drafter was trained for; ask for at most that many"
            )
        return dataclasses.replace(self, num_draft=num_draft)


def query_tokens(layout: BlockLayout, anchor_X, mask_id: int):
    """Block input ids `[..., Q]`: the anchor, then the mask id."""
    masks = jnp.full((*anchor_X.shape, layout.num_query - 1), mask_id, anchor_X.dtype)
    return jnp.concatenate([anchor_X[..., None], masks], -1)


def query_positions(layout: BlockLayout, anchor_pos_X):
    """Absolute positions `[..., Q]`: the block starts at its anchor."""
    return anchor_pos_X[..., None] + jnp.arange(layout.num_query)


def label_positions(layout: BlockLayout, anchor_pos_X):
    """Sequence positions `[..., M]` of the tokens the drafts stand for."""
    return anchor_pos_X[..., None] + 1 + jnp.arange(layout.num_draft)


def teacher_positions(layout: BlockLayout, anchor_pos_X):
    """Positions `[..., M]` whose target hidden state predicts each label."""
    return label_positions(layout, anchor_pos_X) - 1


def predicting_rows(layout: BlockLayout, rows_XQD):
    """Keeps the rows that predict: `[..., Q, D] -> [..., M, D]`."""
    skip = layout.num_query - layout.num_draft
    return rows_XQD[..., skip:, :]


def block_size_to_num_draft(block_size: int, anchor_predicts: bool) -> int:
    """M of a public checkpoint from its `block_size`."""
    return block_size - (0 if anchor_predicts else 1)


def anchor_candidates(supervised_BS):
    """Positions `[B, S]` that may anchor: they and their next are supervised."""
    following_BS = jnp.concatenate(
        [supervised_BS[:, 1:], jnp.zeros_like(supervised_BS[:, :1])], 1
    )
    return supervised_BS & following_BS


def following_tokens(tokens_BS, next_known_B):
    """EAGLE's pairing: row t gets token t + 1; the edge gets `next_known`."""
    return jnp.concatenate([tokens_BS[:, 1:], next_known_B[:, None]], 1)


def pair_starts(anchor_pos_X):
    """EAGLE's last row before a round: the one whose next token is the anchor.

    Position -1, for an anchor at 0, is no row; it is cut to row 0, and whoever
    samples anchors leaves 0 out.
    """
    return jnp.maximum(anchor_pos_X - 1, 0)


def pair_candidates(supervised_BS):
    """`supervised_BS` for sampling starts: position 0 has no row before it."""
    return supervised_BS.at[:, 0].set(False)


def feedback_positions(anchor_pos_X, depth):
    """Position of EAGLE's row that takes the draft of `depth`.

    A row stands at its feature's position: one before its own token's. Depth 0
    is the anchor: the target's last row, which predicts the first draft.
    """
    return anchor_pos_X + depth - 1


def draft_positions(anchor_pos_X, depth):
    """Sequence position of the draft of `depth` (from 1; 0 is the anchor)."""
    return anchor_pos_X + depth


def last_rows(length_B):
    """Index of the last row that counts; 0 where none does."""
    return jnp.maximum(length_B, 1) - 1
