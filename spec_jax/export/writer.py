"""Writes a drafter folder (`export.folder` has its files)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from spec_jax.core.errors import UserError
from spec_jax.core.features import (
    Contract,
)
from spec_jax.core.vocab import DraftVocab, full_vocab
from spec_jax.data import files as files_lib
from spec_jax.drafters.base import Drafter
from spec_jax.export import golden, names, registry, shared, storage
from spec_jax.export.kinds import own
from spec_jax.export.kinds.base import OWN, Form, Header
from spec_jax.export.storage import (
    CONFIG,
    CONTRACT,
    DTYPES,
    FORMAT,
    GOLDEN,
    MANIFEST,
    WEIGHTS,
)
from spec_jax.target.spec import TargetSpec

_SEED = "seed"


@dataclasses.dataclass(frozen=True)
class Written:
    """What `write_folder` made.

    Attributes:
      path: the folder.
      weights_sha256: of the weight file.
      parity_max_abs: largest difference of training-time and serving-time draft
        logits of the same prefixes, from the exported weights; None without a
        golden probe, or without weights.
      notes: sentences on what looks untrained, and on who does not read the folder.
    """

    path: str
    weights_sha256: str
    parity_max_abs: float | None
    notes: tuple[str, ...] = ()


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
    seed: int | None = None,
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
      seed: of the run that trained it, whose first weights follow from it
        (`train.state.run_keys`); None where there is none, or the run started
        from other weights.

    Raises:
      UserError: the drafter has no public form, contract and drafter disagree, a
        weight is not finite, or `path` holds something else; or training-time and
        serving-time logits differ, or are not finite: these weights must not be
        served.
    """
    path = os.path.abspath(os.fspath(path))
    if dtype not in DTYPES:
        raise UserError(f"export.dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    if draft_vocab is not None and draft_vocab.size == draft_vocab.vocab_size:
        draft_vocab = None
    shared.check_contract(contract, drafter, target_spec, "the drafter to export")
    _check_vocab(draft_vocab, drafter, target_spec, golden_probe)
    storage.check_replaceable(path)
    form = registry.form_of(drafter)
    plan = shared.plan_of(drafter, form)
    weights = names.to_public(plan, params, form.title)
    notes = shared.untrained(weights)
    weights |= form.constants(drafter.options, target_spec)
    if embed_VD is not None:
        weights[shared.EMBEDDING] = np.asarray(embed_VD)
    weights = {name: weight.astype(DTYPES[dtype]) for name, weight in weights.items()}
    vocab = draft_vocab
    if vocab is None and form.own_head:
        vocab = full_vocab(target_spec.vocab_size)
    if vocab is not None:
        weights[names.D2T], weights[names.T2D] = vocab.offsets(), vocab.kept()
    header = Header(dtype, None if vocab is None else vocab.size)
    config = form.to_config(drafter, target_spec, header)
    second = None if form.second is None else form.second(drafter, target_spec, header)
    only_here = _only_here(form, draft_vocab)
    if only_here:
        notes.append(only_here)
        for content in (config, second[1] if second else {}):
            content[OWN] = {**content.get(OWN, {}), "note": only_here}
    if seed is not None:
        config[OWN] = {**config.get(OWN, {}), _SEED: int(seed)}
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    work = tempfile.mkdtemp(prefix=f".{name}.writing-", dir=parent)
    try:
        files = {
            CONFIG: _json(config),
            CONTRACT: contract.to_json().encode() + b"\n",
            WEIGHTS: safetensors.numpy.save(weights, metadata={"format": "pt"}),
        }
        if second is not None:
            files[second[0]] = _json(second[1])
        for file_name, content in files.items():
            files_lib.write_atomically(os.path.join(work, file_name), content)
        parity = None
        if golden_probe is not None and plan.pieces:
            stored, _ = storage.read_weights(work, "the folder just written")
            stored = {name: stored[name] for name in plan.tensors}
            back = shared.to_jax(names.from_public(plan, stored))
            if not getattr(drafter.options, "final_logit_softcapping", 0):
                quiet = _without_noise(drafter, target_spec)
                parity = golden.parity_max_abs(quiet, back, golden_probe)
            # A capped drafter comes from elsewhere and is not trained here.
            if parity is not None and not parity <= golden.TOLERANCE:
                raise UserError(
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
    return Written(path, shas[WEIGHTS], parity, tuple(notes))


def seed_in(config: Mapping[str, Any]) -> int | None:
    """The seed of the run that trained a folder, from its `config.json`.

    None where the folder does not say one: it is from elsewhere or from another
    version, or its run started from other weights.
    """
    own = config.get(OWN)
    seed = own.get(_SEED) if isinstance(own, Mapping) else None
    return seed if type(seed) is int else None


def _only_here(form: Form, vocab: DraftVocab | None) -> str:
    """Why the public readers of a kind do not read a folder; "" where they do.

    Their tables of corrections have a row for every token of the target (drafter
    contracts, sections 5.2, 6.2 and 10.34). A head of the drafter's own is read
    with its map.
    """
    if vocab is None or form.table is None or form.own_head:
        return ""
    alike = f" (as {', '.join(form.reduced_by)} has it)" if form.reduced_by else ""
    return (
        f"tensor {form.table} has {vocab.size} rows, one for each token that may be "
        f"drafted{alike}; spec_jax reads that, but engines that know "
        f"{form.architectures[0]} want all {vocab.vocab_size} of the target's: train "
        "with drafter.draft_vocab=0 to serve it there"
    )


def _without_noise(drafter: Drafter, target_spec: TargetSpec) -> Drafter:
    """The same drafter, training on clean features."""
    if not getattr(drafter.options, "feature_noise", 0):
        return drafter
    options = dataclasses.replace(drafter.options, feature_noise=0.0)
    return shared.make_drafter(own.path_of(drafter), options, target_spec)


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


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
