"""A drafter that lies outside of the package: the whole suite, and a recipe."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support import added_drafter

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUITE = "tests/drafters/test_conformance.py"
# Without it, rejected rows are kept too.
KEPT = "jnp.where((rows.length_B > 0)[None, :, None], last_BC[None], state)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two drafters: `mine.good`, and `mine.leaks`, which has a fault."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "mine").mkdir()
    text = pathlib.Path(added_drafter.__file__).read_text()
    (folder / "mine" / "good.py").write_text(text)
    assert text.count(KEPT) == 1
    (folder / "mine" / "leaks.py").write_text(text.replace(KEPT, "last_BC[None]"))
    return folder


def run(folder, *words):
    """`python -m words`, with the drafters' folder on the path."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=1800,
    )


def test_it_passes_the_suite_and_a_faulty_one_does_not(folder):
    done = run(
        folder,
        *("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", SUITE),
        *("--drafter=mine.good", "--drafter=mine.leaks", "-k", "good or no_trace"),
    )
    failed = re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)
    assert failed == ["test_rejected_rows_leave_no_trace[mine.leaks]"], done.stdout
    # Everything that takes a name ran, and nothing was skipped.
    text = (ROOT / SUITE).read_text()
    checks = len(re.findall(r"^def test_\w+\(name", text, re.MULTILINE))
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > checks > 10 and "skipped" not in done.stdout


@pytest.mark.slow
def test_a_recipe_trains_exports_and_decodes_with_it(folder):
    """`configs/tiny.py:mine.good`, made short."""
    changes = {
        "data.num_synth_prompts": 32,
        "data.held_out": 4,
        "train.steps": 60,
        "train.eval_every": 60,
        "train.eval_prompts": 2,
        "train.eval_new_tokens": 16,
        "serve.max_new_tokens": 24,
    }
    done = run(
        folder,
        *("experiments.run", "configs/tiny.py:mine.good", f"--workdir={folder / 'w'}"),
        *(f"--config.{name}={value}" for name, value in changes.items()),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "w" / "report.json").read_text())["metrics"]
    assert found["greedy_identical"] and found["compiles_after_warmup"] == 0
    assert found["loss_last"] < found["loss_first"] / 2
    assert found["accept_length"] > found["accept_length_shuffled"] >= 1
    assert found["export_parity_max_abs"] < 1e-3
    # No public form: a folder of our own kind, which was read again to decode.
    config = json.loads((folder / "w" / "export" / "config.json").read_text())
    assert config["architectures"] == ["SpecJaxDrafter"]
    assert config["spec_jax"]["drafter"] == "mine.good"
    # A folder does not choose what code is run.
    words = ("experiments.run", "configs/generate.py", "--config.target.source=tiny")
    refused = run(
        folder, *words, "--config.prompt=hello", f"--config.drafter={folder}/w/export"
    )
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "'mine.good', which is not imported" in refused.stderr
    assert "--config.imports=" in refused.stderr
    words = (*words, "--config.prompt=hello", f"--config.drafter={folder}/w/export")
    served = run(folder, *words, "--config.imports=('mine.good',)")
    assert served.returncode == 0, served.stderr
    assert "accept length" in served.stdout
    lost = run(folder, *words, "--config.imports=('mine.lost',)")
    assert lost.returncode == 2 and "imports='mine.lost'" in lost.stderr
