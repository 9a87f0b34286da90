"""The schedule benchmark: its loop, its numbers, its verdict, and one small run."""

import json
import random
import types

import jax
import pytest

from experiments import closed_loop, run, runtime, serving, session
from experiments import schedule_numbers as numbers
from experiments import schedule_workload as workload
from experiments.closed_loop import Job, Run
from spec_jax.config import loading, schema
from spec_jax.core import calibration
from spec_jax.core.errors import UserError
from spec_jax.decode.request import Generation, Settings
from tests.support import served


class Loop:
    """Engine and log in one: each request needs as many ticks as its prompt says.

    A tick takes a second and gives every request that is in flight one token, but
    the second request nothing in the first tick: its prompt is still filled then.
    """

    def __init__(self):
        self.now, self.live, self.most, self.rows, self.plan_s = 0.0, {}, [], [], 0.0
        self.asked = []

    busy = property(lambda self: bool(self.live))

    def submit(self, prompt, settings):
        handle = len(self.asked)
        self.asked.append((prompt[0], settings))
        self.live[handle] = prompt[0]
        return handle

    def step(self, on_tokens):
        self.now += 1.0
        self.plan_s += 0.25
        self.most.append(len(self.live))
        self.rows.append({"round": len(self.rows)})
        for handle in self.live:
            if (handle, self.now) == (1, 1.0):
                continue
            self.live[handle] -= 1
            on_tokens(handle, [7], False)
        ended = [h for h, left in self.live.items() if not left]
        for handle in ended:
            del self.live[handle]
        return [(h, Generation([h], [h], "length")) for h in ended]


def test_the_loop_keeps_so_many_in_flight_and_counts_the_steady_part():
    loop = Loop()
    jobs = [Job([ticks], Settings()) for ticks in (4, 2, 3, 4, 1)]
    found = closed_loop.closed_loop(
        loop,
        loop,
        jobs,
        2,
        lambda s: Settings(num_draft=1),
        clock=lambda: loop.now,
    )
    # Both have a token at tick 2; "2" ends at 3, "3" comes; "4" ends at 4, another
    # comes; "3" ends at 6, "1" comes; it ends at 7 and nobody follows.
    assert loop.most == [2, 2, 2, 2, 2, 2, 2, 1]
    assert (found.seconds, found.tokens, found.tokens_per_s) == (5.0, 10, 2.0)
    assert found.rows == [{"round": n} for n in range(2, 7)]
    assert found.plan_s == 1.25
    # Requests go in order and answers come back in it, whoever ends first.
    assert [ticks for ticks, _ in loop.asked] == [4, 2, 3, 4, 1]
    assert all(settings.num_draft == 1 for _, settings in loop.asked)
    assert [a.tokens for a in found.answers] == [[0], [1], [2], [3], [4]]


def test_a_loop_that_is_never_steady_is_no_measurement():
    loop = Loop()
    jobs = [Job([1], Settings())] * 2
    with pytest.raises(UserError, match="2 are too few to keep 2 in flight"):
        closed_loop.closed_loop(loop, loop, jobs, 2, clock=lambda: loop.now)


def config(**changes) -> schema.BenchSchedule:
    made = {"drafter": "d", "concurrency": (1, 4, 16), "requests": (2, 5, 17)}
    return schema.BenchSchedule(**made | changes)


def test_what_is_fitted_on_is_not_measured():
    sets = {"a": [f"a{n}" for n in range(10)], "b": ["b0", "b1", "b2"]}
    fitting, measured = workload.split(sets, 4)
    assert fitting == ["a0", "a1", "a2", "a3", "b0"]
    assert measured == [["a4", "a5", "a6", "a7", "a8", "a9"], ["b1", "b2"]]


def test_the_mixture_has_equal_shares_and_many_lengths():
    sampled = schema.Serve(temperature=0.7)
    cfg = config(sampled_share=0.5, serve=sampled)
    jobs = workload.mixed(cfg, [[[1], [2], [3]], [[9]]], 40)
    assert [j.prompt[0] for j in jobs[:8]] == [1, 9, 2, 9, 3, 9, 1, 9]
    caps = {j.settings.max_new_tokens for j in jobs}
    assert min(caps) >= 32 and max(caps) <= 64 and len(caps) > 10
    hot = [j for j in jobs if j.settings.temperature == 0.7]
    assert 8 < len(hot) < 32
    assert all(j.settings.temperature == 0 for j in jobs if j not in hot)
    assert jobs == workload.mixed(cfg, [[[1], [2], [3]], [[9]]], 40)
    assert workload.regime_of(cfg) == "temperature=0.7 in 0.5 of requests"
    assert workload.regime_of(config()) == "greedy"


def test_a_text_is_cut_into_long_prompts(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"word{n}" for n in range(400)))
    found = workload.read_set("long", str(path), 0)
    texts = sorted((p.messages[0]["content"] for p in found), key=len)
    assert len(texts) == 3 and all(t.startswith("Summarise the f") for t in texts)
    assert sum(len(t.split("\n\n", 1)[1].split()) for t in texts) == 400
    assert len(workload.read_set("long", str(path), 2)) == 2
    path.write_text("one")
    with pytest.raises(UserError, match="has 1 prompts; give at least 2"):
        workload.read_set("long", str(path), 0)
    with pytest.raises(UserError, match="cannot be read"):
        workload.read_set("long", str(tmp_path / "no.txt"), 0)


def test_a_way_changes_settings():
    base = Settings(max_new_tokens=5)
    ways = {w.name: w for w in numbers.ways_of((0, 2))}
    assert list(ways) == [
        *("plain", "static", "cap_accept", "compact"),
        *("fixed0", "fixed2"),
    ]
    assert ways["compact"].change(base) is base
    assert ways["fixed0"].change(base) == Settings(max_new_tokens=5, speculate=False)
    assert ways["fixed2"].change(base) == Settings(max_new_tokens=5, num_draft=2)
    assert ways["fixed2"].engine == ways["fixed0"].engine == "compact"


def row(emitted=(2, 1), **changes):
    made = {
        "draft": True,
        "R": 2,
        "K": 3,
        "T": 6,
        "planned": 2,
        "verify_lens": [3, 2],
        "emitted": list(emitted),
        "not_ready": False,
        "looked_up": 2,
        "stale": 0,
        "filled": False,
        "predicted_s": 0.9,
        "measured_s": 1.0,
    }
    return made | changes


def runs_of(rates):
    """name -> tokens per second of each turn, at every load."""
    rows = [row(), row(K=6, filled=True, emitted=(4, 4))]
    return {
        (name, load): [Run(2.0, round(2 * r), rows, 0.01, []) for r in each]
        for name, each in rates.items()
        for load in (1, 4, 16)
    }


RATES = {
    "plain": [10, 20, 30],
    "static": [8, 16, 24],
    "cap_accept": [8, 15, 24],
    "compact": [12, 25, 36],
    "fixed0": [9, 19, 29],
    "fixed1": [11, 22, 34],
    "fixed3": [8, 17, 25],
}


def test_numbers_and_verdict_of_known_runs():
    cfg = config(windows=(0, 1, 3))
    found = numbers.summary(cfg, runs_of(RATES), (0, 1, 3), 3)
    assert found["modes"]["compact"]["4"]["tokens_per_s"] == 25
    assert found["modes"]["plain"]["16"]["highest"] == 30
    # Only the round that no prompt was filled before; all of them for the length.
    assert found["modes"]["compact"]["1"]["decode_tokens_per_s"] == 3.0
    assert found["modes"]["compact"]["1"]["accept_length"] == 2.75
    assert found["fixed"]["3"]["1"] == 17
    best = {"window": 1, "tokens_per_s": 22, "engine": "compact"}
    assert found["best_fixed"]["4"] == best
    # Ratios are of the same turn, their median counts: 12/11, 25/22, 36/34.
    assert found["compact_over_best_fixed"]["4"] == pytest.approx(12 / 11)
    assert found["compact_over_static"]["1"] == pytest.approx(1.5)
    assert found["compact_over_plain"]["16"] == pytest.approx(1.2)
    assert found["plan_fraction"] == pytest.approx(0.005)
    assert found["verify_len_histogram"]["1"] == {"2": 6, "3": 6}
    assert found["programs"]["1"] == {"2": {"6": 6}}
    assert found["shares"]["1"]["partial_budget"] == 0.5
    assert found["budgets"]["1"] == {
        "rounds": 6,
        "mean": 4.5,
        "distinct": 2,
        "drafting_rounds": 6,
        "distinct_drafting": 2,
    }
    assert found["only_plain_at"] == []
    # A round that drafts and verifies anchors only has looked, and spent nothing.
    runs = runs_of(RATES)
    for each in runs["compact", 4]:
        each.rows[:] = [row(K=0, T=2, verify_lens=[1, 1], emitted=(1, 1))]
    looked = numbers.summary(cfg, runs, (0, 1, 3), 3)
    assert looked["only_plain_at"] == ["1", "4", "16"], "runs share their rows here"
    assert looked["shares"]["4"]["anchors_only"] == 1.0
    assert looked["shares"]["4"]["plain"] == 0.0
    predicted = found["predicted_over_measured"]["4"]
    assert predicted["p50"] == predicted["draft"]["p50"] == 0.9
    assert predicted["plain"] is None
    assert found["series"]["verify_len"]["4 at once"] == [0, 6, 6, 0]
    assert found["series"]["throughput"]["best fixed"]["4"] == 22
    verdict = numbers.judge(cfg, found, True, 0)
    assert all(each["holds"] is True for each in verdict.values()), verdict
    assert numbers.judge(cfg, found, False, 1) != verdict


@pytest.mark.parametrize(
    ("claim", "changes", "measured"),
    [
        ("best fixed, lowest", {"fixed1": [14, 28, 40]}, 25 / 28),
        ("highest of 2..8", {"fixed1": [12, 24, 36]}, 1.0),
        ("static, lowest from 16", {"static": [11, 22, 33]}, 12 / 11),
        ("plain, lowest", {"plain": [13, 26, 40]}, 12 / 13),
    ],
)
def test_a_claim_that_does_not_hold_is_called_so(claim, changes, measured):
    cfg = config()
    found = numbers.summary(cfg, runs_of(RATES | changes), (0, 1, 3), 3)
    verdict = numbers.judge(cfg, found, True, 0)
    named = next(each for name, each in verdict.items() if claim in name)
    assert named["holds"] is False
    assert named["measured"] == pytest.approx(measured, abs=1e-2)


def test_claims_about_rounds_can_fail():
    cfg = config()
    runs = runs_of(RATES)
    slow = [row(predicted_s=0.8), row(K=6, filled=True)]
    full = [row(K=6, predicted_s=None)]
    for rows, plan_s, failed in (
        (slow, 0.1, {"planning of", "predicted over"}),
        (full, 0.0, {"rounds with 0 < K", "different budgets"}),
    ):
        for load in cfg.concurrency:
            runs["compact", load] = [Run(2.0, 50, rows, plan_s, [])] * 3
        found = numbers.summary(cfg, runs, (0, 1, 3), 3)
        verdict = numbers.judge(cfg, found, True, 0)
        for words in failed:
            named = next(v for name, v in verdict.items() if name.startswith(words))
            assert named["holds"] is False, words
    # Nothing was predicted, and loads from 16 on were not run: neither way.
    off = verdict["predicted over measured round that drafts, median off by"]
    assert off["measured"] is off["holds"] is None
    few = numbers.judge(config(concurrency=(1,), requests=(2,)), found, True, 0)
    assert few["compact over static, lowest from 16"]["holds"] is None


K_NAME = "different budgets K of rounds that draft, fewest"
DRAFT_NAME = "predicted over measured round that drafts, median off by"
PLAIN_NAME = "predicted over measured plain round, median off by"


def judged(**rows_at):
    """The verdict where a load's rounds of `compact` are others."""
    cfg, runs = config(), runs_of(RATES)
    for text, rows in rows_at.items():
        runs["compact", int(text[1:])] = [Run(2.0, 50, rows, 0.0, [])] * 3
    found = numbers.summary(cfg, runs, (0, 1, 3), 3)
    return found, numbers.judge(cfg, found, True, 0)


PLAIN_ROW = row(draft=False, K=0, T=2, verify_lens=[1, 1], emitted=[1, 1])


def test_loads_that_only_ran_plain_rounds_are_named_and_prove_nothing():
    off = PLAIN_ROW | {"predicted_s": 0.7}
    found, verdict = judged(_16=[off, off])
    assert found["only_plain_at"] == ["16"]
    assert verdict[K_NAME]["holds"] and verdict[DRAFT_NAME]["holds"]
    assert verdict[PLAIN_NAME]["measured"] == pytest.approx(0.3)
    assert verdict[PLAIN_NAME]["holds"] is False
    found, verdict = judged(**{f"_{load}": [PLAIN_ROW] for load in (1, 4, 16)})
    assert found["only_plain_at"] == ["1", "4", "16"]
    for name in (K_NAME, DRAFT_NAME, "rounds with 0 < K < R x M, lowest share where"):
        claim = next(c for words, c in verdict.items() if words.startswith(name))
        assert claim["measured"] is claim["holds"] is None, name
    assert verdict[PLAIN_NAME]["holds"] is True


def test_one_load_with_a_constant_budget_is_enough():
    """Neither other loads nor plain rounds between make a budget of it."""
    _, verdict = judged(_4=[row(), PLAIN_ROW, row()])
    assert verdict[K_NAME]["measured"] == 1 and verdict[K_NAME]["holds"] is False


def test_predicted_times_of_plain_rounds_do_not_hide_those_of_drafts():
    wrong = row(predicted_s=0.5)
    found, verdict = judged(_4=[wrong, row(K=6, predicted_s=0.5), *[PLAIN_ROW] * 7])
    assert found["predicted_over_measured"]["4"]["p50"] == 0.9
    assert verdict[DRAFT_NAME]["measured"] == 0.5
    assert verdict[DRAFT_NAME]["holds"] is False and verdict[PLAIN_NAME]["holds"]
    # A load whose drafts were never predicted leaves the claim open.
    _, verdict = judged(_4=[row(predicted_s=None), row(K=6, predicted_s=None)])
    assert verdict[DRAFT_NAME]["holds"] is None


SIZES = [
    "--config.concurrency=(2,)",
    "--config.requests=(5,)",
    "--config.row_buckets=2",
    "--config.windows=(0,1,3)",
    "--config.cost_repeats=2",
    "--config.fit_slots=2",
    "--config.fit_prompts=4",
    "--config.min_rounds=20",
    "--config.bench.repeats=1",
    "--config.bench.warmup=1",
    "--config.bench.context=8",
    "--config.bench.max_new_tokens=16",
    "--config.serve.max_context=64",
    "--config.serve.max_new_tokens=16",
    "--config.serve.prefill_buckets=(16,)",
    "--config.bench.prompt_sets.long=",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedule")
    target = served.make_target()
    drafter = served.export_drafter(folder / "drafter", target)
    rng = random.Random(0)
    rows = [{"prompt": f"w{rng.randrange(6, 12)} w{6 + n % 5}"} for n in range(12)]
    prompts = folder / "p.jsonl"
    prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))
    loaded = (target, serving.serving_params(target.params))
    patch = pytest.MonkeyPatch()
    patch.setattr(serving, "load_serving_target", lambda section: loaded)
    patch.setattr(session, "prepare_jax", lambda precision: None)
    jax.config.update("jax_disable_most_optimizations", True)

    def bench(workdir, *words) -> int:
        return run.main(
            [
                "configs/bench/schedule.py",
                f"--config.drafter={drafter}",
                f"--workdir={folder / workdir}",
                f"--config.bench.prompt_sets.gsm8k={prompts}",
                *SIZES,
                *words,
            ]
        )

    yield types.SimpleNamespace(folder=folder, target=target, bench=bench)
    jax.config.update("jax_disable_most_optimizations", False)
    patch.undo()


@pytest.mark.slow
def test_one_small_run(world):
    assert world.bench("all") == 0
    report = json.loads((world.folder / "all/report.json").read_text())
    found = report["metrics"]
    for mode in numbers.MODES:
        assert found["modes"][mode]["2"]["tokens_per_s"] > 0
    assert found["modes"]["plain"]["2"]["accept_length"] == 1.0
    assert set(found["fixed"]) == {"0", "1", "3"}
    best = max(
        *(each["2"] for each in found["fixed"].values()),
        *(found["modes"][m]["2"]["tokens_per_s"] for m in ("plain", "static")),
    )
    assert found["best_fixed"]["2"]["tokens_per_s"] == best
    assert found["ladder"] == {"2": [2, 5, 8]}
    assert found["greedy_identical"] is True and found["compared_texts"] == 5
    assert found["compiles_after_warmup"] == 0
    assert found["workload"]["fitting_prompts"] == 4
    # What was fitted was used, and lies there for another run.
    table = calibration.read_cost(str(world.folder / "all/cost.json"))
    fitted = calibration.read_sts(str(world.folder / "all/sts.json"))
    assert found["cost_table"]["table"] == json.loads(json.dumps(table.to_json()))
    assert found["sts"]["temperatures"] == list(fitted.temperatures)
    assert fitted.source.sampling == "greedy" and found["sts"]["num_samples"] >= 20
    assert found["predicted_over_measured"]["2"]["p50"] > 0
    assert found["verdict_holds"] is False  # no loads from 16 on
    assert {"throughput", "verify_len", "reliability"} <= set(report["series"])
    assert set(found["shares"]["2"]) >= {"not_ready", "stale_slots", "partial_budget"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config.drafter="], "drafter='' is empty"),
        (["--config.requests=(2,)"], "must have one number above each of"),
        (["--config.concurrency=(4,2)"], "must be positive and ascending"),
        (["--config.sampled_share=0.5"], "does not go with serve.temperature=0"),
        (["--config.serve.topology=dynamic_tree"], "must be 'chain'"),
        (["--config.form=cubic"], "form='cubic' must be one of"),
        (["--config.windows=(0,9)"], "go beyond the drafter's 3 drafts"),
        (["--config.bench.context=60"], "bench.context=60"),
        (["--config.bench.prompt_sets.gsm8k="], "bench.prompt_sets names no file"),
        (["--config.serve.max_context=27"], "0 of its prompts fit into the"),
        (["--config.sts=/no.json"], "/no.json cannot be read"),
        (["--config.serve.speculate=False"], "serve.speculate=False drafts nothing"),
    ],
)
def test_wrong_input_ends_with_code_two(world, monkeypatch, capsys, words, said):
    monkeypatch.setattr(serving, "make_engine", lambda *a, **k: pytest.fail("compiled"))
    small = ["--config.bench.context=1"] if "max_context" in words[0] else []
    assert world.bench("wrong", *small, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.startswith("note: ")]
    assert len(lines) == 1 and said in lines[0]


def test_the_tiny_recipe():
    options, name = run.parse(
        ["configs/bench/schedule.py:tiny", "--config.drafter=some/folder"]
    )
    cfg = loading.to_recipe(options.config)
    assert name == "bench-schedule-tiny" and cfg.target.source == "tiny"
    assert cfg.loads == ((1, 8), (4, 20))
    (path,) = runtime.prompt_sets(cfg.bench).values()
    assert len(workload.read_set("tiny", path, 0)) == 48
