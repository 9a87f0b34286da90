"""Schedules and optimisers, in float32 (training notes, B1 and section 7).

Master weights and moments are float32 whatever the forward's dtype: at 1.0 the
spacing of bfloat16 is larger than any step of these schedules, so a norm weight
would never move. `require_float32` is called when a state is made and restored.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from spec_jax.core.errors import UserError

KINDS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd", "constant")


@dataclasses.dataclass(frozen=True)
class OptimiserOptions:
    """How the weights move.

    Attributes:
      kind: "adamw", or "muon": Muon for matrices, AdamW for the rest.
      lr: peak learning rate (of the matrices under Muon).
      warmup_fraction: share of `total_steps` that rises linearly to `lr`.
      schedule: "cosine" down to `final_fraction`; "wsd": constant, then a
        linear fall over the last `decay_fraction`; "constant".
      total_steps: updates the schedule is laid out for.
      clip: bound of the global gradient norm; 0 for none.
      weight_decay: decoupled, on matrices only.
      b1: decay of the first moment.
      b2: decay of the second moment.
      ema: decay of the averaged weights that are evaluated and exported; 0 for
        none.
      eps: AdamW's epsilon.
      final_fraction: learning rate at the end, as a share of `lr`.
      decay_fraction: share of `total_steps` over which "wsd" falls.
      muon_adam_ratio: AdamW's learning rate beside Muon's.
    """

    kind: str = "adamw"
    lr: float = 6e-4
    warmup_fraction: float = 0.04
    schedule: str = "cosine"
    total_steps: int = 1000
    clip: float = 1.0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    ema: float = 0.0
    eps: float = 1e-8
    final_fraction: float = 0.0
    decay_fraction: float = 0.2
    muon_adam_ratio: float = 0.1

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(
                f"train.optimiser={self.kind!r} must be one of {', '.join(KINDS)}"
            )
        if self.schedule not in SCHEDULES:
            raise UserError(
                f"train.schedule={self.schedule!r} must be one of "
                f"{', '.join(SCHEDULES)}"
            )
        if self.total_steps < 1:
            raise UserError(f"train.steps={self.total_steps} must be at least 1")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise UserError(f"train.lr={self.lr} must be a number above 0")
        if self.clip < 0 or self.weight_decay < 0:
            name = "clip" if self.clip < 0 else "weight_decay"
            raise UserError(
                f"train.{name}={getattr(self, name)} must be 0 (off) or more"
            )
        if not 0 <= self.warmup_fraction <= 1:
            raise UserError(
                f"train.warmup_fraction={self.warmup_fraction} must lie in [0, 1]"
            )
        # No recipe has the others: their names are this record's own.
        for name in ("final_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} must lie in [0, 1]")
        for name in ("b1", "b2", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must lie in [0, 1)")


def make_schedule(options: OptimiserOptions, xp=jnp):
    """The learning rate of update `count` (0-based), a float32 scalar.

    `xp=numpy` gives it on the host, where an eager JAX operation would compile.
    """
    total = options.total_steps
    warmup = round(options.warmup_fraction * total)
    low = options.final_fraction

    def schedule(count):
        count = xp.asarray(count, xp.float32)
        rise = xp.minimum((count + 1) / max(warmup, 1), 1.0)
        done = xp.clip((count - warmup) / max(total - warmup, 1), 0.0, 1.0)
        if options.schedule == "cosine":
            share = low + (1 - low) * 0.5 * (1 + xp.cos(xp.pi * done))
        elif options.schedule == "wsd":
            length = max(options.decay_fraction * total, 1.0)
            left = xp.clip((total - count) / length, 0.0, 1.0)
            share = low + (1 - low) * left
        else:
            share = 1.0
        return options.lr * rise * share

    return schedule


def _is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _muon_axes(params):
    """Matrices as [in, everything else]; fused projections are one matrix."""

    def one(leaf):
        if leaf.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(0, tuple(range(1, leaf.ndim)))

    return jax.tree.map(one, params)


def make_optimiser(options: OptimiserOptions) -> optax.GradientTransformation:
    """The optax transformation; its state is all arrays."""
    schedule = make_schedule(options)
    if options.kind == "adamw":
        rule = optax.adamw(
            schedule,
            b1=options.b1,
            b2=options.b2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            mask=_is_matrix,
        )
    else:
        rule = optax.contrib.muon(
            schedule,
            weight_decay=options.weight_decay,
            adam_b1=options.b1,
            adam_b2=options.b2,
            adam_weight_decay=0.0,
            adam_learning_rate=lambda count: options.muon_adam_ratio * schedule(count),
            muon_weight_dimension_numbers=_muon_axes,
        )
    clip = [optax.clip_by_global_norm(options.clip)] if options.clip else []
    return optax.chain(*clip, rule)


def require_float32(tree, what: str) -> None:
    """Refuses floating leaves that are not float32.

    Raises:
      UserError: naming the first such leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if floating and leaf.dtype != jnp.float32:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise UserError(
                f"{what}: {name} is {leaf.dtype} but master weights and moments are "
                "float32; cast the weights to float32 before training"
            )
