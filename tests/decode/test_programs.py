"""Compiled programs: none after warm-up, one host read each, every platform."""

import contextlib
import random

import jax
import pytest

from spec_jax.decode import prefill, programs, step
from spec_jax.decode.request import Settings
from tests.support import tiny

_compiles = []


def _count(event, duration, **_):
    if event.endswith("backend_compile_duration"):
        _compiles.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def no_compiles():
    before = len(_compiles)
    yield
    assert len(_compiles) == before


def engine_and_world():
    return tiny.engine("bigram", 3, slots=3, buckets=(7, 64)), tiny.world("bigram", 3)


def random_settings(rng):
    kind = rng.randrange(4)
    size = rng.randint(1, 14)
    if kind < 2:
        return Settings(max_new_tokens=size, speculate=kind == 0)
    return Settings(
        max_new_tokens=size,
        temperature=rng.choice([0.3, 0.8, 1.2]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([0.8, 1.0]),
        min_p=rng.choice([0.0, 0.1]),
        stop_ids=rng.choice([(), (4,), (7, 11)]),
        speculate=rng.random() < 0.8,
    )


def test_listener_counts_compiles():
    """The counter is not blind."""
    before = len(_compiles)
    jax.jit(lambda x: x * 3 + 1).lower(float(before)).compile()
    assert len(_compiles) == before + 1


def test_soak_with_joins():
    """300 random requests join while others run."""
    engine, world = engine_and_world()
    rng = random.Random(0)
    prompts = tiny.prompts_of(300, 23, seed=20, low=1, high=70)
    waiting = [(p, random_settings(rng)) for p in prompts]
    # A first request touches every host path once.
    engine.generate(prompts[:1], Settings(max_new_tokens=2, temperature=1.0))
    asked, done, ticks = {}, {}, 0
    reads, rounds = engine.host_reads, engine.rounds
    with no_compiles():
        while waiting or engine.busy:
            for _ in range(rng.choice([0, 0, 1, 1, 2])):
                if waiting:
                    prompt, settings = waiting.pop()
                    asked[engine.submit(prompt, settings)] = settings
            done.update(engine.step())
            ticks += 1
            # Results come one round late, never later.
            assert len(engine._pending) <= 1
            assert ticks < 20_000
    assert sorted(done) == sorted(asked) and len(done) == 300
    assert sorted(engine.table.free) == [0, 1, 2]
    assert not engine.state.slots.active_B.any()
    # One read per round and one per finished prefill, at one door.
    assert engine.host_reads - reads == engine.rounds - rounds + 300
    greedy = [done[h] for h, s in asked.items() if s.temperature == 0]
    assert len(greedy) > 100
    assert tiny.greedy_faults(world, greedy) == []
    for handle, settings in asked.items():
        generation = done[handle]
        assert generation.finish_reason in ("stop", "length")
        assert 1 <= len(generation.tokens) <= settings.max_new_tokens
        assert sum(generation.emitted) + 1 == len(generation.tokens)
        hit = [t in settings.stop_ids for t in generation.tokens]
        assert not any(hit[:-1])
        assert hit[-1] == (generation.finish_reason == "stop")


def test_rounds_do_not_wait_for_the_host():
    """A tick dispatches its round before it reads the last one's result."""
    engine, _ = engine_and_world()
    order = []
    compiled, fetch = dict(engine._programs), engine.fetch

    def watched(name):
        def call(*args):
            order.append(name[0] if isinstance(name, tuple) else name)
            return compiled[name](*args)

        return call

    def watched_fetch(tree):
        order.append("read")
        return fetch(tree)

    engine._programs = {name: watched(name) for name in compiled}
    engine.fetch = watched_fetch
    try:
        engine.generate([[1, 2, 3]], Settings(max_new_tokens=12))
    finally:
        engine._programs = compiled
        del engine.fetch
    steady = order[order.index("round") :]
    reads = 0
    for index, name in enumerate(steady):
        if name == "read":
            reads += 1
            ahead = steady[: index + 1].count("round")
            # reads: the prefill's first, then one per round; while anything
            # runs, the newest round is unread.
            if "round" in steady[index:]:
                assert reads <= ahead
    assert order.count("read") == order.count("round") + 1


def outside_conditions(jaxpr):
    """Every equation that runs whatever the conditions decide."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "cond":
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from outside_conditions(inner)


@pytest.mark.parametrize("speculate", [True, False])
def test_greedy_batches_skip_sampling_work(speculate):
    """Uniforms, weights and sums over the vocabulary stand behind conditions."""
    engine, _ = engine_and_world()
    jaxpr = jax.make_jaxpr(
        lambda w, s: step.round_step(
            engine.spec,
            engine.drafter,
            (0,),
            engine.options.round,
            w,
            s,
            speculate=speculate,
        )
    )(engine.weights, engine.state)
    equations = list(outside_conditions(jaxpr.jaxpr))
    names = {e.primitive.name for e in equations}
    assert {"cond", "dot_general", "exp"} <= names
    assert not {n for n in names if "random" in n or "threefry" in n or n == "sort"}
    vocab = engine.spec.vocab_size
    for equation in equations:
        shape = equation.outvars[0].aval.shape
        if equation.primitive.name in ("exp", "cumsum", "log") and shape:
            assert shape[-1] != vocab


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("kind", ["dflash", "bigram"])
def test_programs_lower_for_accelerators(platform, kind):
    """Nothing in the round or the prefill needs a CPU; sampling included."""
    engine = {
        "dflash": lambda: tiny.engine("dflash", 7, slots=3, buckets=(16,)),
        "bigram": lambda: tiny.engine("bigram", 3, slots=3, buckets=(7, 64)),
    }[kind]()
    spec, drafter = engine.spec, engine.drafter
    taps = drafter.needs.layer_ids
    options = engine.options.round
    size = engine.options.prefill_buckets[0]
    chunk = programs.make_chunk(spec, engine.options, [0], 0, 0, 0, size)
    weights, state, chunk = jax.eval_shape(
        lambda x: x, (engine.weights, engine.state, chunk)
    )
    functions = {
        "round": (
            lambda w, s: step.round_step(spec, drafter, taps, options, w, s),
            (weights, state),
        ),
        "plain": (
            lambda w, s: step.round_step(
                spec, drafter, taps, options, w, s, speculate=False
            ),
            (weights, state),
        ),
        "prefill": (
            lambda w, s, c: prefill.prefill_step(spec, drafter, taps, w, s, c),
            (weights, state, chunk),
        ),
    }
    for function, args in functions.values():
        traced = jax.jit(function, donate_argnums=1).trace(*args)
        lowered = traced.lower(lowering_platforms=(platform,))
        assert "func.func public @main" in lowered.as_text()
