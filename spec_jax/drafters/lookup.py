"""Lookup: drafts the tokens that followed the last time this was said.

No parameters and no features. The state is the request's own tokens; a proposal
finds the longest n-gram that ends the text (history and anchor) and occurs
earlier, takes its latest occurrence, and proposes what followed it there. Where
that runs into the anchor, it goes on as if the text repeated itself: with the
token after the occurrence again. All on the device, with static shapes; the cost
is a few comparisons of the allocation, and of a planned round some more per draft.

Its confidence is how often the occurrences agree: of the n places where this was
said, k went on like the draft. Absolute discounting (Ney, Essen and Kneser 1994)
keeps one place that said it once from being certain.

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

# What an agreement of one token is worth less, after a suffix of one token and
# after a longer one, and the places that are counted beside those that were seen:
# least cross-entropy (0.59 nats a draft, 0.69 without) over 500 greedy answers of
# SmolLM2 to GSM8K training questions and synthesised instructions.
# Temperatures (`evals.sts`) correct them for other texts.
DISCOUNTS = (0.6, 0.25)
UNSEEN = 0.25


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
      ends_BA: the occurrences of that length, the latest among them.
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
    return jnp.where(best_BA, at_A, -1).max(1), size_B, best_BA


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


def agreement(text_BA, length_B, end_B, size_B, ends_BA, drafts_BM):
    """Log-odds `[B, M]` of each draft, by the occurrences that went on like it.

    A draft is judged by the occurrences that went on as all drafts before it did,
    where the text says how they went on. The drafts are a function of the text, so
    this is one too: whatever is cut by it, nothing drawn was looked at.

    Args:
      text_BA: history, and the anchor at position `length_B`.
      length_B: tokens of history.
      end_B, size_B, ends_BA: see `latest_match`.
      drafts_BM: what followed the latest of them.

    Returns:
      -inf where nothing was found.
    """
    bind(text_BA=text_BA, length_B=length_B, drafts_BM=drafts_BM)
    at_A = jnp.arange(text_BA.shape[1])
    is_latest_BA = at_A == end_B[:, None]
    left_BA, logits = ends_BA, []
    for j in range(drafts_BM.shape[1]):
        # The latest one is drafted from: it agrees, also past the end of the text.
        known_BA = left_BA & masks.committed(at_A[None] + j, length_B[:, None])
        said_BA = jnp.roll(text_BA, -(j + 1), 1)
        left_BA = (known_BA & (said_BA == drafts_BM[:, j, None])) | (
            left_BA & is_latest_BA
        )
        seen_B = (known_BA | left_BA).sum(1).astype(jnp.float32)
        agree_B = left_BA.sum(1).astype(jnp.float32)
        discount_B = jnp.where(size_B + j == 1, *DISCOUNTS)
        for_B, against_B = agree_B - discount_B, seen_B - agree_B + discount_B + UNSEEN
        odds_B = jnp.log(jnp.maximum(for_B, 0.0)) - jnp.log(against_B)
        logits.append(odds_B)
    return jnp.stack(logits, 1)


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
        end_B, size_B, ends_BA = latest_match(
            tokens_BA, anchor_B, length_B, options.ngram_max
        )
        at_BM = followers(layout, end_B, length_B)
        found_B1 = (size_B >= options.ngram_min)[:, None]
        at_A = jnp.arange(tokens_BA.shape[1])
        text_BA = jnp.where(at_A == length_B[:, None], anchor_B[:, None], tokens_BA)
        held_BM = jnp.take_along_axis(
            text_BA, jnp.clip(at_BM, 0, text_BA.shape[1] - 1), 1
        )
        drafts_BM = jnp.where(found_B1, held_BM, 0).astype(jnp.int32)
        odds_BM = agreement(text_BA, length_B, end_B, size_B, ends_BA, drafts_BM)
        proposal = Proposal(
            tokens_BM=drafts_BM,
            draft_ids_BM=jnp.zeros_like(drafts_BM),  # a row's only candidate
            law=one_hot_law(drafts_BM),
            usable_B=jnp.where(found_B1[:, 0], layout.num_draft, 0).astype(jnp.int32),
            confidence_logit_BM=jnp.where(found_B1, odds_BM, -jnp.inf),
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
