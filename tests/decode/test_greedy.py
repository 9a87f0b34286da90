"""Greedy identity: speculation changes speed, never text."""

import dataclasses

import pytest

from spec_jax.decode.request import Settings
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
