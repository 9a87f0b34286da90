"""The zarr arrays of a store: how they are made, opened and named on disk."""

from __future__ import annotations

import functools
import os
from typing import Any

import tensorstore as ts

from spec_jax.data.store.layout import MAX_SHARDS, Layout

PLANES = ("ids", "features")

# Tokens of an inner chunk: what one read fetches at least.
CHUNK_TOKENS = 64


def open_array(
    path: str, name: str, layout: Layout, create: bool = False
) -> ts.TensorStore:
    """Opens (or creates) one array of a store.

    Args:
      path: the store's folder.
      name: one of `PLANES`.
      layout: the store's.
      create: make it; it must not be there.
    """
    tail, data_type = {
        "ids": ([2], "int32"),
        "features": ([layout.planes, layout.schema.width], layout.dtype),
    }[name]
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": os.path.join(path, name) + "/"},
        # All-zero chunks are written too: files then depend on sizes alone.
        "store_data_equal_to_fill_value": True,
    }
    if create:
        checked = [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ]
        capacity = -(-layout.shard_tokens // CHUNK_TOKENS) * CHUNK_TOKENS
        sharding = {
            "chunk_shape": [1, CHUNK_TOKENS, *tail],
            "codecs": checked,
            "index_codecs": checked,
            "index_location": "end",
        }
        spec["metadata"] = {
            "shape": [MAX_SHARDS, capacity, *tail],
            "data_type": data_type,
            "fill_value": 0 if name == "ids" else 0.0,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [1, capacity, *tail]},
            },
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
    return ts.open(spec, open=True, create=create, context=_context()).result()


def metadata_file(path: str, name: str) -> str:
    """Where zarr3 puts an array's metadata."""
    return os.path.join(path, name, "zarr.json")


def shard_file(name: str, index: int) -> str:
    """Where zarr3 puts a shard, relative to the store."""
    zeros = "/0" * (2 if name == "ids" else 3)
    return f"{name}/c/{index}{zeros}"


@functools.cache
def _context() -> ts.Context:
    """No chunk cache: a store is larger than memory and read in random order."""
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})
