"""Requests that leave early, or leave and come back: slots, texts, neighbours."""

import collections
import dataclasses
import random

import jax
import numpy as np
import pytest

from spec_jax.decode.request import Settings
from tests.support import asking, tiny

LONG = dataclasses.replace(asking.GREEDY, max_new_tokens=30)
SEEDED = dataclasses.replace(asking.SAMPLED, max_new_tokens=30)


@pytest.mark.parametrize("place", ["queued", "filling", "unread", "running", "late"])
def test_abort_anywhere(place):
    """The slot comes back and the neighbours keep every token."""
    engine = asking.engine()
    prompts = tiny.prompts_of(3, 23, seed=50, low=20, high=40)
    neighbours = [LONG, SEEDED]
    clean = engine.generate(prompts[:2], neighbours)
    before = engine.metrics()
    handles = [engine.submit(p, s) for p, s in zip(prompts, neighbours, strict=False)]
    victim_prompt = prompts[2] * 4 if place == "filling" else prompts[2]
    done = {}
    victim = engine.submit(victim_prompt[:80], LONG)
    if place == "queued":
        ready = lambda: True
    elif place == "filling":
        ready = lambda: getattr(engine.table.filling, "handle", None) == victim
    else:
        least = {"unread": 0, "running": 3, "late": 20}[place]
        ready = lambda: asking.tokens_so_far(engine, victim) >= least
    asking.until(engine, done, ready)
    assert engine.abort(victim)
    assert not engine.abort(victim)
    assert all(victim != job.handle for job in engine.table.running.values())
    done.update(engine.run())
    assert done[victim].finish_reason == "abort"
    assert len(done[victim].tokens) < 30
    made = [done[h] for h in handles]
    assert [g.tokens for g in made] == [g.tokens for g in clean]
    assert [g.accepted for g in made] == [g.accepted for g in clean]
    assert asking.is_idle(engine)
    after = engine.metrics()
    assert after["aborted"] == before["aborted"] + 1
    assert after["running"] == after["queued"] == 0
    assert not engine.abort(10**9)


def test_slot_of_an_aborted_request_is_whole():
    """The next one in the same slot, at once, reads nothing of it."""
    engine = asking.engine()
    prompts = tiny.prompts_of(4, 23, seed=51)
    want = engine.generate(prompts[3:], SEEDED)[0]
    done = {}
    first = [engine.submit(p, LONG) for p in prompts[:3]]
    asking.until(engine, done, lambda: len(engine.table.running) == 3)
    engine.abort(first[1])
    last = engine.submit(prompts[3], SEEDED)
    done.update(engine.run())
    assert done[last].tokens == want.tokens
    assert done[last].accepted == want.accepted


def draft_rows(engine, handle):
    """What the drafter was told about a running request, up to its length."""
    slot = next(s for s, j in engine.table.running.items() if j.handle == handle)
    state = jax.tree.map(np.asarray, (engine.state.draft, engine.state.slots))
    length = int(state[1].length_B[slot])
    return (
        {name: rows[0, slot, :length].tolist() for name, rows in state[0].items()},
        int(state[1].round_B[slot]),
        int(state[1].remaining_B[slot]),
        int(state[1].anchor_B[slot]),
    )


PENALISED = dataclasses.replace(
    SEEDED, presence_penalty=0.7, repetition_penalty=1.3, logprobs=True, stop=("zzz",)
)


@pytest.mark.parametrize("settings", [LONG, SEEDED, PENALISED], ids="gsp")
@pytest.mark.parametrize("least", [0, 1, 9])
def test_retracted_request_goes_on_as_if_nothing_happened(settings, least):
    """Tokens, rounds, streams, draft state (a6); twice, in a crowd."""
    engine = asking.engine()
    prompts = tiny.prompts_of(3, 23, seed=52)
    each = [settings, LONG, SEEDED]
    want = engine.generate(prompts, each)
    handles = [engine.submit(p, s) for p, s in zip(prompts, each, strict=True)]
    done = {}
    for bound in (least, least + 6):
        asking.until(
            engine, done, lambda b=bound: asking.tokens_so_far(engine, handles[0]) >= b
        )
        held = asking.tokens_so_far(engine, handles[0])
        assert engine.retract(handles[0])
        assert not engine.retract(handles[0])  # it waits already
        job = engine.table.queue[0]
        assert job.handle == handles[0] and len(job.generation.tokens) >= held
        booked = 1 + job.generation.rounds
        asking.until(
            engine, done, lambda: asking.tokens_so_far(engine, handles[0]) >= 0
        )
        engine.retract(10**9)  # reads what is in flight
        if asking.tokens_so_far(engine, handles[0]) < 0:
            break
        told, rounds, remaining, anchor = draft_rows(engine, handles[0])
        generation = engine.running(handles[0])
        text = generation.prompt + generation.tokens
        assert rounds == 1 + generation.rounds >= booked
        assert remaining == settings.max_new_tokens - len(generation.tokens)
        assert told["tokens"] == text[:-1] and told["next"] == text[1:]
        assert anchor == text[-1]
    done.update(engine.run())
    for handle, expected in zip(handles, want, strict=True):
        assert done[handle].tokens == expected.tokens
        assert done[handle].accepted == expected.accepted
        assert done[handle].text == expected.text
        np.testing.assert_allclose(done[handle].logprobs, expected.logprobs, atol=1e-4)
    assert asking.is_idle(engine)


def test_a_callback_may_ask_after_a_retracted_request():
    """Waiting, filling or decoding: what is booked of it is there."""
    engine = asking.engine()
    prompts = tiny.prompts_of(5, 23, seed=57, low=20, high=40)
    want = engine.generate(prompts, LONG)
    handles = [engine.submit(p, LONG) for p in prompts]
    told, done = collections.defaultdict(list), {}

    def on_tokens(handle, new, from_prefill):
        told[handle] += new
        for other in handles:
            if other not in done:
                held = engine.running(other)  # in whatever place
                assert held.tokens[: len(told[other])] == told[other]
        if not from_prefill and handle == handles[0] and len(told[handle]) in range(9):
            engine.retract(handle)

    while engine.busy:
        done.update(engine.step(on_tokens))
        if told[handles[1]]:
            engine.retract(handles[2])  # its news may still be on its way
    assert [done[h].tokens for h in handles] == [g.tokens for g in want]
    assert [told[h] for h in handles] == [g.tokens for g in want]
    with pytest.raises(KeyError):
        engine.running(handles[0])
    assert asking.is_idle(engine)


def test_news_survive_a_callback_that_raises():
    """Every delivery comes once and in order, and everybody is handed out."""
    engine = asking.engine()
    prompts = tiny.prompts_of(3, 23, seed=58, low=3, high=8)
    each = [dataclasses.replace(LONG, max_new_tokens=n) for n in (9, 14, 14)]
    want = engine.generate(prompts, each)
    handles = [engine.submit(p, s) for p, s in zip(prompts, each, strict=True)]
    told, done, calls, raised = collections.defaultdict(list), {}, 0, 0

    def on_tokens(handle, new, from_prefill):
        nonlocal calls
        told[handle] += new
        calls += 1
        if calls % 2:
            raise RuntimeError("a listener left")

    for _ in range(200):
        if not engine.busy:
            break
        try:
            done.update(engine.step(on_tokens))
        except RuntimeError:
            raised += 1
    assert raised > 4
    assert [done[h].tokens for h in handles] == [g.tokens for g in want]
    assert [told[h] for h in handles] == [g.tokens for g in want]
    assert asking.is_idle(engine)


def test_retract_while_it_fills_or_is_gone():
    engine = asking.engine()
    prompt = tiny.prompts_of(1, 23, seed=53, low=40, high=40)[0] * 2
    want = engine.generate([prompt], LONG)[0]
    handle = engine.submit(prompt, LONG)
    assert not engine.retract(handle)
    engine.step()
    assert engine.table.filling is not None and engine.retract(handle)
    assert engine.table.filling is None and engine.table.queue[0].filled == 0
    assert engine.run()[handle].tokens == want.tokens
    assert not engine.retract(handle)


def test_prefill_storm_keeps_a_running_request_going():
    """Each tick gives the running request a round, however many wait (e49)."""
    engine = asking.engine()
    storm = tiny.prompts_of(12, 23, seed=54, low=70, high=80)
    want = engine.generate([[1, 2, 3]], LONG)[0]
    done = {}
    handle = engine.submit([1, 2, 3], LONG)
    asking.until(engine, done, lambda: asking.tokens_so_far(engine, handle) > 0)
    for prompt in storm:
        engine.submit(prompt, Settings(max_new_tokens=2))
    filled = 0
    while handle not in done:
        seen = asking.tokens_so_far(engine, handle)
        done.update(engine.step())
        filled += engine.table.filling is not None
        if handle not in done:
            assert asking.tokens_so_far(engine, handle) > seen
    assert done[handle].tokens == want.tokens
    assert filled > 2  # chunks really were between the rounds
    engine.run()


def test_limit_of_the_context():
    """Up to the last row a slot may hold; neighbours' caches stay as they are."""
    engine = asking.engine()
    room = engine.room
    prompt = tiny.prompts_of(1, 23, seed=55, low=20, high=20)[0]
    full = Settings(max_new_tokens=room - len(prompt))
    neighbour = dataclasses.replace(SEEDED, max_new_tokens=room - 5)
    slow = engine.generate([prompt], asking.off(full))[0]
    alone = engine.generate([[1, 2, 3, 4, 5]], neighbour)[0]
    fast, other = engine.generate([prompt, [1, 2, 3, 4, 5]], [full, neighbour])
    assert fast.tokens == slow.tokens and other.tokens == alone.tokens
    assert len(fast.tokens) == room - len(prompt)
    assert fast.finish_reason == other.finish_reason == "length"
    with pytest.raises(ValueError, match=f"more than the {room}"):
        engine.submit(prompt, Settings(max_new_tokens=room - len(prompt) + 1))


def random_request(rng):
    fields = {"max_new_tokens": rng.randint(1, 14), "speculate": rng.random() < 0.8}
    if rng.random() < 0.4:
        fields |= {"temperature": rng.choice([0.5, 1.2]), "seed": rng.randrange(99)}
    if rng.random() < 0.3:
        fields |= {"presence_penalty": 0.9, "logit_bias": {rng.randrange(23): 1.5}}
    if rng.random() < 0.3:
        fields |= {"stop": (rng.choice("abcdef"),)}
    if rng.random() < 0.3:
        fields |= {"stop_ids": (rng.randrange(23),)}
    if rng.random() < 0.2:
        fields |= {"num_draft": rng.randint(0, 3)}
    return Settings(**fields, logprobs=rng.random() < 0.2)


def test_joins_leaves_aborts_and_retractions():
    """Hundreds of requests at random; each equals itself alone (e41, e44, e46)."""
    engine = asking.engine()
    rng = random.Random(5)
    prompts = tiny.prompts_of(240, 23, seed=56, low=1, high=50)
    asked = [random_request(rng) for _ in prompts]
    waiting = collections.deque(zip(prompts, asked, strict=True))
    live, kinds, done, ticks = {}, collections.Counter(), {}, 0
    before = engine.metrics()
    while waiting or engine.busy:
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            if waiting:
                prompt, settings = waiting.popleft()
                live[engine.submit(prompt, settings)] = (prompt, settings)
        if rng.random() < 0.15 and len(live) > len(done):
            kinds["abort"] += engine.abort(rng.choice(sorted(set(live) - set(done))))
        if rng.random() < 0.2 and engine.table.running:
            handle = rng.choice([j.handle for j in engine.table.running.values()])
            kinds["retract"] += engine.retract(handle)
        done.update(engine.step())
        ticks += 1
        assert ticks < 20_000
        held = len(engine.table.running) + (engine.table.filling is not None)
        assert held + len(engine.table.free) == engine.options.slots
    assert sorted(done) == sorted(live) and len(done) == 240
    assert asking.is_idle(engine)
    assert kinds["abort"] > 15 and kinds["retract"] > 15, kinds
    after = engine.metrics()
    assert after["aborted"] - before["aborted"] == kinds["abort"]
    assert after["retracted"] - before["retracted"] == kinds["retract"]
    emitted = sum(len(g.tokens) for g in done.values())
    assert after["emitted"] - before["emitted"] == emitted
    # The reference knows no drafts where they may not matter, no neighbours' luck
    # where they may: seeded texts depend on the drafts they were offered.
    handles = [h for h in live if live[h][1].temperature == 0]
    plain = engine.generate(
        [live[h][0] for h in handles], [asking.off(live[h][1]) for h in handles]
    )
    seeded = [h for h in live if live[h][1].temperature > 0]
    again = engine.generate([live[h][0] for h in seeded], [live[h][1] for h in seeded])
    for handle, want in zip(handles + seeded, plain + again, strict=True):
        made = done[handle]
        size = len(made.tokens)
        if made.finish_reason != "abort":
            assert (made.tokens, made.finish_reason) == (
                want.tokens,
                want.finish_reason,
            )
            assert (made.text, made.stopped_by) == (want.text, want.stopped_by)
        assert made.tokens == want.tokens[:size]
