"""A drafter folder under examination, and what it says of itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments import serving
from spec_jax.core.errors import UserError
from spec_jax.data import store
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.evals import why
from spec_jax.evals.why import DIFFERS, OK, SKIPPED, Finding
from spec_jax.export import folder as export_folder
from spec_jax.export import golden, names, storage
from spec_jax.export.kinds import own
from spec_jax.target.loading import Target
from spec_jax.train import state

_FIXES = {
    "thinking": "serve with --config.thinking as it was trained",
    "layer_ids": "layer outputs, 0-based; correct the side that counts inputs",
    "template_hash": "serve the template it was trained with, or train again",
    "tokenizer_hash": "serve the tokenizer it was trained with",
    "target_fingerprint": "serve the weights it was trained for",
    "anchor_predicts": "weights of one row convention do not serve the other",
}
_FIX = "export it again, or use it with the target it was made for"


@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    """A drafter folder, read as far as it can be.

    Attributes:
      path: where it lies.
      config: its `config.json`.
      contract: its `contract.json`, or None.
      tensors: as stored.
      exported: the drafter, or None where it is refused.
      refusal: why, or "".
    """

    path: str
    config: Mapping[str, Any]
    contract: Mapping[str, Any] | None
    tensors: Mapping[str, np.ndarray] = dataclasses.field(repr=False)
    exported: export_folder.Exported | None
    refusal: str


def read(path: str, target: Target) -> Folder:
    """Reads a folder; what a reader would refuse for its contract is read anyway.

    Raises:
      UserError: it is missing, torn or changed since it was written.
    """
    path = os.path.abspath(path)
    where = f"drafter folder {path!r}"
    storage.check_whole(path, where)
    config = storage.read_json(os.path.join(path, storage.CONFIG), where)
    tensors, _ = storage.read_weights(path, where)
    contract, file = None, os.path.join(path, storage.CONTRACT)
    if os.path.isfile(file):
        contract = storage.read_json(file, where)
    exported, refusal = None, ""
    try:
        exported = export_folder.read_folder(path, target, run_golden=False)
    except UserError as error:
        refusal = str(error)
        with tempfile.TemporaryDirectory() as bare:
            # The same configuration and weights, without a contract to refuse.
            for name in os.listdir(path):
                if name not in (storage.CONTRACT, storage.MANIFEST, storage.GOLDEN):
                    os.symlink(os.path.join(path, name), os.path.join(bare, name))
            with contextlib.suppress(UserError):
                exported = export_folder.read_folder(bare, target, run_golden=False)
    return Folder(path, config, contract, tensors, exported, refusal)


def probed(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with few anchors and no noise on its features."""
    changes = {}
    for name, value in (
        ("num_anchors", why.NUM_ANCHORS),
        ("num_starts", why.NUM_ANCHORS),
        ("feature_noise", 0.0),
    ):
        if hasattr(drafter.options, name):
            changes[name] = value
    options = dataclasses.replace(drafter.options, **changes)
    return _load(own.path_of(drafter), options, target.spec)


# One record per options: its compiled programs are then kept too.
_load = functools.lru_cache(maxsize=32)(base.load)


def contract_findings(cfg, target: Target, found: Folder) -> Iterator[Finding]:
    """The folder's contract and configuration against target and drafter."""
    facts = export_folder.target_facts(target)
    expected: dict[str, Any] = dict(facts)
    drafter = None if found.exported is None else found.exported.drafter
    if drafter is not None:
        expected |= {
            "layer_ids": list(drafter.needs.layer_ids),
            "mask_id": serving.mask_id_of(drafter),
            "num_draft": drafter.layout.num_draft,
            "anchor_predicts": drafter.layout.anchor_predicts,
        }
    expected["thinking"] = cfg.thinking
    contract, before = found.contract, []
    if contract is None:
        before.append(
            Finding("contract", "contract.json", SKIPPED, "the folder has none")
        )
    else:
        for name, value in expected.items():
            fix = _FIXES.get(name, _FIX)
            said = contract.get(name)
            before.append(why.compare("contract", name, value, said, fix))
        dtype = contract.get("feature_dtype")
        if dtype not in store.DTYPES:
            fault = f"is {dtype!r}, expected one of {', '.join(store.DTYPES)}"
            before.append(Finding("contract", "feature_dtype", DIFFERS, fault))
        else:
            before.append(Finding("contract", "feature_dtype", OK, dtype))
        said = found.config.get("sample_from_anchor")
        if said is not None:
            before.append(
                why.compare(
                    "contract",
                    "row convention",
                    bool(contract.get("anchor_predicts")),
                    bool(said),
                    "config.json sample_from_anchor and the contract disagree",
                )
            )
    used = getattr(getattr(drafter, "options", None), "rope_theta", None)
    rope = why.rope_finding(found.config, None if used is None else float(used))
    before.append(rope)
    vocab = why.vocabulary_finding(
        found.tensors.get(names.D2T),
        found.tensors.get(names.T2D),
        target.spec.vocab_size,
        found.config.get("draft_vocab_size"),
    )
    before.append(vocab)
    yield from before
    # Weights that are not finite are refused as well; that is their check's.
    known = [*before, *weight_findings(found)]
    if found.refusal and why.first_difference(known) is None:
        yield Finding("contract", "configuration", DIFFERS, found.refusal)
    elif found.exported is None:
        yield Finding("contract", "configuration", SKIPPED, found.refusal)
    else:
        yield Finding("contract", "configuration", OK, "every setting is read")


def weight_findings(found: Folder, drafter: Drafter | None = None) -> Iterator[Finding]:
    """What looks wrong about the folder's weights.

    Args:
      found: the folder.
      drafter: also compare with what training started from, where the folder says
        its run's seed; None: leave that.
    """
    tensors = {
        name: tensor
        for name, tensor in found.tensors.items()
        if name not in (names.D2T, names.T2D)
    }
    dtype = str(found.config.get("dtype") or found.config.get("torch_dtype") or "")
    if not dtype and tensors:
        dtype = str(next(iter(tensors.values())).dtype)
    leaves = initial = None
    if drafter is not None and found.exported is not None:
        leaves = names.flatten(found.exported.params)
        seed = export_folder.seed_in(found.config)
        if seed is not None:
            initial = names.flatten(jax.jit(drafter.init)(state.run_keys(seed)[1]))
    return why.weight_findings(tensors, leaves, initial, dtype)


def golden_finding(found: Folder, frozen) -> Finding:
    """The round that was recorded when the weights were exported (A2)."""
    item, file = "golden round", os.path.join(found.path, storage.GOLDEN)
    if not os.path.isfile(file):
        return Finding("logits", item, SKIPPED, "the folder has none")
    exported = found.exported
    where = os.path.basename(found.path)
    try:
        worst = golden.check(
            storage.load_safetensors(file, where),
            exported.drafter,
            exported.params,
            frozen,
            where,
        )
    except UserError as error:
        return Finding("logits", item, DIFFERS, str(error))
    return Finding("logits", item, OK, f"max abs {worst:.1e}")
