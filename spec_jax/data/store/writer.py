"""The one writer of a store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence

import numpy as np
import tensorstore as ts

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, require_same
from spec_jax.data.files import remove_temporaries, sync_folder
from spec_jax.data.store import manifest
from spec_jax.data.store.arrays import PLANES, open_array, shard_file
from spec_jax.data.store.layout import (
    Layout,
    StoredSample,
    check_layout,
    difference,
    dtype_of,
)

_LOCK = ".lock"


class StoreWriter:
    """The one writer of a store; use it as a context manager.

    Attributes:
      path: the store's folder.
      layout: see `Layout`.
      written: shard index -> its index entry, shards that are complete.
    """

    def __init__(self, path: str, contract: Contract, layout: Layout):
        """Creates a store, or opens one to write what is missing.

        Raises:
          UserError: another writer holds it; it was made under another contract
            or layout, or from other samples; contract and layout disagree.
        """
        check_layout(contract, layout)
        self.path, self.layout, self._contract = path, layout, contract
        os.makedirs(path, exist_ok=True)
        self._lock: int | None = os.open(
            os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT, 0o666
        )
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise UserError(
                f"feature store {path!r} is being written by another process; wait for "
                "it, or use another folder"
            ) from error
        try:
            remove_temporaries(path)
            self.written: dict[int, manifest.Entry] = self._open_or_create()
            self._arrays = {name: open_array(path, name, layout) for name in PLANES}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_skipped(self) -> int:
        """Samples that were left out of the shards there are."""
        skipped = (entry["skipped"] for entry in self.written.values())
        return sum(len(sources) for each in skipped for sources in each.values())

    def close(self) -> None:
        """Lets another writer in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_shard(
        self,
        index: int,
        samples: Sequence[StoredSample],
        skipped: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Writes a whole shard and lists it.

        Args:
          index: which one, in [0, layout.num_shards).
          samples: its samples, in order (none, where all were skipped).
          skipped: reason -> sources of samples that were left out.

        Raises:
          UserError: the shard is there already or does not fit; a sample's
            arrays disagree with each other or with the layout, or its features
            are not finite in the stored dtype.
        """
        layout = self.layout
        if not 0 <= index < layout.num_shards or index in self.written:
            raise UserError(
                f"shard {index} of {self.path!r} cannot be written: it must be one of "
                f"the {layout.num_shards - len(self.written)} that are not there yet"
            )
        packed = [_pack(sample, layout) for sample in samples]
        total = sum(len(ids) for ids, _ in packed)
        if total > layout.shard_tokens:
            raise UserError(
                f"shard {index} of {self.path!r} has {total} tokens, more than "
                f"shard_tokens={layout.shard_tokens}; put fewer samples into a shard"
            )
        if packed:
            self._write_arrays(index, packed, total)
        entry = manifest.entry_of(self.path, index, samples, skipped or {})
        for file, _, _ in entry["files"].values():
            sync_folder(os.path.dirname(os.path.join(self.path, file)))
        manifest.write_index(
            self.path, self._contract, layout, {**self.written, index: entry}
        )
        self.written[index] = entry

    def _write_arrays(self, index: int, packed: list, total: int) -> None:
        columns = [np.concatenate(parts) for parts in zip(*packed, strict=True)]
        # A shard of an interrupted writer would be merged with, not replaced.
        for name in PLANES:
            full = os.path.join(self.path, shard_file(name, index))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(full)
        transaction = ts.Transaction()
        writes = [
            self._arrays[name].with_transaction(transaction)[index, :total].write(data)
            for name, data in zip(PLANES, columns, strict=True)
        ]
        for write in writes:
            write.result()
        transaction.commit_async().result()

    def _open_or_create(self) -> dict[int, manifest.Entry]:
        if not manifest.is_created(self.path):
            manifest.write_contract(self.path, self._contract)
            for name in PLANES:  # remains of a creation that was cut short
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)
                open_array(self.path, name, self.layout, create=True)
            manifest.write_index(self.path, self._contract, self.layout, {})
            return {}
        contract, layout, shards = manifest.read_index(self.path)
        require_same(self._contract, contract, f"feature store {self.path!r}")
        if found := difference(self.layout, layout):
            name, theirs, ours = found
            raise UserError(
                f"feature store {self.path!r} cannot be continued: its {name} is "
                f"{theirs}, this run's is {ours}; use another folder or remove the "
                "store"
            )
        return shards


def _pack(sample: StoredSample, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """A sample's rows of both arrays, checked against the layout."""
    count, schema = len(sample.tokens), layout.schema
    shapes = {
        "supervised": (sample.supervised, (count,)),
        "features": (sample.features, (count, schema.num_layers, schema.width)),
    }
    if schema.teacher:
        shapes["teacher"] = (sample.teacher, (count, schema.width))
    elif sample.teacher is not None:
        raise UserError(
            f"sample {sample.source} has a teacher plane and the store's schema has "
            "none; set schema.teacher"
        )
    for name, (array, shape) in shapes.items():
        if np.shape(array) != shape:
            raise UserError(
                f"sample {sample.source}: {name} has shape {np.shape(array)}, expected "
                f"{shape} for its {count} tokens; capture it again"
            )
    if count == 0:
        raise UserError(f"sample {sample.source} has no tokens; leave it out")
    rows = np.empty((count, layout.planes, schema.width), dtype_of(layout.dtype))
    with np.errstate(over="ignore"):
        rows[:, : schema.num_layers] = sample.features
        if schema.teacher:
            rows[:, -1] = sample.teacher
    if not np.isfinite(rows).all():
        raise UserError(
            f"sample {sample.source}: a feature is not finite in {layout.dtype}; leave "
            "it out or store a wider dtype"
        )
    return np.stack([sample.tokens, sample.supervised], -1).astype(np.int32), rows
