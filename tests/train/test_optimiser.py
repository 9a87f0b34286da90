"""Schedules, decay masks, Muon's split, and float32 where it matters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax.core.errors import UserError
from spec_jax.train.optimiser import (
    OptimiserOptions,
    make_optimiser,
    make_schedule,
    require_float32,
)


def test_schedules_by_hand():
    common = {"lr": 2.0, "total_steps": 100, "warmup_fraction": 0.1}
    cosine = make_schedule(OptimiserOptions(schedule="cosine", **common))
    wsd = make_schedule(OptimiserOptions(schedule="wsd", decay_fraction=0.2, **common))
    constant = make_schedule(OptimiserOptions(schedule="constant", **common))
    for schedule in (cosine, wsd, constant):
        np.testing.assert_allclose(schedule(0), 0.2, rtol=1e-6)
        np.testing.assert_allclose(schedule(9), 2.0, rtol=1e-6)
    np.testing.assert_allclose(cosine(55), 1.0, rtol=1e-5)  # half of what is left
    np.testing.assert_allclose(cosine(100), 0.0, atol=1e-6)
    np.testing.assert_allclose(wsd(80), 2.0, rtol=1e-6)
    np.testing.assert_allclose(wsd(90), 1.0, rtol=1e-6)
    np.testing.assert_allclose(constant(100), 2.0, rtol=1e-6)
    on_host = make_schedule(OptimiserOptions(schedule="cosine", **common), np)
    for count in (0, 5, 33, 99):
        np.testing.assert_allclose(on_host(count), cosine(count), rtol=1e-5)


def _norm_after(dtype, steps=400):
    """A norm weight that starts at 1.0 and should reach 0.9 ... 1.1."""
    options = OptimiserOptions(total_steps=3000, lr=6e-4)  # the shipped schedule
    optimiser = make_optimiser(options)
    goal = jnp.linspace(0.9, 1.1, 64)
    weight = jnp.ones(64, dtype)

    def one(carry, _):
        weight, state = carry
        grads = jax.grad(lambda w: jnp.mean((w.astype(jnp.float32) - goal) ** 2))
        updates, state = optimiser.update(grads(weight), state, weight)
        return (optax.apply_updates(weight, updates), state), None

    run = jax.jit(lambda c: jax.lax.scan(one, c, None, steps)[0])
    return np.array(run((weight, optimiser.init(weight)))[0], np.float32)


def test_norm_weights_move_in_float32_and_not_in_bfloat16():
    """Why master weights are float32 (training notes, B1)."""
    assert (_norm_after(jnp.bfloat16) == 1.0).all()
    moved = _norm_after(jnp.float32)
    assert (moved != 1.0).all()
    np.testing.assert_allclose(moved[[0, -1]], [0.9, 1.1], atol=0.02)


def test_float32_is_required_by_name():
    optimiser = make_optimiser(OptimiserOptions())
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
    require_float32((params, optimiser.init(params)), "state")
    params["b"] = params["b"].astype(jnp.bfloat16)
    with pytest.raises(UserError, match=r"state: 0.b is bfloat16"):
        require_float32((params,), "state")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_decay_touches_matrices_only(kind):
    options = OptimiserOptions(
        kind=kind, lr=0.1, warmup_fraction=0, schedule="constant", weight_decay=0.5
    )
    optimiser = make_optimiser(options)
    params = {"matrix": jnp.full((3, 2, 2), 2.0), "norm": jnp.full(3, 2.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimiser.update)(zeros, optimiser.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -0.1 * 0.5 * 2.0, rtol=1e-5)
    np.testing.assert_array_equal(updates["norm"], 0.0)


def test_muon_orthogonalises_fused_matrices_and_adam_gets_its_own_rate():
    options = OptimiserOptions(
        kind="muon", lr=1.0, warmup_fraction=0, schedule="constant", clip=0
    )
    optimiser = make_optimiser(options)
    rng = np.random.default_rng(0)
    shape = (6, 2, 2)  # [in, ...]: one 6 x 4 matrix
    params = {"fused": jnp.zeros(shape), "norm": jnp.ones(5)}
    grads = {
        "fused": jnp.asarray(rng.normal(size=shape) * [[[1, 5]]], jnp.float32),
        "norm": jnp.asarray(rng.normal(size=5), jnp.float32),
    }
    updates, _ = jax.jit(optimiser.update)(grads, optimiser.init(params), params)
    singular = np.linalg.svd(np.array(updates["fused"]).reshape(6, 4))[1]
    raw = np.linalg.svd(np.array(grads["fused"]).reshape(6, 4))[1]
    assert raw[0] / raw[-1] > 3 and singular[0] / singular[-1] < 2
    # Adam's first step is its rate times the sign; Nesterov adds b1 / (1 + b1).
    first = options.muon_adam_ratio * (1 + options.b1 / (1 + options.b1))
    np.testing.assert_allclose(updates["norm"], -first * np.sign(grads["norm"]), 1e-4)


def test_clip_bounds_the_gradient():
    options = OptimiserOptions(lr=1.0, clip=1.0, warmup_fraction=0)
    optimiser = make_optimiser(options)
    params = {"a": jnp.zeros(4)}
    grads = {"a": jnp.full(4, 50.0)}
    _, state = optimiser.update(grads, optimiser.init(params), params)
    moments = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(moments["a"], (1 - options.b1) * 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kind", "sgd", "train.optimiser"),
        ("schedule", "linear", "train.schedule"),
        ("lr", 0.0, "train.lr"),
        ("lr", float("nan"), "train.lr"),
        ("total_steps", 0, "train.steps"),
        ("warmup_fraction", 1.5, "train.warmup_fraction"),
        ("clip", -1.0, "train.clip"),
        ("weight_decay", -0.1, "train.weight_decay"),
        ("final_fraction", 1.5, "final_fraction"),
        ("b2", 1.0, "b2"),
        ("ema", 1.0, "ema"),
    ],
)
def test_bad_options_are_named(field, value, said):
    """As a recipe calls them, where one has them."""
    with pytest.raises(UserError, match=f"^{said}="):
        OptimiserOptions(**{field: value})
