"""Trees in the running engine: text, caches, and what they cost a chain."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.core.topology import DYNAMIC_TREE, STATIC_TREE, Topology
from spec_jax.decode import step
from spec_jax.decode.compact_path import compact
from spec_jax.decode.forward import Weights
from spec_jax.decode.request import Settings
from spec_jax.drafters import base
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.target.cache import KVCache
from tests.support import asking, drafting, tiny

GREEDY = Settings(max_new_tokens=24)
SAMPLED = Settings(max_new_tokens=24, temperature=1.1, seed=3)

# A node's second child stands before its first one's children.
STATIC = Topology(STATIC_TREE, parents=(0, 0, 1, 1, 3, 2))
DYNAMIC = Topology(DYNAMIC_TREE, depth=3, top_k=2, nodes=6)
# Its spine is the chain of three drafts, at rows 1, 3 and 5.
TWINS = Topology(STATIC_TREE, parents=(0, 0, 1, 1, 3))


def engine_of(topology, kind="bigram_tree", **options):
    """Two programs each: a request without speculation has a window of one row.

    That of `DYNAMIC` was built for penalties and log-probabilities, too.
    """
    if topology is DYNAMIC:
        options |= {"penalties": True, "logprobs": 3}
    return tiny.engine(
        kind, 3, slots=3, buckets=(16,), topology=topology, plain=False, **options
    )


def world_of(kind="bigram_tree"):
    return tiny.world(kind, 3)


@pytest.mark.parametrize("topology", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_greedy_tokens_are_the_targets_own(topology):
    engine = engine_of(topology)
    prompts = tiny.prompts_of(9, 23)
    each = [dataclasses.replace(GREEDY, max_new_tokens=20 + 3 * i) for i in range(9)]
    made = engine.generate(prompts, each)
    assert tiny.greedy_faults(world_of(), made) == []
    sizes = [len(g.tokens) for g in made]
    assert sizes == [s.max_new_tokens for s in each]
    assert {r for g in made for r in g.accepted} == {0, 1, 2, 3}
    assert all(set(g.drafted) == {6} for g in made)
    # Second children are worth something: fewer rounds than the chain's.
    chain = engine_of(tiny.CHAIN_TOPOLOGY, "twins").generate(prompts, each)
    assert [g.tokens for g in chain] == [g.tokens for g in made]
    if topology is STATIC:
        assert sum(g.rounds for g in made) < sum(g.rounds for g in chain)


def stopped_midway(engine, prompts, settings, ticks):
    """Host copies of state and of what each live slot had emitted, then the end."""
    handles = [engine.submit(p, s) for p, s in zip(prompts, settings, strict=True)]
    done = {}
    for _ in range(ticks):
        done.update(engine.step())
    jobs = dict(engine.table.running)
    state = jax.tree.map(np.asarray, engine.state)
    done.update(engine.run())
    return state, {slot: done[job.handle] for slot, job in jobs.items()}, handles


@pytest.mark.parametrize("topology", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_caches_equal_a_prefill_from_nothing(topology):
    """The accepted paths lie in order; draft state was told the same rows."""
    engine, world = engine_of(topology), world_of()
    prompts = tiny.prompts_of(3, 23, seed=7, low=10, high=30)
    each = [
        dataclasses.replace(s, max_new_tokens=60)
        for s in (GREEDY, SAMPLED, dataclasses.replace(GREEDY, speculate=False))
    ]
    state, made, _ = stopped_midway(engine, prompts, each, 14)
    assert len(made) == 3
    for slot, generation in made.items():
        length = int(state.slots.length_B[slot])
        text = [*generation.prompt, *generation.tokens]
        assert len(generation.prompt) < length < len(text)
        assert state.slots.anchor_B[slot] == text[length]
        assert length <= engine.options.max_context - 2 * engine.window
        tokens = tiny.padded([text[:length]], 96)
        _, output = tiny.full_forward(world.spec, world.params, tokens, (0,))
        for name in ("k_NBGAC", "v_NBGAC"):
            np.testing.assert_allclose(
                getattr(state.cache, name)[:, slot, :, :length],
                np.asarray(getattr(output.cache, name))[:, 0, :, :length],
                rtol=1e-4,
                atol=1e-4,
            )
        told = state.draft["tokens"][0, slot], state.draft["next"][0, slot]
        assert told[0][:length].tolist() == text[:length]
        assert told[1][:length].tolist() == text[1 : length + 1]
        # The feature of each row is that row's own, not a sibling's.
        feature = state.draft["feature"][0, slot, :length]
        mine = np.asarray(output.features_BTLD)[0, :length, 0, 0]
        np.testing.assert_allclose(feature, mine, rtol=1e-4, atol=1e-4)
        hidden = state.draft["hidden"][0, slot, :length]
        mine = np.asarray(output.hidden_BTD)[0, :length, 0]
        np.testing.assert_allclose(hidden, mine, rtol=1e-4, atol=1e-4)


def test_dead_siblings_leave_what_the_chain_leaves():
    """Twins are never accepted: text, KV and draft rows are the chain's."""
    tree = engine_of(TWINS, "twins")
    chain = engine_of(tiny.CHAIN_TOPOLOGY, "twins")
    prompts = tiny.prompts_of(3, 23, seed=12, low=5, high=30)
    each = [dataclasses.replace(GREEDY, max_new_tokens=50, seed=i) for i in range(3)]
    one, texts, _ = stopped_midway(tree, prompts, each, 12)
    other, same, _ = stopped_midway(chain, prompts, each, 12)
    assert len(texts) == 3
    assert {s: g.tokens for s, g in texts.items()} == {
        s: g.tokens for s, g in same.items()
    }
    assert {r for g in texts.values() for r in g.accepted} == {0, 1, 2, 3}
    assert [g.accepted for g in texts.values()] == [g.accepted for g in same.values()]
    jax.tree.map(np.testing.assert_array_equal, one.slots, other.slots)
    for slot in texts:
        length = int(one.slots.length_B[slot])

        def kept(state, slot=slot, length=length):
            cache = [state.cache.k_NBGAC, state.cache.v_NBGAC]
            return [x[:, slot, :, :length] for x in cache] + [
                x[0, slot, :length] for x in jax.tree.leaves(state.draft)
            ]

        for mine, his in zip(kept(one), kept(other), strict=True):
            np.testing.assert_allclose(mine, his, rtol=1e-4, atol=1e-5)


def test_stale_rows_are_never_read():
    engine = engine_of(DYNAMIC)
    prompts = tiny.prompts_of(5, 23, seed=8)
    each = [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY]
    clean = engine.generate(prompts, each)
    engine.state = dataclasses.replace(
        engine.state,
        cache=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine.state.cache),
    )
    dirty = engine.generate(prompts, each)
    assert [g.tokens for g in clean] == [g.tokens for g in dirty]
    assert [g.accepted for g in clean] == [g.accepted for g in dirty]


def test_stop_ids_and_caps_inside_a_path():
    engine = engine_of(STATIC)
    prompt = tiny.prompts_of(1, 23, seed=9)[0]
    whole = engine.generate([prompt], GREEDY)[0].tokens
    cases = [
        dataclasses.replace(GREEDY, stop_ids=stops, max_new_tokens=cap)
        for stops in [*((t,) for t in sorted(set(whole))), (*whole[5:8],)]
        for cap in (1, 6, 24)
    ]
    made = engine.generate([prompt] * len(cases), cases)
    for settings, generation in zip(cases, made, strict=True):
        ends = [i for i, t in enumerate(whole) if t in settings.stop_ids]
        stop = ends[0] + 1 if ends else len(whole) + 1
        size = min(stop, settings.max_new_tokens)
        assert generation.tokens == whole[:size], settings
        assert sum(generation.emitted) + 1 == size


def test_speculation_off_in_the_same_program():
    """The window of such a request is its anchor."""
    engine = engine_of(DYNAMIC)
    prompts = tiny.prompts_of(6, 23, seed=2)
    off = dataclasses.replace(GREEDY, speculate=False)
    plain = dataclasses.replace(SAMPLED, speculate=False)
    each = [(GREEDY, SAMPLED, off)[i % 3] for i in range(6)]
    made = engine.generate(prompts, each)
    greedy = [g for g, s in zip(made, each, strict=True) if s.temperature == 0]
    assert tiny.greedy_faults(world_of(), greedy) == []
    alone = [g for g, s in zip(made, each, strict=True) if s is off]
    assert all(set(g.drafted) == {0} and set(g.emitted) == {1} for g in alone)
    # A seeded request without speculation draws what it draws beside any tree.
    (mine,) = engine.generate(prompts[:1], plain)
    (his,) = engine_of(STATIC).generate(prompts[:1], plain)
    assert mine.tokens == his.tokens


RULES = (
    {"presence_penalty": 1.7},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 0.6, "repetition_penalty": 1.2, "logit_bias": {3: -1.5}},
    {},
)


def test_rules_and_logprobs_along_a_path():
    """A row counts its own ancestors, and none of their siblings."""
    engine = engine_of(DYNAMIC)
    prompts = tiny.prompts_of(6, 23, seed=13)
    each = [Settings(24, logprobs=True, top_logprobs=2, **rules) for rules in RULES]
    banned = {token: -100 for token in range(12)}
    each.append(Settings(24, temperature=1.5, logit_bias=banned, logprobs=True))
    made = engine.generate(prompts, each)
    for generation, settings in zip(made, each, strict=True):
        asking.check_logprobs(generation, settings)
    for generation, settings in zip(made[:5], each, strict=False):
        assert asking.greedy_faults(generation, settings) == []
    assert min(made[5].tokens) >= 12
    assert {r for g in made for r in g.accepted} == {0, 1, 2, 3}
    # Both kinds of tree, and rules that matter: other texts without them.
    without = engine.generate(prompts[:4], GREEDY)
    assert all(g.tokens != w.tokens for g, w in zip(made, without, strict=False))


def test_retracted_requests_go_on_as_if_nothing_happened():
    engine = engine_of(DYNAMIC)
    prompts = tiny.prompts_of(3, 23, seed=14)
    each = [
        dataclasses.replace(s, max_new_tokens=30)
        for s in (GREEDY, SAMPLED, Settings(logprobs=True, **RULES[3]))
    ]
    want = engine.generate(prompts, each)
    made = asking.interrupted(engine, prompts, each)
    assert [g.tokens for g in made] == [g.tokens for g in want]
    assert [g.accepted for g in made] == [g.accepted for g in want]
    asking.check_logprobs(made[2], each[2])
    assert asking.is_idle(engine)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_broken_draft_rows_degrade_to_plain_steps(value):
    engine, world = engine_of(STATIC), world_of()
    prompts = tiny.prompts_of(4, 23, seed=10)
    each = [GREEDY, SAMPLED, SAMPLED, GREEDY]
    plain = engine.generate(
        prompts, [dataclasses.replace(s, speculate=False) for s in each]
    )
    weights = engine.weights
    draft = world.weights.draft
    try:
        engine.weights = dataclasses.replace(weights, draft=jnp.full_like(draft, value))
        broken = engine.generate(prompts, each)
        engine.weights = dataclasses.replace(weights, draft=draft.at[::2].set(value))
        partly = engine.generate(prompts, each)
    finally:
        engine.weights = weights
    assert [g.tokens for g in broken] == [g.tokens for g in plain]
    assert all(set(g.accepted) == {0} for g in broken)
    assert [partly[i].tokens for i in (0, 3)] == [plain[i].tokens for i in (0, 3)]
    assert any(set(g.accepted) != {0} for g in partly)


def test_topologies_a_drafter_does_not_list_are_refused():
    with pytest.raises(UserError, match=r"serve\.topology='static_tree'.*'chain'"):
        tiny.new_engine(tiny.world("bigram", 3), topology=STATIC)
    # The slack holds two windows of the tree, not of the drafter's chain.
    with pytest.raises(UserError, match="two verify windows of 7"):
        tiny.new_engine(world_of(), topology=DYNAMIC, max_context=15)


def test_compact_moves_the_path_and_nothing_else():
    rng = np.random.default_rng(0)
    shape = (2, 3, 2, 16, 4)
    k, v = rng.normal(size=shape), rng.normal(size=shape)
    path = np.asarray([[0, 2, 5, 6], [0, 3, 0, 0], [0, 1, 4, 5]])
    accepted, history = np.asarray([3, 1, 2]), np.asarray([4, 0, 9])
    made = compact(
        KVCache(jnp.asarray(k), jnp.asarray(v)),
        jnp.asarray(path),
        jnp.asarray(accepted),
        jnp.asarray(history),
    )
    for before, after in ((k, made.k_NBGAC), (v, made.v_NBGAC)):
        want = before.astype(np.float32).copy()
        for b in range(3):
            for depth in range(1, accepted[b] + 1):
                source = before[:, b, :, history[b] + path[b, depth]]
                want[:, b, :, history[b] + depth] = source
        np.testing.assert_array_equal(after, want)


def equations(jaxpr):
    """Every equation, inside calls, loops and conditions too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def touches(engine):
    """Equations of the round that read or write rows of the whole target cache."""
    taps = engine.drafter.needs.layer_ids
    jaxpr = jax.make_jaxpr(
        lambda w, s: step.round_step(
            engine.spec, engine.drafter, taps, engine.options.round, w, s
        )
    )(engine.weights, engine.state)
    shape = engine.state.cache.k_NBGAC.shape
    names = [
        equation.primitive.name
        for equation in equations(jaxpr.jaxpr)
        if equation.invars and getattr(equation.invars[0].aval, "shape", ()) == shape
    ]
    return {name: names.count(name) for name in ("gather", "scatter")}


def test_chains_gather_nothing_from_the_cache():
    assert touches(engine_of(tiny.CHAIN_TOPOLOGY, "twins")) == {
        "gather": 0,
        "scatter": 2,
    }
    assert touches(engine_of(STATIC)) == {"gather": 2, "scatter": 4}


@pytest.mark.parametrize("topology", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_a_donated_cache_is_compacted_in_place(topology):
    """No copy of the whole cache anywhere in the compiled round."""
    engine = engine_of(topology)
    shape = ",".join(map(str, engine.state.cache.k_NBGAC.shape))
    (round_of,) = (
        program
        for key, program in engine._programs.items()
        if isinstance(key, tuple) and key[0] == "round"
    )
    text = round_of.as_text()
    assert f"[{shape}]" in text
    assert not re.findall(rf"= \w+\[{re.escape(shape)}\]\S* copy\(", text)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_grown_trees_of_a_feedback_drafter(name):
    """EAGLE-2's trees: another shape each round, greedy text is the target's."""
    spec = tiny.spec_of(23)
    options = {"num_draft": 3, **({"layer_ids": (0,)} if name == "eagle3" else {})}
    drafter = base.load(name, options, spec)
    params = tiny.random_params(spec)
    draft = drafting.stir(drafter.init(jax.random.key(0)), scale=0.3)
    weights = Weights(params, draft, frozen_from_params(params))
    world = tiny.World(spec, drafter, weights, -1)
    topology = Topology(DYNAMIC_TREE, depth=3, top_k=4, nodes=12)
    engine = tiny.new_engine(world, slots=3, plain=False, topology=topology)
    prompts = tiny.prompts_of(7, 23, seed=5)
    each = [dataclasses.replace(GREEDY, max_new_tokens=20 + 3 * i) for i in range(7)]
    made = engine.generate(prompts, each)
    assert tiny.greedy_faults(world, made) == []
    assert [len(g.tokens) for g in made] == [s.max_new_tokens for s in each]
    accepted = {r for g in made for r in g.accepted}
    assert {0, 1} <= accepted
    assert all(set(g.drafted) == {12} for g in made)
