"""The portable drafter folder: weights, configuration, contract, golden round.

    config.json         what any reader of such folders needs
    model.safetensors   public names, `[out, in]`; d2t and t2d when the
                        vocabulary is reduced
    contract.json       the contract the drafter was trained under
    golden.safetensors  a round to draft again after loading
    manifest.json       sha256 of each of the above; written last

A folder is written beside its place and renamed, so that it is there whole or
not at all, and a reader compares every checksum. A folder from elsewhere has
neither contract nor manifest; what can be compared is, what was converted is
said (`converters`), and a note says what could not be compared.
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
import numpy as np
import safetensors.numpy

from spec_jax.core.errors import UserError
from spec_jax.core.features import (
    CAPTURE_POINT,
    TEACHER_POINT,
    Contract,
    contract_from_json,
    require_same,
)
from spec_jax.core.vocab import DraftVocab, full_vocab
from spec_jax.data import files as files_lib
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.frozen import frozen_for
from spec_jax.export import converters, golden, names, registry, storage
from spec_jax.export.kinds import own
from spec_jax.export.kinds.base import Form, Header
from spec_jax.export.storage import (
    CONFIG,
    CONTRACT,
    DTYPES,
    FORMAT,
    GOLDEN,
    MANIFEST,
    WEIGHTS,
)
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"

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

# A frozen copy of a target's table, rounded to bfloat16, differs by less.
_COPY_TOLERANCE = 2**-7


@dataclasses.dataclass(frozen=True)
class Written:
    """What `write_folder` made.

    Attributes:
      path: the folder.
      weights_sha256: of the weight file.
      parity_max_abs: largest difference of training-time and serving-time draft
        logits of the same prefixes, from the exported weights; None without a
        golden probe, or without weights.
      notes: sentences on what looks untrained.
    """

    path: str
    weights_sha256: str
    parity_max_abs: float | None
    notes: tuple[str, ...] = ()


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
      notes: sentences on what was converted and what could not be checked.
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
    embed_VD: Any = None,
) -> Written:
    """Exports a drafter.

    Args:
      path: the folder to make; an earlier export there is replaced.
      drafter: the drafter, with resolved options.
      params: its parameters.
      contract: what it was trained under.
      draft_vocab: the ids it can propose, or None for the full vocabulary.
      target_spec: sizes of its target.
      dtype: float type of the stored weights, one of `DTYPES`.
      golden_probe: a text to record the golden round on; its logits are computed
        from the weights as stored. A drafter without weights has no such round.
      embed_VD: the target's embedding, to store a copy for readers that want one
        (EAGLE and EAGLE-3 outside of servers); None leaves it out.

    Raises:
      UserError: the drafter has no public form, contract and drafter disagree, a
        weight is not finite, or `path` holds something else.
      ValueError: training-time and serving-time logits differ, or are not
        finite: these weights must not be served.
    """
    path = os.path.abspath(os.fspath(path))
    if dtype not in DTYPES:
        raise UserError(f"export.dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    if draft_vocab is not None and draft_vocab.size == draft_vocab.vocab_size:
        draft_vocab = None
    _check_contract(contract, drafter, target_spec, "the drafter to export")
    _check_vocab(draft_vocab, drafter, target_spec, golden_probe)
    storage.check_replaceable(path)
    form = registry.form_of(drafter)
    plan = _plan(drafter, form)
    weights = names.to_public(plan, params, form.title)
    notes = tuple(_untrained(weights))
    weights |= form.constants(drafter.options, target_spec)
    if embed_VD is not None:
        weights[EMBEDDING] = np.asarray(embed_VD)
    weights = {name: weight.astype(DTYPES[dtype]) for name, weight in weights.items()}
    vocab = draft_vocab
    if vocab is None and form.own_head:
        vocab = full_vocab(target_spec.vocab_size)
    if vocab is not None:
        weights[names.D2T], weights[names.T2D] = vocab.offsets(), vocab.kept()
    header = Header(dtype, None if vocab is None else vocab.size)
    config = form.to_config(drafter, target_spec, header)
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    work = tempfile.mkdtemp(prefix=f".{name}.writing-", dir=parent)
    try:
        files = {
            CONFIG: _json(config),
            CONTRACT: contract.to_json().encode() + b"\n",
            WEIGHTS: safetensors.numpy.save(weights, metadata={"format": "pt"}),
        }
        if form.second is not None:
            second, content = form.second(drafter, target_spec, header)
            files[second] = _json(content)
        for file_name, content in files.items():
            files_lib.write_atomically(os.path.join(work, file_name), content)
        parity = None
        if golden_probe is not None and plan.pieces:
            stored, _ = storage.read_weights(work, "the folder just written")
            stored = {name: stored[name] for name in plan.tensors}
            back = _to_jax(names.from_public(plan, stored))
            if not getattr(drafter.options, "final_logit_softcapping", 0):
                quiet = _without_noise(drafter, target_spec)
                parity = golden.parity_max_abs(quiet, back, golden_probe)
            # A capped drafter comes from elsewhere and is not trained here.
            if parity is not None and not parity <= golden.TOLERANCE:
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
        manifest = {
            "format": FORMAT,
            "drafter": drafter.name,
            "dtype": dtype,
            "sha256": shas,
        }
        files_lib.write_atomically(
            os.path.join(work, MANIFEST),
            json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n",
        )
        os.chmod(work, 0o755)  # mkdtemp's folders are private
        files_lib.sync_folder(work)
        storage.put_in_place(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Written(path, shas[WEIGHTS], parity, notes)


def read_folder(
    path: str | os.PathLike[str],
    target: Target,
    *,
    num_draft: int | None = None,
    num_anchors: int | None = None,
    run_golden: bool = True,
) -> Exported:
    """Reads a drafter folder, ours or another package's, for one target.

    Args:
      path: the folder.
      target: the target it is to serve.
      num_draft: drafts per round to serve, at most what it was trained for (the
        default).
      num_anchors: anchors (rollouts of EAGLE) per sequence, where it is to be
        trained further.
      run_golden: draft the golden round again, where the folder has one.

    Raises:
      UserError: the folder is missing, torn or changed; it was made for another
        target; it has a setting or a tensor that no drafter here has; or its golden
        round does not come out again.
    """
    path = os.path.abspath(os.fspath(path))
    where = f"drafter folder {path!r}"
    manifest = storage.check_whole(path, where)
    config = storage.read_json(os.path.join(path, CONFIG), where)
    tensors, sha = storage.read_weights(path, where)
    notes: list[str] = []
    if manifest is None:
        config, tensors, notes = converters.adopt(config, tensors, target.spec, where)
    form = registry.form_named(config, where)
    vocab = storage.pop_vocab(tensors, target.spec.vocab_size, where)
    options, said = form.from_config(
        config,
        where,
        {name: w.shape for name, w in tensors.items()},
        target.spec,
        target.tokenizer,
    )
    notes += said
    options = _with_vocab(options, config, form, vocab, tensors, target.spec, where)
    if vocab is not None and vocab.size == vocab.vocab_size:
        vocab = None
    if num_anchors is not None:
        field = "num_starts" if hasattr(options, "num_starts") else "num_anchors"
        options = _replaced(options, field, num_anchors, where)
    drafter = _make(form.name, options, target.spec)
    if manifest is None:
        contract = _assumed_contract(drafter, target)
        notes.append(
            "it has no contract.json: widths, vocabulary size and layer count were "
            "compared, but not the target's weights, tokenizer or chat template"
        )
    else:
        contract = _read_contract(path, where, drafter, target)
    plan = _plan(drafter, form)
    _drop_constants(tensors, form.constants(options, target.spec), where)
    notes += _drop_copies(tensors, plan.tensors, target, where)
    weights = {name: w.astype(np.float32) for name, w in tensors.items()}
    params = _to_jax(names.from_public(plan, weights, where))
    notes += _untrained(weights)
    served = drafter
    if num_draft is not None and num_draft != drafter.layout.num_draft:
        layout = drafter.layout.with_num_draft(num_draft)
        fewer = _replaced(options, "num_draft", layout.num_draft, where)
        served = _make(form.name, fewer, target.spec)
        notes.append(
            f"it serves {layout.num_draft} of the {drafter.layout.num_draft} drafts a "
            "round that it was trained for"
        )
    golden_max_abs = None
    if not os.path.isfile(os.path.join(path, GOLDEN)):
        if plan.pieces:
            notes.append("it has no golden round, so its logits were not compared")
    elif run_golden:
        golden_max_abs = golden.check(
            storage.load_safetensors(os.path.join(path, GOLDEN), where),
            drafter,
            params,
            frozen_for(target, vocab),
            where,
        )
    return Exported(
        drafter=served,
        params=params,
        contract=contract,
        draft_vocab=vocab,
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
_make = functools.lru_cache(maxsize=32)(base.load)


@functools.lru_cache(maxsize=32)
def _plan(drafter: Drafter, form: Form) -> names.Plan:
    """Which tensors a drafter's leaves become; nothing is allocated."""
    shapes = names.flatten(jax.eval_shape(drafter.init, jax.random.key(0)))
    return names.plan(form.pieces(shapes), shapes)


def _without_noise(drafter: Drafter, target_spec: TargetSpec) -> Drafter:
    """The same drafter, training on clean features."""
    if not getattr(drafter.options, "feature_noise", 0):
        return drafter
    options = dataclasses.replace(drafter.options, feature_noise=0.0)
    return _make(own.path_of(drafter), options, target_spec)


def _layout_fields(drafter: Drafter) -> dict[str, Any]:
    """What a contract says about the drafter itself."""
    return {
        "layer_ids": tuple(drafter.needs.layer_ids),
        "mask_id": getattr(drafter.options, "mask_id", -1),
        "num_draft": drafter.layout.num_draft,
        "anchor_predicts": drafter.layout.anchor_predicts,
    }


def _check_contract(
    contract: Contract, drafter: Drafter, target_spec: TargetSpec, what: str
) -> None:
    """Refuses a contract that does not describe this drafter and these sizes."""
    expected = dataclasses.replace(
        contract,
        vocab_size=target_spec.vocab_size,
        hidden_size=target_spec.hidden_size,
        num_layers=target_spec.num_layers,
        **_layout_fields(drafter),
    )
    require_same(expected, contract, what)


def _read_contract(path: str, where: str, drafter: Drafter, target: Target) -> Contract:
    file = os.path.join(path, CONTRACT)
    with open(file, encoding="utf-8") as handle:
        contract = contract_from_json(handle.read(), file)
    expected = dataclasses.replace(contract, **target_facts(target))
    require_same(expected, contract, where, TARGET_FACTS)
    _check_contract(contract, drafter, target.spec, where)
    return contract


def _assumed_contract(drafter: Drafter, target: Target) -> Contract:
    return Contract(
        target=target.spec.name, **_layout_fields(drafter), **target_facts(target)
    )


def _check_vocab(
    vocab: DraftVocab | None,
    drafter: Drafter,
    target_spec: TargetSpec,
    probe: golden.Probe | None,
) -> None:
    """Refuses a map for another target, drafter or probe."""
    size = target_spec.vocab_size
    if vocab is not None and vocab.vocab_size != size:
        raise UserError(
            f"draft vocabulary was made for {vocab.vocab_size} target tokens but the "
            f"target has {size}; rebuild the map for this target"
        )
    columns = size if vocab is None else vocab.size
    own = getattr(drafter.options, "draft_vocab_size", 0) or 0
    if own and own != columns:
        raise UserError(
            f"drafter.options.draft_vocab_size={own} but {columns} tokens are to be "
            "exported; export with the vocabulary map it was trained with"
        )
    if probe is not None and probe.frozen.head_DU.shape[1] != columns:
        raise UserError(
            f"golden probe has {probe.frozen.head_DU.shape[1]} head columns but the "
            f"drafter proposes {columns} tokens; make it with the same draft "
            "vocabulary"
        )


def _with_vocab(
    options: Any,
    config: Mapping[str, Any],
    form: Form,
    vocab: DraftVocab | None,
    tensors: Mapping[str, np.ndarray],
    target_spec: TargetSpec,
    where: str,
) -> Any:
    """Options with the vocabulary's size; config and weights must agree on it."""
    said = config.get("draft_vocab_size")
    stored = target_spec.vocab_size if vocab is None else vocab.size
    if said is not None and said != stored:
        raise UserError(
            f"{where}: draft_vocab_size is {said} but the weights can propose {stored} "
            "tokens; weights and config.json are not of one drafter"
        )
    if form.table is not None and hasattr(options, "draft_vocab_size"):
        rows = tensors[form.table].shape[0] if form.table in tensors else stored
        # A drafter of the whole vocabulary may be served over a part of it.
        if rows in (stored, target_spec.vocab_size):
            return dataclasses.replace(options, draft_vocab_size=rows)
        raise UserError(
            f"{where}: tensor {form.table} has {rows} rows, but the vocabulary map "
            f"names {stored} of the target's {target_spec.vocab_size} tokens; weights "
            "and map are not of one drafter"
        )
    return options


def _replaced(options: Any, field: str, value: Any, where: str) -> Any:
    if not hasattr(options, field):
        raise UserError(
            f"{where}: its drafter has no option {field}, so {value} cannot be set; "
            "leave it out"
        )
    return dataclasses.replace(options, **{field: value})


def _drop_constants(
    tensors: dict[str, np.ndarray], constants: Mapping[str, np.ndarray], where: str
) -> None:
    """Takes out tensors that no leaf holds; another value is refused."""
    for name, expected in constants.items():
        found = tensors.pop(name, None)
        if found is None:
            continue
        if (
            found.shape != expected.shape
            or (found.astype(np.float32) != expected).any()
        ):
            raise UserError(
                f"{where}: tensor {name} is not {expected.flat[0]:g} everywhere, and "
                "this drafter has no such weight; it cannot be represented here"
            )


def _drop_copies(
    tensors: dict[str, np.ndarray],
    expected: Mapping[str, Any],
    target: Target,
    where: str,
) -> list[str]:
    """Takes out frozen copies of the target's embedding and head.

    Raises:
      UserError: such a table is not the target's.
    """
    tree = target.params["params"]
    notes = []
    for name, ours in ((EMBEDDING, tree["embed"]), (HEAD, tree["head"].T)):
        if name in expected or name not in tensors:
            continue
        found = tensors.pop(name).astype(np.float32)
        own = np.asarray(ours, np.float32)
        same = found.shape == own.shape and bool(
            np.abs(found - own).max() <= _COPY_TOLERANCE * np.abs(own).max()
        )
        if not same:
            raise UserError(
                f"{where}: tensor {name} is not a copy of the target's, and this "
                f"drafter borrows the target's own; use it with the target it was "
                "trained for"
            )
        notes.append(f"{name} is a copy of the target's and was left out")
    return notes


def _untrained(weights: Mapping[str, np.ndarray]) -> list[str]:
    """A sentence on tensors that still look as an initialiser made them."""
    found = names.untrained(weights)
    if not found:
        return []
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return [
        f"tensor {', '.join(found[:3])}{more} holds one number throughout, as before "
        "training"
    ]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _to_jax(tree: dict[str, Any]) -> dict[str, Any]:
    # Copies: a host buffer handed over must never be reused.
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), tree)
