"""DSpark: the Markov walk, its laws and its confidence, against float64 loops.

Every position of the sequence is an anchor, as in the tests of DFlash.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax.core import proposal as laws
from spec_jax.core.errors import UserError
from spec_jax.core.topology import CHAIN_TOPOLOGY
from spec_jax.drafters import base
from spec_jax.objectives import ObjectiveOptions, loss
from tests.support import drafting

SIZE_S, SIZE_M, RANK = 14, 4, 6
ANCHORS = np.arange(1, SIZE_S - 1)
KEY = jax.random.key(0)
REDUCED = np.arange(2, 67, 3)


def load(**changes):
    options = {
        "num_layers": 1,
        "num_draft": SIZE_M,
        "mask_id": drafting.MASK_ID,
        "num_anchors": len(ANCHORS),
        "markov_rank": RANK,
        **changes,
    }
    return base.load("dspark", options, drafting.TINY)


@functools.cache
def build(kind="gated"):
    """Programs and stirred parameters, large enough for the heads to matter."""
    programs = drafting.Programs(load(markov_head_type=kind))
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
def trained(kind):
    programs, params = build(kind)
    return jax.device_get(programs.train(params, frozen(), batch(), KEY))


@functools.cache
def forced(kind):
    """propose(params, state, anchors, lengths, tokens): drafts are given."""
    drafter = build(kind)[0].drafter

    @drafting.quick_jit
    def propose(params, state, anchor_B, length_B, tokens_BM):
        def draw(logits_BTU, first_row, target_ids=None):
            _, law = drafting.draw_greedy(logits_BTU, first_row, target_ids)
            return tokens_BM[:, first_row : first_row + logits_BTU.shape[1]], law

        return drafter.propose(
            params, frozen(), state, anchor_B, length_B, draw, CHAIN_TOPOLOGY
        )[0]

    return lambda *args: jax.device_get(propose(*args))


def served_state(kind, at):
    """The state before each anchor of the one sequence."""
    programs, params = build(kind)
    slots = jax.tree.map(lambda x: np.repeat(x, len(at), 0), batch())
    _, state = programs.serve(params, frozen(), slots, at, [8], 8, SIZE_S + 6)
    return state


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def walk_oracle(kind, params, hidden_MD, choose, anchor):
    """Corrected logits and confidence, row by row, in float64.

    Args:
      choose: (row, logits) -> the token of that row.
      anchor: the token before the first.
    """
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    m, c = w["markov"], w["confidence"]
    head = np.asarray(frozen().head_DU, np.float64)
    state, previous = np.zeros(RANK), anchor
    logits, confidences = [], []
    for row, h in enumerate(np.asarray(hidden_MD, np.float64)):
        e = m["markov_w1"][previous]
        if kind == "vanilla":
            correction = e
        elif kind == "gated":
            gate = sigmoid(np.concatenate([h, e]) @ m["gate_proj"] + m["gate_bias"])
            correction = gate * e
        else:
            z = np.concatenate([state, e, h]) @ m["joint_proj"] + m["joint_bias"]
            g, new, out = sigmoid(z[:RANK]), z[RANK : 2 * RANK], z[2 * RANK :]
            state = g * state + (1 - g) * np.tanh(new)
            correction = np.tanh(out)
        logits.append(h @ head + correction @ m["markov_w2"])
        confidences.append(float(np.concatenate([h, e]) @ c["proj"] + c["bias"]))
        previous = choose(row, logits[-1])
    return np.array(logits), np.array(confidences)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_training_rows_serving_rows_and_the_oracle_agree(kind):
    _, params = build(kind)
    out, tokens = trained(kind), batch().tokens_BS[0]
    np.testing.assert_array_equal(out.anchors_BN[0], ANCHORS)
    train = out.hidden_XMD @ frozen().head_DU + out.correction_XME @ out.correction_EU
    at = np.array([1, 4, SIZE_S - 1 - SIZE_M])
    text = np.stack([tokens[a + 1 : a + 1 + SIZE_M] for a in at])
    made = forced(kind)(params, served_state(kind, at), tokens[at], at, text)
    close = {"atol": 2e-5, "rtol": 2e-5}
    for i, a in enumerate(at):
        x = a - 1
        want, sure = walk_oracle(
            kind, params, out.hidden_XMD[x], lambda row, _, i=i: text[i, row], tokens[a]
        )
        np.testing.assert_allclose(train[x], want, **close)
        np.testing.assert_allclose(out.confidence_XM[x], sure, **close)
        np.testing.assert_allclose(made.law.logits_BTV[i], want, **close)
        np.testing.assert_allclose(made.confidence_logit_BM[i], sure, **close)


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_walk_left_to_right_and_q_is_the_corrected_law(sampled):
    kind = "rnn" if sampled else "gated"
    programs, params = build(kind)
    if sampled:
        programs = drafting.Programs(programs.drafter, drafting.draw_softmax(KEY))
    at, tokens = np.array([2, 6]), batch().tokens_BS[0]
    made, _ = programs.propose(
        params, frozen(), served_state(kind, at), tokens[at], at.astype(np.int32)
    )
    drafts = np.asarray(made.tokens_BM)
    mass = np.asarray(drafting.quick_jit(laws.prob_of)(made.law, made.draft_ids_BM))
    row_probs = drafting.quick_jit(lambda law, j: laws.row_probs(law, j, 67))
    for i, a in enumerate(at):

        def choose(row, logits, i=i):
            return drafts[i, row] if sampled else int(np.argmax(logits))

        want, _ = walk_oracle(
            kind, params, trained(kind).hidden_XMD[a - 1], choose, tokens[a]
        )
        if not sampled:
            np.testing.assert_array_equal(drafts[i], want.argmax(-1))
            continue
        q = np.exp(want - want.max(-1, keepdims=True))
        q /= q.sum(-1, keepdims=True)
        np.testing.assert_allclose(mass[i], q[np.arange(SIZE_M), drafts[i]], rtol=1e-3)
        for j in range(SIZE_M):
            row = row_probs(made.law, np.full(2, j))
            np.testing.assert_allclose(row[i], q[j], atol=1e-5)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_confidence_reads_only_the_drafts_before_it(kind):
    _, params = build(kind)
    at = np.array([3], np.int32)
    state, anchor = served_state(kind, at), batch().tokens_BS[0][at]
    base_M = np.array([[5, 6, 7, 8]], np.int32)
    before = forced(kind)(params, state, anchor, at, base_M)
    for j in range(SIZE_M):
        other = base_M.copy()
        other[:, j:] += 20  # draft j and all after it are others
        after = forced(kind)(params, state, anchor, at, other)
        same = np.asarray(before.confidence_logit_BM == after.confidence_logit_BM)[0]
        np.testing.assert_array_equal(same, np.arange(SIZE_M) <= j)
        same = np.asarray(before.law.logits_BTV == after.law.logits_BTV)[0].all(-1)
        np.testing.assert_array_equal(same, np.arange(SIZE_M) <= j)


def test_a_feature_moves_no_block_at_or_before_it():
    programs, params = build()

    def run(features):
        moved = batch().replace(features_BSLD=features)
        out = jax.device_get(programs.train(params, frozen(), moved, KEY))
        return np.concatenate(
            [out.hidden_XMD, out.correction_XME, out.confidence_XM[..., None]], -1
        )

    before = run(batch().features_BSLD)
    for p in (0, 1, 5, SIZE_S - 3):
        features = batch().features_BSLD.copy()
        features[0, p] *= -3.0
        change = np.abs(run(features) - before).max((1, 2))
        assert (change[p >= ANCHORS] == 0.0).all(), f"feature {p} leaked"
        assert (change[p < ANCHORS] > 1e-4).all(), f"feature {p} is not read"


def test_a_token_moves_its_own_block_and_the_row_after_it():
    programs, params = build("vanilla")
    tokens = batch().tokens_BS.copy()
    tokens[0, 8] = (tokens[0, 8] + 1) % 67
    before = trained("vanilla")
    other = batch().replace(tokens_BS=tokens)
    after = jax.device_get(programs.train(params, frozen(), other, KEY))
    moved = np.asarray(before.hidden_XMD != after.hidden_XMD).any((1, 2))
    np.testing.assert_array_equal(moved, ANCHORS == 8)
    # The row whose previous token it is: row k of the block at 8 - k.
    moved = np.asarray(before.correction_XME != after.correction_XME).any(-1)
    np.testing.assert_array_equal(
        moved, ANCHORS[:, None] + np.arange(SIZE_M)[None] == 8
    )


def test_labels_validity_and_teacher_rows_match_loops():
    programs, params = build()
    data = drafting.make_batch(programs.drafter, [11], SIZE_S, prompt=1)
    data.supervised_BS[0, 6] = False
    out = jax.device_get(programs.train(params, frozen(), data, KEY))
    real = [a for a in range(1, 10) if a not in (5, 6)]
    np.testing.assert_array_equal(out.anchors_BN[0, : len(real)], real)
    for x, anchor in enumerate(real):
        unbroken = True
        for k in range(SIZE_M):
            at = anchor + 1 + k
            unbroken = unbroken and at < 11 and bool(data.supervised_BS[0, at])
            assert float(out.valid_XM[x, k]) == float(unbroken)
            if unbroken:
                assert int(out.labels_XM[x, k]) == data.tokens_BS[0, at]
                np.testing.assert_array_equal(
                    out.teacher_XMD[x, k], data.teacher_BSD[0, at - 1]
                )
    assert not np.asarray(out.valid_XM[len(real) :]).any()


@pytest.mark.parametrize("detach", [False, True])
def test_where_the_confidence_sends_its_gradient(detach):
    drafter = load(confidence_detach=detach)
    _, params = build("vanilla")

    def total(params):
        return drafter.train_outputs(params, frozen(), batch(), KEY).confidence_XM.sum()

    grads = drafting.quick_jit(jax.grad(total))(params)["params"]
    assert np.abs(grads["confidence"]["proj"]).min() > 0
    assert float(grads["confidence"]["bias"]) == len(ANCHORS) * SIZE_M
    reached = [grads["fc"], grads["layers_0"]["down"], grads["markov"]["markov_w1"]]
    for leaf in reached:
        assert np.asarray(leaf).any() != detach
    assert not np.asarray(grads["markov"]["markov_w2"]).any()


def test_the_markov_head_alone_learns_which_token_follows_which():
    """Every slot, the first included, on a corpus where t + 1 = f(t)."""
    drafter = load(num_draft=3, markov_rank=32, markov_head_type="vanilla")
    rng = np.random.default_rng(0)
    follows = np.roll(rng.permutation(67), 1)
    data = drafting.make_batch(drafter, [SIZE_S] * 6, SIZE_S, prompt=1)
    data.tokens_BS[:, 0] = rng.permutation(67)[:6]
    for t in range(1, SIZE_S):
        data.tokens_BS[:, t] = follows[data.tokens_BS[:, t - 1]]
    lent = frozen().replace(head_DU=frozen().head_DU / np.float32(8))
    params = drafter.init(KEY)
    markov, rest = params["params"].pop("markov"), params["params"]
    optimiser = optax.adam(3e-2)

    @drafting.quick_jit
    def learn(markov):
        def mean_loss(markov, key):
            full = {"params": {**rest, "markov": markov}}
            out = drafter.train_outputs(full, lent, data, key)
            sums, metrics = loss(out, lent, ObjectiveOptions(), terms=(("ce", 1.0),))
            return sums.mean(), metrics

        def body(carry, key):
            markov, state = carry
            grads, metrics = jax.grad(mean_loss, has_aux=True)(markov, key)
            updates, state = optimiser.update(grads, state)
            return (optax.apply_updates(markov, updates), state), metrics

        keys = jax.random.split(KEY, 80)
        return jax.lax.scan(body, (markov, optimiser.init(markov)), keys)[1]

    metrics = learn(markov)
    for j in (1, 2, 3):
        hits, count = (np.asarray(x) for x in metrics[f"acc_{j}"])
        assert hits[0] < 0.2 * count[0]
        assert hits[-1] == count[-1], f"slot {j}"


def test_a_reduced_vocabulary_uses_the_columns_it_lends():
    lent = drafting.make_frozen(target_ids=REDUCED)
    programs, params = build("vanilla")
    whole = params["params"]["markov"]["markov_w2"]
    out = programs.train(params, lent, batch(), KEY)
    np.testing.assert_array_equal(out.correction_EU, whole[:, REDUCED])
    # A head made for exactly these columns is taken as it is.
    small = load(draft_vocab_size=len(REDUCED), markov_head_type="vanilla")
    shapes = jax.eval_shape(small.init, KEY)["params"]["markov"]
    assert shapes["markov_w1"].shape == (67, RANK)
    assert shapes["markov_w2"].shape == (RANK, len(REDUCED))
    cut = {**params["params"]["markov"], "markov_w2": whole[:, REDUCED]}
    params = {"params": {**params["params"], "markov": cut}}
    again = drafting.quick_jit(small.train_outputs)(params, lent, batch(), KEY)
    np.testing.assert_array_equal(again.correction_EU, out.correction_EU)
    with pytest.raises(UserError, match="draft_vocab_size"):
        jax.eval_shape(small.train_outputs, params, frozen(), batch(), KEY)


def test_fewer_drafts_are_served_with_the_same_weights():
    programs, params = build()
    options = dataclasses.replace(programs.drafter.options, num_draft=2)
    few = base.load("dspark", options, drafting.TINY)
    assert few.layout.num_query == 2 and few.layout.anchor_predicts
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(few.init, KEY))
    assert shapes == jax.tree.map(jnp.shape, params)


def test_without_a_confidence_head_there_is_no_confidence_nor_its_term():
    drafter = load(enable_confidence_head=False)
    assert dict(drafter.terms) == {"ce": 0.1, "l1": 0.9}
    params = jax.eval_shape(drafter.init, KEY)
    assert "confidence" not in params["params"]
    out = jax.eval_shape(drafter.train_outputs, params, frozen(), batch(), KEY)
    assert out.confidence_XM is None
    narrow = jax.eval_shape(load(confidence_with_markov=False).init, KEY)
    assert narrow["params"]["confidence"]["proj"].shape == (32,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"markov_rank": 0}, "markov_rank=0"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm'"),
        ({"draft_vocab_size": 68}, "draft_vocab_size=68"),
        ({"mask_id": 67}, "mask_id=67"),
        ({"num_draft": 0}, "num_draft=0"),
    ],
)
def test_bad_options_are_named(changes, says):
    with pytest.raises(UserError, match=says):
        load(**changes)
