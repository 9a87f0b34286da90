"""DFlash 2 folders (drafter contracts, sections 6.1, 6.2 and 13).

Keys of the convolution and of the selector are read from `dflash_config` alone by
servers, so they stand only there. The codebooks' names have no `.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.dflash2 import Options
from spec_jax.export import names
from spec_jax.export.kinds import dflash
from spec_jax.export.kinds.base import OWN, Form, Header
from spec_jax.export.settings import Settings
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

TITLE = "DFlash 2"
SELECTOR = "candidate_selector."
SUCCESSOR = f"{SELECTOR}successor_codebook"
_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SCALES = ("output_multiplier", "final_logit_softcapping")


def _projection(path: str, name: str, shape: tuple[int, ...]) -> names.Piece:
    """`[D, 2, taps, groups]` of a convolution; public `[2 * taps * groups, D]`."""
    size_d, *rest = shape

    def split(leaf):
        return (leaf.transpose(1, 2, 3, 0).reshape(-1, size_d),)

    def fuse(tensor):
        return tensor.reshape(*rest, size_d).transpose(3, 0, 1, 2)

    return names.Piece(path, (name,), split, fuse)


def _pieces(shapes: Mapping[str, Any]) -> list[names.Piece]:
    found = dflash.backbone(shapes, TITLE)
    for path, leaf in shapes.items():
        if not path.startswith("conv/"):
            continue
        _, layer, place, what = path.split("/")
        public = f"layers.{layer.removeprefix('layers_')}.{place}_conv.{what}"
        if what == "base_kernel":
            found.append(names.table(path, public))
        elif what == "kernel_projection":
            found.append(_projection(path, f"{public}.weight", leaf.shape))
    return [
        *found,
        names.table("selector/predecessor_codebook", f"{SELECTOR}predecessor_codebook"),
        names.table("selector/successor_codebook", SUCCESSOR),
        names.linear(
            "selector/hidden_projection", f"{SELECTOR}hidden_projection.weight"
        ),
    ]


def _to_config(drafter: Drafter, target: TargetSpec, header: Header) -> dict[str, Any]:
    options = drafter.options
    inside = {name: getattr(options, name) for name in _SIZES}
    if options.output_multiplier != 1:
        inside["output_multiplier"] = options.output_multiplier
    if options.final_logit_softcapping:
        inside["final_logit_softcapping"] = options.final_logit_softcapping
    config = dflash.write(drafter, target, header, FORM.architectures[0], **inside)
    return config | {OWN: {"use_selector": options.use_selector}}


def _from_config(
    config: Mapping[str, Any],
    where: str,
    tensors: Mapping[str, tuple[int, ...]],
    target: TargetSpec,
    tokenizer: Tokenizer | None,
) -> tuple[Options, list[str]]:
    found = Settings(config, where, ("dflash_config",))
    found.model_type(TITLE, "qwen3")
    found.neutral(TITLE, (*_SIZES, *_SCALES))
    found.known_inside(TITLE, dflash.INSIDE | {*_SIZES, *_SCALES})
    for name in (*_SIZES, *_SCALES):
        if name in config and found.nested.get(name) is None:
            found.notes.append(
                f"{name} stands at the top level, where servers do not look; it is used"
            )
    fields = dflash.read(found, tensors, target, tokenizer, dflash.DEFAULT_BLOCK)
    cap = found.optional("final_logit_softcapping", float, 0.0)
    own = config.get(OWN) or {}
    use_selector = found.typed(own.get("use_selector", True), bool, "use_selector")
    top_k = found.need("selector_top_k")
    if top_k > target.vocab_size:
        raise UserError(
            f"{where}: selector_top_k={top_k} is more than the target's "
            f"{target.vocab_size} tokens; write the value it was trained with"
        )
    options = Options(
        num_draft=dflash.drafts_of(fields.pop("block_size"), where),
        conv_kernel_size=found.need("conv_kernel_size"),
        conv_group_size=found.need("conv_group_size"),
        selector_rank=found.need("selector_rank"),
        selector_top_k=top_k,
        use_selector=use_selector,
        output_multiplier=found.optional("output_multiplier", float, 1.0),
        final_logit_softcapping=max(cap, 0.0),
        **fields,
    )
    return options, found.notes


FORM = Form(
    name="dflash2",
    title=TITLE,
    architectures=("DFlash2DraftModel",),
    pieces=_pieces,
    to_config=_to_config,
    from_config=_from_config,
    table=SUCCESSOR,
)
