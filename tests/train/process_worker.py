"""One of several processes that train together; prints JSON.

usage: process_worker.py FOLDER PROCESS NUM_PROCESSES PORT STEPS
"""

import json
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax

folder = sys.argv[1]
process, count, port, steps = map(int, sys.argv[2:])
jax.config.update("jax_num_cpu_devices", 4 // count)

import numpy as np  # noqa: E402

from spec_jax.parallel import mesh as mesh_lib  # noqa: E402
from spec_jax.train.loop import LoopOptions, train  # noqa: E402
from spec_jax.train.optimiser import OptimiserOptions  # noqa: E402
from tests.train import toy  # noqa: E402

if count > 1:
    mesh_lib.start_processes(f"localhost:{port}", count, process)
assert len(jax.devices()) == 4 and jax.process_count() == count


class Share(toy.Data):
    """This process's rows of each global batch; the state is global."""

    def __next__(self):
        batch = super().__next__()
        rows = 8 // count
        return jax.tree.map(lambda x: x[process * rows : (process + 1) * rows], batch)


used = []
result = train(
    toy.make_drafter(),
    toy.make_frozen(),
    toy.loss,
    OptimiserOptions(lr=1e-2, total_steps=6),
    lambda: Share(on_next=used.append),
    folder,
    LoopOptions(steps=steps, log_every=1, save_every=2, eval_every=3, max_seconds=600),
    recipe_hash="toy",
    mesh=mesh_lib.make_mesh(mesh_lib.MeshOptions(data=2, fsdp=2)),
    evaluate=lambda params, step: {3: 2.0}.get(step, 1.0),
)


def whole(leaf):
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(leaf)).tolist()


replicated = result.state.step.sharding
print(
    json.dumps(
        {
            "kept": whole(result.params["fc"]),
            "last": whole(result.state.params["fc"]),
            "used": used,
            "best": result.best_step,
        }
    )
)
