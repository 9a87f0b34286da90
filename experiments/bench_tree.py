"""A chain against dynamic trees of several sizes, one autoregressive drafter.

The same weights draft all of them: the topology is a serve option. Each prompt
is decoded plainly and speculatively in turn; the time of a verify of as many
rows stands beside, measured in the same process.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from typing import Any

from experiments import bench_decode, bench_round, serving
from experiments.progress import say
from spec_jax.config import schema
from spec_jax.data import prompts as prompt_files
from spec_jax.evals import comparison
from spec_jax.export.folder import Exported
from spec_jax.target.loading import Target


def serves(cfg: schema.BenchTree) -> dict[str, schema.Serve]:
    """The serve sections that are compared, by name."""
    one = serving.one_by_one(cfg.serve)
    found = {"chain": dataclasses.replace(one, topology="chain")}
    for nodes in cfg.nodes:
        found[str(nodes)] = dataclasses.replace(
            one, topology="dynamic_tree", tree_nodes=nodes, num_draft=0
        )
    return found


def verify_costs(
    cfg: schema.BenchTree, target: Target, params: Any, exported: Exported
) -> dict[str, dict[str, float]]:
    """`verify_ms` and `verify_over_plain` of each choice of `serves`, by name.

    Raises:
      UserError: the widest verify does not fit behind `bench.context`.
    """
    trained = exported.drafter.layout.num_draft
    windows = {
        name: serving.topology_of(serve).window(trained)
        for name, serve in serves(cfg).items()
    }
    widths = tuple(sorted({*windows.values()} - {1}))
    timed = schema.BenchRound(
        seed=cfg.seed,
        target=cfg.target,
        serve=dataclasses.replace(serves(cfg)["chain"], temperature=1.0),
        bench=dataclasses.replace(cfg.bench, widths=(1, *widths)),
    )
    taps = exported.drafter.needs.layer_ids
    ms = bench_round.verify_times(timed, target, params, widths, taps)
    return {
        name: {"verify_ms": ms[w], "verify_over_plain": ms[w] / ms[1]}
        for name, w in windows.items()
    }


def main(cfg: schema.BenchTree, workdir: pathlib.Path) -> dict[str, Any]:
    """Decodes each set with each topology; one dictionary per set."""
    del workdir
    sets, absent = bench_decode.prompt_sets(cfg.bench)
    target, params = serving.load_serving_target(cfg.target)
    exported = serving.load_drafter(cfg.drafter, target, num_draft=cfg.serve.num_draft)
    choices = serves(cfg)
    say("verifies of as many rows")
    costs = verify_costs(cfg, target, params, exported)
    plain = serving.make_engine(target, params, serving.one_by_one(cfg.serve))
    engines = {
        name: serving.make_engine(target, params, serve, exported, plain=False)
        for name, serve in choices.items()
    }
    settings = serving.settings_from(cfg.serve, max_new_tokens=cfg.bench.max_new_tokens)
    metrics: dict[str, Any] = {"weights_sha256": exported.weights_sha256}
    acceptance: dict[str, Any] = {}
    for which, prompts in sets.items():
        room = min(e.room for e in engines.values()) - settings.max_new_tokens
        ids = [
            prompt_files.render_prompt(target, p, mask_id=-1, context=room)
            for p in prompts
        ]
        metrics[which] = {}
        for name, engine in engines.items():
            say(f"{which}, {name}")
            found, base, ours = comparison.measure(plain, engine, ids, settings)
            rounds = sum(len(d.generation.emitted) for d in ours)
            step_s = statistics.median(
                d.seconds / max(len(d.generation.emitted), 1) for d in base
            )
            found["window"] = engine.window
            found["round_ms"] = 1e3 * sum(d.seconds for d in ours) / max(rounds, 1)
            found["round_over_plain"] = found["round_ms"] / (1e3 * step_s)
            metrics[which][name] = found | costs[name]
            acceptance[f"{which}, {name}"] = found["accept_by_position"]
    if absent:
        metrics["left_out"] = ", ".join(absent)
    return metrics | {"series": {"acceptance": acceptance}}
