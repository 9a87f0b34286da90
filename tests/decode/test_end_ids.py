"""The target's own end ids: at every place of a round, and against other ends (b20)."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from spec_jax.decode.engine import Engine
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.request import Settings
from tests.support import asking, tiny

V, M = 23, 7
FREE = Settings(max_new_tokens=12, ignore_eos=True)
GREEDY = Settings(max_new_tokens=12)


@pytest.fixture(scope="module")
def engine():
    """One of a target that ends with id 20; tests give it others."""
    world = tiny.world("bigram", M, eos_ids=(20,))
    return Engine(
        world.spec,
        world.weights,
        EngineOptions(slots=3, max_context=128, prefill_buckets=(64,)),
        world.drafter,
        tokenizer=asking.tokenizer(),
    )


@pytest.fixture(scope="module")
def told(engine):
    """A prompt whose answer names ten ids once each, and that answer."""
    assert engine.spec.eos_ids == (20,)
    prompts = [[first, second] for first in range(8, 20) for second in range(8, 20)]
    made = engine.generate(prompts, FREE)
    for prompt, generation in zip(prompts, made, strict=True):
        if len(set(generation.tokens[:10])) == 10:
            return prompt, generation.tokens
    raise AssertionError("every answer repeats itself")


@pytest.fixture(params=range(M + 1), ids=lambda r: f"{r} accepted")
def drafting(request, engine, told):
    """The engine, whose first round accepts so many drafts of that answer."""
    before, text = engine.weights, told[1]
    table = jnp.zeros((V, V))
    for index, (token, following) in enumerate(itertools.pairwise(text[:10])):
        right = index != request.param
        table = table.at[token, following if right else (following + 1) % V].set(9.0)
    engine.weights = dataclasses.replace(before, draft=table)
    yield engine, request.param
    engine.weights = before


@pytest.fixture
def ending(engine):
    """Gives the engine's target other end ids."""
    before = engine.spec

    def give(*ids):
        engine.spec = dataclasses.replace(before, eos_ids=ids)

    yield give
    engine.spec = before


def check(generation, text, count, reason, by=None):
    assert generation.tokens == text[:count]
    assert generation.finish_reason == reason
    assert generation.stopped_by == by
    assert sum(generation.emitted) == count - 1


def test_an_end_id_ends_wherever_it_is_emitted(drafting, ending, told):
    """From the prefill, at each place of an accepted run, as correction and bonus."""
    engine, accepted = drafting
    prompt, text = told
    whole = engine.generate([prompt], FREE)[0]
    check(whole, text, 12, "length")
    assert whole.accepted[0] == accepted
    for at in range(accepted + 2):
        ending(text[at])
        off = asking.off(GREEDY)
        fast, slow, free = engine.generate([prompt] * 3, [GREEDY, off, FREE])
        for generation in (fast, slow):
            check(generation, text, at + 1, "stop", text[at])
        assert fast.rounds == (at > 0) and slow.rounds == at
        assert fast.text == slow.text
        # It is no end where it is to be ignored.
        check(free, text, 12, "length")
    assert asking.is_idle(engine)


def piece_of(engine, prompt, count):
    """What the answer's token `count` adds to the text."""
    texts = [
        engine.generate([prompt], dataclasses.replace(FREE, max_new_tokens=n))[0].text
        for n in (count, count + 1)
    ]
    assert texts[1].startswith(texts[0])
    return texts[0], texts[1][len(texts[0]) :]


def test_the_earliest_of_all_ends_wins(engine, ending, told):
    """An end id against a stop id, a stop string and the cap."""
    prompt, text = told
    at = 4
    ending(text[at], 0 if text[at] else 1)
    strings = {}
    for place in (2, 6):
        before, piece = piece_of(engine, prompt, place)
        if piece and piece not in before:
            strings[place] = piece
    assert strings
    for changes, place, reason, by in [
        ({"stop_ids": (text[2],)}, 2, "stop", text[2]),
        ({"stop_ids": (text[6],)}, 6, "stop", text[6]),
        ({"stop_ids": (text[at],)}, at, "stop", text[at]),
        ({"max_new_tokens": 3}, 2, "length", None),
        ({"max_new_tokens": at + 1}, at, "length", None),
        ({"max_new_tokens": 7}, 6, "length", None),
        *[({"stop": piece}, i, "stop", piece) for i, piece in strings.items()],
    ]:
        settings = dataclasses.replace(GREEDY, **changes)
        free = dataclasses.replace(settings, ignore_eos=True)
        each = [settings, asking.off(settings), free, asking.off(free)]
        made = engine.generate([prompt] * 4, each)
        for generation in made[2:]:
            check(generation, text, place + 1, reason, by)
        if place >= at:
            place, reason, by = at, "stop", text[at]
        for generation in made[:2]:
            check(generation, text, place + 1, reason, by)


def test_sampled_requests_end_too(engine, ending):
    """Whatever they say, an end id is the last of it and nowhere before."""
    prompts = tiny.prompts_of(12, V, seed=92, low=3, high=20)
    each = [Settings(40, temperature=1.2, seed=i) for i in range(12)]
    ignoring = [dataclasses.replace(s, ignore_eos=True) for s in each]
    ends = (8, 9)
    ending(*ends)
    ended = engine.generate(prompts, each)
    free = engine.generate(prompts, ignoring)
    assert all(len(g.tokens) == 40 for g in free)
    assert sum(g.finish_reason == "stop" for g in ended) > 3
    for ours, whole in zip(ended, free, strict=True):
        at = [i for i, t in enumerate(whole.tokens) if t in ends]
        count = at[0] + 1 if at else 40
        check(
            ours,
            whole.tokens,
            count,
            "stop" if at else "length",
            ours.tokens[-1] if at else None,
        )
