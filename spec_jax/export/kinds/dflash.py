"""DFlash folders (drafter contracts, sections 4.1, 4.2 and 13).

Block size, layer ids and mask id are written at the top level and in
`dflash_config`, because readers look in either place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.core.features import default_layer_ids
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.dflash import Options
from spec_jax.export import names, settings
from spec_jax.export.kinds.base import Form, Header
from spec_jax.export.settings import Settings
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

TITLE = "DFlash"
# Block size of a folder that does not say (what its public readers take).
DEFAULT_BLOCK = 16
# What the inner object may hold in every drafter of this family.
INSIDE = {
    "attention_mode",
    "block_size",
    "is_causal",
    "layer_types",
    "mask_token",
    "mask_token_id",
    "num_target_layers",
    "sliding_window",
    "target_layer_ids",
}
LAYER_NORMS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def backbone(shapes: Mapping[str, Any], title: str) -> list[names.Piece]:
    """Pieces of the block backbone that DFlash, DSpark and DFlash 2 share.

    Raises:
      UserError: a layer without the per-head norms that every public class has.
    """
    found = [
        names.linear("fc", "fc.weight"),
        names.table("hidden_norm", "hidden_norm.weight"),
        names.table("norm", "norm.weight"),
    ]
    index = 0
    while any(path.startswith(f"layers_{index}/") for path in shapes):
        path = f"layers_{index}/"
        layer = {
            p.removeprefix(path): leaf
            for p, leaf in shapes.items()
            if p.startswith(path)
        }
        if "q_norm" not in layer or "k_norm" not in layer:
            raise UserError(
                f"drafter.options.qk_norm is False, and the public {title} classes "
                "always normalise queries and keys; train with qk_norm=True to export"
            )
        found += names.layer_pieces(layer, path, f"layers.{index}.", LAYER_NORMS)
        index += 1
    return found


def write(
    drafter: Drafter, target: TargetSpec, header: Header, architecture: str, **inside
) -> dict[str, Any]:
    """The json object of a drafter of this family.

    Args:
      drafter: with resolved options.
      target: sizes of the target.
      header: what the export says.
      architecture: class name.
      **inside: further keys of the inner object.
    """
    options = drafter.options
    shared = {
        "block_size": drafter.layout.block_size,
        "mask_token_id": options.mask_id,
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(options.layer_ids),
    }
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **shared,
        "dflash_config": shared | inside,
        **settings.layers(options),
        **settings.common(target, options, header),
    }


def read(
    found: Settings,
    tensors: Mapping[str, tuple[int, ...]],
    target: TargetSpec,
    tokenizer: Tokenizer | None,
    default_block: int,
) -> dict[str, Any]:
    """Options that the family shares, and `block_size`.

    Raises:
      UserError: a missing or wrong setting, or another target's sizes.
    """
    found.same_target(target, ("hidden_size", "vocab_size", "num_target_layers"))
    num_layers = found.layers(tensors)
    layer_types, sliding_window = found.layer_types(num_layers)
    block_size = found.value("block_size")
    if block_size is None:
        block_size = default_block
        found.notes.append(f"block_size is not given; its readers take {block_size}")
    found.typed(block_size, int, "block_size")
    layer_ids = found.value("target_layer_ids")
    if layer_ids is None:
        layer_ids = default_layer_ids(target.num_layers, num_layers)
        found.notes.append(
            f"target_layer_ids is not given; its readers take {layer_ids}"
        )
    layer_ids = found.layer_ids(layer_ids, "target_layer_ids", target)
    found.fc_width(tensors, len(layer_ids), target, "target_layer_ids")
    return {
        "num_layers": num_layers,
        "block_size": block_size,
        "layer_ids": layer_ids,
        **found.heads(),
        "mask_id": found.mask_id(target, tokenizer),
        "rope_theta": found.rope_theta(),
        "norm_eps": float(found.need("rms_norm_eps", float)),
        "layer_types": layer_types,
        "sliding_window": sliding_window,
        "is_causal": found.is_causal(layer_types),
    }


def drafts_of(block_size: int, where: str) -> int:
    """M of a fill-in block: its anchor row predicts nothing."""
    if block_size < 2:
        raise UserError(
            f"{where}: block_size={block_size} must be at least 2 (the anchor and one "
            "draft)"
        )
    return block_size - 1


def _to_config(drafter: Drafter, target: TargetSpec, header: Header) -> dict[str, Any]:
    return write(drafter, target, header, FORM.architectures[0])


def _from_config(
    config: Mapping[str, Any],
    where: str,
    tensors: Mapping[str, tuple[int, ...]],
    target: TargetSpec,
    tokenizer: Tokenizer | None,
) -> tuple[Options, list[str]]:
    found = Settings(config, where, ("dflash_config",))
    found.model_type(TITLE, "qwen3")
    found.neutral(TITLE)
    found.known_inside(TITLE, INSIDE)
    fields = read(found, tensors, target, tokenizer, DEFAULT_BLOCK)
    num_draft = drafts_of(fields.pop("block_size"), where)
    return Options(num_draft=num_draft, **fields), found.notes


FORM = Form(
    name="dflash",
    title=TITLE,
    architectures=("DFlashDraftModel",),
    pieces=lambda shapes: backbone(shapes, TITLE),
    to_config=_to_config,
    from_config=_from_config,
)
