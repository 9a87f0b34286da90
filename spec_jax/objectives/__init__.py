"""Floor 5: loss terms over draft rows, as sums and counts."""

from spec_jax.objectives.early import check_objective
from spec_jax.objectives.records import LossSums, ObjectiveOptions, active_terms
from spec_jax.objectives.terms import loss

__all__ = ["LossSums", "ObjectiveOptions", "active_terms", "check_objective", "loss"]
