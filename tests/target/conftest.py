"""Fixtures of the target's tests."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from spec_jax.target import tokenizer


@pytest.fixture
def prefix_space_tokenizer():
    """The older kind: a space before every text, bytes for unknown characters."""
    vocab = {"<unk>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + list("▁hisaner"):
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
        ]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer.from_json(backend.to_str())
