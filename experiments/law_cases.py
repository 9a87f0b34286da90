"""A case: samples of one program under one setting, their test and their classes."""

from __future__ import annotations

import collections
import dataclasses
import time

import numpy as np

from experiments.law_rounds import first_tokens
from experiments.law_worlds import World
from spec_jax.config import schema
from spec_jax.decode import plan
from spec_jax.decode.state import RoundResult
from spec_jax.evals import laws


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
        seen += classes_of(world, mode, result)
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


def never_seen(cases: list[dict]) -> list[str]:
    """Ways to end that no setting of a drafter and mode showed.

    A narrow setting may leave a poor drafter no way to be accepted often; what
    counts is that each way was among the samples of that program.
    """
    left: dict[str, set[str]] = {}
    for case in cases:
        key = f"{case['drafter']}, {case['mode']}"
        missing = set(case["missing"].split(", ")) - {""}
        left[key] = left.get(key, missing) & missing
    return [f"{key}: {name}" for key, names in left.items() for name in sorted(names)]


def _is_short(world: World, mode: str) -> bool:
    """Rounds may hold fewer drafts than they verify rows for; a plan has none such."""
    return world.subject.drafter == "lookup" and mode == plan.STATIC


def classes_of(world: World, mode: str, result: RoundResult) -> collections.Counter:
    """How rounds ended, counted."""
    r, window = result.num_accepted_B.ravel(), result.verify_len_B.ravel() - 1
    if world.topology.is_chain:
        size_m = world.drafter.layout.num_draft
        if _is_short(world, mode):
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
    if _is_short(world, mode):
        return {f"ended at {r}" for r in range(size_m)} | {f"bonus after {size_m}"}
    ways = ["rejected"] if mode == plan.STATIC else ["rejected", "cut"]
    return {f"{way} at {r}" for way in ways for r in range(size_m)} | {
        f"bonus after {size_m}"
    }
