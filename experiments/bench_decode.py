"""Accept length and speed-up of an exported drafter, one prompt set at a time.

Every prompt is decoded plainly and speculatively in turn, alone, greedily (or
at the recipe's temperature, where identity cannot be claimed). Outputs that
loop stand apart.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from experiments import pipeline, progress, runtime, serving
from spec_jax.config import schema
from spec_jax.data import prompts as prompt_files
from spec_jax.evals import comparison, teacher_forced


def prompt_sets(bench: schema.Bench) -> tuple[dict[str, list], list[str]]:
    """Prompts of each named set, and the names of those without a path."""
    limit = bench.max_prompts or None
    found = {
        name: prompt_files.named_prompts(path, limit)
        for name, path in runtime.prompt_sets(bench).items()
    }
    return found, [name for name, path in bench.prompt_sets if not path]


def main(cfg: schema.BenchDecode, workdir: pathlib.Path) -> dict[str, Any]:
    """Decodes each set both ways; returns one dictionary of metrics per set."""
    del workdir  # nothing is kept but the report
    sets, absent = prompt_sets(cfg.bench)
    target, params = serving.load_serving_target(cfg.target)
    exported = serving.load_drafter(cfg.drafter, target, num_draft=cfg.serve.num_draft)
    serve = dataclasses.replace(cfg.serve, slots=1)
    plain = serving.make_engine(target, params, serve)
    ours = serving.make_engine(target, params, serve, exported, plain=False)
    settings = serving.settings_from(serve, max_new_tokens=cfg.bench.max_new_tokens)
    metrics: dict[str, Any] = {"weights_sha256": exported.weights_sha256}
    series: dict[str, Any] = {"acceptance": {}, "samples": []}
    for name, prompts in sets.items():
        ids = [
            prompt_files.render_prompt(
                target,
                prompt,
                mask_id=serving.mask_id_of(ours.drafter),
                context=ours.room - settings.max_new_tokens,
            )
            for prompt in prompts
        ]
        metrics[name], base, runs = comparison.measure(
            plain, ours, ids, settings, lambda text, name=name: say(name, text)
        )
        metrics[name]["teacher_forced"] = teacher_forced.measure(
            dataclasses.replace(target, params=params),
            exported.drafter,
            exported.params,
            ours.weights.frozen,
            [(d.generation.prompt, d.generation.tokens) for d in base if not d.looping],
            dtype=exported.contract.feature_dtype,
        )
        series["acceptance"][name] = metrics[name]["accept_by_position"]
        series["samples"].append(pipeline.sample_text(target, runs[0].generation))
    if absent:
        metrics["left_out"] = ", ".join(absent)
    return metrics | {"series": series}


def say(name: str, text: str) -> None:
    """A progress line of one set."""
    progress.say(f"{name}: {text}")
