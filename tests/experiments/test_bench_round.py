"""The round's times: what is called, from which state, and what is derived."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.bench import round as round_recipe
from experiments import bench_round, serving
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from tests.support import served, tiny


def config(**changes) -> schema.BenchRound:
    made = round_recipe.get_config()
    made.update_from_flattened_dict(
        {
            "bench.context": 40,
            "bench.widths": (1,),
            "bench.warmup": 0,
            "bench.repeats": 1,
            "serve.max_context": 160,
            **changes,
        }
    )
    return loading.to_recipe(made)


@pytest.fixture(scope="module")
def measured():
    """Every program of the tiny target, run once."""
    target = served.make_target()
    params = serving.serving_params(target.params)
    drafter = tiny.dflash(target.spec, 3)
    return bench_round.measure(config(), target, params, drafter)


def test_the_metrics_are_those_of_the_programs(measured):
    found = dict(measured)
    assert set(found["verify_ms"]) == {"1", "4", "8"}
    assert found["verify8_over_plain"] == pytest.approx(
        found["verify_ms"]["8"] / found["plain_step_ms"]
    )
    for suffix in ("", "_sampled"):
        whole = found[f"round_ms{suffix}"]
        parts = found[f"draft_ms{suffix}"] + found["verify_ms"]["4"]
        assert found[f"overhead_fraction{suffix}"] == pytest.approx(1 - parts / whole)
        assert found[f"plain_step_ms{suffix}"] > 0
    bars = found["series"]["cost"]
    assert set(bars) == {"plain", "round, greedy", "round, sampled"}
    assert bars["plain"] == {"verify": found["plain_step_ms"]}


def test_no_timed_program_copies_a_cache(measured):
    assert measured["cache_copies"] == 0


def test_a_copied_cache_is_counted():
    state = types.SimpleNamespace(cache=jnp.zeros((2, 1, 2, 16, 4)), draft=None)

    def write(cache, rows):
        return cache.at[:, :, :, 3].set(rows)

    rows = jnp.ones((2, 1, 2, 4))

    def compiled(**options):
        return jax.jit(write, **options).lower(state.cache, rows).compile()

    assert bench_round.cache_copies(compiled(), state) == 1
    assert bench_round.cache_copies(compiled(donate_argnums=0), state) == 0


def test_programs_take_turns_from_the_same_context(monkeypatch):
    calls = []

    def fake(name, kind):
        def run(state, slots):
            calls.append((name, kind, jax.device_get(slots)))
            emitted_B = jnp.asarray([2])
            return state, types.SimpleNamespace(emitted_B=emitted_B)

        return bench_round.Program(run, None, kind)

    def compile_programs(cfg, target, drafter, weights, state, widths):
        assert widths == [1, 2, 4, 8]
        names = [("plain", "greedy"), *((f"verify{w}", "greedy") for w in widths)]
        for kind in ("greedy", "sampled"):
            names += [("draft", kind), ("round", kind)]
        names += [("plain", "sampled"), ("extend", "greedy")]
        return {name: fake(*name) for name in names}

    monkeypatch.setattr(bench_round, "compile_programs", compile_programs)
    monkeypatch.setattr(bench_round, "cache_copies", lambda compiled, state: 0)
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: tree)
    ticks = iter(range(10**6))
    monkeypatch.setattr(
        bench_round.time, "perf_counter", lambda: float(next(ticks) ** 2)
    )
    cfg = config(**{"bench.widths": (1, 2), "bench.repeats": 3, "bench.warmup": 2})
    target = served.make_target()
    drafter = tiny.dflash(target.spec, 3)
    found = bench_round.measure(cfg, target, target.params, drafter)
    turn = [call[:2] for call in calls[:11]]
    assert len(set(turn)) == 11 and [c[:2] for c in calls] == turn * 5
    for _, kind, slots in calls:
        assert slots.length_B.tolist() == [40] and slots.active_B.all()
        sampled = kind == "sampled"
        assert bool(slots.sampling.greedy_B[0]) is not sampled
        assert slots.sampling.top_p_B[0] == np.float32(0.9 if sampled else 1.0)
    # The clock's n-th span is 4 n + 1 seconds; the medians are the middle turn's.
    middle = {name: 1e3 * (4 * (33 + i) + 1) for i, name in enumerate(turn)}
    assert found["plain_step_ms"] == middle["plain", "greedy"]
    assert found["round_ms_sampled"] == middle["round", "sampled"]
    assert found["series"]["cost"]["round, greedy"]["draft"] == pytest.approx(
        middle["draft", "greedy"] / 2
    )
    assert found["extend_ms"] == middle["extend", "greedy"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"serve.temperature": 0.0}, "serve.temperature=0.0 must be above 0"),
        ({"bench.context": 155, "bench.widths": (1, 8)}, "serve.max_context=160"),
        # The round is 8 wide and the 8 rows of the standard width are timed, too.
        ({"bench.context": 155}, "serve.max_context=160"),
    ],
)
def test_a_recipe_that_cannot_be_measured_is_refused(changes, words):
    with pytest.raises(UserError) as caught:
        cfg = config(**changes)
        target = served.make_target()
        bench_round.measure(cfg, target, target.params, tiny.dflash(target.spec, 3))
    assert words in str(caught.value)
