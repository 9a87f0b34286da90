"""Calibrate, profile, serve: one walk on a tiny target, and what each refuses."""

import collections
import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest

from experiments import (
    calibrate,
    profile,
    round_log,
    run,
    runtime,
    serve_offline,
    serving,
    session,
)
from spec_jax.config import loading, schema
from spec_jax.config.schema import serving as serving_schema
from spec_jax.core import calibration
from spec_jax.core.calibration import CostTable, FlatCost
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import even_ladder
from spec_jax.data import workload
from spec_jax.data.prompts import user_prompt
from spec_jax.data.workload import WorkItem
from spec_jax.decode import plan, regimes
from spec_jax.decode.budget import BudgetOptions, Choice, Counts
from spec_jax.decode.jobs import RoundRecord
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.request import Generation, Settings
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base
from tests.support import served, tiny

slot_buckets = runtime.slot_buckets
SIZES = [
    "--config.serve.slots=2",
    "--config.serve.max_context=64",
    "--config.serve.prefill_buckets=(16,)",
    "--config.serve.max_new_tokens=24",
]
REQUESTS = [
    {"id": "a", "arrival": 0, "prompt": "w6 w7"},
    {"id": "b", "arrival": 0.0, "prompt": "w8", "max_new_tokens": 9},
    {"id": "plain", "arrival": 0.02, "prompt": "w9", "speculate": False},
    {"id": "long", "arrival": 0.02, "prompt": "w9 " * 60},
    {"id": "mask", "arrival": 0.02, "prompt": "w9 <mask>"},
    {"id": "wrong", "arrival": 0.03, "prompt": "w9", "top_p": 0.0},
    {"id": "tops", "arrival": 0.03, "prompt": "w9", "logprobs": True}
    | {"top_logprobs": 100_000},
    {"id": "stop", "arrival": 0.04, "prompt": "w10 w11", "stop": "w"},
    {"id": "s", "arrival": 0.05, "prompt": "w7", "temperature": 1.0, "seed": 3},
    {
        "id": "rules",
        "arrival": 0.05,
        "prompt": "w6 w7",
        "max_new_tokens": 9,
        "frequency_penalty": 2.0,
        "logprobs": True,
        "top_logprobs": 1,
    },
]


class World:
    """A target, its exported drafter, and runs of the command line."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.target = served.make_target()
        self.params = serving.serving_params(self.target.params)
        self.drafter = served.export_drafter(folder / "drafter", self.target)
        self.prompts = self.lines(
            "p.jsonl", [{"prompt": f"w{6 + n} w{9 + n}"} for n in range(8)]
        )
        self.workload = self.lines("w.jsonl", REQUESTS)

    def lines(self, name, rows) -> str:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def run(self, task, workdir, *words) -> int:
        drafter = f"--config.drafter={self.drafter}"
        where = f"--workdir={self.folder / workdir}"
        return run.main([f"configs/{task}.py", drafter, where, *SIZES, *words])

    def calibrate(self, workdir, *words) -> int:
        return self.run(
            "calibrate",
            workdir,
            f"--config.prompts={self.prompts}",
            "--config.serve.temperature=1.0",
            "--config.min_rounds=50",
            *words,
        )

    def profile(self, workdir, *words) -> int:
        return self.run(
            "profile",
            workdir,
            "--config.context=8",
            "--config.repeats=2",
            "--config.warmup=1",
            "--config.row_buckets=2",
            *words,
        )

    def serve(self, workdir, *words) -> int:
        path = f"--config.workload={self.workload}"
        rows = ("--config.row_buckets=2",) if "--config.mode=compact" in words else ()
        return self.run("serve_offline", workdir, path, *rows, *words)

    def metrics(self, workdir) -> dict:
        return json.loads((self.folder / workdir / "report.json").read_text())[
            "metrics"
        ]

    def rows(self, workdir, name) -> list[dict]:
        text = (self.folder / workdir / name).read_text()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    made = World(tmp_path_factory.mktemp("runtime"))
    loaded = (made.target, made.params)
    patch.setattr(serving, "load_serving_target", lambda section: loaded)
    patch.setattr(session, "prepare_jax", lambda precision: None)
    # Programs of one R only, compiled in a hurry: the tests wait for little else.
    patch.setattr(runtime, "slot_buckets", lambda slots: (slots,))
    jax.config.update("jax_disable_most_optimizations", True)
    yield made
    jax.config.update("jax_disable_most_optimizations", False)
    patch.undo()


@pytest.fixture(scope="module")
def fitted(world):
    """The walk: temperatures and cost table, each by its command."""
    assert world.calibrate("sts") == 0
    assert world.profile("cost") == 0
    return world


@pytest.fixture
def no_engine(monkeypatch):
    """Nothing may compile."""
    monkeypatch.setattr(serving, "make_engine", lambda *a, **k: pytest.fail("compiled"))


def test_calibration_fits_this_drafter(fitted):
    found = calibration.read_sts(str(fitted.folder / "sts/sts.json"))
    metrics = fitted.metrics("sts")
    sha = serving.load_drafter(fitted.drafter, fitted.target).weights_sha256
    found.check(
        3,
        model=fitted.target.fingerprint,
        drafter=sha,
        device=jax.devices()[0].device_kind,
        sampling="temperature=1",
    )
    assert metrics["num_samples"] == found.num_samples >= 50
    assert metrics["ece_after"] == pytest.approx(found.ece_after)
    assert metrics["ece_before"] == pytest.approx(found.ece_before)
    assert metrics["mean_ece_after"] < metrics["mean_ece_before"]
    assert found.dataset == "temperature=1; p.jsonl"
    for name in ("survival_measured", "survival_after"):  # it falls
        assert metrics[name] == sorted(metrics[name], reverse=True)


def test_the_profile_is_of_the_ladder_and_loads_where_it_was_measured(fitted):
    table = calibration.read_cost(str(fitted.folder / "cost/cost.json"))
    metrics = fitted.metrics("cost")
    ladder = even_ladder((2,), 4, 2)
    sha = serving.load_drafter(fitted.drafter, fitted.target).weights_sha256
    table.check(
        model=fitted.target.fingerprint,
        drafter=sha,
        device=jax.devices()[0].device_kind,
        num_draft=3,
        ladder=ladder.buckets,
    )
    flat = calibration.read_cost(str(fitted.folder / "cost/cost.flat.json"))
    assert isinstance(table.cost, calibration.AdditiveCost)
    assert isinstance(flat.cost, calibration.FlatCost)
    assert {r: set(row) for r, row in metrics["round_ms"].items()} == {
        str(r): {str(t) for t in rows} for r, rows in ladder.buckets
    }
    ratios = metrics["table"]["predicted_over_measured"]
    worst = max(abs(x - 1) for row in ratios.values() for x in row.values())
    assert metrics["fit_error"]["additive"]["max"] == pytest.approx(worst)
    measured = metrics["round_ms"]["2"]["8"] / 1e3
    assert table.round_time(2, 8) == pytest.approx(measured * ratios["2"]["8"])
    assert table.plain_time(2) == pytest.approx(metrics["plain_ms"]["2"] / 1e3)


def test_serving_a_workload_with_a_budget(fitted):
    planned = [
        "--config.mode=compact",
        f"--config.cost={fitted.folder / 'cost/cost.json'}",
        f"--config.sts={fitted.folder / 'sts/sts.json'}",
        "--config.max_load=1.0",
        "--config.auto_off.max_context=20",
    ]
    assert fitted.serve("compact", *planned) == 0
    assert fitted.serve("plain", "--config.pace=fast", "--config.drafter=") == 0
    rows = {r["id"]: r for r in fitted.rows("compact", "requests.jsonl")}
    assert list(rows) == [r["id"] for r in REQUESTS]
    # What cannot be served says why, and nobody else notices.
    for name, words in (
        ("long", "more than the"),
        ("mask", "mask token"),
        ("wrong", "top_p=0.0"),
        ("tops", "top_logprobs=100000 must be"),
    ):
        assert rows[name]["finish_reason"] == "refused"
        assert words in rows[name]["error"] and rows[name]["tokens"] == 0
    assert rows["a"]["tokens"] == 24 and rows["b"]["tokens"] == 9
    assert rows["stop"]["finish_reason"] == "stop" and "w" not in rows["stop"]["text"]
    assert rows["plain"]["speculate"] is False and rows["plain"]["rounds"] == 23
    assert rows["s"]["sampling"] == "temperature=1"
    for row in rows.values():
        if not row["error"]:
            assert row["arrival_s"] <= row["submitted_s"] <= row["first_token_s"]
            assert row["first_token_s"] <= row["finish_s"]
    # Greedy texts depend neither on the drafts nor on who came when.
    plain = {r["id"]: r for r in fitted.rows("plain", "requests.jsonl")}
    for name in ("a", "b", "plain", "stop", "rules"):
        assert plain[name]["text"] == rows[name]["text"], name
    assert rows["a"]["text"] and rows["rules"]["text"]
    assert not rows["a"]["text"].startswith(rows["rules"]["text"])
    ours, theirs = rows["rules"]["logprobs"], plain["rules"]["logprobs"]
    assert len(ours) == len(rows["rules"]["top_logprobs"]) == 9
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert "logprobs" not in rows["a"]
    rounds = fitted.rows("compact", "rounds.jsonl")
    emitted = sum(sum(r["emitted"]) for r in rounds)
    firsts = sum(not r["error"] for r in rows.values())
    metrics = fitted.metrics("compact")
    # What a round emits after a stop string, and the round after it, is dropped.
    assert 0 <= emitted + firsts - metrics["tokens"] <= 2 * 4
    for row in rounds:
        assert sum(row["verify_lens"]) <= row["T"]
        pairs = zip(row["raw_accepted"], row["accepted"], strict=True)
        assert all(a <= raw for raw, a in pairs)
        assert len(set(row["requests"])) == len(row["verify_lens"])
        lengths = ("verify_lens", "accepted", "bonus", "cutoff", "trim")
        for n, r, bonus, cutoff, trim in zip(*(row[k] for k in lengths), strict=True):
            # The last row that runs also judges the first draft behind the cut.
            assert cutoff == n - 1 and 0 <= trim <= (r == cutoff)
            assert r <= cutoff and bonus == (r == cutoff)
        drafts = sum(row["verify_lens"]) - len(row["verify_lens"])
        assert drafts <= row["K"] and row["measured_s"] > 0
    # Every handle of the rounds is one request's, and its tokens add up.
    told = collections.Counter()
    drafted = collections.Counter()
    for row in rounds:
        columns = (row[name] for name in ("requests", "emitted", "cutoff"))
        for handle, count, drafts in zip(*columns, strict=True):
            told[handle] += count
            drafted[handle] += drafts
    by_handle = {r["handle"]: r for r in rows.values() if not r["error"]}
    assert set(told) == set(by_handle) and len(by_handle) == 6
    for handle, row in by_handle.items():
        assert len(row["token_ids"]) == row["tokens"] and row["seed"] in (None, 3)
        if row["finish_reason"] == "length":
            assert told[handle] + 1 == row["tokens"], row["id"]
            assert drafted[handle] == row["drafted"] >= row["accepted"]
    assert rows["stop"]["stopped_by"] == "w" and rows["a"]["stopped_by"] is None
    assert rows["s"]["seed"] == 3 and rows["long"]["handle"] is None
    assert metrics["finished"] == {"length": 5, "refused": 4, "stop": 1}
    assert metrics["auto_off"]["context"] > 0
    assert metrics["compiles_after_warmup"] == 0
    assert metrics["ladder"] == {"2": [2, 5, 8]}
    assert metrics["rounds"] == len(rounds)
    assert all(r["predicted_s"] > 0 for r in rounds)
    assert metrics["predicted_over_measured"]["p50"] > 0
    none = fitted.metrics("plain")
    assert none["accept_length"] == 1.0 and none["verify_len_histogram"] == {}
    assert none["shares"]["plain"] == 1.0


def test_a_target_that_breaks_says_so_in_the_records(world, monkeypatch):
    tree = world.params["params"]
    token = world.target.tokenizer.id_of("w8")
    embed = tree["embed"].at[token].set(np.nan)
    loaded = (world.target, {"params": {**tree, "embed": embed}})
    monkeypatch.setattr(serving, "load_serving_target", lambda section: loaded)
    assert world.serve("broken", "--config.pace=fast", "--config.drafter=") == 0
    rows = {r["id"]: r for r in world.rows("broken", "requests.jsonl")}
    assert rows["b"]["finish_reason"] == "error"
    assert "not finite" in rows["b"]["error"] and "target.dtype" in rows["b"]["error"]
    for row in rows.values():
        assert bool(row["error"]) == (row["finish_reason"] in ("error", "refused"))
    assert world.metrics("broken")["finished"]["error"] >= 1


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        ("calibrate", ["--config.prompts=/no.jsonl"], "'/no.jsonl' is not there"),
        ("calibrate", ["--config.drafter="], "drafter='' is empty"),
        ("calibrate", ["--config.num_bins=0"], "num_bins=0 must be 1 or more"),
        ("calibrate", ["--config.serve.max_context=34"], "none fits into the 2"),
        ("profile", ["--config.form=cubic"], "form='cubic' must be one of"),
        ("profile", ["--config.context=50"], "context=50"),
        ("profile", ["--config.repeats=0"], "repeats=0 must be 1 or more"),
        ("profile", ["--config.serve.speculate=False"], "serve.speculate=False"),
        ("calibrate", ["--config.serve.speculate=False"], "serve.speculate=False"),
        ("serve", ["--config.mode=fast"], "mode='fast' must be one of"),
        ("serve", ["--config.pace=slow"], "pace='slow' must be one of"),
        ("serve", ["--config.workload=/no.jsonl"], "workload='/no.jsonl'"),
        ("serve", ["--config.auto_off.rounds=0"], "auto_off.rounds=0 must be 1"),
        (
            "serve",
            ["--config.drafter=", "--config.auto_off.max_active=3"],
            "switches speculation off",
        ),
        ("serve", ["--config.cost=c.json"], "is for the modes with a budget"),
        ("serve", ["--config.row_buckets=2"], "row_buckets=2 is for the modes with a"),
        ("serve", ["--config.allow_unmarked=True"], "allow_unmarked=True is about fil"),
        *(
            (
                "serve",
                ["--config.drafter=", f"--config.serve.{name}={value}"],
                f"serve.{name}={value!r} is for drafts",
            )
            for name, value in (
                ("num_draft", 2),
                ("topology", "static_tree"),
                ("tree_nodes", 9),
                ("one_hot_draft", True),
            )
        ),
        (
            "serve",
            ["--config.mode=compact", "--config.serve.topology=static_tree"],
            "mode='compact' plans with the drafts' confidence, and serve.topology='sta",
        ),
        (
            "serve",
            ["--config.mode=cap_accept", "--config.serve.topology=dynamic_tree"],
            "use --config.mode=static or --config.serve.topology=chain",
        ),
        ("profile", ["--config.serve.topology=static_tree"], "must be 'chain'"),
        ("calibrate", ["--config.serve.topology=static_tree"], "must be 'chain'"),
        (
            "serve",
            ["--config.plan.min_verify_len=2"],
            "plan.min_verify_len=2 is for the modes with a budget",
        ),
        (
            "serve",
            ["--config.mode=compact", "--config.plan.extra_lag=1"],
            "plan.extra_lag=1 needs round times",
        ),
        (
            "serve",
            ["--config.mode=compact", "--config.plan.max_verify_len=5"],
            "plan.max_verify_len=5 is more than the 4 rows",
        ),
        (
            "serve",
            ["--config.plan.min_verify_len=3", "--config.plan.max_verify_len=2"],
            "is below plan.min_verify_len=3",
        ),
        ("serve", ["--config.plan.survival_eps=1.0"], "must lie in [0, 1)"),
        ("serve", ["--config.plan.lag=0"], "plan.lag=0 must be 1 or more"),
        (
            "serve",
            ["--config.mode=compact", "--config.drafter="],
            "plans drafts and needs a drafter",
        ),
        (
            "serve",
            ["--config.mode=compact", "--config.sts=/no.json"],
            "/no.json cannot be read",
        ),
    ],
)
def test_wrong_input_ends_with_code_two(world, no_engine, capsys, task, words, said):
    assert getattr(world, task)("wrong", *words) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x[:6] != "note: "]
    assert len(lines) == 1 and said in lines[0] and lines[0].startswith("error: ")


def test_too_few_rounds_fit_nothing(world, monkeypatch, capsys):
    monkeypatch.setattr(serving, "make_engine", lambda *a, **k: None)
    monkeypatch.setattr(calibrate, "collect", lambda *a: (calibrate.Rounds(), []))
    assert world.calibrate("few") == 2
    assert "min_rounds=50: the prompts gave 0 rounds" in capsys.readouterr().err


STS = {"temperatures": [1.0, 2.0, 3.0]}
COST = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [9.0, 8.0]}
SHORT = {"sample_batch_tokens": [1, 7], "sample_steps_per_sec": [9.0, 8.0]}
ADDITIVE = {
    "bias_seconds": 1.0,
    "bs_probes": [1],
    "alpha_seconds": [0.0],
    "m_probes": [1, 8],
    "theta_seconds": [0.0, 1.0],
}


@pytest.mark.parametrize(
    ("kind", "content", "extras", "said"),
    [
        ("sts", {"temperatures": [1.0, 2.0]}, {}, "has 2 temperatures"),
        ("sts", STS, {"model": "another"}, "for model 'another'"),
        ("sts", STS, {"drafter": "another"}, "for drafter 'another'"),
        ("sts", STS, {"device": "abacus"}, "for device 'abacus'"),
        ("sts", STS, {"processor": "abacus, 2 cores"}, "for processor 'abacus, 2"),
        ("sts", STS, {"dtype": "bfloat16"}, "for dtype 'bfloat16'"),
        ("sts", STS, {"processor": None}, "does not say which processor"),
        ("sts", STS, {}, "does not say which model"),
        ("cost", COST, {"model": "another"}, "for model 'another'"),
        ("cost", COST, {"device": "abacus"}, "for device 'abacus'"),
        ("cost", COST, {"processor": "abacus, 2 cores"}, "for processor 'abacus, 2"),
        ("cost", COST, {"processor": None}, "does not say which processor"),
        ("cost", COST, {"dtype": "bfloat16"}, "for dtype 'bfloat16'"),
        ("cost", COST, {"dtype": None}, "does not say which dtype"),
        ("cost", SHORT, {"device": "cpu"}, "tokens=[1, 7] ends before the 8 rows"),
        ("cost", ADDITIVE, {"device": "cpu"}, "bs_probes=[1] ends before the 2 req"),
        (
            "cost",
            COST,
            {"plain_requests": [1], "plain_seconds": [0.5]},
            "plain_requests=[1] ends before the 2 requests",
        ),
        ("cost", COST, {"num_draft": 7}, "for num_draft 7"),
        ("cost", COST, {"ladder": [[2, [8]]]}, "for ladder"),
        ("cost", COST, {"ladder": None}, "does not say which ladder"),
    ],
)
def test_files_of_something_else_are_refused(
    world, no_engine, capsys, kind, content, extras, said
):
    target = world.target
    exported = serving.load_drafter(world.drafter, target)
    mine = {
        **runtime.facts(target, exported),
        "num_draft": 3,
        "ladder": even_ladder((2,), 4, 2).buckets,
    }
    marked = {k: v for k, v in (mine | extras).items() if v is not None}
    if extras:
        content = content | {"spec_jax": marked}
    path = world.folder / f"{kind}.json"
    path.write_text(json.dumps(content))
    assert world.serve("w", "--config.mode=compact", f"--config.{kind}={path}") == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x[:6] != "note: "]
    assert len(lines) == 1 and said in lines[0]


def test_files_without_marks_are_taken_where_the_recipe_says_so(world):
    exported = serving.load_drafter(world.drafter, world.target)
    # As files of before said it: neither processor nor dtype; and SGLang's own form.
    old = runtime.facts(world.target, exported) | {"num_draft": 3}
    del old["processor"], old["dtype"]
    path = world.folder / "old.json"
    cfg = schema.ServeOffline(
        drafter="d",
        mode="compact",
        cost=str(path),
        row_buckets=2,
        allow_unmarked=True,
        serve=schema.Serve(slots=2),
    )
    for extras in ({}, {"spec_jax": old}):
        path.write_text(json.dumps(COST | extras))
        made = runtime.load_planning(cfg, world.target, exported, [])
        assert made["cost"].round_time(2, 8) == 0.125
        # It still has to say something of the largest program.
        path.write_text(json.dumps(SHORT | extras))
        with pytest.raises(UserError, match="ends before the 8 rows"):
            runtime.load_planning(cfg, world.target, exported, [])


def test_temperatures_of_another_regime_are_refused(world):
    exported = serving.load_drafter(world.drafter, world.target)
    path = world.folder / "regime.json"
    facts = runtime.facts(world.target, exported) | {"sampling": "greedy"}
    path.write_text(json.dumps(STS | {"spec_jax": facts}))
    cfg = schema.ServeOffline(drafter="d", mode="compact", sts=str(path))

    said = []

    def load(*settings, **changes):
        made = dataclasses.replace(cfg, **changes)
        args = (made, world.target, exported, settings)
        return runtime.load_planning(*args, say=said.append)["plan"].temperatures

    assert load(Settings()) == (1.0, 2.0, 3.0) and not said
    # The file's regime is one of two: the other is told of.
    warm, hot = Settings(temperature=0.5), Settings(temperature=2.0)
    off = Settings(speculate=False)
    assert load(Settings(), warm, hot, off) == (1.0, 2.0, 3.0)
    assert len(said) == 1 and "2 of 3 requests" in said[0] and "('greedy')" in said[0]
    # Requests without drafts have no say, and need no temperatures.
    assert load(off) == (1.0, 2.0, 3.0)
    for settings in ([warm], [warm, off]):
        with pytest.raises(ValueError, match="sampling 'greedy'.*'temperature=0.5'"):
            load(*settings)
    with pytest.raises(ValueError, match="'temperature=0.5; temperature=2'"):
        load(warm, hot)
    path.write_text(json.dumps(STS))
    with pytest.raises(ValueError, match="does not say which"):
        load(warm, hot)
    said.clear()
    assert load(warm, hot, allow_unmarked=True) == (1.0, 2.0, 3.0)
    assert "2 of 2 requests" in said[0] and "unknown" in said[0]


def test_each_request_has_the_temperatures_of_its_own_regime(world):
    exported = serving.load_drafter(world.drafter, world.target)
    facts = runtime.facts(world.target, exported)
    warm, hot = Settings(temperature=0.5), Settings(temperature=2.0)

    def write(name, regime, values):
        path = world.folder / name
        made = {"temperatures": values, "spec_jax": facts | {"sampling": regime}}
        path.write_text(json.dumps(STS | made))
        return str(path)

    first = write("cold.json", "greedy", [1.0, 2.0, 3.0])
    second = write("warm.json", "temperature=0.5", [4.0, 5.0, 6.0])
    said = []

    cfg = schema.ServeOffline(
        drafter="d",
        mode="compact",
        serve=schema.Serve(
            slots=2, max_context=64, max_new_tokens=24, prefill_buckets=(16,)
        ),
    )

    def load(*paths, settings=None):
        made = dataclasses.replace(cfg, sts=",".join(paths))
        args = (made, world.target, exported, settings or [Settings(), warm, hot])
        return runtime.load_planning(*args, say=said.append)

    options = load(first, second)
    found = options["plan"]
    assert found.temperatures_of("greedy") == (1.0, 2.0, 3.0)
    assert found.temperatures_of("temperature=0.5") == (4.0, 5.0, 6.0)
    assert found.temperatures_of("temperature=2") == (1.0, 2.0, 3.0)
    assert len(said) == 1 and "1 of 3 requests" in said[0] and "first" in said[0]
    # A file for requests that are not there does no harm; one at least must fit.
    assert load(first, second, settings=[warm])["plan"].num_own == 3
    with pytest.raises(ValueError, match="sampling 'greedy'.*'temperature=2'"):
        load(first, second, settings=[hot])
    again = write("again.json", "greedy", [1.0, 1.0, 1.0])
    with pytest.raises(UserError, match="again.json and .*cold.json are both of"):
        load(first, again)
    unmarked = world.folder / "unmarked.json"
    unmarked.write_text(json.dumps(STS))
    with pytest.raises(UserError, match="unmarked.json does not say which"):
        load(first, str(unmarked))
    with pytest.raises(UserError, match="sts=',' names no file"):
        load("", "")
    short = write("short.json", "temperature=2", [1.0, 2.0])
    with pytest.raises(UserError, match="short.json': the STS file has 2 temper"):
        load(first, short)
    # A comma may be part of a file's name.
    odd = write("a,b.json", "greedy", [7.0, 8.0, 9.0])
    assert load(odd)["plan"].temperatures == (7.0, 8.0, 9.0)

    # Served: the confidence of each slot is divided by its own request's.
    engine = serving.make_engine(
        world.target, world.params, cfg.serve, exported, **options
    )
    for settings in (Settings(max_new_tokens=9), warm):
        engine.submit([1, 2, 3], dataclasses.replace(settings, max_new_tokens=9))
    for _ in range(4):
        engine.step()
    rows = np.asarray(engine.state.slots.sts_BM)
    assert sorted(rows.tolist()) == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    # A request that is taken back returns with its own, into whatever slot.
    made = engine.run()
    again = engine.submit([1, 2, 3], dataclasses.replace(warm, max_new_tokens=20))
    for _ in range(3):
        engine.step()
    assert engine.retract(again)
    other = engine.submit([3, 2], Settings(max_new_tokens=20))
    for _ in range(4):
        engine.step()
    at = {job.handle: slot for slot, job in engine.table.running.items()}
    rows = np.asarray(engine.state.slots.sts_BM)
    assert rows[at[again]].tolist() == [4.0, 5.0, 6.0]
    assert rows[at[other]].tolist() == [1.0, 2.0, 3.0]
    made |= engine.run()
    assert all(one.finish_reason in ("stop", "length") for one in made.values())


PLAN = {
    "survival_eps": 0.01,
    "min_verify_len": 2,
    "max_verify_len": 3,
    "align_rows": True,
    "lag": 1,
    "extra_lag": 2,
    "probe_every": 5,
    "probe_share": 0.25,
    "newcomers": "mean",
    "feedback": True,
}


def test_every_option_of_a_plan_reaches_the_engine(world, monkeypatch):
    """From the command line's words to the records that the engine reads."""
    made = []

    def stop(*args, **options):
        made.append(options)
        raise UserError("stopped here")

    monkeypatch.setattr(serving, "make_engine", stop)
    cost = world.folder / "any.json"
    cost.write_text(json.dumps(COST))
    words = [f"--config.plan.{name}={value}" for name, value in PLAN.items()]
    words += ["--config.mode=compact", f"--config.cost={cost}"]
    assert world.serve("options", *words, "--config.allow_unmarked=True") == 2
    plan, budget = made[0]["plan"], made[0]["budget"]
    read = {
        name: getattr(plan if hasattr(plan, name) else budget, name) for name in PLAN
    }
    assert read == PLAN
    assert set(PLAN) == {f.name for f in dataclasses.fields(serving_schema.Plan)}
    # Untouched, they are the engine's own defaults.
    default, engine = serving_schema.Plan(), (PlanOptions(), BudgetOptions())
    for name in PLAN:
        owner = engine[not hasattr(engine[0], name)]
        assert getattr(default, name) == getattr(owner, name)


def test_words_of_a_regime():
    assert regimes.regime_of(Settings(top_p=0.5)) == "greedy"
    sampled = Settings(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05)
    words = "temperature=0.7, top_k=5, top_p=0.9, min_p=0.05"
    assert regimes.regime_of(sampled) == words
    # Whatever else changes what is drafted or accepted is part of it.
    ruled = Settings(repetition_penalty=1.3, presence_penalty=0.5)
    words = "greedy, presence_penalty=0.5, repetition_penalty=1.3"
    assert regimes.regime_of(ruled, one_hot_draft=True) == words
    biased = Settings(temperature=1.0, logit_bias=((3, 1.0), (4, 2.0)))
    words = "temperature=1, logit_bias of 2 tokens, one_hot_draft"
    assert regimes.regime_of(biased, one_hot_draft=True) == words
    hot = schema.Serve(temperature=1.0, one_hot_draft=True)
    assert regimes.regime_of(hot) == "temperature=1, one_hot_draft"
    cold = dataclasses.replace(hot, temperature=0.0)
    assert regimes.regime_of(cold) == "greedy"
    assert slot_buckets(1) == (1,)
    assert slot_buckets(6) == (1, 2, 4, 6)
    assert slot_buckets(8) == (1, 2, 4, 8)


def result(**changes):
    """Two slots of three drafts."""
    made = {
        "confidence_logit_BM": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        "raw_accepted_B": np.array([2, 0]),
        "num_accepted_B": np.array([1, 0]),
        "emitted_B": np.array([2, 1]),
        "verify_len_B": np.array([4, 4]),
        "full_B": np.array([False, True]),
        "ran_B": np.array([True, True]),
        "bad_B": np.array([False, False]),
    }
    return types.SimpleNamespace(**made | changes)


def test_only_whole_live_proposals_are_samples():
    rounds = calibrate.Rounds()
    rounds.add(result(confidence_logit_BM=None))
    assert rounds.arrays(3)[0].shape == (0, 3)
    rounds.add(result())
    rounds.add(result(ran_B=np.array([False, True])))
    rounds.add(result(verify_len_B=np.array([1, 4])))
    rounds.add(result(bad_B=np.array([True, False])))
    bad = np.array([[1.0, np.nan, 3.0], [np.inf, -np.inf, 6.0]])
    rounds.add(result(confidence_logit_BM=bad))
    logits, mask = rounds.arrays(3)
    assert logits.tolist() == [
        [1.0, 2.0, 3.0],
        *[[4.0, 5.0, 6.0]] * 4,
        [100.0, -100.0, 6.0],
    ]
    assert mask.tolist() == [[1, 1, 0]] + [[0, 0, 0]] * 5
    assert rounds.dropped == 1
    # Lookups that found nothing are no samples, nor are they faults.
    none = np.array([[-np.inf] * 3, [-np.inf, 0.0, 0.0]])
    rounds.add(result(confidence_logit_BM=none))
    assert len(rounds.arrays(3)[0]) == 7
    assert (rounds.empty, rounds.dropped) == (1, 1)


def test_drafters_without_weights_are_told_apart_by_their_options():
    def mark(sha="same", params=None, **options):
        drafter = base.load("lookup", options, tiny.spec_of(32))
        made = types.SimpleNamespace(
            drafter=drafter, params=params or {}, weights_sha256=sha
        )
        return runtime.drafter_mark(made)

    assert mark() == mark("other") == mark(num_draft=3)
    assert len({mark(), mark(ngram_max=4), mark(ngram_min=2)}) == 3
    assert mark("sha", {"params": {"w": np.zeros(1)}}) == "sha"


class Doubled:
    """An engine that waits for nothing: two rounds in flight at most."""

    def __init__(self, choices, results, mode="compact"):
        self.options = EngineOptions(
            slots=2, round=RoundOptions(plan=PlanOptions(mode=mode))
        )
        counts = Counts()

        def decide(round_index, live, own_rows):
            counts.slots += len(live) - len(own_rows)
            return choices.pop(0)

        terms = types.SimpleNamespace(table=CostTable(FlatCost((1, 8), (4.0, 2.0), 8)))
        self.planner = types.SimpleNamespace(decide=decide, counts=counts, terms=terms)
        self.window = 4
        self.rounds, self.trace, self.queued = 0, [], [1, 0, 0]
        self._results, self._flight = results, []
        self.fetch = lambda tree: tree

    def metrics(self):
        queued = self.queued[min(self.rounds, 2)]
        return {"queued": queued, "running": 1, "rounds": self.rounds}

    def step(self, on_tokens):
        if self.rounds < 2:
            # One of the first round's two requests has speculation off.
            own = {1: 1} if self.rounds == 0 else {0: 1, 1: 1}
            choice = self.planner.decide(self.rounds, {0: 5, 1: 6}, own)
            record = RoundRecord(choice, 2, self.rounds == 1, self.rounds, 0.0)
            record.seconds = 0.25 * (1 + self.rounds)
            record.handles = {0: 5, 1: 6}
            self._flight.append(record)
            self.rounds += 1
            if self.rounds == 1:
                return []
        self.fetch(self._results.pop(0))
        self.trace.append(self._flight.pop(0))
        if on_tokens is not None:
            on_tokens()
        return ["done"]


def test_the_log_pairs_plans_and_results(monkeypatch):
    monkeypatch.setattr(runtime, "RoundResult", types.SimpleNamespace)
    choices = [Choice(True, 3, 2, 5, 0.5), Choice(False, 0, 2, 2)]
    second = result(ran_B=np.array([False, True]), verify_len_B=np.array([1, 1]))
    first = result(verify_len_B=np.array([2, 2]), full_B=np.array([True, False]))
    engine = Doubled(choices, [first, second])
    ticks = iter([1.0, 1.5, 2.0, 2.25])
    log = round_log.RoundLog(engine, clock=lambda: next(ticks))
    assert [log.step(), log.step(), log.step()] == [[], ["done"], ["done"]]
    assert log.plan_s == 0.75
    assert log.rows == [
        {
            "round": 0,
            "draft": True,
            "R": 2,
            "K": 3,
            "T": 5,
            "planned": 1,
            "requests": [5, 6],
            "verify_lens": [2, 2],
            "cutoff": [1, 1],
            "raw_accepted": [2, 0],
            "accepted": [1, 0],
            "trim": [1, 0],
            "bonus": [True, False],
            "committed": [2, 1],
            "block": [3, 1],
            "emitted": [2, 1],
            "not_ready": False,
            "looked_up": 1,
            "stale": 0,
            "filled": True,
            "predicted_s": 0.5,
            "measured_s": 0.25,
        },
        {
            "round": 1,
            "draft": False,
            "R": 2,
            "K": 0,
            "T": 2,
            "planned": 0,
            "requests": [6],
            "verify_lens": [1],
            "cutoff": [0],
            "raw_accepted": [0],
            "accepted": [0],
            "trim": [0],
            "bonus": [True],
            "committed": [1],
            "block": [1],
            "emitted": [1],
            "not_ready": True,
            "looked_up": 0,
            "stale": 1,
            "filled": False,
            "predicted_s": None,
            "measured_s": 0.5,
        },
    ]
    shares = serve_offline.round_metrics(log.rows, 3)
    assert shares["verify_len_histogram"] == {"2": 2}
    assert shares["programs"] == {"2": {"5": 1, "plain": 1}}
    assert shares["shares"] == {
        "plain": 0.5,
        "anchors_only": 0.0,
        "partial_budget": 0.0,  # 3 of 1 x 3
        "not_ready": 0.5,
        "stale_slots": 1.0,  # 1 of 1 whose history was looked up
    }
    log.rows[0]["planned"] = 2
    assert serve_offline.round_metrics(log.rows, 3)["shares"]["partial_budget"] == 0.5
    # The one round with a prediction had a prompt filled before it.
    assert shares["compared_rounds"] == 0
    log.rows[0]["filled"] = False
    at = {"p10": 2.0, "p50": 2.0, "p90": 2.0}
    found = serve_offline.round_metrics(log.rows, 3)["predicted_over_measured"]
    assert found == {**at, "draft": at, "plain": None}


def test_slots_without_history_are_shares_of_those_that_were_looked_up():
    # One of two planned requests had ended on the device already.
    row = {
        "draft": True,
        "R": 2,
        "K": 3,
        "T": 5,
        "planned": 2,
        "verify_lens": [1],
        "not_ready": False,
        "looked_up": 2,
        "stale": 2,
        "filled": False,
        "predicted_s": None,
        "measured_s": 1.0,
    }
    for rows, share in (([row], 1.0), ([row, row | {"stale": 0}], 0.5), ([], 0.0)):
        found = serve_offline.round_metrics(rows, 3)["shares"]["stale_slots"]
        assert found == share


@pytest.mark.parametrize(
    ("mode", "rows", "seconds"),
    [("compact", 5, 0.125), ("cap_accept", 8, 0.5), ("static", 8, 0.5)],
)
def test_the_log_has_the_program_that_ran(monkeypatch, mode, rows, seconds):
    """Where rows are not packed all windows ran, whatever the budget was for."""
    monkeypatch.setattr(runtime, "RoundResult", types.SimpleNamespace)
    choices = [Choice(True, 3, 2, 5, 0.125), Choice(False, 0, 2, 2, 0.0625)]
    log = round_log.RoundLog(Doubled(choices, [result(), result()], mode))
    for _ in range(3):
        log.step()
    draft, plain = log.rows
    assert (draft["K"], draft["T"], draft["predicted_s"]) == (3, rows, seconds)
    assert (plain["T"], plain["predicted_s"]) == (2, 0.0625)


def test_the_log_misses_no_round_when_a_listener_raises(monkeypatch):
    monkeypatch.setattr(runtime, "RoundResult", types.SimpleNamespace)
    choices = [Choice(True, 3, 2, 5, 0.5), Choice(False, 0, 2, 2)]
    engine = Doubled(choices, [result(), result()])

    def left():
        raise OSError("a listener left")

    log = round_log.RoundLog(engine)
    assert log.step(left) == []  # nothing to tell yet
    for count in (1, 2):
        with pytest.raises(OSError, match="left"):
            log.step(left)
        assert [row["K"] for row in log.rows] == [3, 0][:count]


def request(name, arrival, **changes):
    made = serve_offline.Served(WorkItem(name, arrival, user_prompt("w6")), Settings())
    for field, value in changes.items():
        setattr(made, field, value)
    return made


def test_latencies_are_those_of_the_deliveries():
    made = Generation([1], [5, 6, 7, 8], "length", emitted=[2, 1], accepted=[1, 0])
    one = request(
        "a",
        1.0,
        submitted=1.1,
        finished=4.0,
        generation=made,
        deliveries=[(2.0, 1), (3.0, 2), (3.1, 1)],
    )
    refused = request("b", 0.0, error="no")
    found = serve_offline.request_metrics([one, refused], 8.0)
    assert found["requests"] == 2 and found["finished"] == {"length": 1, "refused": 1}
    assert found["tokens"] == 4 and found["tokens_per_s"] == 0.5
    assert found["accept_length"] == 1.5
    assert found["inter_token_ms"]["p50"] == 500.0
    assert found["delivery_gap_ms"]["p99"] == pytest.approx(991.0)
    assert found["first_token_ms"]["p50"] == 1000.0
    # Submitted before its time (all at once): waited from then on.
    one.submitted = 0.0
    assert serve_offline.request_metrics([one], 8.0)["first_token_ms"]["p50"] == 2000


@pytest.mark.parametrize("keep_pace", [True, False])
def test_requests_come_at_their_time_or_all_at_once(keep_pace):
    now = [0.0]
    submitted, queue = [], []

    class Engine:
        busy = property(lambda self: bool(queue))

        def submit(self, prompt, settings):
            submitted.append((prompt[0], now[0]))
            queue.append(prompt[0])
            return prompt[0]

    class Log:
        def step(self, on_tokens):
            now[0] += 1.0
            on_tokens(queue[0], [9, 9], True)
            return [(queue.pop(0), Generation([1], [9, 9], "length"))]

    requests = [request(str(n), 1.5 * n, prompt=[n]) for n in range(3)]
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    seconds = serve_offline.serve(
        Engine(),
        Log(),
        requests,
        keep_pace=keep_pace,
        clock=lambda: now[0],
        sleep=sleep,
    )
    if keep_pace:
        assert submitted == [(0, 0.0), (1, 1.5), (2, 3.0)] and seconds == 4.0
        assert slept == [0.5, 0.5]
    else:
        assert submitted == [(0, 0.0), (1, 0.0), (2, 0.0)] and seconds == 3.0
    assert requests[0].deliveries == [(1.0, 2)]
    assert requests[-1].finished == seconds


@pytest.mark.parametrize("task", ["calibrate", "profile", "serve_offline"])
def test_the_recipes_for_the_tiny_target(task):
    options, _ = run.parse([f"configs/{task}.py:tiny", "--config.drafter=some/folder"])
    cfg = loading.to_recipe(options.config)
    assert cfg.target.source == "tiny"
    if task == "calibrate":
        assert len(calibrate.read_prompts(cfg)) == 48
    if task == "serve_offline":
        assert len(workload.read_workload(runtime.find_file(cfg.workload))) == 48


def test_choices_are_those_of_the_modules_that_make_them_real():
    from spec_jax.config.schema import runtime as sections

    assert sections.MODES == plan.MODES
    assert profile.COST_NAME == "cost.json" and calibrate.STS_NAME == "sts.json"
