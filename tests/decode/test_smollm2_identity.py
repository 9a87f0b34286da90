"""Greedy identity on the real target, through every accepted length.

Drafts from a table reach them all. The family's own drafters, of random weights,
are run for what only they bring along: their features, draft state and trees.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.features import FeatureSchema
from spec_jax.core.proposal import Proposal, one_hot_law
from spec_jax.core.topology import CHAIN_TOPOLOGY, DYNAMIC_TREE, STATIC_TREE, Topology
from spec_jax.decode.engine import Engine
from spec_jax.decode.forward import Weights
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import compiles, identity
from spec_jax.nn import attention
from spec_jax.target.model import unstack_layers

NUM_DRAFT = 7
SLOTS = 3  # one stays empty; so many are read slot by slot on a CPU
NEW_TOKENS = 40
CONTEXT = 128
BUCKET = 16
SETTINGS = Settings(max_new_tokens=NEW_TOKENS, ignore_eos=True)

SHORT = "The lighthouse keeper's daughter had counted ships"
LONG = (
    "On calm evenings she sat on the iron stair, wrapped in her mother's coat, and "
    "wrote the name of every vessel in a school notebook. Most of them carried coal "
    "or timber, a few carried people, and one"
)


def replay(spec) -> Drafter:
    """Drafts what a table says: its parameters are `[B, A]` tokens by position.

    It keeps no state and reads no feature; the proposal goes through the
    engine's own draw.
    """

    def unchanged(params, frozen, state, rows):
        del params, frozen, rows
        return state

    def propose(table_BA, frozen, state, anchor_B, length_B, draw, topology):
        del frozen
        if not topology.is_chain:
            return twigs(table_BA, length_B, topology), state
        # The anchor is at `length`; the drafts follow it.
        at_BM = length_B[:, None] + 1 + jnp.arange(NUM_DRAFT)
        planned_BM = jnp.take_along_axis(table_BA, at_BM, 1, mode="clip")
        ids_BM, law = draw(8.0 * jax.nn.one_hot(planned_BM, spec.vocab_size), 0)
        usable_B = jnp.full_like(anchor_B, NUM_DRAFT)
        return Proposal(ids_BM, ids_BM, law, usable_B), state

    return Drafter(
        name="replay",
        options=None,
        layout=BlockLayout(NUM_DRAFT),
        needs=FeatureSchema((14,), spec.hidden_size),
        topologies=("chain", "static_tree"),
        init=lambda key: jnp.zeros((SLOTS, CONTEXT), jnp.int32),
        init_state=lambda slots, allocated: jnp.zeros((1, slots), jnp.int32),
        prefill=unchanged,
        propose=propose,
        extend=unchanged,
        train_outputs=lambda *args: None,
    )


# A wrong token, then the table's, at each of seven levels: the path is rows 2, 4, ...
TWIGS = Topology(
    "static_tree", parents=tuple(2 * (i // 2) for i in range(2 * NUM_DRAFT))
)


def twigs(table_BA, length_B, topology) -> Proposal:
    """The table's chain with a dead twig before each of its tokens."""
    at_BM = length_B[:, None] + 1 + jnp.arange(NUM_DRAFT)
    right_BM = jnp.take_along_axis(table_BA, at_BM, 1, mode="clip")
    pairs_BM2 = jnp.stack([(right_BM + 1) % 40_000, right_BM], -1)
    tokens_BM = pairs_BM2.reshape(length_B.shape[0], -1)
    size_b, size_m = tokens_BM.shape
    parents_W = jnp.asarray((-1, *topology.parents))
    return Proposal(
        tokens_BM,
        jnp.zeros_like(tokens_BM),
        one_hot_law(tokens_BM),
        jnp.full((size_b,), size_m, jnp.int32),
        parents_BW=jnp.broadcast_to(parents_W, (size_b, size_m + 1)),
    )


def corrupted(prompt, tokens, rng, vocab_size):
    """The plain text with wrong tokens in it, and the rounds that must follow.

    Wrong tokens stand 1 to 8 places apart, each distance once, in a random
    order. A round whose first wrong draft is the d-th accepts d - 1 and emits d;
    at distance 8 the wrong token is not drafted: all 7 are accepted, and the
    bonus token stands in its place.

    Returns:
      the table's row [A], and the distances in order.
    """
    distances = rng.permutation(np.arange(1, NUM_DRAFT + 2))
    row_A = np.zeros(CONTEXT, np.int32)
    row_A[: len(prompt) + len(tokens)] = [*prompt, *tokens]
    # The first answer token is the prefill's; the first draft stands after it.
    wrong = len(prompt) + np.cumsum(distances)
    row_A[wrong] = (row_A[wrong] + rng.integers(1, vocab_size, 8)) % vocab_size
    return row_A, distances.tolist()


def table_of(rows):
    """The rows as a table for every slot."""
    table_BA = np.zeros((SLOTS, CONTEXT), np.int32)
    table_BA[: len(rows)] = rows
    return jnp.asarray(table_BA)


@pytest.fixture(scope="module")
def plain(smollm2):
    """An engine over layers apart, two prompts and their plain answers."""
    spec, tokenizer = smollm2.spec, smollm2.tokenizer
    params = jax.jit(unstack_layers)(smollm2.params)
    drafter = replay(spec)
    table_BA = jnp.zeros((SLOTS, CONTEXT), jnp.int32)
    options = EngineOptions(slots=SLOTS, max_context=CONTEXT, prefill_buckets=(BUCKET,))
    weights = Weights(params, table_BA, frozen_from_params(params))
    engine = Engine(spec, weights, options, drafter)
    prompts = [tokenizer.encode(SHORT), tokenizer.encode(LONG)]
    assert len(prompts[0]) < BUCKET < 2 * BUCKET < len(prompts[1])
    is_slotwise = attention.is_slotwise(SLOTS, engine.state.cache.k_NBGAC)
    assert is_slotwise or jax.default_backend() != "cpu"
    alone = dataclasses.replace(SETTINGS, speculate=False)
    made = engine.generate(prompts, alone)
    assert all(set(g.emitted) == {1} and len(g.tokens) == NEW_TOKENS for g in made)
    return engine, prompts, [g.tokens for g in made]


def test_every_accepted_length_keeps_the_plain_text(smollm2, plain):
    spec = smollm2.spec
    engine, prompts, texts = plain
    rng = np.random.default_rng(3)
    rows, planned = zip(
        *(
            corrupted(prompt, tokens, rng, spec.vocab_size)
            for prompt, tokens in zip(prompts, texts, strict=True)
        ),
        strict=True,
    )
    # An idle engine hands out its slots in order: prompt i runs in slot i.
    engine.weights = dataclasses.replace(engine.weights, draft=table_of(rows))
    reads, rounds = engine.host_reads, engine.rounds
    with compiles.counting() as counted:
        made = engine.generate(prompts, SETTINGS)
    assert counted.compiles == 0
    # Every round is read once, and so is each prompt's last prefill chunk.
    rounds = engine.rounds - rounds
    assert engine.host_reads - reads == rounds + len(prompts)
    # Both prompts shared rounds: the batch took fewer than they did apart.
    assert rounds < sum(g.rounds for g in made)

    same = identity.compare(
        spec,
        engine.weights.target,
        engine,
        prompts,
        texts,
        [g.tokens for g in made],
        SETTINGS,
    )
    assert same.identical, same.first_difference
    # These two texts have no near-tie, so every round is known beforehand.
    assert same.near_ties == 0
    for generation, distances in zip(made, planned, strict=True):
        emitted, accepted = generation.emitted, generation.accepted
        assert set(accepted) == set(range(NUM_DRAFT + 1))
        assert emitted[:8] == distances
        assert accepted[:8] == [d - 1 for d in distances]
        # Three tokens are left for the ninth round, all of them drafted right.
        assert emitted[8:] == [NEW_TOKENS - 1 - sum(distances)]
        assert generation.drafted[:8] == [NUM_DRAFT] * 8
        assert generation.finish_reason == "length"


def test_a_tree_of_dead_twigs_keeps_the_plain_text(smollm2, plain):
    """Fifteen rows a verify, the accepted path on every second of them."""
    engine, prompts, texts = plain
    spec = smollm2.spec
    rows, planned = zip(
        *(
            corrupted(prompt, tokens, np.random.default_rng(5), spec.vocab_size)
            for prompt, tokens in zip(prompts, texts, strict=True)
        ),
        strict=True,
    )
    options = dataclasses.replace(
        engine.options, plain=False, round=RoundOptions(topology=TWIGS)
    )
    weights = dataclasses.replace(engine.weights, draft=table_of(rows))
    grown = Engine(spec, weights, options, engine.drafter)
    assert grown.window == 2 * NUM_DRAFT + 1
    made = grown.generate(prompts, SETTINGS)
    same = identity.compare(
        spec,
        weights.target,
        grown,
        prompts,
        texts,
        [g.tokens for g in made],
        SETTINGS,
    )
    assert same.identical and same.near_ties == 0, same.first_difference
    for generation, distances in zip(made, planned, strict=True):
        assert generation.emitted[:8] == distances


FAMILY_TOKENS = 24
BLOCK = {"num_layers": 1, "mask_id": common.SMOLLM2_MASK_ID}
FAMILY = {
    "eagle": ("eagle", {}, CHAIN_TOPOLOGY),
    "eagle3": ("eagle3", {}, CHAIN_TOPOLOGY),
    "dflash": ("dflash", BLOCK, CHAIN_TOPOLOGY),
    "dspark": ("dspark", BLOCK, CHAIN_TOPOLOGY),
    "dflash2": ("dflash2", BLOCK, CHAIN_TOPOLOGY),
    "lookup": ("lookup", {}, CHAIN_TOPOLOGY),
    "eagle3, static tree": (
        "eagle3",
        {},
        Topology(STATIC_TREE, parents=(0, 0, 1, 1, 2, 3)),
    ),
    "eagle3, dynamic tree": (
        "eagle3",
        {},
        Topology(DYNAMIC_TREE, depth=3, top_k=2, nodes=6),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILY)
def test_every_drafter_keeps_the_plain_text(smollm2, plain, case):
    name, changes, topology = FAMILY[case]
    engine, prompts, texts = plain
    spec = smollm2.spec
    texts = [tokens[:FAMILY_TOKENS] for tokens in texts]
    drafter = base.load(name, changes, spec)
    weights = dataclasses.replace(
        engine.weights, draft=jax.jit(drafter.init)(jax.random.key(0))
    )
    options = dataclasses.replace(
        engine.options, plain=False, round=RoundOptions(topology=topology)
    )
    mask_id = changes.get("mask_id", -1)
    speculative = Engine(spec, weights, options, drafter, mask_id)
    settings = dataclasses.replace(SETTINGS, max_new_tokens=FAMILY_TOKENS)
    speculative.generate(prompts[:1], dataclasses.replace(settings, max_new_tokens=3))
    with compiles.counting() as counted:
        made = speculative.generate(prompts, settings)
    assert counted.compiles == 0

    same = identity.compare(
        spec,
        weights.target,
        speculative,
        prompts,
        texts,
        [g.tokens for g in made],
        settings,
    )
    assert same.identical, same.first_difference
    for generation in made:
        assert len(generation.tokens) == FAMILY_TOKENS
        assert generation.finish_reason == "length"
        # Whole windows were drafted and verified, and no round was lost.
        assert set(generation.drafted) == {speculative.window - 1}
        assert sum(generation.emitted) == FAMILY_TOKENS - 1
        assert generation.emitted[:-1] == [r + 1 for r in generation.accepted[:-1]]
