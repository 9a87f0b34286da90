"""Lookup: drafts the tokens that followed the last time this was said.

No parameters and no features. The state is the request's own tokens; a proposal
finds the longest n-gram that ends the text (history and anchor) and occurs
earlier, takes its latest occurrence, and proposes what followed it there. Where
that runs into the anchor, it goes on as if the text repeated itself: with the
token after the occurrence again. All on the device, with static shapes; the cost
is a few comparisons of the allocation.

History never holds the anchor: the anchor's row has not run yet, so it arrives
as an argument.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spec_jax.core import masks
from spec_jax.core.block_layout import BlockLayout, label_positions
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.core.proposal import Proposal, one_hot_law
from spec_jax.core.shapes import bind
from spec_jax.drafters.base import Drafter, Rows, TrainOutputs
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the lookup drafter.

    Attributes:
      num_draft: M, most tokens proposed.
      ngram_max: longest suffix that is looked up.
      ngram_min: shortest suffix that may match; below it nothing is proposed.
    """

    num_draft: int = 7
    ngram_max: int = 3
    ngram_min: int = 1


def latest_match(tokens_BA, anchor_B, length_B, ngram_max: int):
    """Where the longest suffix of history and anchor was last seen.

    Args:
      tokens_BA: history, position by position; junk from `length_B` on.
      anchor_B: the token at position `length_B`.
      length_B: tokens of history.
      ngram_max: longest suffix considered.

    Returns:
      end_B: position of the occurrence's last token; -1 for none.
      size_B: tokens of the suffix that match there; 0 for none.
    """
    size = bind(tokens_BA=tokens_BA, anchor_B=anchor_B, length_B=length_B)
    at_A = jnp.arange(size["A"])
    size_BA = jnp.zeros(tokens_BA.shape, jnp.int32)
    same_BA = masks.committed(at_A[None], length_B[:, None])
    for back in range(ngram_max):
        # Suffix token `back` from its end, against the token as far before each
        # end. A suffix that would begin before the text is no suffix.
        from_B = length_B - back
        held_B1 = jnp.take_along_axis(
            tokens_BA, jnp.clip(from_B, 0, size["A"] - 1)[:, None], 1
        )
        wanted_B1 = held_B1 if back else anchor_B[:, None]
        moved_BA = jnp.roll(tokens_BA, back, 1)
        same_BA &= (moved_BA == wanted_B1) & (at_A >= back) & (from_B >= 0)[:, None]
        size_BA += same_BA
    size_B = size_BA.max(1)
    best_BA = (size_BA == size_B[:, None]) & (size_BA > 0)
    return jnp.where(best_BA, at_A, -1).max(1), size_B


def followers(layout: BlockLayout, end_B, length_B):
    """Positions `[B, M]` whose tokens are proposed after an occurrence.

    The text has period `length - end` from the occurrence on: what follows `end`
    up to the anchor (at `length`) comes again, and again.

    Args:
      layout: rows of a block.
      end_B: position of the occurrence's last token, below `length_B`.
      length_B: tokens of history: the anchor's position.
    """
    first_B1 = label_positions(layout, end_B)[:, :1]
    return first_B1 + jnp.arange(layout.num_draft) % (length_B - end_B)[:, None]


def make(options: Options, target_spec: TargetSpec) -> Drafter:
    """Binds a lookup drafter to a target.

    Raises:
      UserError: naming the field, the value and the fix.
    """
    if not 1 <= options.ngram_min <= options.ngram_max:
        raise UserError(
            f"drafter.options.ngram_min={options.ngram_min} must lie between 1 and "
            f"ngram_max={options.ngram_max}"
        )
    layout = BlockLayout(options.num_draft, anchor_predicts=True)

    def init(key):
        del key
        return {}

    def init_state(slots: int, allocated: int):
        return jnp.zeros((1, slots, allocated), jnp.int32)

    def absorb(params, frozen, state, rows: Rows):
        """Prefill and extend: writes the rows' tokens at their positions."""
        del params, frozen
        size_b, size_t = rows.tokens_BT.shape
        b_BT = jnp.broadcast_to(jnp.arange(size_b)[:, None], (size_b, size_t))
        at_BT = rows.start_B[:, None] + jnp.arange(size_t)[None]
        return state.at[0, b_BT, at_BT].set(rows.tokens_BT, mode="drop")

    def propose(params, frozen, state, anchor_B, length_B, draw, topology):
        del params, frozen, draw, topology  # nothing is drawn: q is one-hot
        tokens_BA = state[0]
        end_B, size_B = latest_match(tokens_BA, anchor_B, length_B, options.ngram_max)
        at_BM = followers(layout, end_B, length_B)
        found_B1 = (size_B >= options.ngram_min)[:, None]
        held_BM = jnp.take_along_axis(
            tokens_BA, jnp.clip(at_BM, 0, tokens_BA.shape[1] - 1), 1
        )
        is_anchor_BM = at_BM == length_B[:, None]
        drafts_BM = jnp.where(is_anchor_BM, anchor_B[:, None], held_BM)
        drafts_BM = jnp.where(found_B1, drafts_BM, 0).astype(jnp.int32)
        proposal = Proposal(
            tokens_BM=drafts_BM,
            draft_ids_BM=jnp.zeros_like(drafts_BM),  # a row's only candidate
            law=one_hot_law(drafts_BM),
            usable_B=jnp.where(found_B1[:, 0], layout.num_draft, 0).astype(jnp.int32),
        )
        return proposal, state

    def train_outputs(params, frozen, batch, key) -> TrainOutputs:
        raise UserError(
            "drafter.name='lookup' has no parameters, so there is nothing to train; "
            "serve it as it is, or choose another drafter"
        )

    return Drafter(
        name="lookup",
        options=options,
        layout=layout,
        needs=FeatureSchema((), target_spec.hidden_size),
        topologies=("chain",),
        init=init,
        init_state=init_state,
        prefill=absorb,
        propose=propose,
        extend=absorb,
        train_outputs=train_outputs,
        terms=(),
    )
