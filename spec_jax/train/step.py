"""One training step: a pure function of (state, frozen, batch).

    loss = sum over micro-batches of numerators / sum of denominators

The division happens once, so the gradient does not depend on how the batch is
split over micro-batches or devices. Each row has its own key, folded from
(state rng, step, row of the whole batch), so the anchors do not either.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter
from spec_jax.nn.anchors import row_keys
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.train.state import TrainState

# Names the step itself reports beside the objective's metrics (and `loss`).
STEP_METRICS = ("grad_norm", "slots", "skipped", "skipped_in_row")


def _split(tree, accumulation: int, mesh: Mesh):
    """`[B, ...] -> [accumulation, B / accumulation, ...]`, each row on its device.

    Micro-batch i takes rows i, i + accumulation, ...: the rows of a shard stay
    in it, so nothing moves between devices.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, mesh_lib.AXIS_RULES["batch"]))

    def one(leaf):
        apart = leaf.reshape(-1, accumulation, *leaf.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(apart, sharding)

    return jax.tree.map(one, tree)


def step_keys(rng, step, num_rows: int):
    """Keys `[B]` of the rows of one step's global batch."""
    return row_keys(jax.random.fold_in(rng, step), num_rows)


def make_gradient(
    drafter: Drafter,
    loss: Callable,
    mesh: Mesh,
    accumulation: int = 1,
    total_steps: int | None = None,
):
    """The summed loss and its gradient; see `make_train_step` for the arguments.

    Returns:
      A function (params, frozen, batch, rng, step) -> (gradient of the mean
      loss, metrics). Metrics are {name: (sum, count)}.
    """

    def summed(params, frozen, batch, key_B, progress):
        outputs = drafter.train_outputs(params, frozen, batch, key_B)
        sums, metrics = loss(outputs, frozen, progress=progress)
        taken = sorted(set(metrics) & set(STEP_METRICS))
        if taken:
            raise ValueError(f"the objective's metric {taken[0]!r} is the step's own")
        slots = jnp.sum(outputs.valid_XM > 0).astype(jnp.float32)
        denominator = jax.lax.stop_gradient(sums.denominator)
        return sums.numerator, (denominator, metrics, slots)

    value_and_grad = jax.value_and_grad(summed, has_aux=True)

    def gradient(params, frozen, batch, rng, step):
        num_rows = batch.tokens_BS.shape[0]
        key_B = step_keys(rng, step, num_rows)
        progress = None if total_steps is None else step / total_steps
        if accumulation == 1:
            (numerator, aux), grads = value_and_grad(
                params, frozen, batch, key_B, progress
            )
        else:

            def micro(total, piece):
                (numerator, aux), grads = value_and_grad(
                    params, frozen, *piece, progress
                )
                return jax.tree.map(jnp.add, total, grads), (numerator, aux)

            zeros = jax.tree.map(jnp.zeros_like, params)
            pieces = _split((batch, key_B), accumulation, mesh)
            grads, stacked = jax.lax.scan(micro, zeros, pieces)
            numerator, aux = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), stacked)
        denominator, metrics, slots = aux
        scale = 1.0 / jnp.where(denominator > 0, denominator, 1.0)
        grads = jax.tree.map(lambda leaf: leaf * scale, grads)
        metrics = dict(metrics)
        metrics["loss"] = (numerator, denominator)
        metrics["slots"] = (slots, jnp.ones(()))
        return grads, metrics

    return gradient


def make_train_step(
    drafter: Drafter,
    loss: Callable,
    optimiser: optax.GradientTransformation,
    mesh: Mesh,
    *,
    template: TrainState,
    accumulation: int = 1,
    total_steps: int | None = None,
    ema: float = 0.0,
    donate: bool = True,
):
    """Compiles one step for a mesh.

    Args:
      drafter: gives `train_outputs(params, frozen, batch, key_B)`; `key_B` is
        one typed key per row.
      loss: (TrainOutputs, Frozen, progress=...) -> (record with `numerator` and
        `denominator`, {name: (sum, count)}); `progress` is the share of training
        done, 0 to 1, or None.
      optimiser: from `make_optimiser`.
      mesh: from `parallel.mesh`.
      template: a state, or `abstract_state`: gives the shardings.
      accumulation: micro-batches a batch is split into.
      total_steps: steps the training will take; None: `progress` is None.
      ema: decay of the averaged weights (needs `template.ema`).
      donate: reuse the state's memory.

    Returns:
      A jitted (state, frozen, batch) -> (state, metrics); the given state is
      consumed. Metrics stay on the device as {name: (sum, count)}. A step whose
      loss or gradient is not finite changes no weight and is counted in
      `skipped` and `skipped_in_row`; one without a supervised slot changes no
      weight either.

    Raises:
      UserError: accumulation below 1, or an ema without averaged weights.
    """
    if accumulation < 1:
        raise UserError(f"train.accumulation={accumulation} must be at least 1")
    if (ema > 0) != (template.ema is not None):
        raise UserError(
            f"ema={ema} and the state disagree on averaged weights; "
            "make the state with use_ema set when ema is above 0"
        )
    gradient = make_gradient(drafter, loss, mesh, accumulation, total_steps)

    def train_step(state: TrainState, frozen, batch: Batch):
        grads, metrics = gradient(state.params, frozen, batch, state.rng, state.step)
        numerator, denominator = metrics["loss"]
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(numerator) & jnp.isfinite(denominator)
        finite &= jnp.isfinite(norm)
        apply = finite & (denominator > 0)
        updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)

        params = keep(params, state.params)
        averaged = state.ema
        if averaged is not None:
            averaged = jax.tree.map(
                lambda old, new: jnp.where(apply, ema * old + (1 - ema) * new, old),
                averaged,
                params,
            )
        bad = 1 - finite.astype(jnp.int32)
        in_row = (state.skipped_in_row + bad) * bad
        one = jnp.ones(())
        metrics["grad_norm"] = (norm, one)
        metrics["skipped"] = (bad.astype(jnp.float32), one)
        metrics["skipped_in_row"] = (in_row.astype(jnp.float32), one)
        state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=keep(opt_state, state.opt_state),
            skipped=state.skipped + bad,
            skipped_in_row=in_row,
            ema=averaged,
        )
        return state, metrics

    state_shardings = mesh_lib.shardings(template, mesh)
    return jax.jit(
        train_step,
        in_shardings=(state_shardings, None, mesh_lib.batch_sharding(mesh)),
        out_shardings=(state_shardings, mesh_lib.replicated(mesh)),
        donate_argnums=(0,) if donate else (),
    )


def check_batch(
    batch: Batch, mesh: Mesh, accumulation: int, processes: int = 1
) -> None:
    """Refuses a batch whose rows cannot be split as asked.

    Args:
      batch: this process's rows.
      mesh: the mesh.
      accumulation: micro-batches per step.
      processes: how many processes bring rows.

    Raises:
      UserError: naming the sizes.
    """
    rows = batch.tokens_BS.shape[0] * processes
    shards = mesh_lib.batch_shards(mesh)
    parts = shards * accumulation
    if rows == 0 or rows % parts:
        raise UserError(
            f"train.batch={rows} must be a multiple of {parts} ({shards} data "
            f"shards x {accumulation} micro-batches); use "
            f"{max(rows // parts, 1) * parts} or change train.accumulation"
        )
