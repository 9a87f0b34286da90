"""The sampled law of running rounds, against the exact law of a small target.

An engine decodes at least `history` rounds of a request. Its state, caches and
draft state with it, is then what thousands of requests start from, each with a
seed of its own; the production round carries them on, as many rounds as there
are tokens to compare. What each emits is compared with the exact joint law of
the tokens that follow the same text.

Requests that share a budget are an engine's: the program runs many engines side
by side (`jax.vmap` over the round). Their budgets follow the host's own rule
from the ring, the survival of `lag` rounds before; those of the first `lag`
rounds, whose ring is empty, are planted: every budget, and so every cut, occurs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import planted_biases, random_target, training
from spec_jax.config import schema
from spec_jax.core.calibration import AdditiveCost, CostTable
from spec_jax.core.errors import UserError
from spec_jax.core.topology import CHAIN_TOPOLOGY, DYNAMIC_TREE, STATIC_TREE, Topology
from spec_jax.core.vocab import DraftVocab
from spec_jax.decode import plan, step
from spec_jax.decode.engine import Engine, EngineOptions
from spec_jax.decode.forward import Weights
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.state import DecodeState, RoundResult
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.evals import laws
from spec_jax.evals.laws import Setting
from spec_jax.target.spec import TargetSpec

SETTINGS = (
    Setting(),
    Setting(temperature=0.7),
    Setting(top_k=3),
    Setting(temperature=0.8, top_p=0.8),
    Setting(temperature=1.3, min_p=0.15),
    Setting(temperature=0.9, top_k=3, top_p=0.9, min_p=0.05),
)
LEVEL = 0.01  # of all cases together, and of all planted biases together
PROMPT = (1, 0, 2, 1, 1, 0)
# Seconds of verifying any draft at all, and of each, in units of a plain round's:
# two requests draft if they can hope for 1.7 drafts together, and then for most.
# What a budget is made from decides between nothing and nearly everything.
_START_SECONDS, _ROW_SECONDS = 0.85, 0.02


@dataclasses.dataclass(frozen=True)
class Subject:
    """What drafts, and how.

    Attributes:
      name: in the report.
      drafter: a module of `spec_jax.drafters`.
      options: changes of its options.
      kind: of topology.
      one_hot: argmax drafts for sampled requests.
      reduced: the draft vocabulary lacks a token.
      sharp: confidence is a yes or a no and saturates from the second draft on:
        survivals tie, and what ties depends on the drafts.
      lag: of its budgets; 0 is the recipe's.
      budget: that is planted; None: each in turn.
      modes: that it can be run in.
    """

    name: str
    drafter: str
    options: tuple[tuple[str, Any], ...] = ()
    kind: str = "chain"
    one_hot: bool = False
    reduced: bool = False
    sharp: bool = False
    lag: int = 0
    budget: int | None = None
    modes: tuple[str, ...] = plan.MODES


SUBJECTS = (
    Subject("dflash", "dflash"),
    Subject("dflash, one-hot", "dflash", one_hot=True),
    Subject("dspark", "dspark"),
    Subject(
        "dspark, saturated",
        "dspark",
        sharp=True,
        lag=1,
        modes=(plan.CAP_ACCEPT, plan.COMPACT),
    ),
    Subject("dflash2", "dflash2", (("selector_top_k", 3),)),
    Subject("eagle3", "eagle3", reduced=True),
    Subject("eagle", "eagle"),
    Subject("lookup", "lookup", modes=(plan.STATIC,)),
    Subject("eagle, static tree", "eagle", kind=STATIC_TREE, modes=(plan.STATIC,)),
    Subject("eagle3, dynamic tree", "eagle3", kind=DYNAMIC_TREE, modes=(plan.STATIC,)),
)


@dataclasses.dataclass(frozen=True)
class World:
    """A subject's drafter, the target, and where the compared rounds start.

    Attributes:
      state: of one slot, after its history.
      text: the tokens of that slot, its anchor last.
      ways_XK, logits_XKV: see `laws.continuations`.
    """

    subject: Subject
    spec: TargetSpec
    drafter: Drafter
    weights: Weights
    topology: Topology
    state: DecodeState
    text: tuple[int, ...]
    ways_XK: np.ndarray
    logits_XKV: np.ndarray


def topology_of(subject: Subject, serve: schema.Serve) -> Topology:
    """Trees have the recipe's sizes; a static one without parents is a small one."""
    if subject.kind == DYNAMIC_TREE:
        return Topology(
            DYNAMIC_TREE, serve.tree_depth, serve.tree_top_k, serve.tree_nodes
        )
    if subject.kind == STATIC_TREE:
        return Topology(STATIC_TREE, parents=serve.tree_parents)
    return CHAIN_TOPOLOGY


@functools.cache
def make_world(cfg: schema.BenchLaw, subject: Subject) -> World:
    """Builds the drafter and decodes the history in an engine; once for all cases.

    Raises:
      UserError: the drafter's options do not fit.
    """
    spec = random_target.spec_of(cfg.vocab)
    params = random_target.params_of(spec, cfg.seed)
    options = {"num_draft": cfg.serve.num_draft, **dict(subject.options)}
    if subject.drafter in ("dflash", "dspark", "dflash2"):
        options |= {"num_layers": 1, "mask_id": cfg.vocab - 1, "layer_ids": (0,)}
    vocab = None
    if subject.reduced:
        kept = tuple(i for i in range(cfg.vocab) if i != 2)
        vocab = DraftVocab(kept, cfg.vocab)
        options["draft_vocab_size"] = vocab.size
    drafter = base.load(subject.drafter, options, spec)
    weights = random_target.weights_of(drafter, params, cfg.seed, draft_vocab=vocab)
    if subject.sharp:
        weights = random_target.with_sure_confidence(weights)
    topology = topology_of(subject, cfg.serve)
    window = topology.window(drafter.layout.num_draft)
    rounds = cfg.history + 3 + cfg.tokens + 2
    engine = Engine(
        spec,
        weights,
        EngineOptions(
            slots=1,
            max_context=len(PROMPT) + 1 + rounds * window,
            prefill_buckets=(len(PROMPT),),
            plain=False,
            round=RoundOptions(one_hot_draft=subject.one_hot, topology=topology),
        ),
        drafter,
    )
    state, text = after_history(engine, cfg.history, cfg.seed)
    ways_XK, logits_XKV = laws.continuations(spec, params, text, cfg.tokens)
    return World(
        subject,
        spec,
        drafter,
        weights,
        topology,
        state,
        text,
        ways_XK,
        logits_XKV,
    )


def after_history(engine: Engine, rounds: int, seed: int):
    """A request's device state after `rounds` rounds or more, and its text."""
    left = engine.room - len(PROMPT)
    settings = Settings(max_new_tokens=left, temperature=1.0, seed=seed)
    handle = engine.submit(PROMPT, settings)
    engine.step()
    while engine.running(handle).rounds < rounds - 1:
        engine.step()
    state = jax.tree.map(jnp.array, engine.state)
    engine.step()  # books the round that made this state
    generation = engine.running(handle)
    text = (*PROMPT, *generation.tokens)
    if (
        generation.rounds < rounds
        or int(state.slots.length_B[0]) != len(text) - 1
        or int(state.slots.anchor_B[0]) != text[-1]
    ):
        raise AssertionError("the state is not the one after the booked text")
    engine.abort(handle)
    return state, text


def cost_table(requests: int, num_draft: int) -> CostTable:
    """Round times that make drafting pay at some times."""
    rows = (requests, requests + 1, requests * (num_draft + 1))
    last = _START_SECONDS + _ROW_SECONDS * (rows[2] - rows[1])
    seconds = (0.0, _START_SECONDS, last)
    return CostTable(AdditiveCost(1.0, (requests,), (0.0,), rows, seconds))


def best_budget(survival_RM, options: PlanOptions):
    """K of one engine, on the device: the rule of `decode.budget.choose`.

    Every row count has a program of its own, and not drafting is no choice.
    """
    requests, num_draft = survival_RM.shape
    budget_K = np.arange(requests * num_draft + 1)
    seconds_K = cost_table(requests, num_draft).round_time(
        requests, requests + budget_K
    )
    values_X = jnp.sort(survival_RM.reshape(-1))[::-1]
    counts_X = values_X >= options.survival_eps
    gained_K = jnp.concatenate([jnp.zeros(1), jnp.cumsum(values_X * counts_X)])
    rate_K = (requests + gained_K) / jnp.asarray(seconds_K, jnp.float32)
    return jnp.argmax(jnp.where(budget_K <= counts_X.sum(), rate_K, -jnp.inf))


def planted_budgets(lag: int, engines: int, most: int) -> np.ndarray:
    """Budgets `[lag, E]`: 0, 1, ..., `most` in turn, others in each round."""
    return (np.arange(engines) + 3 * np.arange(lag)[:, None]) % (most + 1)


def plan_of(world: World, mode: str) -> PlanOptions:
    temperatures: tuple[float, ...] = ()
    if world.subject.sharp:
        temperatures = (100.0,) + (0.01,) * (world.drafter.layout.num_draft - 1)
    return PlanOptions(mode=mode, temperatures=temperatures)


def make_program(cfg: schema.BenchLaw, world: World, mode: str):
    """`(program, requests)`: the rounds that are compared, compiled at first use.

    The program is a function of (setting's four values, first seed) and returns
    tokens, emitted and accepted counts and verify lengths of `cfg.chunk`
    requests, `[rounds, requests, ...]`.
    """
    num_draft = world.topology.num_draft(world.drafter.layout.num_draft)
    options = plan_of(world, mode)
    requests = cfg.serve.slots if options.is_planned else cfg.chunk
    engines = max(cfg.chunk // requests, 1)
    count = engines * requests
    rows = requests * (num_draft + 1) - 1 if mode == plan.COMPACT else None
    round_options = RoundOptions(
        one_hot_draft=world.subject.one_hot, topology=world.topology, plan=options
    )
    taps = world.drafter.needs.layer_ids
    lag = world.subject.lag or cfg.lag
    planted_JE = np.zeros((cfg.tokens, engines), np.int32)
    planted_JE[:lag] = planted_budgets(lag, engines, requests * num_draft)[: cfg.tokens]
    if world.subject.budget is not None:
        planted_JE[:lag] = world.subject.budget

    def one_round(weights, state, budget):
        return step.round_step(
            world.spec,
            world.drafter,
            taps,
            round_options,
            weights,
            state,
            budget,
            rows=rows,
        )

    def run(weights, state, values, first_seed):
        slots = dataclasses.replace(
            state.slots, remaining_B=jnp.full((1,), 1 << 20, jnp.int32)
        )
        sampling = dataclasses.replace(
            slots.sampling,
            greedy_B=jnp.zeros((1,), bool),
            temperature_B=values[:1],
            top_k_B=values[1:2].astype(jnp.int32),
            top_p_B=values[2:3],
            min_p_B=values[3:],
        )
        slots = dataclasses.replace(slots, sampling=sampling)

        def repeat(axis):
            def one(x):
                x = jnp.repeat(x, requests, axis)
                return jnp.broadcast_to(x, (engines, *x.shape))

            return one

        seed_ER = first_seed + jnp.arange(count).reshape(engines, requests)
        slots = jax.tree.map(repeat(0), slots)
        state = DecodeState(
            *jax.tree.map(repeat(1), (state.cache, state.draft)),
            dataclasses.replace(slots, seed_B=seed_ER.astype(jnp.int32)),
        )

        def body(carry, planted):
            state, ring = carry
            is_planted, budget_E = planted
            if options.is_planned:
                rule = functools.partial(best_budget, options=options)
                chosen_E = jax.vmap(rule)(ring[0]).astype(jnp.int32)
                budget_E = jnp.where(is_planted, budget_E, chosen_E)
            state, result = jax.vmap(one_round, (None, 0, 0))(weights, state, budget_E)
            if options.is_planned:
                ring = jnp.concatenate([ring[1:], result.survival_BM[None]])
            result = dataclasses.replace(result, survival_BM=None)
            return (state, ring), (result, budget_E)

        carry = state, jnp.zeros((lag, engines, requests, num_draft), jnp.float32)
        planted = jnp.arange(cfg.tokens) < lag, jnp.asarray(planted_JE)
        _, (result, budget_JE) = jax.lax.scan(body, carry, planted)
        flat = jax.tree.map(
            lambda x: x.reshape(cfg.tokens, count, *x.shape[3:]), result
        )
        return flat, budget_JE

    program = jax.jit(run)

    def call(setting: Setting, first_seed: int) -> tuple[RoundResult, np.ndarray]:
        values = jnp.asarray(dataclasses.astuple(setting), jnp.float32)
        return jax.device_get(program(world.weights, world.state, values, first_seed))

    return call, count


def first_tokens(result: RoundResult, count: int) -> np.ndarray:
    """The first `count` tokens `[X, count]` that each request emitted."""
    size_j, size_x, size_w = result.tokens_BW.shape
    texts = np.full((size_x, size_j * size_w), -1)
    at_X = np.zeros(size_x, int)
    for tokens_XW, emitted_X in zip(result.tokens_BW, result.emitted_B, strict=True):
        for column in range(size_w):
            rows = np.nonzero(column < emitted_X)[0]
            texts[rows, at_X[rows] + column] = tokens_XW[rows, column]
        at_X += emitted_X
    return texts[:, :count]


def classes_of(world: World, result: RoundResult) -> collections.Counter:
    """How rounds ended, counted."""
    r, window = result.num_accepted_B.ravel(), result.verify_len_B.ravel() - 1
    if world.topology.is_chain:
        size_m = world.drafter.layout.num_draft
        if world.subject.drafter == "lookup":  # fewer drafts than asked for
            kind = np.where(r == size_m, 0, 1)
        else:
            kind = np.where(r == size_m, 0, np.where(r < window, 2, 3))
        names = ("bonus after {}", "ended at {}", "rejected at {}", "cut at {}")
    else:
        kind, names = np.zeros_like(r), ("accepted {}",)
    pairs, counts = np.unique(np.stack([kind, r], 1), axis=0, return_counts=True)
    return collections.Counter(
        {
            names[k].format(at): int(n)
            for (k, at), n in zip(pairs.tolist(), counts, strict=True)
        }
    )


def wanted_classes(world: World, mode: str) -> set[str]:
    """Every way a round of this case can end."""
    size_m = world.drafter.layout.num_draft
    levels = world.topology.levels(size_m)
    if not world.topology.is_chain:
        return {f"accepted {r}" for r in range(levels + 1)}
    if world.subject.drafter == "lookup":
        return {f"ended at {r}" for r in range(size_m)} | {f"bonus after {size_m}"}
    ways = ["rejected"] if mode == plan.STATIC else ["rejected", "cut"]
    return {f"{way} at {r}" for way in ways for r in range(size_m)} | {
        f"bonus after {size_m}"
    }


def run_case(cfg: schema.BenchLaw, world: World, mode: str, program, setting, seed):
    """One case: samples, test and classes, as the report has them."""
    call, count = program
    size_v = world.spec.vocab_size
    counts_X = np.zeros(len(world.ways_XK))
    seen: collections.Counter = collections.Counter()
    budgets: collections.Counter = collections.Counter()
    start, samples = time.perf_counter(), 0
    while samples < cfg.samples:
        result, budget_JE = call(setting, seed + samples)
        if not (result.emitted_B == result.num_accepted_B + 1).all():
            raise AssertionError("a round did not emit r + 1 tokens")
        tokens_XK = first_tokens(result, cfg.tokens)
        cells_X = laws.cell_of(tokens_XK, size_v)
        counts_X += np.bincount(cells_X, minlength=len(counts_X))
        seen += classes_of(world, result)
        budgets += collections.Counter(budget_JE.ravel().tolist())
        samples += count
    test = laws.chi_square(
        counts_X, laws.joint_law(world.ways_XK, world.logits_XKV, setting)
    )
    wanted = wanted_classes(world, mode)
    return {
        "drafter": world.subject.name,
        "topology": world.topology.kind,
        "mode": mode,
        **dataclasses.asdict(setting),
        "samples": samples,
        "chi2": test.chi2,
        "dof": test.dof,
        "p": test.p,
        "impossible": test.impossible,
        "classes": {name: seen[name] for name in sorted(seen)},
        "missing": ", ".join(sorted(wanted - set(seen))),
        "budgets": len(budgets) if mode != plan.STATIC else 0,
        "seconds": time.perf_counter() - start,
    }


def chosen_subjects(cfg: schema.BenchLaw) -> list[Subject]:
    """The subjects that the recipe asks for.

    Raises:
      UserError: none has such a name.
    """
    unknown = [
        name
        for name in cfg.drafters
        if not any(s.name.startswith(name) for s in SUBJECTS)
    ]
    if unknown:
        raise UserError(
            f"drafters={unknown[0]!r} begins no case's name; use some of "
            + ", ".join(repr(s.name) for s in SUBJECTS)
        )
    asked = cfg.drafters or ("",)
    return [s for s in SUBJECTS if any(s.name.startswith(name) for name in asked)]


def settings_of(cfg: schema.BenchLaw) -> tuple[Setting, ...]:
    return SETTINGS[: cfg.settings or None]


def measure(cfg: schema.BenchLaw, subject: Subject, seed: int) -> list[dict]:
    """Every case of a subject; program after program."""
    world = make_world(cfg, subject)
    cases = []
    for mode in (m for m in subject.modes if m in cfg.modes):
        program = make_program(cfg, world, mode)
        for setting in settings_of(cfg):
            first = seed + len(cases) * 2 * cfg.samples
            case = run_case(cfg, world, mode, program, setting, first)
            cases.append(case)
            training.say(
                f"{subject.name}, {mode}, {setting}: p {case['p']:.3g}, "
                f"{case['seconds']:.0f} s"
                + (f", not seen: {case['missing']}" if case["missing"] else "")
            )
    return cases


def measure_bias(cfg: schema.BenchLaw, bias: planted_biases.Bias, seed: int) -> dict:
    """The same test of a case with a mistake planted; its rounds alone have it."""
    subject = next(s for s in SUBJECTS if s.name == bias.subject)
    world = make_world(cfg, subject)
    subject = dataclasses.replace(subject, budget=bias.budget)
    if bias.always:
        subject = dataclasses.replace(subject, lag=cfg.tokens)
    world = dataclasses.replace(world, subject=subject)
    with planted_biases.planted(bias):
        program = make_program(cfg, world, bias.mode)
        case = run_case(cfg, world, bias.mode, program, SETTINGS[0], seed)
    training.say(f"planted: {bias.name}: p {case['p']:.3g}, {case['seconds']:.0f} s")
    keys = ("drafter", "mode", "samples", "chi2", "dof", "p", "impossible")
    return {"bias": bias.name, **{key: case[key] for key in keys}}


def main(cfg: schema.BenchLaw, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs every case and every planted bias."""
    del workdir  # nothing is kept but the report
    cases: list[dict] = []
    subjects = chosen_subjects(cfg)
    start = time.perf_counter()
    for index, subject in enumerate(subjects):
        cases += measure(cfg, subject, seed=(index + 1) * 40_000_000)
        spent = time.perf_counter() - start
        left = spent / (index + 1) * (len(subjects) - index - 1)
        training.say(f"{index + 1} of {len(subjects)} drafters, {left:.0f} s left")
    if not cases:
        raise UserError(
            f"modes={cfg.modes} leaves no case of these drafters; add 'static'"
        )
    planted = [
        measure_bias(cfg, bias, seed=1_000_000_000 + 1_000_000 * index)
        for index, bias in enumerate(planted_biases.BIASES if cfg.planted else ())
    ]
    for row in planted:
        row["rejected"] = row["p"] * len(planted) < LEVEL
    worst = laws.bonferroni([case["p"] for case in cases])
    missing = sum(bool(case["missing"]) for case in cases)
    return {
        "cases": cases,
        "num_cases": len(cases),
        "worst_p": worst,
        "cases_with_missing_classes": missing,
        "planted": planted,
        "planted_found": sum(row["rejected"] for row in planted),
        "passed": worst > LEVEL
        and not missing
        and all(row["rejected"] for row in planted),
    }
