"""The whole walk: prompts, answers, features, training, export, and the proof.

    target -> synthesis -> store -> training -> exported folder -> loaded again
           -> held-out prompts, plainly and speculatively

Every part leaves its result in the workdir and is skipped when it is there, so
the same command again resumes. Training's validation metric is the served
accept length: the engine that will serve decodes held-out prompts.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

import jax

from experiments import (
    bench_round,
    clock,
    pipeline_inspect,
    preparing,
    serving,
    synthesis_prompts,
    training,
)
from experiments.training import say
from spec_jax.config import schema
from spec_jax.data import samples as sample_files
from spec_jax.data.store import check_disk, plan_bytes
from spec_jax.drafters.base import Drafter
from spec_jax.evals import comparison, decoding, teacher_forced
from spec_jax.target.loading import Target
from spec_jax.train import loop
from spec_jax.train.metrics import read_records

COST_REPEATS = 8


def main(cfg: schema.Pipeline, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs what is missing and measures; returns the report's metrics."""
    seconds = clock.Clock(workdir / clock.NAME)
    started = time.monotonic()
    target, params = serving.load_serving_target(cfg.target)
    drafter = serving.new_drafter(cfg, target)
    training.check_early(cfg, target, drafter)
    say(f"target {target.spec.name}: {target.fingerprint[:12]}")
    mask_id = serving.mask_id_of(drafter)
    prepared = preparing.prepare(cfg, target, params, mask_id, workdir, drafter)
    made = training.make_drafter(cfg, prepared, workdir, seconds)
    metrics, series = evaluate(cfg, prepared, workdir)
    metrics["round_costs"], series["cost"] = cost_split(
        cfg, prepared, made.drafter, metrics["accept_length"] or 1.0
    )
    losses, trained = [], {}
    if made.result is not None:
        records = read_records(workdir / "train" / "metrics.jsonl")
        losses = [[r["step"], r["loss"]] for r in records if "loss" in r]
        trained = training_metrics(made.result, losses)
        trained["teacher_forced"] = teacher_forced.read(
            workdir / "train" / "metrics.jsonl", made.result.best_step
        )
        series["accept_length"] = {
            "held-out, served": [[h["step"], h["metric"]] for h in made.result.history]
        }
    parts, samples = seconds.read(), prepared.made
    metrics |= trained | {
        "export_parity_max_abs": made.parity_max_abs,
        "params": sum(x.size for x in jax.tree.leaves(made.params)),
        "draft_vocab_size": prepared.vocab_size,
        "draft_vocab_coverage": prepared.coverage,
        "unique_tokens": samples.answer_tokens,
        "train_samples": len(samples.train),
        "looping_samples_left_out": samples.looping,
        "captured_while_generating": samples.recorded,
        "seconds": {
            "synthesis": samples.seconds,
            "capture": parts.get("capture", 0.0),
            "train": made.result.seconds if made.result else 0.0,
            "train_evaluation": made.result.eval_seconds if made.result else 0.0,
            "this_run": time.monotonic() - started,
        },
    }
    if made.choice is not None:
        metrics["optional_part"] = made.choice.metrics()
    if losses:
        series["loss"] = {"training": losses}
    return metrics | {"series": series}


def training_metrics(result: loop.TrainResult, losses: list) -> dict[str, Any]:
    """What a report says of a training."""
    return {
        "loss_first": losses[0][1] if losses else None,
        "loss_last": losses[-1][1] if losses else None,
        "train_positions": result.slots,
        "train_steps": result.step,
        "best_step": result.best_step,
        "best_served_accept_length": result.best_metric,
        "train_stopped_by": result.stopped,
    }


def evaluate(cfg, prepared: preparing.Prepared, workdir) -> tuple[dict, dict]:
    """Loads the exported folder and decodes held-out prompts three ways."""
    target, params = prepared.target, prepared.params
    exported = serving.load_drafter(str(workdir / "export"), target)
    serve = serving.one_by_one(cfg.serve)
    plain = serving.make_engine(target, params, serve)
    ours = serving.make_engine(target, params, serve, exported, plain=False)
    settings = serving.settings_from(
        serve, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
    )
    prompts = [list(p) for p in prepared.made.held_out]
    summary, base_runs, runs = comparison.measure(plain, ours, prompts, settings, say)
    summary |= {
        "weights_sha256": exported.weights_sha256,
        "export_golden_max_abs": exported.golden_max_abs,
    }
    keep = [i for i, d in enumerate(base_runs) if not d.looping] or range(len(prompts))
    acceptance = {"drafter": summary["accept_by_position"]}
    if decoding.reads_features(exported.params):
        shuffled_params = decoding.with_shuffled_features(exported.params, cfg.seed)
        ours.weights = dataclasses.replace(ours.weights, draft=shuffled_params)
        control = [decoding.decode_one(ours, prompts[i], settings) for i in keep]
        made = [d.generation for d in control]
        summary["accept_length_shuffled"] = decoding.accept_length(made)
        acceptance["shuffled features"] = decoding.accept_by_position(
            made, ours.window - 1
        )
    samples = [sample_text(target, runs[i].generation) for i in list(keep)[:3]]
    return summary, {"acceptance": acceptance, "samples": samples}


def cost_split(
    cfg: schema.Pipeline,
    prepared: preparing.Prepared,
    drafter: Drafter,
    accept_length: float,
):
    """Medians of a round's parts at a middling context, and per emitted token.

    Times do not depend on the drafter's weights, so random ones are timed, over as
    many tokens as the trained one may propose: what the answers hold, which is at
    most what the recipe asks for.
    """
    target, vocab = prepared.target, prepared.vocab
    drafter = serving.with_num_draft(drafter, cfg.serve.num_draft, target)
    window = serving.topology_of(cfg.serve).window(drafter.layout.num_draft)
    timed = schema.BenchRound(
        seed=cfg.seed,
        target=cfg.target,
        drafter=dataclasses.replace(
            cfg.drafter, draft_vocab=vocab.size if vocab else 0
        ),
        serve=dataclasses.replace(
            serving.one_by_one(cfg.serve),
            temperature=1.0,
            top_p=0.9,
            top_k=0,
            min_p=0.0,
        ),
        bench=schema.Bench(
            warmup=1,
            repeats=COST_REPEATS,
            widths=(1, window),
            context=cfg.serve.max_context // 2,
        ),
    )
    found = bench_round.measure(timed, target, prepared.params, drafter, standard=False)
    verify = found["verify_ms"][str(window)]
    split = {
        "plain": {"verify": found["plain_step_ms"]},
        "speculative": bench_round.round_parts(
            found["draft_ms"],
            verify,
            found["extend_ms"],
            found["round_ms"],
            accept_length,
        ),
    }
    kept = (
        "plain_step_ms",
        "draft_ms",
        "extend_ms",
        "round_ms",
        "overhead_fraction",
    )
    costs = {name: found[name] for name in kept} | {"verify_ms": verify}
    return costs, split


def sample_text(target: Target, generation) -> dict:
    """A decoded answer in pieces, accepted drafts marked."""
    decode = target.tokenizer.decode
    tokens, pieces = generation.tokens, [[decode(generation.tokens[:1]), "target"]]
    at = 1
    for emitted, accepted in zip(generation.emitted, generation.accepted, strict=True):
        drafted = min(emitted, accepted)
        if drafted:
            pieces.append([decode(tokens[at : at + drafted]), "accepted"])
        if emitted > drafted:
            pieces.append([decode(tokens[at + drafted : at + emitted]), "target"])
        at += emitted
    return {
        "title": f"{len(tokens)} tokens, {generation.rounds} rounds",
        "pieces": pieces,
    }


def plan(
    cfg: schema.Pipeline, workdir: pathlib.Path = pathlib.Path()
) -> dict[str, dict[str, Any]]:
    """Sizes, bytes and the order of work, without starting any of it.

    Raises:
      UserError: no such target or drafter, or the disk that the features would lie
        on has no room for them.
    """
    target = serving.planned_target(cfg.target)
    drafter = serving.new_drafter(cfg, target, draft_vocab_size=cfg.drafter.draft_vocab)
    prompts = _plan_prompts(cfg.data, target)
    tokens = prompts * cfg.data.max_tokens
    feature = preparing.capture_schema(cfg, drafter)
    size = plan_bytes(tokens, feature, cfg.capture.dtype)
    if preparing.trains(drafter):
        folder = pathlib.Path(cfg.data.folder or workdir)
        check_disk(str(folder / preparing.STORE), size)
    shapes = jax.eval_shape(drafter.init, jax.random.key(0))
    return {
        "target": {
            "name": target.spec.name,
            "parameters": sum(x.size for x in jax.tree.leaves(target.params)),
        },
        "drafter": {
            "name": drafter.name,
            "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
            "layer ids": str(drafter.needs.layer_ids),
            "drafts per round": drafter.layout.num_draft,
        },
        "data": {
            "prompts at most": prompts,
            "tokens at most": tokens,
            "feature bytes at most": size,
            "topology": "offline, colocated",
        },
        "training": _plan_training(cfg.train, drafter),
    }


def _plan_prompts(data: schema.Data, target: Target) -> int:
    """Conversations to train on, before any is found too long."""
    if data.samples:
        return len(sample_files.read_file(data.samples, target.spec.vocab_size))
    named = len(synthesis_prompts.read_prompts(data)) if data.train_on_prompts else 0
    return data.num_synth_prompts + min(named, data.max_file_prompts or named)


def _plan_training(train: schema.Train, drafter) -> dict[str, Any]:
    """Steps and label slots: one is asked for, the other one follows."""
    minutes = {"minutes at most": train.max_minutes or "no limit"}
    for what in ("positions", "starts"):
        if asked := getattr(train, what):
            return {"steps": f"as many as the {what} take", what: asked, **minutes}
    rows = train.batch * train.accumulation * train.steps
    options = drafter.options
    starts = getattr(options, "num_anchors", getattr(options, "num_starts", 1))
    return {
        "steps": train.steps,
        "conversations": rows,
        "label slots at most": rows * starts * drafter.layout.num_draft,
        **minutes,
    }


def inspect(cfg: schema.Pipeline, workdir: pathlib.Path) -> None:
    """Prints a small batch token by token; the run's own folder is left alone."""
    del workdir
    pipeline_inspect.show(cfg)
