"""EAGLE-3 folders (drafter contracts, sections 3.1, 3.2 and 3.5).

Layer ids are layer outputs; servers add one to every list they are given.
`norm_output` has three meanings, so it is left out: the fed-back state is the one
before the final norm, and the head reads the one after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.eagle3 import Options, default_layer_ids
from spec_jax.export import names
from spec_jax.export.kinds import eagle
from spec_jax.export.kinds.base import Form, Header
from spec_jax.export.settings import Settings
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

TITLE = "EAGLE-3"
LAYER = "midlayer."
IDS = "eagle_aux_hidden_state_layer_ids"
_INSIDE = {IDS, "use_aux_hidden_state"}


def _pieces(shapes: Mapping[str, Any]) -> list[names.Piece]:
    found = [
        names.linear("fc", "fc.weight"),
        names.table("embed_norm", f"{LAYER}input_layernorm.weight"),
        names.table("hidden_norm", f"{LAYER}hidden_norm.weight"),
        names.table("norm", "norm.weight"),
        names.linear("head", "lm_head.weight"),
    ]
    if "fc_norm" in shapes:
        count = shapes["fc_norm"].shape[0]
        found.append(
            names.Piece(
                "fc_norm",
                tuple(f"fc_norm.{i}.weight" for i in range(count)),
                lambda leaf: tuple(leaf[i] for i in range(count)),
                lambda *rows: np.stack(rows),
            )
        )
    return found + eagle.layer(shapes, LAYER)


def _to_config(drafter: Drafter, target: TargetSpec, header: Header) -> dict[str, Any]:
    options = drafter.options
    config = eagle.write(drafter, target, header, FORM.architectures[0]) | {
        "num_aux_hidden_states": len(options.layer_ids),
        "eagle_config": {IDS: list(options.layer_ids), "use_aux_hidden_state": True},
        "num_target_layers": target.num_layers,
        "bias": False,
        "ttt_length": options.ttt_length,
    }
    return config | ({"fc_norm": True} if options.fc_norm else {})


def _from_config(
    config: Mapping[str, Any],
    where: str,
    tensors: Mapping[str, tuple[int, ...]],
    target: TargetSpec,
    tokenizer: Tokenizer | None,
) -> tuple[Options, list[str]]:
    del tokenizer
    found = Settings(config, where, ("eagle_config",))
    found.model_type(TITLE, "llama")
    found.neutral(TITLE, ("fc_norm", "use_aux_norm"))
    found.known_inside(TITLE, _INSIDE)
    found.same_target(target, ("num_target_layers",))
    _norms(found)
    ids = found.value(IDS)
    if ids is None:
        ids = default_layer_ids(target.num_layers)
        found.notes.append(
            f"{IDS} is not given; its readers capture the outputs of layers {ids}"
        )
    ids = found.layer_ids(ids, IDS, target)
    count = found.optional("num_aux_hidden_states", int, len(ids))
    if count != len(ids):
        raise UserError(
            f"{where}: num_aux_hidden_states is {count} but {IDS} names {len(ids)} "
            "layers; config.json contradicts itself"
        )
    found.fc_width(tensors, len(ids), target, IDS)
    if found.config.get("tie_word_embeddings"):
        raise UserError(
            f"{where}: tie_word_embeddings is true, and an EAGLE-3 drafter has a head "
            "of its own; save lm_head.weight and write false"
        )
    # `None` asks for the target's own head, which this drafter cannot borrow.
    if "lm_head.weight" not in tensors:
        raise UserError(
            f"{where} lacks tensor lm_head.weight; a drafter that borrows the target's "
            "head is not EAGLE-3 as it is read here"
        )
    fields = eagle.read(found, target, Options.num_draft)
    ttt_length = found.optional("ttt_length", int, Options.ttt_length)
    fc_norm = bool(found.value("fc_norm") or found.value("use_aux_norm"))
    options = Options(ttt_length=ttt_length, layer_ids=ids, fc_norm=fc_norm, **fields)
    return options, found.notes


def _norms(found: Settings) -> None:
    """`norm_output`: refused where readers would disagree."""
    norm_output = found.value("norm_output")
    if norm_output:
        raise UserError(
            f"{found.where}: config.json sets norm_output=true, which means feedback "
            "after the final norm to servers and a norm before the head to one "
            "trainer; if it was trained with feedback before the norm, remove the key"
        )
    if norm_output is not None:
        found.notes.append(
            "norm_output is false; it is read as servers do: the head sees the normed "
            "state, and the state before the norm is fed back"
        )


FORM = Form(
    name="eagle3",
    title=TITLE,
    architectures=("LlamaForCausalLMEagle3",),
    pieces=_pieces,
    to_config=_to_config,
    from_config=_from_config,
    table="lm_head.weight",
    own_head=True,
    any_length=eagle.any_length,
)
