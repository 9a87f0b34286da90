"""Workload files: what is read, and one sentence for what cannot be."""

import dataclasses
import json
import pathlib

import pytest

from spec_jax.core.errors import UserError
from spec_jax.data import workload
from spec_jax.decode.request import Settings

ROOT = pathlib.Path(__file__).resolve().parents[2]


def write(path, *rows):
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows)
    path.write_text(text + "\n", "utf-8")
    return str(path)


def test_requests_come_by_arrival_with_what_the_line_says(tmp_path):
    path = write(
        tmp_path / "w.jsonl",
        {"id": "b", "arrival": 2, "question": "w6\u2028w7", "stop": "x", "seed": 4},
        "",
        {"arrival": 0.5, "prompt": "w8", "temperature": 1, "speculate": False},
        {"id": 7, "arrival": 2.0, "turns": ["w9", "w10"], "stop": ["a", "b"]},
        {
            "id": "i",
            "arrival": 0,
            "instruction": "w11",
            "instances": [{"input": "w12"}],
            "top_p": None,
            "max_new_tokens": 5,
            "logit_bias": {"17": -2.5, "8": 1},
            "stop_ids": [7, 9],
            "ignore_eos": True,
        },
    )
    items = workload.read_workload(path)
    assert [(i.name, i.arrival) for i in items] == [
        ("i", 0.0),
        ("3", 0.5),
        ("b", 2.0),
        ("7", 2.0),
    ]
    assert [i.prompt.messages[0]["content"] for i in items] == [
        "w11\n\nw12",
        "w8",
        "w6\u2028w7",
        "w9",
    ]
    assert items[0].settings == (
        ("max_new_tokens", 5),
        ("stop_ids", (7, 9)),
        ("ignore_eos", True),
        ("logit_bias", ((17, -2.5), (8, 1.0))),
    )
    assert items[1].settings == (("temperature", 1.0), ("speculate", False))
    assert items[2].settings == (("seed", 4),)
    assert [i.stop for i in items] == [(), (), ("x",), ("a", "b")]
    assert items[2].prompt.source == "w.jsonl:1"


def test_a_line_can_say_whatever_a_request_can_be_asked():
    """All of `Settings` but the features, which no record has room for."""
    fields = {f.name for f in dataclasses.fields(Settings)}
    assert {*workload.SETTINGS, "stop"} == fields - {"features"}


GOOD = {"arrival": 0.0, "prompt": "w6"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", ["w.jsonl:2", "not JSON"]),
        ("[1]", ["w.jsonl:2", "list", "JSON object"]),
        ({"prompt": "w6"}, ["w.jsonl:2", "no field 'arrival'", "seconds"]),
        ({"arrival": 0}, ["w.jsonl:2", "none of the fields prompt", "'arrival'"]),
        ({**GOOD, "prompt": " "}, ["workload: line w.jsonl:2", "empty prompt"]),
        ({**GOOD, "arrival": -0.5}, ["arrival=-0.5", "0 or more"]),
        ({**GOOD, "arrival": float("inf")}, ["arrival=inf", "0 or more"]),
        ({**GOOD, "arrival": float("nan")}, ["arrival=nan", "0 or more"]),
        ({**GOOD, "arrival": "soon"}, ["arrival='soon'", "a number"]),
        ({**GOOD, "arrival": True}, ["arrival=True", "a number"]),
        ({**GOOD, "seed": 1.5}, ["seed=1.5", "a whole number"]),
        ({**GOOD, "seed": True}, ["seed=True", "a whole number"]),
        ({**GOOD, "logit_bias": [1]}, ["logit_bias=[1]", "an object"]),
        ({**GOOD, "logit_bias": {"a": 1}}, ["logit_bias={'a': 1}", '{"17": -2.5}']),
        ({**GOOD, "speculate": 1}, ["speculate=1", "true or false"]),
        ({**GOOD, "ignore_eos": "no"}, ["ignore_eos='no'", "true or false"]),
        ({**GOOD, "stop_ids": 7}, ["stop_ids=7", "a list of token ids"]),
        ({**GOOD, "stop_ids": [7, "8"]}, ["stop_ids=[7, '8']", "a list of token ids"]),
        ({**GOOD, "stop_ids": [True]}, ["stop_ids=[True]", "a list of token ids"]),
        ({**GOOD, "stop": ["a", ""]}, ["stop=['a', '']", "none of them empty"]),
        ({**GOOD, "stop": 3}, ["stop=3", "list of texts"]),
        ({**GOOD, "id": None}, ["id=None", "text or a whole number"]),
        ({**GOOD, "id": "1"}, ["id='1'", "line w.jsonl:1", "its own"]),
        ({**GOOD, "temprature": 1}, ["'temprature'", "did you mean 'temperature'?"]),
        ({**GOOD, "zzz": 1}, ["unknown field 'zzz'", "remove it"]),
    ],
)
def test_a_wrong_line_is_one_sentence(tmp_path, row, words):
    path = write(tmp_path / "w.jsonl", GOOD, row)
    with pytest.raises(UserError) as caught:
        workload.read_workload(path)
    text = str(caught.value)
    assert "\n" not in text and text.startswith("workload")
    for word in words:
        assert word in text


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        workload.read_workload(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="holds no request"):
        workload.read_workload(write(tmp_path / "e.jsonl", ""))


def test_the_projects_own_workload_is_mixed():
    items = workload.read_workload(str(ROOT / "configs/workloads/mixed.jsonl"))
    kinds = {i.name.split("-")[0] for i in items}
    assert kinds == {"maths", "chat", "long"} and len(items) == 24
    assert items[0].arrival == 0 and items[-1].arrival > items[0].arrival
    temperatures = {dict(i.settings).get("temperature") for i in items}
    assert None in temperatures and len(temperatures) > 1
    assert any(dict(i.settings).get("speculate") is False for i in items)
    assert any(i.stop for i in items)
    longest = max(len(i.prompt.messages[0]["content"]) for i in items)
    assert longest > 1200
