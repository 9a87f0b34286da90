"""Features: which layers, captured where, and the contract that travels along.

Layer ids are 0-based layer *outputs* (residual stream, no norm); the last
layer is never an id. The teacher hidden is after the final norm. A feature
store, a checkpoint and an exported drafter carry the `Contract` they were made
under; every consumer compares and refuses with the sentence that differs.
"""

from __future__ import annotations

import dataclasses
import json

from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError

CAPTURE_POINT = "layer_output"
TEACHER_POINT = "post_final_norm"


@dataclasses.dataclass(frozen=True)
class FeatureSchema:
    """Features a drafter conditions on.

    Attributes:
      layer_ids: ascending layer outputs, concatenated in this order.
      width: D of the target.
      teacher: also keep the post-norm last hidden state, to rebuild p.
    """

    layer_ids: tuple[int, ...]
    width: int
    teacher: bool = False

    @property
    def num_layers(self) -> int:
        """L, captured layers."""
        return len(self.layer_ids)


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Refuses ids that are not ascending layer outputs below the last layer.

    Raises:
      UserError: naming the ids and the allowed range.
    """
    ids = tuple(layer_ids)
    last = num_layers - 2
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > last:
        raise UserError(
            f"drafter.options.layer_ids={ids} must be ascending 0-based layer outputs "
            f"between 0 and {last} (the last layer, {num_layers - 1}, is never "
            "captured)"
        )


def default_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """The public DFlash formula (drafter contracts, section 4.1)."""
    if count == 1:
        return (min(num_layers // 2, num_layers - 2),)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


@dataclasses.dataclass(frozen=True)
class Contract:
    """Everything two parties must agree on to exchange features or weights.

    Attributes:
      target: name of the target, for people.
      target_fingerprint: sha256 of its weights.
      vocab_size: V, unpadded.
      hidden_size: D.
      num_layers: layers of the target.
      layer_ids: captured layer outputs.
      capture_point: always `layer_output` here; converters say otherwise.
      teacher_point: always `post_final_norm` here.
      tokenizer_hash: sha256 of the canonical tokenizer file.
      template_hash: sha256 of the chat template ("" without one).
      thinking: whether the template's thinking switch was on.
      mask_id: the token that fills draft rows, or -1 without one.
      anchor_predicts: the block layout's row convention.
      num_draft: M the drafter was trained for (0 in a feature store).
      feature_dtype: dtype features were stored or served in.
      truncation: how over-long conversations were treated.
    """

    target: str
    target_fingerprint: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_ids: tuple[int, ...]
    tokenizer_hash: str
    template_hash: str
    mask_id: int = -1
    anchor_predicts: bool = False
    num_draft: int = 0
    feature_dtype: str = "float32"
    capture_point: str = CAPTURE_POINT
    teacher_point: str = TEACHER_POINT
    thinking: bool = False
    truncation: str = "drop"

    def layout(self) -> BlockLayout:
        return BlockLayout(self.num_draft, self.anchor_predicts)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


# What a feature store and the drafter trained from it must share; the block
# layout, mask id and feature dtype belong to the drafter alone.
TARGET_FIELDS = (
    "target_fingerprint",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "tokenizer_hash",
    "template_hash",
    "thinking",
    "capture_point",
    "teacher_point",
)


def contract_from_json(text: str, where: str) -> Contract:
    """Reads a contract; `where` names the file in the error.

    No default stands in for a field: what a file does not say, nobody compared.

    Raises:
      UserError: for a torn file, a missing or an unknown field.
    """
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise TypeError("no json object")
        layer_ids = tuple(fields.get("layer_ids", ()))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{where} is not a readable contract ({error}); make the folder again"
        ) from error
    known = {f.name for f in dataclasses.fields(Contract)}
    for name in sorted(known - set(fields)):
        raise UserError(
            f"{where} lacks the contract's field {name}; make the folder again, or "
            "write the value that it was made with"
        )
    for name in sorted(set(fields) - known):
        raise UserError(
            f"{where} has {name}={fields[name]!r}, which is no field of a contract; "
            "read it with the version that made it, or make the folder again"
        )
    return Contract(**fields | {"layer_ids": layer_ids})


def differences(ours: Contract, theirs: Contract, fields=None) -> list[str]:
    """Names, one per line, what two contracts disagree on."""
    names = fields or [f.name for f in dataclasses.fields(Contract)]
    return [
        f"{name} is {getattr(theirs, name)!r}, expected {getattr(ours, name)!r}"
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]


def require_same(ours: Contract, theirs: Contract, what: str, fields=None) -> None:
    """Refuses `what` when its contract differs.

    Raises:
      UserError: one sentence listing every difference.
    """
    found = differences(ours, theirs, fields)
    if found:
        raise UserError(
            f"{what} was made under another contract: {'; '.join(found)}; "
            "use one made for this target, or make it again"
        )
