"""The table that papers print: every drafter, equal data, equal positions.

One text, one feature store, one number of supervised positions, one verifier.
Each drafter is trained as its own recipe says and resumes where it was left;
prompts that nobody trained on are decoded plainly and with each drafter in
turn, one set and one temperature at a time. Lookup, which has nothing to train,
is the baseline.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from typing import Any

import jax
import rich.console
import rich.table

from experiments import serving, session, training
from experiments.training import Clock, say
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.evals import comparison

BASELINE = "lookup"


def recipe_of(cfg: schema.BenchFamily, name: str) -> schema.Pipeline:
    """The recipe of one drafter, over the family's data and positions.

    Raises:
      UserError: no such recipe file, or it refuses the name.
    """
    paths = [p / cfg.recipe for p in (pathlib.Path(), session.ROOT)]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        raise UserError(f"recipe={cfg.recipe!r} is not there; name a recipe file")
    spec = importlib.util.spec_from_file_location("family_recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = loading.to_recipe(module.get_config(name))
    if not isinstance(own, schema.Pipeline):
        raise UserError(f"recipe={cfg.recipe!r} trains nothing; name a training recipe")
    train = dataclasses.replace(
        own.train,
        positions=cfg.positions,
        starts=cfg.starts,
        max_minutes=0.0,
        eval_prompts=cfg.validation_prompts,
    )
    return dataclasses.replace(
        own,
        seed=cfg.seed,
        target=cfg.target,
        data=cfg.data,
        capture=cfg.capture,
        serve=cfg.serve,
        train=train,
    )


def main(cfg: schema.BenchFamily, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains what is not trained yet, decodes, and prints the table."""
    target, params = serving.load_serving_target(cfg.target)
    cfg = dataclasses.replace(
        cfg,
        data=dataclasses.replace(
            cfg.data, folder=cfg.data.folder or str(workdir / "data")
        ),
    )
    recipes = {name: recipe_of(cfg, name) for name in cfg.drafters}
    for recipe in recipes.values():
        training.check_early(recipe, target, serving.new_drafter(recipe, target))
    metrics: dict[str, Any] = {}
    prepared = None
    for name, recipe in recipes.items():
        folder = workdir / name
        folder.mkdir(parents=True, exist_ok=True)
        say(f"== {name}")
        if prepared is None:
            # One text and one draft vocabulary for all.
            prepared = training.prepare(
                recipe, target, params, recipe.data.mask_id, workdir
            )
        clock = Clock(folder / "seconds.json")
        made = training.make_drafter(recipe, prepared, folder, clock)
        metrics[name] = training_facts(made, prepared)
    assert prepared is not None
    for name, recipe in recipes.items():
        found = decode_sets(cfg, prepared, recipe, workdir / name / "export", name)
        metrics[name] |= found
    print_table(metrics)
    acceptance = {
        name: next(iter(found["sets"].values()))["greedy"]["accept_by_position"]
        for name, found in metrics.items()
        if 0.0 in cfg.temperatures
    }
    return metrics | {
        "order": verdicts(metrics),
        "series": {"acceptance": acceptance},
    }


def training_facts(made: training.Made, prepared: training.Prepared) -> dict[str, Any]:
    """Positions, tokens, seconds and parameters of one drafter."""
    result = made.result
    return {
        "params": sum(x.size for x in jax.tree.leaves(made.params)),
        "train_positions": result.slots if result else 0,
        "unique_tokens": prepared.made.answer_tokens if result else 0,
        "train_wall_s": result.seconds if result else 0.0,
        "train_steps": result.step if result else 0,
        "best_step": result.best_step if result else 0,
        "export_parity_max_abs": made.parity_max_abs,
    }


def decode_sets(cfg, prepared, recipe, folder, name) -> dict[str, Any]:
    """Accept lengths and speed-ups of one drafter on every set and temperature."""
    target, params = prepared.target, prepared.params
    exported = serving.load_drafter(str(folder), target)
    serve = training.one_by_one(recipe.serve)
    plain = serving.make_engine(target, params, serve)
    ours = serving.make_engine(target, params, serve, exported, plain=False)
    sets: dict[str, list] = {}
    made = prepared.made
    held = list(zip(made.held_out, made.held_out_sets, strict=True))
    # The first few chose each drafter's weights; they measure nothing.
    for ids, which in held[cfg.validation_prompts :]:
        sets.setdefault(which, []).append(list(ids))
    found: dict[str, Any] = {}
    for which, prompts in sets.items():
        found[which] = {}
        for temperature in cfg.temperatures:
            settings = serving.settings_from(
                serve,
                temperature=temperature,
                max_new_tokens=cfg.bench.max_new_tokens,
            )
            kind = "greedy" if temperature == 0 else f"t{temperature:g}"
            say(f"{name}, {which}, {kind}")
            some = prompts[: cfg.bench.max_prompts or None]
            found[which][kind], _, _ = comparison.measure(plain, ours, some, settings)
    first = next(iter(found.values()))
    kind = "greedy" if "greedy" in first else next(iter(first))
    return {
        "sets": found,
        "accept_length": {s: k[kind]["accept_length"] for s, k in found.items()},
        "accept_by_position": {
            s: k[kind]["accept_by_position"] for s, k in found.items()
        },
        "speedup": {s: k[kind]["speedup"] for s, k in found.items()},
    }


# (better, worse): what the article's section 7 leads one to expect.
EXPECTED = (("dspark", "dflash"), ("dflash2", "dflash"), ("eagle3", "eagle"))


def verdicts(metrics: dict[str, Any]) -> dict[str, Any]:
    """For each expected order, whether it holds on each set and temperature."""
    names = [n for n in metrics if n != BASELINE]
    pairs = [*EXPECTED, *((n, BASELINE) for n in names if BASELINE in metrics)]
    found = {}
    for better, worse in pairs:
        if better in metrics and worse in metrics:
            for which, kinds in metrics[better]["sets"].items():
                for kind, one in kinds.items():
                    other = metrics[worse]["sets"][which][kind]["accept_length"]
                    mine = one["accept_length"]
                    if mine is not None and other is not None:
                        found[f"{better} over {worse}, {which}, {kind}"] = mine - other
    return found


def print_table(metrics: dict[str, Any]) -> None:
    """Accept length (speed-up) of every drafter, set and temperature."""
    columns = [
        (which, kind)
        for which, kinds in next(iter(metrics.values()))["sets"].items()
        for kind in kinds
    ]
    table = rich.table.Table("drafter", "parameters", "positions", "train s")
    for which, kind in columns:
        table.add_column(f"{which}, {kind}")
    for name, found in metrics.items():
        cells = []
        for which, kind in columns:
            one = found["sets"][which][kind]
            length, speed = one["accept_length"], one["speedup"]
            cells.append("-" if length is None else f"{length:.2f} ({speed:.2f}x)")
        table.add_row(
            name,
            f"{found['params']:,}",
            f"{found['train_positions']:,.0f}",
            f"{found['train_wall_s']:.0f}",
            *cells,
        )
    rich.console.Console().print(table)
