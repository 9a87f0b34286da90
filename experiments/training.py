"""From features to a trained, exported drafter: what pipeline and family share.

What is trained on comes from `experiments/preparing.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import optional_part, preparing, serving
from experiments.clock import Clock
from experiments.preparing import Prepared
from experiments.progress import say
from spec_jax import objectives
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract
from spec_jax.data.pipeline import Pipeline, PipelineOptions
from spec_jax.data.store import FeatureStore
from spec_jax.decode.options import room_of
from spec_jax.decode.request import Settings
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import decoding
from spec_jax.export import folder as export_folder
from spec_jax.export import golden, registry, shared
from spec_jax.objectives.records import ObjectiveOptions
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.target.loading import Target
from spec_jax.train import loop
from spec_jax.train.metrics import progress_line
from spec_jax.train.optimiser import OptimiserOptions
from spec_jax.train.positions import steps_for

MAX_COUNTED_BATCHES = 512


def make_objective(cfg: schema.Pipeline) -> ObjectiveOptions:
    """The recipe's objective."""
    return loading.to_dataclass(ObjectiveOptions, dict(cfg.objective), "objective")


def make_mesh(cfg: schema.Pipeline) -> jax.sharding.Mesh:
    """The recipe's mesh over this machine's devices."""
    options = loading.to_dataclass(mesh_lib.MeshOptions, dict(cfg.mesh), "mesh")
    return mesh_lib.make_mesh(options)


def check_early(cfg: schema.Pipeline, target: Target, drafter: Drafter) -> None:
    """Refuses, before any work, what its later parts would refuse.

    Raises:
      UserError: a wrong mesh, or a batch that it does not divide; an objective that
        is wrong or that the drafter cannot feed; a drafter whose optional part
        cannot be left out, that cannot be exported, or cannot propose what is
        served; more drafts than are trained; or the longest prompt and its new
        tokens do not fit into a slot.
    """
    check_batch(cfg.train, make_mesh(cfg), drafter)
    optional_part.check(drafter, target.spec)
    objectives.check_objective(
        drafter, make_objective(cfg), target.spec, cfg.train.seq_len
    )
    shared.plan_of(drafter, registry.form_of(drafter))
    serving.check_topology(cfg.serve, drafter)
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


def check_batch(train: schema.Train, mesh: jax.sharding.Mesh, drafter: Drafter) -> None:
    """Refuses conversations that the devices do not share evenly.

    Raises:
      UserError: `train.batch` is no multiple of the parts that the mesh splits it
        into.
    """
    shards = mesh_lib.batch_shards(mesh)
    if preparing.trains(drafter) and train.batch * jax.process_count() % shards:
        raise UserError(
            f"train.batch={train.batch} must be a multiple of {shards}, the parts that "
            "mesh.data and mesh.fsdp split each micro-batch into (mesh.data=-1 takes "
            "every device); change one of them"
        )


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


def validation(
    cfg: schema.Pipeline, prepared: Prepared, drafter: Drafter, frozen: Frozen
) -> Callable[[Any], float]:
    """(draft parameters) -> served accept length of held-out prompts, greedily."""
    engine = serving.make_engine(
        prepared.target,
        prepared.params,
        serving.one_by_one(cfg.serve),
        (drafter, drafter.init(jax.random.key(cfg.seed)), frozen),
        plain=False,
    )
    prompts = [list(p) for p in prepared.made.held_out[: cfg.train.eval_prompts]]
    settings = Settings(max_new_tokens=cfg.train.eval_new_tokens)

    def served(params) -> float:
        # A copy: a training's next step reuses the memory of what it was given.
        copied = jax.tree.map(lambda x: jnp.asarray(np.array(x)), params)
        engine.weights = dataclasses.replace(engine.weights, draft=copied)
        return decoding.served_accept_length(engine, prompts, settings)

    return served


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
    served = validation(cfg, prepared, drafter, frozen)
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
        evaluate=lambda params, step: served(params),
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
        seed=cfg.seed,
    )


@dataclasses.dataclass(frozen=True)
class Made:
    """A trained and exported drafter.

    Attributes:
      drafter: as it was exported.
      params: its kept weights.
      result: what training did; None where there was nothing to train.
      parity_max_abs: of the export's golden round.
      choice: whether its optional part was exported; None where there is none.
    """

    drafter: Drafter
    params: Any
    result: loop.TrainResult | None
    parity_max_abs: float
    choice: optional_part.Choice | None = None


def make_drafter(
    cfg: schema.Pipeline, prepared: Prepared, workdir: pathlib.Path, clock: Clock
) -> Made:
    """Captures what is missing, trains and exports one drafter.

    One with an optional part is exported as its held-out prompts say
    (`experiments.optional_part`).
    """
    target, vocab = prepared.target, prepared.vocab
    size = vocab.size if vocab else 0
    drafter = serving.new_drafter(cfg, target, draft_vocab_size=size)
    contract = preparing.make_contract(cfg, target, drafter)
    frozen = frozen_from_params(prepared.params, vocab)
    result, choice = None, None
    params = drafter.init(jax.random.key(cfg.seed))
    if preparing.trains(drafter):
        store = preparing.capture(cfg, prepared, drafter, contract, clock)
        result = train(cfg, prepared, drafter, frozen, contract, store, workdir)
        params = result.params
        choice = optional_part.choose(
            drafter,
            target.spec,
            lambda one: validation(cfg, prepared, one, frozen)(params),
        )
    if choice is not None:
        say(choice.words)
        drafter = choice.drafter
    written = export(prepared, cfg, drafter, params, contract, workdir)
    for sentence in written.notes:
        say(f"note: {sentence}")
    return Made(drafter, params, result, written.parity_max_abs, choice)
