"""The whole walk in process, from prompts to a report: once through, and killed.

A tiny target and eight steps of training; what is timed is not run.
"""

import functools
import json

import pytest

from experiments import pipeline, preparing, serving, session, synthesis, training
from spec_jax.config import schema
from spec_jax.data import recording
from spec_jax.export import writer
from spec_jax.train import checkpoint
from tests.support import served
from tests.support.files import all_files

# Of a report: all that does not depend on the clock or the machine.
FIGURES = (
    "weights_sha256",
    "accept_length",
    "accept_length_shuffled",
    "accept_by_position",
    "export_parity_max_abs",
    "loss_first",
    "loss_last",
    "train_positions",
    "train_steps",
    "best_step",
    "best_served_accept_length",
    "teacher_forced",
    "params",
    "draft_vocab_size",
    "draft_vocab_coverage",
    "unique_tokens",
    "train_samples",
    "looping_samples_left_out",
    "captured_while_generating",
)

# (part, module or class, name, call at which it dies): a group's features are not
# written; they are and its samples are not; the second checkpoint is not written; the
# folder is written and not in its place; the report is all that is missing.
KILLS = (
    ("recording", recording, "write_recorded", 1),
    ("synthesis", synthesis.sample_files, "write_chunk", 2),
    ("training", checkpoint.Checkpoints, "save", 2),
    ("export", writer.storage, "put_in_place", 1),
    ("evaluation", pipeline, "cost_split", 1),
)


class Killed(BaseException):
    pass


@pytest.fixture
def walk(tmp_path, monkeypatch):
    """Runs the recipe in a folder of that name and returns its report's figures."""
    target = served.make_target()
    monkeypatch.setattr(
        serving, "load_serving_target", lambda section: (target, target.params)
    )
    monkeypatch.setattr(preparing, "OFFLINE_SLOTS", 3)
    grouped = functools.partial(preparing.synthesise, group_size=4)
    monkeypatch.setattr(preparing, "synthesise", grouped)
    monkeypatch.setattr(pipeline, "cost_split", lambda *args: ({}, {}))
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": f"w{i} w{i + 1}"} for i in range(6, 17)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "num_layers": 1,
        "num_draft": 3,
        "num_anchors": 4,
        "layer_ids": (0,),
        "mask_id": served.MASK,
    }
    cfg = schema.Pipeline(
        data=schema.Data(
            prompts=str(file),
            num_synth_prompts=0,
            max_new_tokens=24,
            max_tokens=48,
            held_out=2,
            looping="cut",
        ),
        drafter=schema.Drafter("dflash", tuple(options.items()), draft_vocab=64),
        train=schema.Train(
            steps=8,
            batch=2,
            seq_len=48,
            log_every=2,
            eval_every=4,
            checkpoint_every=4,
            eval_prompts=1,
            eval_new_tokens=8,
        ),
        serve=schema.Serve(max_context=96, max_new_tokens=8, prefill_buckets=(16,)),
    )

    def run(name):
        found = session.run_task(pipeline, cfg, "walk", tmp_path / name)["metrics"]
        return {key: found[key] for key in FIGURES}

    return run


def killed(walk, monkeypatch, where, name, call):
    """Runs until that call of a function, which does not return."""
    right, calls = getattr(where, name), []

    def dies(*args, **options):
        calls.append(name)
        if len(calls) == call:
            raise Killed
        return right(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, dies)
        with pytest.raises(Killed):
            walk("killed")


def test_a_run_that_is_killed_in_every_part_ends_as_one_that_was_not(
    walk, tmp_path, monkeypatch, capsys
):
    whole = walk("whole")
    assert whole["train_steps"] == 8 and whole["captured_while_generating"]
    assert 0 < whole["draft_vocab_size"] < 64 and whole["draft_vocab_coverage"] == 1.0
    assert "drafter.draft_vocab=64: the answers hold" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "main", None)
        assert walk("whole") == whole
    assert "all is done since" in capsys.readouterr().out
    for _, *where in KILLS:
        killed(walk, monkeypatch, *where)
        assert not (tmp_path / "killed" / "report.json").exists()
    # Only the report is missing: no text, feature or step is made again.
    monkeypatch.setattr(synthesis.sample_files, "write_chunk", None)
    monkeypatch.setattr(recording, "write_recorded", None)
    monkeypatch.setattr(training.loop, "make_train_step", lambda *a, **k: None)
    assert walk("killed") == whole
    for part in ("store", "samples/answers", "export"):
        ours, theirs = (all_files(tmp_path / run / part) for run in ("killed", "whole"))
        assert ours == theirs, part
