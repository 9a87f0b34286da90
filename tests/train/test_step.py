"""The train step: split invariance, skipping, donation, compiles, lowering."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import objectives
from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.drafters import dflash
from spec_jax.drafters.base import Frozen
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.target.spec import TargetSpec
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.optimiser import OptimiserOptions, make_optimiser
from spec_jax.train.state import abstract_state, init_state
from spec_jax.train.step import check_batch, make_gradient, make_train_step
from tests.train import toy

MESH = mesh_lib.make_mesh(devices=jax.devices()[:1])
OPTIONS = OptimiserOptions(lr=1e-2, total_steps=50, weight_decay=0.01)


EMA = 0.75


@functools.cache
def _program(donate):
    """A first state and one compiled step, shared by the tests."""
    drafter, optimiser = toy.make_drafter(), make_optimiser(OPTIONS)
    state = init_state(drafter, optimiser, 0, MESH, use_ema=True)
    step = make_train_step(
        drafter, toy.loss, optimiser, MESH, template=state, ema=EMA, donate=donate
    )
    return state, mesh_lib.shard_params(toy.make_frozen(), MESH), step


def _setup(donate=True):
    state, frozen, step = _program(donate)
    return jax.tree.map(jnp.copy, state), frozen, step


@functools.cache
def _gradient(accumulation):
    drafter = toy.make_drafter()
    params = drafter.init(jax.random.key(1))
    function = jax.jit(make_gradient(drafter, toy.loss, MESH, accumulation))

    def call(batch, seed=5):
        rng, step = jax.random.key(seed), jnp.int32(3)
        grads, metrics = function(params, toy.make_frozen(), batch, rng, step)
        return toy.leaves(grads), toy.leaves(metrics)

    return call


def _require_close(ours, theirs, *, skip=()):
    for kind, other in zip(ours, theirs, strict=True):
        assert list(kind) == list(other)
        for name, leaf in kind.items():
            if not any(word in name for word in skip):
                np.testing.assert_allclose(
                    leaf, other[name], rtol=2e-5, atol=2e-6, err_msg=name
                )


@pytest.mark.parametrize("accumulation", [2, 8])
def test_gradient_does_not_depend_on_micro_batches(accumulation):
    batch = toy.make_batch(0)
    whole, split = _gradient(1)(batch), _gradient(accumulation)(batch)
    # Counts of blocks are per call: the anchors' count of calls is not summed data.
    _require_close(whole, split, skip=("['anchor_sum'][1]", "['anchor_squares'][1]"))
    for name in ("['anchor_sum'][0]", "['anchor_squares'][0]"):
        assert whole[1][name] == split[1][name]  # integers: the same anchors
    assert not np.allclose(_gradient(1)(batch, seed=6)[1][name], whole[1][name])


def test_rows_without_labels_and_padding_change_nothing():
    batch = toy.make_batch(0)
    empty = toy.make_batch(1)
    empty = empty.replace(supervised_BS=np.zeros_like(empty.supervised_BS))
    longer = jax.tree.map(lambda a, b: np.concatenate([a, b]), batch, empty)

    def pad(array):
        widths = [(0, 0), (0, 5)] + [(0, 0)] * (array.ndim - 2)
        return np.pad(array, widths) if array.ndim > 1 else array

    longer = _gradient(1)(jax.tree.map(pad, longer))
    _require_close(_gradient(1)(batch), longer, skip=("anchor", "by_slot"))


def test_gradient_is_the_quotient_of_sums():
    """Against the mean loss written out, differentiated without the step."""
    drafter, frozen, batch = toy.make_drafter(), toy.make_frozen(), toy.make_batch(0)
    params = drafter.init(jax.random.key(1))

    def mean_loss(params):
        key = jax.random.fold_in(jax.random.key(5), 3)
        outputs = drafter.train_outputs(params, frozen, batch, key)
        sums, _ = toy.loss(outputs, frozen)
        return sums.numerator / sums.denominator

    expected = toy.leaves(jax.jit(jax.grad(mean_loss))(params))
    for name, leaf in _gradient(2)(batch)[0].items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-6)


def test_devices_do_not_change_the_step():
    """1, 2 and 4 devices, every mesh axis, with and without accumulation."""
    worker = pathlib.Path(__file__).parent / "mesh_worker.py"
    run = subprocess.run(
        [sys.executable, str(worker)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout.splitlines()[-1])
    assert len(results) == 4
    first = next(iter(results.values()))
    for name, result in results.items():
        assert result["anchors"] == first["anchors"], name
        for field in ("loss", "grad_norm", "acc", "slots", "params", "second_loss"):
            np.testing.assert_allclose(
                result[field], first[field], rtol=3e-5, atol=1e-6, err_msg=name
            )
    assert results["data4"]["split_parameters"] == 0
    assert results["fsdp2_tensor2"]["split_parameters"] > 0


def test_not_finite_is_skipped_and_counted():
    state, frozen, step = _setup()
    batches = [mesh_lib.place_batch(toy.make_batch(i), MESH) for i in range(2)]
    broken = toy.make_batch(2)
    broken.features_BSLD[:] = np.nan
    state, metrics = step(state, frozen, batches[0])
    assert float(metrics["skipped"][0]) == 0
    before = toy.leaves((state.params, state.opt_state, state.ema))
    for count in (1, 2):
        state, metrics = step(state, frozen, mesh_lib.place_batch(broken, MESH))
        assert float(metrics["skipped"][0]) == 1
        assert int(state.skipped_in_row) == count
    toy.require_equal(before, toy.leaves((state.params, state.opt_state, state.ema)))
    state, metrics = step(state, frozen, batches[1])
    assert int(state.skipped) == 2 and int(state.skipped_in_row) == 0
    assert int(state.step) == 4
    assert not np.array_equal(before["[0]['fc']"], np.array(state.params["fc"]))


def test_batch_without_labels_has_no_loss_and_moves_nothing():
    state, frozen, step = _setup()
    state, _ = step(state, frozen, mesh_lib.place_batch(toy.make_batch(0), MESH))
    before = toy.leaves((state.params, state.opt_state))
    batch = toy.make_batch(1)
    batch.supervised_BS[:] = False
    state, metrics = step(state, frozen, mesh_lib.place_batch(batch, MESH))
    assert float(metrics["loss"][0]) == 0 and float(metrics["loss"][1]) == 0
    assert float(metrics["grad_norm"][0]) == 0
    assert float(metrics["skipped"][0]) == 0
    toy.require_equal(before, toy.leaves((state.params, state.opt_state)))


def test_donated_equals_undonated():
    results = []
    for donate in (True, False):
        state, frozen, step = _setup(donate)
        for index in range(3):
            batch = mesh_lib.place_batch(toy.make_batch(index), MESH)
            old = state
            state, metrics = step(state, frozen, batch)
            assert old.params["fc"].is_deleted() == donate
        results.append(toy.leaves((state, metrics)))
    toy.require_equal(*results)


def test_averaged_weights_follow():
    state, frozen, step = _setup()
    old = np.array(state.params["fc"])
    state, _ = step(state, frozen, mesh_lib.place_batch(toy.make_batch(0), MESH))
    expected = EMA * old + (1 - EMA) * np.array(state.params["fc"])
    np.testing.assert_allclose(np.array(state.ema["fc"]), expected, rtol=1e-6)
    assert state.eval_params() is state.ema


def test_no_compile_after_warm_up(tmp_path, compile_events):
    """Steps, checkpoints, evaluation and a restored state reuse one program."""
    state, frozen, step = _setup()
    evaluate = jax.jit(lambda params: sum(jnp.sum(x) for x in jax.tree.leaves(params)))
    checkpoints = Checkpoints(tmp_path, recipe_hash="a")

    def cycle(state, first):
        for index in range(first, first + 3):
            batch = mesh_lib.place_batch(toy.make_batch(index), MESH)
            state, metrics = step(state, frozen, batch)
        float(metrics["loss"][0])
        evaluate(state.eval_params()).block_until_ready()
        checkpoints.save(state, first)
        return checkpoints.restore(state).state

    state = cycle(state, 0)
    compile_events.clear()
    state = cycle(state, 3)
    cycle(state, 6)
    assert compile_events == []
    assert step._cache_size() == 1
    checkpoints.close()


def test_a_python_step_would_compile_again(compile_events):
    """The counter of the test above sees what it is there for."""
    state, frozen, step = _setup(donate=False)
    batch = mesh_lib.place_batch(toy.make_batch(0), MESH)
    step(state, frozen, batch)
    compile_events.clear()
    step(state.replace(step=0), frozen, batch)
    assert compile_events


def _dflash():
    spec = TargetSpec("t", "llama", 6, 32, 48, 4, 2, 8, 64)
    options = dflash.Options(
        num_layers=2, num_draft=3, layer_ids=(1, 3), mask_id=1, num_anchors=4
    )
    float_, int_ = jnp.float32, jnp.int32
    shape = jax.ShapeDtypeStruct
    batch = Batch(
        shape((8, 16), int_),
        shape((8, 16), bool),
        shape((8,), int_),
        shape((8, 16, 2, 32), float_),
    )
    frozen = Frozen(shape((64, 32), float_), shape((32, 64), float_))
    return dflash.make(options, spec), batch, frozen


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_step_lowers_for_accelerators(kind):
    """Nothing in the step needs a CPU."""
    drafter, batch, frozen = _dflash()
    optimiser = make_optimiser(OptimiserOptions(kind=kind, ema=0.9))
    template = abstract_state(drafter, optimiser, MESH, use_ema=True)
    options = objectives.ObjectiveOptions(kind="dpace", chunk_rows=32)
    loss = functools.partial(objectives.loss, options=options)
    step = make_train_step(
        drafter, loss, optimiser, MESH, template=template, accumulation=2, ema=0.9
    )
    traced = step.trace(template, frozen, batch)
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "dot_general" in text and "callback" not in text


def test_bad_input_is_named():
    optimiser = make_optimiser(OPTIONS)
    with pytest.raises(UserError, match=r"fc is bfloat16.*float32"):
        init_state(toy.make_drafter(jnp.bfloat16), optimiser, 0, MESH)
    with pytest.raises(UserError, match="train.batch=8 must be a multiple of 3"):
        check_batch(toy.make_batch(0), MESH, 3)
    state = init_state(toy.make_drafter(), optimiser, 0, MESH)
    with pytest.raises(UserError, match=r"ema=0.5"):
        make_train_step(
            toy.make_drafter(), toy.loss, optimiser, MESH, template=state, ema=0.5
        )


def test_given_weights_survive_donation():
    """A warm start copies: the caller's arrays are not consumed."""
    drafter, optimiser = toy.make_drafter(), make_optimiser(OPTIONS)
    given = mesh_lib.shard_params(drafter.init(jax.random.key(9)), MESH)
    state = init_state(drafter, optimiser, 0, MESH, params=given)
    np.testing.assert_array_equal(np.array(state.params["fc"]), np.array(given["fc"]))
    jax.jit(lambda s: s, donate_argnums=0)(state)
    assert state.params["fc"].is_deleted() and not given["fc"].is_deleted()


def test_the_loss_is_told_how_far_training_is():
    def loss(outputs, frozen, progress):
        sums, metrics = toy.loss(outputs, frozen)
        told = jnp.float32(-1.0 if progress is None else progress)
        return sums, metrics | {"told": (told, jnp.ones(()))}

    drafter = toy.make_drafter()
    params = drafter.init(jax.random.key(1))
    for accumulation, total, want in ((1, 12, 0.25), (2, 12, 0.25), (1, None, -1.0)):
        function = jax.jit(make_gradient(drafter, loss, MESH, accumulation, total))
        arguments = (toy.make_frozen(), toy.make_batch(0), jax.random.key(5))
        _, metrics = function(params, *arguments, jnp.int32(3))
        assert float(metrics["told"][0] / metrics["told"][1]) == want
