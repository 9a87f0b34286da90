"""Batches: seeded order, exact resume in a fresh process, fresh buffers."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.data.pipeline import Pipeline, PipelineOptions, read_batch
from spec_jax.data.store import open_store
from spec_jax.data.store.arrays import shard_file


@pytest.fixture
def store(store_path):
    return open_store(store_path)


def options(**changes):
    return PipelineOptions(**{"batch_size": 4, "seq_len": 48, "seed": 3} | changes)


def content(batch):
    return [np.asarray(array).tobytes() for array in jax.tree.leaves(batch)]


def test_a_batch_is_the_samples_padded(store, tiny):
    pipeline = Pipeline(store, options())
    ids = pipeline.ids_at(0)
    batch = next(pipeline)
    made = tiny.samples(20)
    assert batch.tokens_BS.shape == (4, 48) and batch.tokens_BS.dtype == np.int32
    assert batch.features_BSLD.shape == (4, 48, 2, 16) and batch.teacher_BSD is None
    for row, index in enumerate(ids):
        sample, size = made[index], len(made[index].tokens)
        assert batch.length_B[row] == size
        assert batch.tokens_BS[row, :size].tolist() == list(sample.tokens)
        supervised = np.flatnonzero(batch.supervised_BS[row])
        assert supervised.tolist() == list(range(sample.prompt_len, size))
        read = store.read_sample(int(index))["features"]
        np.testing.assert_array_equal(batch.features_BSLD[row, :size], read)
        assert not batch.features_BSLD[row, size:].any()
        assert not batch.tokens_BS[row, size:].any()
    pipeline.close()


def test_the_teacher_comes_along(tmp_path, tiny):
    schema = type(tiny.schema)((0, 1), 16, teacher=True)
    tiny.capture(tmp_path / "s", tiny.samples(4), schema, "bfloat16")
    store = open_store(str(tmp_path / "s"))
    batch = read_batch(store, [2, 0], 48)
    assert batch.teacher_BSD.shape == (2, 48, 16)
    assert batch.teacher_BSD.dtype == batch.features_BSLD.dtype == jnp.bfloat16
    read = store.read_sample(0)
    np.testing.assert_array_equal(
        batch.teacher_BSD[1, : len(read["tokens"])], read["teacher"]
    )


def test_a_drafter_reads_the_planes_it_needs(tmp_path, tiny):
    schema = dataclasses.replace(tiny.schema, teacher=True)
    tiny.capture(str(tmp_path / "both"), tiny.samples(8), schema)
    store = open_store(str(tmp_path / "both"))
    everything = read_batch(store, [1, 2], 48)
    one = Pipeline(store, options(), needs=FeatureSchema((1,), 16))
    batch = read_batch(store, [1, 2], 48, one.needs)
    np.testing.assert_array_equal(
        batch.features_BSLD, everything.features_BSLD[:, :, 1:]
    )
    assert batch.teacher_BSD is None
    alone = read_batch(store, [1, 2], 48, FeatureSchema((), 16, teacher=True))
    assert alone.features_BSLD.shape == (2, 48, 0, 16)
    np.testing.assert_array_equal(alone.teacher_BSD, everything.teacher_BSD)
    with pytest.raises(UserError, match="lacks layer 2.*capture.layer_ids"):
        Pipeline(store, options(), needs=FeatureSchema((1, 2), 16))


def test_a_store_without_teacher_is_refused(store):
    with pytest.raises(UserError, match="teacher.*capture.teacher=True"):
        Pipeline(store, options(), needs=FeatureSchema((0,), 16, teacher=True))


def test_each_epoch_has_every_sample_once_in_its_own_order(store):
    pipeline = Pipeline(store, options(num_epochs=3))
    epochs = [
        np.concatenate([pipeline.ids_at(5 * e + i) for i in range(5)]) for e in range(3)
    ]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(pipeline) == 15 and sum(1 for _ in pipeline) == 15
    pipeline.close()
    other = Pipeline(store, options(seed=4))
    assert all(other.hash_at(i) != pipeline.hash_at(i) for i in range(5))
    other.close()


def test_without_shuffle_the_order_is_the_stores(store):
    pipeline = Pipeline(store, options(shuffle=False, num_epochs=1, batch_size=8))
    found = [pipeline.ids_at(i).tolist() for i in range(len(pipeline))]
    assert found == [list(range(8)), list(range(8, 16))]  # the remainder is dropped
    pipeline.close()


@pytest.mark.parametrize("step", [0, 1, 3, 7])  # 5 batches are an epoch
def test_resume_in_a_fresh_iterator_goes_on_exactly(store, step):
    whole = Pipeline(store, options())
    expected = [content(next(whole)) for _ in range(10)]
    first = Pipeline(store, options())
    for _ in range(step):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    resumed = Pipeline(store, options())
    resumed.set_state(state)
    assert resumed.step == step
    assert [content(next(resumed)) for _ in range(10 - step)] == expected[step:]
    resumed.set_state(state)  # going back, too
    assert content(next(resumed)) == expected[step]
    for pipeline in (whole, first, resumed):
        pipeline.close()


def test_resume_in_a_fresh_process_in_the_second_epoch(store, store_path, tmp_path):
    pipeline = Pipeline(store, options())
    for _ in range(7):
        next(pipeline)
    state = tmp_path / "state.json"
    state.write_text(json.dumps(pipeline.get_state()))
    expected = [next(pipeline) for _ in range(4)]
    pipeline.close()
    script = f"""
        import hashlib, json, sys
        from spec_jax.data.pipeline import Pipeline, PipelineOptions
        from spec_jax.data.store import open_store
        options = PipelineOptions(batch_size=4, seq_len=48, seed=3)
        pipeline = Pipeline(open_store({store_path!r}), options)
        pipeline.set_state(json.load(open({str(state)!r})))
        for step in range(7, 11):
            batch = next(pipeline)
            digest = hashlib.sha256(batch.tokens_BS.tobytes())
            digest.update(batch.features_BSLD.tobytes())
            print(pipeline.hash_at(step), digest.hexdigest())
        pipeline.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = []
    for step, batch in zip(range(7, 11), expected, strict=True):
        digest = hashlib.sha256(batch.tokens_BS.tobytes())
        digest.update(batch.features_BSLD.tobytes())
        lines.append(f"{pipeline.hash_at(step)} {digest.hexdigest()}")
    assert done.stdout.split("\n")[:-1] == lines


def test_a_state_of_other_data_or_another_order_is_refused(store, tmp_path, tiny):
    first = Pipeline(store, options())
    next(first)
    state = first.get_state()
    first.close()

    def refuse(pipeline, sentence, state=state):
        with pytest.raises(UserError, match=sentence):
            pipeline.set_state(state)
        assert pipeline.step == 0
        pipeline.close()

    refuse(Pipeline(store, options(seed=4)), "its seed is 3, this pipeline's is 4")
    refuse(Pipeline(store, options(batch_size=2)), "batch_size is 4")
    refuse(Pipeline(store, options(), indices=range(19)), "num_samples is 20")
    tiny.capture(tmp_path / "s", tiny.samples(20, seed=1))
    refuse(Pipeline(open_store(str(tmp_path / "s")), options()), "samples_sha256")
    refuse(Pipeline(store, options()), "num_samples is None", state={})
    refuse(Pipeline(store, options()), "step -1", state={**state, "step": -1})


def test_batches_are_fresh_buffers(store):
    pipeline = Pipeline(store, options())
    batches = [next(pipeline) for _ in range(8)]
    kept = [content(batch) for batch in batches]
    arrays = [a for batch in batches for a in jax.tree.leaves(batch)]
    for i, one in enumerate(arrays):
        assert one.flags.owndata and one.flags.c_contiguous
        assert not any(np.shares_memory(one, other) for other in arrays[:i])
    # What was handed to JAX stays what it was while later batches are made.
    on_device = [jax.device_put(batch) for batch in batches]
    for _ in range(8):
        next(pipeline)
    assert [content(batch) for batch in on_device] == kept
    pipeline.close()


def test_processes_share_a_global_batch_and_may_change_in_number(store):
    def run(num_processes, state=None, steps=3):
        parts, states = [], []
        for process in range(num_processes):
            pipeline = Pipeline(
                store, options(), process=process, num_processes=num_processes
            )
            if state is not None:
                pipeline.set_state(state)
            parts.append([next(pipeline).tokens_BS for _ in range(steps)])
            states.append(pipeline.get_state())
            pipeline.close()
        assert all(found == states[0] for found in states)
        return [np.concatenate(rows) for rows in zip(*parts, strict=True)], states[0]

    alone, _ = run(1, steps=6)
    two, state = run(2)
    four, _ = run(4, state)
    np.testing.assert_array_equal(two + four, alone)
    with pytest.raises(UserError, match=r"multiple of the 3 processes"):
        Pipeline(store, options(), num_processes=3)


def test_what_is_left_out_is_counted(store, tiny):
    made = tiny.samples(20)
    long = [i for i, s in enumerate(made) if len(s.tokens) > 30]
    assert long
    pipeline = Pipeline(store, options(seq_len=30, max_dropped=1.0))
    assert pipeline.dropped == {"longer than train.seq_len=30": len(long)}
    assert pipeline.kept == [i for i in range(20) if i not in long]
    pipeline.close()
    with pytest.raises(UserError, match=rf"{len(long)} of 20 .*seq_len=30.*1.0%"):
        Pipeline(store, options(seq_len=30))
    pipeline = Pipeline(store, options(keep_looping=False))
    assert pipeline.dropped == {"looping": 4} and 4 not in pipeline.kept
    pipeline.close()
    with pytest.raises(UserError, match=r"none of 1 samples is left"):
        Pipeline(store, options(keep_looping=False), indices=[4])
    with pytest.raises(UserError, match=r"fewer than 99 supervised"):
        Pipeline(store, options(min_supervised=99))


def test_bad_options_are_refused(store):
    said = {"batch_size": "train.batch", "seq_len": "train.seq_len"}
    for name in ("batch_size", "seq_len", "prefetch", "num_threads"):
        with pytest.raises(UserError, match=f"^{said.get(name, name)}=0"):
            options(**{name: 0})
    with pytest.raises(UserError, match=r"num_epochs=0"):
        options(num_epochs=0)
    with pytest.raises(UserError, match=r"train.batch=40 is more than the 20"):
        Pipeline(store, options(batch_size=40, num_epochs=1))
    with pytest.raises(UserError, match=r"indices lie in .-1, 3."):
        Pipeline(store, options(), indices=[3, -1])
    with pytest.raises(UserError, match=r"more than train.seq_len=4"):
        read_batch(store, [0], 4)


def test_a_torn_shard_stops_the_iteration_with_the_sample(store_path, tmp_path):
    path = str(tmp_path / "copy")
    shutil.copytree(store_path, path)
    with open(os.path.join(path, shard_file("features", 1)), "r+b") as file:
        file.seek(999)
        byte = file.read(1)
        file.seek(999)
        file.write(bytes([byte[0] ^ 1]))
    pipeline = Pipeline(open_store(path), options())
    with pytest.raises(UserError, match=r"shard 1"):
        for _ in range(5):
            next(pipeline)
    pipeline.close()
