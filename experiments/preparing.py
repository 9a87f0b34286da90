"""What a training needs: texts, their features, and the draft vocabulary.

Every part leaves its result in a folder and is skipped when it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections import Counter
from typing import Any

import jax
import numpy as np

from experiments import serving, synthesis
from experiments.clock import Clock
from experiments.progress import say
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema
from spec_jax.core.vocab import DraftVocab, from_counts
from spec_jax.data import capture as capture_lib
from spec_jax.data import recording
from spec_jax.data import samples as sample_files
from spec_jax.data.store import FeatureStore, look_into, open_store
from spec_jax.decode.recorder import Record
from spec_jax.drafters.base import Drafter
from spec_jax.export import folder as export_folder
from spec_jax.target.loading import Target

OFFLINE_SLOTS = 64
STORE = "store"
BUCKET = 64


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

    @property
    def vocab_size(self) -> int:
        """Tokens that may be proposed."""
        return self.vocab.size if self.vocab else self.target.spec.vocab_size


def prepare(
    cfg: schema.Pipeline, target, params, mask_id: int, workdir, drafter: Drafter
) -> Prepared:
    """Samples, held-out prompts and the draft vocabulary of a recipe.

    Answers that are made here leave their features in the store as they are
    generated. A text that is there without features, and one that is given, is
    captured by `capture`.
    """
    folder = pathlib.Path(cfg.data.folder or workdir)
    records = trains(drafter) and not cfg.data.samples and keeps(folder)
    made = synthesise(
        cfg, target, params, mask_id, folder, drafter=drafter if records else None
    )
    vocab, coverage = choose_vocab(
        cfg.drafter.draft_vocab, made.train, target.spec.vocab_size
    )
    return Prepared(target, params, made, vocab, coverage, folder)


def keeps(folder: pathlib.Path) -> bool:
    """Whether answers that are made into a folder may keep their features meanwhile.

    Without a store, answers that are there have no features. Into a store that was
    captured nothing is recorded (`recording.open_recording`).
    """
    answers = folder / "samples" / synthesis.ANSWERS
    there = look_into(str(folder / STORE))
    return there is not None or not sample_files.list_chunks(str(answers))


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

    def record(num_groups: int, group_size: int, made_from, facts):
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
            facts=facts,
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


def trains(drafter: Drafter) -> bool:
    """Whether there is anything to train."""
    return bool(jax.tree.leaves(jax.eval_shape(drafter.init, jax.random.key(0))))


def choose_vocab(
    size: int, samples, vocab_size: int
) -> tuple[DraftVocab | None, float]:
    """The most frequent answer tokens, and the share of answers they cover.

    Fewer than `size` where the answers hold fewer, which is said.
    """
    if not size:
        return None, 1.0
    counts = Counter(t for s in samples for t in s.answer)
    counts_V = np.zeros(vocab_size, np.int64)
    for token, count in counts.items():
        counts_V[token] = count
    seen = int((counts_V > 0).sum())
    if seen < size:
        say(
            f"drafter.draft_vocab={size}: the answers hold {seen} distinct tokens, so "
            f"the drafter proposes those {seen}"
        )
    vocab = from_counts(counts_V, min(size, seen))
    covered = counts_V[np.asarray(vocab.target_ids)].sum() / counts_V.sum()
    return vocab, float(covered)


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


def buckets(longest: int) -> tuple[int, ...]:
    """Padded lengths of capture, up to the longest conversation."""
    top = -(-longest // BUCKET) * BUCKET
    return tuple(range(min(2 * BUCKET, top), top + 1, BUCKET))
