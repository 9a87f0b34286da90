"""A profile's turns: every shape is timed, or one sentence says why none can be."""

import types

import pytest

from experiments import profile
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.decode.budget import Choice


class Rounds:
    """Engine and log in one: every request gets `max_new_tokens` and no more.

    The first round of each pass comes after its prompts, as in the engine, and each
    round makes one token of each request.
    """

    def __init__(self, buckets=((1, (2, 4)), (2, (4, 8)))):
        self.spec, self.mask_id = types.SimpleNamespace(vocab_size=9), 8
        self.ladder = types.SimpleNamespace(buckets=buckets)
        self.planner = types.SimpleNamespace(decide=lambda *a: None)
        self.left, self.rows, self.drafts, self.filled = [], [], True, True

    busy = property(lambda self: bool(self.left))

    def submit(self, prompt, settings):
        del prompt
        self.left.append(settings.max_new_tokens - 1)
        self.filled = True

    def step(self):
        if not self.drafts:
            choice = Choice(False, 0, len(self.left), len(self.left))
        else:
            choice = self.planner.decide(0, {}, {})
        live = [n for n in self.left if n > 0]
        if live:
            self.rows.append(
                {
                    "draft": choice.draft,
                    "T": choice.rows,
                    "verify_lens": [1] * len(live),
                    "filled": self.filled,
                    "measured_s": 0.5,
                }
            )
        self.left = [n - 1 for n in live]
        self.filled = False


@pytest.mark.parametrize("tokens", [3, 4, 5, 24])
def test_a_profile_times_every_shape_whatever_the_requests_length(monkeypatch, tokens):
    engine = Rounds()
    monkeypatch.setattr(profile, "RoundLog", lambda engine: engine)
    cfg = schema.Profile(
        drafter="d", context=4, serve=schema.Serve(max_new_tokens=tokens)
    )
    found = profile.measure(engine, cfg)
    shapes = [(1, 0), (1, 2), (1, 4), (2, 0), (2, 4), (2, 8)]
    assert sorted(found) == shapes
    assert all(len(found[shape]) >= cfg.repeats for shape in shapes)


@pytest.mark.parametrize(
    ("tokens", "drafts", "words"),
    [
        (1, True, "max_new_tokens=1 ends every request before a plain step for 1"),
        (2, True, "max_new_tokens=2 ends every request before a plain step for 1"),
        (24, False, "max_new_tokens=24 ends every request before a round of 2 rows"),
    ],
)
def test_a_profile_that_times_nothing_ends(monkeypatch, tokens, drafts, words):
    engine = Rounds()
    engine.drafts = drafts
    monkeypatch.setattr(profile, "RoundLog", lambda engine: engine)
    cfg = schema.Profile(
        drafter="d", context=4, serve=schema.Serve(max_new_tokens=tokens)
    )
    with pytest.raises(UserError, match=words):
        profile.measure(engine, cfg)
