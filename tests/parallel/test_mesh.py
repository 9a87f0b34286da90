"""The mesh, its rules, and host buffers that are handed over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from spec_jax.core.errors import UserError
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.parallel.mesh import MeshOptions, make_mesh, to_spec

ONE = make_mesh(devices=jax.devices()[:1])
BIG = AbstractMesh((2, 4, 2), mesh_lib.AXES)


def _specs(tree):
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    paths = jax.tree_util.tree_leaves_with_path(shapes)
    return {
        mesh_lib.leaf_name(path): to_spec(
            mesh_lib.parameter_axes(path, leaf.shape), leaf.shape, BIG
        )
        for path, leaf in paths
    }


def test_parameters_are_split_by_name():
    """Whole head groups over `tensor`, width over `fsdp`; stacked layers whole."""
    found = _specs(
        {
            "layers_0": {"qkv": (8, 2, 5, 4), "3.out": (16, 8), "gate_up": (8, 2, 6)},
            "stacked": {"down": (9, 6, 8)},
            "head_DU": (8, 10),
            "fc": (40, 8),
            "norm": (8,),
        }
    )
    assert found == {
        "qkv": PartitionSpec("fsdp", "tensor", None, None),
        "out": PartitionSpec("tensor", "fsdp"),
        "gate_up": PartitionSpec("fsdp", None, "tensor"),
        "down": PartitionSpec(None, "tensor", "fsdp"),
        "head_DU": PartitionSpec("fsdp", "tensor"),
        "fc": PartitionSpec("fsdp", None),
        "norm": PartitionSpec(None),
    }


def test_an_axis_the_mesh_does_not_divide_is_replicated():
    assert to_spec(("model", "heads"), (6, 3), BIG) == PartitionSpec(None, None)
    assert to_spec(("batch",), (16, 5), BIG) == PartitionSpec(None, None)
    assert to_spec(("batch", None), (16, 5), BIG)[0] == ("data", "fsdp")
    with pytest.raises(ValueError, match="'width' has no rule"):
        to_spec(("width",), (6,), BIG)


def test_batches_are_split_over_data_and_fsdp():
    assert mesh_lib.batch_shards(BIG) == 8
    assert mesh_lib.batch_shards(ONE) == 1


def test_a_host_buffer_may_be_filled_again():
    """JAX takes a large aligned array as it is (training notes, H13)."""
    raw = np.ones(1024 * 1024 + 64, np.float32)
    start = -raw.ctypes.data % 256 // raw.itemsize
    buffer = raw[start : start + 1024 * 1024].reshape(1024, 1024)
    placed = mesh_lib.place_batch({"x": buffer}, ONE)
    total = jax.jit(lambda tree: tree["x"].sum())(placed)
    buffer[:] = np.nan
    assert float(total) == buffer.size
    assert np.isfinite(np.array(placed["x"])).all()


def test_mesh_sizes():
    assert dict(ONE.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    with pytest.raises(UserError, match="needs 2 devices but 1 are there"):
        make_mesh(MeshOptions(data=2), jax.devices()[:1])
    with pytest.raises(UserError, match="at most one -1"):
        make_mesh(MeshOptions(data=-1, fsdp=-1))
    with pytest.raises(UserError, match="positive sizes"):
        make_mesh(MeshOptions(data=1, fsdp=0))


def test_processes_are_named_completely_or_not_at_all():
    mesh_lib.start_processes()
    mesh_lib.start_processes("host:1", 1, 0)
    assert not jax.distributed.is_initialized()
    with pytest.raises(UserError, match="given together"):
        mesh_lib.start_processes("host:1", 2)
    with pytest.raises(UserError, match=r"process_id=2 must lie in 0\.\.1"):
        mesh_lib.start_processes("host:1", 2, 2)
