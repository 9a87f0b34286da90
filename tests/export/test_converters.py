"""Folders of other conventions: converted aloud, or refused with a sentence."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from spec_jax.core.errors import UserError
from spec_jax.export import converters, golden, storage

from .conftest import VOCAB, read

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def foreign(whole_of, tmp_path):
    """(kind, edit of the configuration, edit of the tensors) -> a foreign folder."""

    def make(kind, configure=None, change=None, vocab=None):
        path = tmp_path / "drafter"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole_of(kind, vocab), path)
        for name in (storage.CONTRACT, storage.MANIFEST, storage.GOLDEN):
            (path / name).unlink()
        config = json.loads((path / storage.CONFIG).read_text())
        config.pop("spec_jax", None)
        config = (configure or (lambda c: None))(config) or config
        (path / storage.CONFIG).write_text(json.dumps(config))
        tensors = safetensors.numpy.load_file(path / storage.WEIGHTS)
        tensors = (change or (lambda t: None))(tensors) or tensors
        safetensors.numpy.save_file(tensors, path / storage.WEIGHTS)
        return path

    return make


def same_weights(got, made):
    jax.tree.map(np.testing.assert_array_equal, got.params, made.params)


def says(got, *words):
    for word in words:
        assert any(word in note for note in got.notes), (word, got.notes)


def renamed(old, new):
    def change(tensors):
        return {
            new + n.removeprefix(old) if n.startswith(old) else n: t
            for n, t in tensors.items()
        }

    return change


def test_layer_inputs_and_outputs():
    assert converters.to_layer_outputs([2, 18, 33]) == (1, 17, 32)
    assert converters.to_layer_inputs((1, 17, 32)) == (2, 18, 33)


RENAMED = {
    "dflash, model. everywhere": ("dflash", "", "model."),
    "dflash, encoder": ("dflash", "fc.", "encoder.fc."),
    "dflash, encoder norm": ("dflash", "hidden_norm.", "encoder.output_norm_enc."),
    "dspark, legacy prefix": ("dspark", "markov_head.", "logit_head."),
    "eagle3, layers.0": ("eagle3", "midlayer.", "layers.0."),
}


@pytest.mark.parametrize("case", RENAMED)
def test_other_names(case, foreign, make, target):
    kind, ours, theirs = RENAMED[case]
    got = read(foreign(kind, None, renamed(ours, theirs)), target)
    same_weights(got, make(kind))
    if theirs != "model.":
        says(got, "read as")


def test_codebooks_saved_as_embeddings(foreign, make, target):
    name = "candidate_selector.successor_codebook"
    path = foreign("dflash2", None, renamed(name, f"{name}.weight"))
    got = read(path, target)
    same_weights(got, make("dflash2"))
    says(got, f"{name}.weight is read as {name}")


def test_a_name_twice_is_refused(foreign, target):
    def both(tensors):
        return tensors | {"encoder.fc.weight": tensors["fc.weight"]}

    with pytest.raises(UserError, match=r"fc\.weight twice"):
        read(foreign("dflash", None, both), target)


def test_eagle_repositories_name_the_base_model(foreign, make, target):
    def base_class(config):
        config["architectures"] = ["LlamaForCausalLM"]
        for key in ("dtype", "rope_parameters", "head_dim"):
            del config[key]
        # Six heads of four make the width, as readers without the key assume.

    path = foreign("eagle", base_class)
    with pytest.raises(UserError, match="has shape"):  # head_dim 10 is not 24 / 4
        read(path, target)

    def base_class(config):
        config["architectures"] = ["LlamaForCausalLM"]
        del config["bias"]

    got = read(foreign("eagle", base_class), target)
    same_weights(got, make("eagle"))
    assert got.drafter.options.bias is True
    says(got, "LlamaForCausalLM is read as LlamaForCausalLMEagle", "how many drafts")
    got = read(
        foreign("eagle", base_class, lambda t: t.pop("fc.bias") is None or t), target
    )
    assert got.drafter.options.bias is False
    says(got, "lacks bias, which means true")


def test_eagle3_of_the_eagle_repository(foreign, make, target):
    """No list of layers, no rotary base: what its trainer and readers take."""

    def plain(config):
        config["architectures"] = ["LlamaForCausalLM"]
        for key in ("eagle_config", "num_aux_hidden_states", "rope_theta"):
            del config[key]
        del config["rope_parameters"]

    # The public three of five layers are 1 and 1 (L // 2 - 1) and 1 (L - 4).
    with pytest.raises(UserError, match=r"fc\.weight takes 72 numbers.*3 layers"):
        read(foreign("eagle3", plain), target)

    def two(config):
        del config["rope_theta"], config["rope_parameters"]

    got = read(foreign("eagle3", two), target)
    assert got.drafter.options.rope_theta == 10000.0
    says(got, "rope_theta is not given")


def test_eagle3_norm_output(foreign, target):
    path = foreign("eagle3", lambda c: c.update(norm_output=True))
    with pytest.raises(UserError, match="norm_output=true, which means feedback"):
        read(path, target)
    got = read(foreign("eagle3", lambda c: c.update(norm_output=False)), target)
    says(got, "norm_output is false")


def of_class(name, ids, top_level=False):
    """An EAGLE-3 configuration of that class and list."""

    def configure(config):
        config["architectures"] = [name]
        config["eagle_config"] = {"use_aux_hidden_state": True}
        (config if top_level else config["eagle_config"])[IDS] = ids

    return configure


@pytest.mark.parametrize("top_level", [False, True])
def test_eagle3_ids_of_the_class_that_counts_inputs(top_level, foreign, make, target):
    configure = of_class("Eagle3LlamaForCausalLM", [1, 2, 4], top_level)
    got = read(foreign("eagle3", configure), target)
    same_weights(got, make("eagle3"))
    assert got.drafter.options.layer_ids == (0, 1, 3)
    assert got.drafter.needs.layer_ids == got.contract.layer_ids == (0, 1, 3)
    says(
        got,
        f"{IDS}=[1, 2, 4] counts layer inputs, as Eagle3LlamaForCausalLM is read",
        "read as outputs of layers (0, 1, 3); if it counts outputs, write",
    )
    below = of_class("Eagle3LlamaForCausalLM", [0, 2, 4], top_level)
    with pytest.raises(UserError, match=r"layer_ids=\(-1, 1, 3\) must be ascending"):
        read(foreign("eagle3", below), target)


def test_the_default_of_layer_inputs_under_either_class(target):
    """36 layers: inputs 2, 18, 33 are outputs 1, 17, 32."""
    spec = dataclasses.replace(target.spec, num_layers=36)

    def adopted(name, ids):
        config = {"architectures": [name], "eagle_config": {IDS: ids}}
        config, _, said = converters.adopt(config, {}, spec, "folder x")
        return config["eagle_config"][IDS], said[0]

    ids, _ = adopted("Eagle3LlamaForCausalLM", [2, 18, 33])
    assert ids == [1, 17, 32]
    ids, said = adopted("LlamaForCausalLMEagle3", [2, 18, 33])
    assert ids == [2, 18, 33] and "if that is meant, write architectures" in said
    ids, said = adopted("LlamaForCausalLMEagle3", [1, 17, 32])
    assert ids == [1, 17, 32] and said.endswith("is taken as layer outputs")


def test_ids_of_a_class_that_says_nothing_are_asked_about(foreign, target):
    path = foreign("eagle3", of_class("LlamaForCausalLM", [0, 1, 3]))
    with pytest.raises(UserError, match=r"=\[0, 1, 3\] may count layer inputs or"):
        read(path, target)
    aux = {"aux_hidden_state_layer_ids": [2, 4]}
    with pytest.raises(UserError, match=r"aux_hidden_state_layer_ids=\[2, 4\], which"):
        read(foreign("dflash", lambda c: c.update(aux)), target)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "dflash2"])
def test_how_given_ids_are_taken_is_said(kind, foreign, make, target):
    got = read(foreign(kind), target)
    ids = list(make(kind).drafter.options.layer_ids)
    assert got.drafter.needs.layer_ids == tuple(ids)
    (said,) = {n for n in got.notes if "is taken as layer outputs" in n}
    assert f"={ids} is taken" in said


EAGLE3_REFUSED = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "tie_word_embeddings": True,
    "num_hidden_layers": 2,
    "num_aux_hidden_states": 4,
    "attention_bias": True,
    "draft_vocab_size": 60,
    "partial_rotary_factor": 0.5,
    "num_target_layers": 6,
}


@pytest.mark.parametrize("key", EAGLE3_REFUSED)
def test_eagle3_settings_that_no_drafter_has(key, foreign, target):
    path = foreign("eagle3", lambda c: c.update({key: EAGLE3_REFUSED[key]}))
    with pytest.raises(UserError, match=key) as error:
        read(path, target)
    assert "\n" not in str(error.value)


def test_layers_that_normalise_queries_are_refused(foreign, target):
    def normed(tensors):
        norm = np.ones(10, np.float32)
        return renamed("midlayer.", "layers.0.")(tensors) | {
            "layers.0.self_attn.q_norm.weight": norm,
            "layers.0.self_attn.k_norm.weight": norm,
        }

    for architecture in ("Qwen3Eagle3Model", "LlamaForCausalLMEagle3"):
        path = foreign(
            "eagle3", lambda c, a=architecture: c.update(architectures=[a]), normed
        )
        with pytest.raises(UserError, match="normalises each head's queries"):
            read(path, target)


def test_biases_inside_a_layer_are_refused(foreign, target):
    def biased(tensors):
        bias = np.ones(40, np.float32)
        return tensors | {"layers.0.self_attn.q_proj.bias": bias}

    with pytest.raises(UserError, match=r"q_proj\.bias is a bias inside a layer"):
        read(foreign("eagle", None, biased), target)


def test_deepspec_copies_of_the_targets_tables(foreign, make, target):
    tree = target.params["params"]

    def whole(tensors):
        return tensors | {
            "embed_tokens.weight": np.array(tree["embed"]),
            "lm_head.weight": np.array(tree["head"]).T.copy(),
        }

    def flat(config):
        inner = config.pop("dflash_config")
        del inner["projector_type"], inner["attention_mode"]
        config.update(num_anchors=512)

    got = read(foreign("dspark", flat, whole), target)
    same_weights(got, make("dspark"))
    says(got, "embed_tokens.weight is a copy", "lm_head.weight is a copy")

    def another(tensors):
        return whole(tensors) | {"lm_head.weight": np.array(tree["head"]).T * 1.5}

    with pytest.raises(UserError, match=r"lm_head\.weight is not a copy"):
        read(foreign("dspark", flat, another), target)


def test_deepspec_dflash_is_dspark_that_corrects_nothing(foreign, make, target):
    def headless(config):
        for scope in (config, config["dflash_config"]):
            scope.update(markov_rank=0, enable_confidence_head=False)
            scope["confidence_head_with_markov"] = False

    def bare(tensors):
        heads = ("markov_head.", "confidence_head.")
        return {n: t for n, t in tensors.items() if not n.startswith(heads)}

    got = read(foreign("dspark", headless, bare), target)
    assert got.drafter.name == "dspark" and got.drafter.layout.anchor_predicts
    says(got, "DFlash drafter whose anchor row predicts")
    made = make("dspark")
    logits = golden.serving_logits(got.drafter, got.params, made.probe)
    # Row 0 of the Markov drafter, without what its head added.
    full = golden.serving_logits(made.drafter, made.params, made.probe)
    w1, w2 = (made.params["params"]["markov"][f"markov_w{i}"] for i in (1, 2))
    anchors = made.probe.tokens_S[list(made.probe.anchors)]
    added = np.asarray(w1)[anchors] @ np.asarray(w2)
    np.testing.assert_allclose(logits[:, 0], full[:, 0] - added, atol=1e-4)

    path = foreign("dflash", lambda c: c.update(sample_from_anchor=True))
    got = read(path, target)
    assert got.drafter.name == "dspark" and got.drafter.layout.num_draft == 5
    says(got, "DFlash drafter whose anchor row predicts")


def test_rows_that_predict_themselves_are_not_dspark(foreign, target):
    path = foreign("dspark", lambda c: c.update(sample_from_anchor=False))
    with pytest.raises(UserError, match="sample_from_anchor is false"):
        read(path, target)
    got = read(
        foreign("dspark", lambda c: c.pop("sample_from_anchor") and None), target
    )
    says(got, "sample_from_anchor is not given")


def test_the_weights_decide_about_the_confidence_head(foreign, make, target):
    def without(tensors):
        return {n: t for n, t in tensors.items() if "confidence" not in n}

    with pytest.raises(UserError, match="enable_confidence_head is true but"):
        read(foreign("dspark", None, without), target)

    def silent(config):
        for scope in (config, config["dflash_config"]):
            scope.pop("enable_confidence_head")
            scope.pop("confidence_head_with_markov")

    got = read(foreign("dspark", silent), target)
    assert got.drafter.options == make("dspark").drafter.options
    says(got, "confidence_head_with_markov is not given; its width says true")
    got = read(foreign("dspark", silent, without), target)
    assert got.drafter.options.enable_confidence_head is False

    def off(config):
        for scope in (config, config["dflash_config"]):
            scope["enable_confidence_head"] = False

    got = read(foreign("dspark", off), target)
    assert got.drafter.options.enable_confidence_head is True
    says(got, "the weights have the head; it is used")

    def narrow(config):
        for scope in (config, config["dflash_config"]):
            scope["confidence_head_with_markov"] = False

    with pytest.raises(UserError, match="confidence_head_with_markov is False but"):
        read(foreign("dspark", narrow), target)


def test_one_more_layer_than_fc_takes(foreign, target):
    def more(config):
        config["dflash_config"]["target_layer_ids"] = [0, 1, 3]
        config["target_layer_ids"] = [0, 1, 3]

    with pytest.raises(UserError, match=r"fc\.weight takes 48 numbers.*names 3"):
        read(foreign("dflash", more), target)


def speculators(kind, ids, **more):
    """A configuration in the speculators form, from one of ours."""

    def configure(config):
        outer = ("architectures", "block_size", "mask_token_id", "dflash_config")
        outer += ("target_layer_ids", "num_target_layers", "draft_vocab_size", "dtype")
        outer += ("eagle_config", "num_aux_hidden_states", "sample_from_anchor")
        inner = {k: v for k, v in config.items() if k not in outer}
        heads = {k: v for k, v in inner.items() if "markov" in k or "confidence" in k}
        flat = {
            "speculators_model_type": kind,
            "speculators_version": "0.5.0",
            "speculators_config": {"algorithm": kind},
            "architectures": ["SomeSpeculator"],
            "transformer_layer_config": {k: inner[k] for k in set(inner) - set(heads)},
            "draft_vocab_size": config.get("draft_vocab_size", config["vocab_size"]),
            **heads,
        }
        if kind != "eagle3":
            flat |= {k: config[k] for k in ("block_size", "mask_token_id")}
        key = IDS if kind == "eagle3" else "aux_hidden_state_layer_ids"
        if ids is not None:
            flat[key] = ids
        return flat | more

    return configure


def test_speculators_dflash(foreign, make, target):
    got = read(foreign("dflash", speculators("dflash", [2, 4])), target)
    same_weights(got, make("dflash"))
    assert got.drafter.options == make("dflash").drafter.options
    says(
        got,
        "it is a speculators folder",
        "[2, 4] counts layer inputs; read as outputs of layers (1, 3)",
        "measures the sliding window from the anchor",
        "sample_from_anchor is not given",
    )
    path = foreign(
        "dflash", speculators("dflash", [2, 4], sliding_window_non_causal=True)
    )
    got = read(path, target)
    assert got.drafter.options.is_causal is False
    with pytest.raises(UserError, match="lacks aux_hidden_state_layer_ids"):
        read(foreign("dflash", speculators("dflash", None)), target)
    with pytest.raises(UserError, match="speculators_model_type is 'mtp'"):
        read(foreign("dflash", speculators("mtp", [2, 4])), target)


def test_speculators_dspark(foreign, make, target):
    path = foreign("dspark", speculators("dspark", [2, 4]), vocab=VOCAB)
    with pytest.raises(UserError, match="lacks sample_from_anchor"):
        read(path, target)
    configure = speculators("dspark", [2, 4], sample_from_anchor=True)
    got = read(foreign("dspark", configure, vocab=VOCAB), target)
    same_weights(got, make("dspark", VOCAB))
    assert got.draft_vocab == VOCAB


def test_speculators_eagle3(foreign, make, target):
    def layer(tensors):
        extra = {"verifier_norm.weight": np.ones(24, np.float32)}
        return renamed("midlayer.", "layers.0.")(tensors) | extra

    configure = speculators("eagle3", [1, 2, 4], norm_before_residual=False)
    got = read(foreign("eagle3", configure, layer), target)
    same_weights(got, make("eagle3"))
    assert got.drafter.options.layer_ids == (0, 1, 3)
    says(got, "read as outputs of layers (0, 1, 3)", "verifier_norm.weight is computed")
    configure = speculators("eagle3", [1, 2, 4], norm_before_residual=True)
    with pytest.raises(UserError, match="norm_before_residual=True"):
        read(foreign("eagle3", configure, layer), target)


def test_a_folder_of_ours_is_not_converted(whole_of, target, tmp_path):
    """Names of another convention in a folder with a contract are surplus."""
    path = shutil.copytree(whole_of("eagle3"), tmp_path / "drafter")
    config = json.loads((path / storage.CONFIG).read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (path / storage.CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match="sha256 differs"):
        read(path, target)
