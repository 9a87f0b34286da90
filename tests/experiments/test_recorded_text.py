"""Features that are kept while answers are generated: the store that they make."""

import dataclasses
import functools
import hashlib
import json
import shutil

import numpy as np
import pytest

from experiments import clock, preparing, synthesis
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.data import recording
from spec_jax.data.samples import make_sample
from spec_jax.data.store import open_store
from tests.support import served, tiny
from tests.support.files import all_files

GROUP = 4


@pytest.fixture(scope="module")
def target():
    return served.make_target()


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    monkeypatch.setattr(preparing, "OFFLINE_SLOTS", 3)
    grouped = functools.partial(preparing.synthesise, group_size=GROUP)
    monkeypatch.setattr(preparing, "synthesise", grouped)


def recipe(folder, **data):
    file = folder / "p.jsonl"
    rows = [{"prompt": f"w{i} w{i + 1}"} for i in range(6, 17)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {
        "prompts": str(file),
        "num_synth_prompts": 0,
        "max_new_tokens": 24,
        "max_tokens": 48,
        "held_out": 1,
        "greedy_share": 0.5,
        "looping": "cut",
    } | data
    return schema.Pipeline(
        data=schema.Data(**fields),
        capture=schema.Capture(dtype="float32", batch=2, shard_samples=GROUP),
        train=schema.Train(eval_prompts=1),
        serve=schema.Serve(max_context=96, max_new_tokens=8, prefill_buckets=(16,)),
    )


def prepare(cfg, target, folder):
    drafter = tiny.dflash(target.spec, 3)
    folder.mkdir(exist_ok=True)
    return preparing.prepare(
        cfg, target, target.params, served.MASK, folder, drafter
    ), drafter


def store_of(cfg, prepared, drafter, folder):
    contract = preparing.make_contract(cfg, prepared.target, drafter)
    seconds = clock.Clock(folder / clock.NAME)
    return preparing.capture(cfg, prepared, drafter, contract, seconds)


def test_they_are_those_of_a_forward_over_the_same_text(target, tmp_path):
    cfg = recipe(tmp_path)
    prepared, drafter = prepare(cfg, target, tmp_path / "run")
    assert prepared.made.recorded
    store = store_of(cfg, prepared, drafter, tmp_path / "run")
    made = prepared.made.train
    assert len(store) == len(made) > 2 * GROUP
    given = dataclasses.replace(prepared.made, recorded=False)
    after = store_of(
        cfg,
        dataclasses.replace(prepared, made=given, folder=tmp_path / "after"),
        drafter,
        tmp_path,
    )
    whole = 0
    for index, sample in enumerate(made):
        ours, theirs = store.read_sample(index), after.read_sample(index)
        assert ours["tokens"].tolist() == theirs["tokens"].tolist()
        assert ours["tokens"].tolist() == list(sample.tokens)
        np.testing.assert_array_equal(ours["supervised"], theirs["supervised"])
        np.testing.assert_allclose(
            ours["features"][:-1], theirs["features"][:-1], rtol=0, atol=2e-5
        )
        # The last token was drawn and not run, unless the answer was cut there.
        whole += not ours["features"][-1].any()
    assert whole > 0
    assert prepared.made.looping == len(made) - whole


@pytest.mark.parametrize("lost", ["chunk", "shard"])
def test_a_killed_run_goes_on_bit_for_bit(target, tmp_path, monkeypatch, lost):
    cfg = recipe(tmp_path)
    prepared, _ = prepare(cfg, target, tmp_path / "whole")

    # Between a group's features and its samples, or before both.
    module = synthesis.sample_files if lost == "chunk" else recording
    name = "write_chunk" if lost == "chunk" else "write_recorded"
    right, calls = getattr(module, name), []

    def dies(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return right(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, dies)
        with pytest.raises(Killed):
            prepare(cfg, target, tmp_path / "cut")
    written = open_store(str(tmp_path / "cut" / preparing.STORE), partial=True)
    chunks = sorted((tmp_path / "cut" / "samples" / "answers").glob("*.jsonl"))
    assert len(chunks) == 1
    assert len(written) > GROUP - 2 if lost == "chunk" else len(written) <= GROUP
    resumed, _ = prepare(cfg, target, tmp_path / "cut")
    assert resumed.made.recorded and resumed.made.train == prepared.made.train
    for part in (preparing.STORE, "samples/answers"):
        ours, theirs = (all_files(tmp_path / run / part) for run in ("cut", "whole"))
        assert ours == theirs


def test_a_finished_text_decodes_nothing_again(target, tmp_path, monkeypatch):
    cfg = recipe(tmp_path)
    prepared, _ = prepare(cfg, target, tmp_path / "run")
    monkeypatch.setattr(preparing.serving, "make_engine", None)
    again, _ = prepare(cfg, target, tmp_path / "run")
    assert again.made.train == prepared.made.train and again.made.recorded


def test_a_text_without_features_is_captured_afterwards(target, tmp_path):
    cfg = recipe(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    made = preparing.synthesise(cfg, target, target.params, served.MASK, folder)
    assert not made.recorded
    prepared, drafter = prepare(cfg, target, folder)
    assert not prepared.made.recorded and prepared.made.train == made.train
    store = store_of(cfg, prepared, drafter, folder)
    assert len(store) == len(made.train)
    assert store.read_sample(0)["features"][-1].any()


class Killed(BaseException):
    pass


def lookup_ran_first(cfg, target, folder):
    """A text that nobody kept features of."""
    folder.mkdir()
    preparing.synthesise(cfg, target, target.params, served.MASK, folder)


def torn_store_was_removed(cfg, target, folder):
    prepare(cfg, target, folder)
    shutil.rmtree(folder / preparing.STORE)


@pytest.mark.parametrize("before", [lookup_ran_first, torn_store_was_removed])
def test_the_same_command_resumes_after_a_capture(
    target, tmp_path, monkeypatch, before
):
    """Killed inside it, after it, and when all is there."""
    cfg, folder = recipe(tmp_path), tmp_path / "run"
    before(cfg, target, folder)
    right, calls = preparing.capture_lib.StoreWriter.write_shard, []

    def dies(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return right(*args)

    with monkeypatch.context() as patch:
        patch.setattr(preparing.capture_lib.StoreWriter, "write_shard", dies)
        with pytest.raises(Killed):
            store_of(cfg, *prepare(cfg, target, folder), folder)
    assert len(open_store(str(folder / preparing.STORE), partial=True)) == GROUP
    monkeypatch.setattr(preparing.serving, "make_engine", None)  # nothing is decoded
    seen = []
    for _ in range(3):
        prepared, drafter = prepare(cfg, target, folder)
        assert not prepared.made.recorded
        store = store_of(cfg, prepared, drafter, folder)
        assert len(store) == len(prepared.made.train)
        seen.append(all_files(folder / preparing.STORE))
    assert seen[0] == seen[1] == seen[2]
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copytree(folder / "samples", whole / "samples")
    store_of(cfg, *prepare(cfg, target, whole), whole)
    assert all_files(whole / preparing.STORE) == seen[0]


def forget_origin(store):
    """Makes a store one of before, whose index says neither origin nor facts."""
    path = store / "index.json"
    body = json.loads(path.read_text().split("\n")[1])
    assert body["layout"].pop("origin") and body["layout"].pop("facts")
    text = json.dumps(body, separators=(",", ":"))
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")


@pytest.mark.parametrize("captured", [False, True])
def test_a_store_of_before_goes_on(target, tmp_path, monkeypatch, captured):
    cfg, folder = recipe(tmp_path), tmp_path / "run"
    if captured:
        lookup_ran_first(cfg, target, folder)
    prepared, drafter = prepare(cfg, target, folder)
    store_of(cfg, prepared, drafter, folder)
    forget_origin(folder / preparing.STORE)
    monkeypatch.setattr(preparing.serving, "make_engine", None)
    again, _ = prepare(cfg, target, folder)
    assert again.made.recorded == prepared.made.recorded == (not captured)
    assert len(store_of(cfg, again, drafter, folder)) == len(again.made.train)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"looping": "drop"}, 'its data.looping is "cut", this run\'s is "drop"'),
        ({"max_tokens": 60}, "its data.max_tokens is 48, this run's is 60"),
    ],
)
def test_another_way_to_keep_the_text_is_refused(target, tmp_path, change, says):
    prepare(recipe(tmp_path), target, tmp_path / "run")
    with pytest.raises(UserError, match=f"cannot be continued: {says}"):
        prepare(recipe(tmp_path, **change), target, tmp_path / "run")


def test_other_batches_do_not_continue_a_capture(target, tmp_path):
    cfg, folder = recipe(tmp_path), tmp_path / "run"
    lookup_ran_first(cfg, target, folder)
    store_of(cfg, *prepare(cfg, target, folder), folder)
    capture = dataclasses.replace(cfg.capture, batch=3)
    other = dataclasses.replace(cfg, capture=capture)
    with pytest.raises(UserError, match=r"its capture\.batch is 2, this run's is 3"):
        store_of(other, *prepare(other, target, folder), folder)


def test_a_recording_without_room_is_refused_before_any_answer(
    target, tmp_path, monkeypatch
):
    """Of what is missing: a store that is complete needs none."""
    cfg, folder = recipe(tmp_path), tmp_path / "run"
    asked = []

    def check_disk(path, num_bytes):
        asked.append(num_bytes)
        if num_bytes:
            raise UserError(f"no room in {path}")

    with monkeypatch.context() as patch:
        patch.setattr(recording, "check_disk", check_disk)
        patch.setattr(preparing.serving, "make_engine", None)
        with pytest.raises(UserError, match="no room in .*store"):
            prepare(cfg, target, folder)
    assert not (folder / preparing.STORE).exists()
    prepare(cfg, target, folder)
    monkeypatch.setattr(recording, "check_disk", check_disk)
    prepare(cfg, target, folder)
    features = tiny.dflash(target.spec, 3).needs.num_layers * target.spec.hidden_size
    assert asked == [3 * GROUP * 48 * (4 * features + 8), 0]


@pytest.fixture
def writer(target, tmp_path):
    schema_ = FeatureSchema((0,), target.spec.hidden_size, teacher=True)
    contract = preparing.store_contract(
        preparing.make_contract(
            dataclasses.replace(
                recipe(tmp_path), capture=schema.Capture(dtype="float16")
            ),
            target,
            tiny.dflash(target.spec, 3),
        ),
        schema_,
    )
    with recording.open_recording(
        target,
        schema_,
        str(tmp_path / "store"),
        contract,
        "float16",
        num_shards=2,
        shard_tokens=64,
        made_from="a test",
    ) as opened:
        yield opened


def rows(target, count):
    rng = np.random.default_rng(count)
    width = target.spec.hidden_size
    return (
        rng.normal(size=(count, 1, width)).astype(np.float16),
        rng.normal(size=(count, width)).astype(np.float16),
    )


SAMPLES = [make_sample([6, 7, 8], [9, 10, 11], f"s{i}") for i in range(3)]


def test_one_sample_that_is_not_finite_is_left_out_and_two_stop(target, writer):
    given = [rows(target, 5) for _ in SAMPLES]
    given[1][0][2] = np.inf
    recording.write_recorded(writer, 0, SAMPLES, given, 6)
    assert writer.written[0]["skipped"] == {"not finite": ["s1"]}
    assert len(writer.written[0]["samples"]) == 2
    with pytest.raises(UserError, match="2 of 6 samples, s1 among them, are not fin"):
        recording.write_recorded(writer, 1, SAMPLES, given, 6)
    assert 1 not in writer.written


def test_missing_rows_and_constant_planes_are_refused(target, writer):
    with pytest.raises(UserError, match=r"6 tokens and features of 4 rows"):
        recording.write_recorded(writer, 0, SAMPLES[:1], [rows(target, 4)], 1)
    features, hidden = rows(target, 5)
    hidden[:] = 2.0
    with pytest.raises(UserError, match="the teacher hidden are all 2 in sample s0"):
        recording.write_recorded(writer, 0, SAMPLES[:1], [(features, hidden)], 1)
    assert not writer.written
