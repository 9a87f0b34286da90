"""DFlash 2: the convolution, the candidates and the walk, against loops.

Every position of the sequence is an anchor, as in the tests of DFlash.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import proposal as laws
from spec_jax.core.errors import UserError
from spec_jax.core.topology import CHAIN_TOPOLOGY
from spec_jax.drafters import base, blocks
from spec_jax.nn import conv
from spec_jax.sampling import draws, transform
from tests.support import drafting

SIZE_S, SIZE_M, RANK, SIZE_K = 14, 4, 6, 5
ANCHORS = np.arange(1, SIZE_S - 1)
KEY = jax.random.key(0)
REDUCED = np.arange(2, 67, 3)
BACKBONE = {
    "num_layers": 1,
    "num_draft": SIZE_M,
    "mask_id": drafting.MASK_ID,
    "num_anchors": len(ANCHORS),
}


def load(**changes):
    options = {
        **BACKBONE,
        "conv_group_size": 8,
        "selector_rank": RANK,
        "selector_top_k": SIZE_K,
        **changes,
    }
    return base.load("dflash2", options, drafting.TINY)


@functools.cache
def build():
    """Programs and stirred parameters, large enough for both parts to matter."""
    programs = drafting.Programs(load())
    return programs, drafting.stir(programs.init(KEY), scale=0.4)


@functools.cache
def frozen():
    """The lent embedding and head, scaled for logits of about one."""
    lent = drafting.make_frozen()
    return lent.replace(head_DU=lent.head_DU / np.float32(32**0.5))


@functools.cache
def batch():
    return drafting.make_batch(build()[0].drafter, [SIZE_S], SIZE_S, prompt=1)


@functools.cache
def trained():
    programs, params = build()
    return jax.device_get(programs.train(params, frozen(), batch(), KEY))


def state_at(programs, params, at):
    """The state before each anchor of the one sequence."""
    slots = jax.tree.map(lambda x: np.repeat(x, len(at), 0), batch())
    return programs.serve(params, frozen(), slots, at, [8], 8, SIZE_S + 6)


# The convolution.


def conv_oracle(z, base_kernel, delta, group):
    """One block's rows `[Q, D]`, by loops in float64."""
    out = np.zeros(z.shape)
    for j in range(z.shape[0]):
        for c in range(z.shape[1]):
            for tap in range(base_kernel.shape[0]):
                if j - tap >= 0:
                    factor = base_kernel[tap, c] + delta[j, tap, c // group]
                    out[j, c] += factor * z[j - tap, c]
    return out


@pytest.mark.parametrize("taps", [1, 2, 3, 7])
def test_a_convolved_sublayer_matches_the_float64_oracle(taps):
    size_q, size_d, group = 5, 12, 4
    rng = np.random.default_rng(taps)
    kernel = {
        "base_kernel": rng.normal(size=(2, taps, size_d)),
        "kernel_projection": rng.normal(size=(size_d, 2, taps, size_d // group)),
    }
    weights = {"layers_0": {"mlp": kernel}}
    y = rng.normal(size=(2, 3, size_q, size_d))  # six blocks, none sees another
    mixer = rng.normal(size=(size_d, size_d))
    got = conv.around(jax.tree.map(np.float32, weights))(
        0, "mlp", lambda z: jnp.tanh(z @ mixer.astype(np.float32)), y.astype(np.float32)
    )
    for b in range(2):
        for n in range(3):
            delta = np.einsum("qd,dstg->sqtg", y[b, n], kernel["kernel_projection"])
            before = conv_oracle(y[b, n], kernel["base_kernel"][0], delta[0], group)
            after = conv_oracle(
                np.tanh(before @ mixer), kernel["base_kernel"][1], delta[1], group
            )
            np.testing.assert_allclose(got[b, n], after, atol=2e-4, rtol=2e-4)


def test_a_tap_reaches_back_inside_its_block_only():
    taps, groups = 3, 2
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4, 6, 8)).astype(np.float32)
    kernel = rng.normal(size=(taps, 8)).astype(np.float32)
    delta = rng.normal(size=(4, 6, taps, groups)).astype(np.float32)
    before = np.asarray(conv.convolve(z, kernel, delta))
    z[2, 1] += 1.0
    z[1, 5] += 1.0  # a block's last row: nothing after it, nor around it
    moved = np.asarray(conv.convolve(z, kernel, delta) != before).any(-1)
    want = np.zeros((4, 6), bool)
    want[2, 1:4] = want[1, 5] = True
    np.testing.assert_array_equal(moved, want)


# The backbone.


def test_a_fresh_one_is_dflash_bit_for_bit():
    plain = drafting.Programs(base.load("dflash", BACKBONE, drafting.TINY))
    fresh, _ = build()
    shared, params = plain.init(KEY), fresh.init(KEY)
    own = {k: v for k, v in params["params"].items() if k in shared["params"]}
    jax.tree.map(np.testing.assert_array_equal, own, shared["params"])
    # Any backbone, not only a fresh one.
    shared = drafting.stir(shared)
    params = {"params": {**params["params"], **shared["params"]}}
    outs = [
        jax.device_get(programs.train(tree, frozen(), batch(), KEY))
        for programs, tree in ((plain, shared), (fresh, params))
    ]
    np.testing.assert_array_equal(outs[1].hidden_XMD, outs[0].hidden_XMD)
    at = [2, 5, 9]
    want, _ = jax.device_get(state_at(plain, shared, at))
    got, _ = jax.device_get(state_at(fresh, params, at))
    np.testing.assert_array_equal(got.tokens_BM, want.tokens_BM)
    np.testing.assert_array_equal(
        got.law.logits_BTV,
        np.take_along_axis(want.law.logits_BTV, got.law.target_ids, -1),
    )


def test_a_feature_moves_no_block_at_or_before_it():
    programs, params = build()

    def run(features):
        moved = batch().replace(features_BSLD=features)
        out = jax.device_get(programs.train(params, frozen(), moved, KEY))
        return np.concatenate([out.hidden_XMD, out.selector.query_XME], -1)

    before = run(batch().features_BSLD)
    for p in (0, 1, 5, SIZE_S - 3):
        features = batch().features_BSLD.copy()
        features[0, p] *= -3.0
        change = np.abs(run(features) - before).max((1, 2))
        assert (change[p >= ANCHORS] == 0.0).all(), f"feature {p} leaked"
        assert (change[p < ANCHORS] > 1e-4).all(), f"feature {p} is not read"


def test_a_token_moves_its_own_block_and_the_query_after_it():
    programs, params = build()
    tokens = batch().tokens_BS.copy()
    tokens[0, 8] = (tokens[0, 8] + 1) % 67
    other = batch().replace(tokens_BS=tokens)
    after = jax.device_get(programs.train(params, frozen(), other, KEY))
    moved = np.asarray(trained().hidden_XMD != after.hidden_XMD).any((1, 2))
    np.testing.assert_array_equal(moved, ANCHORS == 8)
    moved = trained().selector.query_XME != after.selector.query_XME
    row = ANCHORS[:, None] + np.arange(SIZE_M)[None] == 8
    np.testing.assert_array_equal(
        np.asarray(moved).any(-1), row | (ANCHORS == 8)[:, None]
    )


# The selector.


def scores_oracle(params, hidden_MD, choose, anchor, lent=None):
    """Candidates (columns) and scores of each row, in float64.

    Args:
      choose: (row, columns, scores) -> the column of that row's draft.
      anchor: the token before the first.
    """
    lent = lent or frozen()
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"]["selector"])
    head = np.asarray(lent.head_DU, np.float64)
    previous, columns, scores = anchor, [], []
    for row, h in enumerate(np.asarray(hidden_MD, np.float64)):
        unary = h @ head
        best = sorted(range(len(unary)), key=lambda c: (-unary[c], c))[:SIZE_K]
        query = w["predecessor_codebook"][previous] * (h @ w["hidden_projection"])
        columns.append(best)
        scores.append([unary[c] + query @ w["successor_codebook"][c] for c in best])
        previous = choose(row, best, scores[-1])
    return np.array(columns), np.array(scores)


def test_serving_scores_follow_the_drafts_and_match_the_oracle():
    programs, params = build()
    drafter = programs.drafter
    at, tokens = np.array([1, 4, 9]), batch().tokens_BS[0]
    chosen = np.array([[0, 3, 1, 4], [2, 2, 0, 1], [4, 0, 3, 2]], np.int32)

    @drafting.quick_jit
    def propose(params, state, anchor_B, length_B, ids_BM):
        def draw(logits_BTU, first_row, target_ids=None):
            _, law = drafting.draw_greedy(logits_BTU, first_row, target_ids)
            return ids_BM[:, first_row : first_row + logits_BTU.shape[1]], law

        return drafter.propose(
            params, frozen(), state, anchor_B, length_B, draw, CHAIN_TOPOLOGY
        )[0]

    _, state = state_at(programs, params, at)
    made = jax.device_get(propose(params, state, tokens[at], at, chosen))
    for i, a in enumerate(at):
        columns, scores = scores_oracle(
            params,
            trained().hidden_XMD[a - 1],
            lambda row, best, _, i=i: best[chosen[i, row]],
            tokens[a],
        )
        np.testing.assert_array_equal(made.law.target_ids[i], columns)
        np.testing.assert_allclose(made.law.logits_BTV[i], scores, atol=3e-5, rtol=3e-5)
        np.testing.assert_array_equal(
            made.tokens_BM[i], columns[np.arange(SIZE_M), chosen[i]]
        )


def test_training_queries_follow_the_true_tokens():
    _, params = build()
    out, tokens = trained(), batch().tokens_BS[0]
    w = jax.tree.map(np.asarray, params["params"]["selector"])
    assert out.selector.size_k == SIZE_K
    np.testing.assert_array_equal(out.selector.successor_UE, w["successor_codebook"])
    for x, anchor in enumerate(ANCHORS):
        for k in range(min(SIZE_M, SIZE_S - anchor)):
            h = np.asarray(out.hidden_XMD[x, k], np.float64)
            want = w["predecessor_codebook"][tokens[anchor + k]] * (
                h @ w["hidden_projection"]
            )
            np.testing.assert_allclose(
                out.selector.query_XME[x, k], want, atol=2e-5, rtol=2e-5
            )
    np.testing.assert_array_equal(
        out.selector.detached_query_XME, out.selector.query_XME
    )


def test_a_detached_query_moves_the_selector_alone():
    programs, params = build()

    def total(params, name):
        out = programs.drafter.train_outputs(params, frozen(), batch(), KEY)
        return (getattr(out.selector, name) ** 2).sum()

    for name, reaches in (("query_XME", True), ("detached_query_XME", False)):
        grads = drafting.quick_jit(jax.grad(functools.partial(total, name=name)))(
            params
        )["params"]
        for leaf in jax.tree.leaves((grads["fc"], grads["layers_0"], grads["conv"])):
            assert np.asarray(leaf).any() == reaches
        assert np.asarray(grads["selector"]["hidden_projection"]).any()
        assert np.asarray(grads["selector"]["predecessor_codebook"]).any()


def draw_with(uniform_BM, temperature):
    """The production transform and draw, with given uniforms."""
    size_b = uniform_BM.shape[0]
    sampling = transform.all_greedy(size_b)
    if temperature:
        sampling = dataclasses.replace(
            sampling,
            greedy_B=jnp.zeros(size_b, bool),
            temperature_B=jnp.full(size_b, temperature, jnp.float32),
        )

    def draw(logits_BTU, first_row, target_ids=None):
        law = transform.law_of(logits_BTU, sampling, target_ids)
        rows = slice(first_row, first_row + logits_BTU.shape[1])
        return draws.draw(law, uniform_BM[:, rows]), law

    return draw


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_walk_inverts_the_cdf_or_takes_the_first_maximum(temperature):
    programs, params = build()
    at, tokens = np.array([1, 4, 6, 9]), batch().tokens_BS[0]
    uniform = np.random.default_rng(3).random((len(at), SIZE_M)).astype(np.float32)
    uniform[0] = [0.0, 0.999999, 0.5, 0.0]
    _, state = state_at(programs, params, at)
    made, _ = drafting.Programs(
        programs.drafter, draw_with(uniform, temperature)
    ).propose(params, frozen(), state, tokens[at], at.astype(np.int32))
    mass = np.asarray(drafting.quick_jit(laws.prob_of)(made.law, made.draft_ids_BM))
    row_probs = drafting.quick_jit(lambda law, j: laws.row_probs(law, j, 67))
    rows = [np.asarray(row_probs(made.law, np.full(len(at), j))) for j in range(SIZE_M)]

    def pick(row, best, scores, i):
        scores = np.asarray(scores)
        if not temperature:
            return best[int(np.argmax(scores))]
        q = np.exp((scores - max(scores)) / temperature)
        upto = np.cumsum(q / q.sum())
        return best[min(int((uniform[i, row] >= upto).sum()), SIZE_K - 1)]

    for i, a in enumerate(at):
        columns, scores = scores_oracle(
            params,
            trained().hidden_XMD[a - 1],
            functools.partial(pick, i=i),
            tokens[a],
        )
        for j in range(SIZE_M):
            token = pick(j, list(columns[j]), scores[j], i)
            assert int(made.tokens_BM[i, j]) == token
            q_V = rows[j][i]
            want_V = np.zeros(67)
            if temperature:
                weight = np.exp((scores[j] - scores[j].max()) / temperature)
                want_V[columns[j]] = weight / weight.sum()
            else:
                want_V[token] = 1.0
            np.testing.assert_allclose(q_V, want_V, atol=1e-5)
            np.testing.assert_allclose(q_V.sum(), 1.0, atol=1e-5)
            assert (q_V > 0).sum() == (SIZE_K if temperature else 1)
            np.testing.assert_allclose(mass[i, j], want_V[token], atol=1e-5)


def test_equal_scores_go_to_the_lower_token():
    programs, params = build()
    lent = frozen().replace(head_DU=np.zeros_like(frozen().head_DU))
    fresh = {**params["params"], "selector": programs.init(KEY)["params"]["selector"]}
    state = programs.drafter.init_state(1, 8)
    zero = np.zeros(1, np.int32)
    made, _ = programs.propose({"params": fresh}, lent, state, zero + 4, zero)
    np.testing.assert_array_equal(made.tokens_BM, np.zeros((1, SIZE_M)))
    np.testing.assert_array_equal(made.law.target_ids[0, 0], np.arange(SIZE_K))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_stay_in_bounds(temperature, monkeypatch):
    programs, params = build()
    poison_BMU = np.zeros((4, SIZE_M, 67), np.float32)
    poison_BMU[0, :, 9] = -np.inf  # a token that is never drawn: no reason to stop
    poison_BMU[1, 2] = -np.inf
    poison_BMU[2, 1, 9] = np.nan
    poison_BMU[3, 0] = np.nan
    monkeypatch.setattr(
        blocks, "head_logits", lambda lent, rows: rows @ lent.head_DU + poison_BMU
    )
    uniform = np.full((4, SIZE_M), 0.999, np.float32)
    propose = drafting.Programs(
        programs.drafter, draw_with(uniform, temperature)
    ).propose
    state = programs.drafter.init_state(4, 8)
    zero = np.zeros(4, np.int32)
    made, _ = propose(params, frozen(), state, zero + 4, zero)
    np.testing.assert_array_equal(made.usable_B, [4, 2, 1, 0])
    made = jax.device_get(made)
    assert ((made.tokens_BM >= 0) & (made.tokens_BM < 67)).all()
    assert ((made.draft_ids_BM >= 0) & (made.draft_ids_BM < SIZE_K)).all()


def test_without_its_selector_it_drafts_from_the_unary_logits():
    _, params = build()
    off = drafting.Programs(load(use_selector=False))
    at = np.array([3, 7])
    made, _ = jax.device_get(state_at(off, params, at))
    assert not made.law.is_sparse
    want = np.asarray(trained().hidden_XMD)[at - 1] @ frozen().head_DU
    np.testing.assert_allclose(made.law.logits_BTV, want, atol=2e-5, rtol=2e-5)
    np.testing.assert_array_equal(made.tokens_BM, want.argmax(-1))
    # Both ways have the same weights.
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(off.drafter.init, KEY))
    assert shapes == jax.tree.map(jnp.shape, params)


def test_multiplier_and_softcap_shape_the_unary_logits():
    _, params = build()
    shaped = load(output_multiplier=3.0, final_logit_softcapping=2.0)
    off = dataclasses.replace(shaped.options, use_selector=False)
    at = np.array([3, 7])
    made, _ = state_at(
        drafting.Programs(base.load("dflash2", off, drafting.TINY)), params, at
    )
    raw = np.asarray(trained().hidden_XMD)[at - 1] @ frozen().head_DU
    np.testing.assert_allclose(
        made.law.logits_BTV, 2 * np.tanh(3 * raw / 2), atol=2e-5, rtol=2e-5
    )
    with pytest.raises(UserError, match="final_logit_softcapping=2.0"):
        shaped.train_outputs(params, frozen(), batch(), KEY)
    out = drafting.quick_jit(load(output_multiplier=3.0).train_outputs)(
        params, frozen(), batch(), KEY
    )
    np.testing.assert_array_equal(out.hidden_XMD, 3 * trained().hidden_XMD)
    np.testing.assert_array_equal(out.selector.query_XME, trained().selector.query_XME)


def test_a_reduced_vocabulary_keeps_its_own_candidates():
    programs, params = build()
    lent = frozen().replace(
        head_DU=frozen().head_DU[:, REDUCED], target_ids_U=REDUCED.astype(np.int32)
    )
    slots = jax.tree.map(lambda x: np.repeat(x, 1, 0), batch())
    made, _ = jax.device_get(
        programs.serve(params, lent, slots, [4], [8], 8, SIZE_S + 6)
    )
    whole = params["params"]["selector"]
    cut = {**whole, "successor_codebook": whole["successor_codebook"][REDUCED]}
    oracle = {"params": {**params["params"], "selector": cut}}
    columns, scores = scores_oracle(
        oracle,
        trained().hidden_XMD[3],
        lambda row, best, scores: REDUCED[best[int(np.argmax(scores))]],
        int(batch().tokens_BS[0, 4]),
        lent,
    )
    # The oracle's chosen token is a target id, its candidates are columns.
    np.testing.assert_array_equal(made.law.target_ids[0], REDUCED[columns])
    np.testing.assert_allclose(made.law.logits_BTV[0], scores, atol=3e-5, rtol=3e-5)
    # Fewer columns than K: all of them are candidates.
    few = lent.replace(head_DU=lent.head_DU[:, :3], target_ids_U=lent.target_ids_U[:3])
    shapes = jax.eval_shape(programs.drafter.train_outputs, params, few, batch(), KEY)
    assert shapes.selector.size_k == 3
    wrong = load(draft_vocab_size=30)
    with pytest.raises(UserError, match="draft_vocab_size"):
        jax.eval_shape(
            lambda key: wrong.train_outputs(wrong.init(key), lent, batch(), key), KEY
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conv_kernel_size": 0}, "conv_kernel_size=0"),
        ({"conv_group_size": 5}, "conv_group_size=5"),
        ({"selector_rank": 0}, "selector_rank=0"),
        ({"selector_top_k": 0}, "selector_top_k=0"),
        ({"output_multiplier": 0.0}, "output_multiplier=0.0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0"),
        ({"draft_vocab_size": -1}, "draft_vocab_size=-1"),
        ({"mask_id": 67}, "mask_id=67"),
    ],
)
def test_bad_options_are_named(changes, says):
    with pytest.raises(UserError, match=says):
        load(**changes)
