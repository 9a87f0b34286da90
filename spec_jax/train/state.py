"""What a training run carries from step to step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from spec_jax.drafters.base import Drafter
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.train.optimiser import require_float32


@struct.dataclass
class TrainState:
    """Everything that one step reads and writes; all leaves are arrays.

    Attributes:
      step: int32 [], batches consumed; an array, so that it never retraces.
      params: float32 master weights.
      opt_state: optax state, float32 moments.
      rng: typed key []; a step folds `step` into it, so it never changes.
      skipped: int32 [], updates skipped because a value was not finite.
      skipped_in_row: int32 [], how many of the latest steps were skipped.
      ema: averaged weights, or None.
    """

    step: jax.Array  # []
    params: Any
    opt_state: Any
    rng: jax.Array  # []
    skipped: jax.Array  # []
    skipped_in_row: jax.Array  # []
    ema: Any = None

    def eval_params(self):
        """The weights to evaluate and export: the average where there is one."""
        return self.params if self.ema is None else self.ema


def run_keys(seed: int):
    """Keys `(rng, init)` of a run: of its steps, and of its first weights."""
    return jax.random.split(jax.random.key(seed))


def _build(drafter, optimiser, seed, use_ema, params):
    rng, init_key = run_keys(seed)
    if params is None:
        params = drafter.init(init_key)
    # Copies: neither what the caller holds nor one buffer twice may be donated.
    params = jax.tree.map(jnp.copy, params)
    require_float32(params, "drafter parameters")
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimiser.init(params),
        rng=rng,
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_row=jnp.zeros((), jnp.int32),
        ema=jax.tree.map(jnp.copy, params) if use_ema else None,
    )


def abstract_state(
    drafter: Drafter,
    optimiser: optax.GradientTransformation,
    mesh: Mesh,
    *,
    use_ema: bool = False,
    params=None,
) -> TrainState:
    """Shapes, dtypes and shardings of a state, without making one.

    Raises:
      UserError: parameters that are not float32.
    """
    if params is not None:
        require_float32(params, "drafter parameters")

    shapes = jax.eval_shape(
        lambda given: _build(drafter, optimiser, 0, use_ema, given), params
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        mesh_lib.shardings(shapes, mesh),
    )


def init_state(
    drafter: Drafter,
    optimiser: optax.GradientTransformation,
    seed: int,
    mesh: Mesh,
    *,
    use_ema: bool = False,
    params=None,
) -> TrainState:
    """A fresh state, made on the mesh.

    Args:
      drafter: gives `init`.
      optimiser: gives the moments.
      seed: of the initial weights and of every step's key.
      mesh: where it lies.
      use_ema: keep averaged weights.
      params: weights to start from instead of `drafter.init`; they are copied.

    Raises:
      UserError: parameters that are not float32.
    """
    template = abstract_state(drafter, optimiser, mesh, use_ema=use_ema, params=params)
    target = jax.tree.map(lambda leaf: leaf.sharding, template)

    def build(given):
        return _build(drafter, optimiser, seed, use_ema, given)

    given = None if params is None else mesh_lib.shard_params(params, mesh)
    return jax.jit(build, out_shardings=target)(given)
