"""DSpark folders (drafter contracts, sections 5.1, 5.2 and 13).

The heads' keys are written at the top level, where servers look, and in
`dflash_config`, where a trainer looks. The row convention is always written:
readers take different defaults. Servers know the Qwen3 class by one name and the
trainer by another, so a second configuration stands beside the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.dspark import Options
from spec_jax.export import names
from spec_jax.export.kinds import dflash
from spec_jax.export.kinds.base import Form, Header
from spec_jax.export.settings import Settings
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

TITLE = "DSpark"
W1 = "markov_head.markov_w1.weight"
W2 = "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
TRAINER_CONFIG = "config.specforge.json"
_DEFAULT_BLOCK = 7
_READS = {
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_alpha",
    "confidence_head_with_markov",
    "projector_type",
    "sample_from_anchor",
}


def _pieces(shapes: Mapping[str, Any]) -> list[names.Piece]:
    found = dflash.backbone(shapes, TITLE)
    found += [names.table("markov/markov_w1", W1), names.linear("markov/markov_w2", W2)]
    for name in ("gate", "joint"):
        if f"markov/{name}_proj" in shapes:
            public = f"markov_head.{name}_proj"
            found += [
                names.linear(f"markov/{name}_proj", f"{public}.weight"),
                names.table(f"markov/{name}_bias", f"{public}.bias"),
            ]
    if "confidence/proj" in shapes:
        found += [
            names.Piece(
                "confidence/proj",
                (CONFIDENCE,),
                lambda leaf: (leaf[None],),
                lambda tensor: tensor[0],
            ),
            names.Piece(
                "confidence/bias",
                ("confidence_head.proj.bias",),
                lambda leaf: (leaf[None],),
                lambda tensor: tensor[0],
            ),
        ]
    return found


def _to_config(drafter: Drafter, target: TargetSpec, header: Header) -> dict[str, Any]:
    options = drafter.options
    heads = {
        "markov_rank": options.markov_rank,
        "markov_head_type": options.markov_head_type,
        "enable_confidence_head": options.enable_confidence_head,
        "confidence_head_with_markov": options.enable_confidence_head
        and options.confidence_with_markov,
    }
    grouped = options.num_kv_heads < options.num_heads
    config = dflash.write(
        drafter,
        target,
        header,
        FORM.architectures[0],
        projector_type="dspark",
        attention_mode="gqa" if grouped else "mha",
        confidence_head_alpha=1.0 if options.enable_confidence_head else 0.0,
        **heads,
    )
    return config | heads | {"sample_from_anchor": True}


def _second(
    drafter: Drafter, target: TargetSpec, header: Header
) -> tuple[str, dict[str, Any]]:
    config = _to_config(drafter, target, header)
    config["architectures"] = ["DSparkDraftModel"]
    config["auto_map"] = {"AutoModel": "dspark.DSparkDraftModel"}
    return TRAINER_CONFIG, config


def _from_config(
    config: Mapping[str, Any],
    where: str,
    tensors: Mapping[str, tuple[int, ...]],
    target: TargetSpec,
    tokenizer: Tokenizer | None,
) -> tuple[Options, list[str]]:
    found = Settings(config, where, ("dflash_config", "dspark_config"))
    found.model_type(TITLE, "qwen3")
    found.neutral(TITLE, _READS)
    found.known_inside(TITLE, dflash.INSIDE | _READS)
    if found.value("projector_type") not in (None, "dspark"):
        raise UserError(
            f"{where}: projector_type is {found.value('projector_type')!r}, expected "
            "'dspark'; only plain DSpark drafters are read here"
        )
    _row_convention(found)
    fields = dflash.read(found, tensors, target, tokenizer, _DEFAULT_BLOCK)
    rank = found.need("markov_rank")
    enabled, with_markov = _confidence(found, tensors, target, rank)
    options = Options(
        num_draft=_drafts(fields.pop("block_size"), where),
        markov_rank=rank,
        markov_head_type=str(found.value("markov_head_type") or "vanilla").lower(),
        enable_confidence_head=enabled,
        confidence_with_markov=with_markov,
        **fields,
    )
    return options, found.notes


def _drafts(block_size: int, where: str) -> int:
    if block_size < 1:
        raise UserError(f"{where}: block_size={block_size} must be at least 1")
    return block_size


def _row_convention(found: Settings) -> None:
    said = found.value("sample_from_anchor")
    if said is None:
        found.notes.append(
            "sample_from_anchor is not given; the anchor's row predicts, as in every "
            "public DSpark trainer"
        )
    elif found.typed(said, bool, "sample_from_anchor") is False:
        raise UserError(
            f"{found.where}: sample_from_anchor is false, so its rows predict their "
            "own position; a DSpark drafter's predict the next, and the weights of one "
            "do not serve the other"
        )


def _confidence(
    found: Settings,
    tensors: Mapping[str, tuple[int, ...]],
    target: TargetSpec,
    rank: int,
) -> tuple[bool, bool]:
    """Whether there is a confidence head, and whether it reads the Markov code.

    Readers take different defaults, so the weights decide.
    """
    said = found.value("enable_confidence_head")
    shape = tensors.get(CONFIDENCE)
    if shape is None:
        if said:
            raise UserError(
                f"{found.where}: enable_confidence_head is true but the weights lack "
                f"{CONFIDENCE}; export the drafter with its confidence head, or write "
                "false and serve full windows"
            )
        return False, True
    if said is False:
        found.notes.append(
            "enable_confidence_head is false, but the weights have the head; it is used"
        )
    with_markov = tuple(shape) == (1, target.hidden_size + rank)
    asked = found.value("confidence_head_with_markov")
    if asked is None:
        found.notes.append(
            "confidence_head_with_markov is not given; its width says "
            f"{str(with_markov).lower()}"
        )
    elif asked != with_markov:
        raise UserError(
            f"{found.where}: confidence_head_with_markov is {asked} but tensor "
            f"{CONFIDENCE} has shape {tuple(shape)}; weights and config.json are not "
            "of one drafter"
        )
    return True, with_markov


FORM = Form(
    name="dspark",
    title=TITLE,
    architectures=("Qwen3DSparkModel", "DSparkDraftModel"),
    pieces=_pieces,
    to_config=_to_config,
    from_config=_from_config,
    table=W2,
    reduced_by=("speculators",),
    second=_second,
)
