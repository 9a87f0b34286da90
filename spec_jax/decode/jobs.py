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
      verify_lens: rows of each live request, anchors included.
      seconds: from its dispatch, or from the end of the round before, until its
        result was here; prefill in between counts.
    """

    choice: Choice
    running: int
    late: bool
    stale: int
    started: float
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
