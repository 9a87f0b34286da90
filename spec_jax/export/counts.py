"""How many tensors and parameters a drafter has as a folder holds it; no memory."""

from __future__ import annotations

import dataclasses
import math

import jax

from spec_jax.drafters.base import Drafter
from spec_jax.export import names, registry


@dataclasses.dataclass(frozen=True)
class Count:
    """Size of a drafter.

    Attributes:
      tensors: weights of the folder, without the vocabulary map and without copies
        of the target's tables.
      parameters: numbers in them.
    """

    tensors: int
    parameters: int


def count_parameters(drafter: Drafter) -> Count:
    """Counts a drafter's public weights from shapes alone.

    Args:
      drafter: of any size.

    Raises:
      UserError: its options have no public form.
    """
    shapes = names.flatten(jax.eval_shape(drafter.init, jax.random.key(0)))
    plan = names.plan(registry.form_of(drafter).pieces(shapes), shapes)
    total = sum(math.prod(shape) for shape in plan.tensors.values())
    return Count(len(plan.tensors), total)
