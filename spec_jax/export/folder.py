"""The portable DFlash folder: weights, configuration, contract, golden round.

    config.json         what any reader of DFlash folders needs
    model.safetensors   public names, `[out, in]`; d2t and t2d when the
                        vocabulary is reduced
    contract.json       the contract the drafter was trained under
    golden.safetensors  a round to draft again after loading
    manifest.json       sha256 of each of the above; written last

A folder is written beside its place and renamed, so that it is there whole or
not at all, and a reader compares every checksum. A folder from elsewhere has
neither contract nor manifest; what can be compared is, and a note says so.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from spec_jax.core.errors import UserError
from spec_jax.core.features import (
    CAPTURE_POINT,
    TEACHER_POINT,
    Contract,
    contract_from_json,
    require_same,
)
from spec_jax.core.vocab import DraftVocab, from_offsets
from spec_jax.data import files as files_lib
from spec_jax.drafters import dflash
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.frozen import frozen_for
from spec_jax.export import dflash_config, golden, names
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONTRACT = "contract.json"
GOLDEN = "golden.safetensors"
MANIFEST = "manifest.json"
FORMAT = 1

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# What a contract says about the target itself.
TARGET_FACTS = (
    "target_fingerprint",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "tokenizer_hash",
    "template_hash",
    "capture_point",
    "teacher_point",
)

_NAME_ONE = "name a folder that a drafter was saved in"

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class Written:
    """What `write_folder` made.

    Attributes:
      path: the folder.
      weights_sha256: of the weight file.
      parity_max_abs: largest difference of training-time and serving-time draft
        logits of the same prefixes, from the exported weights; None without a
        golden probe.
    """

    path: str
    weights_sha256: str
    parity_max_abs: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Exported:
    """A drafter read from a folder.

    Attributes:
      drafter: made from the folder's configuration alone.
      params: `{"params": tree}` of float32 jax arrays.
      contract: what it was trained under; of a folder without one, what its
        configuration says and the target it was loaded for.
      draft_vocab: the ids it can propose, or None for all.
      weights_sha256: of the weight file (of all of them, in order, when sharded).
      golden_max_abs: largest difference in the golden round; None without one.
      notes: sentences on what could not be checked.
    """

    drafter: Drafter
    params: dict[str, Any] = dataclasses.field(repr=False)
    contract: Contract
    draft_vocab: DraftVocab | None = dataclasses.field(repr=False)
    weights_sha256: str
    golden_max_abs: float | None
    notes: tuple[str, ...]


def write_folder(
    path: str | os.PathLike[str],
    drafter: Drafter,
    params: Mapping[str, Any],
    contract: Contract,
    draft_vocab: DraftVocab | None,
    target_spec: TargetSpec,
    *,
    dtype: str = "float32",
    golden_probe: golden.Probe | None = None,
) -> Written:
    """Exports a DFlash drafter.

    Args:
      path: the folder to make; an earlier export there is replaced.
      drafter: the drafter, with resolved options.
      params: its parameters.
      contract: what it was trained under.
      draft_vocab: the ids it can propose, or None for the full vocabulary.
      target_spec: sizes of its target.
      dtype: float type of the stored weights, one of `DTYPES`.
      golden_probe: a text to record the golden round on; its logits are computed
        from the weights as stored.

    Raises:
      UserError: the drafter has no public form, contract and drafter disagree,
        or `path` holds something else.
      ValueError: training-time and serving-time logits differ, or are not
        finite: these weights must not be served.
    """
    path = os.path.abspath(os.fspath(path))
    if dtype not in DTYPES:
        raise UserError(f"export.dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    if not isinstance(drafter.options, dflash.Options):
        raise UserError(
            f"drafter {drafter.name!r} is not a DFlash drafter, and only those have "
            "this folder form"
        )
    if draft_vocab is not None and draft_vocab.size == draft_vocab.vocab_size:
        draft_vocab = None
    _check_contract(contract, drafter.options, target_spec, "the drafter to export")
    if draft_vocab is not None and draft_vocab.vocab_size != target_spec.vocab_size:
        raise UserError(
            f"draft vocabulary was made for {draft_vocab.vocab_size} target tokens but "
            f"the target has {target_spec.vocab_size}; rebuild the map for this target"
        )
    if golden_probe is not None:
        expected = target_spec.vocab_size if draft_vocab is None else draft_vocab.size
        if golden_probe.frozen.head_DU.shape[1] != expected:
            raise UserError(
                f"golden probe has {golden_probe.frozen.head_DU.shape[1]} head columns "
                f"but the drafter proposes {expected} tokens; make it with the same "
                "draft vocabulary"
            )
    _check_replaceable(path)
    weights = {
        name: weight.astype(DTYPES[dtype])
        for name, weight in names.to_public(params).items()
    }
    if draft_vocab is not None:
        weights[names.D2T] = draft_vocab.offsets()
        weights[names.T2D] = draft_vocab.kept()
    config = dflash_config.to_config(
        drafter.options,
        target_spec,
        dtype=dtype,
        draft_vocab_size=None if draft_vocab is None else draft_vocab.size,
    )
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    work = tempfile.mkdtemp(prefix=f".{name}.writing-", dir=parent)
    try:
        files = {
            CONFIG: json.dumps(config, indent=2).encode() + b"\n",
            CONTRACT: contract.to_json().encode() + b"\n",
            WEIGHTS: safetensors.numpy.save(weights, metadata={"format": "pt"}),
        }
        for file_name, content in files.items():
            files_lib.write_atomically(os.path.join(work, file_name), content)
        parity = None
        if golden_probe is not None:
            stored, _, _ = _read_weights(work, "the folder just written")
            back = _to_jax(names.from_public(stored, names.sizes_of(params)))
            parity = golden.parity_max_abs(drafter, back, golden_probe)
            if not parity <= golden.TOLERANCE:
                raise ValueError(
                    f"drafter {drafter.name!r}: training-time and serving-time logits "
                    f"of the same prefix differ by {parity:.3g} (allowed "
                    f"{golden.TOLERANCE:g}), so it was not exported; its train_outputs "
                    "and propose must compute the same rows"
                )
            arrays = golden.record(drafter, back, golden_probe)
            files[GOLDEN] = safetensors.numpy.save(
                {key: np.ascontiguousarray(array) for key, array in arrays.items()}
            )
            files_lib.write_atomically(os.path.join(work, GOLDEN), files[GOLDEN])
        shas = {key: hashlib.sha256(text).hexdigest() for key, text in files.items()}
        manifest = {"format": FORMAT, "dtype": dtype, "sha256": shas}
        files_lib.write_atomically(
            os.path.join(work, MANIFEST),
            json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n",
        )
        os.chmod(work, 0o755)  # mkdtemp's folders are private
        files_lib.sync_folder(work)
        _put_in_place(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Written(path, shas[WEIGHTS], parity)


def read_folder(
    path: str | os.PathLike[str],
    target: Target,
    *,
    num_draft: int | None = None,
    num_anchors: int | None = None,
    run_golden: bool = True,
) -> Exported:
    """Reads a DFlash folder, ours or another package's, for one target.

    Args:
      path: the folder.
      target: the target it is to serve.
      num_draft: drafts per round to serve, at most what it was trained for (the
        default).
      num_anchors: anchors per sequence, where it is to be trained further.
      run_golden: draft the golden round again, where the folder has one.

    Raises:
      UserError: the folder is missing, torn or changed; it was made for another
        target; it has a setting or a tensor that is not plain DFlash; or its
        golden round does not come out again.
    """
    path = os.path.abspath(os.fspath(path))
    where = f"drafter folder {path!r}"
    manifest = _check_whole(path, where)
    config = _read_json(os.path.join(path, CONFIG), where)
    options, notes = dflash_config.options_from_config(
        config, target.spec, target.tokenizer, where
    )
    if num_anchors is not None:
        options = dataclasses.replace(options, num_anchors=num_anchors)
    if manifest is None:
        contract = _assumed_contract(options, target)
        notes.append(
            "it has no contract.json: widths, vocabulary size and layer count were "
            "compared, but not the target's weights, tokenizer or chat template"
        )
    else:
        contract = _read_contract(path, where, options, target)
    drafter = _make(options, target.spec)
    weights, draft_vocab, sha = _read_weights(path, where, target.spec.vocab_size)
    _check_draft_vocab(config, draft_vocab, where)
    params = _to_jax(names.from_public(weights, _sizes(options, target.spec), where))
    served = drafter
    if num_draft is not None:
        layout = drafter.layout.with_num_draft(num_draft)
        served = _make(
            dataclasses.replace(options, num_draft=layout.num_draft), target.spec
        )
    golden_max_abs = None
    if not os.path.isfile(os.path.join(path, GOLDEN)):
        notes.append("it has no golden round, so its logits were not compared")
    elif run_golden:
        golden_max_abs = golden.check(
            _load_safetensors(os.path.join(path, GOLDEN), where),
            drafter,
            params,
            frozen_for(target, draft_vocab),
            where,
        )
    return Exported(
        drafter=served,
        params=params,
        contract=contract,
        draft_vocab=draft_vocab,
        weights_sha256=sha,
        golden_max_abs=golden_max_abs,
        notes=tuple(f"{where}: {note}" for note in notes),
    )


def target_facts(target: Target) -> dict[str, Any]:
    """The fields of a contract (`TARGET_FACTS`) that a target determines."""
    template = target.chat_template
    return {
        "target_fingerprint": target.fingerprint,
        "vocab_size": target.spec.vocab_size,
        "hidden_size": target.spec.hidden_size,
        "num_layers": target.spec.num_layers,
        "tokenizer_hash": target.tokenizer.hash,
        "template_hash": "" if template is None else template.hash,
        "capture_point": CAPTURE_POINT,
        "teacher_point": TEACHER_POINT,
    }


# One record per options: its compiled golden round is then kept too.
_make = functools.lru_cache(maxsize=8)(dflash.make)


def _sizes(options: dflash.Options, target_spec: TargetSpec) -> names.Sizes:
    return names.Sizes(
        num_layers=options.num_layers,
        hidden_size=target_spec.hidden_size,
        feature_width=len(options.layer_ids) * target_spec.hidden_size,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        mlp_size=options.mlp_size,
    )


def _check_contract(
    contract: Contract, options: dflash.Options, target_spec: TargetSpec, what: str
) -> None:
    """Refuses a contract that does not describe this drafter and these sizes."""
    expected = dataclasses.replace(
        contract,
        vocab_size=target_spec.vocab_size,
        hidden_size=target_spec.hidden_size,
        num_layers=target_spec.num_layers,
        layer_ids=tuple(options.layer_ids),
        mask_id=options.mask_id,
        num_draft=options.num_draft,
        anchor_predicts=False,
    )
    require_same(expected, contract, what)


def _read_contract(
    path: str, where: str, options: dflash.Options, target: Target
) -> Contract:
    file = os.path.join(path, CONTRACT)
    with open(file, encoding="utf-8") as handle:
        contract = contract_from_json(handle.read(), file)
    expected = dataclasses.replace(contract, **target_facts(target))
    require_same(expected, contract, where, TARGET_FACTS)
    _check_contract(contract, options, target.spec, where)
    return contract


def _assumed_contract(options: dflash.Options, target: Target) -> Contract:
    return Contract(
        target=target.spec.name,
        layer_ids=tuple(options.layer_ids),
        mask_id=options.mask_id,
        num_draft=options.num_draft,
        **target_facts(target),
    )


def _check_whole(path: str, where: str) -> dict[str, Any] | None:
    """The manifest of a folder of ours, None of another's; refuses a torn one."""
    if not os.path.isdir(path):
        raise UserError(f"{where} is not there; {_NAME_ONE}")
    if not os.path.isfile(os.path.join(path, MANIFEST)):
        if os.path.isfile(os.path.join(path, CONTRACT)):
            raise UserError(
                f"{where} has {CONTRACT} but no {MANIFEST}, so it is not whole; export "
                "the drafter again"
            )
        return None
    manifest = _read_json(os.path.join(path, MANIFEST), where)
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


def _read_weights(
    path: str, where: str, vocab_size: int | None = None
) -> tuple[dict[str, np.ndarray], DraftVocab | None, str]:
    """Plain name -> float32 array; the vocabulary map; sha256 of the file(s)."""
    files = _weight_files(path, where)
    tensors: dict[str, np.ndarray] = {}
    shas = []
    for name in files:
        file = os.path.join(path, name)
        tensors |= _load_safetensors(file, where)
        shas.append(files_lib.sha256_of(file))
    sha = shas[0]
    if len(shas) > 1:
        sha = hashlib.sha256("".join(shas).encode()).hexdigest()
    plain = {p: tensors[n] for p, n in names.strip_prefix(tensors).items()}
    d2t, t2d = plain.pop(names.D2T, None), plain.pop(names.T2D, None)
    weights = {}
    for name, tensor in plain.items():
        if tensor.dtype.kind != "f" and tensor.dtype != DTYPES["bfloat16"]:
            raise UserError(
                f"{where}: tensor {name} has type {tensor.dtype}; save the weights as "
                f"one of {', '.join(_FLOATS)}"
            )
        weights[name] = tensor.astype(np.float32)
    return weights, _read_vocab(d2t, t2d, vocab_size, where), sha


def _read_vocab(
    d2t: np.ndarray | None, t2d: np.ndarray | None, vocab_size: int | None, where: str
) -> DraftVocab | None:
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


def _check_draft_vocab(
    config: Mapping[str, Any], draft_vocab: DraftVocab | None, where: str
) -> None:
    said = config.get("draft_vocab_size")
    stored = config["vocab_size"] if draft_vocab is None else draft_vocab.size
    if said is not None and said != stored:
        raise UserError(
            f"{where}: draft_vocab_size is {said} but the weights can propose {stored} "
            "tokens; weights and config.json are not of one drafter"
        )


def _weight_files(path: str, where: str) -> list[str]:
    if os.path.isfile(os.path.join(path, WEIGHTS)):
        return [WEIGHTS]
    if not os.path.isfile(os.path.join(path, INDEX)):
        raise UserError(f"{where} has neither {WEIGHTS} nor {INDEX}; {_NAME_ONE}")
    weight_map = _read_json(os.path.join(path, INDEX), where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{where}: {INDEX} has no weight_map; copy the folder again")
    files = sorted(set(weight_map.values()))
    for name in files:
        there = os.path.isfile(os.path.join(path, name))
        if os.path.basename(name) != name or not there:
            raise UserError(f"{where} lacks {name}, which {INDEX} lists; copy it again")
    return files


def _load_safetensors(file: str, where: str) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load_file(file)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{where}: {os.path.basename(file)} is not a whole safetensors file "
            f"({error}); copy or export the folder again"
        ) from error


def _read_json(file: str, where: str) -> dict[str, Any]:
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


def _to_jax(tree: dict[str, Any]) -> dict[str, Any]:
    # Copies: a host buffer handed over must never be reused.
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), tree)


def _check_replaceable(path: str) -> None:
    if os.path.lexists(path) and not os.path.isdir(path):
        raise UserError(f"export.path={path!r} is a file; name a folder")
    other = os.path.isdir(path) and os.listdir(path)
    if other and not os.path.isfile(os.path.join(path, MANIFEST)):
        raise UserError(
            f"export.path={path!r} holds something that is not an exported drafter; "
            "name a new or an empty folder"
        )


def _put_in_place(work: str, path: str) -> None:
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
