"""Folders of other conventions, brought into the public form that is read here.

Every change is said in a sentence. What cannot be brought over is refused: no
drafter here computes what the file asks for.

    speculators         settings nested in `transformer_layer_config`, layer ids that
                        are layer inputs, copies of the target's tables
    DeepSpec            DSpark with embedding and head included; a "DFlash" whose
                        anchor row predicts, saved as DSpark without a Markov head
    EAGLE repository    class names of the base model, `layers.0` for the one layer
    older servers       `aux_norm_low`, `encoder.fc`, `logit_head.` and their like
    vLLM's class name   EAGLE-3 with layer ids that are layer inputs

Layer ids are layer inputs in one package and outputs in the next, under one key
(drafter contracts, section 3.3 and gotcha 1). The class name decides; how a given
list is read is always said, and a class that no package writes with a list is
asked for the one that says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.export.kinds import dspark, eagle3
from spec_jax.target.spec import TargetSpec

_SPECULATORS = "speculators_model_type"
_INNER = "transformer_layer_config"
_AUX = "aux_hidden_state_layer_ids"
_DFLASH = "dflash_config"
_DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")
_CLASSES = {
    "eagle3": "LlamaForCausalLMEagle3",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
_EAGLE3_BY_INPUTS = "Eagle3LlamaForCausalLM"
_EAGLE3_NAMES = {_EAGLE3_BY_INPUTS, "LlamaForCausalLMEagle3"}
_EAGLE_NAMES = {
    "LlamaForCausalLM": "LlamaForCausalLMEagle",
    "Qwen2ForCausalLM": "Qwen2ForCausalLMEagle",
    "MistralForCausalLM": "MistralForCausalLMEagle",
}
# A part of a name that another convention writes differently.
_RENAMED = (
    ("logit_head.", "markov_head."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
# Tables that are computed, not learned, or that belong to the target.
_DROPPED = ("rotary_emb.", "verifier_norm.", "verifier_lm_head.")
_CODEBOOKS = ("predecessor_codebook", "successor_codebook")


Say = Callable[[str], None]


def to_layer_outputs(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Layer outputs of ids that count layer inputs: input i is output i - 1."""
    return tuple(i - 1 for i in layer_ids)


def to_layer_inputs(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Inverse of `to_layer_outputs`."""
    return tuple(i + 1 for i in layer_ids)


def adopt(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: TargetSpec,
    where: str,
) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """Brings a folder without a contract of ours into the form that is read.

    Args:
      config: its `config.json`.
      tensors: plain name -> tensor.
      target: sizes of the target it is to serve.
      where: names the folder in errors.

    Returns:
      The configuration, the tensors, and a sentence for each change.

    Raises:
      UserError: it asks for something that no drafter here has.
    """
    config, tensors, said = dict(config), dict(tensors), []
    for step in _STEPS:
        config, tensors = step(config, tensors, target, where, said.append)
    return config, tensors, said


def _layer_ids(config, tensors, target, where, say: Say):
    """Whether a given list counts layer inputs or outputs; none but speculators'."""
    if config.get(_SPECULATORS) is not None:
        return config, tensors
    if config.get(_AUX) is not None:
        raise UserError(
            f"{where}: config.json sets {_AUX}={config[_AUX]!r}, which counts layer "
            "inputs and is read of speculators folders alone; write the layer outputs, "
            f"one less each, as {eagle3.IDS} or target_layer_ids, and remove it"
        )
    for key, inner in ((eagle3.IDS, "eagle_config"), ("target_layer_ids", _DFLASH)):
        scopes = [config]
        if isinstance(config.get(inner), Mapping):
            config = config | {inner: dict(config[inner])}
            scopes = [config[inner], config]
        for scope in scopes:
            if scope.get(key) is not None:
                scope[key] = _outputs(scope[key], key, config, target, where, say)
    return config, tensors


def _outputs(ids: Any, key: str, config, target, where: str, say: Say) -> Any:
    """The layer outputs of one list."""
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        return ids  # its reader says what a list is
    found = _class_of(config)
    by_outputs = _CLASSES["eagle3"]
    if key == eagle3.IDS and found in _EAGLE_NAMES:
        raise UserError(
            f"{where}: {key}={ids} may count layer inputs or outputs, and "
            f"architectures {found!r} does not say which; write {_EAGLE3_BY_INPUTS!r} "
            f"there if it counts inputs, {by_outputs!r} if outputs"
        )
    if key == eagle3.IDS and found == _EAGLE3_BY_INPUTS:
        ours = to_layer_outputs(ids)
        say(
            f"{key}={ids} counts layer inputs, as {found} is read elsewhere; read as "
            f"outputs of layers {ours}; if it counts outputs, write architectures "
            f"{by_outputs}"
        )
        return list(ours)
    said = f"{key}={ids} is taken as layer outputs"
    usual = eagle3.default_layer_ids(target.num_layers)
    if key == eagle3.IDS and tuple(ids) == to_layer_inputs(usual):
        said += (
            "; it is also the public default counted in layer inputs: if that is "
            f"meant, write architectures {_EAGLE3_BY_INPUTS}"
        )
    say(said)
    return ids


def _class_of(config: Mapping[str, Any]) -> str:
    found = config.get("architectures")
    return found[0] if isinstance(found, list) and len(found) == 1 else ""


def _names(config, tensors, target, where, say: Say):
    """Names that other packages write."""
    del target
    kept = {}
    dropped = sorted(
        name
        for name in tensors
        if any(name.startswith(part) or f".{part}" in name for part in _DROPPED)
    )
    for name, tensor in tensors.items():
        if name in dropped:
            continue
        new = name
        for old, ours in _RENAMED:
            if new.startswith(old):
                new = ours + new.removeprefix(old)
                say(f"tensor {name} is read as {new}")
        for codebook in _CODEBOOKS:
            if new == f"candidate_selector.{codebook}.weight":
                new = new.removesuffix(".weight")
                say(f"tensor {name} is read as {new}")
        if new in kept:
            raise UserError(
                f"{where} has tensor {new} twice, once as {name}; keep one of them"
            )
        kept[new] = tensor
    if dropped:
        say(
            f"tensor {', '.join(dropped)} is computed or the target's own and was left "
            "out"
        )
    fused = eagle3.LAYER
    has_layer = any(name.startswith("layers.0.hidden_norm.") for name in kept)
    if has_layer and not any(name.startswith(fused) for name in kept):
        kept = {
            fused + name.removeprefix("layers.0.")
            if name.startswith("layers.0.")
            else name: tensor
            for name, tensor in kept.items()
        }
        say(f"the layer's tensors, layers.0.*, are read as {fused}*")
    return config, kept


def _classes(config, tensors, target, where, say: Say):
    """Class names of the base model or of another engine."""
    del target, where
    found = _class_of(config)
    is_eagle3 = any(name.startswith(eagle3.LAYER) for name in tensors)
    if is_eagle3 and found in (_EAGLE3_NAMES | set(_EAGLE_NAMES)):
        new = _CLASSES["eagle3"]
    elif found in _EAGLE_NAMES and "fc.weight" in tensors:
        new = _EAGLE_NAMES[found]
    else:
        return config, tensors
    if new != found:
        say(f"architectures {found} is read as {new}: the weights are a drafter's")
    return config | {"architectures": [new]}, tensors


def _refused(config, tensors, target, where, say: Say):
    """Public drafters that no drafter here can compute."""
    del target, say
    found = _class_of(config)
    if found in ("Qwen3Eagle3Model", "Gemma4Eagle3Model") or (
        found == _CLASSES["eagle3"]
        and any(name.startswith(f"{eagle3.LAYER}self_attn.q_norm.") for name in tensors)
    ):
        raise UserError(
            f"{where}: its EAGLE-3 layer ({found}) normalises each head's queries and "
            "keys, which the EAGLE-3 drafter here, like servers', does not; it cannot "
            "be represented"
        )
    if found.startswith("Gemma4"):
        raise UserError(
            f"{where}: {found} has four norms a layer and scales its values; no "
            "drafter here computes that"
        )
    biases = sorted(
        name
        for name in tensors
        if name.endswith(".bias") and (".self_attn." in name or ".mlp." in name)
    )
    if biases:
        raise UserError(
            f"{where}: tensor {biases[0]} is a bias inside a layer, and no drafter "
            "here has one; it cannot be represented"
        )
    return config, tensors


def _anchor_first_dflash(config, tensors, target, where, say: Say):
    """DFlash weights whose anchor row predicts: DSpark that corrects nothing."""
    del where
    found = _class_of(config)
    inner = config.get("dflash_config") or {}
    rank = inner.get("markov_rank", config.get("markov_rank"))
    is_dspark = found in _DSPARK and not rank and dspark.W1 not in tensors
    anchored = inner.get("sample_from_anchor", config.get("sample_from_anchor"))
    is_dflash = found == _CLASSES["dflash"] and anchored is True
    if not (is_dspark or is_dflash):
        return config, tensors
    zeros_V1 = np.zeros((target.vocab_size, 1), np.float32)
    rows = len(tensors["d2t"]) if "d2t" in tensors else target.vocab_size
    tensors = tensors | {dspark.W1: zeros_V1, dspark.W2: np.zeros((rows, 1))}
    heads = {
        "markov_rank": 1,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
    }
    config = config | heads | {"architectures": ["Qwen3DSparkModel"]}
    inner = {k: v for k, v in inner.items() if k not in heads}
    inner.pop("projector_type", None)
    config["dflash_config"] = inner
    say(
        "it is a DFlash drafter whose anchor row predicts (row k the token after its "
        "own position); it is read as DSpark with a Markov head of zeros, which "
        "corrects nothing"
    )
    return config, tensors


def _speculators(config, tensors, target, where, say: Say):
    """The speculators form: nested layer settings, ids of layer inputs."""
    kind = config.get(_SPECULATORS)
    if kind is None:
        return config, tensors
    inner = config.get(_INNER)
    if kind not in _CLASSES or not isinstance(inner, Mapping):
        raise UserError(
            f"{where}: {_SPECULATORS} is {kind!r}; of that form {', '.join(_CLASSES)} "
            f"with a {_INNER} are read here"
        )
    flat = {k: v for k, v in inner.items() if k not in ("architectures", "dtype")}
    rest = {
        k: v
        for k, v in config.items()
        if k not in (_SPECULATORS, _INNER, "speculators_config", "speculators_version")
    }
    flat |= {k: v for k, v in rest.items() if v is not None}
    flat["architectures"] = [_CLASSES[kind]]
    flat["num_target_layers"] = target.num_layers
    said = f"it is a speculators folder: settings of {_INNER} are read as its own"
    say(said + f", architectures as {_CLASSES[kind]}")
    old = "eagle_aux_hidden_state_layer_ids" if kind == "eagle3" else _AUX
    ids = flat.pop(old, None)
    if ids is None:
        raise UserError(
            f"{where}: config.json lacks {old}; write the ids that its features were "
            "captured under"
        )
    ours = to_layer_outputs(ids)
    say(f"{old}={list(ids)} counts layer inputs; read as outputs of layers {ours}")
    if kind == "eagle3":
        flat["eagle_config"] = {eagle3.IDS: list(ours)}
        flat["model_type"] = "llama"
        return flat, tensors
    flat["target_layer_ids"] = list(ours)
    flat.setdefault("model_type", "qwen3")
    flat.pop("shift_label", None)
    if flat.get("projector_type") == kind:
        del flat["projector_type"]
    if flat.pop("sliding_window_non_causal", False) and flat.get("sliding_window"):
        flat["is_causal"] = False
        say("sliding_window_non_causal is read as is_causal=false")
    if flat.get("sliding_window") and "sliding_attention" in (
        flat.get("layer_types") or ()
    ):
        say(
            "its trainer measures the sliding window from the anchor, and every reader "
            "from each row; rows behind the anchor see less context than in training"
        )
    if kind == "dspark" and flat.get("sample_from_anchor") is None:
        raise UserError(
            f"{where}: config.json lacks sample_from_anchor, and versions of "
            "speculators take different defaults; write the one it was trained with"
        )
    if kind != "dspark" and flat.get("sample_from_anchor") is None:
        say("sample_from_anchor is not given; speculators takes false for this kind")
    return flat, tensors


_STEPS = (
    _layer_ids,
    _speculators,
    _names,
    _classes,
    _refused,
    _anchor_first_dflash,
)
