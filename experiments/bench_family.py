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
from collections.abc import Iterable
from typing import Any

import jax
import rich.console
import rich.markup
import rich.table

from experiments import (
    optional_part,
    preparing,
    serving,
    session,
    synthesis,
    synthesis_prompts,
    training,
)
from experiments.clock import Clock
from experiments.progress import say
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.decode.options import room_of
from spec_jax.drafters.base import Drafter
from spec_jax.evals import comparison, teacher_forced
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.target.loading import Target

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
        batch=cfg.batch,
        accumulation=1,
        max_minutes=0.0,
        eval_prompts=cfg.validation_prompts,
    )
    return dataclasses.replace(
        own,
        seed=cfg.seed,
        target=cfg.target,
        data=cfg.data,
        capture=cfg.capture,
        # How the prompts are decoded in the end; training reads none of it.
        serve=dataclasses.replace(cfg.serve, top_k=0, top_p=1.0, min_p=0.0),
        train=train,
    )


def shared_planes(
    capture: schema.Capture, drafters: Iterable[Drafter]
) -> schema.Capture:
    """What the one store keeps: the layers of all drafters, and the teacher."""
    needs = [drafter.needs for drafter in drafters]
    ids = capture.layer_ids or tuple(sorted({i for n in needs for i in n.layer_ids}))
    teacher = capture.teacher or any(n.teacher for n in needs)
    return dataclasses.replace(capture, layer_ids=ids, teacher=teacher)


def shared_mask(data: schema.Data, drafters: Iterable[Drafter]) -> int:
    """The token that no prompt may hold, -1 for none.

    Raises:
      UserError: the recipe names none and the drafters have several.
    """
    masks = {serving.mask_id_of(drafter) for drafter in drafters} - {-1}
    if data.mask_id >= 0 or not masks:
        return data.mask_id
    if len(masks) > 1:
        raise UserError(
            f"data.mask_id={data.mask_id} leaves the mask to the drafters, and they "
            f"have several, {sorted(masks)}; give them one drafter.options.mask_id"
        )
    return masks.pop()


def check_family(
    cfg: schema.BenchFamily,
    recipes: dict[str, schema.Pipeline],
    drafters: dict[str, Drafter],
    target: Target,
) -> None:
    """Refuses, before any work, what would end it late.

    Raises:
      UserError: no temperature; what `training.check_early` refuses; a layer that
        the store lacks; or answers that are longer than a slot.
    """
    if not cfg.temperatures:
        raise UserError("temperatures=() is empty; name some (0 is greedy)")
    shards = mesh_lib.batch_shards(training.make_mesh(recipes[cfg.drafters[0]]))
    trained = any(map(preparing.trains, drafters.values()))
    if trained and cfg.batch * jax.process_count() % shards:
        raise UserError(
            f"batch={cfg.batch} must be a multiple of {shards}, the devices that share "
            f"it; say --config.batch={-(-cfg.batch // shards) * shards}"
        )
    prompt = cfg.data.max_tokens - cfg.data.max_new_tokens
    for name, recipe in recipes.items():
        drafter = drafters[name]
        training.check_early(recipe, target, drafter)
        preparing.capture_schema(recipe, drafter)
        serve = recipe.serve
        trained = serve.num_draft or drafter.layout.num_draft
        window = serving.topology_of(serve).window(trained)
        room = room_of(serve.max_context, window, target.spec)
        if prompt + cfg.bench.max_new_tokens > room:
            raise UserError(
                f"bench.max_new_tokens={cfg.bench.max_new_tokens} and prompts of up to "
                f"{prompt} tokens are more than the {room} a slot of {name} can hold; "
                f"lower it, or raise serve.max_context={serve.max_context}"
            )


def measured_prompts(
    cfg: schema.BenchFamily, made: synthesis.Synthesis
) -> dict[str, list[list[int]]]:
    """The held-out prompts of each set that are decoded.

    The first few choose each drafter's weights; they measure nothing.

    Raises:
      UserError: nothing is left of a set.
    """
    prompts = synthesis_prompts.read_prompts(cfg.data)
    named = {synthesis_prompts.set_of(p.source) for p in prompts}
    held = list(zip(made.held_out, made.held_out_sets, strict=True))
    sets: dict[str, list] = {which: [] for _, which in held}
    # Of every named file some are held out, as far as it has any.
    sets |= {which: [] for which in sorted(named - set(sets))}
    for ids, which in held[cfg.validation_prompts :]:
        sets[which].append(list(ids))
    for which, left in sets.items():
        if not left:
            raise UserError(
                f"data.held_out={cfg.data.held_out} leaves no prompt of {which!r} to "
                f"measure: {len(held)} prompts are held out, and the first "
                f"validation_prompts={cfg.validation_prompts} choose weights; raise "
                "data.held_out, add prompts, or lower validation_prompts"
            )
    return sets


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
    drafters = {n: serving.new_drafter(recipe, target) for n, recipe in recipes.items()}
    cfg = dataclasses.replace(
        cfg, capture=shared_planes(cfg.capture, drafters.values())
    )
    recipes = {name: recipe_of(cfg, name) for name in cfg.drafters}
    check_family(cfg, recipes, drafters, target)
    # One text and one draft vocabulary for all.
    mask_id = shared_mask(cfg.data, drafters.values())
    first = recipes[cfg.drafters[0]]
    reader = next(
        filter(preparing.trains, drafters.values()), drafters[cfg.drafters[0]]
    )
    prepared = preparing.prepare(first, target, params, mask_id, workdir, reader)
    sets = measured_prompts(cfg, prepared.made)
    metrics: dict[str, Any] = {}
    for name, recipe in recipes.items():
        folder = workdir / name
        folder.mkdir(parents=True, exist_ok=True)
        say(f"== {name}")
        clock = Clock(folder / "seconds.json")
        made = training.make_drafter(recipe, prepared, folder, clock)
        metrics[name] = training_facts(made, prepared, folder)
    for name in recipes:
        export = workdir / name / "export"
        metrics[name] |= decode_sets(cfg, prepared, export, name, sets)
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


def training_facts(
    made: training.Made, prepared: preparing.Prepared, folder: pathlib.Path
) -> dict[str, Any]:
    """Positions, tokens, seconds and parameters of one drafter, and its last metrics.

    `teacher_forced` are those of the kept weights (`evals.teacher_forced`): what
    drafts would do behind the text's own tokens.
    """
    result, forced = made.result, {}
    if result:
        records = folder / "train" / "metrics.jsonl"
        forced = teacher_forced.read(records, result.best_step)
        if not optional_part.drafts_with_part(made.drafter):
            forced.pop("walk_accept_length", None)  # of a walk that does not draft
    return {
        "teacher_forced": forced,
        "params": sum(x.size for x in jax.tree.leaves(made.params)),
        "train_positions": result.slots if result else 0,
        "unique_tokens": prepared.made.answer_tokens if result else 0,
        "train_wall_s": result.seconds if result else 0.0,
        "train_steps": result.step if result else 0,
        "best_step": result.best_step if result else 0,
        "export_parity_max_abs": made.parity_max_abs,
        "optional_part": made.choice.metrics() if made.choice else {},
    }


def decode_sets(cfg, prepared, folder, name, sets) -> dict[str, Any]:
    """Accept lengths and speed-ups of one drafter on every set and temperature."""
    target, params = prepared.target, prepared.params
    exported = serving.load_drafter(str(folder), target)
    serve = serving.one_by_one(cfg.serve)
    plain = serving.make_engine(target, params, serve)
    ours = serving.make_engine(target, params, serve, exported, plain=False)
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
    """Accept length (speed-up) of every drafter, set and temperature.

    Beside them the teacher-forced accept length of training's own text.
    """
    columns = [
        (which, kind)
        for which, kinds in next(iter(metrics.values()))["sets"].items()
        for kind in kinds
    ]
    table = rich.table.Table("drafter", "parameters", "positions", "train s", "forced")
    for which, kind in columns:
        table.add_column(rich.markup.escape(f"{which}, {kind}"))
    for name, found in metrics.items():
        cells, forced = [], found["teacher_forced"]
        forced = forced.get("walk_accept_length", forced.get("accept_length"))
        for which, kind in columns:
            one = found["sets"][which][kind]
            length, speed = one["accept_length"], one["speedup"]
            cells.append("-" if length is None else f"{length:.2f} ({speed:.2f}x)")
        table.add_row(
            rich.markup.escape(name),
            f"{found['params']:,}",
            f"{found['train_positions']:,.0f}",
            f"{found['train_wall_s']:.0f}",
            "-" if forced is None else f"{forced:.2f}",
            *cells,
        )
    rich.console.Console().print(table)
