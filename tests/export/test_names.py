"""The fused tree and the public names, both ways."""

import dataclasses

import jax
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.drafters import dflash
from spec_jax.export import names, registry, shared

from .conftest import OPTIONS, SPEC


def plan_of(drafter):
    return shared.plan_of(drafter, registry.form_of(drafter))


@pytest.fixture(scope="module")
def plan(drafter):
    return plan_of(drafter)


@pytest.fixture(scope="module")
def weights(plan, params):
    return names.to_public(plan, params, "DFlash")


def test_round_trip_bit_for_bit(params, weights, plan):
    back = names.from_public(plan, weights)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert all(w.flags.c_contiguous for w in weights.values())


def test_every_projection_computes_what_the_fused_one_does(params, weights):
    """A public projection of a vector, head by head, against the fused columns."""
    x_D = np.random.default_rng(0).standard_normal(24).astype(np.float32)
    layer = params["params"]["layers_1"]
    fused_GxC = np.einsum("d,dgxc->gxc", x_D, np.asarray(layer["qkv"]))
    prefix = "layers.1.self_attn."
    group = 2
    for head in range(4):
        rows = slice(head * 10, (head + 1) * 10)
        q_C = weights[f"{prefix}q_proj.weight"][rows] @ x_D
        np.testing.assert_allclose(
            q_C, fused_GxC[head // group, head % group], rtol=1e-5, atol=1e-6
        )
    for head in range(2):
        rows = slice(head * 10, (head + 1) * 10)
        for name, column in (("k_proj", group), ("v_proj", group + 1)):
            np.testing.assert_allclose(
                weights[f"{prefix}{name}.weight"][rows] @ x_D,
                fused_GxC[head, column],
                rtol=1e-5,
                atol=1e-6,
            )
    both_2F = np.einsum("d,dtf->tf", x_D, np.asarray(layer["gate_up"]))
    for row, name in enumerate(("gate_proj", "up_proj")):
        np.testing.assert_allclose(
            weights[f"layers.1.mlp.{name}.weight"] @ x_D,
            both_2F[row],
            rtol=1e-5,
            atol=1e-6,
        )


def test_wrong_tensors_are_named(weights, plan):
    lacking = dict(weights)
    del lacking["layers.1.self_attn.k_norm.weight"]
    with pytest.raises(UserError, match=r"lacks tensor layers\.1\.self_attn\.k_norm"):
        names.from_public(plan, lacking, "folder x")
    extra = weights | {"lm_head.weight": np.zeros((61, 24), np.float32)}
    with pytest.raises(UserError, match=r"folder x has unknown tensor lm_head"):
        names.from_public(plan, extra, "folder x")
    turned = weights | {"fc.weight": weights["fc.weight"].T.copy()}
    with pytest.raises(UserError, match=r"fc\.weight has shape \(48, 24\)"):
        names.from_public(plan, turned, "folder x")


def test_prefix_is_optional():
    assert names.strip_prefix(["model.fc.weight", "d2t"]) == {
        "fc.weight": "model.fc.weight",
        "d2t": "d2t",
    }
    mixed = ["model.fc.weight", "norm.weight"]
    assert names.strip_prefix(mixed) == {name: name for name in mixed}
    headed = ["model.fc.weight", "lm_head.weight"]
    assert names.strip_prefix(headed) == {
        "fc.weight": "model.fc.weight",
        "lm_head.weight": "lm_head.weight",
    }


def test_trees_without_a_public_form_are_refused(params, plan):
    plain = dflash.make(dataclasses.replace(OPTIONS, qk_norm=False), SPEC)
    with pytest.raises(UserError, match="qk_norm"):
        plan_of(plain)
    tree = dict(params["params"])
    tree["layers_0"] = tree["layers_0"] | {"bias": np.zeros(3, np.float32)}
    with pytest.raises(UserError, match="layers_0/bias has no public DFlash name"):
        names.to_public(plan, {"params": tree}, "DFlash")
    tree = {name: leaf for name, leaf in params["params"].items() if name != "norm"}
    with pytest.raises(UserError, match="parameter norm is missing"):
        names.to_public(plan, {"params": tree}, "DFlash")
