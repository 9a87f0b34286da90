"""Options of the objectives and the sums they return."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct

from spec_jax.core.errors import UserError

KINDS = ("ce", "dpace", "lk_alpha", "lk_lambda", "lk_tv")


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
    """Which loss a drafter is trained with.

    Attributes:
      kind: "ce"; "dpace" (CE under prefix weights); "lk_alpha", "lk_lambda",
        "lk_tv" (likelihood-of-acceptance losses against hard labels).
      decay_gamma: draft j (from 1) weighs exp(-(j - 1) / gamma); 0 is flat. With
        "dpace" the two weights multiply; the public form of D-PACE is flat.
      dpace_alpha: floor of D-PACE's step survival, 0 to 1.
      kl_scale: weight of the CE part of "lk_lambda" at acceptance 0.
      kl_decay: how fast that weight falls with acceptance.
      chunk_rows: rows whose logits exist at once; 0: all. With more than one
        chunk the logits are computed again in the backward pass.
    """

    kind: str = "ce"
    decay_gamma: float = 0.0
    dpace_alpha: float = 0.5
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    chunk_rows: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(
                f"objective.kind={self.kind!r} must be one of {', '.join(KINDS)}"
            )
        for name in ("decay_gamma", "kl_scale", "kl_decay", "chunk_rows"):
            if not getattr(self, name) >= 0:
                raise UserError(
                    f"objective.{name}={getattr(self, name)} must not be negative"
                )
        if not 0 <= self.dpace_alpha <= 1:
            raise UserError(
                f"objective.dpace_alpha={self.dpace_alpha} must lie between 0 and 1"
            )


@struct.dataclass
class LossSums:
    """A loss as a numerator and its denominator.

    Divide once, after the sums over accumulation steps and devices; a mean of
    means would weigh a row by how its batch was cut.

    Attributes:
      numerator: weighted sum of the rows' losses; the only differentiated part.
      denominator: sum of the weights.
    """

    numerator: jnp.ndarray  # []
    denominator: jnp.ndarray  # []

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.numerator + other.numerator, self.denominator + other.denominator
        )

    def mean(self):
        """The loss; 0 where nothing was supervised."""
        return self.numerator / jnp.maximum(self.denominator, 1e-12)
