"""The loop: killed anywhere, resumed exactly; budgets; records; refusals."""

import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.train import checkpoint, loop
from spec_jax.train.checkpoint import SaveFailed, list_steps
from spec_jax.train.loop import LoopOptions, TrainingStopped, train
from spec_jax.train.metrics import (
    MetricsFile,
    add,
    means,
    progress_line,
    read_records,
)
from spec_jax.train.optimiser import OptimiserOptions
from spec_jax.train.positions import steps_for
from tests.train import toy

OPTIONS = OptimiserOptions(lr=1e-2, total_steps=8)


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """All runs in this file share one compiled step and one first state."""
    monkeypatch.setattr(loop, "make_train_step", _train_step)
    monkeypatch.setattr(loop, "init_state", _init_state)


_make_train_step, _real_init_state, _cache = loop.make_train_step, loop.init_state, {}


def _train_step(*args, **options):
    if "step" not in _cache:
        _cache["step"] = _make_train_step(*args, **options)
    return _cache["step"]


def _init_state(*args, **options):
    if "init" not in _cache:
        _cache["init"] = _real_init_state(*args, **options)
        _cache["copy"] = jax.jit(functools.partial(jax.tree.map, lambda x: x.copy()))
    return _cache["copy"](_cache["init"])


def _train(folder, steps=8, data=toy.Data, evaluate=None, log=None, **options):
    return train(
        toy.make_drafter(),
        toy.make_frozen(),
        toy.loss,
        OPTIONS,
        data,
        folder,
        LoopOptions(steps=steps, **({"log_every": 2} | options)),
        recipe_hash="toy",
        evaluate=evaluate,
        log=log,
    )


def test_asked_positions_are_reached_by_the_fewest_steps(tmp_path):
    slots = _train(tmp_path / "all").slots
    frozen, drafter = toy.make_frozen(), toy.make_drafter()

    def steps(positions, batches=8):
        data = itertools.islice(toy.Data(), batches)
        return steps_for(positions, drafter, frozen, data, seed=0)

    assert steps(int(slots)) == 8
    five = int(_train(tmp_path / "five", steps=5).slots)
    assert (steps(five), steps(five + 1)) == (5, 6)
    # A start counts once, however many positions follow it.
    eligible_B = toy.make_batch(0).supervised_BS.sum(1) - 1
    first = int(np.minimum(eligible_B, toy.ANCHORS).sum())
    for starts, asked in ((1, first), (2, first + 1)):
        data = itertools.islice(toy.Data(), 2)
        assert steps_for(asked, drafter, frozen, data, seed=0, starts=True) == starts
    # Past what was counted: enough, and not many more.
    assert 8 <= steps(int(slots), batches=6) <= 10


def _work(folder, kill, tmp_path):
    worker = pathlib.Path(__file__).parent / "train_worker.py"
    result = tmp_path / f"{folder}-{kill.replace(':', '')}.npz"
    run = subprocess.run(
        [sys.executable, str(worker), str(tmp_path / folder), str(result), kill],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ
        | {
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        },
    )
    if kill == "never":
        assert run.returncode == 0, run.stderr[-3000:]
        return dict(np.load(result))
    assert run.returncode in (9, -9), run.stderr[-3000:]
    assert not result.exists()
    return None


def _untimed(path):
    times = ("seconds", "slots_per_s", "eta_s")
    return [
        {name: value for name, value in record.items() if name not in times}
        for record in read_records(path)
    ]


def test_killed_anywhere_ends_with_the_same_bits(tmp_path):
    """Between steps, inside the async write, before the commit mark."""
    expected = _work("unbroken", "never", tmp_path)
    steps = []
    for kill in ("batch:5", "write:6", "mark:9"):
        _work("killed", kill, tmp_path)
        found = list_steps(tmp_path / "killed" / "checkpoints")
        steps.append([entry.step for entry in found])
    # Whatever was being written is not listed; what was there before it is.
    assert steps[1] == [3] and steps[2] == [6]
    got = _work("killed", "never", tmp_path)
    assert got.pop("used")[0] == 6  # went on where the last listed step ends
    assert expected.pop("used").tolist() == list(range(14))
    toy.require_equal(expected, got)
    names = ("unbroken", "killed")
    records = [_untimed(tmp_path / name / "metrics.jsonl") for name in names]
    assert records[0] == records[1]
    assert [(r["kind"], r["step"]) for r in records[0]] == [
        ("train", 4),
        ("eval", 6),
        ("train", 8),
        ("train", 12),
        ("eval", 12),
        ("train", 14),
        ("eval", 14),
    ]


def test_the_best_step_is_kept_and_a_finished_run_does_nothing(tmp_path):
    seen, lines = {}, []

    def evaluate(params, step):
        seen[step] = np.array(params["fc"])
        return {2: 1.1, 4: 1.9, 6: 1.5, 8: 1.4}[step]

    result = _train(tmp_path, evaluate=evaluate, eval_every=2, log=lines.append)
    assert (result.best_step, result.best_metric, result.step) == (4, 1.9, 8)
    assert result.stopped == "steps" and result.skipped == 0
    np.testing.assert_array_equal(np.array(result.params["fc"]), seen[4])
    assert not np.array_equal(seen[4], seen[8])
    assert (np.array(result.state.params["norm"]) != 1.0).all()
    assert [past["metric"] for past in result.history] == [1.1, 1.9, 1.5, 1.4]
    assert lines == read_records(tmp_path / "metrics.jsonl")
    trained = [line for line in lines if line["kind"] == "train"]
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert 0 <= trained[0]["metrics"]["acc"] <= 1
    assert len(trained[0]["metrics"]["by_slot"]) == toy.DRAFTS
    assert all("ETA" in progress_line(line) for line in trained)
    evals = [line for line in lines if line["kind"] == "eval"]
    assert [line["best"] for line in evals] == [True, True, False, False]

    def never(*_):
        raise AssertionError("a finished run was trained or evaluated again")

    again = _train(tmp_path, evaluate=never, data=lambda: toy.Data(on_next=never))
    assert again.best_step == 4 and again.seconds == result.seconds
    np.testing.assert_array_equal(np.array(again.params["fc"]), seen[4])
    assert read_records(tmp_path / "metrics.jsonl") == lines


def test_an_evaluation_that_dies_is_repeated(tmp_path):
    def fail(params, step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path, steps=4, evaluate=fail, save_every=3)
    used = []
    result = _train(
        tmp_path,
        steps=4,
        evaluate=lambda params, step: 2.0,
        data=lambda: toy.Data(on_next=used.append),
    )
    assert used == [3]
    assert result.best_metric == 2.0 and len(result.history) == 1


def test_time_is_a_budget_that_survives_a_resume(tmp_path, monkeypatch):
    """A clock that gains a second per reading stands in for the wall."""
    now = iter(range(10**6))
    monkeypatch.setattr(loop, "_now", lambda: float(next(now)))

    class Crash(Exception):
        pass

    def crash(index):
        if index == 3:
            raise Crash

    options = {"steps": 1000, "max_seconds": 12.0, "save_every": 1, "log_every": 1000}
    with pytest.raises(Crash):
        _train(tmp_path, data=lambda: toy.Data(on_next=crash), **options)
    saved = json.loads(
        (list_steps(tmp_path / "checkpoints")[-1].path / "meta.json").read_text()
    )
    assert 0 < saved["extra"]["seconds"] < 12
    result = _train(tmp_path, **options)
    assert result.stopped == "time" and 12 <= result.seconds < 15
    assert 3 < result.step < 12
    again = _train(tmp_path, **options)
    assert again.step == result.step and again.stopped == "time"


def test_steps_that_are_not_finite_stop_the_run(tmp_path):
    class Broken(toy.Data):
        def __next__(self):
            batch = super().__next__()
            if self.index > 3:
                batch.features_BSLD[:] = np.nan
            return batch

    with pytest.raises(TrainingStopped, match=r"not finite in 3 steps in a row"):
        _train(tmp_path, data=Broken, steps=50, max_skipped_in_row=2, log_every=1)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [r["skipped"] for r in records] == [0, 0, 0, 1, 1]
    assert records[-1]["loss"] is None and progress_line(records[-1])


def test_a_failed_save_stops_the_run(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    used = []

    def on_next(index):
        used.append(index)
        time.sleep(0.02 if index > 20 else 0)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_durably", full)
        with pytest.raises(SaveFailed, match=r"step 20 .*No space left"):
            _train(
                tmp_path,
                steps=500,
                save_every=20,
                data=lambda: toy.Data(on_next=on_next),
            )
    assert used[-1] < 39  # before the next save
    assert list_steps(tmp_path / "checkpoints") == []
    assert _train(tmp_path, steps=2).step == 2


def test_unfit_data_is_named(tmp_path):
    class Ends(toy.Data):
        def __next__(self):
            if self.index == 2:
                raise StopIteration
            return super().__next__()

    class Remainder(toy.Data):
        def __next__(self):
            batch = super().__next__()
            return toy.make_batch(0, rows=4) if self.index == 2 else batch

    with pytest.raises(UserError, match="data ended after 2 of 8 steps"):
        _train(tmp_path / "a", data=Ends)
    with pytest.raises(UserError, match=r"batch 2 is .*drop remainders"):
        _train(tmp_path / "b", data=Remainder)
    with pytest.raises(UserError, match="train.batch=8 must be a multiple of 3"):
        _train(tmp_path / "c", accumulation=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("accumulation", 0),
        ("eval_every", -1),
        ("save_every", -1),
        ("max_skipped_in_row", -1),
        ("max_seconds", 0.0),
    ],
)
def test_bad_options_are_named(field, value):
    """As a recipe calls them, where one has them."""
    said = {
        "save_every": "train.checkpoint_every",
        "max_skipped_in_row": "^max_skipped_in_row",
        "max_seconds": "^max_seconds",
    }
    with pytest.raises(UserError, match=f"{said.get(field, f'train.{field}')}="):
        LoopOptions(**({"steps": 1} | {field: value}))


def test_metrics_add_and_divide_once():
    one = {"acc": [1.0, 2.0], "by": [[1.0, 0.0], [2.0, 0.0]]}
    two = {"acc": [3.0, 2.0], "by": [[1.0, 0.0], [1.0, 0.0]], "new": [1.0, 4.0]}
    total = add(add({}, one), two)
    assert means(total) == {"acc": 1.0, "by": [2 / 3, 0.0], "new": 0.25}


def test_metrics_file_drops_what_will_come_again(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, step=0)
    for step in (1, 2, 3):
        file.append({"step": step})
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [r["step"] for r in read_records(path)] == [1, 2, 3]
    MetricsFile(path, step=2).append({"step": 3, "again": True})
    assert read_records(path)[1:] == [{"step": 2}, {"step": 3, "again": True}]
