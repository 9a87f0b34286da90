"""The feature store: captured features on disk, checked before they are believed.

    <store>/
      contract.json     the core `Contract` the features were captured under
      index.json        what is there: shards, their files and samples
      ids/              zarr3 [shard, token, 2] int32: token id, supervised
      features/         zarr3 [shard, token, L (+ 1), D]: captured layer outputs
                        and, last, the teacher hidden
      .lock             held by the one writer

A shard is one file per array (a zarr3 shard of uncompressed inner chunks, each
with a crc32c), so full shards of 128 samples make 1/64 object per sample. A
shard is written in one transaction and then listed by renaming a new
`index.json` into place: whatever happens before that leaves it unlisted, and
writing it again gives the same bytes. zarr reads what is missing as zeros and
plain zarr returns a flipped bit as data; therefore the index records size and
sha256 of every file, and a reader compares them before it believes a shard.

    layout      what a store is made of, and the room that it takes
    arrays      its zarr arrays
    manifest    `index.json`, `contract.json`, sizes and checksums
    writer      the one writer
    reader      any number of readers
"""

from spec_jax.data.store.layout import (
    CAPTURED,
    DTYPES,
    GENERATED,
    Layout,
    StoredSample,
    check_disk,
    facts_of,
    plan_bytes,
)
from spec_jax.data.store.manifest import SampleInfo, look_into
from spec_jax.data.store.reader import FeatureStore, open_store
from spec_jax.data.store.writer import StoreWriter

__all__ = [
    "CAPTURED",
    "DTYPES",
    "GENERATED",
    "FeatureStore",
    "Layout",
    "SampleInfo",
    "StoreWriter",
    "StoredSample",
    "check_disk",
    "facts_of",
    "look_into",
    "open_store",
    "plan_bytes",
]
