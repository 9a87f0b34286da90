"""(R, T) programs: rows equal, padding inert, other slots untouched, no retrace."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import verify_layout
from spec_jax.decode import forward, step
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.state import DecodeState, empty_slots, take_slots
from spec_jax.target import model
from spec_jax.target.cache import init_cache
from tests.decode import test_modes as modes
from tests.decode.test_programs import no_compiles
from tests.support import drafting, planned, tiny

M = planned.M
W, B = M + 1, 3
LENS = [(4, 4, 4), (1, 1, 1), (4, 1, 2), (0, 4, 1), (2, 0, 0), (1, 3, 4)]
BUCKETS = (3, 6, 8, 10, 12)


@pytest.fixture(scope="module")
def midway():
    """State in the middle of three answers of different lengths."""
    world = tiny.world("bigram", M)
    engine = planned.engine("static")
    for prompt in tiny.prompts_of(4, 23, seed=40, low=3, high=40):
        engine.submit(prompt, Settings(max_new_tokens=40))
    for _ in range(8):
        engine.step()
    state = jax.tree.map(lambda x: jnp.array(np.asarray(x)), engine.state)
    engine.run()
    state = take_slots(state, B)  # the caches keep their fourth slot
    assert state.slots.active_B.all()
    return world, state


@functools.cache
def rows_program(rows):
    world = tiny.world("bigram", M)

    def run(weights, state, layout):
        return forward.target_rows(world.spec, weights, state, layout, (0,), rows)

    return jax.jit(run)


def layout_of(state, lens):
    drafts = jnp.asarray(np.random.default_rng(3).integers(0, 23, (B, M)), jnp.int32)
    return verify_layout.chain(
        state.slots.anchor_B, drafts, jnp.asarray(lens, jnp.int32)
    )


@pytest.mark.parametrize("lens", LENS)
def test_packed_rows_equal_full_windows(midway, lens):
    """At the smallest bucket that holds them and at a larger one."""
    world, state = midway
    layout = layout_of(state, lens)
    full, wide = rows_program(None)(world.weights, state, layout)
    inside = np.arange(W)[None] < np.asarray(lens)[:, None]
    for rows in [t for t in BUCKETS if t >= sum(lens)][:2]:
        logits, output = rows_program(rows)(world.weights, state, layout)
        assert np.isnan(np.asarray(logits)[~inside]).all()
        for mine, theirs in (
            (logits, full),
            (output.hidden_BTD, wide.hidden_BTD),
            (output.features_BTLD, wide.features_BTLD),
        ):
            np.testing.assert_allclose(
                np.asarray(mine)[inside], np.asarray(theirs)[inside], atol=1e-4
            )
        length = np.asarray(state.slots.length_B)
        for name in ("k_NBGAC", "v_NBGAC"):
            mine, theirs, old = (
                np.asarray(getattr(c, name))
                for c in (output.cache, wide.cache, state.cache)
            )
            for b in range(B):
                end = length[b] + lens[b]
                np.testing.assert_allclose(
                    mine[:, b, :, :end], theirs[:, b, :, :end], atol=1e-4
                )
                np.testing.assert_array_equal(mine[:, b, :, end:], old[:, b, :, end:])
            # Padding belongs to no slot, the one behind the last included.
            np.testing.assert_array_equal(mine[:, B:], old[:, B:])


def test_padding_is_inert(midway):
    """Padding rows of NaN: the others do not change by one bit."""
    world, state = midway
    layout = layout_of(state, (3, 1, 2))
    rows, poison = 10, 21
    packing = verify_layout.pack(layout.verify_len_B, W, rows)
    embed = world.params["params"]["embed"].at[poison].set(jnp.nan)
    params = {"params": {**world.params["params"], "embed": embed}}
    assert not (layout.tokens_BW == poison).any()

    @jax.jit
    def run(params, pad):
        tokens = verify_layout.packed(packing, layout.tokens_BW)
        tokens = jnp.where(packing.request_T == B, pad, tokens)
        places = jnp.broadcast_to(layout.positions(state.slots.length_B), (B, W))
        return model.forward(
            world.spec,
            params,
            state.cache,
            tokens[None],
            verify_layout.packed(packing, places)[None],
            layout.visible(),
            state.slots.length_B,
            (0,),
            packing,
        )

    clean, dirty = run(params, 0), run(params, poison)
    assert np.isnan(dirty.hidden_BTD[0, 6:]).all()
    np.testing.assert_array_equal(clean.hidden_BTD[0, :6], dirty.hidden_BTD[0, :6])
    jax.tree.map(np.testing.assert_array_equal, clean.cache, dirty.cache)


def test_a_bad_row_spoils_its_own_request_alone(midway):
    """NaN in one request's planned row: only that row is not stored."""
    world, state = midway
    layout = layout_of(state, (3, 3, 2))
    poison = int(layout.tokens_BW[1, 2])
    layout = layout.replace(
        tokens_BW=jnp.where(
            (layout.tokens_BW == poison) & (jnp.arange(B) != 1)[:, None],
            (poison + 1) % 23,
            layout.tokens_BW,
        )
    )
    embed = world.params["params"]["embed"].at[poison].set(jnp.nan)
    bad = {"params": {**world.params["params"], "embed": embed}}
    weights = dataclasses.replace(world.weights, target=bad)
    logits, output = rows_program(8)(weights, state, layout)
    clean, whole_output = rows_program(8)(world.weights, state, layout)
    stored_B = forward.stored(output, layout.verify_len_B)
    assert stored_B.tolist() == [True, False, True]
    np.testing.assert_array_equal(logits[0, :3], clean[0, :3])
    np.testing.assert_array_equal(logits[2, :2], clean[2, :2])
    made, before, whole = (
        c.k_NBGAC[:, 1] for c in (output.cache, state.cache, whole_output.cache)
    )
    end = int(state.slots.length_B[1]) + 2
    np.testing.assert_array_equal(made[:, :, end:], before[:, :, end:])
    np.testing.assert_array_equal(made[:, :, :end], whole[:, :, :end])


@pytest.mark.parametrize(
    ("kind", "speculate"), [("bigram", True), ("dflash", True), ("dflash", False)]
)
def test_slots_behind_the_bucket_are_untouched(kind, speculate):
    """R = 2 of 4 slots: bit-equal behind, and the two run as they would alone."""
    world = tiny.world(kind, M)
    rng = np.random.default_rng(0)

    def noise(x):
        if x.dtype != jnp.float32:
            return x
        return jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    state = DecodeState(
        *jax.tree.map(
            noise, (init_cache(world.spec, 4, 64), world.drafter.init_state(4, 64))
        ),
        empty_slots(4, 1),
    )
    slots = state.slots.replace(
        active_B=jnp.ones((4,), bool),
        speculate_B=jnp.ones((4,), bool),
        length_B=jnp.asarray([9, 4, 30, 2], jnp.int32),
        anchor_B=jnp.asarray([3, 4, 5, 6], jnp.int32),
        remaining_B=jnp.full((4,), 50, jnp.int32),
    )
    state = dataclasses.replace(state, slots=slots)
    options = round_options("compact")

    def run(state, requests, rows):
        def one(state):
            return step.round_step(
                world.spec,
                world.drafter,
                (0,),
                options,
                world.weights,
                state,
                3,
                speculate=speculate,
                requests=requests,
                rows=rows if speculate else None,
            )

        return drafting.quick_jit(one)(state)

    part, few = run(state, 2, 6)
    assert few.tokens_BW.shape[0] == 2
    for mine, old in zip(jax.tree.leaves(part), jax.tree.leaves(state), strict=True):
        # Slots are on axis 1 of caches and draft states, 0 of slot records.
        behind = (slice(None), slice(2, 4)) if mine.ndim > 2 else slice(2, 4)
        np.testing.assert_array_equal(mine[behind], old[behind])
    # The same two with idle neighbours, in the program of four.
    idle = dataclasses.replace(
        state, slots=slots.replace(active_B=jnp.asarray([True, True, False, False]))
    )
    _, all_four = run(idle, 4, 8)
    for name in ("tokens_BW", "emitted_B", "verify_len_B"):
        mine, theirs = getattr(few, name), getattr(all_four, name)[:2]
        assert mine.tolist() == theirs.tolist()
    assert not speculate or few.verify_len_B.sum() == 5


def round_options(mode):
    return step.RoundOptions(plan=PlanOptions(mode=mode))


def test_no_program_is_compiled_after_warm_up():
    """Random joins and budgets through every (R, T): no retrace, no lost slot."""
    engine = planned.engine("compact")
    rng = random.Random(1)
    visited = set()

    def decide(round_index, live, own_rows):
        budgets = [rng.randrange(4 * M + 1)]
        choice = planned.replay(engine, budgets)(round_index, live, own_rows)
        visited.add((choice.requests, choice.rows))
        return choice

    prompts = tiny.prompts_of(60, 23, seed=41)
    engine.generate(prompts[:1], dataclasses.replace(modes.SAMPLED, max_new_tokens=2))
    engine.planner.decide = decide
    waiting, done, asked = list(prompts), {}, {}
    try:
        with no_compiles():
            while waiting or engine.busy:
                if waiting and rng.random() < 0.3:
                    s = rng.choice([modes.GREEDY, modes.SAMPLED])
                    s = dataclasses.replace(s, max_new_tokens=rng.randint(1, 16))
                    asked[engine.submit(waiting.pop(), s)] = s
                done.update(engine.step())
    finally:
        del engine.planner.decide
    assert visited == {(r, t) for r, each in planned.LADDER.buckets for t in each}
    assert sorted(engine.table.free) == [0, 1, 2, 3]
    greedy = [done[h] for h, s in asked.items() if not s.temperature]
    assert len(greedy) > 10
    assert tiny.greedy_faults(tiny.world("bigram", M), greedy) == []
