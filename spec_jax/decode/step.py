"""One round, as pure stages composed into one program.

    propose -> plan -> forward -> accept -> commit

`round_step` is a function of (params, state) and compiles as a whole, with the
state donated; the stages stay callable one by one (benchmarks time them apart,
a grammar would put the host between them). Plain decoding is the same
composition without a drafter: one row per request.
"""

from __future__ import annotations

import dataclasses
import math

from spec_jax.core import verify_layout
from spec_jax.core.topology import CHAIN_TOPOLOGY, Topology
from spec_jax.decode import commit, forward, plan, propose, verify
from spec_jax.decode.forward import Weights
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.state import DecodeState, put_slots, take_slots
from spec_jax.drafters.base import Drafter
from spec_jax.sampling import logprobs
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class RoundOptions:
    """Static choices of a compiled round.

    Attributes:
      one_hot_draft: argmax drafts with one-hot q for sampled requests too.
      topology: what is drafted: a chain, or a tree.
      top_logprobs: alternatives reported of each token, where a request asks.
      num_ids: ids that may be emitted lie below it; 0 is all (see
        `forward.target_logits`).
      plan: how many of the drafts are verified.
    """

    one_hot_draft: bool = False
    topology: Topology = CHAIN_TOPOLOGY
    top_logprobs: int = 0
    num_ids: int = 0
    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)


def round_step(
    spec: TargetSpec,
    drafter: Drafter | None,
    taps: tuple[int, ...],
    options: RoundOptions,
    weights: Weights,
    state: DecodeState,
    budget=None,
    *,
    speculate: bool = True,
    requests: int | None = None,
    rows: int | None = None,
):
    """One round of the first slots: `(state, RoundResult)`.

    Args:
      spec, drafter, taps, options: static.
      weights: parameters.
      state: slots, caches, draft state (donate it).
      budget: K, draft rows for the whole batch (scalar int32, traced): needed by
        a planned mode, meaningless to `static`.
      speculate: False runs one row per request (plain decoding); with a drafter
        its state is still extended, so that speculation can resume.
      requests: R: slots 0..R-1 take part and the result has R of them; the others
        are left alone. None: all.
      rows: T, packed rows of all requests together (`compact`); None, or R * W,
        runs every window in full.
    """
    whole = state
    if requests is not None and requests < whole.slots.active_B.shape[0]:
        state = take_slots(whole, requests)
        state, result = round_step(
            spec,
            drafter,
            taps,
            options,
            weights,
            state,
            budget,
            speculate=speculate,
            rows=rows,
        )
        return put_slots(whole, state), result
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
    verify_len_B, seen = plan.windows(
        slots, proposal, options.plan, budget if speculate else None, rows
    )
    layout = verify_layout.of_proposal(
        slots.anchor_B, proposal, verify_len_B, options.topology
    )
    if rows is not None and rows >= math.prod(layout.tokens_BW.shape):
        rows = None  # nothing to pack
    logits_BWV, output = forward.target_rows(
        spec, weights, state, layout, taps, rows, options.num_ids
    )
    stored_B = forward.stored(output, layout.verify_len_B)
    verdict = verify.accept(logits_BWV, stored_B, slots, proposal, layout)
    state, result = commit.commit(
        drafter, weights, state, layout, proposal, verdict, output
    )
    result = dataclasses.replace(
        result, survival_BM=seen.survival_BM, confidence_logit_BM=seen.logit_BM
    )
    if slots.logprobs_B is not None:
        result = dataclasses.replace(
            result,
            logprobs=logprobs.of_tokens(
                logits_BWV,
                result.tokens_BW,
                slots.logprobs_B & slots.active_B,
                options.top_logprobs,
                verdict.path_BX,
            ),
        )
    return state, result
