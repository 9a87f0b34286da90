"""One drafter served in several ways: what is rounded, and that no text changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.bench import variants as recipe
from experiments import bench_decode, bench_variants, feature_rounding, serving
from spec_jax.config import loading
from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract
from spec_jax.data.prompts import user_prompt
from spec_jax.drafters import base
from spec_jax.drafters.base import Rows
from spec_jax.export.folder import Exported
from tests.support import drafting, served, tiny

BLOCK = {"num_layers": 1, "num_draft": 3, "layer_ids": (0,), "mask_id": served.MASK}


def config(**changes):
    made = recipe.get_config()
    made.update_from_flattened_dict(
        {
            "drafter": "some",
            "temperatures": (0.0, 1.0),
            "serve.max_context": 64,
            "serve.max_new_tokens": 16,
            "serve.prefill_buckets": (16,),
            "bench.max_new_tokens": 12,
            **changes,
        }
    )
    return loading.to_recipe(made)


@functools.cache
def target():
    return served.make_target()


def drafter(name, **options):
    return base.load(name, options, target().spec)


def rows(seed=0, scale=40.0):
    """Numbers of many sizes: below, within and beyond what float8 can hold."""
    rng = np.random.default_rng(seed)
    magnitudes = scale * 2.0 ** rng.integers(-22, 5, (6, 16))
    return (rng.normal(size=(6, 16)) * magnitudes).astype(np.float32)


def test_roundings_are_those_of_the_types_inside_a_program():
    """Where a compiler might leave a cast and its way back out."""
    given = rows()
    found = {
        kind: np.asarray(
            jax.jit(functools.partial(feature_rounding.rounded, kind=kind))(given)
        )
        for kind in feature_rounding.ROUNDINGS
    }
    np.testing.assert_array_equal(
        found["bfloat16"], given.astype(jnp.bfloat16).astype(np.float32)
    )
    held = np.clip(given, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float32)
    assert (np.abs(given) > 448).any() and (held == 0).any()
    np.testing.assert_array_equal(found["float8_e4m3"], held)
    step = np.abs(given).max(-1, keepdims=True) / 127
    np.testing.assert_allclose(
        found["int8"], np.round(given / step) * step, rtol=1e-6, atol=0
    )
    zero = feature_rounding.rounded(jnp.zeros((2, 4)), "int8")
    np.testing.assert_array_equal(zero, np.zeros((2, 4)))
    halves = feature_rounding.rounded(jnp.ones((2, 4), jnp.bfloat16), "int8")
    assert halves.dtype == jnp.bfloat16


def test_prefill_and_extend_are_told_of_rounded_rows():
    right, seen = tiny.bigram(target().spec, 3), []

    def absorb(params, frozen, state, rows):
        seen.append((rows.features_BTLD, rows.hidden_BTD))
        return state

    spied = dataclasses.replace(right, prefill=absorb, extend=absorb)
    wrapped = feature_rounding.with_rounded_features(spied, "int8")
    features, hidden = rows(1)[None, :, None], rows(2)[None]
    ids = np.zeros((1, 6), np.int32)
    given = Rows(ids, ids, features, hidden, np.zeros(1), np.full(1, 6))
    for told in (wrapped.prefill, wrapped.extend):
        told(None, None, None, given)
    for got in seen:
        np.testing.assert_array_equal(
            got[0], feature_rounding.rounded(features, "int8")
        )
        np.testing.assert_array_equal(got[1], feature_rounding.rounded(hidden, "int8"))
    assert wrapped.propose is right.propose
    with pytest.raises(UserError, match="roundings='int3' is not known"):
        feature_rounding.with_rounded_features(right, "int3")


def names_of(name, **options):
    made = drafter(name, **options)
    found, absent = bench_variants.variants(config(), made, target(), "float32")
    return list(found), absent


def test_a_drafter_has_the_variants_it_can_do():
    usual = ["as_is", "one_hot", "bfloat16", "float8_e4m3", "int8"]
    names, absent = names_of("dflash", **BLOCK)
    assert names == usual
    assert absent == ["drafter 'dflash' has no part to leave out"]
    assert names_of("eagle") == (usual, ["drafter 'eagle' has no part to leave out"])
    names, absent = names_of("lookup")
    assert names == usual[:2]
    assert absent[0] == "drafter 'lookup' reads no features to round"
    for use, name in ((True, "without"), (False, "with")):
        names, absent = names_of("dflash2", **BLOCK, use_selector=use)
        assert names == [*usual, f"{name}_use_selector"] and not absent


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"drafter": ""}, r"drafter='' is empty"),
        ({"temperatures": ()}, r"temperatures=\(\) must name some"),
        ({"temperatures": (-1.0,)}, r"temperatures=\(-1\.0,\) must name some"),
        ({"roundings": ("int3",)}, r"roundings='int3' must be one of"),
        ({"serve.temperature": 0.7}, r"serve\.temperature=0\.7 is not read"),
        ({"serve.one_hot_draft": True}, r"serve\.one_hot_draft=True is not read"),
        ({"serve.topology": "static_tree"}, r"serve\.topology='static_tree' is not"),
    ],
)
def test_what_is_not_read_is_refused(change, sentence):
    with pytest.raises(UserError, match=sentence):
        config(**change)


def test_all_variants_keep_the_text_and_rounding_moves_drafts(
    monkeypatch, tmp_path, capsys
):
    """A planted rounding that leaves nothing of the features changes the drafts."""
    made = drafter("dflash2", **BLOCK)
    params = drafting.stir(made.init(jax.random.key(0)), scale=0.3)
    exported = Exported(
        drafter=made,
        params=params,
        contract=Contract(
            "tiny", "", 23, 16, 2, (0,), "", "", feature_dtype="bfloat16"
        ),
        draft_vocab=None,
        weights_sha256="abc",
        golden_max_abs=None,
        notes=(),
    )
    monkeypatch.setitem(feature_rounding.ROUNDINGS, "int8", lambda x_XD: 0 * x_XD + 9)
    prompts = [user_prompt(f"w{i} w{i + 2}") for i in range(6, 12)]
    for module, name, value in (
        (serving, "load_serving_target", (target(), target().params)),
        (serving, "load_drafter", exported),
        (bench_decode, "prompt_sets", ({"x": prompts}, ["gsm8k"])),
    ):
        monkeypatch.setattr(module, name, lambda *a, value=value, **o: value)
    right, accepted, drafted = bench_variants.decoding.decode_one, [], []

    def decode_one(*args):
        made = right(*args)
        accepted.append(made.generation.accepted)
        return made

    serve_set = bench_variants.serve_set

    def watched(*args):
        accepted.clear()
        found = serve_set(*args)
        drafted.append(list(accepted))
        return found

    monkeypatch.setattr(bench_variants.decoding, "decode_one", decode_one)
    monkeypatch.setattr(bench_variants, "serve_set", watched)
    found = bench_variants.main(config(roundings=("int8",)), tmp_path)
    order = ["as_is", "one_hot", "int8", "without_use_selector"]
    assert list(found["variants"]) == order and found["greedy_identical"] is True
    for name in order:
        sets = found["variants"][name]["x"]
        assert set(sets) == {"t0", "t1"} and sets["t0"]["prompts"] == len(prompts)
        assert sets["t0"]["greedy_identical"] and not sets["t0"]["first_difference"]
        assert sets["t1"]["accept_length"] >= 1
    greedy = {name: drafted[2 * i] for i, name in enumerate(order)}
    assert greedy["as_is"] == greedy["one_hot"] != greedy["int8"]
    assert greedy["as_is"] != greedy["without_use_selector"]
    assert found["features"]["int8"] == "int8" and found["features_trained_on"]
    assert found["left_out"] == "gsm8k"
    assert "trained on bfloat16 features" in capsys.readouterr().out
