"""DFlash: visibility, labels, and training rows equal to serving rows.

Every position of these sequences is an anchor (`num_anchors` is large enough),
so that blocks overlap as much as they can.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.drafters import base, blocks, dflash
from spec_jax.nn import anchors, block
from tests.support import drafting, oracles

FULL, SLIDING = blocks.FULL, blocks.SLIDING
KINDS = {
    "full": {},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6},
    "mixed": {"layer_types": (SLIDING, FULL), "sliding_window": 5},
    "all_causal": {"is_causal": True},
    "never_causal": {
        "layer_types": (SLIDING, FULL),
        "sliding_window": 3,
        "is_causal": False,
    },
    "own_sizes": {
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 4,
        "mlp_size": 20,
        "qk_norm": False,
    },
}
SIZE_S, SIZE_M = 24, 4
ANCHORS = np.arange(1, SIZE_S - 1)
KEY = jax.random.key(0)


@functools.cache
def build(kind="full"):
    """Programs and stirred parameters of one variant."""
    options = {
        "num_layers": 2,
        "num_draft": SIZE_M,
        "mask_id": drafting.MASK_ID,
        "num_anchors": len(ANCHORS),
        **KINDS[kind],
    }
    programs = drafting.Programs(base.load("dflash", options, drafting.TINY))
    return programs, drafting.stir(programs.init(KEY))


@functools.cache
def frozen():
    """The lent embedding and head, scaled for logits of about one."""
    lent = drafting.make_frozen()
    return lent.replace(head_DU=lent.head_DU / np.float32(32**0.5))


def whole_batch(programs, size_b=1, seed=1):
    """Rows of full length, all supervised but position 0."""
    return drafting.make_batch(
        programs.drafter, [SIZE_S] * size_b, SIZE_S, seed=seed, prompt=1
    )


def kinds_of(options):
    """(causal, window) per layer, from the options' words."""
    sliding = [name == SLIDING for name in options.layer_types]
    return [
        (
            s if options.is_causal is None else options.is_causal,
            options.sliding_window if s else None,
        )
        for s in sliding
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_equal_serving_logits(kind):
    programs, params = build(kind)
    batch = whole_batch(programs)
    out = programs.train(params, frozen(), batch, KEY)
    np.testing.assert_array_equal(out.anchors_BN[0], ANCHORS)
    train = np.asarray(out.hidden_XMD) @ frozen().head_DU
    at = np.array([1, 2, 5, 9, 14, 20, 22])
    slots = jax.tree.map(lambda x: np.repeat(x, len(at), 0), batch)
    for widths in ([8], [3, 1, 8, 5]):
        proposal, _ = programs.serve(
            params, frozen(), slots, at, widths, bucket=8, allocated=SIZE_S + 6
        )
        served = proposal.law.logits_BTV
        np.testing.assert_allclose(served, train[at - 1], atol=1e-5, rtol=1e-5)


FAR = np.array([3, 200, 2000])


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_training_equals_serving_far_into_a_text(kind):
    """A rotary or mask fault that grows with the position shows itself late."""
    programs, params = build(kind)
    size_s = FAR[-1] + SIZE_M + 2
    batch = drafting.make_batch(programs.drafter, [size_s], size_s)
    labelled = (FAR[:, None] + np.arange(SIZE_M + 1)).ravel()
    supervised = np.zeros((1, size_s), bool)
    supervised[0, labelled] = True
    batch = batch.replace(supervised_BS=supervised)
    out = programs.train(params, frozen(), batch, KEY)
    train = np.asarray(out.hidden_XMD) @ frozen().head_DU
    slots = jax.tree.map(lambda x: np.repeat(x, len(FAR), 0), batch)
    proposal, _ = programs.serve(
        params, frozen(), slots, FAR, [512], bucket=512, allocated=size_s + 6
    )
    for served, anchor in zip(proposal.law.logits_BTV, FAR, strict=True):
        (n,) = np.flatnonzero(out.anchors_BN[0] == anchor)
        np.testing.assert_allclose(served, train[n], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["full", "mixed", "never_causal", "own_sizes"])
def test_a_block_matches_the_float64_oracle(kind):
    programs, params = build(kind)
    batch = whole_batch(programs)
    anchor = 9
    out = programs.train(params, frozen(), batch, KEY)
    o = programs.drafter.options
    rows = oracles.draft_block(
        jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"]),
        frozen().embed_VD,
        batch.features_BSLD[0].astype(np.float64),
        int(batch.tokens_BS[0, anchor]),
        anchor,
        o.mask_id,
        SIZE_M + 1,
        kinds=kinds_of(o),
        num_heads=o.num_heads,
        num_kv_heads=o.num_kv_heads,
        head_dim=o.head_dim,
        theta=o.rope_theta,
        eps=o.norm_eps,
    )
    np.testing.assert_allclose(out.hidden_XMD[anchor - 1], rows[1:], atol=2e-5)


@pytest.mark.parametrize("kind", ["full", "sliding", "mixed"])
def test_a_feature_moves_no_block_at_or_before_it(kind):
    programs, params = build(kind)
    batch = whole_batch(programs)

    def run(features):
        moved = batch.replace(features_BSLD=features)
        return np.asarray(programs.train(params, frozen(), moved, KEY).hidden_XMD)

    before = run(batch.features_BSLD)
    windows = [w for _, w in kinds_of(programs.drafter.options)]
    widest = None if None in windows else max(windows)
    for p in range(SIZE_S):
        features = batch.features_BSLD.copy()
        features[0, p] *= -3.0
        change = np.abs(run(features) - before).max((1, 2))
        assert (change[p >= ANCHORS] == 0.0).all(), f"feature {p} leaked"
        reach = p < ANCHORS
        if widest is not None:
            reach &= ANCHORS - p < widest
        assert (change[reach] > 1e-4).all(), f"feature {p} is not read"


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_visibility_by_gradient(kind):
    programs, params = build(kind)
    batch = whole_batch(programs)
    layers = [
        oracles.block_visibility(ANCHORS, SIZE_M + 1, SIZE_S, window)[0]
        for _, window in kinds_of(programs.drafter.options)
    ]
    direction = jnp.arange(1.0, 33)

    def rows(features):
        moved = batch.replace(features_BSLD=features)
        out = programs.drafter.train_outputs(params, frozen(), moved, KEY)
        return (out.hidden_XMD @ direction).sum(-1)  # one number per block

    jacobian = drafting.quick_jit(jax.jacrev(rows))(batch.features_BSLD)[:, 0]
    reach = np.abs(jacobian).max((2, 3)) > 0
    # Some row sees it in some layer; rows of a block reach each other.
    want = np.any([seen.any(1) for seen in layers], axis=0)
    np.testing.assert_array_equal(reach, want)


def test_a_token_moves_only_the_block_it_anchors():
    programs, params = build()
    batch = whole_batch(programs)
    before = np.asarray(programs.train(params, frozen(), batch, KEY).hidden_XMD)
    tokens = batch.tokens_BS.copy()
    tokens[0, 8] = (tokens[0, 8] + 1) % 67
    moved = batch.replace(tokens_BS=tokens)
    after = np.asarray(programs.train(params, frozen(), moved, KEY).hidden_XMD)
    changed = np.abs(after - before).max((1, 2)) > 0
    np.testing.assert_array_equal(changed, ANCHORS == 8)


@pytest.mark.parametrize("kind", ["full", "sliding", "never_causal"])
def test_rows_inside_a_block_see_what_their_layers_allow(kind):
    programs, params = build(kind)
    sizes = blocks.block_sizes(programs.drafter.options, drafting.TINY)
    positions = np.arange(5)[None, None]
    empty = np.zeros((1, 3, sizes.num_kv_heads, sizes.head_dim), np.float32)

    def rows(x):
        return block.run_blocks(
            params["params"], sizes, x, positions, [empty] * 2, [empty] * 2,
            np.zeros((1, 1), np.int32),
        )[0, 0].sum(-1)  # fmt: skip

    x = np.random.default_rng(2).normal(size=(1, 1, 5, 32)).astype(np.float32)
    jacobian = drafting.quick_jit(jax.jacrev(rows))(x)[:, 0, 0]
    reach = np.abs(jacobian).max(-1) > 0
    seen = np.eye(5, dtype=int)
    for causal, window in kinds_of(programs.drafter.options):
        _, allowed = oracles.block_visibility([0], 5, 1, window, causal)
        seen = allowed[0, :, 0].astype(int) @ seen
    np.testing.assert_array_equal(reach, seen > 0)


@pytest.mark.parametrize("length", [SIZE_S, 17, 4, 1])
def test_labels_and_validity_match_loops(length):
    """Anchors that a short row lacks weigh nothing and stay finite."""
    programs, params = build()
    batch = drafting.make_batch(programs.drafter, [length], SIZE_S, prompt=1)
    batch.supervised_BS[0, 10:12] = False
    out = programs.train(params, frozen(), batch, KEY)
    supervised = batch.supervised_BS[0]
    at = oracles.anchor_candidates(supervised, length)
    assert len(at) < len(ANCHORS)
    np.testing.assert_array_equal(out.anchors_BN[0, : len(at)], at)
    valid = np.asarray(out.valid_XM)
    assert not valid[len(at) :].any()
    assert np.isfinite(out.hidden_XMD).all()
    if at:
        ids, want = oracles.labels(batch.tokens_BS[0], supervised, length, at, SIZE_M)
        np.testing.assert_array_equal(valid[: len(at)] > 0, want)
        labels = np.where(want, out.labels_XM[: len(at)], 0)
        np.testing.assert_array_equal(labels, ids)


def test_anchors_are_uniform_sorted_distinct_candidates():
    supervised = np.zeros((1, 16), bool)
    supervised[0, [2, 3, 4, 7, 9, 10, 11, 12, 15]] = True
    allowed = oracles.anchor_candidates(supervised[0], 12)
    assert allowed == [2, 3, 9, 10]
    rounds = 800
    draw = jax.vmap(
        lambda key: anchors.sample_anchors(key, supervised, np.array([12]), 3)
    )
    at, real = drafting.quick_jit(draw)(jax.random.split(KEY, rounds))
    at = np.asarray(at)[:, 0]
    assert np.asarray(real).all() and (np.diff(at) > 0).all()
    counts = np.bincount(at.ravel(), minlength=16)
    assert counts.sum() == counts[allowed].sum()
    # Each of 4 candidates is kept with probability 3/4: sd sqrt(.1875 / 800) = .0153.
    np.testing.assert_allclose(counts[allowed] / rounds, 0.75, atol=4 * 0.0153)


def test_anchors_do_not_depend_on_padding_or_on_the_cut():
    supervised = np.random.default_rng(0).random((4, 18)) < 0.9
    length = np.array([18, 12, 15, 18])

    @drafting.quick_jit
    def sample(key, supervised, length):
        return anchors.sample_anchors(key, supervised, length, 5)

    want, _ = sample(KEY, supervised, length)
    assert len({tuple(np.asarray(row)) for row in want}) == 4
    for first in (0, 2):
        keys, part = anchors.row_keys(KEY, 2, first), slice(first, first + 2)
        got, _ = sample(keys, supervised[part], length[part])
        np.testing.assert_array_equal(got, want[part])
    wider, _ = sample(KEY, np.pad(supervised, ((0, 0), (0, 9))), length)
    np.testing.assert_array_equal(wider, want)
    other, _ = sample(jax.random.key(1), supervised, length)
    assert not np.array_equal(other, want)


def test_more_anchors_than_positions_are_missing_ones():
    at, real = anchors.sample_anchors(KEY, np.ones((1, 6), bool), np.array([5]), 9)
    np.testing.assert_array_equal(at[0], [0, 1, 2, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(real[0], [True] * 4 + [False] * 5)


def test_fewer_drafts_are_served_with_the_same_weights():
    programs, params = build()
    few = dataclasses.replace(programs.drafter.options, num_draft=2)
    served = drafting.Programs(dflash.make(few, drafting.TINY))
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(served.drafter.init, KEY))
    assert shapes == jax.tree.map(jnp.shape, params)
    state = served.drafter.init_state(1, 8)
    proposal, _ = served.propose(
        params, frozen(), state, np.array([5], np.int32), np.zeros(1, np.int32)
    )
    assert proposal.tokens_BM.shape == (1, 2)
    # Nothing but the anchor and the two masks is there to see.
    o = programs.drafter.options
    rows = oracles.draft_block(
        jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"]),
        frozen().embed_VD, np.zeros((0, 3, 32)), 5, 0, o.mask_id, 3,
        kinds=kinds_of(o), num_heads=o.num_heads, num_kv_heads=o.num_kv_heads,
        head_dim=o.head_dim, theta=o.rope_theta, eps=o.norm_eps,
    )  # fmt: skip
    want = rows[1:] @ frozen().head_DU
    np.testing.assert_allclose(proposal.law.logits_BTV[0], want, atol=2e-5)


def test_a_reduced_vocabulary_proposes_target_ids():
    ids = np.arange(1, 67, 5)
    programs, params = build()
    state = programs.drafter.init_state(2, 8)
    proposal, _ = programs.propose(
        params, drafting.make_frozen(target_ids=ids), state,
        np.array([4, 5]), np.array([0, 0]),
    )  # fmt: skip
    np.testing.assert_array_equal(proposal.tokens_BM, ids[proposal.draft_ids_BM])
    np.testing.assert_array_equal(proposal.law.target_ids, ids)


def test_usable_stops_before_the_first_row_that_is_not_finite(monkeypatch):
    programs, params = build()
    poison_BMU = np.zeros((5, SIZE_M, 67), np.float32)
    poison_BMU[0, :, 9] = -np.inf  # a token that is never drawn: no reason to stop
    poison_BMU[1, 2] = -np.inf
    poison_BMU[2, 1, 9] = np.nan
    poison_BMU[3, 0, 9] = np.inf
    monkeypatch.setattr(
        blocks, "head_logits", lambda lent, rows: rows @ lent.head_DU + poison_BMU
    )
    propose = drafting.Programs(programs.drafter).propose
    state = programs.drafter.init_state(5, 8)
    zero = np.zeros(5, np.int32)
    proposal, _ = propose(params, frozen(), state, zero + 4, zero)
    np.testing.assert_array_equal(proposal.usable_B, [4, 2, 1, 0, 4])


def test_bfloat16_features_are_read_in_float32():
    programs, params = build()
    batch = whole_batch(programs)
    narrow = batch.replace(features_BSLD=jnp.asarray(batch.features_BSLD, jnp.bfloat16))
    wide = narrow.replace(features_BSLD=np.asarray(narrow.features_BSLD, np.float32))
    got, want = (
        programs.train(params, frozen(), b, KEY).hidden_XMD for b in (narrow, wide)
    )
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mask_id": 67}, "mask_id=67"),
        ({"mask_id": -1}, "mask_id=-1"),
        ({"num_draft": 0}, "num_draft=0"),
        ({"layer_ids": (1, 5)}, "layer_ids"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("full_attention", "linear")}, "layer_types"),
        ({"layer_types": (SLIDING, FULL)}, "sliding_window=None"),
        ({"num_heads": 3}, "num_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"num_anchors": 0}, "num_anchors=0"),
        ({"blocks": 3}, "blocks"),
    ],
)
def test_bad_options_are_named(changes, says):
    options = {"mask_id": 3, **changes}
    with pytest.raises(UserError, match=says):
        base.load("dflash", options, drafting.TINY)


def test_default_layer_ids_follow_the_public_formula():
    deep = dataclasses.replace(drafting.TINY, num_layers=36)
    options = dflash.Options(mask_id=1)
    assert blocks.resolve(options, deep).layer_ids == (1, 9, 17, 25, 33)
    assert blocks.resolve(options, drafting.TINY).layer_ids == (1, 2, 3)
