"""The report: what is written, that it is whole, and that the page stands alone."""

import io
import json
import re

import numpy as np
import pytest
import rich.console

from spec_jax.evals import machine, plots, report

SERIES = {
    "acceptance": {"drafter": [0.6, 0.3], "shuffled": [0.1, 0.0]},
    "accept_length": {"validation": [[0, 1.0], [50, 1.6]]},
    "loss": {"train": [[0, 9.1], [10, 4.0]]},
    "cost": {"plain": {"step": 30.0}, "speculative": {"draft": 3.0, "verify": 19.0}},
    "histogram": {"drafter": [5, 3, 1]},
    "verify_len": {"compact": [4, 2, 0, 1]},
    "reliability": {"raw": [[0.2, 0.1, 30], [0.9, 0.7, 5]], "calibrated": []},
    "samples": [
        {
            "title": "t",
            "pieces": [["ask ", "prompt"], ["<b>one", "accepted"], [" two", "target"]],
        }
    ],
}


def _write(folder, metrics=None, series=SERIES, **more):
    return report.write_report(
        folder, "quick", "ab" * 32, metrics or {"accept_length": 1.5}, series, **more
    )


def test_json_holds_what_a_machine_needs(tmp_path):
    load = machine.Load(0.1, 0.9, 0.02, 3.0)
    metrics = {
        "accept_length": np.float32(1.5),
        "greedy_identical": np.bool_(True),
        "verify_ms": {1: 30.0, 8: float("nan")},
        "near_ties": np.int64(2),
    }
    _write(
        tmp_path,
        metrics,
        config={"target": {"dtype": "bfloat16"}},
        changes=[("train.steps", 4, 5)],
        load=load,
        max_load=0.15,
        started=0.0,
    )
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["metrics"] == {
        "accept_length": 1.5,
        "greedy_identical": True,
        "verify_ms": {"1": 30.0, "8": None},
        "near_ties": 2,
    }
    assert found["valid"] is True and found["load"]["others"] == 0.02
    assert found["recipe"] == "quick" and found["config_hash"] == "ab" * 32
    assert found["dtype"] == "bfloat16" and found["changes"] == [["train.steps", 4, 5]]
    assert found["started"] == "1970-01-01 00:00:00 UTC"
    assert {"python", "jax", "flax", "optax", "orbax-checkpoint", "numpy"} <= set(
        found["versions"]
    )
    assert found["device"]["platform"] == "cpu"
    assert {"commit", "dirty", "config", "series"} <= set(found)
    assert report.read_report(tmp_path) == found


def test_page_stands_alone_and_escapes(tmp_path):
    _write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 7
    assert "Accepted drafts by position" in page
    assert '<span class="accepted">&lt;b&gt;one</span>' in page
    # Nothing is fetched: no source, style sheet, script or import from elsewhere.
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page)
    for address in re.findall(r"""(?:href|src)=["']([^"']*)""", page):
        assert address.startswith("#"), address


def test_page_without_matplotlib_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    _write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<svg" not in page and "<code>report</code> extra" in page


def test_busy_machine_is_not_valid(tmp_path):
    busy = machine.Load(0.0, 0.5, 0.4, 3.0)
    assert not _write(tmp_path, load=busy, max_load=0.15)["valid"]
    assert "not valid" in (tmp_path / "report.html").read_text()
    unknown = machine.Load(0.1, 2.0, None, 3.0)  # other systems: the load before
    assert unknown.valid(0.15) and not unknown.valid(0.05)


def test_meter_reads_this_machine():
    meter = machine.LoadMeter()
    total = sum(i * i for i in range(1_500_000))
    load = meter.read()
    assert total > 0 and load.seconds > 0
    assert load.others is None or 0 <= load.others <= 1


def test_own_work_is_subtracted(monkeypatch):
    busy, own = iter([100.0, 110.0]), iter([5.0, 13.0])
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(machine, "_machine_cpu_seconds", lambda: next(busy))
    monkeypatch.setattr(machine, "_own_cpu_seconds", lambda: next(own))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    # 10 busy seconds, 8 of them ours, over 10 s and 2 cores.
    assert machine.LoadMeter().read().others == pytest.approx(0.1)


def test_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    _write(tmp_path, {"accept_length": 1.5})

    def broken(path, *_):
        raise OSError(f"disk full at {path}")

    monkeypatch.setattr(report.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        _write(tmp_path, {"accept_length": 9.9})
    monkeypatch.undo()
    assert report.read_report(tmp_path)["metrics"] == {"accept_length": 1.5}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_page_is_there_before_the_json(tmp_path, monkeypatch):
    order = []
    real = report.write_atomically
    monkeypatch.setattr(
        report, "write_atomically", lambda p, t: (order.append(p.name), real(p, t))
    )
    _write(tmp_path)
    assert order == ["report.html", "report.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metrics": 3}'])
def test_torn_report_counts_as_none(tmp_path, text):
    assert report.read_report(tmp_path) is None
    (tmp_path / "report.json").write_text(text)
    assert report.read_report(tmp_path) is None


def test_wrong_series_and_values_are_refused(tmp_path):
    with pytest.raises(ValueError, match="series 'los' is not known"):
        _write(tmp_path, series={"los": {}})
    with pytest.raises(ValueError, match="sample text of kind 'draft'"):
        _write(
            tmp_path, series={"samples": [{"title": "", "pieces": [["a", "draft"]]}]}
        )
    with pytest.raises(ValueError, match="has no place in a report"):
        _write(tmp_path, {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_tables_and_terminal():
    metrics = {
        "accept_length": 1.25,
        "ok": True,
        "big": 1234567,
        "small": 2.5e-5,
        "verify_ms": {"1": 30.0},
        "sets": {"a": {"speedup": 1.5}, "b": {"ties": 0}},
        "name[0]": "[red]x",
    }
    found = {t.title: t for t in report.tables(metrics)}
    assert found[""].rows[1:4] == (
        ("ok", "yes"),
        ("big", "1,234,567"),
        ("small", "2.50e-05"),
    )
    assert found["sets"].header == ("", "speedup", "ties")
    assert found["sets"].rows == (("a", "1.5", ""), ("b", "", "0"))
    console = rich.console.Console(record=True, width=100, file=io.StringIO())
    report.print_report(
        {
            "metrics": metrics,
            "recipe": "quick",
            "valid": False,
            "load": None,
            "max_load": 0.1,
        },
        console,
    )
    words = console.export_text()
    assert "[red]x" in words and "valid: false" in words and "quick" in words
