"""ConfigDict to schema: once, strictly, with a suggestion where a key is wrong."""

import dataclasses

import ml_collections
import pytest

from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    width: int
    rate: float = 0.5
    ids: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    window: int | None = None
    name: str = "x"
    flag: bool = False


def _pipeline(**values):
    tree = loading.to_config_dict(loading.defaults(schema.Pipeline))
    tree.update(values)
    return tree


def test_the_schema_goes_round():
    config = _pipeline(drafter={"options": {}}, train={"steps": 7})
    with config.unlocked():
        config.drafter.options = {"num_layers": 2, "layer_ids": [1, 3], "mask_id": 16}
    recipe = loading.to_recipe(config)
    assert recipe.train.steps == 7
    assert recipe.drafter.options == (
        ("layer_ids", (1, 3)),
        ("mask_id", 16),
        ("num_layers", 2),
    )
    assert recipe.drafter.options_dict()["mask_id"] == 16
    hash(recipe)
    assert loading.to_recipe(loading.plain(recipe)) == recipe


def test_no_config_dict_gets_in():
    recipe = loading.to_recipe(_pipeline())

    def walk(value):
        assert not isinstance(value, (ml_collections.ConfigDict, dict, list)), value
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                walk(getattr(value, field.name))

    walk(recipe)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"trian": {}},
            "trian is not a field of the Pipeline recipe (did you mean train?)",
        ),
        ({"train": {"stesp": 3}}, "(did you mean train.steps?)"),
        ({"train": {"steps": 2.5}}, "train.steps=2.5 is a float; it must be an int"),
        ({"train": {"steps": True}}, "train.steps=True is a bool"),
        ({"train": {"lr": "fast"}}, "train.lr='fast' is a str; it must be a number"),
        ({"train": 3}, "train=3 must be a section"),
        ({"serve": {"speculate": 1}}, "serve.speculate=1 is a int; it must be True or"),
        ({"serve": {"prefill_buckets": (1, "a")}}, "serve.prefill_buckets[1]='a'"),
        ({"task": "pipelin"}, "(did you mean pipeline?)"),
        ({"target": {"tiny": {"layers": 2}}}, "target.tiny.layers is not a field"),
        ({"serve": {"temperature": -1}}, "serve.temperature=-1.0 must be 0"),
    ],
)
def test_refusals_name_field_value_and_fix(tree, sentence):
    with pytest.raises(UserError) as caught:
        loading.to_recipe(tree)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_to_dataclass_is_generic():
    made = loading.to_dataclass(
        Options, (("ids", [2, 4]), ("rate", 1), ("width", 3), ("window", 9)), "options"
    )
    assert made == Options(3, 1.0, (2, 4), (1, "a"), 9)
    assert type(made.rate) is float
    assert loading.to_dataclass(Options, {"width": 1, "window": None}).window is None
    assert loading.to_dataclass(Options, made) is made
    for wrong, words in [
        ({}, "options.width is missing"),
        ({"width": 1, "pair": (1, 2)}, "options.pair[1]=2"),
        ({"width": 1, "pair": (1,)}, "options.pair=(1,)"),
        ({"width": 1, "window": "a"}, "options.window='a' is a str"),
        ({"width": None}, "options.width=None"),
        ({"width": 1, "flag": 0}, "options.flag=0"),
    ]:
        with pytest.raises(UserError, match="options") as caught:
            loading.to_dataclass(Options, wrong, "options")
        assert words in str(caught.value)


def test_the_hash_is_of_what_is_resolved():
    recipe = loading.to_recipe({})
    same = loading.to_recipe({"train": {"steps": schema.Train().steps}})
    other = loading.to_recipe({"train": {"steps": schema.Train().steps + 1}})
    assert loading.config_hash(recipe) == loading.config_hash(same)
    assert loading.config_hash(recipe) != loading.config_hash(other)
    task = loading.to_recipe({"task": "bench_peers"})
    assert loading.config_hash(task) != loading.config_hash(recipe)
    assert len(loading.config_hash(recipe)) == 64


def test_the_difference_is_printed():
    recipe = loading.to_recipe(
        {"train": {"steps": 3}, "drafter": {"options": {"a": 1}}}
    )
    assert loading.changes(recipe) == [
        ("drafter.options.a", None, 1),
        ("train.steps", 400, 3),
    ]
    base = loading.plain(recipe)
    assert loading.changes(recipe, base) == []
    lines = loading.describe(recipe).split("\n")
    assert "train.steps = 3    (default 400)" in lines
    assert "train.batch = 4" in lines


def test_defaults_exist_where_they_alone_are_refused():
    tree = loading.defaults(schema.Generate)
    assert tree["prompt"] == "" and tree["serve"]["slots"] == 1
    assert loading.to_recipe({**tree, "prompt": "hi"}).prompt == "hi"
