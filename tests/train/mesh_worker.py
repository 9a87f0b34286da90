"""Trains two steps on several meshes of four fake devices; prints JSON."""

import json
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 4)
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import numpy as np  # noqa: E402

from spec_jax.parallel.mesh import (  # noqa: E402
    MeshOptions,
    make_mesh,
    place_batch,
    shard_params,
)
from spec_jax.train.optimiser import OptimiserOptions, make_optimiser  # noqa: E402
from spec_jax.train.state import init_state  # noqa: E402
from spec_jax.train.step import make_train_step  # noqa: E402
from tests.train import toy  # noqa: E402

CASES = {
    "one": (1, MeshOptions(), 1),
    "data4": (4, MeshOptions(data=4), 1),
    "data2_accumulate2": (2, MeshOptions(data=2), 2),
    "fsdp2_tensor2": (4, MeshOptions(data=1, fsdp=2, tensor=2), 2),
}


def run(count, mesh_options, accumulation):
    mesh = make_mesh(mesh_options, jax.devices()[:count])
    drafter = toy.make_drafter()
    optimiser = make_optimiser(OptimiserOptions(lr=1e-2, total_steps=10))
    state = init_state(drafter, optimiser, 0, mesh)
    frozen = shard_params(toy.make_frozen(), mesh)
    step = make_train_step(
        drafter,
        toy.loss,
        optimiser,
        mesh,
        template=state,
        accumulation=accumulation,
    )
    state, metrics = step(state, frozen, place_batch(toy.make_batch(0), mesh))
    state, second = step(state, frozen, place_batch(toy.make_batch(1), mesh))

    def mean(pair):
        return float(pair[0]) / float(pair[1])

    leaves = jax.tree.leaves(state.params)
    return {
        "loss": mean(metrics["loss"]),
        "second_loss": mean(second["loss"]),
        "grad_norm": float(metrics["grad_norm"][0]),
        "acc": mean(metrics["acc"]),
        "slots": float(metrics["slots"][0]),
        "anchors": [float(part["anchor_squares"][0]) for part in (metrics, second)],
        "params": np.asarray(leaves[0]).ravel().tolist(),
        "split_parameters": sum(
            not leaf.sharding.is_fully_replicated for leaf in leaves
        ),
    }


print(json.dumps({name: run(*case) for name, case in CASES.items()}))
