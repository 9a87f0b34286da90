"""Reads a target from a Hugging Face folder (`config.json`, safetensors).

`model_type` `llama` or `qwen3`; one `model.safetensors` or shards listed by
`model.safetensors.index.json`; head tied or not. A setting that would change
the forward in a way it does not have is refused, never ignored.
"""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes  # noqa: F401 (numpy learns bfloat16 from it)
import numpy as np
import safetensors

from spec_jax.core.errors import UserError
from spec_jax.target import checkpoint, config_fields, tokenizer
from spec_jax.target.chat import ChatTemplate
from spec_jax.target.spec import TargetSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_CONFIG = "config.json"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")

# Settings that must be absent or have one of these values.
_REFUSED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
}


def load_safetensors_folder(folder: str | os.PathLike[str]) -> checkpoint.Checkpoint:
    """Reads one model folder.

    Args:
      folder: has `config.json`, the weights and, where there is one,
        `tokenizer.json`.

    Returns:
      The checkpoint, weights in float32. `tokenizer` is None in a folder
      without `tokenizer.json`.

    Raises:
      UserError: a file is missing or damaged, a setting is not one this decoder
        has, or tensors are missing, surplus or misshaped.
    """
    folder = os.fspath(folder)
    where = f"target folder {folder!r}"
    config = tokenizer.read_json_if_there(os.path.join(folder, "config.json"))
    if not config:
        raise UserError(
            f"{where} has no config.json; point to a folder that a model was saved in"
        )
    files = weight_files(folder)
    readers = [_open(os.path.join(folder, name)) for name in files]
    holder = {key: r for r in readers for key in r.keys()}  # noqa: SIM118
    spec = read_spec(config, folder)
    if spec.tied and "lm_head.weight" in holder:
        # Some writers store the tied matrix twice; the embedding is the one used.
        del holder["lm_head.weight"]
    checkpoint.check_layers(spec, len(holder), where)
    shapes = checkpoint.weight_shapes(spec)
    checkpoint.check_names(
        holder, shapes, where, "weights and config.json are not of one model"
    )
    for name, expected in shapes.items():
        stored = holder[name].get_slice(name)
        checkpoint.check_shape(name, tuple(stored.get_shape()), expected, where)
        if stored.get_dtype() not in _FLOAT_TYPES:
            raise UserError(
                f"{where}: tensor {name} has type {stored.get_dtype()}; save the "
                f"weights as one of {', '.join(_FLOAT_TYPES)}"
            )

    def get(name: str) -> np.ndarray:
        return holder[name].get_tensor(name).astype(np.float32, copy=False)

    params = checkpoint.arrange(get, spec)
    text = None
    if os.path.isfile(os.path.join(folder, "tokenizer.json")):
        text = tokenizer.from_folder(folder)
        if text.vocab_size > spec.vocab_size:
            raise UserError(
                f"{where}: tokenizer.json has {text.vocab_size} tokens but config.json "
                f"has vocab_size={spec.vocab_size}; they are not of one model"
            )
    return checkpoint.Checkpoint(spec, params, text, _read_template(folder))


def weight_files(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the safetensors files that hold the weights, sorted.

    Raises:
      UserError: neither an index nor a single file, or the index is damaged or
        lists a file that is not there.
    """
    folder = os.fspath(folder)
    index = os.path.join(folder, INDEX)
    if os.path.isfile(index):
        weight_map = tokenizer.read_json_if_there(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(
                f"{index} has no weight_map; restore the file that came with the model"
            )
        files = list(weight_map.values())
        if not all(isinstance(name, str) for name in files):
            raise UserError(
                f"{index} has a weight_map of something else than file names; restore "
                "the file that came with the model"
            )
        names = sorted(set(files))
        for name in names:
            if os.path.basename(name) != name:
                raise UserError(
                    f"{index} lists {name!r}, which is not a file of that folder; "
                    "restore the file that came with the model"
                )
            if not os.path.isfile(os.path.join(folder, name)):
                raise UserError(
                    f"{index} lists {name!r}, which is not there; copy or download "
                    "the missing file"
                )
        return names
    if os.path.isfile(os.path.join(folder, SINGLE)):
        return [SINGLE]
    raise UserError(
        f"target folder {folder!r} has neither {SINGLE} nor {INDEX}; point to a "
        "folder with safetensors weights"
    )


def read_spec(config: dict[str, Any], folder: str = "config.json") -> TargetSpec:
    """Sizes of a model from its `config.json`.

    Args:
      config: the json object.
      folder: where it lies; the last part becomes the name, and
        `generation_config.json` there may add ids that end a generation.

    Raises:
      UserError: a setting is missing or is not one this decoder has.
    """
    family = config.get("model_type")
    if family not in ("llama", "qwen3"):
        raise UserError(
            f"config.json has model_type {family!r}; this decoder covers 'llama' "
            "(SmolLM2 included) and 'qwen3'"
        )
    for key, allowed in _REFUSED_SETTINGS.items():
        if config.get(key) not in allowed:
            raise UserError(
                f"config.json sets {key}={config[key]!r}, which this decoder does not "
                "do; use a model without it"
            )
    layer_types = config_fields.texts(config, _CONFIG, "layer_types")
    other_layers = set(layer_types) - {"full_attention"}
    if other_layers:
        raise UserError(
            f"config.json sets layer_types with {sorted(other_layers)}; this decoder "
            "has only 'full_attention' layers"
        )

    def size(key: str, default: int | None = None) -> int:
        return config_fields.size(config, _CONFIG, key, default)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    vocab_size = size("vocab_size")
    eos_ids = _end_ids(config, folder, vocab_size)
    try:
        return TargetSpec(
            name=os.path.basename(os.path.abspath(folder)),
            family=family,
            num_layers=size("num_hidden_layers"),
            hidden_size=hidden,
            mlp_size=size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", max(1, hidden // heads)),
            vocab_size=vocab_size,
            rope_theta=_rope_theta(config),
            norm_eps=config_fields.positive(config, _CONFIG, "rms_norm_eps"),
            qk_norm=family == "qwen3",
            tied=config_fields.switch(config, _CONFIG, "tie_word_embeddings"),
            max_context=size("max_position_embeddings"),
            eos_ids=eos_ids,
            pad_id=_pad_id(config, vocab_size, eos_ids),
        )
    except UserError as error:
        raise UserError(f"{_CONFIG}: {error}") from error


def _end_ids(config: dict[str, Any], folder: str, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a generation, those of `generation_config.json` first."""
    name = "generation_config.json"
    generation = tokenizer.read_json_if_there(os.path.join(folder, name))
    ids = [
        *config_fields.token_ids(generation, name, "eos_token_id", vocab_size),
        *config_fields.token_ids(config, _CONFIG, "eos_token_id", vocab_size),
    ]
    return tuple(dict.fromkeys(ids))


def _pad_id(config: dict[str, Any], vocab_size: int, eos_ids: tuple[int, ...]) -> int:
    """The file's own where the vocabulary has it: -1 and V are said for none."""
    pad = config.get("pad_token_id")
    if pad is not None and type(pad) is not int:
        raise UserError(
            f"{_CONFIG} has pad_token_id={pad!r}, which is not a token id; restore "
            "the file that came with the model"
        )
    if pad is not None and 0 <= pad < vocab_size:
        return pad
    return (eos_ids or (0,))[0]


def _rope_theta(config: dict[str, Any]) -> float:
    """From `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    bases = []
    if config.get("rope_theta") is not None:
        bases = [config_fields.positive(config, _CONFIG, "rope_theta")]
    for key in ("rope_parameters", "rope_scaling"):
        rope = config_fields.section(config, _CONFIG, key)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UserError(
                f"config.json sets {key} of type {kind!r}; this decoder has only "
                "'default' (unscaled) rotary positions"
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                f"config.json sets {key}.partial_rotary_factor="
                f"{rope['partial_rotary_factor']!r}; this decoder rotates whole heads"
            )
        if rope.get("rope_theta") is not None:
            bases.append(
                config_fields.positive(rope, f"{_CONFIG}: {key}", "rope_theta")
            )
            if bases[0] != bases[-1]:
                raise UserError(
                    f"config.json sets rope_theta={bases[0]} and {key}.rope_theta="
                    f"{bases[-1]}; keep the one the weights were trained with"
                )
    return bases[0] if bases else 10000.0


def _read_template(folder: str) -> ChatTemplate | None:
    name = "tokenizer_config.json"
    config = tokenizer.read_json_if_there(os.path.join(folder, name))
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        source = tokenizer.read_text(path)
    elif isinstance(config.get("chat_template"), list):
        source = _default_template(config["chat_template"], name)
    else:
        source = config_fields.text(config, name, "chat_template")
    if not source:
        return None
    bos, eos = (config_fields.token(config, name, f"{k}_token") for k in ("bos", "eos"))
    return ChatTemplate(source, bos, eos)


def _default_template(named: list[Any], what: str) -> str:
    """Of several named templates the one called "default"; "" without it."""
    for entry in named:
        if not isinstance(entry, dict):
            raise UserError(
                f"{what} has chat_template={named!r}, whose entries are not all json "
                "objects with name and template; restore the file that came with the "
                "model"
            )
        if entry.get("name") == "default":
            return config_fields.text(entry, f"{what}: chat_template", "template")
    return ""


def _open(path: str) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a whole safetensors file ({error}); copy or download it "
            "again"
        ) from error
