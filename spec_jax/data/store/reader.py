"""Readers of a store: many at once, each believing only what was written."""

from __future__ import annotations

import threading

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.core.features import TARGET_FIELDS, Contract, require_same
from spec_jax.data.store import manifest
from spec_jax.data.store.arrays import PLANES, open_array
from spec_jax.data.store.layout import Layout


class FeatureStore:
    """An opened store; reading is thread-safe.

    Attributes:
      path: the store's folder.
      contract: what it was captured under.
      layout: see `Layout`.
      samples: one `SampleInfo` per sample, in order.
      skipped: reason -> sources of samples that capture left out.
      digest: sha256 of the index: the identity of the content.
    """

    def __init__(
        self,
        path: str,
        contract: Contract,
        layout: Layout,
        shards: dict[int, manifest.Entry],
    ):
        self.path, self.contract, self.layout = path, contract, layout
        self.samples = tuple(manifest.sample_infos(shards))
        self.skipped = manifest.skipped_sources(shards)
        self.digest = manifest.digest_of(shards)
        self._shards = shards
        self._checked: set[int] = set()
        self._guard = threading.Lock()
        self._arrays = {name: open_array(path, name, layout) for name in PLANES}

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(info.length for info in self.samples)

    def read_sample(self, index: int) -> dict[str, np.ndarray]:
        """Reads one sample into fresh arrays.

        Returns:
          `tokens` int32 [T], `supervised` bool [T], `features` [T, L, D] in the
          stored dtype and, where the store has it, `teacher` [T, D].

        Raises:
          UserError: no such sample, or its shard is not what was written.
        """
        if not 0 <= index < len(self.samples):
            raise UserError(
                f"sample {index} is not in feature store {self.path!r}, which has "
                f"{len(self.samples)}; ask for one of them"
            )
        info = self.samples[index]
        where = f"sample {index} ({info.source}) of feature store {self.path!r}"
        self._check_shard(info.shard, where)
        rows = slice(info.offset, info.offset + info.length)
        try:
            reads = [self._arrays[name][info.shard, rows].read() for name in PLANES]
            ids, features = (read.result() for read in reads)
        except (ValueError, OSError) as error:
            raise UserError(
                f"{where} cannot be read ({_first_line(error)}); {manifest.FIX}"
            ) from error
        sample = {
            "tokens": np.ascontiguousarray(ids[:, 0]),
            "supervised": ids[:, 1] != 0,
            "features": features[:, : self.layout.schema.num_layers],
        }
        if self.layout.schema.teacher:
            sample["teacher"] = features[:, -1]
        return sample

    def verify(self) -> None:
        """Reads every file once and compares its sha256.

        Raises:
          UserError: naming the first shard that differs.
        """
        for shard in sorted(self._shards):
            self._check_shard(shard, f"feature store {self.path!r}")

    def _check_shard(self, shard: int, where: str) -> None:
        """Compares a shard's files with the index, once per reader."""
        if shard in self._checked:
            return
        with self._guard:
            if shard in self._checked:
                return
            manifest.check_sums(self.path, shard, self._shards[shard], where)
            self._checked.add(shard)


def open_store(
    path: str,
    expected_contract: Contract | None = None,
    *,
    partial: bool = False,
    verify: bool = False,
) -> FeatureStore:
    """Opens a store for reading.

    Sizes of all files are compared here; each shard's sha256 when it is first
    read, or here with `verify`.

    Args:
      path: the store's folder.
      expected_contract: the reader's contract; the target must agree, and its
        layer ids must be among the store's (which may hold more).
      partial: accept a store whose capture has not finished.
      verify: compare every checksum now.

    Raises:
      UserError: no store there; a torn, foreign, incomplete or empty one.
    """
    contract, layout, shards = manifest.read_index(path)
    if expected_contract is not None:
        require_same(
            expected_contract, contract, f"feature store {path!r}", TARGET_FIELDS
        )
        absent = [i for i in expected_contract.layer_ids if i not in contract.layer_ids]
        if absent:
            raise UserError(
                f"feature store {path!r} lacks layer {absent[0]}: it holds layer_ids "
                f"{contract.layer_ids}; name them all in capture.layer_ids and capture "
                "again, or condition the drafter on those"
            )
    if len(shards) < layout.num_shards and not partial:
        raise UserError(
            f"feature store {path!r} is incomplete: {len(shards)} of "
            f"{layout.num_shards} shards are there; run the capture again to finish it"
        )
    for shard, entry in shards.items():
        manifest.check_sizes(path, shard, entry, f"feature store {path!r}")
    if not any(entry["samples"] for entry in shards.values()):
        raise UserError(
            f"feature store {path!r} holds no samples; run the capture again"
        )
    store = FeatureStore(path, contract, layout, shards)
    if verify:
        store.verify()
    return store


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]
