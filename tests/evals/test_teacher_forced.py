"""What is read from a training's own records, and what unseen texts say."""

import functools
import json

import jax
import numpy as np
import pytest

from spec_jax.core.batch import Batch
from spec_jax.data import capture
from spec_jax.drafters import base
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import teacher_forced
from tests.support import drafting, served

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


# ---- Texts that were never trained on.

TEXTS = [([1, 3, 6, 7], [8, 6, 9, 6, 6, 13]), ([1, 3, 9], [6, 6, 15, 9, 17])]


def by_hand(target, drafter, params, frozen):
    """Hits and labels of each draft, after every anchor of every answer."""
    programs = drafting.Programs(drafter)
    hits = np.zeros((drafter.layout.num_draft, 2))
    for prompt, answer in TEXTS:
        tokens = np.array([prompt + answer], np.int32)
        size = tokens.shape[1]
        anchors = np.arange(len(prompt), size - 1)
        features, teacher, *_ = capture.forward_rows(
            target.spec, target.params, tokens, np.array([size]), (0,), True, "float32"
        )
        batch = Batch(tokens, tokens > 0, np.array([size]), features, teacher)
        repeat = functools.partial(np.repeat, repeats=len(anchors), axis=0)
        each = jax.tree.map(repeat, batch)
        made, _ = programs.serve(params, frozen, each, anchors, [16], 16, 32)
        for drafts, anchor in zip(np.asarray(made.tokens_BM), anchors, strict=True):
            labels = tokens[0, anchor + 1 :][: len(drafts)]
            hits[: len(labels), 0] += drafts[: len(labels)] == labels
            hits[: len(labels), 1] += 1
    return hits


def test_texts_are_judged_by_what_would_be_drafted_after_their_own_tokens():
    target = served.make_target()
    drafter = base.load(
        "dflash",
        {
            "num_layers": 1,
            "num_draft": 3,
            "mask_id": served.MASK,
            "num_anchors": 16,
            "layer_ids": (0,),
        },
        target.spec,
    )
    params = drafting.stir(drafter.init(jax.random.key(0)), scale=0.3)
    frozen = frozen_from_params(target.params)
    found = teacher_forced.measure(target, drafter, params, frozen, TEXTS)
    hits = by_hand(target, drafter, params, frozen)
    assert hits[:, 1].min() > 0 and 0 < hits[:, 0].sum() < hits[:, 1].sum()
    assert found["acc_by_position"] == pytest.approx(hits[:, 0] / hits[:, 1])
    assert found["acc"] == pytest.approx(hits[:, 0].sum() / hits[:, 1].sum())


def test_without_weights_or_answers_there_is_nothing_to_say():
    target = served.make_target()
    frozen = frozen_from_params(target.params)
    lookup = base.load("lookup", {}, target.spec)
    assert teacher_forced.measure(target, lookup, {}, frozen, TEXTS) == {}
    drafter = base.load("dflash", {"mask_id": served.MASK}, target.spec)
    params = drafter.init(jax.random.key(0))
    assert teacher_forced.measure(target, drafter, params, frozen, [([1], [])]) == {}
