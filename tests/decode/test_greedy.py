"""Greedy identity: speculation changes speed, never text."""

import dataclasses

import pytest

from spec_jax.core.verify_layout import full_ladder
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.request import Settings
from spec_jax.nn import attention
from tests.support import tiny

GREEDY = Settings(max_new_tokens=24)
SAMPLED = Settings(max_new_tokens=24, temperature=0.9, top_p=0.9, seed=11)

# Prompts of up to 40 tokens: six chunks of 7, three of 16, one of 64.
ENGINES = {
    "bigram": lambda: tiny.engine("bigram", 3, slots=3, buckets=(7, 64)),
    "narrow": lambda: tiny.engine("bigram", 1, slots=2, buckets=(7,)),
    "dflash": lambda: tiny.engine("dflash", 7, slots=3, buckets=(16,)),
}
WORLD = tiny.world  # cached: the same one the engine holds


def world_of(name):
    return {
        "bigram": lambda: WORLD("bigram", 3),
        "narrow": lambda: WORLD("bigram", 1),
        "dflash": lambda: WORLD("dflash", 7),
    }[name]()


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_are_the_targets_own(name):
    engine, world = ENGINES[name](), world_of(name)
    prompts = tiny.prompts_of(12, world.spec.vocab_size)
    made = engine.generate(prompts, GREEDY)
    assert tiny.greedy_faults(world, made) == []
    assert all(len(g.tokens) == 24 and g.finish_reason == "length" for g in made)
    accepted = {r for g in made for r in g.accepted}
    assert 0 in accepted and len(accepted) > 1
    if world.drafter.name == "bigram":
        assert max(accepted) == world.drafter.layout.num_draft


def test_plain_program_equals_speculation():
    """The same engine with speculation off runs its one-row program."""
    engine = ENGINES["bigram"]()
    prompts = tiny.prompts_of(7, 23, seed=1)
    fast = engine.generate(prompts, GREEDY)
    slow = engine.generate(prompts, dataclasses.replace(GREEDY, speculate=False))
    assert [g.tokens for g in fast] == [g.tokens for g in slow]
    assert all(set(g.drafted) == {0} and set(g.emitted) == {1} for g in slow)
    assert sum(g.rounds for g in fast) < 0.75 * sum(g.rounds for g in slow)


@pytest.mark.parametrize("name", ["bigram", "dflash"])
def test_mixed_batch_leaves_greedy_rows_alone(name):
    """Greedy, sampled and speculation-off requests in the same program."""
    engine, world = ENGINES[name](), world_of(name)
    prompts = tiny.prompts_of(9, 23, seed=2)
    off = dataclasses.replace(GREEDY, speculate=False)
    each = [(GREEDY, SAMPLED, off)[i % 3] for i in range(9)]
    made = engine.generate(prompts, each)
    greedy = [g for g, s in zip(made, each, strict=True) if s.temperature == 0]
    assert tiny.greedy_faults(world, greedy) == []
    drafted = [g.drafted for g, s in zip(made, each, strict=True) if s is off]
    assert all(set(row) == {0} for row in drafted)


def test_one_greedy_and_one_sampled():
    engine, world = ENGINES["dflash"](), world_of("dflash")
    prompts = tiny.prompts_of(2, 23, seed=3)
    alone = engine.generate(prompts[:1], GREEDY)[0]
    pair = engine.generate(prompts, [GREEDY, SAMPLED])
    assert pair[0].tokens == alone.tokens
    assert tiny.greedy_faults(world, pair[:1]) == []


def test_seeds_reproduce_whatever_the_neighbours():
    """Static mode: a seeded request alone, in a crowd and in another slot."""
    engine = ENGINES["bigram"]()
    prompts = tiny.prompts_of(8, 23, seed=4)
    alone = engine.generate(prompts[:1], SAMPLED)[0]
    others = [
        dataclasses.replace(SAMPLED, seed=i, temperature=1.5, max_new_tokens=5 + i)
        for i in range(7)
    ]
    ahead = engine.generate(prompts, [SAMPLED, *others])[0]
    behind = engine.generate(prompts[1:] + prompts[:1], [*others, SAMPLED])[-1]
    assert alone.tokens == ahead.tokens == behind.tokens
    assert alone.accepted == ahead.accepted == behind.accepted
    reseeded = engine.generate(prompts[:1], dataclasses.replace(SAMPLED, seed=12))[0]
    assert reseeded.tokens != alone.tokens


def test_requests_without_a_seed_differ():
    engine = ENGINES["bigram"]()
    free = dataclasses.replace(SAMPLED, seed=None)
    prompt = tiny.prompts_of(1, 23, seed=5)[0]
    first, second = engine.generate([prompt, prompt], free)
    assert first.tokens != second.tokens


@pytest.mark.parametrize("name", ["narrow", "dflash"])
def test_chunks_and_rounds_interleave(name):
    """A long prompt fills in chunks while a neighbour's rounds run."""
    engine, world = ENGINES[name](), world_of(name)
    short, long = [3, 5], tiny.prompts_of(1, 23, seed=6, low=60, high=60)[0]
    made = engine.generate(
        [short, long], dataclasses.replace(GREEDY, max_new_tokens=30)
    )
    assert tiny.greedy_faults(world, made) == []


@pytest.mark.parametrize(("kind", "slotwise"), [("bigram", 1 << 30), ("dflash", 0)])
def test_histories_of_many_kv_blocks(monkeypatch, kind, slotwise):
    """Blocks of 4 rows below windows of 8 and chunks of 16, unlike lengths (b23).

    The allocation is no multiple of a block. All slots at once, and one by one.
    """
    monkeypatch.setattr(attention, "KV_BLOCK", 4)
    monkeypatch.setattr(attention, "SLOTWISE_BYTES", slotwise)
    world = tiny.world(kind, 7)
    engine = tiny.new_engine(world, slots=3, buckets=(7, 16), max_context=126)
    assert attention.is_slotwise(3, engine.state.cache.k_NBGAC) is (slotwise == 0)
    prompts = [
        prompt
        for size in (1, 3, 4, 5, 17, 33, 60)
        for prompt in tiny.prompts_of(1, 23, seed=size, low=size, high=size)
    ]
    fast = engine.generate(prompts, GREEDY)
    slow = engine.generate(prompts, dataclasses.replace(GREEDY, speculate=False))
    assert tiny.greedy_faults(world, fast) == []
    assert [g.tokens for g in fast] == [g.tokens for g in slow]
    accepted = {r for g in fast for r in g.accepted}
    assert 0 in accepted and max(accepted) > (3 if kind == "bigram" else 0)


def test_seeds_reproduce_in_programs_of_other_sizes():
    """A ladder of one and four requests: alone, in a crowd, and after it left."""
    world = tiny.world("bigram", 3)
    options = EngineOptions(
        slots=4,
        max_context=128,
        prefill_buckets=(64,),
        ladder=full_ladder((1, 4), 4),
    )
    engine = Engine(world.spec, world.weights, options, world.drafter)
    prompts = tiny.prompts_of(6, 23, seed=7)
    seeded = [
        dataclasses.replace(SAMPLED, seed=i, temperature=0.7 + 0.2 * i, top_p=1 - i / 9)
        for i in range(3)
    ]

    def generate(*args):
        engine.trace.clear()
        made = engine.generate(*args)
        return made, [record.choice.requests for record in engine.trace]

    alone = []
    for prompt, settings in zip(prompts, seeded, strict=False):
        made, sizes = generate([prompt], settings)
        assert set(sizes) == {1}
        alone += made
    short = [dataclasses.replace(SAMPLED, seed=None, max_new_tokens=4)] * 3
    made, sizes = generate(prompts, [*seeded, *short])
    assert set(sizes) == {4} or 4 in sizes
    first, sizes = generate([prompts[0], *prompts[3:]], [seeded[0], *short])
    # Its neighbours end, and it goes on in the program of one.
    assert 4 in sizes and sizes[-1] == 1
    last, _ = generate([*prompts[3:], prompts[0]], [*short, seeded[0]])
    for ours, wants in [(made[:3], alone), (first[:1], alone), (last[-1:], alone)]:
        for got, want in zip(ours, wants, strict=False):
            assert got.tokens == want.tokens
            assert got.accepted == want.accepted
