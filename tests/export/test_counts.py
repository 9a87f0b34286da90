"""Published sizes, counted without memory (drafter contracts, sections 3.2 to 6.2)."""

import dataclasses

import pytest

from experiments import run
from spec_jax.config import loading
from spec_jax.drafters import base
from spec_jax.export import counts
from spec_jax.target.published import SPECS
from spec_jax.target.spec import TargetSpec

PUBLISHED = {
    ("configs/qwen3_4b.py", "eagle3"): 218_245_120,
    ("configs/qwen3_8b.py", "eagle3"): 399_523_840,
    ("configs/qwen3_4b.py", "dflash"): 537_427_200,
    ("configs/qwen3_8b.py", "dflash"): 1_048_626_432,
    ("configs/qwen3_4b.py", "dspark"): 615_221_249,
    ("configs/qwen3_8b.py", "dspark"): 1_126_422_017,
}


def drafter_of(path, name):
    """The drafter of a recipe, as its pipeline makes it."""
    options, _ = run.parse([f"{path}:{name}"])
    recipe = loading.to_recipe(options.config)
    spec = SPECS[recipe.target.source]
    made = dict(recipe.drafter.options_dict())
    if recipe.drafter.draft_vocab:
        made["draft_vocab_size"] = recipe.drafter.draft_vocab
    return base.load(recipe.drafter.name, made, spec)


@pytest.mark.parametrize(("recipe", "expected"), PUBLISHED.items(), ids=str)
def test_published_sizes(recipe, expected):
    assert counts.count_parameters(drafter_of(*recipe)).parameters == expected


def test_dflash2_of_a_27b_target():
    spec = dataclasses.replace(
        SPECS["Qwen3-4B"],
        name="27B",
        num_layers=64,
        hidden_size=5120,
        mlp_size=17408,
        vocab_size=248320,
    )
    options = {
        "num_layers": 5,
        "num_draft": 7,
        "layer_ids": (5, 19, 33, 47, 61),
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mlp_size": 17408,
        "mask_id": 248070,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "layer_types": ("sliding_attention",) * 5,
        "sliding_window": 2048,
        "is_causal": False,
    }
    found = counts.count_parameters(base.load("dflash2", options, spec))
    assert found == counts.Count(tensors=81, parameters=1_924_404_480)


def test_an_eagle_head_of_llama_3_8b():
    spec = TargetSpec(
        name="Llama-3-8B",
        family="llama",
        num_layers=32,
        hidden_size=4096,
        mlp_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    made = base.load("eagle", {"bias": False}, spec)
    assert counts.count_parameters(made).parameters == 251_662_336
    made = base.load("eagle", {}, spec)
    assert counts.count_parameters(made).parameters == 251_662_336 + 4096


def test_lookup_has_none():
    made = base.load("lookup", {}, SPECS["Qwen3-4B"])
    assert counts.count_parameters(made) == counts.Count(0, 0)
