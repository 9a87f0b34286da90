"""The host's side of a request, and of a round: what is booked where."""

from __future__ import annotations

import collections
import dataclasses

from spec_jax.decode.budget import Choice
from spec_jax.decode.request import Generation, Settings
from spec_jax.decode.text import TextStream


@dataclasses.dataclass
class RoundRecord:
    """One round, as the host saw it.

    Attributes:
      choice: its program, budget and predicted time.
      running: requests in it.
      late: its confidence had not arrived, so that it had no budget.
      stale: of its planned requests, how many had no history.
      handles: slot -> handle of the request in it.
      verify_lens: rows of each live request, anchors included.
      seconds: from its dispatch, or from the end of the round before, until its
        result was here; prefill in between counts.
    """

    choice: Choice
    running: int
    late: bool
    stale: int
    started: float
    handles: dict[int, int] = dataclasses.field(default_factory=dict)
    verify_lens: list[int] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


@dataclasses.dataclass
class Job:
    """A request's host side, whether it waits, fills or decodes.

    Attributes:
      text: its growing text, where the engine has a tokenizer.
      speculating: its drafter is on now.
      off: why it is off for good, or "".
      filled: rows filled of what it has to fill.
      drafted_rounds: (accepted, verified) of its rounds with drafts, the newest few.
    """

    handle: int
    generation: Generation
    settings: Settings
    text: TextStream | None
    speculating: bool
    off: str = ""
    filled: int = 0
    drafted_rounds: collections.deque = dataclasses.field(
        default_factory=collections.deque
    )

    @property
    def to_fill(self) -> list[int]:
        """Tokens the target has to run before a round: all but the anchor."""
        return self.generation.prompt + self.generation.tokens[:-1]

    @property
    def known(self) -> int | None:
        """The anchor of a request that was retracted; None before any token."""
        return self.generation.tokens[-1] if self.generation.tokens else None

    @property
    def length(self) -> int:
        return len(self.generation.prompt) + len(self.generation.tokens)


@dataclasses.dataclass(frozen=True)
class Made:
    """What one result of the device holds for one request.

    Attributes:
      tokens: emitted, as far as the device knows.
      done: it has left its slot.
      stopped: by a stop id, the last of the tokens.
      bad: with an error.
      row: of the result's log-probabilities.
      accepted, drafted: of a round, r after the cut and the drafts verified; None
        for a prompt's first token.
    """

    tokens: list[int]
    done: bool
    stopped: bool
    bad: bool
    row: int
    accepted: int = 0
    drafted: int | None = None


def of_prefill(result) -> Made:
    """The first token; none is drawn for a request that was retracted."""
    tokens = [] if result.bad or result.token < 0 else [int(result.token)]
    return Made(
        tokens, bool(result.finished), bool(result.stopped), bool(result.bad), 0
    )


def of_round(result, slot: int) -> Made:
    """What a round made in a slot that was live in it."""
    return Made(
        tokens=result.tokens_BW[slot, : int(result.emitted_B[slot])].tolist(),
        done=bool(result.finished_B[slot]),
        stopped=bool(result.stopped_B[slot]),
        bad=bool(result.bad_B[slot]),
        row=slot,
        accepted=int(result.num_accepted_B[slot]),
        drafted=int(result.verify_len_B[slot]) - 1,
    )


def book(job: Job, made: Made, logprobs) -> tuple[list[int], bool]:
    """Writes a result into its request's generation.

    Returns:
      The tokens that it got, and whether a stop string ended it (the device knows
      of ids only).
    """
    generation = job.generation
    stop = made.tokens[-1] if made.stopped and made.tokens else None
    new, found = book_text(job, made.tokens, ends_with_id=stop is not None)
    if made.drafted is not None:
        generation.emitted.append(len(new))
        generation.accepted.append(made.accepted)
        generation.drafted.append(made.drafted)
    if job.settings.logprobs and new:
        book_logprobs(job, len(new), made.row, logprobs)
    generation.tokens.extend(new)
    if found is not None or made.stopped:
        generation.stopped_by = stop if found is None else found
    return new, found is not None


def book_logprobs(job: Job, count: int, row: int, made) -> None:
    """Log-probabilities of a round's first `count` tokens."""
    generation, num_top = job.generation, job.settings.top_logprobs
    generation.logprobs.extend(made.chosen_BT[row, :count].tolist())
    for index in range(count if num_top else 0):
        ids = made.top_ids_BTN[row, index, :num_top].tolist()
        values = made.top_BTN[row, index, :num_top].tolist()
        generation.top_logprobs.append(list(zip(ids, values, strict=True)))


def book_text(job: Job, new: list[int], ends_with_id: bool):
    """The tokens up to a stop string that they complete, and that string.

    An id that ended the request makes no text.
    """
    if job.text is None:
        return new, None
    for index, token in enumerate(new):
        if ends_with_id and index == len(new) - 1:
            break
        job.text.push(token)
        if job.text.matched is not None:
            return new[: index + 1], job.text.matched
    job.generation.text = job.text.text
    return new, None
