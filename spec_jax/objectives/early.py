"""Whether a drafter feeds its objective, found out before anything runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.objectives.records import TERMS, ObjectiveOptions, active_terms
from spec_jax.objectives.terms import require_inputs
from spec_jax.target.spec import TargetSpec


def check_objective(
    drafter: Drafter, options: ObjectiveOptions, target: TargetSpec, seq_len: int
) -> None:
    """Refuses what the first training step would refuse; nothing is computed.

    Args:
      drafter: for the target's whole vocabulary.
      options: the objective.
      target: sizes of the target.
      seq_len: S, tokens of a training row.

    Raises:
      UserError: a term that the drafter cannot feed, no term at all, or a weight
        where there is nothing to train.
    """
    params = jax.eval_shape(drafter.init, jax.random.key(0))
    if not jax.tree.leaves(params):
        for term in TERMS:
            weight = getattr(options, term)
            if weight:
                raise UserError(
                    f"objective.{term}={weight} has nothing to train: "
                    f"drafter.name={drafter.name!r} has no parameters; leave it out"
                )
        return
    active = active_terms(options, drafter.terms)

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    size_d, size_v, needs = target.hidden_size, target.vocab_size, drafter.needs
    frozen = Frozen(shape(size_v, size_d), shape(size_d, size_v))
    batch = Batch(
        tokens_BS=shape(1, seq_len, dtype=jnp.int32),
        supervised_BS=shape(1, seq_len, dtype=bool),
        length_B=shape(1, dtype=jnp.int32),
        features_BSLD=shape(1, seq_len, needs.num_layers, size_d),
        teacher_BSD=shape(1, seq_len, size_d) if needs.teacher else None,
    )
    key = jax.random.key(0)
    outputs = jax.eval_shape(drafter.train_outputs, params, frozen, batch, key)
    require_inputs(outputs, frozen, options, active)
