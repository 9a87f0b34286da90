"""Biases planted in the production code, which the law's test must find.

Each is a mistake that keeps every round plausible: the tokens are drawn, most
drafts are accepted, and only their law is off. A bias is a change of module
functions while its block runs; programs made in the block are traced anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.core import keys
from spec_jax.core.proposal import Proposal, prob_at, prob_of
from spec_jax.decode import plan, propose, verify

# (module, name, function of the production function that stands in for it)
Patch = tuple[Any, str, Callable]


@dataclasses.dataclass(frozen=True)
class Bias:
    """One mistake and the case that must show it.

    Attributes:
      name: what was done.
      subject: the case's drafter (`law_worlds.SUBJECTS`).
      mode: its mode.
      patches: what replaces what.
      budget: of the rounds whose budgets are planted, where the mistake shows
        most; None: each in turn, as in the case itself.
      always: it is planted in every round.
      times: as many samples as other cases have, where the mistake is faint.
    """

    name: str
    subject: str
    mode: str
    patches: tuple[Patch, ...]
    budget: int | None = None
    always: bool = False
    times: int = 1


@contextlib.contextmanager
def planted(bias: Bias) -> Iterator[None]:
    """Runs the block with the mistake; nothing traced before or in it is shared."""
    originals = [
        (module, name, getattr(module, name)) for module, name, _ in bias.patches
    ]
    jax.clear_caches()
    try:
        for module, name, make in bias.patches:
            setattr(module, name, make(getattr(module, name)))
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
        jax.clear_caches()


def _own_token(original):
    """The confidence of a draft reads the draft that it may cut."""

    def confidence_logit(proposal: Proposal):
        q_BM = prob_of(proposal.law, proposal.draft_ids_BM)
        return jnp.log(q_BM) - jnp.log1p(-q_BM)

    return confidence_logit


def _later_position_first(original):
    """Equal survivals are ranked from the last position to the first."""

    def rank(survival_BM):
        size_b, num_draft = survival_BM.shape
        order_X = jnp.argsort(-survival_BM.T[::-1].reshape(-1), stable=True)
        place_X = jnp.zeros_like(order_X).at[order_X].set(jnp.arange(order_X.size))
        return place_X.reshape(num_draft, size_b)[::-1].T

    return rank


def _positions_for_rounds(slots):
    """Slots whose round counter is the position their next token will have."""
    return dataclasses.replace(slots, round_B=slots.length_B)


def _propose_by_position(original):
    def by_position(drafter, params, frozen, state, **options):
        state = dataclasses.replace(state, slots=_positions_for_rounds(state.slots))
        return original(drafter, params, frozen, state, **options)

    return by_position


def _accept_by_position(original):
    def by_position(logits_BWV, stored_B, slots, proposal, layout):
        slots = _positions_for_rounds(slots)
        return original(logits_BWV, stored_B, slots, proposal, layout)

    return by_position


def _fold_position(original):
    """Row j of a round has the key of position + j."""

    def round_uniforms(seed_B, position_B, use, num_rows, child=0, needed=True):
        rows = [
            original(seed_B, position_B + row, use, 1, child, needed)
            for row in range(num_rows)
        ]
        return jnp.concatenate(rows, 1)

    return round_uniforms


def _uncorrected_q(part: str, leaf: str):
    """Drafts are corrected, q is not: the law of the rows' own logits."""

    def make(original):
        def propose_uncorrected(drafter, params, frozen, state, **options):
            proposal = original(drafter, params, frozen, state, **options)
            tree = params["params"]
            zero = {**tree[part], leaf: jnp.zeros_like(tree[part][leaf])}
            bare = {"params": {**tree, part: zero}}
            unary = original(drafter, bare, frozen, state, **options)
            return proposal.replace(law=unary.law)

        return propose_uncorrected

    return make


def _correction_from_p(original):
    """Nothing is subtracted: a rejected token is drawn again from p."""
    return lambda p_BV, q_BV: p_BV


def _correction_not_normalised(original):
    """The mass that p - q lacks falls to the last token."""

    def residual(p_BV, q_BV):
        excess_BV = jnp.maximum(p_BV - q_BV, 0.0)
        missing_B = jnp.maximum(1.0 - excess_BV.sum(-1), 0.0)
        return excess_BV.at[:, -1].add(missing_B)

    return residual


def _siblings_keep_mass(original):
    """A sibling is judged as if the ones before it had not been refused."""

    def child_terms(p_law, proposal: Proposal, tried_BM):
        parents_BM = proposal.parents_BW[:, 1:]
        p_BM = prob_at(p_law, parents_BM, proposal.tokens_BM)
        return jnp.where(tried_BM, p_BM, 0.0), jnp.ones_like(p_BM)

    return child_terms


def _refused_children_stay(original):
    """After refused children the next token may be one of them."""

    def after_children(p_law, proposal, row_B, refused_BM):
        return original(p_law, proposal, row_B, jnp.zeros_like(refused_BM))

    return after_children


BIASES = (
    Bias(
        "a cut that reads its own token",
        "dspark",
        plan.CAP_ACCEPT,
        ((plan, "confidence_logit", _own_token),),
    ),
    Bias(
        "ties to the later position",
        "dspark, saturated",
        plan.CAP_ACCEPT,
        ((plan, "rank", _later_position_first),),
        # One row for two requests whose first drafts tie.
        budget=1,
        always=True,
    ),
    Bias(
        "keys folded by position",
        "dspark, saturated",
        plan.CAP_ACCEPT,
        (
            (keys, "round_uniforms", _fold_position),
            (propose, "propose", _propose_by_position),
            (verify, "accept", _accept_by_position),
        ),
        # No draft of the first round is reached; all of them feed the second's budget.
        budget=0,
        times=4,
    ),
    Bias(
        "q without the Markov correction",
        "dspark",
        plan.STATIC,
        ((propose, "propose", _uncorrected_q("markov", "markov_w2")),),
    ),
    Bias(
        "q without the selector",
        "dflash2",
        plan.STATIC,
        ((propose, "propose", _uncorrected_q("selector", "successor_codebook")),),
    ),
    Bias(
        "the correction drawn from p",
        "dflash",
        plan.STATIC,
        ((verify, "residual", _correction_from_p),),
    ),
    Bias(
        "the correction not normalised",
        "dflash",
        plan.STATIC,
        ((verify, "residual", _correction_not_normalised),),
    ),
    Bias(
        "siblings' mass kept",
        "eagle3, dynamic tree",
        plan.STATIC,
        ((verify, "child_terms", _siblings_keep_mass),),
    ),
    Bias(
        "refused children kept",
        "eagle3, dynamic tree",
        plan.STATIC,
        ((verify, "after_children", _refused_children_stay),),
    ),
)
