"""What an engine compiles for, and how much one of its slots holds."""

from __future__ import annotations

import dataclasses

from spec_jax.core.calibration import CostTable
from spec_jax.core.errors import UserError
from spec_jax.core.topology import Topology
from spec_jax.core.verify_layout import Ladder, full_ladder
from spec_jax.decode.auto_off import AutoOff
from spec_jax.decode.budget import BudgetOptions
from spec_jax.decode.recorder import Record
from spec_jax.decode.request import NUM_TOP_LOGPROBS
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters.base import Drafter
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Shapes an engine compiles for.

    Attributes:
      slots: B, requests decoded together.
      max_context: A, allocated tokens per slot.
      prefill_buckets: chunk lengths, ascending; longer prompts take several
        chunks of the largest.
      chunks_per_tick: prefill chunks run between two rounds; 1 bounds the time
        between a running request's tokens, `slots` suits offline work.
      plain: also compile the one-row step that runs when nobody speculates.
        Without it such requests run in the round, their window cut to the
        anchor. An engine without a drafter always has it.
      round: static choices of the round.
      penalties: serve penalties and logit bias (keeps counts `[B, V]`); without,
        requests that ask for them are refused.
      logprobs: most alternatives a request may ask for beside the tokens' own
        log-probabilities, 0 to 20; None: log-probabilities are refused.
      auto_off: when speculation switches itself off; None: never.
      ladder: the (R, T) programs; None: all slots, full windows.
      cost: seconds of each; None: a planned round verifies everything.
      budget: how budgets are chosen, in a planned mode (see `round.plan`).
      num_ids: ids that may be emitted lie below it: those of the tokenizer, where
        the target's vocabulary is padded. Plain and speculative decoding then
        follow the target's law without the padding. 0: all of V.
      record: what is kept of every row, so that a request can have its features
        (`Settings.features`); of an engine without a drafter. None: nothing.
      keep_rounds: records of the newest rounds that `trace` holds.
    """

    slots: int = 1
    max_context: int = 1024
    prefill_buckets: tuple[int, ...] = (32, 128)
    chunks_per_tick: int = 1
    plain: bool = True
    round: RoundOptions = dataclasses.field(default_factory=RoundOptions)
    penalties: bool = False
    logprobs: int | None = None
    auto_off: AutoOff | None = None
    ladder: Ladder | None = None
    cost: CostTable | None = None
    budget: BudgetOptions = dataclasses.field(default_factory=BudgetOptions)
    num_ids: int = 0
    record: Record | None = None
    keep_rounds: int = 4096

    def __post_init__(self):
        if self.slots < 1:
            raise UserError(f"serve.slots={self.slots} must be at least 1")
        buckets = self.prefill_buckets
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise UserError(
                f"serve.prefill_buckets={buckets} must be ascending positive lengths"
            )
        if self.num_ids < 0:
            raise UserError(
                f"EngineOptions.num_ids={self.num_ids} must be 0 (all) or positive"
            )
        most = NUM_TOP_LOGPROBS
        if self.logprobs is not None and not 0 <= self.logprobs <= most:
            raise UserError(
                f"EngineOptions.logprobs={self.logprobs} must be None (off) or at "
                f"least 0, at most {most}"
            )


def check_proposes(drafter: Drafter, topology: Topology) -> None:
    """Refuses a topology that a drafter cannot propose.

    Raises:
      UserError: naming those it can.
    """
    if topology.kind not in drafter.topologies:
        raise UserError(
            f"serve.topology={topology.kind!r} is not what drafter.name="
            f"{drafter.name!r} can propose; choose "
            + " or ".join(repr(kind) for kind in drafter.topologies)
        )


def alternatives(options: EngineOptions, spec: TargetSpec) -> int | None:
    """The most alternatives that a token's log-probabilities come with.

    No more than there are tokens; None where log-probabilities are refused.
    """
    if options.logprobs is None:
        return None
    return min(options.logprobs, emitted_ids(options, spec))


def emitted_ids(options: EngineOptions, spec: TargetSpec) -> int:
    """Ids below it may be emitted.

    Raises:
      UserError: more of them than the target has.
    """
    if options.num_ids > spec.vocab_size:
        raise UserError(
            f"EngineOptions.num_ids={options.num_ids} is more than the target's "
            f"{spec.vocab_size} tokens; this tokenizer is another model's"
        )
    return options.num_ids or spec.vocab_size


def ladder_of(options: EngineOptions, window: int, *, plain: bool) -> Ladder:
    """The (R, T) programs of an engine, and of its cost table.

    Args:
      options: of the engine.
      window: W.
      plain: there is no drafter: programs of one row, for the same slot buckets.

    Raises:
      UserError: a ladder, or a cost table, for other slots or another window.
    """
    ladder = options.ladder or full_ladder((options.slots,), window)
    if plain:
        ladder = full_ladder(tuple(size for size, _ in ladder.buckets), window)
    ladder.check(options.slots, window)
    if options.cost is not None:
        options.cost.check(
            num_draft=window - 1, ladder=ladder.buckets, allow_unmarked=True
        )
    return ladder


def room_of(max_context: int, window: int, spec: TargetSpec) -> int:
    """Tokens that one slot can hold, prompt and answer together.

    Two windows of slack: a round runs before the last one's result is read.
    """
    return min(max_context - 2 * window, spec.max_context)
