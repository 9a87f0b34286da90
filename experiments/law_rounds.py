"""The rounds that are compared: many engines side by side, from one state.

Budgets follow the host's own rule from the ring; those of the first `lag` rounds,
whose ring is empty, are planted.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.law_worlds import World
from spec_jax.config import schema
from spec_jax.core.calibration import AdditiveCost, CostTable
from spec_jax.decode import plan, step
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.state import DecodeState, RoundResult
from spec_jax.decode.step import RoundOptions
from spec_jax.evals.laws import Setting

# Seconds of verifying any draft at all, and of each, in units of a plain round's:
# two requests draft if they can hope for 1.7 drafts together, and then for most.
# What a budget is made from decides between nothing and nearly everything.
_START_SECONDS, _ROW_SECONDS = 0.85, 0.02


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
    """How a subject's rounds are planned in a mode."""
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
