"""Rows that nobody uses run too; whatever they hold, no request ends by it.

A token that breaks the target wherever it is run, drafted outside the plan, drafted
for who does not speculate, or standing where a prompt's chunk is padded.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import masks
from spec_jax.decode.request import Settings
from spec_jax.target import model
from spec_jax.target.cache import init_cache
from tests.support import asking, planned, tiny

V = 23
GREEDY = Settings(max_new_tokens=12)
OWN = dataclasses.replace(GREEDY, num_draft=1)
MODES = {
    # A planned request is granted nothing: every draft of it lies outside.
    "cap_accept": [GREEDY, OWN, asking.off(GREEDY)],
    "compact": [GREEDY, OWN, asking.off(GREEDY)],
    "static": [asking.off(GREEDY), OWN, asking.off(GREEDY)],
}


def broken(params, token):
    params = jax.tree.map(lambda x: x, params)
    params["params"]["embed"] = params["params"]["embed"].at[token].set(jnp.nan)
    return params


@pytest.fixture(scope="module")
def clean():
    """Three prompts, their texts, and two ids that are in none of them."""
    engine = planned.engine("compact")
    prompts = [[p] for p in range(1, V)]
    made = engine.generate(prompts, asking.off(GREEDY))
    texts = {p[0]: g.tokens for p, g in zip(prompts, made, strict=True)}
    for three in itertools.combinations(texts, 3):
        used = {0, *three, *(t for p in three for t in texts[p])}
        free = sorted(set(range(V)) - used)
        if len(free) > 1 and len(used) > 8:
            return [[p] for p in three], [texts[p] for p in three], free[:2]
    raise AssertionError("no such texts")


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_outside_the_plan_ends_nobody(clean, mode):
    """Half of all drafts are right, the others lead to the token that breaks."""
    engine, (prompts, texts, (step, poison)) = planned.engine(mode), clean
    before = engine.weights
    table = before.draft.at[jnp.asarray([step, poison])].set(-1e9)
    table = (
        table.at[1::2, step].set(1e3).at[jnp.asarray([step, poison]), poison].set(1e3)
    )
    engine.weights = dataclasses.replace(
        before, draft=table, target=broken(before.target, poison)
    )
    engine.planner.decide = planned.replay(engine, [0])
    try:
        made = engine.generate(prompts, MODES[mode])
        # Inside of its own plan it does end a request, and that one alone.
        whole = dataclasses.replace(GREEDY, num_draft=3)
        ended, *others = engine.generate(prompts, [whole, *MODES[mode][1:]])
    finally:
        engine.weights = before
        del engine.planner.decide
    assert [g.tokens for g in made] == texts
    assert [g.finish_reason for g in made] == ["length"] * 3
    assert set(made[1].accepted) == {0, 1}
    assert ended.finish_reason == "error"
    assert ended.tokens == texts[0][: len(ended.tokens)]
    assert [g.tokens for g in others] == texts[1:]
    assert asking.is_idle(engine)


@pytest.mark.parametrize("kind", ["bigram", "dflash"])
def test_padding_of_a_chunk_ends_nobody(kind):
    engine = tiny.engine(kind, 3, slots=3, buckets=(7, 64))
    assert engine.spec.pad_id == 0
    prompts = [p for p in tiny.prompts_of(30, V, seed=39, high=20) if 0 not in p]
    clean = engine.generate(prompts, GREEDY)
    kept = [i for i, g in enumerate(clean) if 0 not in g.tokens][:6]
    assert len(kept) > 2
    before = engine.weights
    table = before.draft.at[:, 0].set(-1e9) if kind == "bigram" else before.draft
    engine.weights = dataclasses.replace(
        before, draft=table, target=broken(before.target, 0)
    )
    settings = GREEDY if kind == "bigram" else asking.off(GREEDY)
    try:
        made = engine.generate([prompts[i] for i in kept], settings)
    finally:
        engine.weights = before
    assert [g.tokens for g in made] == [clean[i].tokens for i in kept]


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_row_breaks_those_that_see_it_and_is_not_stored(bad):
    """Rows before it keep every bit; so do the other request's."""
    world, size = tiny.world(None), 4
    poison, row_T = 5, jnp.arange(size)
    tokens_BT = jnp.asarray([[1, 2, 3, 4], [6, 7, 8, 9]])

    def forward(params, tokens_BT):
        cache = jax.tree.map(lambda x: x + 7, init_cache(world.spec, 2, 12))
        return model.forward(
            world.spec,
            params,
            cache,
            tokens_BT,
            jnp.broadcast_to(3 + row_T, tokens_BT.shape),
            masks.causal(row_T[:, None], row_T[None])[None],
            jnp.full((2,), 3),
            (0, 1),
        )

    run = jax.jit(forward)
    params = broken(world.params, poison)
    clean = run(params, tokens_BT)
    made = run(params, tokens_BT.at[0, bad].set(poison))
    for ours, want in [
        (made.hidden_BTD, clean.hidden_BTD),
        (made.features_BTLD, clean.features_BTLD),
    ]:
        np.testing.assert_array_equal(ours[1], want[1])
        np.testing.assert_array_equal(ours[0, :bad], want[0, :bad])
        assert np.isnan(ours[0, bad:]).all()
    for ours, want in [
        (made.cache.k_NBGAC, clean.cache.k_NBGAC),
        (made.cache.v_NBGAC, clean.cache.v_NBGAC),
    ]:
        np.testing.assert_array_equal(ours[:, 1], want[:, 1])
        np.testing.assert_array_equal(
            ours[:, 0, :, : 3 + bad], want[:, 0, :, : 3 + bad]
        )
        assert (np.asarray(ours[:, 0, :, 3 + bad :]) == 7).all()
