"""Modes change how many rows run, never a token that the same plan emits."""

import dataclasses

import numpy as np
import pytest

from spec_jax.core import calibration
from spec_jax.core.calibration import AdditiveCost, CostTable, Source
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder, even_ladder
from spec_jax.decode.budget import BudgetOptions, Planner
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.step import RoundOptions
from tests.support import asking, planned, tiny

M = planned.M
GREEDY = Settings(max_new_tokens=20)
SAMPLED = Settings(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=5)
BUDGETS = [0, 3, 12, 1, 5, 2, 7, 12, 4, 0, 9]
COST = CostTable(
    AdditiveCost(1e-3, (2, 4), (0.0, 1e-4), (4, 16), (0.0, 2e-3)), (2, 4), (9e-4, 1e-3)
)


def requests_of(count=7):
    prompts = tiny.prompts_of(count, 23, seed=31)
    off = dataclasses.replace(GREEDY, speculate=False)
    own = dataclasses.replace(SAMPLED, num_draft=2, seed=6)
    return prompts, [(GREEDY, SAMPLED, GREEDY, off, own)[i % 5] for i in range(count)]


def made_by(engine, budgets=BUDGETS):
    engine.planner.decide = planned.replay(engine, budgets)
    try:
        return engine.generate(*requests_of())
    finally:
        del engine.planner.decide


def test_compact_and_cap_accept_emit_the_same_tokens():
    """One budget trace, one set of keys; greedy texts are plain decoding's."""
    each = {m: planned.engine(m) for m in ("cap_accept", "compact")}
    each["compact"].trace.clear()
    wide, packed = (made_by(engine) for engine in each.values())
    assert [g.tokens for g in wide] == [g.tokens for g in packed]
    assert [g.drafted for g in wide] == [g.drafted for g in packed]
    assert [g.accepted for g in wide] == [g.accepted for g in packed]
    _, settings = requests_of()
    greedy = [g for g, s in zip(packed, settings, strict=True) if not s.temperature]
    assert tiny.greedy_faults(tiny.world("bigram", M), greedy) == []
    # Ragged, and cut inside accepted runs.
    lens = {tuple(r.verify_lens) for r in each["compact"].trace}
    assert any(len(set(row)) > 2 for row in lens)
    assert {n for row in lens for n in row} == set(range(1, M + 2))
    for record in each["compact"].trace:
        assert sum(record.verify_lens) <= record.choice.rows
    own = [g for g, s in zip(packed, settings, strict=True) if s.num_draft]
    assert own and all(set(g.drafted) == {2} for g in own)


def test_everything_granted_is_static():
    """K = all in every mode: one text, one acceptance."""
    made = [
        made_by(planned.engine(mode), [4 * M])
        for mode in ("static", "cap_accept", "compact")
    ]
    for other in made[1:]:
        assert [g.tokens for g in other] == [g.tokens for g in made[0]]
        assert [g.accepted for g in other] == [g.accepted for g in made[0]]


def test_nothing_granted_is_plain_decoding():
    made = made_by(planned.engine("compact"), [0])
    _, settings = requests_of()
    for generation, s in zip(made, settings, strict=True):
        if s.num_draft is None:
            assert set(generation.emitted) == {1}
    greedy = [g for g, s in zip(made, settings, strict=True) if not s.temperature]
    assert tiny.greedy_faults(tiny.world("bigram", M), greedy) == []


def test_packed_requests_keep_what_they_ask_for():
    """Log-probs and penalties in cut rounds; whoever is retracted goes on."""
    engine = planned.engine("compact")
    prompts = tiny.prompts_of(4, 23, seed=34)
    own = dataclasses.replace(SAMPLED, num_draft=2)
    rules = dataclasses.replace(GREEDY, presence_penalty=1.5, logit_bias={4: 1.0})
    each = [
        dataclasses.replace(s, logprobs=True, top_logprobs=2)
        for s in (GREEDY, own, rules, SAMPLED)
    ]
    engine.planner.decide = planned.replay(engine, BUDGETS)
    try:
        want = engine.generate(prompts, each)
        made = asking.interrupted(engine, prompts, each)
    finally:
        del engine.planner.decide
    for generation, settings in zip([*want, *made], each * 2, strict=True):
        assert len(generation.tokens) == 20
        asking.check_logprobs(generation, settings)
        if settings.temperature == 0:
            assert asking.greedy_faults(generation, settings) == []
    assert {0, 1, 2, 3} == {n for g in (want[0], made[0]) for n in g.drafted}
    # Budgets fell elsewhere; a window of its own leaves even a sampled text alone.
    assert made[1].tokens == want[1].tokens
    assert made[1].accepted == want[1].accepted
    assert asking.is_idle(engine)


def test_raw_acceptance_sees_past_the_cut():
    """What the target accepted, and what the plan let through, are two numbers."""
    engine, table = planned.engine("cap_accept"), tiny.world("bigram", M).weights.draft
    prompt = tiny.prompts_of(1, 23, seed=35)[0]
    seen, fetch = [], engine.fetch
    engine.fetch = lambda tree: seen.append(fetch(tree)) or seen[-1]
    engine.planner.decide = planned.replay(engine, [1])
    try:
        made = engine.generate([prompt], dataclasses.replace(GREEDY, max_new_tokens=40))
    finally:
        del engine.fetch, engine.planner.decide
    text, at, hidden = [*prompt, *made[0].tokens], len(prompt), 0
    for result in seen[1:]:
        if not result.ran_B[0] or at + M >= len(text):
            break
        raw = 0
        while raw < M and int(table[text[at + raw]].argmax()) == text[at + raw + 1]:
            raw += 1
        assert result.verify_len_B[0] == 2
        assert result.raw_accepted_B[0] == raw
        assert result.num_accepted_B[0] == min(raw, 1) == result.full_B[0]
        hidden += raw > 1
        at += int(result.emitted_B[0])
    assert hidden > 2


def test_clamps_alignment_and_a_longer_lag_keep_greedy_texts():
    """Every option of a plan at once, in `compact`."""
    world = tiny.world("bigram", M)
    engine = Engine(
        world.spec,
        world.weights,
        EngineOptions(
            slots=2,
            max_context=128,
            prefill_buckets=(64,),
            plain=False,
            round=RoundOptions(
                plan=PlanOptions(
                    mode="compact",
                    survival_eps=0.05,
                    min_verify_len=2,
                    max_verify_len=3,
                )
            ),
            ladder=Ladder(((2, (5, 8)),)),
            cost=CostTable(COST.cost),
            budget=BudgetOptions(align_rows=True, lag=1, extra_lag=2, wait=True),
        ),
        world.drafter,
    )
    prompts = tiny.prompts_of(6, 23, seed=36)
    each = [GREEDY, dataclasses.replace(GREEDY, num_draft=3), GREEDY] * 2
    made = engine.generate(prompts, each)
    assert tiny.greedy_faults(world, made) == []
    assert engine.planner.relay.lag == 3
    assert engine.planner.counts.no_budget >= 3
    for generation, settings in zip(made, each, strict=True):
        wanted = {1, 2} if settings.num_draft is None else {3}
        assert set(generation.drafted) <= wanted
    known = list(engine.trace)[engine.planner.counts.no_budget :]
    aligned = 0
    for record in known:
        if len(record.verify_lens) == record.running and 4 not in record.verify_lens:
            fitting = record.choice.rows - record.running
            assert record.choice.budget == min(fitting, 2 * record.running)
            aligned += 1
    assert aligned > 3
    assert {1, 2} == {n for g in made[::3] for n in g.drafted}


@pytest.fixture(scope="module")
def scheduled():
    engine = planned.engine("compact")
    before = engine.planner
    engine.planner = Planner(
        dataclasses.replace(before.terms, table=COST),
        BudgetOptions(wait=True, probe_every=6),
    )
    prompts = tiny.prompts_of(40, 23, seed=32)
    settings = [
        dataclasses.replace(GREEDY, max_new_tokens=6 + i % 20)
        if i % 2
        else dataclasses.replace(SAMPLED, seed=i, max_new_tokens=6 + i % 17)
        for i in range(40)
    ]
    engine.trace.clear()
    made = engine.generate(prompts, settings)
    yield engine, settings, made, list(engine.trace)
    engine.planner = before


def test_a_planned_engine_keeps_greedy_texts(scheduled):
    engine, settings, made, trace = scheduled
    greedy = [g for g, s in zip(made, settings, strict=True) if not s.temperature]
    assert tiny.greedy_faults(tiny.world("bigram", M), greedy) == []
    assert sorted(engine.table.free) == [0, 1, 2, 3]
    drafted = [r.choice for r in trace if r.choice.draft]
    assert len({c.budget for c in drafted}) > 3
    assert any(0 < c.budget < c.requests * M for c in drafted)
    assert {c.requests for c in drafted} == {2, 4}
    assert len({(c.requests, c.rows) for c in drafted}) > 2
    assert engine.planner.counts.not_ready == 0  # it waits
    assert 0 < engine.planner.counts.stale < engine.planner.counts.slots
    for record in trace:
        assert record.seconds > 0 and record.choice.seconds > 0
        # The device spends no more than it was given.
        if record.choice.draft:
            spent = sum(record.verify_lens) - len(record.verify_lens)
            assert spent <= record.choice.budget


def test_the_same_requests_give_the_same_budgets(scheduled):
    """An exact lag: budgets depend on the requests, not on the machine."""
    engine, settings, _, _ = scheduled
    prompts, runs = tiny.prompts_of(8, 23, seed=33), []
    for _ in range(2):
        engine.planner = Planner(engine.planner.terms, engine.planner.options)
        engine.rounds = 0
        engine.trace.clear()
        made = engine.generate(prompts, settings[:8])
        choices = [(r.choice, r.verify_lens) for r in engine.trace]
        runs.append(([g.tokens for g in made], choices))
    assert runs[0] == runs[1]


def options_of(mode, **changes):
    return EngineOptions(
        slots=4,
        max_context=128,
        prefill_buckets=(64,),
        round=RoundOptions(plan=PlanOptions(mode=mode, **changes)),
        ladder=planned.LADDER,
    )


def test_what_does_not_fit_is_refused():
    world = tiny.world("bigram", M)

    def make(options):
        Engine(world.spec, world.weights, options, world.drafter)

    with pytest.raises(UserError, match="2 values.*3 drafts"):
        make(options_of("compact", temperatures=(1.0, 1.0)))
    with pytest.raises(UserError, match=r"serve\.ladder.*window"):
        make(dataclasses.replace(options_of("compact"), ladder=even_ladder((4,), M, 2)))
    for source in (
        Source(num_draft=M + 1, ladder=planned.LADDER.buckets),
        Source(num_draft=M, ladder=even_ladder((4,), M + 1, 2).buckets),
    ):
        cost = dataclasses.replace(COST, source=source)
        with pytest.raises(UserError, match="cost table"):
            make(dataclasses.replace(options_of("compact"), cost=cost))
    assert calibration.identity_sts(M).check(M).temperatures == (1.0,) * M


def test_collect_reports_raw_confidence():
    """What temperatures are fitted on: full windows and every draft's log-odds."""
    import jax

    from spec_jax.decode import step

    world = tiny.world("bigram", M)
    engine = planned.engine("static")
    options = RoundOptions(plan=PlanOptions(collect=True))
    _, result = jax.eval_shape(
        lambda w, s: step.round_step(
            world.spec, world.drafter, (0,), options, w, s, requests=2
        ),
        engine.weights,
        engine.state,
    )
    assert result.confidence_logit_BM.shape == (2, M)
    assert result.confidence_logit_BM.dtype == np.float32
    assert result.survival_BM is None
