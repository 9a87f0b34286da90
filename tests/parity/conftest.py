"""Seeded models of the public torch packages, and ours read from their folders.

These tests run under `make parity`, in an environment of their own.
"""

import os
import types

import numpy as np
import pytest
import tokenizers
from tokenizers import models

VOCAB = 64
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TARGET_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **HEADS,
}


@pytest.fixture(scope="session")
def public():
    """The public packages: torch, transformers, `dflash` and `specforge`."""
    # One public class compiles its norms, which takes minutes and changes nothing.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        import torch
        import transformers
        from dflash import model as dflash_model
        from specforge.algorithms.common import dflash_family_model
        from specforge.modeling import draft as specforge_drafts
    except ImportError as error:
        pytest.fail(
            f"{error.name or error} is not installed, and this test compares with it; "
            "run `make parity`, which installs it in an environment of its own"
        )
    torch.set_num_threads(1)  # on few busy cores more threads are far slower
    torch.use_deterministic_algorithms(True)
    return types.SimpleNamespace(
        torch=torch,
        transformers=transformers,
        dflash=dflash_model,
        specforge=specforge_drafts,
        block_mask=dflash_family_model.create_dflash_sdpa_mask,
    )


def spread(public, model, seed):
    """Seeded weights at which attention and norms matter; returns the model."""
    torch = public.torch
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(noise * (1.5 / weight.shape[-1] ** 0.5))
    return model.float().eval()


def save_target(public, model, folder, **options):
    """Saves a target with a small word tokenizer, as `load_target` needs one."""
    model.save_pretrained(folder, **options)
    words = {f"w{i}": i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, "w0"))
    backend.save(str(folder / "tokenizer.json"))
    return folder


def make_target(public, family, seed, **changes):
    """A seeded target of `transformers`."""
    transformers = public.transformers
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    sizes = {
        "num_hidden_layers": 5,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": False,
        **TARGET_SIZES,
    } | changes
    return spread(public, model_class(config_class(**sizes)), seed)


def make_drafter(public, seed, model_class=None, inside=(), **changes):
    """A seeded block drafter of a public class for a target of `make_target`.

    Args:
      public: the packages.
      seed: of the weights.
      model_class: `dflash.DFlashDraftModel` without one.
      inside: further keys of `dflash_config`.
      **changes: of the configuration.
    """
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": TARGET_SIZES["hidden_size"],
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8000.0},
        "tie_word_embeddings": False,
        "num_target_layers": 5,
        "block_size": 6,
        "dflash_config": {
            "mask_token_id": 3,
            "target_layer_ids": [1, 2, 3],
            "block_size": 6,
            **dict(inside),
        },
        "layer_types": ["full_attention"] * 2,
        **HEADS,
    } | changes
    config = public.transformers.Qwen3Config(**sizes)
    config._attn_implementation = "sdpa"
    return spread(public, (model_class or public.dflash.DFlashDraftModel)(config), seed)


def their_states(public, pair, text):
    """Hidden states of the target, by transformers: embeddings first, last normed."""
    with public.torch.no_grad():
        return pair.theirs(
            public.torch.tensor(text[None].astype(np.int64)),
            output_hidden_states=True,
        ).hidden_states


def make_probe(public, pair, needs, text, anchors, vocab=None):
    """A probe of ours made from the states that transformers computed."""
    from spec_jax.drafters.frozen import frozen_for
    from spec_jax.export import golden

    states = their_states(public, pair, text)
    planes = [states[i + 1][0].numpy() for i in needs.layer_ids]
    return golden.Probe(
        text,
        np.stack(planes, 1) if planes else np.zeros((len(text), 0, needs.width)),
        states[-1][0].numpy(),
        anchors,
        frozen_for(pair.ours, vocab),
    )


def make_export(pair, name, options, text, folder_path, **changes):
    """A seeded drafter of ours, written to a folder; returns the drafter."""
    import jax

    from spec_jax.core.features import Contract
    from spec_jax.drafters import base
    from spec_jax.export import folder, golden

    drafter = base.load(name, options, pair.ours.spec)
    rng = np.random.default_rng(4)
    params = jax.tree.map(
        lambda leaf: (
            1 + 0.3 * rng.standard_normal(leaf.shape)
            if leaf.ndim == 1
            else rng.standard_normal(leaf.shape) * 1.5 / max(leaf.shape or (1,)) ** 0.5
        ).astype(np.float32),
        drafter.init(jax.random.key(0)),
    )
    vocab = changes.pop("draft_vocab", None)
    contract = Contract(
        target="seeded",
        layer_ids=drafter.needs.layer_ids,
        mask_id=getattr(drafter.options, "mask_id", -1),
        num_draft=drafter.layout.num_draft,
        anchor_predicts=drafter.layout.anchor_predicts,
        **folder.target_facts(pair.ours),
    )
    written = folder.write_folder(
        folder_path,
        drafter,
        params,
        contract,
        vocab,
        pair.ours.spec,
        golden_probe=golden.probe_from_target(pair.ours, text, drafter, vocab),
        **changes,
    )
    # None: a capped drafter is not trained here.
    assert written.parity_max_abs is None or written.parity_max_abs <= 1e-3
    return drafter


@pytest.fixture(scope="session")
def kit(public):
    """The helpers above, bound to the packages."""

    def bound(function):
        return lambda *args, **kwargs: function(public, *args, **kwargs)

    return types.SimpleNamespace(
        spread=bound(spread),
        save_target=bound(save_target),
        make_target=bound(make_target),
        make_drafter=bound(make_drafter),
        their_states=bound(their_states),
        make_probe=bound(make_probe),
        make_export=make_export,
    )


@pytest.fixture(scope="session")
def pair(public, kit, tmp_path_factory):
    """A seeded Qwen3 target: theirs, and ours read from its folder."""
    from spec_jax.target.loading import load_target

    theirs = kit.make_target("qwen3", 11)
    folder = kit.save_target(theirs, tmp_path_factory.mktemp("target"))
    cache = tmp_path_factory.mktemp("cache")
    ours = load_target(str(folder), cache_dir=str(cache))
    return types.SimpleNamespace(theirs=theirs, ours=ours)


@pytest.fixture(scope="session")
def text():
    """A fixed random text of 40 ids, none special."""
    return np.random.default_rng(17).integers(4, VOCAB, 40).astype(np.int32)
