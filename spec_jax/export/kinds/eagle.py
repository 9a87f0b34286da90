"""EAGLE folders (drafter contracts, section 1).

The fused layer is a LLaMA layer without a norm before attention. Servers always
build `fc.bias` and leave it random where the file lacks it, so a drafter without
one writes zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.eagle import Options
from spec_jax.export import names, settings
from spec_jax.export.kinds.base import OWN, Form, Header
from spec_jax.export.settings import Settings
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

TITLE = "EAGLE"
BIAS = "fc.bias"
# Base of a file that has none: what its trainers and readers take.
ROPE_THETA = 10000.0
LAYER_NORMS = {"mlp_norm": "post_attention_layernorm"}


def layer(shapes: Mapping[str, Any], prefix: str) -> list[names.Piece]:
    """Pieces of the one layer, under a public prefix."""
    inner = {
        path.removeprefix("layer/"): leaf
        for path, leaf in shapes.items()
        if path.startswith("layer/")
    }
    return names.layer_pieces(inner, "layer/", prefix, LAYER_NORMS)


def write(
    drafter: Drafter, target: TargetSpec, header: Header, architecture: str
) -> dict[str, Any]:
    """The json object that EAGLE and EAGLE-3 share."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **settings.common(target, drafter.options, header),
        # Some readers of this family know only the older name.
        "torch_dtype": header.dtype,
        OWN: {"num_draft": drafter.layout.num_draft},
    }


def read(found: Settings, target: TargetSpec, default_draft: int) -> dict[str, Any]:
    """Options that EAGLE and EAGLE-3 share.

    Raises:
      UserError: a missing or wrong setting, more than one layer, or another
        target's sizes.
    """
    found.same_target(target, ("hidden_size", "vocab_size", "target_hidden_size"))
    if found.need("num_hidden_layers") != 1:
        raise UserError(
            f"{found.where}: num_hidden_layers is {found.value('num_hidden_layers')}; "
            "this drafter has one layer"
        )
    num_draft = num_draft_of(found)
    if num_draft is None:
        num_draft = default_draft
        found.notes.append(
            f"it does not say how many drafts a round has; {num_draft} are taken"
        )
    heads = found.heads(target.hidden_size)
    return {
        "num_draft": num_draft,
        **heads,
        "rope_theta": found.rope_theta(ROPE_THETA),
        "norm_eps": float(found.need("rms_norm_eps", float)),
    }


def num_draft_of(found: Settings) -> int | None:
    """M, where the file says it."""
    own = found.config.get(OWN) or {}
    num_draft = own.get("num_draft")
    return None if num_draft is None else found.typed(num_draft, int, "num_draft")


def any_length(config: Mapping[str, Any]) -> bool:
    """Nobody said M, and a drafter that feeds itself takes any: trees go deeper."""
    return (config.get(OWN) or {}).get("num_draft") is None


def _pieces(shapes: Mapping[str, Any]) -> list[names.Piece]:
    found = [names.linear("fc", "fc.weight")]
    if "fc_bias" in shapes:
        found.append(names.table("fc_bias", BIAS))
    return found + layer(shapes, "layers.0.")


def _to_config(drafter: Drafter, target: TargetSpec, header: Header) -> dict[str, Any]:
    config = write(drafter, target, header, FORM.architectures[0])
    return config | {"bias": drafter.options.bias}


def _from_config(
    config: Mapping[str, Any],
    where: str,
    tensors: Mapping[str, tuple[int, ...]],
    target: TargetSpec,
    tokenizer: Tokenizer | None,
) -> tuple[Options, list[str]]:
    del tokenizer
    found = Settings(config, where)
    found.model_type(TITLE, "llama", "qwen2", "mistral")
    found.neutral(TITLE, ("bias",))
    bias = found.optional("bias", bool, None)
    if bias is None:
        bias = BIAS in tensors
        if not bias:
            found.notes.append(
                f"config.json lacks bias, which means true, and the weights lack {BIAS}"
                "; none is added"
            )
    return Options(bias=bias, **read(found, target, Options.num_draft)), found.notes


def _constants(options: Options, target: TargetSpec) -> dict[str, np.ndarray]:
    return {} if options.bias else {BIAS: np.zeros(target.hidden_size, np.float32)}


FORM = Form(
    name="eagle",
    title=TITLE,
    architectures=(
        "LlamaForCausalLMEagle",
        "Qwen2ForCausalLMEagle",
        "MistralForCausalLMEagle",
    ),
    pieces=_pieces,
    to_config=_to_config,
    from_config=_from_config,
    constants=_constants,
    any_length=any_length,
)
