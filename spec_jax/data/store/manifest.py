"""What a store says is in it: `index.json` and `contract.json`, and their checks.

The first line of the index is the sha256 of the second, which is JSON and holds
the sha256 of the contract and of the arrays' metadata. An entry of a shard is

    {"tokens": tokens of the shard,
     "files": {array: [file, size in bytes, sha256]},
     "samples": [[tokens, prompt tokens, supervised tokens, source, looping]],
     "skipped": {reason: [source]}}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema, contract_from_json
from spec_jax.data.files import sha256_of, write_atomically
from spec_jax.data.store.arrays import PLANES, metadata_file, shard_file
from spec_jax.data.store.layout import Layout, StoredSample

FORMAT = "spec_jax feature store 1"
CONTRACT, INDEX = "contract.json", "index.json"
FIX = "remove the store and capture it again"

Entry = dict[str, Any]


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


def write_contract(path: str, contract: Contract) -> None:
    """Puts `contract.json` into place."""
    write_atomically(os.path.join(path, CONTRACT), contract.to_json().encode())


def write_index(
    path: str, contract: Contract, layout: Layout, shards: Mapping[int, Entry]
) -> None:
    """Puts an index of these shards into place."""
    body = {
        "format": FORMAT,
        "contract_sha256": _sha256(contract.to_json()),
        "layout": dataclasses.asdict(layout),
        "arrays": {name: sha256_of(metadata_file(path, name)) for name in PLANES},
        "shards": {str(index): shards[index] for index in sorted(shards)},
    }
    text = json.dumps(body, separators=(",", ":"))
    write_atomically(os.path.join(path, INDEX), f"{_sha256(text)}\n{text}\n".encode())


def read_index(path: str) -> tuple[Contract, Layout, dict[int, Entry]]:
    """Contract, layout and shards of a store.

    Raises:
      UserError: no store there, or one of these files is not what was written.
    """
    try:
        with open(os.path.join(path, INDEX), encoding="utf-8") as file:
            digest, text, *_ = file.read().split("\n")
        with open(os.path.join(path, CONTRACT), encoding="utf-8") as file:
            contract_text = file.read()
    except FileNotFoundError as error:
        raise UserError(
            f"{path!r} is not a feature store: {os.path.basename(error.filename)} is "
            "missing; name a folder that a capture wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}/{INDEX} cannot be read ({error}); {FIX}") from error
    if _sha256(text) != digest:
        raise UserError(f"{path}/{INDEX} differs from its checksum; {FIX}")
    body: dict[str, Any] = json.loads(text)
    if body.get("format") != FORMAT:
        raise UserError(
            f"{path}/{INDEX} has format {body.get('format')!r}, this version reads "
            f"{FORMAT!r}; capture it again"
        )
    if _sha256(contract_text) != body["contract_sha256"]:
        raise UserError(
            f"{path}/{CONTRACT} is not the contract this store was made under; {FIX}"
        )
    contract = contract_from_json(contract_text, os.path.join(path, CONTRACT))
    for name, digest in body["arrays"].items():
        file = metadata_file(path, name)
        if not os.path.exists(file) or sha256_of(file) != digest:
            raise UserError(f"{file} is missing or differs from its checksum; {FIX}")
    schema = body["layout"].pop("schema")
    schema["layer_ids"] = tuple(schema["layer_ids"])
    facts = tuple(map(tuple, body["layout"].pop("facts", ())))
    layout = Layout(schema=FeatureSchema(**schema), facts=facts, **body["layout"])
    return contract, layout, {int(k): entry for k, entry in body["shards"].items()}


def is_created(path: str) -> bool:
    """Whether a store's creation came to its end there."""
    return os.path.exists(os.path.join(path, INDEX))


def look_into(path: str) -> tuple[Layout, int] | None:
    """The layout of a store and its complete shards; None where none was created.

    Raises:
      UserError: see `read_index`.
    """
    if not is_created(path):
        return None
    _, layout, shards = read_index(path)
    return layout, len(shards)


def entry_of(
    path: str,
    index: int,
    samples: Sequence[StoredSample],
    skipped: Mapping[str, Sequence[str]],
) -> Entry:
    """The entry of a shard whose files are written; none are where it is empty."""
    files = {}
    for name in PLANES if samples else ():
        file = shard_file(name, index)
        full = os.path.join(path, file)
        files[name] = [file, os.path.getsize(full), sha256_of(full)]
    return {
        "tokens": sum(len(sample.tokens) for sample in samples),
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
        "skipped": {k: list(v) for k, v in skipped.items() if v},
    }


def sample_infos(shards: Mapping[int, Entry]) -> Iterator[SampleInfo]:
    """Every sample, in order."""
    for shard, entry in sorted(shards.items()):
        offset = 0
        for length, prompt_len, num_supervised, source, looping in entry["samples"]:
            yield SampleInfo(
                shard, offset, length, prompt_len, num_supervised, source, looping
            )
            offset += length


def skipped_sources(shards: Mapping[int, Entry]) -> dict[str, list[str]]:
    """Reason -> sources of samples that capture left out, in order."""
    found: dict[str, list[str]] = {}
    for _, entry in sorted(shards.items()):
        for reason, sources in entry["skipped"].items():
            found.setdefault(reason, []).extend(sources)
    return found


def digest_of(shards: Mapping[int, Entry]) -> str:
    """sha256 of the shards' entries: the identity of the content."""
    return _sha256(json.dumps([shards[k] for k in sorted(shards)]))


def check_sizes(path: str, shard: int, entry: Entry, where: str) -> None:
    """Compares the sizes of a shard's files with its entry.

    Raises:
      UserError: `where`, and the file that is missing or has another size.
    """
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
                f"{sources[-1][3]}); {FIX}"
            )


def check_sums(path: str, shard: int, entry: Entry, where: str) -> None:
    """Compares sizes and sha256 of a shard's files with its entry.

    Raises:
      UserError: `where`, and the file that differs.
    """
    check_sizes(path, shard, entry, where)
    for file, _, digest in entry["files"].values():
        if sha256_of(os.path.join(path, file)) != digest:
            raise UserError(
                f"{where} cannot be trusted: {file} (shard {shard}) differs from its "
                f"checksum; {FIX}"
            )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
