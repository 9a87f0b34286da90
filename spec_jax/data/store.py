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
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from spec_jax.core.errors import UserError
from spec_jax.core.features import (
    TARGET_FIELDS,
    Contract,
    FeatureSchema,
    contract_from_json,
    require_same,
)
from spec_jax.data.files import (
    remove_temporaries,
    sha256_of,
    sync_folder,
    write_atomically,
)

DTYPES = ("float32", "float16", "bfloat16")

# Tokens of an inner chunk: what one read fetches at least.
CHUNK_TOKENS = 64

_FORMAT = "spec_jax feature store 1"
_CONTRACT, _INDEX, _LOCK = "contract.json", "index.json", ".lock"
_PLANES = ("ids", "features")
# Only an upper bound: what is not written takes no room, and resizing a zarr
# array is not atomic.
_MAX_SHARDS = 1 << 20
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
class SampleInfo:
    """What the index knows about a sample without reading it.

    Attributes:
      shard: which shard holds it.
      offset: its first token in the shard.
      length: its tokens.
      prompt_len: tokens of the prompt.
      num_supervised: supervised tokens.
      source: where it came from.
      looping: whether the answer repeats itself.
    """

    shard: int
    offset: int
    length: int
    prompt_len: int
    num_supervised: int
    source: str
    looping: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a store is laid out; fixed when it is created.

    Attributes:
      schema: layers and width.
      dtype: of the stored features.
      shard_tokens: the most tokens a shard can hold.
      num_shards: shards of the complete store.
      made_from: sha256 of what the store is captured from, or "".
    """

    schema: FeatureSchema
    dtype: str
    shard_tokens: int
    num_shards: int
    made_from: str = ""

    @property
    def planes(self) -> int:
        """Rows of D per token: captured layers and the teacher."""
        return self.schema.num_layers + self.schema.teacher


def plan_bytes(num_tokens: int, schema: FeatureSchema, dtype: str) -> int:
    """Bytes that `num_tokens` take in a store, without the index."""
    rows = schema.num_layers + schema.teacher
    return num_tokens * (rows * schema.width * _dtype(dtype).itemsize + _ID_BYTES)


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
            f"data.store={path!r} needs {num_bytes / 1e9:.2f} GB and {folder} has "
            f"{free / 1e9:.2f} GB free; capture fewer tokens or layers, or a smaller "
            "dtype"
        )


# ---- Writing.


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
        _check_layout(contract, layout)
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
            self.written: dict[int, dict] = self._open_or_create()
            self._arrays = {name: _open_array(path, name, layout) for name in _PLANES}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        files = {}
        if packed:
            self._write_arrays(index, packed, total)
            for name in _PLANES:
                file = _shard_file(name, index)
                full = os.path.join(self.path, file)
                files[name] = [file, os.path.getsize(full), sha256_of(full)]
                sync_folder(os.path.dirname(full))
        entry = {
            "tokens": total,
            "files": files,
            "samples": [
                [
                    len(sample.tokens),
                    int(sample.prompt_len),
                    int(np.count_nonzero(sample.supervised)),
                    sample.source,
                    bool(sample.looping),
                ]
                for sample in samples
            ],
            "skipped": {k: list(v) for k, v in (skipped or {}).items() if v},
        }
        _write_index(self.path, self._contract, layout, {**self.written, index: entry})
        self.written[index] = entry

    def _write_arrays(self, index: int, packed: list, total: int) -> None:
        columns = [np.concatenate(parts) for parts in zip(*packed, strict=True)]
        # A shard of an interrupted writer would be merged with, not replaced.
        for name in _PLANES:
            full = os.path.join(self.path, _shard_file(name, index))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(full)
        transaction = ts.Transaction()
        writes = [
            self._arrays[name].with_transaction(transaction)[index, :total].write(data)
            for name, data in zip(_PLANES, columns, strict=True)
        ]
        for write in writes:
            write.result()
        transaction.commit_async().result()

    def _open_or_create(self) -> dict[int, dict]:
        if not os.path.exists(os.path.join(self.path, _INDEX)):
            content = self._contract.to_json().encode()
            write_atomically(os.path.join(self.path, _CONTRACT), content)
            for name in _PLANES:  # remains of a creation that was cut short
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)
                _open_array(self.path, name, self.layout, create=True)
            _write_index(self.path, self._contract, self.layout, {})
            return {}
        contract, layout, shards = _read_index(self.path)
        require_same(self._contract, contract, f"feature store {self.path!r}")
        names = [field.name for field in dataclasses.fields(Layout)]
        for name in sorted(names, key=lambda name: name != "made_from"):
            ours, theirs = getattr(self.layout, name), getattr(layout, name)
            if ours != theirs:
                raise UserError(
                    f"feature store {self.path!r} cannot be continued: its "
                    f"{name} is {theirs!r}, this capture's is {ours!r}; use another "
                    "folder or remove the store"
                )
        return shards


def _check_layout(contract: Contract, layout: Layout) -> None:
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
    _dtype(layout.dtype)
    if not 1 <= layout.num_shards <= _MAX_SHARDS or layout.shard_tokens < 1:
        raise UserError(
            f"store layout has num_shards={layout.num_shards} and "
            f"shard_tokens={layout.shard_tokens}; both must be at least 1 (and at most "
            f"{_MAX_SHARDS} shards)"
        )


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
    rows = np.empty((count, layout.planes, schema.width), _dtype(layout.dtype))
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


# ---- Reading.


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

    def __init__(self, path: str, contract: Contract, layout: Layout, shards: dict):
        self.path, self.contract, self.layout = path, contract, layout
        self.samples = tuple(_sample_infos(shards))
        self.skipped: dict[str, list[str]] = {}
        for _, entry in sorted(shards.items()):
            for reason, sources in entry["skipped"].items():
                self.skipped.setdefault(reason, []).extend(sources)
        self.digest = hashlib.sha256(
            json.dumps([shards[k] for k in sorted(shards)]).encode()
        ).hexdigest()
        self._shards = shards
        self._checked: set[int] = set()
        self._guard = threading.Lock()
        self._arrays = {name: _open_array(path, name, layout) for name in _PLANES}

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
            reads = [self._arrays[name][info.shard, rows].read() for name in _PLANES]
            ids, features = (read.result() for read in reads)
        except (ValueError, OSError) as error:
            raise UserError(
                f"{where} cannot be read ({_first_line(error)}); {_FIX}"
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
            _check_sizes(self.path, shard, self._shards[shard], where)
            for file, _, digest in self._shards[shard]["files"].values():
                if sha256_of(os.path.join(self.path, file)) != digest:
                    raise UserError(
                        f"{where} cannot be trusted: {file} (shard {shard}) differs "
                        f"from its checksum; {_FIX}"
                    )
            self._checked.add(shard)


_FIX = "remove the store and capture it again"


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
    contract, layout, shards = _read_index(path)
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
        _check_sizes(path, shard, entry, f"feature store {path!r}")
    if not any(entry["samples"] for entry in shards.values()):
        raise UserError(
            f"feature store {path!r} holds no samples; run the capture again"
        )
    store = FeatureStore(path, contract, layout, shards)
    if verify:
        store.verify()
    return store


def _check_sizes(path: str, shard: int, entry: dict, where: str) -> None:
    for file, size, _ in entry["files"].values():
        try:
            found = os.path.getsize(os.path.join(path, file))
        except OSError:
            found = None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, not {size}"
            sources = entry["samples"]
            raise UserError(
                f"{where}: {file} {what} (shard {shard}, samples {sources[0][3]} to "
                f"{sources[-1][3]}); {_FIX}"
            )


def _sample_infos(shards: dict):
    for shard, entry in sorted(shards.items()):
        offset = 0
        for length, prompt_len, num_supervised, source, looping in entry["samples"]:
            yield SampleInfo(
                shard, offset, length, prompt_len, num_supervised, source, looping
            )
            offset += length


# ---- Files.


def _write_index(path: str, contract: Contract, layout: Layout, shards: dict) -> None:
    body = {
        "format": _FORMAT,
        "contract_sha256": hashlib.sha256(contract.to_json().encode()).hexdigest(),
        "layout": dataclasses.asdict(layout),
        "arrays": {name: sha256_of(_metadata_file(path, name)) for name in _PLANES},
        "shards": {str(index): shards[index] for index in sorted(shards)},
    }
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_atomically(os.path.join(path, _INDEX), f"{digest}\n{text}\n".encode())


def _read_index(path: str) -> tuple[Contract, Layout, dict[int, dict]]:
    try:
        with open(os.path.join(path, _INDEX), encoding="utf-8") as file:
            digest, text, *_ = file.read().split("\n")
        with open(os.path.join(path, _CONTRACT), encoding="utf-8") as file:
            contract_text = file.read()
    except FileNotFoundError as error:
        raise UserError(
            f"{path!r} is not a feature store: {os.path.basename(error.filename)} is "
            "missing; name a folder that a capture wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}/{_INDEX} cannot be read ({error}); {_FIX}") from error
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise UserError(f"{path}/{_INDEX} differs from its checksum; {_FIX}")
    body: dict[str, Any] = json.loads(text)
    if body.get("format") != _FORMAT:
        raise UserError(
            f"{path}/{_INDEX} has format {body.get('format')!r}, this version reads "
            f"{_FORMAT!r}; capture it again"
        )
    if hashlib.sha256(contract_text.encode()).hexdigest() != body["contract_sha256"]:
        raise UserError(
            f"{path}/{_CONTRACT} is not the contract this store was made under; {_FIX}"
        )
    contract = contract_from_json(contract_text, os.path.join(path, _CONTRACT))
    for name, digest in body["arrays"].items():
        file = _metadata_file(path, name)
        if not os.path.exists(file) or sha256_of(file) != digest:
            raise UserError(f"{file} is missing or differs from its checksum; {_FIX}")
    schema = body["layout"].pop("schema")
    schema["layer_ids"] = tuple(schema["layer_ids"])
    layout = Layout(schema=FeatureSchema(**schema), **body["layout"])
    return contract, layout, {int(k): entry for k, entry in body["shards"].items()}


def _metadata_file(path: str, name: str) -> str:
    return os.path.join(path, name, "zarr.json")


def _shard_file(name: str, index: int) -> str:
    """Where zarr3 puts a shard, relative to the store."""
    zeros = "/0" * (2 if name == "ids" else 3)
    return f"{name}/c/{index}{zeros}"


def _open_array(path: str, name: str, layout: Layout, create: bool = False):
    """Opens (or creates) one array of a store."""
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
            "shape": [_MAX_SHARDS, capacity, *tail],
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


@functools.cache
def _context() -> ts.Context:
    """No chunk cache: a store is larger than memory and read in random order."""
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def _dtype(name: str) -> np.dtype:
    if name not in DTYPES:
        raise UserError(
            f"data.feature_dtype is {name!r}; use one of {', '.join(DTYPES)}"
        )
    return np.dtype(jnp.dtype(name))


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]
