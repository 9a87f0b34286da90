"""Seeded drafters of the public `specforge` package, and ours.

Its classes are run as its trainers run them: block drafters over the whole
sequence under the trainer's mask, EAGLE-3 over all columns and every step.
"""

import numpy as np
import pytest

from spec_jax.core.vocab import DraftVocab
from spec_jax.export import folder, golden, storage

pytestmark = pytest.mark.parity

ANCHORS = (1, 9, 30)
WINDOW = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 7,
}
VOCAB = DraftVocab(tuple(range(3, 64, 3)), 64)


def options_of(changes, **more):
    """Options of a block drafter of ours with the kind's layers."""
    return {
        "num_layers": 2,
        "layer_ids": (0, 2),
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 10,
        "mlp_size": 56,
        "mask_id": 5,
        "rope_theta": 3000.0,
        "norm_eps": 1e-6,
        "layer_types": tuple(changes.get("layer_types", ())),
        "sliding_window": changes.get("sliding_window"),
        "num_anchors": 1,
        **more,
    }


def from_our_folder(public, model_class, path, name=storage.CONFIG):
    """The public class built from our configuration; every tensor must land."""
    config = model_class.config_class.from_json_file(str(path / name))
    config._attn_implementation = "sdpa"
    return load_all(public, model_class(config), path)


def load_all(public, model, path):
    """The model with the folder's weights: none missing, none left over."""
    stored = storage.read_weights(str(path), "our folder")[0]
    state = {
        name: public.torch.from_numpy(np.array(tensor))
        for name, tensor in stored.items()
    }
    model.load_state_dict(state, strict=True)
    return model.float().eval()


def block_rows(public, kit, pair, drafter, text, anchor):
    """Hidden rows `[B, H]` of one block, as the trainer of the package runs it."""
    torch = public.torch
    states = kit.their_states(pair, text)
    context = torch.cat([states[i + 1] for i in drafter.target_layer_ids], -1)
    size = len(text)
    block = torch.full((1, drafter.block_size), drafter.mask_token_id)
    block[0, 0] = int(text[anchor])
    made = {
        "anchor_positions": torch.tensor([[anchor]]),
        "block_keep_mask": torch.tensor([[True]]),
        "S": size,
        "block_size": drafter.block_size,
        "device": "cpu",
    }
    mask = public.block_mask(**made)
    if drafter.sliding_window is not None:
        mask = {
            "full_attention": mask,
            "sliding_attention": public.block_mask(
                **made, sliding_window=drafter.sliding_window
            ),
        }
    positions = torch.cat(
        [torch.arange(size), anchor + torch.arange(drafter.block_size)]
    )
    with torch.no_grad():
        return drafter(
            position_ids=positions[None],
            noise_embedding=pair.theirs.get_input_embeddings()(block),
            target_hidden=context,
            attention_mask=mask,
        )


def near(ours, theirs):
    assert np.abs(np.asarray(ours) - theirs.detach().numpy()).max() <= 2e-4


def compare_dflash(public, kit, pair, theirs, exported, text):
    probe = kit.make_probe(pair, exported.drafter.needs, text, ANCHORS)
    served_KMV = golden.serving_logits(exported.drafter, exported.params, probe)
    trained_KMV = golden.training_logits(exported.drafter, exported.params, probe)
    for index, anchor in enumerate(ANCHORS):
        rows = block_rows(public, kit, pair, theirs, text, anchor)
        logits = pair.theirs.lm_head(rows)[0, 1:]
        near(served_KMV[index], logits)
        near(trained_KMV[index], logits)


@pytest.mark.parametrize("changes", [{}, WINDOW], ids=["full", "sliding and full"])
def test_dflash(changes, public, kit, pair, text, tmp_path):
    """Logits to 2e-4, both ways."""
    model_class = public.specforge.DFlashDraftModel
    theirs = kit.make_drafter(23, model_class, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    exported = folder.read_folder(tmp_path / "theirs", pair.ours, num_anchors=1)
    compare_dflash(public, kit, pair, theirs, exported, text)

    path = tmp_path / "ours"
    options = options_of(changes, num_draft=5)
    drafter = kit.make_export(pair, "dflash", options, text, path)
    back = from_our_folder(public, model_class, path)
    assert back.block_size == drafter.layout.block_size
    exported = folder.read_folder(path, pair.ours, num_anchors=1)
    compare_dflash(public, kit, pair, back, exported, text)


HEADS = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn, plain confidence": {
        "markov_head_type": "rnn",
        "confidence_head_with_markov": False,
    },
    "vanilla, no confidence": {"enable_confidence_head": False},
}


def compare_dspark(public, kit, pair, theirs, exported, text):
    """Corrected logits and confidences along the chain that ours drafted."""
    torch = public.torch
    probe = kit.make_probe(pair, exported.drafter.needs, text, ANCHORS)
    made = golden.serve(exported.drafter, exported.params, probe)
    logits_KMV, confidence_KM = golden.train(
        exported.drafter, exported.params, probe, made.tokens_KM
    )
    for index, anchor in enumerate(ANCHORS):
        rows = block_rows(public, kit, pair, theirs, text, anchor)
        chain = [int(text[anchor]), *made.tokens_KM[index, :-1].tolist()]
        before = torch.tensor([chain])
        with torch.no_grad():
            logits = theirs.apply_logits_head(
                pair.theirs.lm_head(rows), prev_token_ids=before, hidden_states=rows
            )
            confidence = theirs.predict_confidence(rows, prev_token_ids=before)
        near(made.logits_KMU[index], logits[0])
        near(logits_KMV[index], logits[0])
        assert made.tokens_KM[index].tolist() == logits[0].argmax(-1).tolist()
        if confidence is None:
            assert made.confidence_KM is None and confidence_KM is None
        else:
            near(made.confidence_KM[index], confidence[0])
            near(confidence_KM[index], confidence[0])


@pytest.mark.parametrize("heads", HEADS)
def test_dspark(heads, public, kit, pair, text, tmp_path):
    """Corrected logits, drafts and confidences, both ways."""
    model_class = public.specforge.DSparkDraftModel
    inside = {
        "projector_type": "dspark",
        "markov_rank": 10,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **HEADS[heads],
    }
    if not inside["enable_confidence_head"]:
        inside["confidence_head_with_markov"] = False
    theirs = kit.make_drafter(37, model_class, inside)
    theirs.save_pretrained(tmp_path / "theirs")
    exported = folder.read_folder(tmp_path / "theirs", pair.ours, num_anchors=1)
    assert exported.drafter.layout.num_draft == theirs.block_size
    compare_dspark(public, kit, pair, theirs, exported, text)

    path = tmp_path / "ours"
    options = options_of(
        WINDOW,
        num_draft=5,
        markov_rank=10,
        markov_head_type=inside.get("markov_head_type", "vanilla"),
        enable_confidence_head=inside["enable_confidence_head"],
        confidence_with_markov=inside["confidence_head_with_markov"],
    )
    kit.make_export(pair, "dspark", options, text, path)
    # The second configuration is the one that this package reads.
    back = from_our_folder(public, model_class, path, "config.specforge.json")
    exported = folder.read_folder(path, pair.ours, num_anchors=1)
    compare_dspark(public, kit, pair, back, exported, text)


def make_eagle3(public, kit, pair, **changes):
    """A seeded EAGLE-3 model with the target's embedding and a vocabulary map."""
    config = public.transformers.LlamaConfig(
        **{
            "architectures": ["LlamaForCausalLMEagle3"],
            "vocab_size": 64,
            "draft_vocab_size": VOCAB.size,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 8000.0},
            "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            **changes,
        }
    )
    model = kit.spread(public.specforge.LlamaForCausalLMEagle3(config), 47)
    embedding = pair.theirs.get_input_embeddings().weight
    with public.torch.no_grad():
        model.embed_tokens.weight.copy_(embedding)
        model.d2t.copy_(public.torch.from_numpy(VOCAB.offsets()))
        model.t2d.copy_(public.torch.from_numpy(VOCAB.kept()))
    return model


def eagle3_logits(public, kit, pair, model, layer_ids, tokens, steps):
    """Logits `[J, S, U]` of every column and step, tokens forced."""
    torch = public.torch
    states = kit.their_states(pair, tokens)
    size = len(tokens)
    ids = torch.tensor(tokens[None].astype(np.int64))
    low = torch.finfo(torch.float32).min
    mask = torch.full((size, size), low).triu(1)[None, None]
    cache, found = [[], []], []
    with torch.no_grad():
        hidden = model.project_hidden_states(
            torch.cat([states[i + 1] for i in layer_ids], -1)
        )
        for _ in range(steps):
            # Column t takes the token after it; one further in each step.
            ids = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
            hidden = model.backbone(
                input_embeds=model.embed_input_ids(ids),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(size)[None],
            )
            found.append(model.compute_logits(hidden)[0])
    return torch.stack(found)


def compare_eagle3(public, kit, pair, theirs, exported, text):
    needs = exported.drafter.needs
    steps = exported.drafter.layout.num_draft
    probe = kit.make_probe(pair, needs, text, ANCHORS, exported.draft_vocab)
    made = golden.serve(exported.drafter, exported.params, probe)
    trained_KJU = golden.training_logits(
        exported.drafter, exported.params, probe, made.tokens_KM
    )
    rows = trained_KJU.shape[1]
    assert rows > 1
    for index, anchor in enumerate(ANCHORS):
        # The features of the text itself, the tokens of the chain.
        tokens = np.array(text)
        tokens[anchor + 1 : anchor + 1 + steps] = made.tokens_KM[index]
        logits = eagle3_logits(
            public, kit, pair, theirs, needs.layer_ids, tokens, steps
        )[:, anchor - 1]
        near(made.logits_KMU[index], logits)
        near(trained_KJU[index], logits[:rows])
        best = logits.argmax(-1)
        drafted = best + theirs.d2t[best]
        assert made.tokens_KM[index].tolist() == drafted.tolist()


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}], ids=["3", "3.1"])
def test_eagle3(changes, public, kit, pair, text, tmp_path):
    """Logits of every step of the chain, both ways."""
    theirs = make_eagle3(public, kit, pair, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    exported = folder.read_folder(tmp_path / "theirs", pair.ours, num_anchors=1)
    assert exported.draft_vocab == VOCAB
    assert exported.drafter.options.fc_norm is bool(changes)
    compare_eagle3(public, kit, pair, theirs, exported, text)

    path = tmp_path / "ours"
    options = {
        "num_draft": 6,
        "ttt_length": 4,
        "num_starts": 1,
        "layer_ids": (1, 2, 3),
        "draft_vocab_size": VOCAB.size,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 10,
        "mlp_size": 56,
        "rope_theta": 3000.0,
        "norm_eps": 1e-6,
        **changes,
    }
    embed_VD = pair.ours.params["params"]["embed"]
    kit.make_export(
        pair, "eagle3", options, text, path, draft_vocab=VOCAB, embed_VD=embed_VD
    )
    # Its own `from_pretrained` leaves the rotary tables empty.
    config = public.transformers.LlamaConfig.from_json_file(str(path / storage.CONFIG))
    back = load_all(public, public.specforge.LlamaForCausalLMEagle3(config), path)
    exported = folder.read_folder(path, pair.ours, num_anchors=1)
    assert any("embed_tokens.weight is a copy" in note for note in exported.notes)
    compare_eagle3(public, kit, pair, back, exported, text)
