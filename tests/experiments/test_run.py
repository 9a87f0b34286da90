"""The command line: exit codes, sentences, folders, locks and the second run."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest

from experiments import progress, run, session
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def task(monkeypatch, tmp_path):
    """Puts a task that counts its calls where `pipeline` would be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "prepare_jax", lambda precision: None)
    module = types.ModuleType("experiments.pipeline")
    module.calls = []
    module.result = {"accept_length": 1.5, "series": {"loss": {"train": [[0, 1.0]]}}}

    def main(cfg, workdir):
        module.calls.append((cfg, workdir))
        if isinstance(module.result, BaseException):
            raise module.result
        return module.result

    module.main = main
    monkeypatch.setitem(sys.modules, "experiments.pipeline", module)
    for name in ("bench_round", "generate", "serve_offline", "calibrate", "profile"):
        monkeypatch.setitem(sys.modules, f"experiments.{name}", module)
    return module


def test_a_run_leaves_a_report_and_the_second_says_done(task, tmp_path, capsys):
    words = ["configs/tiny.py:dflash", "--config.seed=3"]
    assert run.main(words) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    cfg, workdir = task.calls[0]
    assert cfg.seed == 3 and workdir.resolve() == folder
    assert folder.name == f"tiny-dflash-{loading.config_hash(cfg)[:8]}"
    found = json.loads((folder / "report.json").read_text())
    assert found["metrics"]["accept_length"] == 1.5 and "wall_s" in found["metrics"]
    assert found["recipe"] == "tiny-dflash" and found["series"]["loss"]
    assert ["seed", 0, 3] in found["changes"]
    assert "report.html" in capsys.readouterr().out
    assert run.main(words) == 0
    assert len(task.calls) == 1 and "all is done" in capsys.readouterr().out
    # Another value is another run.
    assert run.main(["configs/tiny.py:dflash", "--config.seed=4"]) == 0
    assert len(task.calls) == 2 and len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["configs/bench/round.py"],
        ["configs/serve_offline.py"],
        ["configs/calibrate.py", "--config.drafter=x"],
        ["configs/profile.py", "--config.drafter=x"],
    ],
)
def test_what_measures_does_so_again(task, words):
    """A workload, a drafter's folder or the machine may be another one by then."""
    for _ in range(2):
        assert run.main(words) == 0
    assert len(task.calls) == 2


def test_an_interrupted_run_is_entered_again(task, tmp_path, capsys):
    good, task.result = task.result, KeyboardInterrupt()
    assert run.main(["configs/tiny.py"]) == 130
    assert "resumes" in capsys.readouterr().err
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / "report.json").exists()
    task.result = good
    assert run.main(["configs/tiny.py"]) == 0
    assert (folder / "report.json").exists() and len(task.calls) == 2


def test_a_torn_report_is_no_report(task, tmp_path):
    assert run.main(["configs/tiny.py", "--workdir=w"]) == 0
    (tmp_path / "w" / "report.json").write_text('{"metr')
    assert run.main(["configs/tiny.py", "--workdir=w"]) == 0
    assert len(task.calls) == 2


def test_wrong_input_is_one_sentence_and_leaves_nothing(task, tmp_path, capsys):
    task.result = UserError("data.prompts='x.jsonl' is not there; name another")
    assert run.main(["configs/tiny.py"]) == 2
    assert capsys.readouterr().err == (
        "error: data.prompts='x.jsonl' is not there; name another\n"
    )
    assert list((tmp_path / "runs").iterdir()) == []


def test_wrong_input_keeps_a_folder_with_work_in_it(task, tmp_path):
    assert run.main(["configs/tiny.py", "--workdir=w"]) == 0
    (tmp_path / "w" / "report.json").unlink()
    (tmp_path / "w" / "checkpoint").mkdir()
    task.result = UserError("no")
    assert run.main(["configs/tiny.py", "--workdir=w"]) == 2
    assert (tmp_path / "w" / "checkpoint").exists()
    assert (tmp_path / "w" / "recipe.json").exists()


def test_a_folder_has_one_configuration(task, capsys):
    assert run.main(["configs/tiny.py", "--workdir=w"]) == 0
    assert run.main(["configs/tiny.py", "--workdir=w", "--config.seed=9"]) == 2
    assert "belongs to another configuration" in capsys.readouterr().err
    assert len(task.calls) == 1


def test_a_folder_has_one_process(task, tmp_path, capsys):
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, os, sys, time; f = open(sys.argv[1], 'w'); "
            "fcntl.flock(f, fcntl.LOCK_EX); f.write(str(os.getpid())); f.flush(); "
            "print('held', flush=True); time.sleep(60)",
            str(tmp_path / "lock"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        (tmp_path / "w").mkdir()
        os.link(tmp_path / "lock", tmp_path / "w" / session.LOCK)
        assert run.main(["configs/tiny.py", "--workdir=w"]) == 2
        assert f"in use by process {other.pid}" in capsys.readouterr().err
        assert not task.calls and not (tmp_path / "w" / "recipe.json").exists()
    finally:
        other.kill()
        other.wait()
    # The system drops a dead process's lock: no stale file stands in the way.
    assert run.main(["configs/tiny.py", "--workdir=w"]) == 0


def test_generate_keeps_nothing(task, tmp_path):
    assert run.main(["configs/generate.py", "--config.prompt=hello"]) == 0
    assert task.calls[0][0].prompt == "hello" and not (tmp_path / "runs").exists()


def test_plan_and_inspect_go_to_the_task(task, tmp_path, capsys):
    assert run.main(["configs/tiny.py", "--plan"]) == 2
    assert "--plan is not for task='pipeline'" in capsys.readouterr().err
    task.plan = lambda cfg, workdir: {"st[or]e": {"b[yt]es": 1234567, "at": workdir}}
    task.inspect = lambda cfg, workdir: print("token 5")
    assert run.main(["configs/tiny.py", "--plan", "--workdir=r/a[b]"]) == 0
    shown = capsys.readouterr().out
    assert all(x in shown for x in ("st[or]e", "b[yt]es", "1,234,567", "r/a[b]"))
    assert not (tmp_path / "runs").exists()
    assert run.main(["configs/tiny.py", "--inspect"]) == 0
    assert "token 5" in capsys.readouterr().out and not task.calls
    assert not (tmp_path / "runs").exists()


def test_a_batch_is_shown_while_the_run_goes_on(task, tmp_path, capsys):
    """In a folder of its own: the run's is neither entered nor asked for."""
    words = ["configs/tiny.py", "--workdir=w"]
    task.inspect = lambda cfg, workdir: print("token 5")
    codes = []

    def main(cfg, workdir):
        codes.append(run.main([*words, "--inspect"]))
        codes.append(run.main(words))
        return {}

    task.main = main
    assert run.main(words) == 0 and codes == [0, 2]
    found = capsys.readouterr()
    assert "token 5" in found.out and "is in use by process" in found.err


def test_brackets_of_a_folder_are_printed_as_they_are(task, capsys):
    for folder in ("a[b]", "a[/b]"):
        words = ["configs/tiny.py", f"--workdir=runs/{folder}"]
        for begins in ("report: ", "all is done since "):
            assert run.main(words) == 0
            (line,) = (
                x for x in capsys.readouterr().out.splitlines() if x.startswith(begins)
            )
            assert line.endswith(f"runs/{folder}/report.html")
        progress.say(f"samples: runs/{folder}/x")
        assert capsys.readouterr().out == f"samples: runs/{folder}/x\n"


@pytest.mark.parametrize(
    "word",
    [
        "num_synth_prompts=5",
        "synth_openings=('a',)",
        "synth_max_tokens=9",
        "greedy_share=0.5",
    ],
)
def test_what_makes_texts_is_refused_where_they_are_made_already(task, capsys, word):
    words = ["configs/smollm2.py", "--config.data.samples=s.jsonl", "--print_config"]
    assert run.main(words) == 0
    assert run.main([*words[:1], f"--config.data.{word}", "--print_config"]) == 0
    assert run.main([*words, f"--config.data.{word}"]) == 2
    name = word.split("=")[0]
    said = capsys.readouterr().err
    assert f"data.{name}=" in said and "data.samples='s.jsonl'" in said


def test_print_config_resolves_and_stops(task, capsys):
    assert run.main(["configs/tiny.py", "--config.seed=4", "--print_config"]) == 0
    words = capsys.readouterr().out
    assert "seed = 4    (default 0)" in words and not task.calls
    assert run.main(["--print_config"]) == 0
    assert capsys.readouterr().out.startswith("# quickstart, hash ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["configs/nope.py"], "known recipes: configs/bench/decode.py"),
        (["configs/tiny.py", "zz"], "unexpected argument 'zz'"),
        (["--nope"], "nope"),
        (["--config.train.stesp=3"], "did you mean 'steps'?"),
        (["--config.nope=3"], "'nope' is not a key of this recipe"),
        (["--config.train.steps=2.5"], "train.steps='2.5' has the wrong type"),
        (["--config.serve.top_p=0"], "serve.top_p=0.0 must lie in (0, 1]"),
        (["--config.serve.prefill_buckets=(1,'a')"], "serve.prefill_buckets[1]='a'"),
        (["configs/generate.py", "--config.prompt="], "prompt='' is empty"),
        (["configs/bench/decode.py"], "name an exported drafter folder"),
    ],
)
def test_wrong_words_exit_2_with_one_sentence(task, tmp_path, capsys, words, sentence):
    assert run.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and sentence in err
    assert not task.calls and not (tmp_path / "runs").exists()


LOCKED = """from configs import common
def get_config():
    config = common.base("pipeline")
    config.{} = {}
    return config"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import nosuch", "(ModuleNotFoundError: No module named 'nosuch')"),
        ("def get_config(", "(SyntaxError: '(' was never closed (mine.py, line 1))"),
        ("def get_config(): return 1 / 0", "(ZeroDivisionError: division by zero)"),
        ("def get_config(): return {}['x\ty']", "(KeyError: x y)"),
        ("def get_config(): return None", "(TypeError: "),
        ("x = 1", "(AttributeError: module 'recipe' has no attribute 'get_config')"),
        (LOCKED.format("train.stesp", 3), "'stesp' is no field, did you mean 'steps'?"),
        (LOCKED.format("nope", 3), "(AttributeError: 'nope' is no field)"),
        (LOCKED.format("data.max_tokens", "'a'"), "(TypeError: Could not override"),
        ("raise OSError(2, 'gone')", "(FileNotFoundError: [Errno 2] gone)"),
    ],
)
def test_a_recipe_that_does_not_load_is_one_sentence(
    task, tmp_path, capsys, text, sentence
):
    (tmp_path / "mine.py").write_text(text)
    assert run.main(["mine.py", "--print_config"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: recipe mine.py cannot be loaded (")
    assert err.count("\n") == 1 and sentence in err


def test_a_recipe_refuses_its_argument_in_its_own_words(task, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from spec_jax.core.errors import UserError\n"
        "def get_config(arg='x'):\n"
        "    if arg != 'x': raise UserError(f'say x and not {arg}')\n"
        "    return {'task': 'generate', 'prompt': 'hello'}\n"
    )
    assert run.main(["mine.py:y"]) == 2
    assert capsys.readouterr().err == "error: say x and not y\n"
    assert run.main(["mine.py", "--config.prompt=bye"]) == 0
    assert task.calls[0][0].prompt == "bye"


def test_the_recipe_may_be_named_in_three_ways():
    for words in (
        ["configs/tiny.py"],
        ["--config=configs/tiny.py"],
        ["--workdir=w", "--config", "configs/tiny.py"],
    ):
        options, name = run.parse(words)
        assert name == "tiny" and options.config.target.source == "tiny"
    assert run.parse([])[1] == "quickstart"
    assert run.parse([str(ROOT / "configs/bench/round.py") + ":dflash"])[1] == (
        "bench-round-dflash"
    )


def test_programs_are_kept_between_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path))
    names = (
        "jax_compilation_cache_dir",
        "jax_default_matmul_precision",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        session.prepare_jax("highest")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")
        assert jax.config.jax_default_matmul_precision == "highest"
        jax.config.update("jax_compilation_cache_dir", "/elsewhere")
        session.prepare_jax("highest")  # what the environment said is kept
        assert jax.config.jax_compilation_cache_dir == "/elsewhere"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_the_command_itself(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.run", "--config.seed=-1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "error: seed=-1 must lie in [0, 2147483647]\n"


def test_default_task_is_the_pipeline():
    assert schema.Pipeline().task == "pipeline"
