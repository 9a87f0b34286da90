"""Floor 5: loss terms over draft rows, as sums and counts."""

from spec_jax.objectives.hard_labels import loss
from spec_jax.objectives.records import LossSums, ObjectiveOptions

__all__ = ["LossSums", "ObjectiveOptions", "loss"]
