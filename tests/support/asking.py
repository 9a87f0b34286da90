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
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import EngineOptions
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
        and sorted(made.table.free) == list(range(made.options.slots))
        and not made.table.left
        and not np.asarray(made.state.slots.active_B).any()
        and not np.asarray(made.state.slots.length_B).any()
    )


def until(made: Engine, done: dict, ready, limit=200):
    """Steps until `ready()`; what finishes lands in `done`."""
    for _ in range(limit):
        if ready():
            return
        done.update(made.step())
    raise AssertionError("never ready")


def tokens_so_far(made: Engine, handle: int) -> int:
    """Booked tokens of a request that decodes in a slot; -1 elsewhere."""
    jobs = [j for j in made.table.running.values() if j.handle == handle]
    return len(jobs[0].generation.tokens) if jobs else -1


def interrupted(made: Engine, prompts, each, least=(2, 7, 12)):
    """Generations of requests that leave their slots and come back.

    Each is retracted at so many tokens, once for every one of `least` that it gets
    to before it ends, while the others run.
    """
    handles = [made.submit(p, s) for p, s in zip(prompts, each, strict=True)]
    done: dict = {}
    count = 0
    for bound in least:
        for handle in handles:

            def ready(handle=handle, bound=bound):
                return handle in done or tokens_so_far(made, handle) >= bound

            until(made, done, ready)
            count += made.retract(handle)
    assert count > 2 * len(handles)
    done.update(made.run())
    return [done[handle] for handle in handles]


def raw_logits(prompt, tokens):
    """Teacher-forced target logits `[len(tokens), V]` float64, one per token."""
    w = world()
    text = tiny.padded([[*prompt, *tokens]], 128)
    logits, _ = tiny.full_forward(w.spec, w.params, jnp.asarray(text))
    rows = np.asarray(logits)[0, len(prompt) - 1 :][: len(tokens)]
    return rows.astype(np.float64)


def log_probs(prompt, tokens):
    """`raw_logits` as log-probabilities."""
    rows = raw_logits(prompt, tokens)
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def check_logprobs(generation, settings: Settings):
    """Each token's log-probability, and its alternatives, by a forward from nothing."""
    rows = log_probs(generation.prompt, generation.tokens)
    want = rows[np.arange(len(rows)), generation.tokens]
    np.testing.assert_allclose(generation.logprobs, want, atol=1e-4)
    size = settings.top_logprobs
    assert len(generation.top_logprobs) == (len(rows) if size else 0)
    for row, top in zip(rows, generation.top_logprobs, strict=False):
        ids, values = zip(*top, strict=True)
        assert len(ids) == size
        np.testing.assert_allclose(values, row[list(ids)], atol=1e-4)
        np.testing.assert_allclose(values, np.sort(row)[::-1][:size], atol=1e-4)


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
