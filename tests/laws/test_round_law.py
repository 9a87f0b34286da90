"""The sampled law of the running round on a small target, many slots at once.

Every setting has its own slots in one batch of one compiled round. Tokens 2 to 4
are compared with the exact joint law, by enumeration of the target. Tokens after
four rounds of history are compared through their probability integral
transform: given any history, it is uniform exactly when the law is right.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.topology import CHAIN_TOPOLOGY, DYNAMIC_TREE, Topology
from spec_jax.decode import step
from spec_jax.decode.state import DecodeState, empty_slots
from spec_jax.drafters.base import Rows
from spec_jax.sampling.transform import Sampling
from spec_jax.target.cache import KVCache
from tests.support import laws, tiny

V, M = 5, 2
PROMPT = [1, 3, 0, 2]
FIRST = 3  # token 1, fixed: it comes from prefill
ROUNDS, HISTORY = 8, 4
# temperature, top_k, top_p, min_p
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (0.8, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.15),
    (0.9, 4, 0.9, 0.05),
]
# Samples per setting. A total variation of 0.03 in one token's law moves the
# chi-square of 8 cells by N * 4 * 0.03^2 = 7 at N = 2,000 for one token and by 20
# for the three that are pooled.
EACH = 2_000
# p-values of 36 tests with fixed seeds; chance alone fails one in 280 choices.
LEVEL = 1e-4


# Two shapes of four nodes, chosen by the anchor; as deep as the chains.
TREE = Topology(DYNAMIC_TREE, depth=M, top_k=2, nodes=4)


def topology_of(kind):
    return TREE if kind == "bigram_tree" else CHAIN_TOPOLOGY


def world_of(kind):
    return tiny.world(kind, M, vocab=V, sharp=1.5, noise=0.7, seed=5)


def start_state(world, size_b):
    """Every slot after the same prompt: caches tiled, a seed each."""
    allocated = len(PROMPT) + 1 + ROUNDS * (M + 1) + TREE.window(M)
    tokens = jnp.asarray([PROMPT])
    _, output = tiny.full_forward(world.spec, world.params, tokens, (0,))
    rows = Rows(
        tokens_BT=tokens,
        next_tokens_BT=jnp.asarray([[*PROMPT[1:], FIRST]]),
        features_BTLD=output.features_BTLD,
        hidden_BTD=output.hidden_BTD,
        start_B=jnp.zeros((1,), jnp.int32),
        length_B=jnp.full((1,), len(PROMPT), jnp.int32),
    )
    w = world.weights
    draft = world.drafter.init_state(1, allocated)
    draft = world.drafter.prefill(w.draft, w.frozen, draft, rows)

    def grown(x):
        pad = allocated - x.shape[3]
        return jnp.pad(x, [(0, 0)] * 3 + [(0, pad), (0, 0)])

    cache = KVCache(grown(output.cache.k_NBGAC), grown(output.cache.v_NBGAC))
    cache, draft = jax.tree.map(lambda x: jnp.repeat(x, size_b, axis=1), (cache, draft))
    temperature, top_k, top_p, min_p = (
        np.repeat(column, EACH) for column in zip(*SETTINGS, strict=True)
    )

    def filled(value):
        return jnp.full((size_b,), value, jnp.int32)

    slots = empty_slots(size_b, 1).replace(
        anchor_B=filled(FIRST),
        length_B=filled(len(PROMPT)),
        remaining_B=filled(1000),
        active_B=jnp.ones((size_b,), bool),
        speculate_B=jnp.ones((size_b,), bool),
        seed_B=jnp.arange(size_b, dtype=jnp.int32),
        round_B=filled(1),
        sampling=Sampling(
            greedy_B=jnp.zeros((size_b,), bool),
            temperature_B=jnp.asarray(temperature, jnp.float32),
            top_k_B=jnp.asarray(top_k, jnp.int32),
            top_p_B=jnp.asarray(top_p, jnp.float32),
            min_p_B=jnp.asarray(min_p, jnp.float32),
        ),
    )
    return DecodeState(cache, draft, slots)


@functools.cache
def sampled(kind, one_hot):
    """Texts, tokens emitted by each round, and the accepted counts."""
    world = world_of(kind)
    size_b = len(SETTINGS) * EACH
    options = step.RoundOptions(one_hot_draft=one_hot, topology=topology_of(kind))
    taps = world.drafter.needs.layer_ids

    @jax.jit
    def rounds(weights, state):
        def body(state, _):
            state, result = step.round_step(
                world.spec, world.drafter, taps, options, weights, state
            )
            return state, result

        return jax.lax.scan(body, state, None, length=ROUNDS)[1]

    result = rounds(world.weights, start_state(world, size_b))
    result = jax.tree.map(np.asarray, result)
    assert (result.emitted_B == result.num_accepted_B + 1).all()
    texts = np.full((size_b, ROUNDS * (M + 1)), -1)
    at = np.zeros(size_b, int)
    for tokens, count in zip(result.tokens_BW, result.emitted_B, strict=True):
        for column in range(M + 1):
            rows = np.nonzero(column < count)[0]
            texts[rows, at[rows] + column] = tokens[rows, column]
        at += count
    return texts, result.emitted_B, result.num_accepted_B


def law_rows(logits, setting):
    """`laws.law` of many rows."""
    temperature, top_k, top_p, min_p = setting
    flat = logits.reshape(-1, V)
    out = [laws.law(row, False, temperature, top_k, top_p, min_p) for row in flat]
    return np.asarray(out).reshape(logits.shape)


def target_logits(world, texts):
    """Logits that predict each token of `texts` [N, S] after the first one."""
    head = np.broadcast_to([*PROMPT, FIRST], (len(texts), len(PROMPT) + 1))
    tokens = np.concatenate([head, np.maximum(texts, 0)], 1)
    logits, _ = tiny.full_forward(world.spec, world.params, jnp.asarray(tokens))
    return np.asarray(logits)[:, len(PROMPT) : -1]


KINDS = [("bigram", True), ("dflash", False), ("bigram_tree", True)]


@pytest.mark.parametrize(("kind", "one_hot"), KINDS)
def test_joint_law_of_tokens_2_to_4(kind, one_hot):
    world = world_of(kind)
    texts, _, accepted = sampled(kind, one_hot)
    cells = np.asarray(list(itertools.product(range(V), repeat=3)))
    logits = target_logits(world, cells)
    for index, setting in enumerate(SETTINGS):
        p = law_rows(logits, setting)
        joint = np.prod(
            [p[np.arange(len(cells)), k, cells[:, k]] for k in range(3)], axis=0
        )
        mine = texts[index * EACH : (index + 1) * EACH, :3]
        counts = np.bincount(mine @ [V * V, V, 1], minlength=V**3)
        assert counts[joint == 0].sum() == 0, setting
        assert laws.chi_square(counts, joint * EACH) > LEVEL, setting
    # Rejected at once, part of the window, all of it.
    assert set(np.unique(accepted)) == set(range(M + 1))
    assert all((accepted == r).mean() > 0.02 for r in range(M + 1))


@pytest.mark.parametrize(("kind", "one_hot"), KINDS)
def test_law_after_four_rounds_of_history(kind, one_hot):
    """Three tokens from the fifth round on: each uniform, and jointly."""
    world = world_of(kind)
    texts, emitted, _ = sampled(kind, one_hot)
    start = emitted[:HISTORY].sum(0)
    assert (start >= HISTORY).all()
    width = int(start.max()) + 3
    logits = target_logits(world, texts[:, :width])
    take = start[:, None] + np.arange(3)
    tokens = np.take_along_axis(texts, take, 1)
    assert (tokens >= 0).all()
    logits = np.take_along_axis(logits, take[..., None], 1)
    rng = np.random.default_rng(0)
    for index, setting in enumerate(SETTINGS):
        rows = slice(index * EACH, (index + 1) * EACH)
        p = law_rows(logits[rows], setting)
        mine = tokens[rows]
        values = np.stack(
            [laws.pit(p[:, k], mine[:, k], rng.random(EACH)) for k in range(3)], 1
        )
        seen = p[np.arange(EACH)[:, None], np.arange(3), mine]
        assert (seen > 0).all(), setting
        bins = np.minimum((values * 8).astype(int), 7)
        assert (
            laws.chi_square(
                np.bincount(bins.ravel(), minlength=8), np.full(8, EACH * 3 / 8)
            )
            > LEVEL
        ), setting
        coarse = np.minimum((values * 4).astype(int), 3) @ [16, 4, 1]
        assert (
            laws.chi_square(np.bincount(coarse, minlength=64), np.full(64, EACH / 64))
            > LEVEL
        ), setting
