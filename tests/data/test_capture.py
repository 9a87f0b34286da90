"""Capture: the right features of the right tokens, resumable bit for bit."""

import dataclasses
import os
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.data import capture as lib
from spec_jax.data.samples import Sample
from spec_jax.data.store import open_store
from spec_jax.nn import layers
from spec_jax.target.cache import init_cache
from spec_jax.target.model import forward, unstack_layers
from tests.support.files import all_files


def one_token_at_a_time(target, tokens, num_layers):
    """Post-norm hidden [T, D] of the target's first layers, by plain decoding."""
    spec = dataclasses.replace(target.spec, num_layers=num_layers)
    tree = target.params["params"]
    cut = jax.tree.map(lambda weight: weight[:num_layers], tree["layers"])
    params = {"params": {**tree, "layers": cut}}
    cache = init_cache(spec, 1, 64)
    step = jax.jit(forward, static_argnums=0)
    rows = []
    for position, token in enumerate(tokens):
        at = jnp.array([[position]], jnp.int32)
        out = step(
            spec,
            params,
            cache,
            jnp.array([[token]], jnp.int32),
            at,
            jnp.ones((1, 1, 1), bool),
            at[0],
        )
        cache = out.cache
        rows.append(np.asarray(out.hidden_BTD[0, 0]))
    return np.stack(rows)


def test_features_are_the_layer_outputs_of_plain_decoding(tmp_path, target, tiny):
    schema = FeatureSchema((1,), tiny.spec.hidden_size, teacher=True)
    made = tiny.samples(4)
    tiny.capture(tmp_path / "s", made, schema)
    store = open_store(str(tmp_path / "s"))
    for index in (0, 3):
        read = store.read_sample(index)
        assert len(read["features"]) == len(made[index].tokens)
        assert read["tokens"].tolist() == list(made[index].tokens)
        assert read["supervised"].sum() == len(made[index].answer)
        planes = [*np.moveaxis(read["features"], 1, 0), read["teacher"]]
        for plane, num_layers in zip(planes, (2, 3), strict=True):
            if num_layers < 3:  # a layer output has not been through the norm yet
                plane = layers.rms_norm(
                    plane, target.params["params"]["final_norm"], tiny.spec.norm_eps
                )
            expected = one_token_at_a_time(target, made[index].tokens, num_layers)
            np.testing.assert_allclose(plane, expected, rtol=0, atol=2e-5)


def test_batches_change_features_by_rounding_only(tmp_path, target, tiny, store_path):
    tiny.capture(tmp_path / "s", tiny.samples(20), batch=7, buckets=(48,))
    ours, theirs = open_store(str(tmp_path / "s")), open_store(store_path)
    for index in range(20):
        np.testing.assert_allclose(
            ours.read_sample(index)["features"],
            theirs.read_sample(index)["features"],
            rtol=0,
            atol=1e-5,
        )


def test_params_apart_give_the_same_bytes(tmp_path, target, tiny, store_path):
    apart = dataclasses.replace(target, params=unstack_layers(target.params))
    made = tiny.samples(20)
    lib.capture(
        apart,
        made,
        tiny.schema,
        str(tmp_path / "s"),
        tiny.contract(),
        batch=3,
        buckets=tiny.buckets,
        shard_samples=8,
    )
    assert all_files(tmp_path / "s") == all_files(store_path)


def test_batches_hold_similar_lengths_and_every_row_once():
    lengths = [5, 40, 7, 30, 6, 41, 8]
    batches = lib.form_batches(lengths, 3)
    assert batches == [[5, 1, 3], [6, 2, 4], [0]]


def test_an_interrupted_capture_goes_on_bit_for_bit(tmp_path, tiny, store_path):
    made = tiny.samples(20)

    class Stop(Exception):
        pass

    def stop_in_shard_1(progress):
        if progress.shards_done == 1 and progress.tokens_done > 300:
            raise Stop

    with pytest.raises(Stop):
        tiny.capture(tmp_path / "s", made, progress=stop_in_shard_1)
    assert len(open_store(str(tmp_path / "s"), partial=True)) == 8
    seen = []
    report = tiny.capture(tmp_path / "s", made, progress=seen.append)
    assert report.new_shards == 2 and report.num_samples == 20
    assert seen[0].shards_done == 1 and seen[-1].shards_done == 3
    assert seen[-1].tokens_done == seen[-1].num_tokens == report.num_tokens
    assert all_files(tmp_path / "s") == all_files(store_path)
    assert tiny.capture(tmp_path / "s", made).new_shards == 0


def test_a_killed_process_leaves_a_store_that_goes_on(tmp_path, tiny, store_path):
    path = str(tmp_path / "s")
    script = f"""
        import os, runpy
        tiny = runpy.run_path({tiny.here!r})
        from spec_jax.data.store import manifest
        write_index = manifest.write_index
        def die_at_shard_1(path, contract, layout, shards):
            if len(shards) == 2:
                os._exit(9)
            write_index(path, contract, layout, shards)
        manifest.write_index = die_at_shard_1
        tiny["capture_tiny"](tiny["make_target"](), {path!r}, tiny["make_samples"](20))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
        timeout=600,
    )
    assert done.returncode == 9
    assert len(open_store(path, partial=True, verify=True)) == 8
    tiny.capture(path, tiny.samples(20))
    assert all_files(path) == all_files(store_path)


def test_other_samples_or_batches_do_not_continue_a_store(tmp_path, tiny):
    tiny.capture(tmp_path / "s", tiny.samples(9))
    for options, name in (
        ({"samples": tiny.samples(9, seed=1)}, r"text \(its sha256\)"),
        ({"batch": 2}, r"capture\.batch"),
    ):
        options = {"samples": tiny.samples(9)} | options
        with pytest.raises(UserError, match=rf"cannot be continued: its {name} is"):
            tiny.capture(tmp_path / "s", **options)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target_fingerprint": "0" * 64}, "contract.target_fingerprint"),
        ({"vocab_size": 300}, "contract.vocab_size"),
        ({"num_layers": 30}, "contract.num_layers"),
        ({"tokenizer_hash": "0"}, "contract.tokenizer_hash"),
        ({"layer_ids": (0, 2)}, "contract.layer_ids"),
        ({"feature_dtype": "float16"}, "contract.feature_dtype"),
    ],
)
def test_a_contract_of_another_target_is_refused(
    tmp_path, target, tiny, change, sentence
):
    with pytest.raises(UserError, match=sentence):
        lib.capture(
            target,
            tiny.samples(2),
            tiny.schema,
            str(tmp_path / "s"),
            tiny.contract(**change),
            buckets=tiny.buckets,
        )
    assert not os.path.exists(tmp_path / "s")


def test_layers_outside_the_capture_set_are_refused(tmp_path, tiny):
    for ids in ((0, 2), (1, 0), (1, 9), ()):
        with pytest.raises(UserError, match=r"layer_ids"):
            tiny.capture(tmp_path / "s", tiny.samples(2), FeatureSchema(ids, 16))


def test_bad_samples_are_refused(tmp_path, tiny):
    def refuse(samples, sentence, **options):
        with pytest.raises(UserError, match=sentence):
            tiny.capture(tmp_path / "s", samples, **options)
        assert not os.path.exists(tmp_path / "s")

    fine = tiny.samples(1)
    refuse([*fine, Sample((3, 272), 1, "b")], "sample b holds token id 272")
    refuse([*fine, Sample((3, -1), 1, "b")], "sample b holds token id -1")
    refuse(
        [*fine, Sample((3,) * 49, 1, "b")],
        "sample b has 49 tokens, more than 48, the largest",
    )
    refuse([Sample((3, 4), 2, "b")], "0% of 2 tokens are supervised")
    refuse([], "no tokens left")
    refuse(fine, "capture.batch=0", batch=0)


def with_embedding(target, token, value):
    """The target with another embedding row, which some samples then read."""
    tree = target.params["params"]
    embed = tree["embed"].at[token].set(value)
    params = {"params": {**tree, "embed": embed}}
    return dataclasses.replace(target, params=params)


def test_a_sample_that_is_not_finite_is_left_out_and_named(tmp_path, target, tiny):
    broken = with_embedding(target, 5, jnp.nan)
    made = [
        dataclasses.replace(s, tokens=tuple(6 if t == 5 else t for t in s.tokens))
        for s in tiny.samples(9)
    ]
    made[3] = dataclasses.replace(made[3], tokens=(*made[3].tokens[:-1], 5))

    def run(samples, name):
        return lib.capture(
            broken,
            samples,
            tiny.schema,
            str(tmp_path / name),
            tiny.contract(),
            batch=3,
            buckets=tiny.buckets,
            shard_samples=4,
        )

    report = run(made, "one")
    assert report.skipped == {"not finite": ["made:3"]} and report.num_samples == 8
    store = open_store(str(tmp_path / "one"), verify=True)
    assert [info.source for info in store.samples] == [
        f"made:{i}" for i in range(9) if i != 3
    ]
    made[8] = dataclasses.replace(made[8], tokens=(5, *made[8].tokens[1:]))
    with pytest.raises(UserError, match=r"2 of 9 samples, made:8 among them"):
        run(made, "two")


def test_a_value_too_large_for_the_stored_dtype_is_not_finite(tmp_path, target, tiny):
    big = with_embedding(target, 5, 7e4)  # inf in float16
    made = [Sample((5, 6, 7, 8), 2, "big"), *tiny.samples(3)]
    made = [made[0]] + [
        dataclasses.replace(s, tokens=tuple(6 if t == 5 else t for t in s.tokens))
        for s in made[1:]
    ]
    report = lib.capture(
        big,
        made,
        tiny.schema,
        str(tmp_path / "s"),
        tiny.contract(feature_dtype="float16"),
        "float16",
        buckets=tiny.buckets,
    )
    assert report.skipped == {"not finite": ["big"]}


def test_a_constant_plane_stops(tmp_path, target, tiny):
    zero = jax.tree.map(jnp.zeros_like, target.params)
    with pytest.raises(
        UserError, match=r"features of layer 0 are all 0 in sample made"
    ):
        lib.capture(
            dataclasses.replace(target, params=zero),
            tiny.samples(2),
            tiny.schema,
            str(tmp_path / "s"),
            tiny.contract(),
            buckets=tiny.buckets,
        )
    with pytest.raises(UserError, match=r"holds no|incomplete"):
        open_store(str(tmp_path / "s"))


def test_too_little_disk_is_refused_before_anything_runs(tmp_path, tiny, monkeypatch):
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("spec_jax.data.store.layout.shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"needs .* GB and"):
        tiny.capture(tmp_path / "s", tiny.samples(8))
