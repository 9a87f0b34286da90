"""When speculation switches itself off for a request, and why.

Decisions read booked results and the host's own counts only, so that the same
requests in the same order make the same choices. Switching changes speed and
never a greedy text; a sampled one keeps its law, and a seeded one its tokens
only while nothing switches (or with a window of its own, which never does).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spec_jax.core.errors import UserError
from spec_jax.decode.jobs import Job

ACCEPTANCE, LOAD, CONTEXT = "acceptance", "load", "context"
REASONS = (ACCEPTANCE, LOAD, CONTEXT)


@dataclasses.dataclass(frozen=True)
class AutoOff:
    """Limits past which a request decodes plainly.

    Attributes:
      min_accept_length: off for good once the accept length of the last `rounds`
        rounds with drafts is below this; 0 is never.
      rounds: how many rounds that is estimated from.
      max_active: off while more requests than this decode together; None: never.
      max_context: off for good once prompt and answer are longer; None: never.
    """

    min_accept_length: float = 0.0
    rounds: int = 16
    max_active: int | None = None
    max_context: int | None = None

    def __post_init__(self):
        if self.min_accept_length < 0:
            raise UserError(
                f"auto_off.min_accept_length={self.min_accept_length} must be 0 "
                "(never) or positive"
            )
        if self.rounds < 1:
            raise UserError(f"auto_off.rounds={self.rounds} must be at least 1")
        for name in ("max_active", "max_context"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(
                    f"auto_off.{name}={value} must be None (never) or at least 0"
                )


def accept_length(rounds: Sequence[tuple[int, int]]) -> float:
    """Mean r + 1 of whole windows, estimated from windows that may have been cut.

    A window that a budget cut says nothing of the drafts behind the cut: each draft
    counts where it was verified, and their rates multiply (the product-limit
    estimate, Kaplan and Meier 1958). Of whole windows it is the plain mean.

    Args:
      rounds: (accepted, verified) drafts of each round.
    """
    survival = length = 1.0
    for position in range(max((verified for _, verified in rounds), default=0)):
        tested = [r for r, verified in rounds if verified > position <= r]
        if not tested:
            break
        survival *= sum(r > position for r in tested) / len(tested)
        length += survival
    return length


def reason_off(
    limits: AutoOff, rounds: Sequence[tuple[int, int]], length: int, active: int
) -> str | None:
    """Why a request should decode plainly now, or None.

    Args:
      limits: the options.
      rounds: (accepted, verified) drafts of its rounds with drafts, oldest first.
      length: its booked tokens, prompt and answer.
      active: requests that decode together.
    """
    if limits.max_context is not None and length > limits.max_context:
        return CONTEXT
    recent = rounds[-limits.rounds :]
    collapsed = accept_length(recent) < limits.min_accept_length
    if len(recent) == limits.rounds and collapsed:
        return ACCEPTANCE
    if limits.max_active is not None and active > limits.max_active:
        return LOAD
    return None


def switch(limits: AutoOff, jobs: Sequence[Job]) -> tuple[bool, list[str]]:
    """Turns drafting off, or on again, for requests that decode together.

    Returns:
      Whether anything changed, and a reason for each that was turned off.
    """
    changed, reasons = False, []
    for job in jobs:
        if not job.settings.speculate or job.settings.num_draft is not None:
            continue
        reason: str | None = job.off or reason_off(
            limits, list(job.drafted_rounds), job.length, len(jobs)
        )
        if reason and job.speculating:
            reasons.append(reason)
        if reason and reason != LOAD:
            job.off = reason
        changed |= job.speculating == bool(reason)
        job.speculating = not reason
    return changed, reasons
