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

    law_worlds    who drafts, for which target, and where the rounds start
    law_rounds    the program of rounds, and their budgets
    law_cases     samples, test and classes of one case
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

from experiments import planted_biases
from experiments.law_cases import never_seen, run_case
from experiments.law_rounds import make_program
from experiments.law_worlds import SUBJECTS, Subject, chosen_subjects, make_world
from experiments.progress import say
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.evals import laws
from spec_jax.evals.laws import Setting

SETTINGS = (
    Setting(),
    Setting(temperature=0.7),
    Setting(top_k=3),
    Setting(temperature=0.8, top_p=0.8),
    Setting(temperature=1.3, min_p=0.15),
    Setting(temperature=0.9, top_k=3, top_p=0.9, min_p=0.05),
)
LEVEL = 0.01  # of all cases together, and of all planted biases together


def settings_of(cfg: schema.BenchLaw) -> tuple[Setting, ...]:
    """The sampling settings that the recipe asks for."""
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
            say(
                f"{subject.name}, {mode}, {setting}: p {case['p']:.3g}, "
                f"{case['seconds']:.0f} s"
                + (f", not seen: {case['missing']}" if case["missing"] else "")
            )
    return cases


def measure_bias(cfg: schema.BenchLaw, bias: planted_biases.Bias, seed: int) -> dict:
    """The same test of a case with a mistake planted; its rounds alone have it.

    Where other budgets are planted than the case itself has, the case is also
    run with them and without the mistake: `control_p`.
    """
    subject = next(s for s in SUBJECTS if s.name == bias.subject)
    world = make_world(cfg, subject)
    subject = dataclasses.replace(subject, budget=bias.budget)
    if bias.always:
        subject = dataclasses.replace(subject, lag=cfg.tokens)
    world = dataclasses.replace(world, subject=subject)
    cfg = dataclasses.replace(cfg, samples=cfg.samples * bias.times)

    def run():
        program = make_program(cfg, world, bias.mode)
        return run_case(cfg, world, bias.mode, program, SETTINGS[0], seed)

    control = run() if bias.budget is not None else None
    with planted_biases.planted(bias):
        case = run()
    say(f"planted: {bias.name}: p {case['p']:.3g}, {case['seconds']:.0f} s")
    keys = ("drafter", "mode", "samples", "chi2", "dof", "p", "impossible")
    return {
        "bias": bias.name,
        **{key: case[key] for key in keys},
        "control_p": None if control is None else control["p"],
    }


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
        say(f"{index + 1} of {len(subjects)} drafters, {left:.0f} s left")
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
    controls = [row["control_p"] for row in planted if row["control_p"] is not None]
    worst = laws.bonferroni([case["p"] for case in cases] + controls)
    missing = never_seen(cases)
    return {
        "cases": cases,
        "num_cases": len(cases),
        "worst_p": worst,
        "cases_with_missing_classes": sum(bool(case["missing"]) for case in cases),
        "never_seen": "; ".join(missing),
        "planted": planted,
        "planted_found": sum(row["rejected"] for row in planted),
        "passed": worst > LEVEL
        and not missing
        and all(row["rejected"] for row in planted),
    }
