"""The whole walk: prompts, answers, features, training, export, and the proof.

    target -> synthesis -> store -> training -> exported folder -> loaded again
           -> held-out prompts, plainly and speculatively

Every part leaves its result in the workdir and is skipped when it is there, so
the same command again resumes. Training's validation metric is the served
accept length: the engine that will serve decodes held-out prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from experiments import bench_round, serving, synthesis
from spec_jax.config import loading, schema
from spec_jax.core import block_layout
from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema
from spec_jax.core.vocab import DraftVocab, from_counts
from spec_jax.data import capture as capture_lib
from spec_jax.data import files
from spec_jax.data.pipeline import Pipeline, PipelineOptions
from spec_jax.data.store import check_disk, open_store, plan_bytes
from spec_jax.decode.engine import room_of
from spec_jax.decode.request import Settings
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import comparison, decoding
from spec_jax.export import folder as export_folder
from spec_jax.export import golden
from spec_jax.objectives import hard_labels
from spec_jax.objectives.records import ObjectiveOptions
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.target.loading import Target
from spec_jax.train import loop
from spec_jax.train.metrics import progress_line, read_records
from spec_jax.train.optimiser import OptimiserOptions

OFFLINE_SLOTS = 32
COST_REPEATS = 8
BUCKET = 64


@dataclasses.dataclass
class Clock:
    """Wall seconds of each part, summed over the runs that did it."""

    path: pathlib.Path

    def read(self) -> dict[str, float]:
        try:
            return dict(json.loads(self.path.read_text()))
        except (OSError, ValueError, TypeError):  # none yet, or torn: only times
            return {}

    def add(self, part: str, seconds: float) -> None:
        parts = self.read()
        parts[part] = parts.get(part, 0.0) + seconds
        files.write_atomically(str(self.path), json.dumps(parts).encode())


def say(text: str) -> None:
    """One progress line."""
    rich.console.Console(soft_wrap=True, highlight=False).print(text)


def make_contract(cfg: schema.Pipeline, target: Target, drafter: Drafter) -> Contract:
    """What features and weights of this run are made under."""
    return Contract(
        target=target.spec.name,
        layer_ids=drafter.needs.layer_ids,
        mask_id=serving.mask_id_of(drafter),
        anchor_predicts=drafter.layout.anchor_predicts,
        num_draft=drafter.layout.num_draft,
        feature_dtype=cfg.capture.dtype,
        thinking=cfg.data.thinking,
        **export_folder.target_facts(target),
    )


def buckets(longest: int) -> tuple[int, ...]:
    """Padded lengths of capture, up to the longest conversation."""
    top = -(-longest // BUCKET) * BUCKET
    return tuple(range(min(2 * BUCKET, top), top + 1, BUCKET))


def choose_vocab(
    size: int, samples, vocab_size: int
) -> tuple[DraftVocab | None, float]:
    """The most frequent answer tokens, and the share of answers they cover."""
    if not size:
        return None, 1.0
    counts = Counter(t for s in samples for t in s.answer)
    counts_V = np.zeros(vocab_size, np.int64)
    for token, count in counts.items():
        counts_V[token] = count
    vocab = from_counts(counts_V, min(size, int((counts_V > 0).sum())))
    covered = counts_V[np.asarray(vocab.target_ids)].sum() / counts_V.sum()
    return vocab, float(covered)


def make_objective(cfg: schema.Pipeline) -> ObjectiveOptions:
    """The recipe's objective."""
    return loading.to_dataclass(ObjectiveOptions, dict(cfg.objective), "objective")


def make_mesh(cfg: schema.Pipeline) -> jax.sharding.Mesh:
    """The recipe's mesh over this machine's devices."""
    options = loading.to_dataclass(mesh_lib.MeshOptions, dict(cfg.mesh), "mesh")
    return mesh_lib.make_mesh(options)


def check_early(cfg: schema.Pipeline, target: Target, drafter: Drafter) -> None:
    """Refuses, before any work, what training and validation would refuse later.

    Raises:
      UserError: a wrong objective or mesh, more drafts than are trained, or the
        longest prompt and its new tokens do not fit into a slot.
    """
    make_objective(cfg)
    make_mesh(cfg)
    serving.with_num_draft(drafter, cfg.serve.num_draft, target)
    room = room_of(cfg.serve.max_context, drafter.layout.window, target.spec)
    prompt = cfg.data.max_tokens - cfg.data.max_new_tokens
    for name, new in (
        ("train.eval_new_tokens", cfg.train.eval_new_tokens),
        ("serve.max_new_tokens", cfg.serve.max_new_tokens),
    ):
        if prompt + new > room:
            raise UserError(
                f"{name}={new} and prompts of up to {prompt} tokens "
                "(data.max_tokens - data.max_new_tokens) are more than the "
                f"{room} a slot can hold; lower it, or raise "
                f"serve.max_context={cfg.serve.max_context} (the target's own context "
                f"is {target.spec.max_context})"
            )


def main(cfg: schema.Pipeline, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs what is missing and measures; returns the report's metrics."""
    clock = Clock(workdir / "seconds.json")
    started = time.monotonic()
    target, params = serving.load_serving_target(cfg.target)
    drafter = serving.new_drafter(cfg, target)
    check_early(cfg, target, drafter)
    serve = dataclasses.replace(
        cfg.serve, slots=OFFLINE_SLOTS, max_context=cfg.data.max_tokens + 64
    )
    say(f"target {target.spec.name}: {target.fingerprint[:12]}")
    made = synthesise(cfg, target, params, serve, drafter, workdir)
    vocab, coverage = choose_vocab(
        cfg.drafter.draft_vocab, made.train, target.spec.vocab_size
    )
    contract = make_contract(cfg, target, drafter)
    store_path = capture(cfg, target, params, drafter, made, contract, workdir, clock)
    frozen = frozen_from_params(params, vocab)
    result = train(
        cfg, target, params, drafter, frozen, contract, store_path, made, workdir
    )
    written = export(
        cfg, target, drafter, result.params, contract, vocab, made, workdir
    )
    metrics, series = evaluate(cfg, target, params, workdir, made)
    metrics["round_costs"], series["cost"] = cost_split(
        cfg, target, params, drafter, metrics["accept_length"] or 1.0
    )
    records = read_records(workdir / "train" / "metrics.jsonl")
    losses = [[r["step"], r["loss"]] for r in records if "loss" in r]
    parts = clock.read()
    num_params = sum(x.size for x in jax.tree.leaves(result.params))
    metrics |= {
        "loss_first": losses[0][1] if losses else None,
        "loss_last": losses[-1][1] if losses else None,
        "export_parity_max_abs": written.parity_max_abs,
        "params": num_params,
        "draft_vocab_coverage": coverage,
        "train_positions": result.slots,
        "unique_tokens": made.answer_tokens,
        "train_samples": len(made.train),
        "looping_samples_left_out": made.looping,
        "train_steps": result.step,
        "best_step": result.best_step,
        "best_served_accept_length": result.best_metric,
        "train_stopped_by": result.stopped,
        "seconds": {
            "synthesis": made.seconds,
            "capture": parts.get("capture", 0.0),
            "train": result.seconds,
            "train_evaluation": result.eval_seconds,
            "this_run": time.monotonic() - started,
        },
    }
    series |= {
        "loss": {"training": losses},
        "accept_length": {
            "held-out, served": [[h["step"], h["metric"]] for h in result.history]
        },
    }
    return metrics | {"series": series}


def one_by_one(serve: schema.Serve) -> schema.Serve:
    """One request at a time: validation and the final decode share programs."""
    return dataclasses.replace(serve, slots=1)


def synthesise(cfg, target, params, serve, drafter, workdir) -> synthesis.Synthesis:
    """Samples of the recipe, made by a plain engine of many slots."""
    engine = functools.cache(
        lambda: serving.make_engine(
            target, params, serve, chunks_per_tick=OFFLINE_SLOTS
        )
    )
    return synthesis.synthesise(
        target,
        engine,
        cfg.data,
        cfg.seed,
        workdir / "samples",
        mask_id=serving.mask_id_of(drafter),
        say=say,
    )


def capture(cfg, target, params, drafter, made, contract, workdir, clock) -> str:
    """Features of every sample, in the store."""
    path = str(workdir / "store")
    schema_ = FeatureSchema(
        drafter.needs.layer_ids, target.spec.hidden_size, cfg.capture.teacher
    )
    last = [0.0]

    def progress(p: capture_lib.CaptureProgress) -> None:
        if p.seconds - last[0] > 10 or p.tokens_done == p.num_tokens:
            last[0] = p.seconds
            say(
                f"capture {p.tokens_done}/{p.num_tokens} tokens, "
                f"{p.tokens_per_s:.0f} tokens/s"
            )

    start = time.monotonic()
    report = capture_lib.capture(
        dataclasses.replace(target, params=params),
        made.train,
        schema_,
        path,
        dataclasses.replace(contract, num_draft=0),
        cfg.capture.dtype,
        batch=cfg.capture.batch,
        buckets=buckets(max(len(s.tokens) for s in made.train)),
        shard_samples=cfg.capture.shard_samples,
        progress=progress,
    )
    if report.new_shards:
        clock.add("capture", time.monotonic() - start)
    return path


def train(cfg, target, params, drafter, frozen, contract, store_path, made, workdir):
    """Trains; the served accept length chooses the kept weights."""
    store = open_store(store_path, dataclasses.replace(contract, num_draft=0))
    options = PipelineOptions(
        batch_size=cfg.train.batch * cfg.train.accumulation,
        seq_len=cfg.train.seq_len,
        seed=cfg.seed,
    )
    objective, mesh = make_objective(cfg), make_mesh(cfg)
    engine = serving.make_engine(
        target,
        params,
        one_by_one(cfg.serve),
        (drafter, drafter.init(jax.random.key(cfg.seed)), frozen),
        plain=False,
    )
    prompts = [list(p) for p in made.held_out[: cfg.train.eval_prompts]]
    settings = Settings(max_new_tokens=cfg.train.eval_new_tokens)

    def evaluate(draft_params, step: int) -> float:
        del step
        # A copy: the next step reuses the memory of what it was given.
        copied = jax.tree.map(lambda x: jnp.asarray(np.array(x)), draft_params)
        engine.weights = dataclasses.replace(engine.weights, draft=copied)
        return decoding.served_accept_length(engine, prompts, settings)

    t = cfg.train
    return loop.train(
        drafter,
        frozen,
        lambda outputs, borrowed: hard_labels.loss(outputs, borrowed, objective),
        OptimiserOptions(
            kind=t.optimiser,
            lr=t.lr,
            warmup_fraction=t.warmup_fraction,
            schedule=t.schedule,
            total_steps=t.steps,
            clip=t.clip,
            weight_decay=t.weight_decay,
        ),
        lambda: Pipeline(store, options),
        workdir / "train",
        loop.LoopOptions(
            steps=t.steps,
            seed=cfg.seed,
            accumulation=t.accumulation,
            log_every=t.log_every,
            eval_every=t.eval_every,
            save_every=t.checkpoint_every,
            max_seconds=t.max_minutes * 60 or None,
            keep_last=t.keep_checkpoints,
        ),
        recipe_hash=loading.config_hash(cfg),
        contract=contract,
        mesh=mesh,
        evaluate=evaluate,
        log=lambda record: say(progress_line(record)),
    )


def export(cfg, target, drafter, params, contract, vocab, made, workdir):
    """The Hugging Face folder, with a golden round computed from its weights."""
    for left in workdir.glob(".export.writing-*"):  # by a killed run; ours alone
        shutil.rmtree(left)
    text = next((s.tokens for s in made.train if len(s.tokens) >= 48), None)
    text = text or made.train[0].tokens
    probe = golden.probe_from_target(target, list(text)[:96], drafter, vocab)
    return export_folder.write_folder(
        workdir / "export",
        drafter,
        params,
        contract,
        vocab,
        target.spec,
        dtype=cfg.export.dtype,
        golden_probe=probe,
    )


def evaluate(cfg, target, params, workdir, made) -> tuple[dict, dict]:
    """Loads the exported folder and decodes held-out prompts three ways."""
    exported = serving.load_drafter(str(workdir / "export"), target)
    serve = one_by_one(cfg.serve)
    plain = serving.make_engine(target, params, serve)
    ours = serving.make_engine(target, params, serve, exported, plain=False)
    settings = serving.settings_from(
        serve, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
    )
    prompts = [list(p) for p in made.held_out]
    summary, base_runs, runs = comparison.measure(plain, ours, prompts, settings, say)
    shuffled_params = decoding.with_shuffled_features(exported.params, cfg.seed)
    ours.weights = dataclasses.replace(ours.weights, draft=shuffled_params)
    keep = [i for i, d in enumerate(base_runs) if not d.looping] or range(len(prompts))
    shuffled = [decoding.decode_one(ours, prompts[i], settings) for i in keep]
    summary |= {
        "accept_length_shuffled": decoding.accept_length(
            [d.generation for d in shuffled]
        ),
        "weights_sha256": exported.weights_sha256,
        "export_golden_max_abs": exported.golden_max_abs,
    }
    series = {
        "acceptance": {
            "drafter": summary["accept_by_position"],
            "shuffled features": decoding.accept_by_position(
                [d.generation for d in shuffled], ours.window - 1
            ),
        },
        "samples": [sample_text(target, runs[i].generation) for i in list(keep)[:3]],
    }
    return summary, series


def cost_split(cfg, target, params, drafter, accept_length: float):
    """Medians of a round's parts at a middling context, and per emitted token.

    Times do not depend on the drafter's weights, so random ones are timed.
    """
    drafter = serving.with_num_draft(drafter, cfg.serve.num_draft, target)
    window = drafter.layout.window
    timed = schema.BenchRound(
        seed=cfg.seed,
        target=cfg.target,
        drafter=cfg.drafter,
        serve=dataclasses.replace(
            one_by_one(cfg.serve), temperature=1.0, top_p=0.9, top_k=0, min_p=0.0
        ),
        bench=schema.Bench(
            warmup=1,
            repeats=COST_REPEATS,
            widths=(1, window),
            context=cfg.serve.max_context // 2,
        ),
    )
    found = bench_round.measure(timed, target, params, drafter, standard=False)
    verify = found["verify_ms"][str(window)]
    split = {
        "plain": {"verify": found["plain_step_ms"]},
        "speculative": bench_round.round_parts(
            found["draft_ms"], verify, found["round_ms"], accept_length
        ),
    }
    kept = ("plain_step_ms", "draft_ms", "round_ms", "overhead_fraction")
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


def plan(cfg: schema.Pipeline) -> dict[str, dict[str, Any]]:
    """Sizes, bytes and the order of work, without starting any of it."""
    target, _ = serving.load_serving_target(cfg.target)
    drafter = serving.new_drafter(cfg, target)
    prompts = cfg.data.num_synth_prompts + cfg.data.max_file_prompts
    tokens = prompts * cfg.data.max_tokens
    feature = FeatureSchema(
        drafter.needs.layer_ids, target.spec.hidden_size, cfg.capture.teacher
    )
    size = plan_bytes(tokens, feature, cfg.capture.dtype)
    check_disk(".", size)
    shapes = jax.eval_shape(drafter.init, jax.random.key(0))
    slots = cfg.train.batch * cfg.train.accumulation * cfg.train.steps
    anchors = getattr(drafter.options, "num_anchors", 1)
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
        "training": {
            "steps": cfg.train.steps,
            "conversations": slots,
            "label slots at most": slots * anchors * drafter.layout.num_draft,
            "minutes at most": cfg.train.max_minutes or "no limit",
        },
    }


def inspect(cfg: schema.Pipeline, workdir: pathlib.Path) -> None:
    """Prints one conversation of a batch token by token."""
    target, params = serving.load_serving_target(cfg.target)
    drafter = serving.new_drafter(cfg, target)
    serve = dataclasses.replace(
        cfg.serve, slots=OFFLINE_SLOTS, max_context=cfg.data.max_tokens + 64
    )
    made = synthesise(cfg, target, params, serve, drafter, workdir)
    sample = made.train[0]
    console = rich.console.Console(highlight=False)
    table = rich.table.Table("position", "token", "text", "feature", "supervised")
    for position, token in enumerate(sample.tokens):
        table.add_row(
            str(position),
            str(token),
            repr(target.tokenizer.decode([token])),
            f"layers {drafter.needs.layer_ids}" if position == 0 else "same",
            "yes" if position >= sample.prompt_len else "",
        )
    console.print(table)
    anchor = jnp.asarray([sample.prompt_len])
    labels = np.asarray(block_layout.label_positions(drafter.layout, anchor))[0]
    console.print(
        f"anchor at {sample.prompt_len}: sees features below {sample.prompt_len}, "
        f"labels at {labels.tolist()}"
    )
