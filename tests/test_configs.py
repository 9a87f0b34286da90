"""Every recipe loads, converts, refuses unknown keys and is named in the README."""

import importlib
import importlib.util
import os
import pathlib
import re

import pytest

from configs import common
from experiments import bench_family, pipeline, run
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.data import prompts

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECIPES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "configs").rglob("*.py")
    if path.name not in ("__init__.py", "common.py")
)
# What a recipe cannot have of its own: a folder that some run made.
NEEDS = {
    path: ["--config.drafter=some/folder"]
    for path in (
        "configs/bench/decode.py",
        "configs/bench/schedule.py",
        "configs/bench/tree.py",
        "configs/bench/variants.py",
        "configs/calibrate.py",
        "configs/profile.py",
        "configs/why.py",
    )
}


DRAFTERS = ("eagle", "eagle3", "dflash", "dspark", "dflash2", "lookup")


def _load(path, *words):
    needs = NEEDS.get(path.partition(":")[0], ())
    options, name = run.parse([path, *needs, *words])
    return loading.to_recipe(options.config), name


def test_the_recipes_of_the_project_are_there():
    assert {
        "configs/quickstart.py",
        "configs/tiny.py",
        "configs/smollm2.py",
        "configs/synthesise.py",
        "configs/generate.py",
        "configs/calibrate.py",
        "configs/profile.py",
        "configs/serve_offline.py",
        "configs/bench/round.py",
        "configs/bench/decode.py",
        "configs/bench/peers.py",
        "configs/bench/family.py",
        "configs/bench/tree.py",
        "configs/bench/variants.py",
    } <= set(RECIPES)


@pytest.mark.parametrize("path", RECIPES)
def test_recipe_loads_and_converts(path):
    recipe, name = _load(path)
    assert type(recipe) is schema.SCHEMAS[recipe.task]
    hash(recipe)
    assert name == path.removeprefix("configs/").removesuffix(".py").replace("/", "-")
    # Every changed value is one that the base knows: nothing was invented.
    for field, default, value in loading.changes(recipe, common.base_of(recipe)):
        assert default != value
        assert default is not None or "options" in field or "prompt_sets" in field


@pytest.mark.parametrize("path", RECIPES)
def test_recipe_refuses_unknown_keys_and_takes_overrides(path):
    recipe, _ = _load(path, "--config.seed=5")
    assert recipe.seed == 5
    for word in ("--config.sed=5", "--config.serve.no_such_key=1"):
        with pytest.raises(UserError, match="is not a key of this recipe"):
            _load(path, word)
    with pytest.raises(UserError, match=r"serve.temperature=-1.0 must be 0"):
        _load(path, "--config.serve.temperature=-1")


@pytest.mark.parametrize("path", RECIPES)
def test_recipe_says_how_to_run_it(path):
    module = importlib.util.module_from_spec(
        spec := importlib.util.spec_from_file_location("recipe", ROOT / path)
    )
    spec.loader.exec_module(module)
    words = module.__doc__
    assert "python -m experiments.run" in words and "\nTime: " in words
    if path != "configs/quickstart.py":
        assert path in words
    assert len((ROOT / path).read_text().split("\n")) <= 100


def test_drafter_by_argument():
    recipe, name = _load("configs/tiny.py:dflash")
    assert name == "tiny-dflash" and recipe.drafter.name == "dflash"
    assert recipe == _load("configs/tiny.py")[0]
    with pytest.raises(UserError, match="drafter 'dflsh' is not a drafter"):
        _load("configs/tiny.py:dflsh")


WITHOUT_WORDS = [
    f"configs/{name}.py"
    for name in (
        "why",
        "generate",
        "synthesise",
        "bench/law",
        "bench/peers",
        "bench/soak",
    )
]


@pytest.mark.parametrize("path", RECIPES)
def test_a_recipe_takes_every_drafters_name(path):
    """Or another word, which it then refuses with a sentence."""
    if path == "configs/bench/family.py":
        with pytest.raises(UserError, match="eagle names no training recipe"):
            _load(f"{path}:eagle")
        return
    if path in WITHOUT_WORDS:
        with pytest.raises(UserError, match=f"{path}:eagle names a variant and this"):
            _load(f"{path}:eagle")
        return
    for drafter in DRAFTERS:
        recipe, _ = _load(f"{path}:{drafter}")
        section = getattr(recipe, "drafter", "")
        if isinstance(section, schema.Drafter):
            assert section.name == drafter
            module = importlib.import_module(f"spec_jax.drafters.{drafter}")
            loading.to_dataclass(module.Options, section.options, "drafter.options")


@pytest.mark.parametrize("word", ["smollm2", "tiny", "quickstart", "qwen3_4b"])
def test_the_family_takes_a_recipes_name(word):
    family, _ = _load(f"configs/bench/family.py:{word}")
    assert family.recipe == f"configs/{word}.py"
    for drafter in family.drafters:
        own = bench_family.recipe_of(family, drafter)
        assert own.drafter.name == drafter and own.capture == family.capture


def test_a_drafter_from_elsewhere_takes_the_sizes_it_has():
    name = "tests.support.added_drafter"
    for path in ("configs/tiny.py", "configs/quickstart.py", "configs/bench/round.py"):
        own = _load(f"{path}:{name}")[0].drafter
        assert own.name == name and "num_layers" not in own.options_dict()
        assert own.options_dict()["num_draft"] != 0


def test_logits_of_published_sizes_are_made_in_chunks():
    for word in ("qwen3_4b", "qwen3_8b"):
        for drafter in DRAFTERS:
            recipe, _ = _load(f"configs/{word}.py:{drafter}")
            rows = dict(recipe.objective)["chunk_rows"]
            assert 0 < rows * 151_936 * 4 < 2**30


def test_every_option_of_the_drafter_can_be_set():
    recipe, _ = _load(
        "configs/tiny.py",
        "--config.drafter.options.num_heads=2",  # None without it: the target's own
        "--config.drafter.options.layer_ids=(1,2)",
        "--config.objective.kind=dpace",
        "--config.mesh.fsdp=2",
    )
    options = recipe.drafter.options_dict()
    assert options["num_heads"] == 2 and options["layer_ids"] == (1, 2)
    assert dict(recipe.objective)["kind"] == "dpace" and dict(recipe.mesh)["fsdp"] == 2
    assert _load("configs/tiny.py")[0].drafter.options_dict()["num_heads"] is None


def test_options_fit_the_records_they_are_for():
    from spec_jax.drafters import dflash
    from spec_jax.objectives.records import ObjectiveOptions
    from spec_jax.parallel.mesh import MeshOptions

    for path in ("configs/quickstart.py", "configs/smollm2.py", "configs/tiny.py"):
        recipe, _ = _load(path)
        loading.to_dataclass(dflash.Options, recipe.drafter.options, "drafter.options")
        loading.to_dataclass(ObjectiveOptions, recipe.objective, "objective")
        loading.to_dataclass(MeshOptions, recipe.mesh, "mesh")


def test_choices_are_those_of_the_modules_that_make_them_real():
    from spec_jax.target.loading import DTYPES
    from spec_jax.train import optimiser

    for kind in optimiser.KINDS:
        assert schema.Train(optimiser=kind).optimiser == kind
    for schedule in optimiser.SCHEDULES:
        assert schema.Train(schedule=schedule).schedule == schedule
    assert schema.DTYPES == DTYPES
    with pytest.raises(UserError, match="'adamw', 'muon'"):
        schema.Train(optimiser="sgd")


def test_newest_export_is_of_a_finished_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert common.newest_export("smollm2-dflash") == ""
    for i, name in enumerate(("aaaa", "bbbb", "cccc")):
        folder = tmp_path / "runs" / f"smollm2-dflash-{name}"
        (folder / "export").mkdir(parents=True)
        if name != "cccc":  # a run that has not finished
            (folder / "report.json").write_text("{}")
            os.utime(folder / "report.json", (100 - i, 100 - i))
    assert common.newest_export("smollm2-dflash") == "runs/smollm2-dflash-aaaa/export"


def test_readme_names_every_recipe():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README yet")
    words = readme.read_text("utf-8")
    missing = [p for p in RECIPES if not re.search(re.escape(p) + r"\b", words)]
    assert not missing, f"README.md names no {', '.join(missing)}"


def test_a_plan_looks_at_the_disk_that_features_will_lie_on(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(pipeline, "check_disk", lambda path, size: asked.append(path))
    cfg, _ = _load("configs/qwen3_4b.py:dflash")
    pipeline.plan(cfg, tmp_path / "run")
    shared, _ = _load("configs/qwen3_4b.py:dflash", f"--config.data.folder={tmp_path}")
    pipeline.plan(shared, tmp_path / "run")
    assert asked == [str(tmp_path / "run" / "store"), str(tmp_path / "store")]


def test_a_plan_counts_what_is_asked(tmp_path):
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"tokens": [1, 2, 3], "prompt_len": 1}\n' * 5)

    def plan(name, *words):
        cfg, _ = _load(f"configs/qwen3_4b.py:{name}", *words)
        return pipeline.plan(cfg)

    asked = plan("dflash", "--config.train.steps=10", "--config.train.batch=2")
    assert asked["data"]["prompts at most"] == 256
    assert asked["training"]["label slots at most"] == 10 * 2 * 512 * 15
    asked = plan(
        "eagle3",
        "--config.train.positions=999",
        f"--config.data.samples={samples}",
    )
    assert asked["training"]["positions"] == 999
    assert asked["data"]["prompts at most"] == 5
    with pytest.raises(UserError, match="needs up to .* smaller capture.dtype"):
        plan("dflash", f"--config.data.num_synth_prompts={10**9}")
    both = plan("dspark", "--config.data.prompts=builtin")
    named = both["data"]["prompts at most"] - 256
    assert named == len(prompts.builtin_prompts())
