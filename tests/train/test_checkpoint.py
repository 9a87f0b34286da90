"""Checkpoints: bit for bit, refused when foreign or damaged, safe to kill."""

import dataclasses
import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract
from spec_jax.parallel.mesh import make_mesh, shard_params
from spec_jax.train import checkpoint
from spec_jax.train.checkpoint import Checkpoints, SaveFailed
from spec_jax.train.optimiser import OptimiserOptions, make_optimiser
from tests.train import toy

MESH = make_mesh(devices=jax.devices()[:1])
CONTRACT = Contract("t", "f", 17, 8, 4, (0, 1), "tok", "tmpl")


def _state(seed=0):
    """Every tree type an optimiser brings, odd dtypes, a key, an odd integer."""
    rng = np.random.default_rng(seed)
    params = {
        "layers": {"0.qkv": jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)},
        "norm": jnp.asarray(rng.normal(size=6), jnp.float32),
    }
    state = {
        "params": params,
        "adamw": make_optimiser(OptimiserOptions()).init(params),
        "muon": make_optimiser(OptimiserOptions(kind="muon")).init(params),
        "list": [jnp.int32(16_777_217), (jnp.asarray([1.5], jnp.bfloat16),)],
        "rng": jax.random.key(seed + 5),
        "none": None,
    }
    return shard_params(state, MESH)


def _small(seed=0):
    return shard_params({"norm": jnp.arange(6.0) + seed, "step": jnp.int32(1)}, MESH)


def _open(folder, **changes):
    options = {"recipe_hash": "abc", "contract": CONTRACT} | changes
    return Checkpoints(folder, **options)


def _saved(folder, step=3, state=None, **values):
    checkpoints = _open(folder)
    checkpoints.save(_state() if state is None else state, step, **values)
    checkpoints.wait()
    return checkpoints


def test_round_trip_keeps_bits_types_and_everything_beside(tmp_path):
    state = _state()
    _saved(tmp_path, 3, state, iterator=b"\x00\xff", metric=1.5, extra={"a": [0.1]})
    restored = _open(tmp_path).restore(jax.tree.map(jnp.copy, _state(1)))
    toy.require_equal(toy.leaves(state), toy.leaves(restored.state))
    assert jax.tree.structure(state) == jax.tree.structure(restored.state)
    assert isinstance(restored.state["adamw"][1][0], optax.ScaleByAdamState)
    assert restored.iterator == b"\x00\xff" and restored.extra == {"a": [0.1]}
    assert restored.entry.step == 3 and restored.entry.metric == 1.5
    draws = [jax.random.uniform(s["rng"]) for s in (state, restored.state)]
    assert draws[0] == draws[1]
    assert _open(tmp_path / "new").restore(state) is None


def test_donation_and_mutation_right_after_save(tmp_path):
    state = _state()
    expected = toy.leaves(state)
    host = np.arange(100_000, dtype=np.float32)
    state["host"] = jnp.asarray(host.copy())
    checkpoints = _open(tmp_path)
    checkpoints.save(state, 1)
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    words = state.pop("rng")
    # Either the memory is reused at once, or, where the writer still holds a view of
    # it, XLA copies instead: which of them is a race, and both must be safe.
    spoiled = jax.block_until_ready(spoil(state))
    template = {**spoiled, "rng": words}
    restored = toy.leaves(checkpoints.restore(template).state)
    np.testing.assert_array_equal(restored.pop("['host']"), host)
    toy.require_equal(expected, restored)


def test_saves_in_a_row_are_all_written(tmp_path):
    """Orbax's own loop helper skips a save while one runs; this must not."""
    checkpoints = _open(tmp_path, keep_last=9)
    for step in (1, 2, 3):
        checkpoints.save(_small(step), step)
    checkpoints.wait()
    assert [entry.step for entry in checkpoints.entries()] == [1, 2, 3]


def test_a_step_saved_again_is_rewritten(tmp_path):
    checkpoints = _saved(tmp_path, 4, _small(0))
    checkpoints.save(_small(9), 4, metric=2.0)
    restored = checkpoints.restore(_small())
    toy.require_equal(toy.leaves(_small(9)), toy.leaves(restored.state))
    assert restored.entry.attempt == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_the_best_and_the_last_are_kept(tmp_path):
    checkpoints = _open(tmp_path)
    for step, metric in enumerate([1.0, 1.7, 1.7, 1.2, None]):
        checkpoints.save(_small(step), step, metric=metric)
    checkpoints.wait()
    assert [entry.step for entry in checkpoints.entries()] == [1, 4]
    assert checkpoints.best().step == 1 and checkpoints.last().step == 4
    assert _open(tmp_path).best().metric == 1.7


class _Broken:
    """A background write that ends badly."""

    def __init__(self, writing, path, how):
        self.writing, self.path, self.how = writing, path, how

    def result(self):
        self.writing.result()
        if self.how == "raises":
            raise OSError(28, "No space left on device")
        shutil.rmtree(self.path)


@pytest.mark.parametrize("how", ["raises", "vanishes", "marking"])
def test_a_failed_save_stops_and_is_never_listed(tmp_path, monkeypatch, how):
    checkpoints = _saved(tmp_path, 1, _small(1))
    start = checkpoint.ocp.save_async

    def save_async(path, tree):
        return _Broken(start(path, tree), path, how)

    def full(path, text):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if how == "marking":
            patch.setattr(checkpoint, "_write_durably", full)
        else:
            patch.setattr(checkpoint.ocp, "save_async", save_async)
        checkpoints.save(_small(2), 2)
        while not checkpoints._running[1].done():
            time.sleep(0.01)
        with pytest.raises(SaveFailed, match=r"step 2 .* could not be written"):
            checkpoints.check()
    assert [entry.step for entry in checkpoints.entries()] == [1]
    checkpoints.save(_small(3), 2)  # retried: really written
    restored = checkpoints.restore(_small())
    assert restored.entry.step == 2
    toy.require_equal(toy.leaves(_small(3)), toy.leaves(restored.state))


@pytest.mark.parametrize("missing", ["COMMIT", "meta.json"])
def test_unfinished_steps_are_ignored_and_cleared(tmp_path, missing):
    _saved(tmp_path, 1, _small())
    _saved(tmp_path / "other", 2, _small())
    shutil.move(tmp_path / "other" / "step_00000002.0", tmp_path)
    (tmp_path / "step_00000002.0" / missing).unlink()
    checkpoints = _open(tmp_path)
    assert checkpoints.restore(_small()).entry.step == 1
    assert not (tmp_path / "step_00000002.0").exists()


def _largest(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "extend", "record"])
def test_damage_is_refused_by_name(tmp_path, damage):
    _saved(tmp_path, 1, _small())
    folder = tmp_path / "step_00000001.0"
    path = folder / "meta.json" if damage == "record" else _largest(folder / "state")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    if damage == "delete":
        path.unlink()
    else:
        cut = {"truncate": raw[:-9], "extend": path.read_bytes() + b"x"}
        path.write_bytes(cut.get(damage, raw))
    with pytest.raises(UserError, match=rf"damaged: .*{path.name} .*delete that"):
        _open(tmp_path).restore(_small())


def _change(state, change):
    matrix = state["params"]["layers"].pop("0.qkv")
    if change != "missing":
        name = "0.kqv" if change == "renamed" else "0.qkv"
        value = {"shape": matrix.T, "dtype": matrix.astype(jnp.bfloat16)}
        state["params"]["layers"][name] = value.get(change, matrix)
    if change == "extra":
        state["params"]["bias"] = matrix
    return shard_params(state, MESH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "has the leaf 'params.layers.0.qkv', which this run does not"),
        ("extra", "lacks the leaf 'params.bias'"),
        ("renamed", "lacks the leaf 'params.layers.0.kqv'"),
        ("shape", r"0.qkv' as float32\[4, 6\], this run expects float32\[6, 4\]"),
        ("dtype", r"'params.layers.0.qkv' as float32.* expects bfloat16"),
    ],
)
def test_other_leaves_are_refused(tmp_path, change, message):
    checkpoints = _saved(tmp_path)
    with pytest.raises(UserError, match=message):
        checkpoints.restore(_change(_state(), change))


def test_foreign_folders_are_refused(tmp_path):
    _saved(tmp_path, 1, _small())
    with pytest.raises(UserError, match="made by recipe abc, not xyz"):
        _open(tmp_path, recipe_hash="xyz")
    other = dataclasses.replace(CONTRACT, tokenizer_hash="other")
    with pytest.raises(UserError, match="another contract: tokenizer_hash is 'tok'"):
        _open(tmp_path, contract=other)
    with pytest.raises(UserError, match=r"contract is .* but this run has None"):
        _open(tmp_path, contract=None)


def test_values_that_json_cannot_hold_are_refused_at_once(tmp_path):
    with pytest.raises(TypeError):
        _open(tmp_path).save(_state(), 1, iterator={"a": np.float32(1)})
    assert not list(tmp_path.iterdir())


def test_the_record_names_leaves_and_files(tmp_path):
    _saved(tmp_path, 1)
    meta = json.loads((tmp_path / "step_00000001.0" / "meta.json").read_text())
    assert meta["leaves"]["params.norm"] == {"shape": [6], "dtype": "float32"}
    assert meta["leaves"]["rng"]["dtype"].startswith("key<")
    assert meta["files"]
