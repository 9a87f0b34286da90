"""Reads a drafter folder, ours or another package's (`export.folder`)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.core.features import (
    Contract,
    contract_from_json,
    require_same,
)
from spec_jax.core.vocab import DraftVocab
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.frozen import frozen_for
from spec_jax.export import converters, golden, names, registry, shared, storage
from spec_jax.export.config_kinds import check_kinds
from spec_jax.export.kinds.base import Form
from spec_jax.export.storage import (
    CONFIG,
    CONTRACT,
    GOLDEN,
)
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

# A frozen copy of a target's table, rounded to bfloat16, differs by less.
_COPY_TOLERANCE = 2**-7


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
        default); of an EAGLE folder that does not say it, any number.
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
    check_kinds(config, where)
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
    drafter = shared.make_drafter(form.name, options, target.spec)
    if manifest is None:
        contract = _assumed_contract(drafter, target)
        notes.append(
            "it has no contract.json: widths, vocabulary size and layer count were "
            "compared, but not the target's weights, tokenizer or chat template"
        )
    else:
        contract = _read_contract(path, where, drafter, target)
    plan = shared.plan_of(drafter, form)
    _drop_constants(tensors, form.constants(options, target.spec), where)
    notes += _drop_copies(tensors, plan.tensors, target, where)
    weights = {name: w.astype(np.float32) for name, w in tensors.items()}
    params = shared.to_jax(names.from_public(plan, weights, where))
    notes += shared.untrained(weights)
    served = drafter
    if num_draft is not None and num_draft != drafter.layout.num_draft:
        said = f"it serves {num_draft} drafts a round, as asked"
        if not form.any_length(config):
            drafter.layout.with_num_draft(num_draft)  # refuses more
            said = (
                f"it serves {num_draft} of the {drafter.layout.num_draft} drafts a "
                "round that it was trained for"
            )
        other = _replaced(options, "num_draft", num_draft, where)
        served = shared.make_drafter(form.name, other, target.spec)
        notes.append(said)
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


def _read_contract(path: str, where: str, drafter: Drafter, target: Target) -> Contract:
    file = os.path.join(path, CONTRACT)
    with open(file, encoding="utf-8") as handle:
        contract = contract_from_json(handle.read(), file)
    expected = dataclasses.replace(contract, **shared.target_facts(target))
    require_same(expected, contract, where, shared.TARGET_FACTS)
    shared.check_contract(contract, drafter, target.spec, where)
    return contract


def _assumed_contract(drafter: Drafter, target: Target) -> Contract:
    return Contract(
        target=target.spec.name,
        **shared.layout_fields(drafter),
        **shared.target_facts(target),
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
    for name, ours in (
        (shared.EMBEDDING, tree["embed"]),
        (shared.HEAD, tree["head"].T),
    ):
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
