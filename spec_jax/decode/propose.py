"""Propose: runs the drafter and draws its tokens through the one transform."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spec_jax.core import keys
from spec_jax.core.proposal import Proposal
from spec_jax.core.topology import CHAIN_TOPOLOGY, Topology
from spec_jax.decode.state import DecodeState, Slots
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.sampling import draws, penalties, transform


def make_draw(slots: Slots, *, one_hot: bool):
    """The `Draw` a drafter samples its rows with.

    Args:
      slots: settings and random streams of the requests.
      one_hot: draft argmax tokens even for sampled requests; q is then one-hot
        (an option: independent unary marginals make incoherent blocks).

    Penalties and bias shape q as they shape p, as far as it can be known when
    the drafts are drawn: the history counts, the block's own drafts do not. A
    drafter that names its columns' target ids (`draw(logits, row, target_ids)`)
    gets them in any vocabulary, one that does not only in the target's own.
    Either way q is the law that was drawn from, and the output stays p's.
    """
    sampling = slots.sampling
    if one_hot:
        sampling = dataclasses.replace(
            sampling, greedy_B=jnp.ones_like(sampling.greedy_B)
        )

    def draw(logits_BTU, first_row, target_ids=None):
        past, history = None, slots.history
        if history is not None and (
            target_ids is not None
            or logits_BTU.shape[-1] == history.output_BV.shape[-1]
        ):
            past = penalties.only_history(history, logits_BTU.shape[1])
        law = transform.law_of(logits_BTU, sampling, target_ids, past)
        rows = first_row + logits_BTU.shape[1]
        uniform = keys.round_uniforms(
            slots.seed_B,
            slots.round_B,
            keys.Use.DRAFT,
            rows,
            needed=~sampling.greedy_B.all(),
        )
        return draws.draw(law, uniform[:, first_row:]), law

    return draw


def propose(
    drafter: Drafter,
    params,
    frozen: Frozen,
    state: DecodeState,
    *,
    one_hot: bool,
    topology: Topology = CHAIN_TOPOLOGY,
) -> Proposal:
    """M drafts per slot and the law that produced them."""
    slots = state.slots
    draw = make_draw(slots, one_hot=one_hot)
    proposal, _ = drafter.propose(
        params, frozen, state.draft, slots.anchor_B, slots.length_B, draw, topology
    )
    return proposal


def no_proposal(slots: Slots) -> Proposal:
    """M = 0: what plain decoding verifies."""
    batch = slots.anchor_B.shape[0]
    empty = jnp.zeros((batch, 0), jnp.int32)
    law = transform.law_of(jnp.zeros((batch, 0, 1)), transform.all_greedy(batch))
    return Proposal(empty, empty, law, jnp.zeros((batch,), jnp.int32))
