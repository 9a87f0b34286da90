"""Two processes train as one, save together, and resume as one process."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from spec_jax.train.metrics import read_records


def _run(folder, count, steps):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    worker = str(pathlib.Path(__file__).parent / "process_worker.py")
    running = [
        subprocess.Popen(
            [sys.executable, worker, str(folder)]
            + [str(value) for value in (process, count, port, steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        )
        for process in range(count)
    ]
    try:
        ends = [process.communicate(timeout=500) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, ends, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


@pytest.mark.slow
def test_processes_train_as_one_and_resume_in_another_number(tmp_path):
    alone = _run(tmp_path / "one", 1, 6)[0]
    first = _run(tmp_path / "two", 2, 4)
    assert first[0] == first[1]
    assert first[0]["used"] == [0, 1, 2, 3]
    resumed = _run(tmp_path / "two", 1, 6)[0]
    assert resumed["used"] == [4, 5]
    assert alone["best"] == resumed["best"] == 3
    for name in ("kept", "last"):
        np.testing.assert_allclose(alone[name], resumed[name], rtol=1e-4, atol=1e-5)
    records = read_records(tmp_path / "two" / "metrics.jsonl")
    trained = [record["step"] for record in records if record["kind"] == "train"]
    assert trained == [1, 2, 3, 4, 5, 6]
