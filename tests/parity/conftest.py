"""Seeded models of the public torch packages, and ours read from their folders.

These tests run under `make parity`, in an environment of their own.
"""

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
    """The public packages: torch, transformers and `dflash`."""
    try:
        import torch
        import transformers
        from dflash import model as dflash_model
    except ImportError as error:
        pytest.fail(
            f"{error.name or error} is not installed, and this test compares with it; "
            "run `make parity`, which installs it in an environment of its own"
        )
    torch.set_num_threads(1)  # on few busy cores more threads are far slower
    torch.use_deterministic_algorithms(True)
    return types.SimpleNamespace(
        torch=torch, transformers=transformers, dflash=dflash_model
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


def make_drafter(public, seed, **changes):
    """A seeded `DFlashDraftModel` for a target of `make_target`."""
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
        },
        "layer_types": ["full_attention"] * 2,
        **HEADS,
    } | changes
    config = public.transformers.Qwen3Config(**sizes)
    return spread(public, public.dflash.DFlashDraftModel(config), seed)


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
