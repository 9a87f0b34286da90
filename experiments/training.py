"""From prompts to a trained, exported drafter: what pipeline and family share.

Every part leaves its result in a folder and is skipped when it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import shutil
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

from experiments import serving, synthesis
from experiments.clock import Clock
from spec_jax import objectives
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema
from spec_jax.core.vocab import DraftVocab, from_counts
from spec_jax.data import capture as capture_lib
from spec_jax.data import recording
from spec_jax.data import samples as sample_files
from spec_jax.data.pipeline import Pipeline, PipelineOptions
from spec_jax.data.store import FeatureStore, StoreWriter, open_store
from spec_jax.decode.options import room_of
from spec_jax.decode.recorder import Record
from spec_jax.decode.request import Settings
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import decoding
from spec_jax.export import folder as export_folder
from spec_jax.export import golden
from spec_jax.objectives.records import ObjectiveOptions
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.target.loading import Target
from spec_jax.train import loop
from spec_jax.train.metrics import progress_line
from spec_jax.train.optimiser import OptimiserOptions
from spec_jax.train.positions import steps_for

OFFLINE_SLOTS = 64
STORE = "store"
BUCKET = 64
MAX_COUNTED_BATCHES = 512


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
      UserError: a wrong mesh, an objective that is wrong or that the drafter cannot
        feed, more drafts than are trained, or the longest prompt and its new tokens
        do not fit into a slot.
    """
    make_mesh(cfg)
    objectives.check_objective(
        drafter, make_objective(cfg), target.spec, cfg.train.seq_len
    )
    serving.with_num_draft(drafter, cfg.serve.num_draft, target)
    window = serving.topology_of(cfg.serve).window(drafter.layout.num_draft)
    room = room_of(cfg.serve.max_context, window, target.spec)
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


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What every drafter of a recipe shares.

    Attributes:
      target: the frozen target (its own `params` have stacked layers).
      params: its parameters in the serving layout.
      made: samples and held-out prompts.
      vocab: the draft vocabulary, or None for the full one.
      coverage: share of answer tokens that `vocab` holds.
      folder: where samples and features are kept.
    """

    target: Target
    params: Any
    made: synthesis.Synthesis
    vocab: DraftVocab | None
    coverage: float
    folder: pathlib.Path


def offline(serve: schema.Serve, data: schema.Data) -> schema.Serve:
    """The engine that answers prompts for training: many slots, one conversation.

    Its lengths are those of `data`; those of `serve` are for the drafter's engine.
    """
    context = data.max_tokens + 64
    return dataclasses.replace(
        serve,
        slots=OFFLINE_SLOTS,
        max_context=context,
        max_new_tokens=data.max_new_tokens,
        prefill_buckets=tuple(b for b in serve.prefill_buckets if b <= context),
    )


def one_by_one(serve: schema.Serve) -> schema.Serve:
    """One request at a time: validation and the final decode share programs."""
    return dataclasses.replace(serve, slots=1)


def trains(drafter: Drafter) -> bool:
    """Whether there is anything to train."""
    return bool(jax.tree.leaves(jax.eval_shape(drafter.init, jax.random.key(0))))


def prepare(
    cfg: schema.Pipeline, target, params, mask_id: int, workdir, drafter: Drafter
) -> Prepared:
    """Samples, held-out prompts and the draft vocabulary of a recipe.

    Answers that are made here leave their features in the store as they are
    generated. A text that is there without features, and one that is given, is
    captured by `capture`.
    """
    folder = pathlib.Path(cfg.data.folder or workdir)
    there = sample_files.list_chunks(str(folder / "samples" / synthesis.ANSWERS))
    given = bool(cfg.data.samples or (there and not (folder / STORE).exists()))
    records = trains(drafter) and not given
    made = synthesise(
        cfg, target, params, mask_id, folder, drafter=drafter if records else None
    )
    vocab, coverage = choose_vocab(
        cfg.drafter.draft_vocab, made.train, target.spec.vocab_size
    )
    return Prepared(target, params, made, vocab, coverage, folder)


def synthesise(
    cfg,
    target,
    params,
    mask_id: int,
    folder,
    group_size: int = synthesis.GROUP,
    drafter: Drafter | None = None,
) -> synthesis.Synthesis:
    """Samples of the recipe, made by a plain engine of many slots.

    With a drafter, what it trains on is kept in the store as they are generated.
    """
    serve = offline(cfg.serve, cfg.data)
    kept = None
    if drafter is not None:
        kept = Record(capture_schema(cfg, drafter), cfg.capture.dtype)
    engine = functools.cache(
        lambda: serving.make_engine(
            target, params, serve, chunks_per_tick=serve.slots, record=kept
        )
    )

    def record(num_groups: int, group_size: int, made_from) -> StoreWriter:
        assert kept is not None and drafter is not None
        return recording.open_recording(
            target,
            kept.schema,
            str(folder / STORE),
            store_contract(make_contract(cfg, target, drafter), kept.schema),
            kept.dtype,
            num_shards=num_groups,
            shard_tokens=group_size * cfg.data.max_tokens,
            made_from=made_from,
        )

    return synthesis.synthesise(
        target,
        engine,
        cfg.data,
        cfg.seed,
        folder / "samples",
        mask_id=mask_id if cfg.data.mask_id < 0 else cfg.data.mask_id,
        say=say,
        group_size=group_size,
        record=record if kept is not None else None,
    )


def store_contract(contract: Contract, kept: FeatureSchema) -> Contract:
    """A store belongs to no drafter: its contract says nothing of blocks and masks."""
    return dataclasses.replace(
        contract,
        layer_ids=kept.layer_ids,
        num_draft=0,
        mask_id=-1,
        anchor_predicts=False,
    )


def capture_schema(cfg: schema.Pipeline, drafter: Drafter) -> FeatureSchema:
    """The planes that are kept: the drafter's, and more where the recipe says so."""
    needs = drafter.needs
    layer_ids = tuple(cfg.capture.layer_ids) or needs.layer_ids
    absent = [i for i in needs.layer_ids if i not in layer_ids]
    if absent:
        raise UserError(
            f"capture.layer_ids={layer_ids} lacks layer {absent[0]}, which the drafter "
            f"conditions on (drafter.options.layer_ids={needs.layer_ids}); add it"
        )
    return FeatureSchema(layer_ids, needs.width, cfg.capture.teacher or needs.teacher)


def capture(
    cfg: schema.Pipeline,
    prepared: Prepared,
    drafter: Drafter,
    contract: Contract,
    clock: Clock,
) -> FeatureStore:
    """Features of every sample, in the store."""
    path = str(prepared.folder / STORE)
    kept = capture_schema(cfg, drafter)
    ours = store_contract(contract, drafter.needs)
    if prepared.made.recorded:
        return open_store(path, ours)
    last = [0.0]

    def progress(p: capture_lib.CaptureProgress) -> None:
        if p.seconds - last[0] > 10 or p.tokens_done == p.num_tokens:
            last[0] = p.seconds
            say(
                f"capture {p.tokens_done}/{p.num_tokens} tokens, "
                f"{p.tokens_per_s:.0f} tokens/s"
            )

    train = prepared.made.train
    with clock.running("capture"):
        capture_lib.capture(
            dataclasses.replace(prepared.target, params=prepared.params),
            train,
            kept,
            path,
            store_contract(contract, kept),
            cfg.capture.dtype,
            batch=cfg.capture.batch,
            buckets=buckets(max(len(s.tokens) for s in train)),
            shard_samples=cfg.capture.shard_samples,
            progress=progress,
        )
    return open_store(path, ours)


def data_options(cfg: schema.Pipeline) -> PipelineOptions:
    """How batches are made."""
    return PipelineOptions(
        batch_size=cfg.train.batch * cfg.train.accumulation,
        seq_len=cfg.train.seq_len,
        seed=cfg.seed,
    )


def num_steps(
    cfg: schema.Pipeline, drafter: Drafter, frozen: Frozen, store: FeatureStore
) -> int:
    """Optimiser steps: as asked, or as many as the asked positions or starts take."""
    asked = cfg.train.starts or cfg.train.positions
    if not asked:
        return cfg.train.steps
    options = data_options(cfg)
    batches = Pipeline(store, options, needs=drafter.needs)
    a_pass = max(1, len(batches.kept) // options.batch_size)
    most = min(a_pass, MAX_COUNTED_BATCHES)
    try:
        return steps_for(
            asked,
            drafter,
            frozen,
            itertools.islice(batches, most),
            cfg.seed,
            starts=cfg.train.starts > 0,
        )
    finally:
        batches.close()


def train(
    cfg: schema.Pipeline,
    prepared: Prepared,
    drafter: Drafter,
    frozen: Frozen,
    contract: Contract,
    store: FeatureStore,
    workdir: pathlib.Path,
) -> loop.TrainResult:
    """Trains; the served accept length chooses the kept weights."""
    options = data_options(cfg)
    objective, mesh = make_objective(cfg), make_mesh(cfg)
    target = prepared.target
    engine = serving.make_engine(
        target,
        prepared.params,
        one_by_one(cfg.serve),
        (drafter, drafter.init(jax.random.key(cfg.seed)), frozen),
        plain=False,
    )
    held = prepared.made.held_out[: cfg.train.eval_prompts]
    prompts = [list(p) for p in held]
    settings = Settings(max_new_tokens=cfg.train.eval_new_tokens)

    def evaluate(draft_params, step: int) -> float:
        del step
        # A copy: the next step reuses the memory of what it was given.
        copied = jax.tree.map(lambda x: jnp.asarray(np.array(x)), draft_params)
        engine.weights = dataclasses.replace(engine.weights, draft=copied)
        return decoding.served_accept_length(engine, prompts, settings)

    t = cfg.train
    steps = num_steps(cfg, drafter, frozen, store)
    return loop.train(
        drafter,
        frozen,
        functools.partial(objectives.loss, options=objective, terms=drafter.terms),
        OptimiserOptions(
            kind=t.optimiser,
            lr=t.lr,
            warmup_fraction=t.warmup_fraction,
            schedule=t.schedule,
            total_steps=steps,
            clip=t.clip,
            weight_decay=t.weight_decay,
        ),
        lambda: Pipeline(store, options, needs=drafter.needs),
        workdir / "train",
        loop.LoopOptions(
            steps=steps,
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


def export(prepared: Prepared, cfg, drafter, params, contract, workdir):
    """The Hugging Face folder, with a golden round computed from its weights."""
    for left in workdir.glob(".export.writing-*"):  # by a killed run; ours alone
        shutil.rmtree(left)
    samples, target = prepared.made.train, prepared.target
    text = next((s.tokens for s in samples if len(s.tokens) >= 48), samples[0].tokens)
    probe = golden.probe_from_target(target, list(text)[:96], drafter, prepared.vocab)
    return export_folder.write_folder(
        workdir / "export",
        drafter,
        params,
        contract,
        prepared.vocab,
        target.spec,
        dtype=cfg.export.dtype,
        golden_probe=probe,
    )


@dataclasses.dataclass(frozen=True)
class Made:
    """A trained and exported drafter.

    Attributes:
      drafter: as it was trained.
      params: its kept weights.
      result: what training did; None where there was nothing to train.
      parity_max_abs: of the export's golden round.
    """

    drafter: Drafter
    params: Any
    result: loop.TrainResult | None
    parity_max_abs: float


def make_drafter(
    cfg: schema.Pipeline, prepared: Prepared, workdir: pathlib.Path, clock: Clock
) -> Made:
    """Captures what is missing, trains and exports one drafter."""
    target, vocab = prepared.target, prepared.vocab
    size = vocab.size if vocab else 0
    drafter = serving.new_drafter(cfg, target, draft_vocab_size=size)
    contract = make_contract(cfg, target, drafter)
    frozen = frozen_from_params(prepared.params, vocab)
    result, params = None, drafter.init(jax.random.key(cfg.seed))
    if trains(drafter):
        store = capture(cfg, prepared, drafter, contract, clock)
        result = train(cfg, prepared, drafter, frozen, contract, store, workdir)
        params = result.params
    written = export(prepared, cfg, drafter, params, contract, workdir)
    for sentence in written.notes:
        say(f"note: {sentence}")
    return Made(drafter, params, result, written.parity_max_abs)
