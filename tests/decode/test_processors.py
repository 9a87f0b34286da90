"""Penalties, bias and filters: the same text with speculation and without."""

import dataclasses

import pytest

from spec_jax.core.errors import UserError
from spec_jax.decode.request import Settings
from tests.support import asking, tiny

FIELDS = {
    "nothing": {},
    "presence": {"presence_penalty": 1.7},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.8},
    "encouraged": {"repetition_penalty": 0.7},
    "bias": {"logit_bias": {5: 2.5, 6: -100.0, 0: 1.0}},
    "together": {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {3: -1.5},
    },
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "seed": {"seed": 7},
    "stop_ids": {"stop_ids": (4, 9)},
    "stop": {"stop": ("a", "cd")},
    "logprobs": {"logprobs": True},
    "window 0": {"num_draft": 0},
    "window 2": {"num_draft": 2},
    "ignore_eos": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def texts():
    """Each field, on and off, three prompts: all of them in one crowd."""
    engine = asking.engine()
    prompts = tiny.prompts_of(3, 23, seed=40)
    keys, asked = [], []
    for name, fields in FIELDS.items():
        for speculate in (True, False):
            for index in range(3):
                keys.append((name, speculate, index))
                asked.append(Settings(max_new_tokens=24, speculate=speculate, **fields))
    made = engine.generate([prompts[k[2]] for k in keys], asked)
    return dict(zip(keys, zip(asked, made, strict=True), strict=True))


@pytest.mark.parametrize("name", FIELDS)
def test_same_text_with_and_without_speculation(texts, name):
    for index in range(3):
        settings, fast = texts[name, True, index]
        _, slow = texts[name, False, index]
        assert fast.tokens == slow.tokens
        assert fast.finish_reason == slow.finish_reason
        assert fast.text == slow.text
        # Both equal a loop over the vocabulary that knows no drafts.
        assert asking.greedy_faults(fast, settings) == []


def test_rules_change_texts_and_drafts_are_rejected(texts):
    """The comparison is not idle: rules matter and rounds are ragged."""
    for name in ("presence", "frequency", "repetition", "bias", "together"):
        pairs = [
            (texts[name, True, i][1], texts["nothing", True, i][1]) for i in (0, 1, 2)
        ]
        assert any(ours.tokens != theirs.tokens for ours, theirs in pairs), name
        rounds = [r for ours, _ in pairs for r in ours.accepted]
        assert 0 in rounds and max(rounds) > 0, name


def test_forced_rejections_never_enter_the_history():
    """Presence 1 with drafts that fail half of the time (b21)."""
    engine = asking.engine()
    prompts = tiny.prompts_of(6, 23, seed=41)
    asked = dataclasses.replace(
        asking.GREEDY, presence_penalty=1.0, frequency_penalty=0.3
    )
    made = engine.generate(prompts, asked)
    rejected = [d - r for g in made for r, d in zip(g.accepted, g.drafted, strict=True)]
    assert sum(r > 0 for r in rejected) > 0.3 * len(rejected)
    for generation in made:
        assert asking.greedy_faults(generation, asked) == []


def test_rules_of_neighbours_change_no_bit():
    """With and without a neighbour that penalises, and in an engine without."""
    prompts = tiny.prompts_of(3, 23, seed=42)
    plain = [asking.SAMPLED, asking.GREEDY]
    alone = asking.engine().generate(prompts[:2], plain)
    heavy = dataclasses.replace(
        asking.SAMPLED, repetition_penalty=2.0, logit_bias=((1, 9.0),)
    )
    crowd = asking.engine().generate(prompts, [*plain, heavy])
    without = tiny.engine("bigram", 3, slots=3, buckets=(7, 64))
    other = without.generate(prompts[:2], plain)
    tokens = [g.tokens for g in alone]
    assert tokens == [g.tokens for g in crowd[:2]] == [g.tokens for g in other]


def test_sampled_requests_obey_rules():
    """A banned token never comes; a forced one always does."""
    engine = asking.engine()
    prompts = tiny.prompts_of(4, 23, seed=43)
    banned = Settings(24, temperature=1.5, logit_bias={v: -100 for v in range(12)})
    forced = Settings(12, temperature=1.5, logit_bias={8: 100})
    made = engine.generate(prompts, [banned, banned, forced, forced])
    assert all(t >= 12 for g in made[:2] for t in g.tokens)
    assert all(set(g.tokens) == {8} for g in made[2:])
    # The drafter's law is biased too, so drafts pass.
    assert all(r == 3 for g in made[2:] for r in g.accepted[:-1])


def test_refused_where_not_built():
    engine = tiny.engine("bigram", 3, slots=3, buckets=(7, 64))
    for name in ("presence", "frequency", "repetition", "bias"):
        field = next(iter(FIELDS[name]))
        with pytest.raises(UserError, match=rf"{field}=.*EngineOptions\.penalties"):
            engine.submit([1], Settings(8, **FIELDS[name]))
    with pytest.raises(UserError, match="logit_bias names id 23"):
        asking.engine().submit([1], Settings(8, logit_bias={23: 1.0}))
    for field, value in [
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {1: 101}),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", {i: 1.0 for i in range(65)}),
    ]:
        with pytest.raises(UserError, match=field):
            Settings(**{field: value})
