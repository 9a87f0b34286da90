"""Training text as one file: prompts, and the target's own answers to them.

Several drafters, or several runs of one, then train on the same samples with
`--config.data.samples=<file>`.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from experiments import preparing, serving, synthesis
from experiments.progress import say
from spec_jax.config import schema
from spec_jax.data import samples as sample_files

NAME = "samples.jsonl"


def main(cfg: schema.Synthesise, workdir: pathlib.Path) -> dict[str, Any]:
    """Makes what is missing and writes `samples.jsonl`; returns its sizes."""
    target, params = serving.load_serving_target(cfg.target)
    serve = preparing.offline(cfg.serve, cfg.data)
    engine = functools.cache(
        lambda: serving.make_engine(target, params, serve, chunks_per_tick=serve.slots)
    )
    made = synthesis.synthesise(
        target,
        engine,
        cfg.data,
        cfg.seed,
        workdir / "samples",
        mask_id=cfg.data.mask_id,
        say=say,
    )
    path = workdir / NAME
    sample_files.write_file(str(path), made.train)
    say(f"samples: {path}")
    return {
        "samples": len(made.train),
        "answer_tokens": made.answer_tokens,
        "looping_samples_left_out": made.looping,
        "held_out": len(made.held_out),
        "seconds": made.seconds,
    }
