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


GOOD_STS = {"temperatures": [1.0, 1.0]}
HUGE, INF, NAN = 10**400, float("inf"), float("nan")
BAD_STS = [
    ("temperatures", {}),
    ("temperatures", {"temperatures": [1.0, 0.0]}),
    *(
        ("temperatures", {"temperatures": value})
        for value in ([], None, 1.0, "12", {"0": 1.0}, [[1.0]], ["1.0"], [True])
    ),
    *(("temperatures", {"temperatures": [value]}) for value in (NAN, INF, HUGE, None)),
    ("ece_before", GOOD_STS | {"ece_before": [0.1]}),
    ("ece_before", GOOD_STS | {"ece_before": None}),
    ("ece_after", GOOD_STS | {"ece_after": "0.1"}),
    *(
        ("num_samples", GOOD_STS | {"num_samples": value})
        for value in (None, "many", 1.5, -1, INF, [3], True)
    ),
    ("dataset", GOOD_STS | {"dataset": None}),
    *(("spec_jax", GOOD_STS | {"spec_jax": value}) for value in ([], "x", None, 3)),
    *(
        (f"spec_jax.{name}", GOOD_STS | {"spec_jax": {name: value}})
        for name in ("model", "drafter", "device", "sampling")
        for value in (None, 5, ["x"])
    ),
]
GOOD_FLAT = CostTable(FLAT).to_json()
GOOD_ADDITIVE = CostTable(ADDITIVE).to_json()


def flat(**changes):
    return GOOD_FLAT | changes


def additive(**changes):
    return GOOD_ADDITIVE | changes


def extras(**changes):
    return GOOD_FLAT | {"spec_jax": changes}


NO_LISTS = (None, 4, "4", {"4": 1}, ["4"], [None], [True], [NAN], [INF], [HUGE])
BAD_COST = [
    ("sample_batch_tokens", {}),
    *(("sample_batch_tokens", flat(sample_batch_tokens=v)) for v in ([], *NO_LISTS)),
    ("sample_batch_tokens", flat(sample_batch_tokens=[4, 4, 16])),
    ("sample_batch_tokens", flat(sample_batch_tokens=[-4, 4, 16])),
    *(("sample_steps_per_sec", flat(sample_steps_per_sec=v)) for v in ([], *NO_LISTS)),
    ("sample_steps_per_sec", flat(sample_steps_per_sec=[1.0, 2.0])),
    ("max_batch_tokens", flat(max_batch_tokens=15)),
    *(
        ("max_batch_tokens", flat(max_batch_tokens=v))
        for v in ("x", None, 16.5, INF, [32])
    ),
    *(
        ("bias_seconds", additive(bias_seconds=v))
        for v in (0.0, -1.0, None, "x", INF, NAN, HUGE, [1.0])
    ),
    *(
        (name, additive(**{name: v}))
        for name in ("bs_probes", "m_probes", "alpha_seconds", "theta_seconds")
        for v in ([], *NO_LISTS)
    ),
    ("theta_seconds", additive(theta_seconds=[0.0])),
    ("m_probes", additive(m_probes=[2, 2.5, 16])),
    ("positive", additive(alpha_seconds=[-1.0, 0.0])),
    *(("spec_jax", GOOD_FLAT | {"spec_jax": v}) for v in ([], "x", None, 3)),
    *(
        ("spec_jax.ladder", extras(ladder=v))
        for v in (
            None,
            3,
            "ab",
            [3],
            ["ab"],
            [[1]],
            [[1, 2]],
            [[1, ["2"]]],
            [[1, [2.5]]],
            [[INF, [2]]],
            [[0, [2]]],
            [[1, [2], 3]],
        )
    ),
    *(("spec_jax.num_draft", extras(num_draft=v)) for v in (None, "3", 2.5, INF)),
    ("spec_jax.model", extras(model=3)),
    *(("plain_requests", extras(plain_requests=v)) for v in ("12", 3, [1.5], [INF])),
    ("plain_requests", extras(plain_seconds=[1.0])),
    ("plain_seconds", extras(plain_requests=[1], plain_seconds=["1"])),
]


@pytest.mark.parametrize(("field", "data"), BAD_STS)
def test_bad_sts_is_refused(field, data):
    with pytest.raises(UserError, match=rf"sts\.{field}"):
        calibration.sts_from_json(data)


@pytest.mark.parametrize(("field", "data"), BAD_COST)
def test_bad_cost_is_refused(field, data):
    with pytest.raises(UserError, match=rf"cost\..*{field}"):
        calibration.cost_from_json(data)


def test_a_table_of_its_samples_alone_ends_with_the_last():
    bare = {k: v for k, v in GOOD_FLAT.items() if k != "max_batch_tokens"}
    assert calibration.cost_from_json(bare).cost.max_batch_tokens == 16


def test_unreadable_files_are_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(UserError, match="cannot be read"):
        calibration.read_sts(str(path))
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        calibration.read_cost(str(path))
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="not JSON"):
        calibration.read_cost(str(path))
    path.write_bytes(b'{"temperatures": "\xff"}')
    with pytest.raises(UserError, match="not JSON"):
        calibration.read_sts(str(path))
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
