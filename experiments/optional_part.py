"""Whether a drafter's optional part is served: with and without it, held out.

A drafter may name an option without which a part of its weights does not draft
(`Drafter.optional_part`; DFlash 2's selector). A part that was trained on little
text may draft worse than none, so after a training both are served on the held-out
prompts (those that chose the weights), and where the lift is not positive the folder
leaves the part out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from spec_jax.core.errors import UserError
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class Choice:
    """Both drafters on the held-out prompts, and the one to export.

    Attributes:
      drafter: the trained one; without its part where the lift is not positive.
      part: the option.
      accept_length: with the part, in tokens per round.
      without: the same without it: same weights, same prompts.
    """

    drafter: Drafter
    part: str
    accept_length: float
    without: float

    @property
    def lift(self) -> float:
        """What the part adds, in tokens per round."""
        return self.accept_length - self.without

    @property
    def words(self) -> str:
        """Both figures and what was chosen."""
        return (
            f"held-out accept length {self.accept_length:.3f}, and {self.without:.3f} "
            f"with drafter.options.{self.part}=False (lift {self.lift:+.3f}): exported "
            f"with {drafts_with_part(self.drafter)}"
        )

    def metrics(self) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "option": self.part,
            "accept_length": self.accept_length,
            "accept_length_without": self.without,
            "lift": self.lift,
            "exported": drafts_with_part(self.drafter),
        }


def drafts_with_part(drafter: Drafter) -> bool:
    """Whether its optional part drafts; False where it has none."""
    part = drafter.optional_part
    return bool(part) and getattr(drafter.options, part)


def check(drafter: Drafter, target_spec: TargetSpec) -> None:
    """Refuses, before any work, a part that could not be left out after training.

    Raises:
      UserError: it names no boolean option, or other weights go with it.
    """
    part = drafter.optional_part
    if not part:
        return
    value = getattr(drafter.options, part, None)
    if not isinstance(value, bool):
        raise UserError(
            f"drafter.name={drafter.name!r}: its optional_part={part!r} must be a "
            f"boolean of its options, and there it is {value!r}; correct the drafter"
        )
    other = other_of(drafter, target_spec)
    assert other is not None
    key = jax.random.key(0)
    if jax.eval_shape(drafter.init, key) != jax.eval_shape(other.init, key):
        raise UserError(
            f"drafter.name={drafter.name!r}: drafter.options.{part} changes the "
            "weights, so that it cannot be left out after training; an optional_part "
            "may change how they draft alone"
        )


def other_of(drafter: Drafter, target_spec: TargetSpec) -> Drafter | None:
    """The drafter without its optional part, or with it where that is left out.

    None where there is no such part.
    """
    part = drafter.optional_part
    if not part:
        return None
    change = {part: not drafts_with_part(drafter)}
    options = dataclasses.replace(drafter.options, **change)
    return base.load(drafter.name, options, target_spec)


def choose(
    drafter: Drafter, target_spec: TargetSpec, served: Callable[[Drafter], float]
) -> Choice | None:
    """Serves both; None, and nothing is served, where there is nothing to choose.

    That is so without an optional part, and where the recipe leaves it out.

    Args:
      drafter: as it was trained.
      target_spec: sizes of its target.
      served: the accept length that a drafter gets with the kept weights.
    """
    other = other_of(drafter, target_spec) if drafts_with_part(drafter) else None
    if other is None:
        return None
    whole, without = served(drafter), served(other)
    chosen = drafter if whole > without else other
    return Choice(chosen, drafter.optional_part, whole, without)
