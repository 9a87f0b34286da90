"""A vocabulary padded beyond its tokenizer: the padding is never emitted (b28)."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.decode import forward
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.request import Settings, check_features
from tests.support import asking, tiny

REAL, V = 15, 23  # a third of the target's own mass is padding's
GREEDY = Settings(max_new_tokens=20, logprobs=True, top_logprobs=3)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.3, seed=4)


@functools.cache
def engine(num_ids=REAL):
    world = tiny.world("bigram", 3)
    options = EngineOptions(
        slots=2, max_context=128, prefill_buckets=(64,), num_ids=num_ids, logprobs=3
    )
    return Engine(world.spec, world.weights, options, world.drafter)


def test_padding_is_never_emitted():
    """Plain and speculative, greedy and sampled: the law without the padding."""
    prompts = tiny.prompts_of(4, V, seed=80)  # the padding is in some prompts
    each = [GREEDY, SAMPLED, asking.off(GREEDY), asking.off(SAMPLED)]
    made = engine().generate([prompts[0], prompts[1]] * 2, each)
    spared = 0
    for generation, settings in zip(made, each, strict=True):
        rows = asking.raw_logits(generation.prompt, generation.tokens)
        spared += int((rows.argmax(-1) >= REAL).sum())
        rows[:, REAL:] = -np.inf
        if settings.temperature == 0:
            gap = rows.max(-1) - rows[np.arange(len(rows)), generation.tokens]
            assert gap.max() < 1e-4
        assert len(generation.tokens) == 20 and max(generation.tokens) < REAL
        rows -= rows.max(-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
        want = rows[np.arange(len(rows)), generation.tokens]
        np.testing.assert_allclose(generation.logprobs, want, atol=1e-4)
        assert max(i for top in generation.top_logprobs for i, _ in top) < REAL
    assert spared > 5  # unmasked it would have come up
    assert made[0].tokens == made[2].tokens
    # Drafts that name the padding are refused, others are accepted.
    assert 0 < sum(made[0].accepted) < sum(made[0].drafted)


def test_rows_are_masked_once_and_only_where_there_is_padding():
    weights = tiny.world(None).weights
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)
    whole = forward.target_logits(weights, hidden)
    for none in (0, V):
        same = forward.target_logits(weights, hidden, none)
        np.testing.assert_array_equal(same, whole)
    cut = forward.target_logits(weights, hidden, REAL)
    np.testing.assert_array_equal(cut[..., :REAL], whole[..., :REAL])
    assert (np.asarray(cut[..., REAL:]) == -np.inf).all()


def test_requests_that_name_the_padding_are_refused():
    assert engine().offer.vocab_size == REAL
    offer = dataclasses.replace(engine().offer, penalties=True)
    with pytest.raises(
        UserError, match=f"names id {REAL}, outside the target's {REAL}"
    ):
        check_features(Settings(logit_bias={REAL: 1.0}), offer)
    with pytest.raises(UserError, match="num_ids=24 is more than the target's 23"):
        engine(num_ids=V + 1)
    with pytest.raises(UserError, match="num_ids=-1"):
        EngineOptions(num_ids=-1)
