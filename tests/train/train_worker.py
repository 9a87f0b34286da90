"""Trains the toy drafter; may kill itself; writes what it ends with.

usage: train_worker.py FOLDER RESULT.npz KILL, with KILL one of
  never                 runs to the end
  batch:N               exits when batch N is asked for
  write:N               SIGKILL while Orbax writes step N behind training
  mark:N                SIGKILL after step N's record, before its commit mark
"""

import os
import pathlib
import signal
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import numpy as np

from spec_jax.train import checkpoint
from spec_jax.train.loop import LoopOptions, train
from spec_jax.train.optimiser import OptimiserOptions
from tests.train import toy

folder, result_path, kill = sys.argv[1:]
what, _, number = kill.partition(":")
number = int(number or 0)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


if what == "write":
    start = checkpoint.ocp.save_async

    def save_async(path, tree):
        writing = start(path, tree)
        if f"{number:08d}" in path.parent.name:
            die()  # Orbax has only begun
        return writing

    checkpoint.ocp.save_async = save_async
if what == "mark":
    write = checkpoint._write_durably

    def write_durably(path, text):
        if path.name == checkpoint.COMMIT and f"{number:08d}" in path.parent.name:
            path.write_text(text[:10])
            die()
        write(path, text)

    checkpoint._write_durably = write_durably

used = []


def on_next(index):
    if what == "batch" and index == number:
        os._exit(9)
    used.append(index)


result = train(
    toy.make_drafter(),
    toy.make_frozen(),
    toy.loss,
    OptimiserOptions(lr=1e-2, total_steps=14, weight_decay=0.01, ema=0.8),
    # The unbroken run gets fresh buffers, the killed ones the same ones again.
    lambda: toy.Data(reuse_buffers=folder.endswith("killed"), on_next=on_next),
    folder,
    LoopOptions(
        steps=14, accumulation=2, log_every=4, eval_every=6, save_every=3, seed=3
    ),
    recipe_hash="toy",
    evaluate=lambda params, step: float(abs(np.array(params["norm"])).sum()),
)
leaves = toy.leaves({"state": result.state, "kept": result.params})
np.savez(
    result_path,
    used=used,
    best=[result.best_step, result.best_metric, result.step, result.slots],
    history=[[e["step"], e["metric"]] for e in result.history],
    **leaves,
)
