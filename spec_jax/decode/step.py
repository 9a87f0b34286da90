"""One round, as pure stages composed into one program.

    propose -> plan -> forward -> accept -> commit

`round_step` is a function of (params, state) and compiles as a whole, with the
state donated; the stages stay callable one by one (benchmarks time them apart,
a grammar would put the host between them). Plain decoding is the same
composition without a drafter: one row per request.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct

from spec_jax.core import keys, outcome, verify_layout
from spec_jax.core.proposal import Proposal
from spec_jax.core.verify_layout import VerifyLayout
from spec_jax.decode import plan, propose, verify
from spec_jax.decode.state import DecodeState, RoundResult
from spec_jax.drafters.base import Drafter, Frozen, Rows
from spec_jax.sampling import transform
from spec_jax.target import model
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class RoundOptions:
    """Static choices of a compiled round.

    Attributes:
      one_hot_draft: argmax drafts with one-hot q for sampled requests too.
    """

    one_hot_draft: bool = False


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
        layout.visible()[None],
        history_B,
        taps,
    )
    logits_BWV = model.logits(weights.target, output.hidden_BTD)
    return logits_BWV, output


def accept(logits_BWV, stored_B, slots, proposal: Proposal, layout: VerifyLayout):
    """The verdict of a chain under each request's settings.

    `stored_B` is false where the forward kept no rows (see `TargetOutput`):
    such a request ends with an error, whichever row was not finite.
    """
    num_draft = proposal.tokens_BM.shape[1]
    p_law = transform.law_of(logits_BWV, slots.sampling)
    sampled = ~slots.sampling.greedy_B.all()

    def uniforms(use, rows):
        return keys.round_uniforms(
            slots.seed_B, slots.round_B, use, rows, needed=sampled
        )

    uniform = uniforms(keys.Use.ACCEPT, num_draft)
    final = uniforms(keys.Use.TARGET, 1)
    return verify.judge(
        p_law,
        transform.finite_rows(logits_BWV) & stored_B[:, None],
        proposal,
        layout.verify_len_B,
        uniform,
        final[:, 0],
    )


def commit(
    drafter: Drafter | None,
    weights: Weights,
    state: DecodeState,
    layout: VerifyLayout,
    proposal: Proposal,
    verdict,
    output,
):
    """Advances slots, target cache and draft state by the confirmed rows."""
    slots = state.slots
    done = outcome.settle(
        verdict,
        proposal.tokens_BM,
        slots.anchor_B,
        slots.active_B,
        slots.remaining_B,
        slots.stop_ids_BX,
    )
    draft = state.draft
    if drafter is not None:
        following_BW = jnp.where(done.tokens_BW >= 0, done.tokens_BW, 0)
        rows = Rows(
            tokens_BT=layout.tokens_BW,
            next_tokens_BT=following_BW,
            features_BTLD=output.features_BTLD,
            start_B=slots.length_B,
            length_B=done.commit_len_B,
        )
        draft = drafter.extend(weights.draft, weights.frozen, draft, rows)
    advanced = dataclasses.replace(
        slots,
        anchor_B=done.anchor_B,
        length_B=jnp.where(done.finished_B, 0, slots.length_B + done.commit_len_B),
        remaining_B=slots.remaining_B - done.emitted_B,
        active_B=slots.active_B & ~done.finished_B,
        round_B=slots.round_B + slots.active_B.astype(jnp.int32),
    )
    result = RoundResult(
        tokens_BW=done.tokens_BW,
        emitted_B=done.emitted_B,
        num_accepted_B=verdict.num_accepted_B,
        raw_accepted_B=verdict.raw_accepted_B,
        verify_len_B=layout.verify_len_B,
        ran_B=slots.active_B,
        finished_B=done.finished_B,
        stopped_B=done.stopped_B,
        bad_B=verdict.bad_B & slots.active_B,
    )
    return DecodeState(output.cache, draft, advanced), result


def round_step(
    spec: TargetSpec,
    drafter: Drafter | None,
    taps: tuple[int, ...],
    options: RoundOptions,
    weights: Weights,
    state: DecodeState,
    *,
    speculate: bool = True,
):
    """One round of every slot: `(state, RoundResult)`.

    Args:
      spec, drafter, taps, options: static.
      weights: parameters.
      state: slots, caches, draft state (donate it).
      speculate: False runs one row per request (plain decoding); with a drafter
        its state is still extended, so that speculation can resume.
    """
    slots = state.slots
    if speculate:
        assert drafter is not None and weights.frozen is not None
        proposal = propose.propose(
            drafter, weights.draft, weights.frozen, state, one_hot=options.one_hot_draft
        )
    else:
        proposal = propose.no_proposal(slots)
    layout = verify_layout.chain(
        slots.anchor_B, proposal.tokens_BM, plan.static_window(slots, proposal)
    )
    logits_BWV, output = target_rows(spec, weights, state, layout, taps)
    verdict = accept(logits_BWV, stored(output), slots, proposal, layout)
    return commit(drafter, weights, state, layout, proposal, verdict, output)
