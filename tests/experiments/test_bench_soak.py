"""A short soak: every program's edges, and each check shown to fail."""

import dataclasses

import pytest

from configs.bench import soak as recipe
from experiments import bench_soak, soak_run, soak_watch
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder
from spec_jax.decode.request import Generation


def config(**changes) -> schema.BenchSoak:
    made = recipe.get_config()
    made.update_from_flattened_dict(
        {
            "requests": 60,
            "real_requests": 0,
            "row_buckets": 2,
            "abort": 0.1,
            "retract": 0.1,
            "serve.slots": 2,
            "serve.max_new_tokens": 16,
            "serve.prefill_buckets": (32,),
            **changes,
        }
    )
    return loading.to_recipe(made)


@pytest.fixture(scope="module")
def soaked():
    cfg = config()
    part = bench_soak.random_part(cfg)
    kept = []

    def look(part, log, share):
        kept.append(log)
        return check(part, log, share)

    check, bench_soak.check_outputs = bench_soak.check_outputs, look
    try:
        found = bench_soak.run_part(part, cfg)
    finally:
        bench_soak.check_outputs = check
    return cfg, part, kept[0], found


def test_edges_of_buckets():
    edges = soak_watch.edges_of(Ladder(((1, (3, 5)), (2, (6, 10)))))
    assert edges == {
        ("plain", 1, 0): (1, 1),
        ("rows", 1, 3): (1, 3),
        ("rows", 1, 4): (1, 5),
        ("rows", 1, 5): (1, 5),
        ("plain", 2, 0): (2, 2),
        ("rows", 2, 6): (2, 6),
        ("rows", 2, 7): (2, 10),
        ("rows", 2, 10): (2, 10),
    }


@pytest.mark.slow
def test_a_soak_leaves_nothing_behind(soaked):
    _, _, _, found = soaked
    assert found["wrong_outputs"] == 0 and found["first_wrong"] == ""
    assert found["greedy_compared"] > 30
    assert found["compiles_after_warmup"] == 0
    assert found["slots_returned"] and found["metrics_balanced"]
    assert found["buckets_visited"] == found["buckets_total"] == 12
    assert found["programs_run"] == found["programs"] == 8
    assert found["aborted"] > 0 and found["retracted"] > 0
    assert set(found["auto_off"]) == {"acceptance", "load", "context"}
    assert min(found["auto_off"].values()) > 0 and found["stopped_by_text"] > 0
    assert found["finished"]["abort"] == found["aborted"]
    assert found["finished"]["stop"] > 0 and found["finished"]["length"] > 0
    assert found["seeds_repeated"] > 0 and found["seeds_not_reproduced"] == 0
    assert found["buffers_growth"] <= 3  # the relay's ring
    assert found["passed"]


@pytest.mark.slow
def test_the_drafter_is_right_often_enough(soaked):
    _, _, log, _ = soaked
    accepted = sum(sum(g.accepted) for g in log.done.values())
    drafted = sum(sum(g.drafted) for g in log.done.values())
    # Penalties and sampling of the requests keep it low; both must happen often.
    assert accepted > 20 and drafted - accepted > 100


@pytest.mark.slow
def test_requests_differ(soaked):
    _, part, _, _ = soaked
    settings = [r.settings for r in part.requests]
    for name in ("temperature", "speculate", "num_draft", "seed", "ignore_eos"):
        assert len({getattr(s, name) for s in settings}) > 1, name
    assert any(s.stop_ids for s in settings) and any(s.stop for s in settings)
    greedy = [s for s in settings if s.temperature == 0]
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert len({getattr(s, name) for s in greedy}) > 1, name
    assert any(s.logit_bias for s in greedy) and any(s.logprobs for s in greedy)


@pytest.mark.slow
def test_a_wrong_token_and_a_wrong_end_are_found(soaked):
    _, part, log, _ = soaked
    handle = next(
        h
        for h, r in log.asked.items()
        if r.settings.temperature == 0
        and log.done[h].finish_reason == "length"
        and len(log.done[h].tokens) > 3
    )
    clean = log.done[handle]
    one = dataclasses.replace(log, asked={handle: log.asked[handle]})
    for changed in (
        dataclasses.replace(
            clean, tokens=[*clean.tokens[:2], clean.tokens[2] ^ 1, *clean.tokens[3:]]
        ),
        dataclasses.replace(clean, tokens=clean.tokens[:-1]),
        dataclasses.replace(clean, finish_reason="stop"),
        dataclasses.replace(clean, finish_reason="abort", tokens=[clean.tokens[0] ^ 1]),
    ):
        one.done = {handle: changed}
        assert bench_soak.check_outputs(part, one, 1.0)["wrong_outputs"] == 1
    one.done = {
        handle: dataclasses.replace(
            clean, finish_reason="abort", tokens=clean.tokens[:2]
        )
    }
    assert bench_soak.check_outputs(part, one, 1.0)["wrong_outputs"] == 0


@pytest.mark.slow
def test_unbalanced_books_are_found(soaked):
    _, part, log, _ = soaked
    before = part.engine.metrics()
    empty = soak_run.Log()
    assert bench_soak.check_books(part, empty, before)["metrics_balanced"]
    lost = dataclasses.replace(empty, asked={0: part.requests[0]})
    assert not bench_soak.check_books(part, lost, before)["metrics_balanced"]
    # A reason to stop drafting that never came, and a stop string that never ended.
    unmet = bench_soak.check_books(part, empty, before)
    assert not unmet["auto_off_met"] and not unmet["stop_strings_met"]
    extra = dataclasses.replace(
        lost, done={0: Generation([0], [1], finish_reason="stop")}
    )
    assert not bench_soak.check_books(part, extra, before)["metrics_balanced"]
    part.engine.table.free.pop()
    try:
        assert not bench_soak.check_books(part, empty, before)["slots_returned"]
    finally:
        part.engine.table.free.append(1)
        part.engine.table.free.sort(reverse=True)
    del log


def test_growth_is_after_the_first_fifth():
    assert (
        bench_soak.growth([100.0, 140.0, 120, 130, 140, 141, 141, 142, 143, 150]) == 10
    )
    assert bench_soak.growth([100.0]) == 0


def test_wrong_values_are_refused():
    with pytest.raises(UserError, match="join=0.0 must be above 0"):
        config(join=0.0)
    with pytest.raises(UserError, match=r"abort=1.5 must lie in \[0, 1\]"):
        config(abort=1.5)
