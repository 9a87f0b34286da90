"""What a request may ask for, windows of its own, and speculation that gives up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import verify_layout
from spec_jax.core.errors import UserError
from spec_jax.core.proposal import Proposal
from spec_jax.decode import verify
from spec_jax.decode.auto_off import (
    ACCEPTANCE,
    CONTEXT,
    LOAD,
    AutoOff,
    accept_length,
    reason_off,
)
from spec_jax.decode.request import (
    Offer,
    Settings,
    check_features,
    settings_of,
)
from spec_jax.decode.state import empty_slots
from spec_jax.sampling import transform
from tests.support import asking, tiny


def test_unknown_fields_are_refused():
    for field in ("n", "best_of", "grammar", "response_format", "beam_width"):
        with pytest.raises(UserError, match=f"{field}=1 is not supported"):
            settings_of({"max_new_tokens": 3, field: 1})
    with pytest.raises(UserError, match="num_draft=-1"):
        settings_of({"num_draft": -1})
    made = settings_of({"max_new_tokens": 3, "logit_bias": {"4": 1}, "stop": ["a"]})
    assert made == Settings(3, logit_bias=((4, 1.0),), stop=("a",))
    assert hash(made) == hash(Settings(3, logit_bias={4: 1.0}, stop="a"))


WHOLE, NUMBER = ("1", 1.5, 1.0, True, [1]), ("1", True, [1.0], {})
WRONG = {
    "max_new_tokens": (*WHOLE, None),
    "temperature": (*NUMBER, None),
    "top_k": (*WHOLE, None),
    "top_p": (*NUMBER, None, "high"),
    "min_p": (*NUMBER, None),
    "seed": WHOLE,
    "speculate": ("false", 0, 1, None, []),
    "stop_ids": (3, "34", None, [1.5], ["3"], [True], {3: 1}),
    "ignore_eos": ("true", 1, None),
    "stop": (3, None, {"a": 1}, [3], [None], [b"a"], [["a"]]),
    "presence_penalty": (*NUMBER, None),
    "frequency_penalty": (*NUMBER, None),
    "repetition_penalty": (*NUMBER, None),
    "logit_bias": (
        None,
        4,
        "4",
        [4],
        ["41"],
        [(4,)],
        [(4.5, 1.0)],
        {"4.5": 1.0},
        {"x": 1.0},
        {4: "1"},
        {4: True},
        {4: None},
        {4: 10**400},
        {4: float("nan")},
    ),
    "logprobs": ("yes", 1, None),
    "top_logprobs": (*WHOLE, None),
    "features": ("yes", 1, None),
    "num_draft": WHOLE,
}


def test_wrong_types_are_refused_by_name():
    assert set(WRONG) == {f.name for f in dataclasses.fields(Settings)}
    for field, values in WRONG.items():
        for value in values:
            with pytest.raises(UserError, match=f"^{field}"):
                settings_of({field: value})
    made = settings_of(
        {"temperature": 1, "seed": None, "num_draft": None, "stop_ids": [np.int64(4)]}
    )
    assert made.stop_ids == (4,) and made.temperature == 1


def test_window_of_its_own():
    """So many drafts in every round, whoever the neighbours are."""
    engine = asking.engine()
    prompts = tiny.prompts_of(3, 23, seed=60)
    made = {}
    for size in (0, 1, 2, 3):
        own = dataclasses.replace(asking.SAMPLED, num_draft=size)
        alone = engine.generate(prompts[:1], own)[0]
        crowd = engine.generate(prompts, [own, asking.GREEDY, asking.SAMPLED])[0]
        assert alone.tokens == crowd.tokens
        assert set(alone.drafted) == {size}
        made[size] = alone
    assert made[0].rounds > made[3].rounds
    offer = dataclasses.replace(engine.offer, is_chain=False)
    for size, match in ((4, "num_draft=4 is more than the 3"), (2, "cuts a tree")):
        with pytest.raises(UserError, match=match):
            check_features(Settings(num_draft=size), offer)
    check_features(Settings(num_draft=3), offer)
    # A request that does not speculate has no window to refuse.
    check_features(Settings(num_draft=9, speculate=False), offer)
    with pytest.raises(UserError, match="more than the 0"):
        check_features(
            Settings(num_draft=1), Offer(23, False, None, False, 0, is_chain=True)
        )


def test_seed_alone_decides():
    """Same seed, other neighbours, another slot, another moment (b27)."""
    engine = asking.engine()
    prompts = tiny.prompts_of(6, 23, seed=61)
    want = engine.generate(prompts[:1], asking.SAMPLED)[0]
    for shift in (1, 3):
        others = [
            Settings(3 + i, temperature=1.3, seed=i, presence_penalty=0.1 * i)
            for i in range(5)
        ]
        order = [*others[:shift], asking.SAMPLED, *others[shift:]]
        lined = [*prompts[1 : 1 + shift], prompts[0], *prompts[1 + shift :]]
        made = engine.generate(lined, order)[shift]
        assert made.tokens == want.tokens and made.accepted == want.accepted


def test_reasons_to_switch_off():
    limits = AutoOff(min_accept_length=1.5, rounds=4, max_active=2, max_context=50)

    def reason(accepted, length, active, verified=3):
        rounds = [(r, verified) for r in accepted]
        return reason_off(limits, rounds, length, active)

    assert reason([0, 0, 0], 50, 2) is None  # too few rounds to judge
    assert reason([3, 0, 1, 0, 0], 50, 2) == ACCEPTANCE  # 5 / 4
    assert reason([0, 0, 1, 1, 0], 50, 2) is None  # 6 / 4
    assert reason([0] * 4, 51, 3) == CONTEXT
    assert reason([1] * 4, 50, 3) == LOAD
    assert reason_off(AutoOff(), [(0, 3)] * 99, 10**6, 99) is None
    # Windows of one draft, always right, are no collapse; never right, they are.
    tight = AutoOff(min_accept_length=2.5, rounds=4)
    assert reason_off(tight, [(1, 1)] * 4, 50, 1) == ACCEPTANCE
    assert reason_off(tight, [(1, 1), (1, 1), (3, 3), (1, 1)], 50, 1) is None
    assert reason_off(limits, [(0, 1)] * 4, 50, 1) == ACCEPTANCE


def test_the_accept_length_of_cut_windows_is_that_of_whole_ones():
    whole = [(3, 3), (0, 3), (1, 3), (2, 3), (0, 3)]
    assert accept_length(whole) == pytest.approx(1 + 6 / 5)
    # 3 of 5 first drafts right; a cut behind one of them hides the second draft.
    cut = [(1, 1), (0, 3), (1, 3), (2, 3), (0, 3)]
    assert accept_length(cut) == pytest.approx(1 + 3 / 5 + 3 / 5 * 1 / 2)
    assert accept_length([]) == 1.0
    rng = np.random.default_rng(0)
    alive_NM = np.minimum.accumulate(rng.random((20_000, 4)) < [0.8, 0.7, 0.5, 0.4], 1)
    right_N, window_N = alive_NM.sum(1), rng.integers(1, 5, 20_000)
    rounds = list(zip(np.minimum(right_N, window_N).tolist(), window_N, strict=True))
    # A mean over 20,000 rounds of a number in [1, 5]: four errors are below 0.06.
    assert accept_length(rounds) == pytest.approx(1 + right_N.mean(), abs=0.06)
    for field, value in [("rounds", 0), ("max_active", -1), ("max_context", -1)]:
        with pytest.raises(UserError, match=rf"^auto_off\.{field}={value}"):
            AutoOff(**{field: value})
    with pytest.raises(UserError, match=r"^auto_off\.min_accept_length"):
        AutoOff(min_accept_length=-1.0)


LIMITS = AutoOff(min_accept_length=1.3, rounds=4, max_active=2, max_context=60)


def test_speculation_switches_itself_off():
    """Collapse and context for good, load while it lasts; the text stays."""
    engine, world = asking.engine(LIMITS), asking.world()
    prompts = tiny.prompts_of(4, 23, seed=62, low=10, high=12)
    settings = dataclasses.replace(asking.GREEDY, max_new_tokens=70)
    own = dataclasses.replace(settings, num_draft=3)
    plain = engine.generate(prompts, asking.off(settings))
    texts = [g.tokens for g in plain]

    def off_after(prompts, each):
        before = engine.metrics()["auto_off"]
        made = engine.generate(prompts, each)
        assert [g.tokens for g in made] == texts[: len(prompts)]
        after = engine.metrics()["auto_off"]
        return made, {r: after[r] - before[r] for r in after}

    # Context: drafts up to about 60 tokens, one round late.
    made, reasons = off_after(prompts[:1], settings)
    assert reasons == {"acceptance": 0, "load": 0, "context": 1}
    first_off = made[0].drafted.index(0)
    assert set(made[0].drafted[:first_off]) == {3}
    assert set(made[0].drafted[first_off:]) == {0}
    length = len(prompts[0]) + 1 + sum(made[0].emitted[:first_off])
    assert 60 < length <= 60 + 2 * engine.window
    # Collapse: a drafter that knows nothing.
    blunt = jnp.roll(world.weights.draft, 7, axis=1)
    engine.weights = dataclasses.replace(world.weights, draft=blunt)
    try:
        made, reasons = off_after(prompts[:2], [settings, own])
    finally:
        engine.weights = world.weights
    assert reasons == {"acceptance": 1, "load": 0, "context": 0}
    first_off = made[0].drafted.index(0)
    assert 4 <= first_off <= 7 and set(made[0].drafted[first_off:]) == {0}
    assert set(made[1].drafted) == {3}  # its own window is never switched off
    # Load: three at once decode plainly; what is left drafts again.
    short = dataclasses.replace(settings, max_new_tokens=12)
    before = engine.metrics()["auto_off"]
    made = engine.generate(
        prompts[:3], [dataclasses.replace(short, max_new_tokens=30), short, short]
    )
    assert engine.metrics()["auto_off"][LOAD] - before[LOAD] == 3
    drafted = made[0].drafted
    assert 0 in drafted and drafted[0] == 3 and drafted[-1] == 3
    assert [g.tokens for g in made] == [
        t[: len(g.tokens)] for t, g in zip(texts, made, strict=False)
    ]
    again = engine.generate(
        prompts[:3], [dataclasses.replace(short, max_new_tokens=30), short, short]
    )
    assert [g.drafted for g in again] == [g.drafted for g in made]
    assert asking.is_idle(engine)


def test_metrics_count():
    engine = asking.engine()
    before = engine.metrics()
    made = engine.generate(
        tiny.prompts_of(3, 23, seed=63),
        [asking.GREEDY, asking.SAMPLED, Settings(8, stop_ids=tuple(range(8)))],
    )
    after = engine.metrics()
    assert after["emitted"] - before["emitted"] == sum(len(g.tokens) for g in made)
    assert after["accepted"] - before["accepted"] == sum(sum(g.accepted) for g in made)
    assert after["rounds"] - before["rounds"] >= max(g.rounds for g in made)
    assert after["host_reads"] - before["host_reads"] == (
        after["rounds"] - before["rounds"] + 3
    )
    ends = {r: after["finished"][r] - before["finished"][r] for r in after["finished"]}
    assert sum(ends.values()) == 3 and ends["abort"] == ends["error"] == 0


@pytest.mark.parametrize("greedy", [True, False])
def test_accept_changes_no_input(greedy):
    """Laws, logits and history are as they were (b17)."""
    size_b, size_m, vocab = 2, 3, 7
    rng = np.random.default_rng(0)
    slots = empty_slots(size_b, 1, num_biases=2, vocab_size=vocab)
    slots = slots.replace(
        active_B=jnp.ones((size_b,), bool),
        sampling=slots.sampling.replace(
            greedy_B=jnp.full((size_b,), greedy),
            rules=slots.sampling.rules.replace(
                presence_B=jnp.asarray([0.5, 0.0], jnp.float32)
            ),
        ),
    )
    logits = rng.normal(size=(size_b, size_m + 1, vocab)).astype(np.float32)
    draft_logits = jnp.asarray(logits[:, :size_m] * 0.5)
    ids = jnp.asarray(rng.integers(0, vocab, (size_b, size_m)), jnp.int32)
    proposal = Proposal(
        ids, ids, transform.law_of(draft_logits, slots.sampling), jnp.full((2,), 3)
    )
    layout = verify_layout.chain(slots.anchor_B, ids, jnp.full((2,), 4))
    held = (jnp.asarray(logits), slots, proposal, layout)
    copies = jax.tree.map(lambda x: np.array(x, copy=True), held)
    for _ in range(2):
        verify.accept(held[0], jnp.ones(2, bool), *held[1:])
        jax.tree.map(np.testing.assert_array_equal, held, copies)
