"""Engines that were built for every request feature, and plain references.

The tokenizer spells the tiny target's 23 ids: letters, pairs of letters, and
the bytes of characters that take two and four of them.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models

from spec_jax.decode.auto_off import AutoOff
from spec_jax.decode.engine import Engine, EngineOptions
from spec_jax.decode.request import Settings
from spec_jax.target import tokenizer as tok
from tests.support import tiny

VOCAB = 23
GREEDY = Settings(max_new_tokens=24)
SAMPLED = Settings(max_new_tokens=24, temperature=1.1, seed=3)
# Byte-level spelling of the bytes of "é" (c3 a9) and of U+1F600 (f0 9f 98 80).
_PIECES = ["Ã", "©", "ð", "Ł", "ĺ", "Ģ"]
_WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "ab", "cd", "Ġ", "xyz", "x", "yz"]


@functools.cache
def tokenizer() -> tok.Tokenizer:
    """23 tokens; id 20 is special, 21 and 22 are ordinary."""
    names = [*_PIECES, *_WORDS, "<end>", "q", "r"]
    assert len(names) == VOCAB
    vocab = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<end>", special=True, normalized=False)])
    return tok.from_json(backend.to_str(), eos=20)


def world():
    return tiny.world("bigram", 3)


def new_engine(kind="bigram", *, slots=3, buckets=(7, 64), **options) -> Engine:
    """An engine with every feature, of its own (compiles)."""
    w = tiny.world(kind, 3)
    fields = {"penalties": True, "logprobs": 3} | options
    return Engine(
        w.spec,
        w.weights,
        EngineOptions(slots=slots, max_context=128, prefill_buckets=buckets, **fields),
        w.drafter,
        w.mask_id,
        tokenizer(),
    )


@functools.cache
def engine(auto_off: AutoOff | None = None) -> Engine:
    """A shared one; every test leaves it idle."""
    return new_engine(auto_off=auto_off)


def off(settings: Settings) -> Settings:
    return dataclasses.replace(settings, speculate=False)


def is_idle(made: Engine) -> bool:
    """Every slot back, on both sides, and nothing kept."""
    return (
        not made.busy
        and sorted(made._free) == list(range(made.options.slots))
        and not made._release
        and not np.asarray(made.state.slots.active_B).any()
        and not np.asarray(made.state.slots.length_B).any()
    )


def raw_logits(prompt, tokens):
    """Teacher-forced target logits `[len(tokens), V]` float64, one per token."""
    w = world()
    text = tiny.padded([[*prompt, *tokens]], 128)
    logits, _ = tiny.full_forward(w.spec, w.params, jnp.asarray(text))
    rows = np.asarray(logits)[0, len(prompt) - 1 :][: len(tokens)]
    return rows.astype(np.float64)


def penalised(logits, prompt, before, settings: Settings):
    """One row after penalties and bias, by loops over the vocabulary."""
    out = np.array(logits, np.float64)
    for v in range(len(out)):
        if v in prompt or v in before:
            out[v] *= (
                1 / settings.repetition_penalty
                if out[v] > 0
                else settings.repetition_penalty
            )
        count = list(before).count(v)
        out[v] -= settings.frequency_penalty * count
        out[v] -= settings.presence_penalty * (count > 0)
    for v, bias in dict(settings.logit_bias).items():
        out[v] += bias
    return out


def greedy_faults(generation, settings: Settings, gap=1e-4):
    """Tokens that are not the penalised argmax of a teacher-forced forward."""
    rows = raw_logits(generation.prompt, generation.tokens)
    faults = []
    for index, token in enumerate(generation.tokens):
        before = generation.tokens[:index]
        row = penalised(rows[index], generation.prompt, before, settings)
        if row.max() - row[token] > gap:
            faults.append(index)
    return faults
