"""Reported log-probabilities: the target's own log-softmax, for every token."""

import dataclasses

import pytest

from spec_jax.core.errors import UserError
from spec_jax.decode import request
from spec_jax.decode.options import EngineOptions, alternatives
from spec_jax.decode.request import Settings, check_features
from tests.support import asking, tiny

SETTINGS = [
    Settings(20, logprobs=True, top_logprobs=3),
    Settings(20, temperature=0.7, top_k=3, seed=1, logprobs=True, top_logprobs=1),
    Settings(20, temperature=1.6, min_p=0.1, seed=2, logprobs=True),
    Settings(20, presence_penalty=1.5, logit_bias=((4, 3.0),), logprobs=True),
    Settings(20, logprobs=True, speculate=False, top_logprobs=2),
    Settings(20),
]


def test_equal_a_teacher_forced_log_softmax():
    """Prefill's token, accepted drafts, corrections and bonuses alike."""
    engine = asking.engine()
    prompts = tiny.prompts_of(len(SETTINGS), 23, seed=30)
    made = engine.generate(prompts, SETTINGS)
    for settings, generation in zip(SETTINGS, made, strict=True):
        if not settings.logprobs:
            assert generation.logprobs == [] and generation.top_logprobs == []
            continue
        assert len(generation.tokens) == 20
        asking.check_logprobs(generation, settings)
    # Every way a token comes about was among them.
    drafts = [
        pair for g in made[:3] for pair in zip(g.accepted, g.drafted, strict=True)
    ]
    assert any(r == d for r, d in drafts) and any(0 < r < d for r, d in drafts)


def test_asking_changes_no_token():
    engine = asking.engine()
    prompts = tiny.prompts_of(4, 23, seed=31)
    quiet = engine.generate(prompts, asking.SAMPLED)
    asked = dataclasses.replace(asking.SAMPLED, logprobs=True, top_logprobs=2)
    assert [g.tokens for g in engine.generate(prompts, asked)] == [
        g.tokens for g in quiet
    ]


def test_refused_where_not_built():
    engine = tiny.engine("bigram", 3, slots=3, buckets=(7, 64))
    with pytest.raises(UserError, match=r"logprobs .* EngineOptions\.logprobs"):
        engine.submit([1], Settings(8, logprobs=True))
    with pytest.raises(UserError, match="top_logprobs=4 .* it has 3"):
        asking.engine().submit([1], Settings(8, logprobs=True, top_logprobs=4))
    with pytest.raises(UserError, match="logprobs=True"):
        Settings(top_logprobs=2)


def test_alternatives_have_a_bound():
    """The house's for everyone, and the target's vocabulary."""
    most = request.NUM_TOP_LOGPROBS
    for count in (most + 1, 100_000):
        with pytest.raises(UserError, match=f"top_logprobs={count} .* most {most}"):
            Settings(logprobs=True, top_logprobs=count)
        with pytest.raises(UserError, match=f"EngineOptions.logprobs={count}"):
            EngineOptions(logprobs=count)
    small = tiny.spec_of(vocab=7)
    assert alternatives(EngineOptions(logprobs=most), small) == 7
    assert alternatives(EngineOptions(logprobs=3), small) == 3
    assert alternatives(EngineOptions(), small) is None
    offer = dataclasses.replace(asking.engine().offer, vocab_size=7, logprobs=7)
    with pytest.raises(UserError, match="top_logprobs=8 is more than the target's 7"):
        check_features(Settings(logprobs=True, top_logprobs=8), offer)
    check_features(Settings(logprobs=True, top_logprobs=7), offer)
