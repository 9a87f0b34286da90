"""The family's shared text and store, and what is refused before any training."""

import dataclasses
import json
import types

import pytest

from configs.bench import family as family_recipe
from experiments import (
    bench_family,
    optional_part,
    preparing,
    serving,
    synthesis,
    tiny_target,
    training,
)
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.target.loading import Target
from tests.support import served

HELD = tuple((6, 7, i) for i in range(6))
FILES = ("a", "b", "a", "b", "b", "b")


def tiny_family():
    """The recipe `configs/bench/family.py:tiny`, and its drafters' records."""
    cfg = loading.to_recipe(family_recipe.get_config("tiny"))
    spec = tiny_target.make_spec(cfg.target.tiny)
    tokenizer = types.SimpleNamespace(id_of=lambda text: spec.vocab_size - 1)
    target = Target(spec, {}, tokenizer, None, "tiny")
    recipes = {name: bench_family.recipe_of(cfg, name) for name in cfg.drafters}
    drafters = {n: serving.new_drafter(r, target) for n, r in recipes.items()}
    return cfg, target, recipes, drafters


def test_drafters_of_the_tiny_recipe_train_on_one_store():
    cfg, target, recipes, drafters = tiny_family()
    needed = [d.needs for d in drafters.values()]
    assert len({n.layer_ids for n in needed}) > 2  # each has its own
    assert len({n.teacher for n in needed}) == 2
    capture = bench_family.shared_planes(cfg.capture, drafters.values())
    shared = {n: dataclasses.replace(r, capture=capture) for n, r in recipes.items()}
    planes = {preparing.capture_schema(shared[n], d) for n, d in drafters.items()}
    (kept,) = planes
    assert kept.teacher and set().union(*(n.layer_ids for n in needed)) == set(
        kept.layer_ids
    )
    bench_family.check_family(cfg, shared, drafters, target)


def test_a_batch_that_the_devices_do_not_share_is_refused_by_its_own_name(monkeypatch):
    cfg, target, recipes, drafters = tiny_family()
    monkeypatch.setattr(bench_family.mesh_lib, "batch_shards", lambda mesh: 3)
    with pytest.raises(UserError, match=r"batch=8 .*multiple of 3.*--config\.batch=9"):
        bench_family.check_family(cfg, recipes, drafters, target)


def test_layers_that_the_recipe_names_stay_and_are_checked():
    cfg, target, recipes, drafters = tiny_family()
    named = dataclasses.replace(cfg.capture, layer_ids=(1,))
    capture = bench_family.shared_planes(named, drafters.values())
    assert capture.layer_ids == (1,) and capture.teacher
    recipes = {n: dataclasses.replace(r, capture=capture) for n, r in recipes.items()}
    with pytest.raises(UserError, match=r"capture\.layer_ids=\(1,\) lacks layer"):
        bench_family.check_family(cfg, recipes, drafters, target)


def test_one_mask_for_one_text():
    cfg, _, _, drafters = tiny_family()
    assert bench_family.shared_mask(cfg.data, [drafters["lookup"]]) == -1
    mask = bench_family.shared_mask(cfg.data, drafters.values())
    assert mask == drafters["dflash"].options.mask_id >= 0
    other = drafters["dspark"].options
    other = types.SimpleNamespace(options=dataclasses.replace(other, mask_id=3))
    with pytest.raises(UserError, match=rf"have several, \[3, {mask}\]"):
        bench_family.shared_mask(cfg.data, [*drafters.values(), other])
    named = dataclasses.replace(cfg.data, mask_id=5)
    assert bench_family.shared_mask(named, [*drafters.values(), other]) == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperatures": ()}, r"temperatures=\(\) is empty"),
        (
            {"bench": schema.Bench(max_new_tokens=140)},
            r"bench\.max_new_tokens=140 and prompts of up to 48 .* serve\.max_context",
        ),
    ],
)
def test_what_would_end_late_is_refused_early(change, says):
    cfg, target, recipes, drafters = tiny_family()
    planes = bench_family.shared_planes(cfg.capture, drafters.values())
    recipes = {n: dataclasses.replace(r, capture=planes) for n, r in recipes.items()}
    with pytest.raises(UserError, match=says):
        bench_family.check_family(
            dataclasses.replace(cfg, **change), recipes, drafters, target
        )


def text(held=HELD, sets=FILES):
    return synthesis.Synthesis((), held, sets, 0.0, 0, 0)


def config(**changes):
    cfg = schema.BenchFamily(validation_prompts=2, data=schema.Data(held_out=6))
    return dataclasses.replace(cfg, **changes)


def test_the_first_held_out_prompts_measure_nothing():
    sets = bench_family.measured_prompts(config(), text())
    assert sets == {"a": [[6, 7, 2]], "b": [[6, 7, 1 + i] for i in (2, 3, 4)]}


@pytest.mark.parametrize(
    ("validation", "count", "missing"), [(5, 6, "a"), (3, 5, "a"), (4, 4, "a")]
)
def test_a_set_with_nothing_to_measure_is_named(validation, count, missing):
    cfg = config(validation_prompts=validation)
    with pytest.raises(UserError, match=f"no prompt of '{missing}' to measure"):
        bench_family.measured_prompts(cfg, text(HELD[:count], FILES[:count]))


def test_a_file_that_samples_answer_whole_is_named(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"prompt": "w6"}) + "\n")
    data = schema.Data(held_out=6, samples="some", prompts=str(path))
    with pytest.raises(UserError, match="no prompt of 'c' to measure"):
        bench_family.measured_prompts(config(data=data), text())


RECIPE = """
from configs import common

def get_config(name):
    config = common.base("pipeline", name)
    common.set_options(config, layer_ids=(0,), mask_id=22)
    return config
"""


def test_too_few_prompts_end_it_before_any_training(tmp_path, monkeypatch):
    target = served.make_target()
    monkeypatch.setattr(
        serving, "load_serving_target", lambda section: (target, target.params)
    )
    asked = []

    def prepare(recipe, target, params, mask_id, workdir, drafter):
        asked.append((recipe.capture.layer_ids, recipe.capture.teacher, mask_id))
        made = text(HELD[:2], FILES[:2])
        return preparing.Prepared(target, params, made, None, 1.0, workdir)

    def trained(*args):
        pytest.fail("a training began")

    monkeypatch.setattr(preparing, "prepare", prepare)
    monkeypatch.setattr(training, "make_drafter", trained)
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    cfg = config(
        drafters=("lookup", "eagle", "dflash"),
        recipe=str(path),
        data=schema.Data(max_new_tokens=16, max_tokens=48, held_out=6),
        serve=schema.Serve(max_context=256, max_new_tokens=8),
    )
    with pytest.raises(UserError, match="no prompt of 'a' to measure: 2 prompts"):
        bench_family.main(cfg, tmp_path)
    assert asked == [((0,), True, 22)]


def test_facts_hold_the_metrics_of_the_kept_weights(tmp_path):
    (tmp_path / "train").mkdir()
    lines = [
        {
            "kind": "train",
            "step": s,
            "metrics": {"acc_1": s / 10, "accept_length": s, "walk_accept_length": 9},
        }
        for s in (2, 4, 6)
    ]
    file = tmp_path / "train" / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = types.SimpleNamespace(slots=9.0, seconds=1.0, step=6, best_step=4)
    _, target, recipes, _ = tiny_family()
    dflash2 = serving.new_drafter(recipes["dflash2"], target)
    made = training.Made(dflash2, {}, result, 0.0)
    prepared = preparing.Prepared(None, None, text(), None, 1.0, tmp_path)
    facts = bench_family.training_facts(made, prepared, tmp_path)
    expected = {"step": 4, "acc_by_position": [0.4], "accept_length": 4}
    assert facts["teacher_forced"] == expected | {"walk_accept_length": 9}
    # A selector that is left out does not walk when drafts are made.
    without = dataclasses.replace(
        made, drafter=optional_part.other_of(dflash2, target.spec)
    )
    facts = bench_family.training_facts(without, prepared, tmp_path)
    assert facts["teacher_forced"] == expected
    untrained = dataclasses.replace(made, result=None)
    facts = bench_family.training_facts(untrained, prepared, tmp_path)
    assert facts["teacher_forced"] == {} and facts["train_steps"] == 0
