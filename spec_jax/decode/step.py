"""One round, as pure stages composed into one program.

    propose -> plan -> forward -> accept -> commit

`round_step` is a function of (params, state) and compiles as a whole, with the
state donated; the stages stay callable one by one (benchmarks time them apart,
a grammar would put the host between them). Plain decoding is the same
composition without a drafter: one row per request.
"""

from __future__ import annotations

import dataclasses

from spec_jax.core import verify_layout
from spec_jax.core.topology import CHAIN_TOPOLOGY, Topology
from spec_jax.decode import commit, forward, plan, propose, verify
from spec_jax.decode.forward import Weights
from spec_jax.decode.state import DecodeState
from spec_jax.drafters.base import Drafter
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class RoundOptions:
    """Static choices of a compiled round.

    Attributes:
      one_hot_draft: argmax drafts with one-hot q for sampled requests too.
      topology: what is drafted: a chain, or a tree.
    """

    one_hot_draft: bool = False
    topology: Topology = CHAIN_TOPOLOGY


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
            drafter,
            weights.draft,
            weights.frozen,
            state,
            one_hot=options.one_hot_draft,
            topology=options.topology,
        )
    else:
        proposal = propose.no_proposal(slots)
    layout = verify_layout.of_proposal(
        slots.anchor_B, proposal, plan.static_window(slots, proposal)
    )
    logits_BWV, output = forward.target_rows(spec, weights, state, layout, taps)
    verdict = verify.accept(logits_BWV, forward.stored(output), slots, proposal, layout)
    return commit.commit(drafter, weights, state, layout, proposal, verdict, output)
