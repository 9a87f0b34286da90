"""Every kind of drafter: names, configuration, weights and golden round."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from spec_jax.core.errors import UserError
from spec_jax.export import golden, names, registry, shared, storage, writer

from .conftest import KINDS, SPEC, VOCAB, read

WEIGHTED = [kind for kind in KINDS if kind != "lookup"]
each = pytest.mark.parametrize("kind", KINDS)
weighted = pytest.mark.parametrize("kind", WEIGHTED)


def config_of(path):
    return json.loads((path / storage.CONFIG).read_text())


def stored_in(path):
    return safetensors.numpy.load_file(path / storage.WEIGHTS)


def expected_options(drafter):
    """The drafter's options, those of training alone as a reader finds them."""
    options = drafter.options
    fresh = type(options)()
    training = ("feature_noise", "selector_stop_gradient", "confidence_detach")
    changes = {n: getattr(fresh, n) for n in training if hasattr(options, n)}
    return dataclasses.replace(options, **changes)


@each
def test_round_trip_bit_for_bit(kind, make, whole_of, target):
    made, path = make(kind), whole_of(kind)
    got = read(path, target, num_anchors=None if kind == "lookup" else 3)
    assert got.drafter.name == made.drafter.name
    assert got.drafter.options == expected_options(made.drafter)
    assert got.drafter.layout == made.drafter.layout
    assert got.contract == made.contract
    assert got.notes == ()
    assert jax.tree.structure(got.params) == jax.tree.structure(made.params)
    jax.tree.map(np.testing.assert_array_equal, got.params, made.params)
    if kind == "lookup":
        assert got.golden_max_abs is None and stored_in(path) == {}
    else:
        assert got.golden_max_abs <= 1e-5


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "dflash2"])
def test_bfloat16_is_the_rounded_tree(kind, make, target, tmp_path):
    made = make(kind)
    made.write(tmp_path / "half", dtype="bfloat16")
    stored = stored_in(tmp_path / "half")
    assert {str(w.dtype) for n, w in stored.items() if n not in (names.D2T, names.T2D)}
    assert config_of(tmp_path / "half")["dtype"] == "bfloat16"
    got = read(tmp_path / "half", target)
    assert got.golden_max_abs <= 1e-5
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(
            ours, theirs, rtol=2**-8, atol=0
        ),
        got.params,
        made.params,
    )


@pytest.mark.parametrize("kind", ["eagle3", "dflash2"])
def test_reduced_vocabulary(kind, make, whole_of, target):
    made, path = make(kind, VOCAB), whole_of(kind, VOCAB)
    stored, config = stored_in(path), config_of(path)
    assert stored[names.D2T].dtype == np.int64
    assert stored[names.T2D].dtype == np.bool_
    ids = np.arange(VOCAB.size) + stored[names.D2T]
    assert tuple(ids) == VOCAB.target_ids
    assert tuple(np.flatnonzero(stored[names.T2D])) == VOCAB.target_ids
    assert config["draft_vocab_size"] == VOCAB.size
    table = registry.FORMS[kind].table
    if table is not None:
        assert stored[table].shape[0] == VOCAB.size
    got = read(path, target)
    assert got.draft_vocab == VOCAB and got.notes == ()
    assert got.golden_max_abs <= 1e-5
    jax.tree.map(np.testing.assert_array_equal, got.params, made.params)
    drafted = golden.serve(got.drafter, got.params, made.probe).tokens_KM
    assert set(drafted.ravel()) <= set(VOCAB.target_ids)


LAYER = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
LAYER += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
LAYER += ["post_attention_layernorm.weight"]
BACKBONE = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}"
    for i in (0, 1)
    for name in [
        *LAYER,
        "input_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    ]
}
MARKOV = {f"markov_head.markov_w{i}.weight" for i in (1, 2)}
CONFIDENCE = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
SELECTOR = {
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "candidate_selector.hidden_projection.weight",
}
CONV = {
    f"layers.{i}.{place}_conv.{name}"
    for i in (0, 1)
    for place in ("attention", "mlp")
    for name in ("base_kernel", "kernel_projection.weight")
}
EAGLE3 = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
EAGLE3 |= {f"midlayer.{n}" for n in [*LAYER, "input_layernorm.weight"]}
EAGLE3 |= {"midlayer.hidden_norm.weight"}
EAGLE = {"fc.weight", "fc.bias"} | {f"layers.0.{name}" for name in LAYER}
PUBLIC = {
    "eagle": EAGLE,
    "eagle without bias": EAGLE,
    "eagle3": EAGLE3,
    "eagle3, five normed layers": EAGLE3 | {f"fc_norm.{i}.weight" for i in range(4)},
    "dflash": BACKBONE,
    "dspark": BACKBONE | MARKOV | CONFIDENCE,
    "dspark, gated": BACKBONE
    | MARKOV
    | CONFIDENCE
    | {f"markov_head.gate_proj.{p}" for p in ("weight", "bias")},
    "dspark, rnn": BACKBONE
    | MARKOV
    | CONFIDENCE
    | {f"markov_head.joint_proj.{p}" for p in ("weight", "bias")},
    "dspark, no confidence": BACKBONE | MARKOV,
    "dflash2": BACKBONE | CONV | SELECTOR,
}
SHAPES = {
    "eagle": {"fc.weight": (24, 48), "layers.0.self_attn.q_proj.weight": (40, 24)},
    "eagle3": {
        "fc.weight": (24, 72),
        "midlayer.self_attn.q_proj.weight": (40, 48),
        "midlayer.self_attn.k_proj.weight": (20, 48),
        "lm_head.weight": (61, 24),
        "d2t": (61,),
        "t2d": (61,),
    },
    "dspark": {
        "markov_head.markov_w1.weight": (61, 6),
        "markov_head.markov_w2.weight": (61, 6),
        "confidence_head.proj.weight": (1, 30),
        "confidence_head.proj.bias": (1,),
    },
    "dspark, gated": {"markov_head.gate_proj.weight": (6, 30)},
    "dspark, rnn": {"markov_head.joint_proj.weight": (18, 36)},
    "dspark, narrow confidence": {"confidence_head.proj.weight": (1, 24)},
    "dflash2": {
        "layers.1.mlp_conv.base_kernel": (2, 2, 24),
        "layers.1.attention_conv.kernel_projection.weight": (16, 24),
        "candidate_selector.successor_codebook": (61, 6),
        "candidate_selector.hidden_projection.weight": (6, 24),
    },
}


@pytest.mark.parametrize("kind", PUBLIC)
def test_public_names_and_shapes(kind, whole_of):
    stored = stored_in(whole_of(kind))
    assert set(stored) == PUBLIC[kind]
    for name, shape in SHAPES.get(kind, {}).items():
        assert stored[name].shape == shape, name


def test_eagle_without_a_bias_writes_zeros(whole_of, target, tmp_path):
    kind = "eagle without bias"
    stored = stored_in(whole_of(kind))
    assert stored["fc.bias"].shape == (24,) and not stored["fc.bias"].any()
    got = read(whole_of(kind), target)
    assert got.drafter.options.bias is False
    assert "fc_bias" not in got.params["params"]
    path = foreign(whole_of(kind), tmp_path)
    change(path, lambda t: t.update({"fc.bias": np.ones(24, np.float32)}))
    with pytest.raises(UserError, match=r"fc\.bias is not 0 everywhere"):
        read(path, target)


def test_configurations_say_it_where_every_reader_looks(whole_of):
    eagle = config_of(whole_of("eagle"))
    assert eagle["architectures"] == ["LlamaForCausalLMEagle"]
    assert eagle["bias"] is True and eagle["num_hidden_layers"] == 1
    eagle3 = config_of(whole_of("eagle3"))
    assert eagle3["architectures"] == ["LlamaForCausalLMEagle3"]
    ids = eagle3["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [0, 1, 3] and eagle3["num_aux_hidden_states"] == 3
    assert eagle3["draft_vocab_size"] == SPEC.vocab_size
    assert eagle3["tie_word_embeddings"] is False
    assert "norm_output" not in eagle3 and "fc_norm" not in eagle3
    assert config_of(whole_of("eagle3, five normed layers"))["fc_norm"] is True
    dspark = config_of(whole_of("dspark"))
    assert dspark["architectures"] == ["Qwen3DSparkModel"]
    assert dspark["sample_from_anchor"] is True
    for scope in (dspark, dspark["dflash_config"]):
        assert scope["block_size"] == 4 and scope["mask_token_id"] == 3
        assert scope["markov_rank"] == 6 and scope["markov_head_type"] == "vanilla"
        assert scope["enable_confidence_head"] is True
        assert scope["confidence_head_with_markov"] is True
    second = json.loads((whole_of("dspark") / "config.specforge.json").read_text())
    assert second["architectures"] == ["DSparkDraftModel"]
    assert second["auto_map"] == {"AutoModel": "dspark.DSparkDraftModel"}
    dflash2 = config_of(whole_of("dflash2"))
    assert dflash2["architectures"] == ["DFlash2DraftModel"]
    sizes = {
        "conv_kernel_size": 2,
        "conv_group_size": 6,
        "selector_rank": 6,
        "selector_top_k": 5,
    }
    assert sizes.items() <= dflash2["dflash_config"].items()
    assert not set(sizes) & set(dflash2)
    assert dflash2["dflash_config"]["block_size"] == dflash2["block_size"] == 5
    for kind in WEIGHTED:
        config = config_of(whole_of(kind))
        assert config["head_dim"] == 10
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 7000.0
        assert not {"partial_rotary_factor", "quantization_config"} & set(config)


@weighted
def test_training_and_serving_logits_agree(kind, make):
    made = make(kind)
    if made.drafter.options.__dict__.get("final_logit_softcapping"):
        pytest.skip("a capped drafter is not trained here")
    drafter = writer._without_noise(made.drafter, SPEC)
    assert golden.parity_max_abs(drafter, made.params, made.probe) <= 1e-4


def test_logits_agree_where_a_trained_selector_does_not_draft(make):
    made = make("dflash2")
    options = dataclasses.replace(made.drafter.options, use_selector=False)
    unary = shared.make_drafter("dflash2", options, SPEC)
    assert golden.parity_max_abs(unary, made.params, made.probe) <= 1e-4


def test_more_than_one_row_is_compared(make):
    """The chain that serving chose is what training followed: three rows of EAGLE-3."""
    made = make("eagle3")
    served = golden.serve(made.drafter, made.params, made.probe)
    follow, _ = golden.train(made.drafter, made.params, made.probe, served.tokens_KM)
    text, _ = golden.train(made.drafter, made.params, made.probe)
    assert follow.shape[1] == 3
    assert np.abs(follow - served.logits_KMU[:, :3]).max() <= 1e-4
    assert np.abs(text - served.logits_KMU[:, :3])[:, 1:].max() > 1e-2


@weighted
def test_every_leaf_is_in_the_golden_round(kind, make, whole_of, target):
    """Doubling one leaf's largest entry is noticed, whichever leaf it is."""
    made, path = make(kind), whole_of(kind)
    round_ = safetensors.numpy.load_file(path / storage.GOLDEN)
    leaves = names.flatten(made.params)
    for name in leaves:
        changed = dict(leaves)
        changed[name] = leaves[name] * 1.5 + 0.3
        with pytest.raises(UserError, match="golden round differs"):
            golden.check(
                round_,
                made.drafter,
                names.unflatten(changed),
                made.probe.frozen,
                f"{kind} with another {name}",
            )


def foreign(whole, tmp_path):
    """The folder as another package would have written it: no contract."""
    path = shutil.copytree(whole, tmp_path / "drafter")
    for name in (storage.CONTRACT, storage.MANIFEST, storage.GOLDEN):
        (path / name).unlink(missing_ok=True)
    return path


def change(path, edit):
    tensors = stored_in(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path / storage.WEIGHTS)


def configure(path, edit):
    config = config_of(path)
    edit(config)
    (path / storage.CONFIG).write_text(json.dumps(config))


@weighted
def test_folders_without_a_contract(kind, make, whole_of, target, tmp_path):
    made, path = make(kind), foreign(whole_of(kind), tmp_path)
    got = read(path, target)
    assert got.drafter.options == expected_options(made.drafter)
    jax.tree.map(np.testing.assert_array_equal, got.params, made.params)
    *ids, contract, rest = got.notes
    assert "contract.json" in contract and "no golden round" in rest
    assert bool(ids) == bool(got.drafter.needs.layer_ids)
    assert all("is taken as layer outputs" in note for note in ids)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_folder_that_does_not_say_how_many_serves_any_number(
    kind, whole_of, target, tmp_path
):
    """Its own default is nobody's training; where one is said, it bounds."""
    said = shutil.copytree(whole_of(kind), tmp_path / "said")
    assert read(said, target, num_draft=2).drafter.layout.num_draft == 2
    with pytest.raises(UserError, match="num_draft=9 is more than the 4"):
        read(said, target, num_draft=9)
    path = foreign(whole_of(kind), tmp_path)
    configure(path, lambda c: c.pop("spec_jax"))
    for size_m in (2, 9):
        got = read(path, target, num_draft=size_m)
        assert got.drafter.layout.num_draft == size_m
        assert any(f"it serves {size_m} drafts a round" in n for n in got.notes)
        assert not any("trained for" in n for n in got.notes)
    with pytest.raises(UserError, match="num_draft=0"):
        read(path, target, num_draft=0)


@weighted
def test_every_missing_extra_and_misshaped_tensor_is_named(kind, make, whole_of):
    made = make(kind)
    plan = shared.plan_of(made.drafter, registry.form_of(made.drafter))
    whole = stored_in(whole_of(kind))
    whole = {name: whole[name] for name in plan.tensors}
    for name, tensor in whole.items():
        for other, says in (
            (None, f"lacks tensor {name};"),
            (np.concatenate([tensor, tensor[:1]]), f"tensor {name} has shape"),
            (tensor * np.float32(np.nan), f"tensor {name} is not finite"),
        ):
            content = {k: v for k, v in whole.items() if k != name}
            if other is not None:
                content[name] = other
            with pytest.raises(UserError, match=says):
                names.from_public(plan, content, "folder x")
    extra = whole | {"layers.7.mlp.up_proj.weight": np.ones((3, 3), np.float32)}
    with pytest.raises(UserError, match=r"has unknown tensor layers\.7"):
        names.from_public(plan, extra, "folder x")


def test_untrained_weights_are_said(make, target, tmp_path):
    made = make("dflash2")
    fresh = made.drafter.init(jax.random.key(0))
    written = made.write(tmp_path / "fresh", params=fresh, golden_probe=None)
    assert "candidate_selector.successor_codebook" in written.notes[0]
    assert "before training" in written.notes[0]
    notes = read(tmp_path / "fresh", target).notes
    assert any("candidate_selector.successor_codebook" in note for note in notes)
    trained = make("dspark").write(tmp_path / "trained", golden_probe=None)
    assert trained.notes == ()


def test_weights_that_are_not_finite_are_not_written(make, tmp_path):
    made = make("eagle3")
    leaves = names.flatten(made.params)
    leaves["layer/out"] = leaves["layer/out"].at[0, 0].set(np.inf)
    with pytest.raises(UserError, match="layer/out is not finite"):
        made.write(tmp_path / "x", params=names.unflatten(leaves))


def test_vocabularies_that_do_not_fit_are_refused(make, target, tmp_path):
    full = make("eagle3")
    probe = golden.probe_from_target(target, full.probe.tokens_S, full.drafter, VOCAB)
    with pytest.raises(UserError, match="draft_vocab_size=61 but 15 tokens"):
        full.write(tmp_path / "x", draft_vocab=VOCAB, golden_probe=probe)
    made = make("dspark", VOCAB)
    made.write(tmp_path / "y", golden_probe=None)
    path = foreign(tmp_path / "y", tmp_path)
    name = "markov_head.markov_w2.weight"
    change(path, lambda t: t.update({name: t[name][:-1]}))
    with pytest.raises(UserError, match=r"markov_w2\.weight has 14 rows"):
        read(path, target)


def test_a_shared_embedding_for_readers_that_want_one(
    make, target, other_target, tmp_path
):
    made = make("eagle3")
    tree = target.params["params"]
    made.write(tmp_path / "hf", embed_VD=tree["embed"], dtype="bfloat16")
    assert stored_in(tmp_path / "hf")["embed_tokens.weight"].shape == (61, 24)
    got = read(tmp_path / "hf", target)
    assert "embed_tokens.weight is a copy" in got.notes[0]
    other = {"params": tree | {"embed": tree["embed"] * 1.1}}
    with pytest.raises(UserError, match=r"embed_tokens\.weight is not a copy"):
        read(tmp_path / "hf", other_target(params=other), run_golden=False)


@weighted
def test_fewer_drafts_are_served_and_said(kind, whole_of, target):
    got = read(whole_of(kind), target, num_draft=2, run_golden=False)
    assert got.drafter.layout.num_draft == 2
    assert got.contract.num_draft == 4
    assert "serves 2 of the 4 drafts" in got.notes[0]
    with pytest.raises(ValueError, match="more than the 4"):
        read(whole_of(kind), target, num_draft=5)
