"""The feature store: what goes in comes out, and nothing else is believed."""

import dataclasses
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.data import store as lib
from spec_jax.data.store import Layout, StoredSample, StoreWriter, manifest, open_store
from spec_jax.data.store.arrays import shard_file

WIDTH = 16


def make_stored(count, seed=0, teacher=False, num_layers=2):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        size = int(rng.integers(3, 90))
        prompt_len = int(rng.integers(1, size))
        made.append(
            StoredSample(
                tokens=rng.integers(0, 200, size).astype(np.int32),
                supervised=np.arange(size) >= prompt_len,
                features=rng.standard_normal((size, num_layers, WIDTH), np.float32),
                source=f"made:{i}",
                prompt_len=prompt_len,
                looping=i % 2 == 1,
                teacher=rng.standard_normal((size, WIDTH), np.float32)
                if teacher
                else None,
            )
        )
    return made


def make_layout(samples, num_shards=1, dtype="float32", teacher=False):
    return Layout(
        schema=FeatureSchema((0, 1), WIDTH, teacher),
        dtype=dtype,
        shard_tokens=sum(len(s.tokens) for s in samples),
        num_shards=num_shards,
    )


def write_store(path, tiny, samples, num_shards=2, dtype="float32", teacher=False):
    layout = make_layout(samples, num_shards, dtype, teacher)
    contract = tiny.contract(layout.schema, feature_dtype=dtype)
    share = -(-len(samples) // num_shards)
    with StoreWriter(str(path), contract, layout) as writer:
        for index in range(num_shards):
            writer.write_shard(index, samples[index * share : (index + 1) * share])
    return contract, layout


def all_files(path):
    """Content of every file that readers look at."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            if name != ".lock":
                with open(full, "rb") as file:
                    found[os.path.relpath(full, path)] = file.read()
    return found


@pytest.mark.parametrize("dtype", lib.DTYPES)
@pytest.mark.parametrize("teacher", [False, True])
def test_round_trip_is_exact(tmp_path, tiny, dtype, teacher):
    made = make_stored(7, teacher=teacher)
    contract, _ = write_store(tmp_path / "s", tiny, made, dtype=dtype, teacher=teacher)
    store = open_store(str(tmp_path / "s"), contract, verify=True)
    assert len(store) == 7 and store.num_tokens == sum(len(s.tokens) for s in made)
    for index in np.random.default_rng(1).permutation(7):
        read, sample = store.read_sample(int(index)), made[index]
        assert read["features"].dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(read["tokens"], sample.tokens)
        np.testing.assert_array_equal(read["supervised"], sample.supervised)
        np.testing.assert_array_equal(read["features"], sample.features.astype(dtype))
        assert ("teacher" in read) == teacher
        if teacher:
            np.testing.assert_array_equal(read["teacher"], sample.teacher.astype(dtype))
        info = store.samples[index]
        assert (info.source, info.looping) == (sample.source, sample.looping)
        assert (info.prompt_len, info.length) == (sample.prompt_len, len(sample.tokens))
        assert info.num_supervised == sample.supervised.sum()


def test_few_objects_per_sample(tmp_path, tiny):
    made = make_stored(256)
    path = tmp_path / "s"
    write_store(path, tiny, made, num_shards=2)
    in_shards = [name for name in all_files(path) if "/c/" in name]
    assert len(in_shards) / len(made) <= 1 / 64


def test_plan_matches_the_files(tmp_path, tiny):
    schema = FeatureSchema((0, 1), WIDTH, True)
    assert lib.plan_bytes(10, schema, "bfloat16") == 10 * (3 * WIDTH * 2 + 8)
    made = make_stored(40, teacher=True)
    write_store(tmp_path / "s", tiny, made, num_shards=1, teacher=True)
    planned = lib.plan_bytes(sum(len(s.tokens) for s in made), schema, "float32")
    files = all_files(tmp_path / "s")
    found = sum(len(files[name]) for name in files if "/c/" in name)
    assert planned <= found <= 1.1 * planned


def test_more_than_the_free_disk_is_refused(tmp_path):
    lib.check_disk(str(tmp_path / "not" / "there"), 1)
    with pytest.raises(UserError, match=r"GB free"):
        lib.check_disk(str(tmp_path), 10**18)


def test_not_finite_after_the_cast_is_refused(tmp_path, tiny):
    made = make_stored(2)
    made[1].features[0, 0, 0] = 1e5  # finite in float32, not in float16
    write_store(tmp_path / "wide", tiny, made)
    with pytest.raises(UserError, match=r"made:1.*not finite in float16"):
        write_store(tmp_path / "half", tiny, made, dtype="float16")
    made[0].features[-1, 1, 3] = np.nan
    with pytest.raises(UserError, match=r"made:0.*not finite in float32"):
        write_store(tmp_path / "nan", tiny, made)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"features": np.zeros((4, 2, WIDTH))}, "features has shape"),
        ({"features": np.zeros((5, 1, WIDTH))}, "features has shape"),
        ({"supervised": np.zeros(4, bool)}, "supervised has shape"),
        ({"teacher": np.zeros((5, WIDTH))}, "has a teacher plane"),
    ],
)
def test_arrays_that_disagree_are_refused(tmp_path, tiny, change, sentence):
    fine = StoredSample(
        tokens=np.zeros(5, np.int32),
        supervised=np.ones(5, bool),
        features=np.ones((5, 2, WIDTH)),
        source="made:0",
        prompt_len=0,
    )
    with pytest.raises(UserError, match=rf"made:0.* {sentence}|made:0 {sentence}"):
        write_store(tmp_path, tiny, [dataclasses.replace(fine, **change)], num_shards=1)


def test_a_second_writer_is_refused(tmp_path, tiny):
    made = make_stored(2)
    layout = make_layout(made)
    first = StoreWriter(str(tmp_path), tiny.contract(), layout)
    with pytest.raises(UserError, match=r"written by another process"):
        StoreWriter(str(tmp_path), tiny.contract(), layout)
    first.close()
    StoreWriter(str(tmp_path), tiny.contract(), layout).close()


def test_a_store_is_continued_only_as_it_was_begun(tmp_path, tiny):
    made = make_stored(2)
    layout = make_layout(made)
    StoreWriter(str(tmp_path), tiny.contract(), layout).close()
    with pytest.raises(UserError, match=r"made_from"):
        changed = dataclasses.replace(layout, made_from="other samples")
        StoreWriter(str(tmp_path), tiny.contract(), changed)
    with pytest.raises(UserError, match=r"another contract: mask_id"):
        StoreWriter(str(tmp_path), tiny.contract(mask_id=7), layout)
    with pytest.raises(UserError, match=r"feature_dtype"):
        StoreWriter(str(tmp_path), tiny.contract(feature_dtype="float16"), layout)
    with StoreWriter(str(tmp_path), tiny.contract(), layout) as writer:
        writer.write_shard(0, made)
        with pytest.raises(UserError, match=r"shard 0 .* cannot be written"):
            writer.write_shard(0, made)


# Every step at which a writer can die: before and after the arrays are written,
# with a torn array file left behind, and around the rename of the index.
CRASHES = ("before arrays", "torn arrays", "before index", "in index")


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_leaves_complete_shards_and_a_rerun_is_bit_equal(
    tmp_path, tiny, monkeypatch, crash
):
    made = make_stored(6)
    write_store(tmp_path / "whole", tiny, made)
    layout = make_layout(made, num_shards=2)
    path = str(tmp_path / "broken")

    def die(*args):
        raise KeyboardInterrupt

    with StoreWriter(path, tiny.contract(), layout) as writer:
        writer.write_shard(0, made[:3])
        with monkeypatch.context() as patch:
            if crash == "before arrays":
                patch.setattr(writer, "_write_arrays", die)
            elif crash == "in index":
                patch.setattr(os, "replace", die)
            else:
                patch.setattr(manifest, "write_index", die)
            with pytest.raises(KeyboardInterrupt):
                writer.write_shard(1, made[3:])
    if crash == "torn arrays":
        file = os.path.join(path, shard_file("features", 1))
        with open(file, "r+b") as torn:
            torn.truncate(1000)
    with pytest.raises(UserError, match=r"incomplete: 1 of 2 shards"):
        open_store(path)
    assert len(open_store(path, partial=True, verify=True)) == 3
    with StoreWriter(path, tiny.contract(), layout) as writer:
        assert set(writer.written) == {0}
        writer.write_shard(1, made[3:])
    assert all_files(path) == all_files(tmp_path / "whole")


def test_a_creation_cut_short_is_begun_again(tmp_path, tiny, monkeypatch):
    made = make_stored(6)
    write_store(tmp_path / "whole", tiny, made)

    def die(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_index", die)
        with pytest.raises(KeyboardInterrupt):
            write_store(tmp_path / "broken", tiny, made)
    (tmp_path / "broken" / ".writing-1-ff").write_bytes(b"left by a killed writer")
    with pytest.raises(UserError, match=r"not a feature store"):
        open_store(str(tmp_path / "broken"))
    write_store(tmp_path / "broken", tiny, made)
    assert all_files(tmp_path / "broken") == all_files(tmp_path / "whole")


@pytest.fixture
def damaged(tmp_path, store_path):
    """A copy of the finished store, to be damaged."""
    path = str(tmp_path / "copy")
    shutil.copytree(store_path, path)
    return path


def shard_path(path, name, index):
    return os.path.join(path, shard_file(name, index))


def damage_shard(path, name, how):
    """Damages shard 1 of three."""
    file = shard_path(path, name, 1)
    with open(file, "rb") as opened:
        content = bytearray(opened.read())
    if how == "missing":
        os.unlink(file)
        return
    if how == "swapped":
        os.replace(shard_path(path, name, 0), file + ".0")
        os.replace(file, shard_path(path, name, 0))
        os.replace(file + ".0", file)
        return
    if how == "truncated":
        content = content[:-1]
    elif how == "extended":
        content += b"\0"
    elif how == "flipped":
        content[len(content) // 3] ^= 4
    with open(file, "wb") as opened:
        opened.write(content)


@pytest.mark.parametrize("name", ["ids", "features"])
@pytest.mark.parametrize("how", ["missing", "truncated", "extended"])
def test_files_of_another_size_are_refused_at_open(damaged, name, how):
    damage_shard(damaged, name, how)
    with pytest.raises(UserError, match=rf"{name}/c/1/.*shard 1, samples made:8 to"):
        open_store(damaged)


@pytest.mark.parametrize("name", ["ids", "features"])
@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_files_lost_after_open_are_refused_with_the_sample(damaged, name, how):
    store = open_store(damaged)
    damage_shard(damaged, name, how)
    store.read_sample(0)
    with pytest.raises(UserError, match=r"sample 9 \(made:9\).*shard 1"):
        store.read_sample(9)


@pytest.mark.parametrize("name", ["ids", "features"])
@pytest.mark.parametrize("how", ["flipped", "swapped"])
def test_changed_bytes_are_refused_with_the_sample(damaged, name, how):
    damage_shard(damaged, name, how)
    with pytest.raises(UserError, match=r"sample 9 \(made:9\).*shard 1"):
        open_store(damaged).read_sample(9)
    with pytest.raises(UserError, match=r"differs from its checksum"):
        open_store(damaged, verify=True)


def test_bits_that_flip_after_the_check_are_caught_by_the_crc(damaged):
    store = open_store(damaged)
    before = store.read_sample(8)["features"]
    file = shard_path(damaged, "features", 1)
    with open(file, "r+b") as opened:
        content = bytearray(opened.read())
        at = content.index(before[:1].tobytes())
        content[at] ^= 1
        opened.seek(0)
        opened.write(content)
    with pytest.raises(UserError, match=r"sample 8 \(made:8\).*cannot be read"):
        store.read_sample(8)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("index.json", b'"tokens":', b'"tokens": '),
        ("index.json", b"made:1", b"made:3"),
        ("contract.json", b'"mask_id": 0', b'"mask_id": 1'),
        ("features/zarr.json", b"crc32c", b"crc32d"),
    ],
)
def test_torn_metadata_is_refused(damaged, file, old, new):
    full = os.path.join(damaged, file)
    with open(full, "rb") as opened:
        content = opened.read()
    assert old in content
    with open(full, "wb") as opened:
        opened.write(content.replace(old, new, 1))
    with pytest.raises(UserError, match=file):
        open_store(damaged)


def test_an_absent_or_empty_store_is_refused(tmp_path, tiny):
    with pytest.raises(UserError, match=r"is not a feature store: index.json"):
        open_store(str(tmp_path / "absent"))
    layout = make_layout(make_stored(1))
    with StoreWriter(str(tmp_path), tiny.contract(), layout) as writer:
        writer.write_shard(0, [], {"not finite": ["made:0"]})
    with pytest.raises(UserError, match=r"holds no samples"):
        open_store(str(tmp_path))


def test_another_targets_store_is_refused(store_path, tiny):
    open_store(store_path, tiny.contract(mask_id=99, num_draft=7))  # the drafter's own
    for change in (
        {"target_fingerprint": "0" * 64},
        {"template_hash": "other"},
        {"thinking": True},
        {"capture_point": "layer_input"},
    ):
        with pytest.raises(UserError, match=rf"another contract: {next(iter(change))}"):
            open_store(store_path, tiny.contract(**change))


def test_a_store_may_hold_more_layers_than_a_drafter_reads(store_path, tiny):
    open_store(store_path, tiny.contract(layer_ids=(1,)))
    with pytest.raises(UserError, match=r"lacks layer 2: .* capture.layer_ids"):
        open_store(store_path, tiny.contract(layer_ids=(0, 2)))


def test_reading_gives_fresh_arrays(store_path):
    store = open_store(store_path)
    first = store.read_sample(2)
    for array in first.values():
        array[:] = 0
    again = store.read_sample(2)
    assert again["tokens"].any() and again["features"].any()
    with pytest.raises(UserError, match=r"sample 20 is not in"):
        store.read_sample(20)
    assert json.dumps(store.skipped) == "{}"
