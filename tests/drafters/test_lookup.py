"""Lookup against a search written as loops, and in the engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import proposal as laws
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import even_ladder
from spec_jax.decode.engine import Engine
from spec_jax.decode.forward import Weights
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.plan import CAP_ACCEPT, COMPACT, PlanOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base, lookup
from spec_jax.drafters.frozen import frozen_from_params
from tests.support import drafting, tiny

SIZE_A = 20


def find(text, ngram_max, ngram_min, num_draft):
    """What followed the latest earlier occurrence of the longest known suffix.

    Text that is drafted counts as text: the search's reader runs on into it.
    """
    for size in range(min(ngram_max, len(text)), ngram_min - 1, -1):
        suffix = text[len(text) - size :]
        for end in range(len(text) - 1, size - 1, -1):  # ends before the text does
            if text[end - size : end] == suffix:
                said = list(text)
                for at in range(end, end + num_draft):
                    said.append(said[at])
                return said[len(text) :]
    return []


def load(**options):
    return load_for(drafting.TINY, **options)


def load_for(spec, **options):
    return base.load("lookup", options, spec)


@pytest.mark.parametrize(
    ("num_draft", "ngram_max", "ngram_min"), [(4, 3, 1), (6, 2, 2), (3, 5, 2)]
)
@pytest.mark.parametrize("alphabet", [2, 5])
def test_it_finds_what_a_search_by_loops_finds(
    num_draft, ngram_max, ngram_min, alphabet
):
    drafter = load(num_draft=num_draft, ngram_max=ngram_max, ngram_min=ngram_min)
    rng = np.random.default_rng(alphabet)
    size_b = 160
    # History never fills the allocation: the anchor has no place in it.
    length_B = rng.integers(0, SIZE_A, size_b).astype(np.int32)
    text_BA = rng.integers(0, alphabet, (size_b, SIZE_A)).astype(np.int32)
    anchor_B = rng.integers(0, alphabet, size_b).astype(np.int32)
    made, _ = drafting.Programs(drafter).propose(
        {}, None, text_BA[None], anchor_B, length_B
    )
    usable = np.asarray(made.usable_B)
    for b in range(size_b):
        text = [*text_BA[b, : length_B[b]].tolist(), int(anchor_B[b])]
        want = find(text, ngram_max, ngram_min, num_draft)
        got = np.asarray(made.tokens_BM[b, : usable[b]]).tolist()
        assert got == want, (text, got, want)
    assert set(usable.tolist()) == {0, num_draft}, "both outcomes were seen"


def odds_of(text, ngram_max, drafts):
    """Each draft's log-odds by the occurrences of the longest known suffix."""
    for size in range(min(ngram_max, len(text)), 0, -1):
        suffix = text[len(text) - size :]
        left = [e for e in range(size, len(text)) if text[e - size : e] == suffix]
        if left:
            break
    latest, found = left[-1], []
    for j, draft in enumerate(drafts):
        known = [e for e in left if e == latest or e + j < len(text)]
        left = [e for e in known if e == latest or text[e + j] == draft]
        agree = len(left) - lookup.DISCOUNTS[size + j > 1]
        found.append(np.log(agree / (len(known) + lookup.UNSEEN - agree)))
    return found


@pytest.mark.parametrize("alphabet", [2, 5])
def test_confidence_is_how_often_the_occurrences_agree(alphabet):
    size_m, ngram_max = 5, 3
    rng = np.random.default_rng(alphabet)
    length_B = rng.integers(0, SIZE_A, 160).astype(np.int32)
    text_BA = rng.integers(0, alphabet, (160, SIZE_A)).astype(np.int32)
    anchor_B = rng.integers(0, alphabet, 160).astype(np.int32)
    programs = drafting.Programs(load(num_draft=size_m, ngram_max=ngram_max))
    made, _ = programs.propose({}, None, text_BA[None], anchor_B, length_B)
    for b, odds_M in enumerate(np.asarray(made.confidence_logit_BM)):
        if not made.usable_B[b]:
            assert (odds_M == -np.inf).all()
            continue
        text = [*text_BA[b, : length_B[b]].tolist(), int(anchor_B[b])]
        drafts = made.tokens_BM[b].tolist()
        np.testing.assert_allclose(
            odds_M, odds_of(text, ngram_max, drafts), rtol=1e-5, atol=1e-6
        )
    # What lies behind the anchor is nobody's text.
    at_A = np.arange(SIZE_A)
    other_BA = np.where(at_A < length_B[:, None], text_BA, alphabet - 1 - text_BA)
    again, _ = programs.propose({}, None, other_BA[None], anchor_B, length_B)
    np.testing.assert_array_equal(again.confidence_logit_BM, made.confidence_logit_BM)


def test_rows_that_do_not_count_are_never_found():
    drafter = load(num_draft=3)
    programs = drafting.Programs(drafter)
    batch = drafting.make_batch(drafter, [12, 12], 12)
    batch.tokens_BS[:] = [7, 8, 9, 1, 2, 7, 8, 5, 6, 6, 6, 6]
    state = drafter.init_state(2, 16)
    rows = drafting.rows_of(batch, [0, 0], [5, 5], 8)
    rows = rows.replace(tokens_BT=batch.tokens_BS[:, :8])  # three more than count
    state = programs.prefill({}, None, state, rows)
    five = np.full(2, 5, np.int32)
    made, _ = programs.propose({}, None, state, np.array([7, 5], np.int32), five)
    np.testing.assert_array_equal(made.usable_B, [3, 0])
    np.testing.assert_array_equal(made.tokens_BM[0], [8, 9, 1])
    # The anchor joins the history when its row has run, and not before.
    state = programs.extend({}, None, state, drafting.rows_of(batch, five, [1, 0], 8))
    made, _ = programs.propose(
        {}, None, state, np.array([8, 5], np.int32), np.array([6, 5], np.int32)
    )
    np.testing.assert_array_equal(made.tokens_BM[0], [9, 1, 2])
    np.testing.assert_array_equal(made.usable_B, [3, 0])


@pytest.mark.parametrize("period", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [8, 11, SIZE_A - 1])
def test_a_text_that_repeats_is_drafted_to_the_last_draft(period, length):
    """The latest occurrence ends a period before the anchor."""
    size_m = 6
    text = [3 + i % period for i in range(length + 1 + size_m)]
    state = np.full((1, 1, SIZE_A), 63, np.int32)
    state[0, 0, :length] = text[:length]
    made, _ = drafting.Programs(load(num_draft=size_m, ngram_max=2)).propose(
        {}, None, state, np.array(text[length : length + 1]), np.array([length])
    )
    np.testing.assert_array_equal(made.usable_B, [size_m])
    np.testing.assert_array_equal(made.tokens_BM[0], text[length + 1 :])
    q_BMV = [laws.row_probs(made.law, jnp.array([m]), 67) for m in range(size_m)]
    np.testing.assert_array_equal(np.concatenate(q_BMV), np.eye(67)[text[length + 1 :]])


def test_its_law_is_certain_of_each_draft():
    text = np.array([[[1, 2, 3, 9, 1, 2] + [0] * 14]], np.int32)
    made, _ = drafting.Programs(load(num_draft=4)).propose(
        {}, None, text, np.array([3], np.int32), np.array([6], np.int32)
    )
    np.testing.assert_array_equal(made.tokens_BM[0], [9, 1, 2, 3])
    np.testing.assert_array_equal(laws.prob_of(made.law, made.draft_ids_BM), 1.0)
    q_BV = np.asarray(laws.row_probs(made.law, jnp.array([0]), 67))
    np.testing.assert_array_equal(q_BV[0], np.eye(67)[9])


def test_it_has_nothing_to_train_and_says_so():
    drafter = load()
    assert jax.tree.leaves(drafter.init(jax.random.key(0))) == []
    assert drafter.needs.num_layers == 0 and not drafter.needs.teacher
    with pytest.raises(UserError, match="nothing to train"):
        drafter.train_outputs({}, None, None, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ngram_min": 0}, "ngram_min=0"),
        ({"ngram_min": 4}, "ngram_min=4"),
        ({"num_draft": 0}, "num_draft=0"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(UserError, match=says):
        load(**options)


def test_the_engine_decodes_what_the_target_would_and_accepts_repeats():
    plain = tiny.world(None, seed=3)
    drafter = base.load("lookup", {"num_draft": 3}, plain.spec)
    weights = Weights(plain.params, {}, frozen_from_params(plain.params))
    world = dataclasses.replace(plain, drafter=drafter, weights=weights)
    engine = tiny.new_engine(world, slots=2)
    prompts = tiny.prompts_of(4, plain.spec.vocab_size, high=12)
    handles = [engine.submit(p, Settings(max_new_tokens=40)) for p in prompts]
    done = engine.run()
    made = [done[handle] for handle in handles]
    assert tiny.greedy_faults(world, made) == []
    # Weak layers over a bigram-like head fall into cycles, which lookup follows.
    assert sum(len(g.tokens) for g in made) > 1.3 * sum(g.rounds for g in made)


@pytest.mark.parametrize("mode", [COMPACT, CAP_ACCEPT])
def test_it_is_planned_and_verifies_what_was_found(mode):
    """Nothing is spent on a request without an occurrence, nor on doubtful drafts."""
    plain = tiny.world(None, seed=3)
    drafter = load_for(plain.spec, num_draft=3)
    weights = Weights(plain.params, {}, frozen_from_params(plain.params))
    world = dataclasses.replace(plain, drafter=drafter, weights=weights)
    options = EngineOptions(
        slots=2,
        max_context=128,
        prefill_buckets=(16,),
        round=RoundOptions(plan=PlanOptions(mode=mode, survival_eps=0.5)),
        ladder=even_ladder((2,), 4, 3),
    )
    engine = Engine(world.spec, weights, options, drafter)
    prompts = tiny.prompts_of(4, plain.spec.vocab_size, high=12)
    made = engine.generate(prompts, [Settings(max_new_tokens=40)] * 4)
    assert tiny.greedy_faults(world, made) == []
    drafted = sum(sum(g.drafted) for g in made)
    accepted = sum(sum(g.accepted) for g in made)
    rounds = sum(g.rounds for g in made)
    assert 0 < drafted < 3 * rounds
    assert accepted > 0.5 * drafted
