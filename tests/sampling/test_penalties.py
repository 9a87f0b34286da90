"""Penalties and bias against loops; rows that do not ask keep every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import masks
from spec_jax.sampling import penalties, transform

V, W = 11, 5
CHAIN = np.arange(W)[None] - 1
TREE = np.asarray([[-1, 0, 0, 1, 3], [-1, 0, 1, 1, 0]])
# repetition, presence, frequency, biases
RULES = [
    (1.0, 0.0, 0.0, {}),
    (1.7, 0.0, 0.0, {}),
    (0.6, 0.5, 0.0, {3: -2.0}),
    (1.0, -1.5, 0.8, {}),
    (1.3, 0.4, 0.9, {0: 5.0, 10: -100.0}),
]


def rules_of(each, width=4):
    ids = np.full((len(each), width), -1, np.int32)
    bias = np.zeros((len(each), width), np.float32)
    for row, (*_, biases) in enumerate(each):
        for column, (token, value) in enumerate(biases.items()):
            ids[row, column], bias[row, column] = token, value
    repetition, presence, frequency, _ = zip(*each, strict=True)
    return penalties.Rules(
        repetition_B=jnp.asarray(repetition, jnp.float32),
        presence_B=jnp.asarray(presence, jnp.float32),
        frequency_B=jnp.asarray(frequency, jnp.float32),
        bias_ids_BX=jnp.asarray(ids),
        bias_BX=jnp.asarray(bias),
    )


def expected(logit, token, prompt, before, rule):
    repetition, presence, frequency, biases = rule
    value, count = float(logit), before.count(token)
    if token in prompt or count:
        value = value / repetition if value > 0 else value * repetition
    value -= frequency * count + (presence if count else 0.0)
    return value + biases.get(token, 0.0)


def a_case(seed, parents):
    """Logits, prompts, answers (anchor last) and blocks of five requests."""
    rng = np.random.default_rng(seed)
    size = len(RULES)
    logits = rng.normal(size=(size, W, V)).astype(np.float32) * 3
    prompts = [rng.integers(0, V, 4).tolist() for _ in range(size)]
    answers = [rng.integers(0, V, 6).tolist() for _ in range(size)]
    blocks = rng.integers(0, 4, (size, W))  # few ids: drafts repeat
    blocks[:, 0] = [a[-1] for a in answers]
    parents = np.broadcast_to(np.resize(parents, (size, W)), (size, W))
    return logits, prompts, answers, blocks, parents


def history_of(prompts, answers):
    made = penalties.no_history(len(prompts), V)
    for rows, given in ((prompts, True), (answers, False)):
        tokens = jnp.asarray(rows, jnp.int32)
        counted = jnp.ones(tokens.shape, bool)
        made = penalties.told(made, tokens, counted, jnp.full((1, 1), given))
    return made


def ancestors_of(parents, row):
    out = []
    while row > 0:
        out.append(row)
        row = parents[row]
    return out


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_rows_of_a_verify_count_their_own_path(parents):
    logits, prompts, answers, blocks, parents = a_case(0, parents)
    history = history_of(prompts, answers)
    past = penalties.of_block(
        history, jnp.asarray(blocks), masks.ancestors(jnp.asarray(parents))
    )
    got = jax.jit(penalties.adjusted)(jnp.asarray(logits), rules_of(RULES), past)
    for b, rule in enumerate(RULES):
        for w in range(W):
            path = [int(blocks[b, i]) for i in ancestors_of(parents[b], w)]
            want = [
                expected(logits[b, w, v], v, prompts[b], answers[b] + path, rule)
                for v in range(V)
            ]
            np.testing.assert_allclose(got[b, w], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[0], logits[0])


def test_rejected_and_padding_tokens_never_count():
    history = penalties.no_history(2, V)
    tokens = jnp.asarray([[1, 1, 2], [3, -1, -1]])
    made = penalties.told(history, tokens, tokens >= 0, jnp.zeros((1, 1), bool))
    counted = jnp.asarray([[True, False, False], [False, False, True]])
    made = penalties.told(made, jnp.asarray([[4, 5, 5], [5, 5, 6]]), counted, counted)
    want = np.zeros((2, V), int)
    want[0, 1], want[0, 2], want[1, 3] = 2, 1, 1
    np.testing.assert_array_equal(made.output_BV, want)
    assert np.argwhere(np.asarray(made.prompt_BV)).tolist() == [[0, 4], [1, 6]]


@pytest.mark.parametrize("kind", ["reduced", "candidates"])
def test_columns_of_another_vocabulary(kind):
    """The drafter's columns get what their target ids get."""
    logits, prompts, answers, _, _ = a_case(1, CHAIN)
    history = history_of(prompts, answers)
    rng = np.random.default_rng(2)
    if kind == "reduced":
        ids = rng.permutation(V)[:6]
        each = np.broadcast_to(ids, (len(RULES), W, 6))
    else:
        ids = each = np.stack(
            [
                [rng.permutation(V)[:6] for _ in range(W)]  # distinct in a row
                for _ in RULES
            ]
        )
    past = penalties.only_history(history, W)
    got = penalties.adjusted(
        jnp.asarray(logits[..., :6]), rules_of(RULES), past, jnp.asarray(ids)
    )
    for b, rule in enumerate(RULES):
        for w in range(W):
            want = [
                expected(logits[b, w, u], int(t), prompts[b], answers[b], rule)
                for u, t in enumerate(each[b, w])
            ]
            np.testing.assert_allclose(got[b, w], want, rtol=1e-5, atol=1e-5)


def test_block_rows_need_the_targets_own_columns():
    history = penalties.no_history(1, V)
    past = penalties.of_block(
        history, jnp.zeros((1, W), jnp.int32), jnp.ones((1, W, W), bool)
    )
    with pytest.raises(ValueError, match="path_ids_BX"):
        penalties.adjusted(
            jnp.zeros((1, W, 3)), rules_of(RULES[:1]), past, jnp.arange(3)
        )


def test_greedy_requests_obey_rules():
    """A bias moves the argmax; a request without rules keeps its own."""
    logits = jnp.tile(jnp.asarray([[[2.0, 1.9, 0.0]]]), (2, 1, 1))
    sampling = transform.all_greedy(2).replace(
        rules=rules_of([(1.0, 0.0, 0.0, {}), (1.0, 0.0, 0.0, {0: -1.0})])
    )
    past = penalties.only_history(penalties.no_history(2, 3), 1)
    law = jax.jit(transform.law_of)(logits, sampling, None, past)
    assert law.one_hot_BT.tolist() == [[0], [1]]


def test_nobody_asking_costs_a_condition():
    """All arithmetic over the vocabulary stands behind one condition."""
    rules, history = rules_of(RULES[:1]), penalties.no_history(1, V)
    past = penalties.only_history(history, W)
    jaxpr = jax.make_jaxpr(penalties.adjusted)(jnp.zeros((1, W, V)), rules, past)
    outside = [e for e in jaxpr.jaxpr.eqns if e.primitive.name != "cond"]
    assert any(e.primitive.name == "cond" for e in jaxpr.jaxpr.eqns)
    assert all(V not in e.outvars[0].aval.shape for e in outside)
