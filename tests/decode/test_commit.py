"""What is emitted is what is committed; what is past the length is never read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.decode.request import Settings
from spec_jax.drafters.base import Rows
from spec_jax.target import model
from tests.support import tiny

GREEDY = Settings(max_new_tokens=24)
SAMPLED = Settings(max_new_tokens=24, temperature=1.1, seed=3)


def bigram():
    return (tiny.engine("bigram", 3, slots=3, buckets=(7, 64)), tiny.world("bigram", 3))


def dflash():
    return tiny.engine("dflash", 7, slots=3, buckets=(16,)), tiny.world("dflash", 7)


def stop_midway(engine, prompts, settings, ticks):
    """Steps `ticks` times; returns host copies of slots and caches, then finishes."""
    handles = [engine.submit(p, s) for p, s in zip(prompts, settings, strict=True)]
    done = {}
    for _ in range(ticks):
        done.update(engine.step())
    jobs = dict(engine.table.running)
    state = jax.tree.map(np.asarray, engine.state)
    done.update(engine.run())
    return state, {slot: done[job.handle] for slot, job in jobs.items()}, handles


@pytest.mark.parametrize("make", [bigram, dflash])
def test_caches_equal_a_prefill_from_nothing(make):
    """Target KV and draft state of a live slot, after chunks and ragged rounds."""
    engine, world = make()
    prompts = tiny.prompts_of(3, 23, seed=7, low=10, high=30)
    each = [
        dataclasses.replace(s, max_new_tokens=60)
        for s in (GREEDY, SAMPLED, dataclasses.replace(GREEDY, speculate=False))
    ]
    state, made, _ = stop_midway(engine, prompts, each, 16)
    assert len(made) == 3
    for slot, generation in made.items():
        length = int(state.slots.length_B[slot])
        text = [*generation.prompt, *generation.tokens]
        # The anchor is emitted and has neither KV nor feature.
        assert len(generation.prompt) < length < len(text)
        assert state.slots.anchor_B[slot] == text[length]
        assert length <= engine.options.max_context - 2 * engine.window
        spent = length + 1 - len(generation.prompt)
        assert state.slots.remaining_B[slot] == 60 - spent
        tokens = tiny.padded([text[:length]], 96)
        _, output = tiny.full_forward(world.spec, world.params, tokens, (0,))
        for name in ("k_NBGAC", "v_NBGAC"):
            np.testing.assert_allclose(
                getattr(state.cache, name)[:, slot, :, :length],
                np.asarray(getattr(output.cache, name))[:, 0, :, :length],
                rtol=1e-4,
                atol=1e-4,
            )
        if world.drafter.name == "bigram":
            told = state.draft["tokens"][0, slot], state.draft["next"][0, slot]
            assert told[0][:length].tolist() == text[:length]
            assert told[1][:length].tolist() == text[1 : length + 1]
            continue
        rows = Rows(
            tokens_BT=tokens,
            next_tokens_BT=tokens,
            features_BTLD=output.features_BTLD,
            hidden_BTD=output.hidden_BTD,
            start_B=jnp.zeros((1,), jnp.int32),
            length_B=jnp.asarray([length], jnp.int32),
        )
        w = world.weights
        fresh = world.drafter.init_state(1, 96)
        fresh = world.drafter.prefill(w.draft, w.frozen, fresh, rows)
        for name in ("k_NBGAC", "v_NBGAC"):
            np.testing.assert_allclose(
                getattr(state.draft, name)[:, slot, :, :length],
                np.asarray(getattr(fresh, name))[:, 0, :, :length],
                rtol=1e-4,
                atol=1e-4,
            )


@pytest.mark.parametrize("make", [bigram, dflash])
def test_stale_rows_are_never_read(make):
    """Every row past the committed length holds NaN: nothing changes, bit for bit."""
    engine, _ = make()
    prompts = tiny.prompts_of(5, 23, seed=8)
    each = [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY]
    clean = engine.generate(prompts, each)
    engine.state = dataclasses.replace(
        engine.state,
        **jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x,
            {"cache": engine.state.cache, "draft": engine.state.draft},
        ),
    )
    dirty = engine.generate(prompts, each)
    assert [g.tokens for g in clean] == [g.tokens for g in dirty]
    assert [g.accepted for g in clean] == [g.accepted for g in dirty]


def test_stop_ids_and_caps_inside_a_run():
    """Every token of a text as stop id, every length as cap, both together."""
    engine, _ = bigram()
    prompt = tiny.prompts_of(1, 23, seed=9)[0]
    whole = engine.generate([prompt], GREEDY)[0].tokens
    cases = [
        dataclasses.replace(GREEDY, stop_ids=stops, max_new_tokens=cap)
        for stops in [*((t,) for t in sorted(set(whole))), (*whole[5:8],)]
        for cap in (1, 3, 6, 24)
    ]
    made = engine.generate([prompt] * len(cases), cases)
    for settings, generation in zip(cases, made, strict=True):
        ends = [i for i, t in enumerate(whole) if t in settings.stop_ids]
        stop = ends[0] + 1 if ends else len(whole) + 1
        size = min(stop, settings.max_new_tokens)
        assert generation.tokens == whole[:size], settings
        assert generation.finish_reason == (
            "stop" if stop <= settings.max_new_tokens else "length"
        )
        # Usage: the first token is the prefill's, rounds made the rest.
        assert sum(generation.emitted) + 1 == size
        pairs = zip(generation.emitted, generation.accepted, strict=True)
        assert all(1 <= made <= r + 1 for made, r in pairs)


def with_weights(engine, **changes):
    """The engine's programs under other weights of the same shapes."""
    engine.weights = dataclasses.replace(engine.weights, **changes)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_broken_draft_rows_degrade_to_plain_steps(value):
    """A drafter without a law never changes the text, greedy or sampled."""
    engine, world = bigram()
    prompts = tiny.prompts_of(4, 23, seed=10)
    each = [GREEDY, SAMPLED, SAMPLED, GREEDY]
    plain = engine.generate(
        prompts, [dataclasses.replace(s, speculate=False) for s in each]
    )
    with_weights(engine, draft=jnp.full_like(world.weights.draft, value))
    try:
        broken = engine.generate(prompts, each)
        # Half of the rows broken: greedy text is still the target's own.
        half = world.weights.draft.at[::2].set(value)
        with_weights(engine, draft=half)
        partly = engine.generate(prompts, each)
    finally:
        with_weights(engine, draft=world.weights.draft)
    assert [g.tokens for g in broken] == [g.tokens for g in plain]
    assert all(set(g.accepted) == {0} for g in broken)
    assert [partly[i].tokens for i in (0, 3)] == [plain[i].tokens for i in (0, 3)]
    assert any(set(g.accepted) != {0} for g in partly)


def test_broken_target_row_ends_only_its_request():
    """NaN at one token, in a prompt's first chunk of two or in its last."""
    engine, world = bigram()
    prompts = [[1, 4, 2, 6, 0, 3, 5, i] for i in range(4)]
    short = [dataclasses.replace(s, max_new_tokens=8) for s in (GREEDY, SAMPLED)]
    each = [short[i % 2] for i in range(4)]
    clean = engine.generate(prompts, each)
    # The victims' prompts hold a token that no other text has.
    used = {t for g in clean for t in (*g.prompt, *g.tokens)}
    poison = max(set(range(23)) - used)
    params = jax.tree.map(lambda x: x, world.params)
    params["params"]["embed"] = params["params"]["embed"].at[poison].set(jnp.nan)
    # Drafts never name it, so a neighbour's verify never runs it.
    draft = world.weights.draft.at[:, poison].set(-1e9)
    with_weights(engine, draft=draft)
    try:
        before = engine.generate(prompts, each)
        with_weights(engine, target=params)
        first = [poison, *prompts[0] * 9]  # longer than one chunk of 64
        last = [*prompts[1], poison]
        made = engine.generate(
            [first, prompts[0], last, *prompts[1:]],
            [GREEDY, each[0], SAMPLED, *each[1:]],
        )
    finally:
        with_weights(engine, target=world.params, draft=world.weights.draft)
    used = {t for g in before for t in (*g.prompt, *g.tokens)}
    assert poison not in used
    assert [made[i].finish_reason for i in (0, 2)] == ["error", "error"]
    assert made[0].tokens == [] and made[2].tokens == []
    neighbours = [made[1], *made[3:]]
    assert [g.tokens for g in neighbours] == [g.tokens for g in before]
    assert all(g.finish_reason == "length" for g in neighbours)


def test_target_breaking_while_decoding_is_an_error_after_its_tokens():
    engine, world = bigram()
    plain = dataclasses.replace(GREEDY, speculate=False)
    prompts = [[i, i] for i in range(12)]
    texts = [g.tokens for g in engine.generate(prompts, plain)]
    # The last token to appear for the first time, as late as any prompt has it.
    # The very last token is emitted and never run.
    late = [
        max(text.index(t) for t in {*text[:-1]} - {*p})
        for p, text in zip(prompts, texts, strict=True)
    ]
    best = int(np.argmax(late))
    prompt, whole, other = prompts[best], texts[best], prompts[best - 1]
    poison = whole[late[best]]
    assert late[best] >= 3
    params = jax.tree.map(lambda x: x, world.params)
    params["params"]["embed"] = params["params"]["embed"].at[poison].set(jnp.nan)
    clean = engine.generate([other], plain)[0]
    with_weights(engine, target=params)
    try:
        broken, alone = engine.generate([prompt, other], plain)
    finally:
        with_weights(engine, target=world.params)
    assert broken.finish_reason == "error"
    assert broken.tokens == whole[: whole.index(poison) + 1]
    if poison not in (*other, *clean.tokens):
        assert alone.tokens == clean.tokens
    # The slot is whole again for the next request.
    assert engine.generate([prompt], GREEDY)[0].tokens == whole


def test_bad_requests_are_refused_at_the_door():
    engine, _ = bigram()
    with pytest.raises(UserError, match="stop_ids"):
        engine.submit([1], Settings(8, stop_ids=tuple(range(9))))
    with pytest.raises(UserError, match="stop_ids"):
        engine.submit([1], Settings(8, stop_ids=(23,)))
    with pytest.raises(UserError, match="empty"):
        engine.submit([], GREEDY)
    with pytest.raises(UserError, match="token id 23"):
        engine.submit([23], GREEDY)
    with pytest.raises(UserError, match="max_context"):
        engine.submit([1] * 100, GREEDY)
    with pytest.raises(UserError, match="mask token 22"):
        dflash()[0].submit([22], GREEDY)
    assert not engine.busy
    for field, value in [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", 1e-9),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", 1.0),
        ("seed", -1),
        ("max_new_tokens", 0),
    ]:
        with pytest.raises(UserError, match=field):
            Settings(**{field: value})


def test_layers_apart_equal_layers_scanned():
    world = tiny.world("dflash", 7)
    tokens = tiny.padded(tiny.prompts_of(2, 23, low=20, high=20), 20)
    one, scanned = tiny.full_forward(world.spec, world.params, tokens, (0,))
    apart_params = model.unstack_layers(world.params)
    other, apart = tiny.full_forward(world.spec, apart_params, tokens, (0,))
    np.testing.assert_allclose(one, other, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), scanned, apart
    )
