"""Floor 5: loss terms over draft rows, as sums and counts."""

from spec_jax.objectives.records import LossSums, ObjectiveOptions, active_terms
from spec_jax.objectives.terms import loss

__all__ = ["LossSums", "ObjectiveOptions", "active_terms", "loss"]
