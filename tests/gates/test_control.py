"""The instruments: the control, the summary, the verdict and the counter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decode.request import Generation, Settings
from spec_jax.drafters import base
from spec_jax.evals import compiles, decoding, identity
from tests.support import drafting, tiny

# ---- The control: shuffled features as a set of weights.


@pytest.fixture(scope="module")
def drafter():
    options = {
        "num_layers": 1,
        "num_draft": 3,
        "mask_id": drafting.MASK_ID,
        "layer_ids": (1, 3),
        "num_anchors": 2,
    }
    return base.load("dflash", options, drafting.TINY)


def test_shuffled_weights_are_shuffled_features(drafter):
    params = drafting.stir(drafter.init(jax.random.key(0)))
    control = decoding.with_shuffled_features(params, seed=4)
    fc = np.asarray(params["params"]["fc"])
    shuffled_fc = np.asarray(control["params"]["fc"])
    # Row i of the control's fc is row source[i] of the drafter's: channel i is
    # read by the weights of channel source[i].
    same_KK = (shuffled_fc[:, None] == fc[None]).all(-1)
    assert (same_KK.sum(0) == 1).all() and (same_KK.sum(1) == 1).all()
    source = same_KK.argmax(1)
    assert np.mean(source == np.arange(len(fc))) < 0.2

    batch = drafting.make_batch(drafter, (14, 11), 16)
    flat_BSX = np.asarray(batch.features_BSLD).reshape(2, 16, -1)
    moved_BSX = np.empty_like(flat_BSX)
    moved_BSX[..., source] = flat_BSX
    moved = batch.replace(features_BSLD=moved_BSX.reshape(batch.features_BSLD.shape))

    programs, frozen = drafting.Programs(drafter), drafting.make_frozen()

    def draft(params, batch):
        proposal, _ = programs.serve(params, frozen, batch, (9, 6), (8,), 8, 32)
        return np.asarray(proposal.law.logits_BTV)

    ours = draft(control, batch)
    np.testing.assert_allclose(ours, draft(params, moved), rtol=0, atol=1e-4)
    assert np.abs(ours - draft(params, batch)).max() > 0.1


def test_the_control_changes_nothing_else(drafter):
    params = drafter.init(jax.random.key(0))
    before = jax.tree.map(np.array, params)
    control = decoding.with_shuffled_features(params)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert control.keys() == params.keys()
    ours, theirs = dict(control["params"]), dict(params["params"])
    assert not np.array_equal(ours.pop("fc"), theirs.pop("fc"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    again = decoding.with_shuffled_features(params)
    np.testing.assert_array_equal(again["params"]["fc"], control["params"]["fc"])


FAMILY = {
    "eagle": {"num_draft": 3, "num_starts": 2},
    "eagle3": {"num_draft": 3, "num_starts": 2, "layer_ids": (1, 3)},
    "dflash": {},
    "dspark": {"markov_rank": 4},
    "dflash2": {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4},
}
BLOCK = {"num_layers": 1, "num_draft": 3, "mask_id": 3, "layer_ids": (1, 3)}


@pytest.mark.parametrize("kind", FAMILY)
def test_rows_of_features_alone_are_shuffled(kind):
    """EAGLE's `fc` reads `[embedding; feature]`, the others' features alone."""
    options = FAMILY[kind] if "eagle" in kind else BLOCK | FAMILY[kind]
    drafter = base.load(kind, options, drafting.TINY)
    params = drafting.stir(drafter.init(jax.random.key(0)))
    size_d = drafting.TINY.hidden_size
    before = np.asarray(params["params"]["fc"])
    after = np.asarray(decoding.with_shuffled_features(params)["params"]["fc"])
    assert after.shape == before.shape
    tokens = size_d if kind == "eagle" else 0
    np.testing.assert_array_equal(after[:tokens], before[:tokens])
    ours, theirs = after[tokens:], before[tokens:]
    assert len(ours) == size_d * max(1, drafter.needs.num_layers)
    same_KK = (ours[:, None] == theirs[None]).all(-1)
    assert (same_KK.sum(0) == 1).all() and (same_KK.sum(1) == 1).all()
    assert np.diagonal(same_KK).mean() < 0.2


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_feedback_drafter_keeps_its_tokens(kind):
    """Its control without features is itself without features."""
    drafter = base.load(kind, FAMILY[kind], drafting.TINY)
    params = drafting.stir(drafter.init(jax.random.key(0)))
    control = decoding.with_shuffled_features(params)
    batch = drafting.make_batch(drafter, (14, 11), 16)
    blind = batch.replace(
        features_BSLD=np.zeros_like(batch.features_BSLD),
        teacher_BSD=np.zeros_like(batch.teacher_BSD),
    )
    programs, frozen = drafting.Programs(drafter), drafting.make_frozen()

    def first_draft(params, batch):
        """Its later drafts read its own outputs for features."""
        proposal, _ = programs.serve(params, frozen, batch, (9, 6), (8,), 8, 32)
        return np.asarray(proposal.law.logits_BTV)[:, 0]

    np.testing.assert_allclose(
        first_draft(control, blind), first_draft(params, blind), rtol=0, atol=1e-4
    )
    apart = first_draft(control, batch) - first_draft(params, batch)
    assert np.abs(apart).max() > 0.1


def test_a_drafter_without_features_has_no_control():
    with pytest.raises(ValueError, match="has no fc"):
        decoding.with_shuffled_features({"params": {"head": jnp.zeros(3)}})


# ---- The summary of decoded prompts.

LOOP = [1, 2, 3, 4, 5, 6, 7, 8] * 3


def decoded(tokens, emitted, accepted, seconds):
    """A record; the first token is the prefill's, the rest the rounds'."""
    assert len(tokens) == 1 + sum(emitted)
    generation = Generation([0], list(tokens), "length", emitted, accepted)
    return decoding.Decoded(generation, seconds)


def plainly(tokens, seconds):
    count = len(tokens) - 1
    return decoded(tokens, [1] * count, [0] * count, seconds)


def test_summary_of_two_texts_and_a_loop():
    first, second = list(range(10, 19)), list(range(20, 25))
    plain = [plainly(first, 0.8), plainly(LOOP, 9.0), plainly(second, 0.4)]
    ours = [
        decoded(first, [4, 3, 1], [3, 2, 0], 0.3),
        decoded(LOOP, [8, 8, 7], [7, 7, 7], 0.1),
        decoded(second, [1, 3], [0, 3], 0.2),  # trimmed: accepted 3, emitted 3
    ]
    made = decoding.summary(plain, ours, num_draft=3)
    assert made["prompts"] == 3 and made["looping_prompts"] == 1
    # 12 tokens by 5 rounds; the two prefill tokens are not among them.
    assert made["accept_length"] == pytest.approx(12 / 5)
    assert made["accept_length_looping"] == pytest.approx(23 / 3)
    # Accepted 3, 2, 0, 0, 3: draft 1 in three rounds of five, draft 3 in two.
    assert made["accept_by_position"] == pytest.approx([3 / 5, 3 / 5, 2 / 5])
    assert made["plain_tokens_per_s"] == pytest.approx(12 / 1.2)
    assert made["tokens_per_s"] == pytest.approx(12 / 0.5)
    assert made["speedup"] == pytest.approx(2.4)
    assert made["plain_step_ms"] == pytest.approx(100.0)
    assert made["mean_tokens"] == pytest.approx((9 + 24 + 5) / 3)
    assert made["longest_run"] == 1


def test_summary_without_rounds_says_none():
    one = [plainly([5], 0.0)]
    made = decoding.summary(one, one, num_draft=2)
    assert made["accept_length"] is None and made["speedup"] is None
    assert made["accept_by_position"] == [0.0, 0.0]


def test_summary_of_loops_alone():
    made = decoding.summary([plainly(LOOP, 1.0)], [plainly(LOOP, 1.0)], num_draft=1)
    assert made["looping_prompts"] == 1 and made["accept_length_looping"] == 1.0
    assert made["accept_length"] is None and made["speedup"] is None


class Answers:
    """Stands where an engine stands: gives the same answers to every question."""

    def __init__(self, *items):
        self.items = [item.generation for item in items]

    def generate(self, prompts, settings):
        del settings
        return self.items[: len(prompts)]


def test_validation_leaves_loops_out_while_it_can():
    text = decoded(list(range(30, 37)), [4, 2], [3, 1], 1.0)
    loop = decoded(LOOP, [8, 8, 7], [7, 7, 7], 1.0)

    def validate(*items):
        prompts = [[0]] * len(items)
        return decoding.served_accept_length(Answers(*items), prompts, Settings())

    assert validate(text, loop) == pytest.approx(3.0)
    assert validate(loop) == pytest.approx(23 / 3)
    assert validate(plainly([5], 0.0)) == 1.0


def test_a_real_decode_is_timed_and_counted():
    engine = tiny.engine("bigram", 3, slots=3, buckets=(7, 64))
    prompts = tiny.prompts_of(2, 23, seed=31)
    settings = Settings(max_new_tokens=20)
    off = dataclasses.replace(settings, speculate=False)
    one = decoding.decode_one(engine, prompts[0], settings)
    slow = decoding.decode_one(engine, prompts[0], off)
    assert one.generation.tokens == slow.generation.tokens
    assert one.seconds > 0 and sum(one.generation.emitted) == 19
    plain, ours = decoding.decode_pairs(engine, engine, prompts, settings)
    assert [d.generation.prompt for d in plain] == prompts
    assert [d.generation.prompt for d in ours] == prompts
    assert decoding.accept_length([slow.generation]) == 1.0


# ---- The verdict on two texts.

GREEDY = Settings(max_new_tokens=12)


@pytest.fixture(scope="module")
def pair():
    """A world, its engine, two prompts and their greedy texts."""
    world = tiny.world("bigram", 3)
    engine = tiny.engine("bigram", 3, slots=3, buckets=(7, 64))
    prompts = tiny.prompts_of(2, 23, seed=33)
    return world, engine, prompts, [g.tokens for g in engine.generate(prompts, GREEDY)]


def verdict(pair, speculative):
    world, engine, prompts, plain = pair
    return identity.compare(
        world.spec, world.params, engine, prompts, plain, speculative, GREEDY
    )


def test_equal_texts_are_identical(pair):
    assert verdict(pair, pair[3]) == identity.Identity(True, 0, 0, "")


@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_wrong_token_is_a_difference(pair, at):
    world, _, prompts, plain = pair
    gap = identity.plain_gap(world.spec, world.params, prompts[1] + plain[1][:at])
    assert gap > 10 * identity.NEAR_TIE
    wrong = list(plain[1])
    wrong[at] = (wrong[at] + 1) % world.spec.vocab_size
    found = verdict(pair, [plain[0], wrong])
    assert not found.identical and found.near_ties == 0
    assert found.first_difference.startswith(f"prompt 1: token {at} is [{wrong[at]}]")
    assert f"gives [{plain[1][at]}]" in found.first_difference


@pytest.mark.parametrize("change", ["short", "long"])
def test_another_length_is_a_difference(pair, change):
    plain = pair[3]
    other = plain[0][:-2] if change == "short" else [*plain[0], 3]
    found = verdict(pair, [other, plain[1]])
    assert not found.identical and found.first_difference.startswith("prompt 0")


def test_the_gap_is_that_of_the_logits_that_follow(pair):
    world, _, prompts, plain = pair
    tokens = prompts[0] + plain[0][:4]
    logits, _ = tiny.full_forward(world.spec, world.params, jnp.array([tokens]))
    low, high = np.sort(np.asarray(logits[0, -1]))[-2:]
    gap = identity.plain_gap(world.spec, world.params, tokens)
    assert gap == pytest.approx(high - low, abs=1e-4)


def test_a_near_tie_is_counted_and_the_text_goes_on(pair):
    """Two ids with the same head column: the higher is as good as the lower."""
    world, engine, prompts, plain = pair
    at = 4
    twin = plain[0][at]
    other = next(t for t in range(world.spec.vocab_size) if t not in plain[0])
    tree = world.params["params"]
    head = tree["head"].at[:, other].set(tree["head"][:, twin] * (1 + 1e-6))
    tied = {"params": {**tree, "head": head}}
    tokens = prompts[0] + plain[0][:at]
    assert identity.plain_gap(world.spec, tied, tokens) < identity.NEAR_TIE

    def judge(tail):
        """`other` in place of `twin`, then any text: the rest is resumed."""
        theirs = [[*plain[0][:at], other, *tail], plain[1]]
        return identity.compare(
            world.spec, tied, engine, prompts, plain, theirs, GREEDY
        )

    found = judge([other] * (GREEDY.max_new_tokens - at - 1))
    assert found == identity.Identity(True, 1, 1, "")
    # The same token where the logits are apart is no tie.
    assert not verdict(pair, [[*plain[0][:at], other], plain[1]]).identical


def test_a_text_resumed_past_a_tie_is_still_judged(pair):
    """What the engine says after the tie must be the plain text again."""
    world, engine, prompts, plain = pair
    at = 4
    other = next(t for t in range(world.spec.vocab_size) if t not in plain[0])
    tree = world.params["params"]
    head = tree["head"].at[:, other].set(tree["head"][:, plain[0][at]])
    tied = {"params": {**tree, "head": head}}

    class Liar:
        def generate(self, prompts, settings):
            made = engine.generate(prompts, settings)
            made[0].tokens[-1] = (made[0].tokens[-1] + 1) % world.spec.vocab_size
            return made

    last = len(plain[0]) - 1
    gap = identity.plain_gap(world.spec, tied, prompts[0] + plain[0][:last])
    assert gap > 10 * identity.NEAR_TIE
    theirs = [[*plain[0][:at], other], plain[1]]
    found = identity.compare(world.spec, tied, Liar(), prompts, plain, theirs, GREEDY)
    assert not found.identical and found.near_ties == 1
    assert found.first_difference.startswith(f"prompt 0: token {last}")


# ---- The counter of compilations.


def test_counting_counts_compilations_inside_the_block():
    program = jax.jit(lambda x: 3 * x + 1)
    small, large = np.zeros(5, np.float32), np.zeros(6, np.float32)
    with compiles.counting() as outer:
        program(small)
        with compiles.counting() as inner:
            program(small)  # cached
            assert inner.compiles == 0
            program(large)  # another shape
        assert inner.compiles == 1
    assert outer.compiles == 2
    program(np.zeros(7, np.float32))
    assert (outer.compiles, inner.compiles) == (2, 1)


def test_counting_leaves_tracing_and_lowering_out():
    with compiles.counting() as counted:
        lowered = jax.jit(lambda x: 5 * x + 2).lower(np.zeros(9, np.float32))
        assert counted.compiles == 0
        lowered.compile()
    assert counted.compiles == 1


def test_counting_sees_eager_work():
    x = jnp.zeros((3, 11), jnp.float32)
    with compiles.counting() as counted:
        jnp.cosh(x)
    assert counted.compiles >= 1
