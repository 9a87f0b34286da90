"""The mesh from a config, and which array axis lies on which mesh axis.

Every array axis has a *logical* name (`batch`, `model`, `mlp`, `heads`,
`vocab`); `AXIS_RULES` says on which mesh axis a logical axis is split. A
parameter's logical axes follow from the last part of its name, so that fused
projections are split by whole head groups; an unknown matrix is split over
`fsdp` along its longest axis, a vector is replicated. An axis that the mesh
does not divide is replicated: sharding changes speed, never the result.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spec_jax.core.errors import UserError

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes.
AXIS_RULES = {
    "batch": ("data", "fsdp"),
    "model": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "vocab": ("tensor",),
}

# Last part of a parameter's name -> logical axes of its last dimensions.
PARAMETER_AXES = {
    "qkv": ("model", "heads", None, None),  # [D, G, H/G + 2, C]
    "out": ("heads", "model"),  # [H * C, D]
    "gate_up": ("model", None, "mlp"),  # [D, 2, F]
    "down": ("mlp", "model"),  # [F, D]
    "embed": ("vocab", "model"),  # [V, D]
    "embed_VD": ("vocab", "model"),
    "head": ("model", "vocab"),  # [D, V]
    "head_DU": ("model", "vocab"),
    "full_head_DV": ("model", "vocab"),
}


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """Sizes of the mesh axes; -1 takes the devices the others leave.

    Attributes:
      data: replicas of the model, each with its own rows of the batch.
      fsdp: shards of parameters and optimiser state; rows are split over it too.
      tensor: shards of heads, MLP width and vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


def make_mesh(options: MeshOptions = MeshOptions(), devices=None) -> Mesh:
    """Lays the devices out as `data x fsdp x tensor`.

    Args:
      options: sizes; at most one may be -1.
      devices: devices to use; all of them by default.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [getattr(options, axis) for axis in AXES]
    open_axes = [axis for axis, size in zip(AXES, sizes, strict=True) if size == -1]
    known = math.prod(size for size in sizes if size != -1)
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(
            f"mesh={dict(zip(AXES, sizes, strict=True))} must hold positive sizes and "
            "at most one -1; write the sizes out"
        )
    if open_axes:
        sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh={dict(zip(AXES, sizes, strict=True))} needs {math.prod(sizes)} "
            f"devices but {len(devices)} are there; choose sizes whose product is "
            f"{len(devices)}"
        )
    return jax.make_mesh(
        tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def to_spec(logical_axes, shape, mesh: Mesh) -> PartitionSpec:
    """Turns logical axes into a partition of `shape`.

    Args:
      logical_axes: a logical name or None for each of the *last* dimensions.
      shape: the array's shape; leading dimensions without a name (stacked
        layers) are replicated.
      mesh: the mesh.

    Raises:
      ValueError: an unknown logical name.
    """
    lead = len(shape) - len(logical_axes)
    parts: list = [None] * len(shape)
    for offset, name in enumerate(logical_axes):
        if name is None or lead + offset < 0:
            continue
        if name not in AXIS_RULES:
            raise ValueError(
                f"logical axis {name!r} has no rule; known: {', '.join(AXIS_RULES)}"
            )
        on_mesh = tuple(axis for axis in AXIS_RULES[name] if mesh.shape[axis] > 1)
        size = math.prod(mesh.shape[axis] for axis in on_mesh)
        if on_mesh and shape[lead + offset] % size == 0:
            parts[lead + offset] = on_mesh if len(on_mesh) > 1 else on_mesh[0]
    return PartitionSpec(*parts)


def leaf_name(path) -> str:
    """The last part of a tree path: `params/layers/3.qkv` gives `qkv`."""
    last = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
    return last.rsplit(".", 1)[-1]


def parameter_axes(path, shape) -> tuple:
    """Logical axes of one leaf, from its name or, failing that, its shape."""
    known = PARAMETER_AXES.get(leaf_name(path))
    if known is not None and len(known) <= len(shape):
        return known
    if len(shape) < 2:
        return (None,) * len(shape)
    longest = int(np.argmax(shape))
    return tuple("model" if i == longest else None for i in range(len(shape)))


def shardings(tree, mesh: Mesh):
    """The sharding of each leaf of parameters, optimiser state or `Frozen`.

    Moments carry the name of the parameter they belong to as the last part of
    their path, so they are split alike. Works on arrays and on shapes.
    """

    def one(path, leaf):
        axes = parameter_axes(path, leaf.shape)
        return NamedSharding(mesh, to_spec(axes, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, tree)


def shard_params(tree, mesh: Mesh):
    """Places each leaf on the mesh (see `shardings`)."""
    return jax.device_put(tree, shardings(tree, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first axis split over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(AXIS_RULES["batch"]))


def batch_shards(mesh: Mesh) -> int:
    """In how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in AXIS_RULES["batch"])


def place_batch(batch, mesh: Mesh):
    """Hands a host batch to the devices; the caller may reuse its buffers.

    JAX on a CPU keeps a numpy array it is given *without* copying it, so a
    buffer that is filled again would change a batch that is still in flight
    (training notes, H13). The copy made here is never written again.

    Args:
      batch: a tree of host arrays; each process gives its own rows.
      mesh: the mesh.
    """
    sharding = batch_sharding(mesh)

    def one(leaf):
        return jax.make_array_from_process_local_data(sharding, np.array(leaf))

    return jax.tree.map(one, batch)


def start_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of a multi-host run; call it before any JAX call.

    Args:
      coordinator: `host:port` of process 0; None with `num_processes` None
        stays in one process.
      num_processes: how many there are; 1 does nothing.
      process_id: this one's number.

    Raises:
      UserError: an incomplete or impossible combination.
    """
    if jax.distributed.is_initialized() or num_processes == 1:
        return
    given = (coordinator, num_processes, process_id)
    if all(value is None for value in given):
        return
    if any(value is None for value in given):
        raise UserError(
            f"processes: coordinator={coordinator!r}, num_processes={num_processes}, "
            f"process_id={process_id} must be given together, or none of them"
        )
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"processes: process_id={process_id} must lie in 0..{num_processes - 1}"
        )
    jax.distributed.initialize(coordinator, num_processes, process_id)
