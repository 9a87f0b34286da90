"""Wall time over the processes of a run, killed ones included."""

import types

import pytest

from experiments import clock, session
from spec_jax.config import schema


@pytest.fixture
def now(monkeypatch):
    """Seconds that pass only when a test says so."""
    seconds = [0.0]
    fake = types.SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr(clock, "time", fake)
    return seconds


def test_a_part_is_on_disk_while_it_runs(tmp_path, now, monkeypatch):
    """What a kill leaves behind: nothing at the end of the block is needed."""
    monkeypatch.setattr(clock, "EVERY_S", 0.001)
    seen = clock.Clock(tmp_path / clock.NAME)
    with seen.running("wall"), seen.running("capture"):
        now[0] = 30.0
        written = {}
        for _ in range(10_000):
            written = seen.read()
            if written.get("wall") == written.get("capture") == 30.0:
                break
            clock.threading.Event().wait(0.001)
        assert written == {"wall": 30.0, "capture": 30.0}


def test_parts_add_up_over_processes(tmp_path, now):
    seen = clock.Clock(tmp_path / "later" / clock.NAME)
    with seen.running("wall"):  # a folder that appears on the way
        now[0] = 2.0
        (tmp_path / "later").mkdir()
    with pytest.raises(KeyboardInterrupt), seen.running("wall") as total:
        now[0] = 5.0
        assert total() == 5.0
        raise KeyboardInterrupt
    assert seen.read() == {"wall": 5.0}
    seen.forget("wall")
    assert seen.read() == {}
    (tmp_path / "later" / clock.NAME).write_text('{"wal')
    assert seen.read() == {}


@pytest.mark.parametrize("task_name", ["pipeline", "bench_round"])
def test_a_resumed_run_reports_all_of_its_wall_time(tmp_path, now, task_name):
    cfg = schema.SCHEMAS[task_name]()
    workdir = tmp_path / "run"

    def main(cfg, workdir):
        now[0] += 100.0
        if now[0] < 150.0:
            raise KeyboardInterrupt
        return {"accept_length": 1.0}

    task = types.SimpleNamespace(main=main)
    with pytest.raises(KeyboardInterrupt):
        session.run_task(task, cfg, "tiny", workdir)
    found = session.run_task(task, cfg, "tiny", workdir)
    assert found["metrics"]["wall_s"] == 200.0
    again = session.run_task(task, cfg, "tiny", workdir)
    # A benchmark measures again, and counts from there.
    assert again["metrics"]["wall_s"] == (200.0 if task_name == "pipeline" else 100.0)
