"""Files of a drafter folder: weights in one file or shards, json, the manifest.

Nothing here knows what a drafter is. Whatever is torn, changed or missing is
refused with the file's name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from spec_jax.core.errors import UserError
from spec_jax.core.vocab import DraftVocab, from_offsets
from spec_jax.data import files as files_lib
from spec_jax.export import names

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONTRACT = "contract.json"
GOLDEN = "golden.safetensors"
MANIFEST = "manifest.json"
FORMAT = 2

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

_NAME_ONE = "name a folder that a drafter was saved in"
_FLOATS = ("F64", "F32", "F16", "BF16")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_whole(path: str, where: str) -> dict[str, Any] | None:
    """The manifest of a folder of ours, None of another's.

    Raises:
      UserError: the folder is missing, torn, changed, or of another version.
    """
    if not os.path.isdir(path):
        raise UserError(f"{where} is not there; {_NAME_ONE}")
    if not os.path.isfile(os.path.join(path, MANIFEST)):
        if os.path.isfile(os.path.join(path, CONTRACT)):
            raise UserError(
                f"{where} has {CONTRACT} but no {MANIFEST}, so it is not whole; export "
                "the drafter again"
            )
        return None
    manifest = read_json(os.path.join(path, MANIFEST), where)
    shas = manifest.get("sha256")
    if manifest.get("format") != FORMAT or not isinstance(shas, dict):
        raise UserError(
            f"{where}: {MANIFEST} has format {manifest.get('format')!r}, expected "
            f"{FORMAT}; export the drafter again with this version"
        )
    for name in {CONFIG, CONTRACT, WEIGHTS} - set(shas):
        raise UserError(f"{where}: {MANIFEST} does not list {name}; export it again")
    for name, expected in sorted(shas.items()):
        file = os.path.join(path, name)
        if os.path.basename(name) != name or not os.path.isfile(file):
            raise UserError(f"{where} lacks {name}; copy or export the folder again")
        if files_lib.sha256_of(file) != expected:
            raise UserError(
                f"{where}: {name} is not the file that was exported (its sha256 "
                f"differs from {MANIFEST}); copy or export the folder again"
            )
    return manifest


def read_weights(path: str, where: str) -> tuple[dict[str, np.ndarray], str]:
    """Plain name -> tensor as stored, and the sha256 of the weight file(s).

    Raises:
      UserError: no weights, a torn file, or a tensor of a type that is no float.
    """
    files = _weight_files(path, where)
    tensors: dict[str, np.ndarray] = {}
    shas = []
    for name in files:
        file = os.path.join(path, name)
        tensors |= load_safetensors(file, where)
        shas.append(files_lib.sha256_of(file))
    sha = shas[0]
    if len(shas) > 1:
        sha = hashlib.sha256("".join(shas).encode()).hexdigest()
    plain = {p: tensors[n] for p, n in names.strip_prefix(tensors).items()}
    for name, tensor in plain.items():
        if name in (names.D2T, names.T2D):
            continue
        if tensor.dtype.kind != "f" and tensor.dtype != DTYPES["bfloat16"]:
            raise UserError(
                f"{where}: tensor {name} has type {tensor.dtype}; save the weights as "
                f"one of {', '.join(_FLOATS)}"
            )
    return plain, sha


def pop_vocab(
    tensors: dict[str, np.ndarray], vocab_size: int | None, where: str
) -> DraftVocab | None:
    """Takes the vocabulary map out of the tensors; None where there is none.

    Raises:
      UserError: half a map, other types or sizes, or parts that disagree.
    """
    d2t, t2d = tensors.pop(names.D2T, None), tensors.pop(names.T2D, None)
    if d2t is None and t2d is None:
        return None
    if d2t is None or t2d is None:
        missing = names.D2T if d2t is None else names.T2D
        raise UserError(
            f"{where} lacks tensor {missing}; a reduced vocabulary needs both d2t and "
            "t2d"
        )
    if d2t.ndim != 1 or d2t.dtype.kind not in "iu":
        raise UserError(
            f"{where}: tensor d2t is {d2t.dtype} of shape {d2t.shape}, expected int64 "
            "offsets, one per draft token"
        )
    if t2d.dtype != np.bool_ or vocab_size not in (None, len(t2d)):
        raise UserError(
            f"{where}: tensor t2d is {t2d.dtype} of shape {t2d.shape}, expected bool, "
            f"one per target token ({vocab_size})"
        )
    try:
        return from_offsets(d2t, t2d)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def load_safetensors(file: str, where: str) -> dict[str, np.ndarray]:
    """All tensors of one file.

    Raises:
      UserError: it is torn.
    """
    try:
        return safetensors.numpy.load_file(file)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{where}: {os.path.basename(file)} is not a whole safetensors file "
            f"({error}); copy or export the folder again"
        ) from error


def read_json(file: str, where: str) -> dict[str, Any]:
    """A json object.

    Raises:
      UserError: no such file, or something else in it.
    """
    name = os.path.basename(file)
    if not os.path.isfile(file):
        raise UserError(f"{where} has no {name}; {_NAME_ONE}")
    try:
        with open(file, encoding="utf-8") as handle:
            value = json.load(handle)
    except ValueError as error:
        raise UserError(
            f"{where}: {name} is not json ({error}); copy or export the folder again"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: {name} is not a json object; copy the folder again")
    return value


def check_replaceable(path: str) -> None:
    """Refuses to write over anything that is no exported drafter.

    Raises:
      UserError: `path` is a file, or a folder with something else in it.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        raise UserError(f"the drafter's folder {path!r} is a file; name a folder")
    other = os.path.isdir(path) and os.listdir(path)
    if other and not os.path.isfile(os.path.join(path, MANIFEST)):
        raise UserError(
            f"the drafter's folder {path!r} holds something that is not an exported "
            "drafter; name a new or an empty folder"
        )


def put_in_place(work: str, path: str) -> None:
    """Renames `work` to `path`; an earlier folder there leaves first."""
    if os.path.isdir(path):
        aside = work + "-replaced"
        os.rename(path, aside)
        try:
            os.rename(work, path)
        except OSError:
            os.rename(aside, path)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(work, path)
    files_lib.sync_folder(os.path.dirname(path))


def _weight_files(path: str, where: str) -> list[str]:
    if os.path.isfile(os.path.join(path, WEIGHTS)):
        return [WEIGHTS]
    if not os.path.isfile(os.path.join(path, INDEX)):
        for name in _PICKLES:
            if os.path.isfile(os.path.join(path, name)):
                raise UserError(
                    f"{where} has its weights in {name}, which runs code when it is "
                    "opened and is not read here; save them as safetensors"
                )
        raise UserError(f"{where} has neither {WEIGHTS} nor {INDEX}; {_NAME_ONE}")
    weight_map = read_json(os.path.join(path, INDEX), where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{where}: {INDEX} has no weight_map; copy the folder again")
    listed = list(weight_map.values())
    if not all(isinstance(name, str) for name in listed):
        raise UserError(
            f"{where}: {INDEX} has a weight_map of something else than file names; "
            "copy the folder again"
        )
    files = sorted(set(listed))
    for name in files:
        there = os.path.isfile(os.path.join(path, name))
        if os.path.basename(name) != name or not there:
            raise UserError(f"{where} lacks {name}, which {INDEX} lists; copy it again")
    return files
