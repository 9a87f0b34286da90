"""How many steps a number of supervised positions, or of starts, takes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
import numpy as np

from spec_jax.core.batch import Batch
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.train.state import run_keys
from spec_jax.train.step import step_keys

# Of the mean of the counted batches, where not all are counted.
_STANDARD_ERRORS = 3.0


def steps_for(
    asked: int,
    drafter: Drafter,
    frozen: Frozen,
    batches: Iterable[Batch],
    seed: int,
    *,
    starts: bool = False,
) -> int:
    """Fewest steps of a run over these batches that train on so many positions.

    A position is an (anchor, offset), a (start, depth) or a token with non-zero
    weight; a start is an anchor, or where a chain of depths begins, with a
    position at least. Batches are counted with the keys that the run of this seed
    will use, so that as far as they go the count is the run's own; beyond them it
    follows from their mean, less three standard errors.

    Args:
      asked: positions, or starts.
      drafter: its training outputs say which positions count.
      frozen: borrowed arrays, for their shapes.
      batches: the first batches of the run, in its order.
      seed: of the run.
      starts: count starts.
    """

    @jax.jit
    def count(params, frozen, batch, rng, step):  # all but the counting is dead code
        key_B = step_keys(rng, step, batch.tokens_BS.shape[0])
        valid_XM = drafter.train_outputs(params, frozen, batch, key_B).valid_XM
        counted = valid_XM > 0
        return counted.any(1).sum() if starts else counted.sum()

    rng, init_key = run_keys(seed)
    shapes = jax.eval_shape(drafter.init, init_key)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    found: list[int] = []
    for step, batch in enumerate(batches):
        found.append(int(count(params, frozen, batch, rng, np.int32(step))))
        if sum(found) >= asked:
            return len(found)
    mean, spread = float(np.mean(found)), float(np.std(found))
    lowest = mean - _STANDARD_ERRORS * spread / math.sqrt(len(found))
    return math.ceil(asked / max(lowest, 1.0))
