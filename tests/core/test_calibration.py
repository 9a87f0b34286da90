"""STS and cost tables: the JSON forms, the lookups, what is refused."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from spec_jax.core import calibration
from spec_jax.core.calibration import AdditiveCost, CostTable, FlatCost, Source
from spec_jax.core.errors import UserError

LADDER = ((1, (2, 4)), (4, (4, 8, 16)))
SOURCE = Source(model="t-1", drafter="d-1", device="cpu", sampling="greedy")
TABLE_SOURCE = Source(
    model="t-1", drafter="d-1", device="cpu", num_draft=3, ladder=LADDER
)
STS = calibration.STS(
    temperatures=(1.5, 0.5, 2.0),
    dataset="gsm8k greedy",
    num_samples=100,
    ece_before=(0.1, 0.2, 0.3),
    ece_after=(0.01, 0.02, 0.03),
    source=SOURCE,
)
FLAT = FlatCost((4, 8, 16), (100.0, 50.0, 40.0), 32)
ADDITIVE = AdditiveCost(0.01, (1, 4), (0.0, 0.003), (2, 6, 16), (0.0, 0.004, 0.02))


def test_sts_round_trip(tmp_path):
    path = str(tmp_path / "deep" / "sts.json")
    calibration.write(STS, path)
    assert calibration.read_sts(path) == STS
    data = json.loads(pathlib.Path(path).read_text())
    assert set(data) == {
        "temperatures",
        "dataset",
        "num_samples",
        "ece_before",
        "ece_after",
        "spec_jax",
    }
    # A file of another program: its fields alone.
    bare = calibration.sts_from_json({"temperatures": [1, 2.5]})
    assert bare.temperatures == (1.0, 2.5) and bare.source is None
    assert calibration.identity_sts(4).temperatures == (1.0,) * 4


@pytest.mark.parametrize("cost", [FLAT, ADDITIVE])
def test_cost_round_trip(tmp_path, cost):
    table = CostTable(cost, (1, 4), (0.005, 0.006), TABLE_SOURCE)
    path = str(tmp_path / "cost.json")
    calibration.write(table, path)
    assert calibration.read_cost(path) == table
    data = json.loads(pathlib.Path(path).read_text())
    extras = data.pop("spec_jax")
    assert extras["ladder"] == [[1, [2, 4]], [4, [4, 8, 16]]]
    assert set(data) == {f.name for f in dataclasses.fields(cost)}
    assert ("bias_seconds" in data) == isinstance(cost, AdditiveCost)
    bare = calibration.cost_from_json(data)
    assert bare.cost == cost and bare.source is None
    assert bare.plain_time(3) is None
    assert table.plain_time(1) == 0.005 and table.plain_time(100) == 0.006
    assert table.plain_time(2.5) == pytest.approx(0.0055)


def test_flat_takes_the_floor_sample():
    table = CostTable(FLAT)
    rows = np.array([1, 4, 7, 8, 15, 16, 31, 32, 1000])
    steps = np.array([100, 100, 100, 50, 50, 40, 40, 40, 40.0])
    np.testing.assert_allclose(table.round_time(1, rows), 1 / steps)
    assert table.round_time(1, 9) == table.round_time(64, 9) == 1 / 50


def test_additive_interpolates_and_clamps():
    table = CostTable(ADDITIVE)
    assert table.round_time(1, 2) == pytest.approx(0.01)
    assert table.round_time(2, 4) == pytest.approx(0.01 + 0.001 + 0.002)
    assert table.round_time(4, 11) == pytest.approx(0.01 + 0.003 + 0.012)
    assert table.round_time(99, 99) == pytest.approx(0.01 + 0.003 + 0.02)
    assert table.round_time(0, 0) == pytest.approx(0.01)


BAD_STS = {
    "missing": {},
    "temperatures": {"temperatures": [1.0, 0.0]},
    "nan": {"temperatures": [float("nan")]},
    "text": {"temperatures": ["1.0"]},
    "ece_before": {"temperatures": [1.0, 1.0], "ece_before": [0.1]},
}
GOOD_FLAT = CostTable(FLAT).to_json()
GOOD_ADDITIVE = CostTable(ADDITIVE).to_json()
BAD_COST = {
    "sample_batch_tokens": GOOD_FLAT | {"sample_batch_tokens": [4, 4, 16]},
    "sample_steps_per_sec": GOOD_FLAT | {"sample_steps_per_sec": [1.0, 2.0]},
    "max_batch_tokens": GOOD_FLAT | {"max_batch_tokens": 15},
    "bias_seconds": GOOD_ADDITIVE | {"bias_seconds": 0.0},
    "theta_seconds": GOOD_ADDITIVE | {"theta_seconds": [0.0]},
    "m_probes": GOOD_ADDITIVE | {"m_probes": [2, 2.5, 16]},
    "positive": GOOD_ADDITIVE | {"alpha_seconds": [-1.0, 0.0]},
}


@pytest.mark.parametrize("name", BAD_STS)
def test_bad_sts_is_refused(name):
    with pytest.raises(UserError, match="sts"):
        calibration.sts_from_json(BAD_STS[name])


@pytest.mark.parametrize("name", BAD_COST)
def test_bad_cost_is_refused(name):
    with pytest.raises(UserError, match=name):
        calibration.cost_from_json(BAD_COST[name])


def test_unreadable_files_are_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(UserError, match="cannot be read"):
        calibration.read_sts(str(path))
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        calibration.read_cost(str(path))
    path.write_text("[1]")
    with pytest.raises(UserError, match="one JSON object"):
        calibration.read_cost(str(path))


def test_sts_of_something_else_is_refused():
    good = {"model": "t-1", "drafter": "d-1", "device": "cpu", "sampling": "greedy"}
    assert STS.check(3, **good) is STS
    with pytest.raises(UserError, match="3 temperatures.*4 drafts"):
        STS.check(4, **good)
    for name in good:
        with pytest.raises(UserError, match=f"STS file.*{name}"):
            STS.check(3, **(good | {name: "other"}))
    bare = calibration.identity_sts(3)
    with pytest.raises(UserError, match="does not say which model"):
        bare.check(3, **good)
    assert bare.check(3, **good, allow_unmarked=True) is bare


def test_cost_table_of_something_else_is_refused():
    table = CostTable(FLAT, source=TABLE_SOURCE)
    good = {
        "model": "t-1",
        "drafter": "d-1",
        "device": "cpu",
        "num_draft": 3,
        "ladder": LADDER,
    }
    assert table.check(**good) is table
    others = {"num_draft": 4, "ladder": LADDER[1:]}
    for name in good:
        with pytest.raises(UserError, match=f"cost table.*{name}"):
            table.check(**(good | {name: others.get(name, "other")}))
    with pytest.raises(UserError, match="does not say which model"):
        CostTable(FLAT).check(**good)
