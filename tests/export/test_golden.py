"""The golden round: what it finds, and that training and serving agree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.drafters import dflash
from spec_jax.drafters.base import Frozen
from spec_jax.export import golden

from .conftest import SPEC


@pytest.fixture(scope="module")
def stored(drafter, params, probe):
    return golden.record(drafter, params, probe)


def check(stored, drafter, params, probe):
    return golden.check(stored, drafter, params, probe.frozen, "folder x")


def with_leaf(params, path, change):
    tree = jax.tree.map(lambda leaf: leaf, params)
    *folders, name = path.split("/")
    node = tree["params"]
    for folder in folders:
        node = node[folder]
    node[name] = change(node[name])
    return tree


def test_same_weights_pass(stored, drafter, params, probe):
    assert check(stored, drafter, params, probe) <= 1e-5
    assert stored["draft_tokens"].shape == (len(probe.anchors), 4)
    assert len(probe.anchors) >= 3


WRONG = {
    "query heads in another order": (
        "layers_0/qkv",
        lambda w: w.at[:, :, :2].set(w[:, :, 1::-1]),
    ),
    "keys and values exchanged": (
        "layers_1/qkv",
        lambda w: jnp.concatenate([w[:, :, :2], w[:, :, :1:-1]], 2),
    ),
    "gate and up exchanged": ("layers_0/gate_up", lambda w: w[:, ::-1]),
    "features in another order": ("fc", lambda w: jnp.roll(w, 24, 0)),
    "one weight of the last norm": ("norm", lambda w: w.at[3].add(0.05)),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights_are_refused(what, stored, drafter, params, probe):
    path, change = WRONG[what]
    with pytest.raises(UserError, match="golden round differs"):
        check(stored, drafter, with_leaf(params, path, change), probe)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10000.0},
        {"mask_id": 4},
        {"layer_types": ("full_attention",) * 2},
        {"sliding_window": 8},
        {"is_causal": False},
    ],
    ids=str,
)
def test_wrong_options_are_refused(change, stored, drafter, params, probe):
    other = dflash.make(dataclasses.replace(drafter.options, **change), SPEC)
    with pytest.raises(UserError, match="golden round differs"):
        check(stored, other, params, probe)


def test_one_logit_outside_the_top_is_noticed(stored, drafter, params, probe):
    """Projections cover whole rows, not only the entries that are kept."""
    last = int(np.setdiff1d(np.arange(SPEC.vocab_size), stored["top_ids"])[0])
    head = probe.frozen.head_DU.at[:, last].multiply(0.5)
    with pytest.raises(UserError, match="golden round differs"):
        golden.check(
            stored, drafter, params, Frozen(probe.frozen.embed_VD, head), "folder x"
        )


def test_another_float_type_of_the_head_gets_a_loose_bound(
    stored, drafter, params, probe
):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), probe.frozen)
    worst = golden.check(stored, drafter, params, half, "folder x")
    assert worst > golden.TOLERANCE
    with pytest.raises(UserError, match="golden round differs"):
        wrong = with_leaf(params, *WRONG["gate and up exchanged"])
        golden.check(stored, drafter, wrong, half, "x")


def test_damaged_rounds_are_refused(stored, drafter, params, probe):
    lacking = {key: value for key, value in stored.items() if key != "anchors"}
    with pytest.raises(UserError, match="lacks 'anchors'"):
        check(lacking, drafter, params, probe)
    shorter = dflash.make(dataclasses.replace(drafter.options, num_draft=3), SPEC)
    with pytest.raises(UserError, match="another block size"):
        check(stored, shorter, params, probe)


def test_weights_that_are_not_finite_are_not_recorded(drafter, params, probe):
    bad = with_leaf(params, "norm", lambda w: w.at[0].set(jnp.nan))
    with pytest.raises(UserError, match="usable drafts"):
        golden.record(drafter, bad, probe)


def test_parity_sees_a_leak(drafter, params, probe):
    """A drafter that trains on the anchor's own feature is told apart."""

    def leaky(params, frozen, batch, key):
        shifted = jnp.roll(batch.features_BSLD, -1, 1)
        return drafter.train_outputs(
            params, frozen, batch.replace(features_BSLD=shifted), key
        )

    other = dataclasses.replace(drafter, train_outputs=leaky)
    assert golden.parity_max_abs(other, params, probe) > 1e-2


def test_probe_refuses_short_texts_and_outside_anchors(target, drafter):
    with pytest.raises(UserError, match="at least 6"):
        golden.probe_from_target(target, [4, 5, 6, 7, 8], drafter)
    with pytest.raises(UserError, match="between 1 and 5"):
        golden.probe_from_target(target, range(4, 14), drafter, anchors=[6])
