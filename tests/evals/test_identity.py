"""What counts as a near-tie of greedy texts, and what is a difference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decode.request import Settings
from spec_jax.evals import identity
from tests.support import asking, tiny

GREEDY = Settings(max_new_tokens=3)
PROMPT, PLAIN = [1, 2], [3, 4, 5]
V = 23


class Resumes:
    """Stands where an engine stands: goes on with the plain text."""

    def generate(self, prompts, settings):
        known = prompts[0][len(PROMPT) :]
        assert known == PLAIN[: len(known)]
        made = PLAIN[len(known) :][: settings.max_new_tokens]
        return [dataclasses.make_dataclass("Made", ["tokens"])(made)]


@pytest.fixture
def judged(monkeypatch):
    """`compare` of one text, where 4, 7 and 9 have these distances to the best."""

    def judge(got, below, dtype="float32", settings=GREEDY, plain=PLAIN):
        row_V = np.full(V, -9.0, np.float32)
        for token, distance in zip((4, 7, 9), below, strict=True):
            row_V[token] = -distance
        monkeypatch.setattr(identity, "plain_logits", lambda *args: row_V)
        params = {"params": {"embed": jnp.zeros((V, 2), dtype)}}
        spec = tiny.spec_of(V)
        return identity.compare(
            spec, params, Resumes(), [PROMPT], [plain], [got], settings
        )

    return judge


def test_a_third_token_at_a_tie_is_a_difference(judged):
    tie = (0.0, 5e-4, 2.0)
    found = judged([3, 7, 0], tie)
    assert found == identity.Identity(True, 1, 1, "")
    assert found.first_tie.startswith("prompt 0: token 1 is [7]")
    assert "0.0005 below" in found.first_tie
    third = judged([3, 9, 0], tie)
    assert not third.identical and third.near_ties == 0 and third.first_tie == ""
    assert third.first_difference.startswith("prompt 0: token 1 is [9]")
    assert "2 below the best" in third.first_difference
    # Where plain decoding's own token is not among the best, nothing is a tie.
    assert not judged([3, 7, 0], (2.0, 0.0, 5e-4)).identical


@pytest.mark.parametrize(
    ("dtype", "distance", "is_tie"),
    [
        ("float32", 2e-3, False),
        ("float16", 2e-3, True),
        ("float16", 0.031, False),
        ("bfloat16", 0.031, True),
        ("bfloat16", 0.2, False),
    ],
)
def test_the_weights_dtype_decides_what_ties(judged, dtype, distance, is_tie):
    found = judged([3, 7, 5], (0.0, distance, 5.0), dtype)
    assert found.identical is is_tie and found.near_ties == is_tie
    assert identity.tolerance(jnp.dtype(dtype)) == identity.tolerance(dtype)


def test_a_text_that_ends_at_a_tie_is_a_difference(judged):
    found = judged([3], (0.0, 0.0, 0.0))
    assert not found.identical and "ends there" in found.first_difference
    assert not judged([*PLAIN, 7], (0.0, 0.0, 0.0)).identical


def test_penalties_and_bias_belong_to_the_logits(judged):
    """7 ties with 4 only after its bias."""
    row = (0.0, 1.0, 5.0)
    assert not judged([3, 7, 5], row).identical
    biased = dataclasses.replace(GREEDY, logit_bias={7: 1.0})
    # What follows is judged in its own text: the row's best, and another.
    assert judged([3, 7, 4], row, settings=biased).near_ties == 1
    wrong = judged([3, 7, 9], row, settings=biased)
    assert not wrong.identical and "token 2 is [9]" in wrong.first_difference


def test_ruled_logits_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    row_V = rng.normal(size=V).astype(np.float32)
    settings = Settings(
        presence_penalty=0.6,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias={3: -1.5},
    )
    prompt, answer = [1, 2, 2], [3, 4, 4, 1]
    got = identity.ruled(row_V, settings, prompt, answer)
    want = asking.penalised(row_V, prompt, answer, settings)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert identity.ruled(row_V, GREEDY, prompt, answer) is row_V


def test_padding_is_never_the_best(judged, monkeypatch):
    """Ids that no tokenizer knows do not make a tie a difference."""
    offer = dataclasses.make_dataclass("Offer", ["vocab_size"])(8)
    row = (0.0, 5e-4, -3.0)  # 9 is the best, and is padding
    assert not judged([3, 7, 5], row).identical
    monkeypatch.setattr(Resumes, "offer", offer, raising=False)
    assert judged([3, 7, 5], row).identical


def test_a_real_target_of_half_precision_is_judged_by_its_own_tolerance():
    """The text of bfloat16 weights against itself with each token replaced."""
    world = tiny.world(None)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), world.params)
    text = []
    for _ in range(GREEDY.max_new_tokens):
        logits_V = identity.plain_logits(world.spec, half, [*PROMPT, *text])
        text.append(int(logits_V.argmax()))
    for at in range(len(text)):
        logits_V = identity.plain_logits(world.spec, half, [*PROMPT, *text[:at]])
        for token in set(range(V)) - {text[at]}:
            if logits_V.max() - logits_V[token] < 0.2:
                continue
            wrong = [*text[:at], token, *text[at + 1 :]]
            found = identity.compare(
                world.spec, half, None, [PROMPT], [text], [wrong], GREEDY
            )
            assert not found.identical, (at, token)
