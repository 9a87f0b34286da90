"""What is read from a training's own records, and up to which step."""

import json

import pytest

from spec_jax.evals import teacher_forced

# Two drafts, two bins: |0.9 - 0.7| * 0.5 + |0.1 - 0.1| * 0.5, and |0.5 - 0.1| * 1.
CALIBRATION = {
    "calibration_confidence": [[0.9, 0.1], [0.5, 0.0]],
    "calibration_accept": [[0.7, 0.1], [0.1, 0.0]],
    "calibration_share": [[0.5, 0.5], [1.0, 0.0]],
}


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def trained(step, **metrics):
    return {"kind": "train", "step": step, "metrics": metrics}


def test_the_record_of_the_kept_weights_is_read_by_draft(tmp_path):
    file = write(
        tmp_path / "metrics.jsonl",
        trained(10, acc=0.1),
        trained(
            20,
            acc=0.5,
            acc_1=0.6,
            acc_2=0.4,
            acc_10=0.1,
            overlap_1=0.7,
            accept_length=1.8,
            selector_coverage=0.9,
            **CALIBRATION,
        ),
        {"kind": "eval", "step": 20, "metric": 1.7},
        trained(25),  # all its steps were skipped
        trained(30, acc=0.9),
    )
    found = teacher_forced.read(file, step=25)
    assert found.pop("ece_by_position") == pytest.approx([0.1, 0.4])
    assert found == {
        "step": 20,
        "acc": 0.5,
        "accept_length": 1.8,
        "selector_coverage": 0.9,
        "acc_by_position": [0.6, 0.4, 0.1],
        "overlap_by_position": [0.7],
    }
    assert teacher_forced.read(file) == {"step": 30, "acc": 0.9}


def test_nothing_recorded_is_nothing_said(tmp_path):
    assert teacher_forced.read(tmp_path / "absent.jsonl") == {}
    assert teacher_forced.read(write(tmp_path / "m", trained(10, acc=1.0)), 9) == {}
