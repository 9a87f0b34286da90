"""What an engine needs of a device's memory, known before it serves.

Weights, state and the largest of its programs' workspaces: programs run one after
the other, and each changes the donated state where it lies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from spec_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one engine.

    Attributes:
      weights_bytes: parameters of target and drafter.
      state_bytes: caches, draft state and slots.
      program_bytes: the largest workspace of a program, with what it returns beside
        the state; None where the backend does not tell, and then not in the total.
      limit_bytes: what the device states; None where it states nothing.
    """

    weights_bytes: int
    state_bytes: int
    program_bytes: int | None
    limit_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.state_bytes + (self.program_bytes or 0)

    def as_metrics(self) -> dict[str, int | None]:
        """Every number, and their sum."""
        return {**dataclasses.asdict(self), "total_bytes": self.total_bytes}


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, or of their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def workspace(program: Any) -> int | None:
    """Bytes that a compiled program takes beside its arguments.

    Temporaries, and results that lie in no donated argument. None where the backend
    does not tell.
    """
    found = program.memory_analysis()
    if found is None:
        return None
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.temp_size_in_bytes + max(fresh, 0)


def limit_of(device: Any) -> int | None:
    """Bytes that a device lets this process have, or None."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def plan_memory(
    weights: Any, state: Any, programs: Mapping[Any, Any], device: Any = None
) -> MemoryPlan:
    """The plan of an engine.

    Args:
      weights: what its programs read.
      state: what they change; shapes are enough.
      programs: all of them, compiled.
      device: where they run; None: JAX's first.
    """
    each = [workspace(program) for program in programs.values()]
    known = [size for size in each if size is not None]
    return MemoryPlan(
        weights_bytes=bytes_of(weights),
        state_bytes=bytes_of(state),
        program_bytes=max(known) if known else None,
        limit_bytes=limit_of(device or jax.devices()[0]),
    )


def check_memory(plan: MemoryPlan, slots: int, max_context: int) -> None:
    """Refuses an engine that its device cannot hold.

    Raises:
      UserError: the plan exceeds the device's limit.
    """
    if plan.limit_bytes is None or plan.total_bytes <= plan.limit_bytes:
        return
    programs = "unknown"
    if plan.program_bytes is not None:
        programs = f"{plan.program_bytes / 1e6:,.1f}"
    raise UserError(
        f"serve.slots={slots} with serve.max_context={max_context} needs "
        f"{plan.total_bytes / 1e6:,.1f} MB (weights {plan.weights_bytes / 1e6:,.1f}, "
        f"state {plan.state_bytes / 1e6:,.1f}, programs {programs}) and the device has "
        f"{plan.limit_bytes / 1e6:,.1f} MB; lower one of them"
    )
