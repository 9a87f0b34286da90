"""Folders: written whole, read for the right target, refused otherwise."""

import dataclasses
import hashlib
import json
import os
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from spec_jax.core.errors import UserError
from spec_jax.core.vocab import DraftVocab
from spec_jax.drafters.frozen import frozen_for
from spec_jax.export import folder, golden, storage, writer
from spec_jax.target import tokenizer
from spec_jax.target.chat import ChatTemplate

from .conftest import SPEC


def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "drafter")


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def foreign(whole, tmp_path):
    """The folder as another package would have written it: no contract."""
    path = copy(whole, tmp_path)
    for name in (storage.CONTRACT, storage.MANIFEST, storage.GOLDEN):
        os.remove(path / name)
    return path


def seal(path):
    """Makes the manifest agree with changed files: what a careful editor does."""
    manifest = json.loads((path / storage.MANIFEST).read_text())
    for name in manifest["sha256"]:
        content = (path / name).read_bytes()
        manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
    (path / storage.MANIFEST).write_text(json.dumps(manifest))


def test_round_trip_bit_for_bit(whole, target, drafter, params, contract):
    got = folder.read_folder(whole, target, num_anchors=drafter.options.num_anchors)
    assert got.drafter.options == drafter.options
    assert got.contract == contract
    assert got.draft_vocab is None
    assert got.notes == ()
    assert got.golden_max_abs <= 1e-5
    jax.tree.map(np.testing.assert_array_equal, got.params, params)
    content = (whole / storage.WEIGHTS).read_bytes()
    assert got.weights_sha256 == hashlib.sha256(content).hexdigest()


def test_config_says_it_where_every_reader_looks(whole):
    config = json.loads((whole / storage.CONFIG).read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    for scope in (config, config["dflash_config"]):
        assert scope["block_size"] == 5
        assert scope["target_layer_ids"] == [1, 3]
        assert scope["mask_token_id"] == 3
        assert scope["num_target_layers"] == 5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 7000.0
    assert config["head_dim"] == 10
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (9, True)
    assert config["tie_word_embeddings"] is False
    assert config["vocab_size"] == SPEC.vocab_size
    assert config["dtype"] == "float32"
    assert "is_causal" not in config
    assert "draft_vocab_size" not in config


def test_bfloat16_is_the_rounded_tree(export, target, params, tmp_path):
    written = export(tmp_path / "half", dtype="bfloat16")
    assert written.parity_max_abs <= 1e-3
    stored = safetensors.numpy.load_file(tmp_path / "half" / storage.WEIGHTS)
    assert {str(w.dtype) for w in stored.values()} == {"bfloat16"}
    got = folder.read_folder(tmp_path / "half", target)
    # The golden round was computed from the rounded weights.
    assert got.golden_max_abs <= 1e-5

    def close(ours, theirs):
        # Eight bits of mantissa: half a unit in the last place is 2^-9.
        np.testing.assert_allclose(ours, theirs, rtol=2**-8, atol=0)
        assert not np.array_equal(ours, theirs)

    jax.tree.map(close, got.params, params)


def test_reduced_vocabulary(export, target, drafter, probe, tmp_path):
    vocab = DraftVocab((2, 5, 9, 10, 33, 60), SPEC.vocab_size)
    small = golden.probe_from_target(target, probe.tokens_S, drafter, vocab)
    export(tmp_path / "small", draft_vocab=vocab, golden_probe=small)
    stored = safetensors.numpy.load_file(tmp_path / "small" / storage.WEIGHTS)
    assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == np.bool_
    assert stored["d2t"].tolist() == [2, 4, 7, 7, 29, 55]
    assert np.flatnonzero(stored["t2d"]).tolist() == list(vocab.target_ids)
    got = folder.read_folder(tmp_path / "small", target)
    assert got.draft_vocab == vocab
    frozen = frozen_for(target, got.draft_vocab)
    assert frozen.head_DU.shape == (24, 6)
    np.testing.assert_array_equal(
        frozen.head_DU, target.params["params"]["head"][:, list(vocab.target_ids)]
    )
    round_ = safetensors.numpy.load_file(tmp_path / "small" / storage.GOLDEN)
    assert set(round_["draft_tokens"].ravel()) <= set(vocab.target_ids)
    with pytest.raises(UserError, match="same draft vocabulary"):
        export(tmp_path / "mixed", draft_vocab=vocab, golden_probe=probe)


def change_weights(path, change):
    tensors = safetensors.numpy.load_file(path / storage.WEIGHTS)
    change(tensors)
    safetensors.numpy.save_file(tensors, path / storage.WEIGHTS)


def test_vocabulary_maps_that_disagree(whole, target, tmp_path):
    vocab = DraftVocab((2, 5, 9), SPEC.vocab_size)
    path = foreign(whole, tmp_path)

    def put(d2t, t2d):
        def change(tensors):
            for name, array in (("d2t", d2t), ("t2d", t2d)):
                tensors.pop(name, None)
                if array is not None:
                    tensors[name] = array

        change_weights(path, change)

    put(vocab.offsets(), vocab.kept())
    assert folder.read_folder(path, target).draft_vocab == vocab
    put(np.asarray(vocab.target_ids, np.int64), vocab.kept())  # ids, not offsets
    with pytest.raises(UserError, match="d2t and t2d disagree"):
        folder.read_folder(path, target)
    put(vocab.offsets(), None)
    with pytest.raises(UserError, match="lacks tensor t2d"):
        folder.read_folder(path, target)
    put(vocab.offsets(), vocab.kept()[:-1])
    with pytest.raises(UserError, match=r"t2d is bool of shape \(60,\)"):
        folder.read_folder(path, target)


FOREIGN_TARGETS = {
    "target_fingerprint": {"fingerprint": "0" * 64},
    "vocab_size": {"vocab_size": 62},
    "hidden_size": {"hidden_size": 32},
    "num_target_layers": {"num_layers": 6},
    "template_hash": {"chat_template": ChatTemplate("{{ other }}")},
    "tokenizer_hash": {},
}


@pytest.mark.parametrize("field", FOREIGN_TARGETS)
def test_foreign_targets_are_refused(field, whole, other_target, target):
    changes = dict(FOREIGN_TARGETS[field])
    if field == "tokenizer_hash":
        changes["tokenizer"] = tokenizer.from_json(
            target.tokenizer.json_text.replace('"z"', '"zz"')
        )
    with pytest.raises(UserError, match=f"{field} is ") as error:
        folder.read_folder(whole, other_target(**changes))
    assert "\n" not in str(error.value)


CONTRACT_FIELDS = {
    "layer_ids": [0, 3],
    "mask_id": 4,
    "num_draft": 3,
    "anchor_predicts": True,
    "capture_point": "layer_input",
    "teacher_point": "pre_final_norm",
}


@pytest.mark.parametrize("field", CONTRACT_FIELDS)
def test_contract_and_configuration_must_agree(field, whole, target, tmp_path):
    path = copy(whole, tmp_path)
    edit_json(
        path / storage.CONTRACT, lambda c: c.update({field: CONTRACT_FIELDS[field]})
    )
    seal(path)
    with pytest.raises(UserError, match=f"{field} is "):
        folder.read_folder(path, target)


def test_folders_of_other_packages(whole, target, drafter, params, tmp_path):
    path = foreign(whole, tmp_path)
    got = folder.read_folder(path, target, num_anchors=drafter.options.num_anchors)
    assert got.drafter.options == drafter.options
    assert got.golden_max_abs is None
    assert any("contract.json" in note for note in got.notes)
    assert got.contract.target_fingerprint == target.fingerprint
    change_weights(
        path,
        lambda t: t.update({f"model.{name}": t.pop(name) for name in list(t)}),
    )
    jax.tree.map(
        np.testing.assert_array_equal, folder.read_folder(path, target).params, params
    )
    # Shards.
    tensors = safetensors.numpy.load_file(path / storage.WEIGHTS)
    os.remove(path / storage.WEIGHTS)
    weight_map = {
        name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for part in set(weight_map.values()):
        safetensors.numpy.save_file(
            {n: t for n, t in tensors.items() if weight_map[n] == part}, path / part
        )
    (path / storage.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(
        np.testing.assert_array_equal, folder.read_folder(path, target).params, params
    )
    os.remove(path / "part-1.safetensors")
    with pytest.raises(UserError, match=r"lacks part-1\.safetensors"):
        folder.read_folder(path, target)


def test_nested_values_come_first(whole, target, tmp_path):
    path = foreign(whole, tmp_path)

    def change(config):
        config["block_size"] = 9
        config["target_layer_ids"] = [0, 2]

    edit_json(path / storage.CONFIG, change)
    got = folder.read_folder(path, target)
    assert got.drafter.layout.block_size == 5
    assert got.drafter.needs.layer_ids == (1, 3)
    assert sum("dflash_config" in note for note in got.notes) == 2

    def flat(config):
        del config["dflash_config"]

    edit_json(path / storage.CONFIG, flat)
    got = folder.read_folder(path, target)
    assert got.drafter.layout.block_size == 9
    assert got.drafter.needs.layer_ids == (0, 2)


REFUSED = {
    "attention_bias": True,
    "output_multiplier": 2.0,
    "final_logit_softcapping": 30.0,
    "partial_rotary_factor": 0.5,
    "attention_sink_bias": True,
    "attention_value_scale": 0.7,
    "input_embedding_scale": 3.0,
    "hidden_act": "swigluoai",
    "conv_kernel_size": 3,
    "selector_top_k": 8,
    "markov_rank": 64,
    "quantization_config": {"bits": 4},
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_theta": 10000.0,
    "architectures": ["DominoDraftModel"],
    "model_type": "llama",
    "use_sliding_window": False,
    "sliding_window": 0,
    "layer_types": ["full_attention", "linear_attention"],
    "num_hidden_layers": "2",
    "is_causal": "yes",
    "num_attention_heads": 5,
}


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_settings_are_refused_by_name(key, whole, target, tmp_path):
    path = foreign(whole, tmp_path)
    edit_json(path / storage.CONFIG, lambda c: c.update({key: REFUSED[key]}))
    name = "num_heads" if key == "num_attention_heads" else key
    with pytest.raises(UserError, match=name) as error:
        folder.read_folder(path, target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output_multiplier", 0.5),
        ("final_logit_softcapping", 15.0),
        ("selector_rank", 32),
        ("markov_head_type", "gated"),
        ("causal_shift", 1),
        ("block_size", 1),
        ("mask_token_id", 61),
        ("mask_token_id", -1),
        ("target_layer_ids", [1, 4]),
        ("target_layer_ids", [3, 1]),
        ("num_target_layers", 7),
    ],
)
def test_nested_settings_are_refused_by_name(key, value, whole, target, tmp_path):
    path = foreign(whole, tmp_path)
    edit_json(path / storage.CONFIG, lambda c: c["dflash_config"].update({key: value}))
    name = "layer_ids" if key == "target_layer_ids" else key
    with pytest.raises(UserError, match=name):
        folder.read_folder(path, target)


@pytest.mark.parametrize(
    "key", ["head_dim", "rms_norm_eps", "num_key_value_heads", "intermediate_size"]
)
def test_missing_settings_are_refused(key, whole, target, tmp_path):
    path = foreign(whole, tmp_path)
    edit_json(path / storage.CONFIG, lambda c: c.pop(key))
    with pytest.raises(UserError, match=f"lacks {key}"):
        folder.read_folder(path, target)


def test_rotary_base_is_never_guessed(whole, target, tmp_path):
    path = foreign(whole, tmp_path)
    edit_json(path / storage.CONFIG, lambda c: c.pop("rope_theta"))
    assert folder.read_folder(path, target).drafter.options.rope_theta == 7000.0
    edit_json(path / storage.CONFIG, lambda c: c.pop("rope_parameters"))
    with pytest.raises(UserError, match="neither rope_parameters nor rope_theta"):
        folder.read_folder(path, target)


def test_mask_token_as_text(whole, target, tmp_path):
    path = foreign(whole, tmp_path)

    def change(config):
        del config["mask_token_id"]
        del config["dflash_config"]["mask_token_id"]
        config["dflash_config"]["mask_token"] = "<mask>"

    edit_json(path / storage.CONFIG, change)
    assert folder.read_folder(path, target).contract.mask_id == 3
    edit_json(path / storage.CONFIG, lambda c: c["dflash_config"].pop("mask_token"))
    with pytest.raises(UserError, match="lacks mask_token_id"):
        folder.read_folder(path, target)


def test_causality_is_written_when_it_deviates(export, drafter, target, tmp_path):
    options = dataclasses.replace(drafter.options, is_causal=False)
    other = type(drafter)(**{**vars(drafter), "options": options})
    export(tmp_path / "drafter", drafter=other, golden_probe=None)
    config = json.loads((tmp_path / "drafter" / storage.CONFIG).read_text())
    assert config["is_causal"] is False
    got = folder.read_folder(tmp_path / "drafter", target)
    assert got.drafter.options.is_causal is False


def test_serving_fewer_drafts_but_never_more(whole, target):
    got = folder.read_folder(whole, target, num_draft=2)
    assert got.drafter.layout.block_size == 3
    assert got.golden_max_abs is not None
    with pytest.raises(ValueError, match=r"num_draft=5 is more than the 4"):
        folder.read_folder(whole, target, num_draft=5)


FILES = (
    storage.CONFIG,
    storage.WEIGHTS,
    storage.CONTRACT,
    storage.GOLDEN,
    storage.MANIFEST,
)


@pytest.mark.parametrize("name", FILES)
def test_torn_folders_are_refused(name, whole, target, tmp_path):
    path = copy(whole, tmp_path)
    content = (path / name).read_bytes()
    os.remove(path / name)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        folder.read_folder(path, target)
    (path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        folder.read_folder(path, target)
    if name != storage.MANIFEST:
        flipped = bytearray(content)
        flipped[-5] ^= 1
        (path / name).write_bytes(flipped)
        with pytest.raises(UserError, match="sha256 differs"):
            folder.read_folder(path, target)


def test_torn_weights_without_a_manifest(whole, target, tmp_path):
    path = foreign(whole, tmp_path)
    content = (path / storage.WEIGHTS).read_bytes()
    (path / storage.WEIGHTS).write_bytes(content[:-100])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        folder.read_folder(path, target)
    os.remove(path / storage.WEIGHTS)
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        folder.read_folder(path, target)
    with pytest.raises(UserError, match="is not there"):
        folder.read_folder(tmp_path / "nowhere", target)


def test_a_golden_round_of_other_weights_is_refused(whole, target, tmp_path):
    path = copy(whole, tmp_path)
    change_weights(path, lambda t: t.update({"norm.weight": t["norm.weight"] * 1.1}))
    seal(path)
    with pytest.raises(UserError, match="golden round differs"):
        folder.read_folder(path, target)


class Killed(BaseException):
    """Stands for a signal in the middle of an export."""


@pytest.mark.parametrize("call", range(5))
def test_interrupted_export_leaves_the_old_one(
    call, export, whole, target, params, tmp_path, monkeypatch
):
    """Killed before any of the five files: nothing new, nothing changed."""
    path = copy(whole, tmp_path)
    before = {name: (path / name).read_bytes() for name in FILES}
    write, calls = writer.files_lib.write_atomically, iter(range(5))

    def stop(file, content):
        if next(calls) == call:
            write(file, content[: len(content) // 2])
            raise Killed
        write(file, content)

    monkeypatch.setattr(writer.files_lib, "write_atomically", stop)
    for place in (path, tmp_path / "fresh"):
        calls = iter(range(5))
        with pytest.raises(Killed):
            export(place, params=jax.tree.map(lambda x: x * 2, params))
    assert {name: (path / name).read_bytes() for name in FILES} == before
    # Nothing half-written stands where a reader looks.
    assert sorted(os.listdir(tmp_path)) == ["drafter"]


def test_a_hard_kill_leaves_only_a_hidden_folder(export, target, tmp_path, monkeypatch):
    """SIGKILL runs no clean-up: the half folder has another name and no manifest."""
    monkeypatch.setattr(writer.shutil, "rmtree", lambda *args, **kwargs: None)
    write = writer.files_lib.write_atomically

    def stop(file, content):
        if file.endswith(storage.GOLDEN):
            raise Killed
        write(file, content)

    monkeypatch.setattr(writer.files_lib, "write_atomically", stop)
    with pytest.raises(Killed):
        export(tmp_path / "drafter")
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".drafter.writing-")
    with pytest.raises(UserError, match="is not there"):
        folder.read_folder(tmp_path / "drafter", target)
    with pytest.raises(UserError, match="not whole"):
        folder.read_folder(tmp_path / left, target)


def test_exports_replace_exports_only(export, target, params, tmp_path):
    path = tmp_path / "drafter"
    export(path, golden_probe=None)
    doubled = jax.tree.map(lambda x: x * 2, params)
    export(path, params=doubled, golden_probe=None)
    got = folder.read_folder(path, target)
    jax.tree.map(np.testing.assert_array_equal, got.params, doubled)
    assert any("golden" in note for note in got.notes)
    assert sorted(os.listdir(tmp_path)) == ["drafter"]
    other = tmp_path / "notes"
    other.mkdir()
    (other / "keep.txt").write_text("mine")
    with pytest.raises(UserError, match="not an exported drafter"):
        export(other, golden_probe=None)
    with pytest.raises(UserError, match="is a file"):
        export(other / "keep.txt", golden_probe=None)
    assert (other / "keep.txt").read_text() == "mine"


def test_what_must_not_be_exported(export, drafter, contract, tmp_path):
    path = tmp_path / "drafter"
    with pytest.raises(UserError, match="num_draft is 3, expected 4"):
        export(path, contract=dataclasses.replace(contract, num_draft=3))
    with pytest.raises(UserError, match=r"export\.dtype is 'int8'"):
        export(path, dtype="int8")
    with pytest.raises(UserError, match="made for 9 target tokens"):
        export(path, draft_vocab=DraftVocab((1, 2), 9))

    def skewed(params, frozen, batch, key):
        out = drafter.train_outputs(params, frozen, batch, key)
        return out.replace(hidden_XMD=out.hidden_XMD * 1.01)

    with pytest.raises(UserError, match="training-time and serving-time"):
        export(path, drafter=dataclasses.replace(drafter, train_outputs=skewed))
    assert os.listdir(tmp_path) == []


def test_frozen_for(target):
    full = frozen_for(target)
    assert full.target_ids_U is None
    assert full.head_DU is target.params["params"]["head"]
    with pytest.raises(UserError, match="made for 9 target tokens"):
        frozen_for(target, DraftVocab((1, 2), 9))
