"""A tiny random target, samples of random ids, and a store made of them."""

import functools
import types

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spec_jax.core.features import Contract, FeatureSchema
from spec_jax.data.capture import capture
from spec_jax.data.samples import Sample
from spec_jax.target import tokenizer as tokenizer_lib
from spec_jax.target.chat import ChatTemplate
from spec_jax.target.loading import Target
from spec_jax.target.model import init_params
from spec_jax.target.spec import TargetSpec

SPEC = TargetSpec(
    name="tiny",
    family="llama",
    num_layers=3,
    hidden_size=16,
    mlp_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=272,
    max_context=64,
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = FeatureSchema((0, 1), SPEC.hidden_size)
BUCKETS = (24, 48)


def make_tokenizer():
    vocab = {"<mask>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<mask>", "<|im_start|>", "<|im_end|>"])
    return tokenizer_lib.from_json(backend.to_str())


def make_target():
    return Target(
        spec=SPEC,
        params=init_params(SPEC, jax.random.key(0)),
        tokenizer=make_tokenizer(),
        chat_template=ChatTemplate(TEMPLATE),
        fingerprint="f" * 64,
    )


def make_contract(target, schema=SCHEMA, **changes):
    fields = {
        "target": target.spec.name,
        "target_fingerprint": target.fingerprint,
        "vocab_size": target.spec.vocab_size,
        "hidden_size": target.spec.hidden_size,
        "num_layers": target.spec.num_layers,
        "layer_ids": schema.layer_ids,
        "tokenizer_hash": target.tokenizer.hash,
        "template_hash": target.chat_template.hash,
        "mask_id": 0,
    }
    return Contract(**fields | changes)


def make_samples(count, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        length = int(rng.integers(8, longest + 1))
        samples.append(
            Sample(
                tokens=tuple(rng.integers(3, SPEC.vocab_size, length)),
                prompt_len=int(rng.integers(1, length - 3)),
                source=f"made:{i}",
                temperature=0.5,
                looping=i % 5 == 4,
            )
        )
    return samples


def capture_tiny(target, path, samples, schema=SCHEMA, dtype="float32", **options):
    contract = make_contract(target, schema, feature_dtype=dtype)
    options = {"batch": 3, "buckets": BUCKETS, "shard_samples": 8} | options
    return capture(target, samples, schema, str(path), contract, dtype, **options)


@pytest.fixture(scope="session")
def target():
    return make_target()


@pytest.fixture(scope="session")
def tiny(target):
    """The helpers of this file, for tests."""
    return types.SimpleNamespace(
        spec=SPEC,
        schema=SCHEMA,
        buckets=BUCKETS,
        contract=functools.partial(make_contract, target),
        samples=make_samples,
        capture=functools.partial(capture_tiny, target),
        here=__file__,
    )


@pytest.fixture(scope="session")
def store_path(target, tmp_path_factory):
    """A finished store of 20 samples in three shards; tests must not change it."""
    path = tmp_path_factory.mktemp("store") / "features"
    capture_tiny(target, path, make_samples(20))
    return str(path)
