"""A bfloat16 target: caches of its own dtype hold what float32 ones would."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spec_jax.decode import programs
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.request import Settings
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import identity
from tests.support import asking, tiny

GREEDY = Settings(max_new_tokens=20, logprobs=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.2, seed=5)


def engine(kind, slots=3):
    world = tiny.world(kind, 3)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), world.params)
    weights = dataclasses.replace(
        world.weights, target=half, frozen=frozen_from_params(half)
    )
    options = EngineOptions(
        slots=slots, max_context=128, prefill_buckets=(7, 64), logprobs=0
    )
    return Engine(world.spec, weights, options, world.drafter, world.mask_id)


@pytest.mark.parametrize("kind", ["bigram", "dflash"])
def test_caches_of_half_the_size_change_nothing(kind, monkeypatch):
    prompts = tiny.prompts_of(4, 23, seed=90, low=3, high=40)
    each = [GREEDY, SAMPLED, asking.off(GREEDY), asking.off(SAMPLED)]
    ours = engine(kind)
    assert ours.state.cache.k_NBGAC.dtype == jnp.bfloat16
    made = ours.generate(prompts, each)
    right = programs.fresh_state
    monkeypatch.setattr(programs, "fresh_state", lambda *args: right(*args[:3]))
    wide = engine(kind)
    assert wide.state.cache.k_NBGAC.dtype == jnp.float32
    again = wide.generate(prompts, each)
    assert [g.tokens for g in made] == [g.tokens for g in again]
    assert [g.logprobs for g in made] == [g.logprobs for g in again]
    assert any(max(g.accepted, default=0) > 0 for g in made[:2])


@pytest.mark.parametrize("slots", [1, 3])
def test_speculation_keeps_the_plain_text_but_at_near_ties(slots):
    """Texts part only where bfloat16 logits are too close to be told apart."""
    made = engine("bigram", slots)
    prompts = tiny.prompts_of(8, 23, seed=91, low=3, high=40)
    plain = made.generate(prompts, asking.off(GREEDY))
    ours = made.generate(prompts, GREEDY)
    same = identity.compare(
        made.spec,
        made.weights.target,
        made,
        prompts,
        [g.tokens for g in plain],
        [g.tokens for g in ours],
        GREEDY,
    )
    assert same.identical, same.first_difference
    assert same.prompts_with_ties < len(prompts) / 2, same.first_tie
    assert max(r for g in ours for r in g.accepted) == 3
