"""What EAGLE and EAGLE-3 share: rollouts, chains, trees, draft state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import masks
from spec_jax.core.errors import UserError
from spec_jax.core.proposal import TokenLaw, prob_of
from spec_jax.core.topology import CHAIN_TOPOLOGY, Topology
from spec_jax.drafters import base
from spec_jax.nn import recurrent
from tests.support import drafting
from tests.support.feedback import SMALL

KEY = jax.random.key(0)
SIZE_S, SIZE_M, ANCHORS = 14, 3, (6, 9)
OPTIONS = {
    "eagle": {"num_draft": SIZE_M, "num_starts": SIZE_S, "feature_noise": 0.0},
    "eagle3": {"num_draft": SIZE_M, "num_starts": SIZE_S, "ttt_length": SIZE_M},
}
both = pytest.mark.parametrize("name", OPTIONS)


@functools.cache
def build(name):
    """Drafter, stirred parameters, frozen, a batch of two."""
    drafter = base.load(name, OPTIONS[name], SMALL)
    params = drafting.stir(drafter.init(KEY), scale=0.4)
    batch = drafting.make_batch(drafter, [SIZE_S, 12], SIZE_S, spec=SMALL)
    return drafter, params, drafting.make_frozen(spec=SMALL), batch


@functools.cache
def programs(name):
    return drafting.Programs(build(name)[0])


def forced(path_BM):
    """A draw that takes the given columns, whatever the logits."""

    def draw(logits_BTU, first_row, target_ids=None):
        size_b, size_t, _ = logits_BTU.shape
        ids_BT = jax.lax.dynamic_slice_in_dim(path_BM, first_row, size_t, 1)
        zeros_BT = jnp.zeros((size_b, size_t))
        one_B = jnp.ones(size_b)
        law = TokenLaw(logits_BTU, one_B, zeros_BT, zeros_BT, ids_BT, target_ids)
        return ids_BT, law

    return draw


@functools.cache
def chain_logits(name):
    """(params, frozen, state, length_B, path_BM) -> logits `[B, M, U]`."""
    drafter = build(name)[0]

    def run(params, frozen, state, length_B, path_BM):
        made, _ = drafter.propose(
            params,
            frozen,
            state,
            jnp.zeros_like(length_B),
            length_B,
            forced(path_BM),
            CHAIN_TOPOLOGY,
        )
        return made.law.logits_BTV

    return drafting.quick_jit(run)


@functools.cache
def served_state(name, width=16):
    """Draft state after the rows before the anchors, absorbed in pieces."""
    _, params, frozen, batch = build(name)
    state = programs(name).drafter.init_state(2, SIZE_S + 8)
    start_B = np.zeros(2, np.int32)
    while (start_B < ANCHORS).any():
        length_B = np.minimum(np.array(ANCHORS) - start_B, width).astype(np.int32)
        rows = drafting.rows_of(batch, start_B, length_B, 16)
        state = programs(name).extend(params, frozen, state, rows)
        start_B = start_B + length_B
    assert np.isfinite(state.latent_NBD).all(), "the padding is NaN"
    return state


def rollout_logits(name, outputs, frozen):
    """`[B, N, J, U]` of training rows."""
    head = frozen.head_DU if outputs.head_DU is None else outputs.head_DU
    x = np.asarray(outputs.hidden_XMD) @ np.asarray(head)
    return x.reshape(*outputs.anchors_BN.shape, *x.shape[1:])


@both
def test_training_rows_are_the_rows_that_are_served(name):
    _, params, frozen, batch = build(name)
    outputs = programs(name).train(params, frozen, batch, KEY)
    trained = rollout_logits(name, outputs, frozen)
    text_BM = np.stack(
        [batch.tokens_BS[b, a + 1 : a + 1 + SIZE_M] for b, a in enumerate(ANCHORS)]
    )
    state = served_state(name, width=4)
    length_B = np.array(ANCHORS, np.int32)
    served = chain_logits(name)(params, frozen, state, length_B, text_BM)
    for b, anchor in enumerate(ANCHORS):
        (n,) = np.flatnonzero(outputs.anchors_BN[b] == anchor)
        depth = trained.shape[2]
        np.testing.assert_allclose(
            served[b, :depth], trained[b, n], atol=2e-4, rtol=2e-4
        )


FAR = (3, 200, 1000)


@both
def test_training_is_serving_far_into_a_text(name):
    drafter, params, frozen, _ = build(name)
    size_s = FAR[-1] + SIZE_M + 2
    batch = drafting.make_batch(drafter, [size_s] * len(FAR), size_s, spec=SMALL)
    supervised = np.zeros((len(FAR), size_s), bool)
    for b, anchor in enumerate(FAR):
        supervised[b, anchor : anchor + SIZE_M + 1] = True
    batch = batch.replace(supervised_BS=supervised)
    far = drafting.Programs(drafter)
    outputs = far.train(params, frozen, batch, KEY)
    trained = rollout_logits(name, outputs, frozen)
    made, _ = far.serve(params, frozen, batch, FAR, [256], 256, size_s + 8)
    for b, anchor in enumerate(FAR):
        (n,) = np.flatnonzero(outputs.anchors_BN[b] == anchor)
        np.testing.assert_allclose(
            made.law.logits_BTV[b, 0], trained[b, n, 0], atol=2e-4, rtol=2e-4
        )


@both
def test_only_features_up_to_the_start_are_seen(name):
    drafter, params, frozen, batch = build(name)

    def probe(features_BSLD, teacher_BSD, n, step):
        moved = batch.replace(features_BSLD=features_BSLD, teacher_BSD=teacher_BSD)
        out = drafter.train_outputs(params, frozen, moved, KEY)
        rows = out.hidden_XMD.reshape(2, SIZE_S, -1, SMALL.hidden_size)
        return jnp.sin(rows[0, n, step]).sum(), out.anchors_BN

    gradient = drafting.quick_jit(jax.grad(probe, argnums=(0, 1), has_aux=True))
    depth = SIZE_M if name == "eagle3" else 1
    for n, step in ((4, 0), (6, depth - 1)):
        (by_layer, by_teacher), anchors_BN = gradient(
            batch.features_BSLD, batch.teacher_BSD, n, step
        )
        # EAGLE-3's teacher is a target only; EAGLE has no other feature.
        seen = np.abs(by_layer if name == "eagle3" else by_teacher)
        if name == "eagle3":
            assert not by_teacher.any()
        seen = seen.reshape(2, SIZE_S, -1).max(-1)
        start = int(anchors_BN[0, n]) - 1
        assert (seen[0, : start + 1] > 0).all()
        assert not seen[0, start + 1 :].any() and not seen[1].any()


def test_a_step_reads_its_own_token_and_no_later_one():
    _, params, frozen, batch = build("eagle3")
    want = programs("eagle3").train(params, frozen, batch, KEY)
    at = 8
    tokens = batch.tokens_BS.copy()
    tokens[:, at] = (tokens[:, at] + 1) % SMALL.vocab_size
    got = programs("eagle3").train(params, frozen, batch.replace(tokens_BS=tokens), KEY)
    np.testing.assert_array_equal(got.anchors_BN, want.anchors_BN)
    reads = want.anchors_BN[..., None] + np.arange(SIZE_M) >= at
    same = (got.hidden_XMD == want.hidden_XMD).all(-1).reshape(reads.shape)
    real = want.valid_XM.reshape(reads.shape)[..., :1] > 0
    assert (same == ~reads)[np.broadcast_to(real, reads.shape)].all()


def test_a_later_step_sees_the_keys_of_its_own_rollout():
    """The Jacobian of depth 2 by the key of depth 1 (not carried, it is zero)."""
    rng = np.random.default_rng(0)
    b, n, s, k, g, c = 2, 3, 5, 2, 2, 4

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    args = [normal(b, n, g, 2, c), normal(b, s, g, c), normal(b, s, g, c)]
    args += [normal(b, n, k, g, c), normal(b, n, k, g, c)]
    starts = np.array([[1, 3, 4], [0, 2, 3]], np.int32)

    @drafting.quick_jit
    def gradients(*args):
        def of_rollout(*args):
            return jnp.sin(recurrent.attend_rollouts(*args, starts))[0, 1].sum()

        return jax.grad(of_rollout, argnums=(1, 2, 3, 4))(*args)

    by_k, by_v, by_own_k, by_own_v = (np.abs(x) for x in gradients(*args))
    for own in (by_own_k, by_own_v):
        assert (own[0, 1].max((-1, -2)) > 0).all()
        assert not own[0, [0, 2]].any() and not own[1].any()
    for prefix in (by_k, by_v):
        assert (prefix[0, :4].max((-1, -2)) > 0).all()
        assert not prefix[0, 4:].any() and not prefix[1].any()


def test_rollout_attention_is_the_packed_attention():
    """Against one softmax over [S, (K + 1) S] under the predicate itself."""
    rng = np.random.default_rng(1)
    s, k, c = 5, 2, 4
    q, keys, values = (rng.normal(size=(s, c)) for _ in range(3))
    own_k, own_v = rng.normal(size=(2, s, k, c))
    got = drafting.quick_jit(recurrent.attend_rollouts)(
        jnp.asarray(q, jnp.float32)[None, :, None, None],
        *(jnp.asarray(x, jnp.float32)[None, :, None] for x in (keys, values)),
        *(jnp.asarray(x, jnp.float32)[None, :, :, None] for x in (own_k, own_v)),
        jnp.arange(s)[None],
    )[0, :, 0, 0]
    column = np.tile(np.arange(s), k + 1)
    step = np.repeat(np.arange(k + 1), s)
    all_k = np.concatenate([keys, own_k[:, 0], own_k[:, 1]])
    all_v = np.concatenate([values, own_v[:, 0], own_v[:, 1]])
    for t in range(s):
        seen = (step == 0) & (column <= t) | (step > 0) & (column == t)
        np.testing.assert_array_equal(masks.rollout(t, k, column, step), seen)
        score = np.where(seen, all_k @ q[t] / np.sqrt(c), -np.inf)
        weight = np.exp(score - score.max())
        want = weight @ all_v / weight.sum()
        np.testing.assert_allclose(got[t], want, atol=1e-5)
    # An earlier step sees no key of a later one.
    assert not masks.rollout(2, 1, 2, 2)


@both
def test_draft_state_is_what_the_text_makes_it(name):
    """Pieces of any width, rounds between them, or all at once: the same rows."""
    _, params, frozen, batch = build(name)
    want = served_state(name)
    prog = programs(name)
    for widths in ((3,), (1, 5, 2)):
        start_B = np.zeros(2, np.int32)
        state = prog.drafter.init_state(2, SIZE_S + 8)
        pieces = iter([*widths, *[widths[-1]] * SIZE_S])
        while (start_B < ANCHORS).any():
            length_B = np.minimum(np.array(ANCHORS) - start_B, next(pieces))
            rows = drafting.rows_of(batch, start_B, length_B, 16)
            state = prog.extend(params, frozen, state, rows)
            start_B = (start_B + length_B).astype(np.int32)
            # A round drafts from its own outputs; none of that may stay.
            _, state = prog.propose(params, frozen, state, np.zeros(2, int), start_B)
        np.testing.assert_allclose(state.latent_NBD, want.latent_NBD, atol=1e-4)
        for got, full in zip(
            jax.tree.leaves(state.cache), jax.tree.leaves(want.cache), strict=True
        ):
            for b, length in enumerate(ANCHORS):
                np.testing.assert_allclose(
                    got[:, b, :, :length], full[:, b, :, :length], atol=1e-5
                )


@both
def test_no_rows_leave_the_latent(name):
    _, params, frozen, batch = build(name)
    state = served_state(name)
    rows = drafting.rows_of(batch, ANCHORS, [0, 2], 16)
    after = programs(name).extend(params, frozen, state, rows)
    np.testing.assert_array_equal(after.latent_NBD[:, 0], state.latent_NBD[:, 0])
    assert (after.latent_NBD[:, 1] != state.latent_NBD[:, 1]).any()


@functools.cache
def proposer(name, topology):
    drafter = build(name)[0]
    return drafting.quick_jit(
        lambda params, frozen, state, length_B: drafter.propose(
            params,
            frozen,
            state,
            jnp.zeros_like(length_B),
            length_B,
            drafting.draw_greedy,
            topology,
        )[0]
    )


def tree_of(name, topology, frozen=None, state=None):
    _, params, lent, _ = build(name)
    made = proposer(name, topology)(
        params,
        frozen or lent,
        served_state(name) if state is None else state,
        np.array(ANCHORS, np.int32),
    )
    return jax.tree.map(np.asarray, made)


CHAINS = [
    Topology("static_tree", parents=tuple(range(SIZE_M))),
    Topology("dynamic_tree", depth=SIZE_M, top_k=1, nodes=SIZE_M),
]


@both
@pytest.mark.parametrize("topology", CHAINS, ids=lambda t: t.kind)
def test_a_tree_of_one_branch_is_the_greedy_chain(name, topology):
    made, chain = tree_of(name, topology), tree_of(name, CHAIN_TOPOLOGY)
    np.testing.assert_array_equal(made.tokens_BM, chain.tokens_BM)
    np.testing.assert_array_equal(made.parents_BW, [range(-1, SIZE_M)] * 2)


TREES = [
    Topology("static_tree", parents=(0, 0, 1, 1, 2, 4)),
    Topology("dynamic_tree", depth=3, top_k=2, nodes=7),
]


@both
@pytest.mark.parametrize("topology", TREES, ids=lambda t: t.kind)
def test_every_node_follows_its_own_path(name, topology):
    """A node is a likeliest child under the chain forced along its ancestors."""
    _, params, frozen, _ = build(name)
    made = tree_of(name, topology)
    state, length_B = served_state(name), np.array(ANCHORS, np.int32)
    tokens, parents = np.asarray(made.tokens_BM), np.asarray(made.parents_BW)
    size_m = tokens.shape[1]
    paths = [[[]], [[]]]
    for b in range(2):
        for row in range(1, size_m + 1):
            paths[b].append([*paths[b][parents[b, row]], tokens[b, row - 1]])
    for row in range(1, size_m + 1):
        forced_BM = np.zeros((2, SIZE_M), np.int32)
        for b in range(2):
            forced_BM[b, : len(paths[b][row])] = paths[b][row]
        logits = chain_logits(name)(params, frozen, state, length_B, forced_BM)
        for b in range(2):
            parent = parents[b, row]
            rank = [r for r in range(1, row) if parents[b, r] == parent]
            order = np.argsort(-logits[b, len(paths[b][row]) - 1], kind="stable")
            assert tokens[b, row - 1] == order[len(rank)]
    assert (made.usable_B == size_m).all()
    np.testing.assert_array_equal(prob_of(made.law, made.draft_ids_BM), 1.0)


@both
def test_a_dynamic_tree_keeps_the_best_scores(name):
    """All paths of two levels, scored through chains."""
    _, params, frozen, _ = build(name)
    size_u, nodes = SMALL.vocab_size, 9
    made = tree_of(name, Topology("dynamic_tree", depth=2, top_k=size_u, nodes=nodes))
    state, length_B = served_state(name), np.array(ANCHORS, np.int32)
    scores = [{}, {}]
    for a in range(size_u):
        path_BM = np.full((2, SIZE_M), a, np.int32)
        logits = chain_logits(name)(params, frozen, state, length_B, path_BM)
        log_q = np.asarray(jax.nn.log_softmax(logits))
        for b in range(2):
            scores[b][(a,)] = log_q[b, 0, a]
            for c in range(size_u):
                scores[b][(a, c)] = log_q[b, 0, a] + log_q[b, 1, c]
    for b in range(2):
        paths = [()]
        for token, parent in zip(
            made.tokens_BM[b], made.parents_BW[b, 1:], strict=True
        ):
            paths.append((*paths[int(parent)], int(token)))
        best = sorted(scores[b], key=scores[b].get, reverse=True)[:nodes]
        assert set(paths[1:]) == set(best)


@both
def test_a_tree_over_part_of_the_vocabulary(name):
    kept = np.array([1, 4, 5, 9, 12])
    frozen = drafting.make_frozen(spec=SMALL, target_ids=kept)
    made = tree_of(name, TREES[1], frozen=frozen)
    assert np.isin(made.tokens_BM, kept).all()
    np.testing.assert_array_equal(made.law.target_ids[..., 0], made.tokens_BM)


@both
def test_rows_that_are_not_finite_make_no_usable_tree(name):
    _, params, frozen, batch = build(name)
    features, teacher = batch.features_BSLD.copy(), batch.teacher_BSD.copy()
    features[1], teacher[1] = np.nan, np.nan
    poisoned = batch.replace(features_BSLD=features, teacher_BSD=teacher)
    rows = drafting.rows_of(poisoned, [0, 0], ANCHORS, 16)
    state = programs(name).drafter.init_state(2, SIZE_S + 8)
    state = programs(name).extend(params, frozen, state, rows)
    for topology in TREES:
        made = tree_of(name, topology, state=state)
        assert made.usable_B.tolist() == [made.tokens_BM.shape[1], 0]


@both
def test_training_without_the_teacher_is_refused(name):
    drafter, params, frozen, batch = build(name)
    with pytest.raises(UserError, match="teacher_BSD is None"):
        drafter.train_outputs(params, frozen, batch.replace(teacher_BSD=None), KEY)
    assert drafter.needs.teacher


@both
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_draft": 0}, "num_draft=0"),
        ({"num_starts": 0}, "num_starts=0"),
        ({"num_heads": 3}, "num_heads=3"),
        ({"head_dim": 5}, "head_dim=5"),
    ],
)
def test_options_that_do_not_fit_are_refused(name, changes, match):
    with pytest.raises(UserError, match=match):
        base.load(name, changes, SMALL)
