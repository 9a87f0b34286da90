"""What a store is made of, and the room that it takes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema

DTYPES = ("float32", "float16", "bfloat16")

# Where a store's features come from: kept while its text was generated, or captured
# from a text that was there.
GENERATED, CAPTURED = "generated", "captured"

# (name, value as JSON) pairs of what decides a store's content.
Facts = tuple[tuple[str, str], ...]

# Only an upper bound: what is not written takes no room, and resizing a zarr
# array is not atomic.
MAX_SHARDS = 1 << 20

_ID_BYTES = 8


@dataclasses.dataclass(frozen=True)
class StoredSample:
    """A sample with its features, as it is written.

    Attributes:
      tokens: int32 [T].
      supervised: bool [T], tokens that the target produced.
      features: [T, L, D], any float dtype.
      source: where the sample came from.
      prompt_len: tokens of the prompt.
      looping: whether the answer repeats itself.
      teacher: [T, D] post-norm last hidden, or None.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    features: np.ndarray
    source: str
    prompt_len: int
    looping: bool = False
    teacher: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a store is laid out; fixed when it is created.

    Attributes:
      schema: layers and width.
      dtype: of the stored features.
      shard_tokens: the most tokens a shard can hold.
      num_shards: shards of the complete store.
      made_from: sha256 of what the store is captured from, or "".
      origin: `GENERATED` or `CAPTURED`; "" where a store of before does not say.
      facts: what `made_from` was made of, for the sentence that says what differs.
    """

    schema: FeatureSchema
    dtype: str
    shard_tokens: int
    num_shards: int
    made_from: str = ""
    origin: str = ""
    facts: Facts = ()

    @property
    def planes(self) -> int:
        """Rows of D per token: captured layers and the teacher."""
        return num_planes(self.schema)


def facts_of(values: Mapping[str, Any]) -> Facts:
    """What decides a store's content, by the names that a person knows."""
    return tuple((name, json.dumps(value)) for name, value in values.items())


def difference(ours: Layout, theirs: Layout) -> tuple[str, str, str] | None:
    """What keeps a store from being continued: its name, their value, and ours.

    A store of before says neither its origin nor its facts, and is compared by the
    rest.
    """
    if theirs.origin and ours.origin != theirs.origin:
        return "origin", repr(theirs.origin), repr(ours.origin)
    if ours.made_from != theirs.made_from:
        there = dict(theirs.facts)
        for name, value in ours.facts:
            if there.get(name, value) != value:
                return name, there[name], value
    for name in ("made_from", "schema", "dtype", "shard_tokens", "num_shards"):
        pair = getattr(theirs, name), getattr(ours, name)
        if pair[0] != pair[1]:
            return name, repr(pair[0]), repr(pair[1])
    return None


def num_planes(schema: FeatureSchema) -> int:
    """Rows of D that a token has: captured layers and, where kept, the teacher."""
    return schema.num_layers + schema.teacher


def plan_bytes(num_tokens: int, schema: FeatureSchema, dtype: str) -> int:
    """Bytes that `num_tokens` take in a store, without the index."""
    width = num_planes(schema) * schema.width
    return num_tokens * (width * dtype_of(dtype).itemsize + _ID_BYTES)


def check_disk(path: str, num_bytes: int) -> None:
    """Refuses to start what the disk cannot hold.

    Raises:
      UserError: `num_bytes` is more than what is free where `path` will lie.
    """
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"feature store {path!r} needs up to {num_bytes / 1e9:.2f} GB and {folder} "
            f"has {free / 1e9:.2f} GB free; name another data.folder, fewer tokens or "
            "layers, or a smaller capture.dtype"
        )


def check_layout(contract: Contract, layout: Layout) -> None:
    """Refuses a layout that is not the contract's, or that cannot be.

    Raises:
      UserError: naming what disagrees or is out of its range.
    """
    pairs = {
        "feature_dtype": (contract.feature_dtype, layout.dtype),
        "layer_ids": (tuple(contract.layer_ids), tuple(layout.schema.layer_ids)),
        "hidden_size": (contract.hidden_size, layout.schema.width),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UserError(
                f"contract.{name} is {ours!r} but the store's schema says {theirs!r}; "
                "make both from one recipe"
            )
    dtype_of(layout.dtype)
    if not 1 <= layout.num_shards <= MAX_SHARDS or layout.shard_tokens < 1:
        raise UserError(
            f"store layout has num_shards={layout.num_shards} and "
            f"shard_tokens={layout.shard_tokens}; both must be at least 1 (and at most "
            f"{MAX_SHARDS} shards)"
        )


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a name.

    Raises:
      UserError: it is none of `DTYPES`.
    """
    if name not in DTYPES:
        raise UserError(f"capture.dtype is {name!r}; use one of {', '.join(DTYPES)}")
    return np.dtype(jnp.dtype(name))
