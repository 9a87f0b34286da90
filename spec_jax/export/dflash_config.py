"""`config.json` of a public DFlash folder: what is written, what is understood.

Readers differ on where a key lives (drafter contracts, sections 4.1 and 13), so
block size, layer ids and mask id are written at the top level and in
`dflash_config`; when read, `dflash_config` comes first. A setting that would
change the forward in a way this drafter does not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.core.features import check_layer_ids, default_layer_ids
from spec_jax.drafters.dflash import FULL, SLIDING, Options
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

ARCHITECTURE = "DFlashDraftModel"

# Block size of a folder that does not say (what its public readers take).
_DEFAULT_BLOCK = 16

_FIX = "only plain DFlash drafters are read here"

# Settings that must be absent or neutral, at the top level and in `dflash_config`.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1),
    "confidence_head_with_markov": (None, False),
    "conv_group_size": (None,),
    "conv_kernel_size": (None,),
    "enable_confidence_head": (None, False),
    "final_logit_softcapping": (None, 0),
    "hidden_act": (None, "silu"),
    "input_embedding_scale": (None, 1),
    "markov_head_type": (None,),
    "markov_rank": (None, 0),
    "mlp_bias": (None, False),
    "output_multiplier": (None, 1),
    "partial_rotary_factor": (None, 1),
    "projector_type": (None,),
    "quantization_config": (None,),
    "rope_is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "speculators_model_type": (None,),
    "swiglu_alpha": (None,),
    "swiglu_limit": (None,),
    "use_gemma_norm": (None, False),
}
_ROPE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1),
    "rope_dim": (None,),
    "factor": (None, 1),
    "mrope_section": (None,),
    "mrope_interleaved": (None, False),
}
_NESTED_KEYS = {
    "block_size",
    "is_causal",
    "layer_types",
    "mask_token",
    "mask_token_id",
    "num_target_layers",
    "sliding_window",
    "target_layer_ids",
}


def to_config(
    options: Options,
    target: TargetSpec,
    *,
    dtype: str,
    bos_id: int | None = None,
    draft_vocab_size: int | None = None,
) -> dict[str, Any]:
    """The json object of an exported drafter.

    Args:
      options: resolved options (`Drafter.options`).
      target: sizes of the target.
      dtype: float type of the stored weights.
      bos_id: the target's begin token, where known.
      draft_vocab_size: U of a reduced vocabulary, else None.
    """
    nested = {
        "block_size": options.num_draft + 1,
        "mask_token_id": options.mask_id,
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(options.layer_ids),
    }
    sliding = SLIDING in options.layer_types
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **nested,
        "dflash_config": nested,
        "num_hidden_layers": options.num_layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": options.mlp_size,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": options.norm_eps,
        "rope_theta": options.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": options.rope_theta,
        },
        "layer_types": list(options.layer_types),
        "sliding_window": options.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": options.num_layers,
        "max_position_embeddings": target.max_context,
        "vocab_size": target.vocab_size,
        "bos_token_id": bos_id,
        "eos_token_id": _one_or_list(target.eos_ids),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if options.is_causal is not None and any(
        options.is_causal != (kind == SLIDING) for kind in options.layer_types
    ):
        config["is_causal"] = options.is_causal
    if draft_vocab_size is not None:
        config["draft_vocab_size"] = draft_vocab_size
    return config


def options_from_config(
    config: Mapping[str, Any],
    target: TargetSpec,
    tokenizer: Tokenizer | None,
    where: str,
) -> tuple[Options, list[str]]:
    """Options of the drafter that a `config.json` describes.

    Args:
      config: the json object.
      target: sizes of the target it is to serve.
      tokenizer: resolves a mask token given as text.
      where: names the folder in errors.

    Returns:
      Options with every field set, and notes on what the file left open.

    Raises:
      UserError: another architecture, an unsupported or missing setting, or
        sizes that are not this target's.
    """
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise UserError(f"{where}: dflash_config is {nested!r}, not a json object")
    _check_kind(config, nested, where)
    notes: list[str] = []

    def value(key: str) -> Any:
        inner, outer = nested.get(key), config.get(key)
        if inner is not None and outer is not None and inner != outer:
            notes.append(
                f"{key} is {inner!r} in dflash_config and {outer!r} at the top level; "
                "the first is used"
            )
        return outer if inner is None else inner

    def need(key: str, kind: type = int) -> Any:
        found = config.get(key)
        if found is None:
            raise UserError(
                f"{where}: config.json lacks {key}; write the value the drafter was "
                "trained with"
            )
        return _typed(found, kind, key, where)

    for key, ours in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_layers),
    ):
        theirs = value(key)
        if theirs is None and key == "num_target_layers":
            notes.append("num_target_layers is not given and was not compared")
        elif theirs != ours:
            raise UserError(
                f"{where} was made for another target: {key} is {theirs!r}, expected "
                f"{ours!r}; use a drafter made for {target.name}"
            )
    num_layers = need("num_hidden_layers")
    layer_types, sliding_window = _layer_types(config, num_layers, value, where)
    block_size = value("block_size")
    if block_size is None:
        block_size = _DEFAULT_BLOCK
        notes.append(f"block_size is not given; its readers take {_DEFAULT_BLOCK}")
    if _typed(block_size, int, "block_size", where) < 2:
        raise UserError(
            f"{where}: block_size={block_size} must be at least 2 (the anchor and one "
            "draft)"
        )
    layer_ids = value("target_layer_ids")
    if layer_ids is None:
        layer_ids = default_layer_ids(target.num_layers, num_layers)
        notes.append(f"target_layer_ids is not given; its readers take {layer_ids}")
    if not isinstance(layer_ids, (list, tuple)) or not layer_ids:
        raise UserError(f"{where}: target_layer_ids={layer_ids!r} must list layer ids")
    layer_ids = tuple(_typed(i, int, "target_layer_ids", where) for i in layer_ids)
    try:
        check_layer_ids(layer_ids, target.num_layers)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    is_causal = value("is_causal")
    if is_causal is not None:
        is_causal = _typed(is_causal, bool, "is_causal", where)
        if all(is_causal == (kind == SLIDING) for kind in layer_types):
            is_causal = None
    options = Options(
        num_layers=num_layers,
        num_draft=block_size - 1,
        layer_ids=layer_ids,
        num_heads=need("num_attention_heads"),
        num_kv_heads=need("num_key_value_heads"),
        # Never D / H: the real ones differ.
        head_dim=need("head_dim"),
        mlp_size=need("intermediate_size"),
        mask_id=_mask_id(value, target, tokenizer, where),
        rope_theta=_rope_theta(config, where),
        norm_eps=float(need("rms_norm_eps", float)),
        layer_types=layer_types,
        sliding_window=sliding_window,
        is_causal=is_causal,
    )
    return options, notes


def _check_kind(
    config: Mapping[str, Any], nested: Mapping[str, Any], where: str
) -> None:
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise UserError(
            f"{where}: architectures is {architectures!r}, expected "
            f"{[ARCHITECTURE]!r}; {_FIX}"
        )
    if config.get("model_type", "qwen3") != "qwen3":
        raise UserError(
            f"{where}: model_type is {config['model_type']!r}, expected 'qwen3'; {_FIX}"
        )
    for scope, prefix in ((config, ""), (nested, "dflash_config.")):
        for key, allowed in _NEUTRAL.items():
            if scope.get(key) not in allowed:
                raise UserError(
                    f"{where}: config.json sets {prefix}{key}={scope[key]!r}; {_FIX}"
                )
        for key in sorted(scope):
            known = key in _NEUTRAL
            if not known and key.startswith(("conv_", "selector_", "markov_")):
                raise UserError(
                    f"{where}: config.json sets {prefix}{key}={scope[key]!r}; {_FIX}"
                )
    unknown = sorted(set(nested) - _NESTED_KEYS - set(_NEUTRAL))
    if unknown:
        raise UserError(
            f"{where}: config.json sets dflash_config.{unknown[0]}="
            f"{nested[unknown[0]]!r}, which is not known; {_FIX}"
        )


def _layer_types(
    config: Mapping[str, Any], num_layers: int, value, where: str
) -> tuple[tuple[str, ...], int | None]:
    kinds, window = value("layer_types"), value("sliding_window")
    if kinds is None:
        if window is not None and config.get("use_sliding_window"):
            raise UserError(
                f"{where}: config.json sets sliding_window={window} without "
                f"layer_types; write layer_types, {FULL!r} or {SLIDING!r} per layer"
            )
        kinds = [FULL] * num_layers
    if (
        not isinstance(kinds, (list, tuple))
        or len(kinds) != num_layers
        or any(kind not in (FULL, SLIDING) for kind in kinds)
    ):
        raise UserError(
            f"{where}: layer_types={kinds!r} must name {FULL!r} or {SLIDING!r} for "
            f"each of the {num_layers} layers"
        )
    if SLIDING not in kinds:
        return tuple(kinds), None
    if config.get("use_sliding_window") is False:
        raise UserError(
            f"{where}: use_sliding_window is false but layer_types has {SLIDING!r}; "
            "readers disagree on the window, so make them agree"
        )
    if window is None or _typed(window, int, "sliding_window", where) < 1:
        raise UserError(
            f"{where}: sliding_window={window!r} must be at least 1 when layer_types "
            f"has {SLIDING!r}"
        )
    return tuple(kinds), window


def _mask_id(value, target: TargetSpec, tokenizer: Tokenizer | None, where: str) -> int:
    mask_id = value("mask_token_id")
    if mask_id is None:
        token = value("mask_token")
        if token is None or tokenizer is None:
            raise UserError(
                f"{where}: config.json lacks mask_token_id; no id is right for every "
                "tokenizer, so write the one the drafter was trained with"
            )
        mask_id = tokenizer.id_of(token)
    if not 0 <= _typed(mask_id, int, "mask_token_id", where) < target.vocab_size:
        raise UserError(
            f"{where}: mask_token_id={mask_id} lies outside the target's "
            f"{target.vocab_size} tokens; use a drafter made for {target.name}"
        )
    return mask_id


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    """`rope_parameters`, else `rope_theta`; they must agree where both are."""
    theta = config.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UserError(
                f"{where}: config.json sets {key} of type {kind!r}; only 'default' "
                "(unscaled) rotary positions are read here"
            )
        for name, allowed in _ROPE_NEUTRAL.items():
            if rope.get(name) not in allowed:
                raise UserError(
                    f"{where}: config.json sets {key}.{name}={rope[name]!r}; whole "
                    "heads are rotated here, unscaled"
                )
        base = rope.get("rope_theta")
        if base is not None:
            if theta is not None and float(theta) != float(base):
                raise UserError(
                    f"{where}: rope_theta={theta} but {key}.rope_theta={base}; keep "
                    "the one the weights were trained with"
                )
            theta = base
    if theta is None:
        raise UserError(
            f"{where}: config.json has neither rope_parameters nor rope_theta, and "
            "readers disagree on the default (10000 or 1000000); write the base the "
            "drafter was trained with"
        )
    return float(_typed(theta, float, "rope_theta", where))


def _typed(found: Any, kind: type, key: str, where: str) -> Any:
    """Refuses a json value of another type (true is no number here)."""
    allowed = (int, float) if kind is float else kind
    if not isinstance(found, allowed) or (isinstance(found, bool) and kind is not bool):
        raise UserError(
            f"{where}: config.json has {key}={found!r}, which is no {kind.__name__}; "
            "write the value the drafter was trained with"
        )
    return found


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
