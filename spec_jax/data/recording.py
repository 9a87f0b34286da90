"""A store that is written while its samples are generated.

The engine that answers keeps the features of the rows it ran, so that capture
costs no forward of its own. A shard holds the usable samples of one group of
prompts; it is written before the group's samples are, so that samples which are
there have their features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema
from spec_jax.data.capture import (
    check_contract,
    check_finite,
    check_varied,
    stored_sample,
)
from spec_jax.data.samples import Sample
from spec_jax.data.store import (
    GENERATED,
    Layout,
    StoredSample,
    StoreWriter,
    check_disk,
    facts_of,
    look_into,
    plan_bytes,
)
from spec_jax.target.loading import Target


def open_recording(
    target: Target,
    schema: FeatureSchema,
    path: str,
    contract: Contract,
    dtype: str,
    *,
    num_shards: int,
    shard_tokens: int,
    made_from: Any,
    facts: Mapping[str, Any] | None = None,
) -> StoreWriter | None:
    """Creates the store of a text to be generated, or opens it to go on.

    None is returned, and nothing is touched, where the store that is there was
    captured from a text: `capture` continues it.

    Args:
      target: the frozen target that generates.
      schema: planes that are kept.
      path: the store's folder.
      contract: what the store is made under.
      dtype: stored features, one of `store.DTYPES`.
      num_shards: groups of prompts.
      shard_tokens: the most tokens that a group can have.
      made_from: what decides the text and what is kept of it, as JSON holds it.
      facts: values of it by the names that a person sets them by.

    Raises:
      UserError: the contract does not describe this target; another store is
        there; or the disk has no room for the groups that are missing.
    """
    check_contract(target, schema, contract)
    text = json.dumps(["generated", made_from], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    layout = Layout(
        schema,
        dtype,
        shard_tokens,
        num_shards,
        digest,
        GENERATED,
        facts_of(facts or {}),
    )
    there = look_into(path)
    if there is not None and not _is_generated(there[0], digest):
        return None
    missing = num_shards - (there[1] if there else 0)
    check_disk(path, plan_bytes(missing * shard_tokens, schema, dtype))
    return StoreWriter(path, contract, layout)


def _is_generated(there: Layout, digest: str) -> bool:
    """Whether a store holds features that were kept while its text was generated.

    A store of before does not say; what it was made from does.
    """
    if there.origin:
        return there.origin == GENERATED
    return there.made_from == digest


def write_recorded(
    writer: StoreWriter,
    index: int,
    samples: Sequence[Sample],
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
    total: int,
) -> None:
    """Writes a group's samples and the features that generating them left.

    The last token of an answer was drawn and never run, so its row is zeros, as
    padding is: nothing that is trained reads it, for no label comes after it.

    Args:
      writer: of the store.
      index: the group.
      samples: its usable samples; they may be cut.
      rows: of each, features `[T, L, D]` and last hidden `[T, D]` of the rows that
        the target ran, at least all of the sample but its last token.
      total: samples of the whole store, for the share that may be not finite.

    Raises:
      UserError: rows are missing, a plane is constant, or the features of too many
        samples are not finite.
    """
    stored: list[StoredSample] = []
    bad: list[str] = []
    schema = writer.layout.schema
    for sample, (features, hidden) in zip(samples, rows, strict=True):
        count = len(sample.tokens)
        if len(features) < count - 1:
            raise UserError(
                f"sample {sample.source} has {count} tokens and features of "
                f"{len(features)} rows; record all of its rows"
            )
        planes = features[:count]
        if schema.teacher:
            planes = np.concatenate([planes, hidden[:count, None]], 1)
        if not np.isfinite(planes).all():
            bad.append(sample.source)
            continue
        check_varied(sample, schema, planes.min((0, 2)), planes.max((0, 2)))
        padded = np.zeros((count, *planes.shape[1:]), planes.dtype)
        padded[: len(planes)] = planes
        teacher = padded[:, -1] if schema.teacher else None
        stored.append(stored_sample(sample, padded[:, : schema.num_layers], teacher))
    check_finite(bad, writer.num_skipped + len(bad), total, writer.layout.dtype)
    writer.write_shard(index, stored, {"not finite": bad})
