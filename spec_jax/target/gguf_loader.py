"""Reads a target from a GGUF file (arch `llama` or `qwen3`).

Weights are dequantised to float32 by the `gguf` package. A converter to GGUF
reorders the rows of q and k of arch `llama` into interleaved rotary pairs; they
are put back here (`unpermute`), since the forward rotates halves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.core.json_fields import is_number
from spec_jax.target import checkpoint, tokenizer
from spec_jax.target.chat import ChatTemplate
from spec_jax.target.spec import TargetSpec

# Control tokens that end a generation although no metadata key names them.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "</s>",
)

_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Metadata (after the arch prefix) that would change the forward, and the values
# under which it does not.
_REFUSED_KEYS = {
    "rope.scaling.type": (None, "none"),
    "attention.sliding_window": (None, 0),
    "expert_count": (None, 0),
    "attention.causal": (None, True),
    "attn_logit_softcapping": (None, 0.0),
    "final_logit_softcapping": (None, 0.0),
    "logit_scale": (None, 0.0, 1.0),
    "embedding_scale": (None, 0.0, 1.0),
    "residual_scale": (None, 0.0, 1.0),
    "attention.scale": (None, 0.0),
}


def load_gguf(path: str | os.PathLike[str]) -> checkpoint.Checkpoint:
    """Reads one GGUF file.

    Args:
      path: the file.

    Returns:
      The checkpoint, weights dequantised to float32.

    Raises:
      UserError: not a GGUF file, an architecture or a setting that the forward
        does not have, a tensor type that cannot be dequantised, or tensors that
        do not fit the metadata.
    """
    path = os.fspath(path)
    where = f"GGUF file {path!r}"
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise UserError(
            f"{where} cannot be read ({error}); it is not a GGUF file or not a whole "
            "one, so copy or download it again"
        ) from error

    def field(key: str) -> Any:
        value = reader.fields.get(key)
        return None if value is None else value.contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    text = tokenizer.from_gguf(field)
    spec = _read_spec(field, tensors, text, path)
    if text.vocab_size > spec.vocab_size:
        raise UserError(
            f"{where} has {text.vocab_size} tokens but embeddings for "
            f"{spec.vocab_size}; the file is damaged"
        )
    checkpoint.check_layers(spec, len(tensors), where)
    shapes = checkpoint.weight_shapes(spec)
    names = {name: _gguf_name(name) for name in shapes}
    checkpoint.check_names(
        tensors, names.values(), where, "convert a plain llama or qwen3 model again"
    )

    def get(name: str) -> np.ndarray:
        weight = _dequantise(tensors[names[name]], where)
        checkpoint.check_shape(names[name], weight.shape, shapes[name], where)
        if spec.family == "llama" and name.endswith("q_proj.weight"):
            weight = unpermute(weight, spec.num_heads)
        if spec.family == "llama" and name.endswith("k_proj.weight"):
            weight = unpermute(weight, spec.num_kv_heads)
        return weight

    params = checkpoint.arrange(get, spec)
    return checkpoint.Checkpoint(spec, params, text, _read_template(field, text))


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of interleaved rotary pairs -> rows of rotary halves.

    Args:
      weight: `(num_heads * C, in)` as arch `llama` stores q (its heads) and k
        (its KV heads).
      num_heads: heads in `weight`.
    """
    half = weight.shape[0] // num_heads // 2
    paired = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _read_spec(
    field: Callable[[str], Any],
    tensors: dict[str, Any],
    text: tokenizer.Tokenizer,
    path: str,
) -> TargetSpec:
    arch = field("general.architecture")
    if arch not in ("llama", "qwen3"):
        raise UserError(
            f"GGUF file {path!r} has general.architecture {arch!r}; this decoder "
            "covers 'llama' and 'qwen3'"
        )
    for key, allowed in _REFUSED_KEYS.items():
        value = field(f"{arch}.{key}")
        if value not in allowed:
            raise UserError(
                f"GGUF file {path!r} sets {arch}.{key}={value!r}, which this decoder "
                "does not do; use a model without it"
            )

    def need(key: str) -> Any:
        value = field(f"{arch}.{key}")
        if value is None:
            raise UserError(
                f"GGUF file {path!r} lacks the metadata key {arch}.{key}; convert the "
                "model again"
            )
        if isinstance(value, list):
            raise UserError(
                f"GGUF file {path!r} sets {arch}.{key} per layer, which this decoder "
                "does not do; use a model with equal layers"
            )
        return value

    def size(key: str) -> int:
        value = need(key)
        if type(value) is not int or value < 1:
            raise UserError(
                f"GGUF file {path!r} sets {arch}.{key}={value!r}, which is not a whole "
                "number, 1 or more; convert the model again"
            )
        return value

    def number(key: str, value: Any) -> float:
        if not is_number(value) or value <= 0:
            raise UserError(
                f"GGUF file {path!r} sets {arch}.{key}={value!r}, which is not a "
                "number above 0; convert the model again"
            )
        return _shortest(value)

    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = max(1, hidden // heads)
    for key in ("rope.dimension_count", "attention.key_length"):
        if field(f"{arch}.{key}"):
            head_dim = size(key)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = field(f"{arch}.{key}")
        if value not in (None, head_dim):
            raise UserError(
                f"GGUF file {path!r} sets {arch}.{key}={value} for heads of "
                f"{head_dim} channels, which this decoder does not do; use a model "
                "where they are equal"
            )
    if "token_embd.weight" not in tensors:
        raise UserError(
            f"GGUF file {path!r} lacks tensor(s) token_embd.weight; convert the model "
            "again"
        )
    epsilon = "attention.layer_norm_rms_epsilon"
    return TargetSpec(
        name=os.path.basename(path).removesuffix(".gguf"),
        family=arch,
        num_layers=size("block_count"),
        hidden_size=hidden,
        mlp_size=size("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=size("attention.head_count_kv"),
        head_dim=head_dim,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        rope_theta=number("rope.freq_base", field(f"{arch}.rope.freq_base") or 10000.0),
        norm_eps=number(epsilon, need(epsilon)),
        qk_norm=arch == "qwen3",
        tied="output.weight" not in tensors,
        max_context=size("context_length"),
        eos_ids=_end_ids(field, text),
        pad_id=_pad_id(field, text),
    )


def _end_ids(field: Callable[[str], Any], text: tokenizer.Tokenizer) -> tuple[int, ...]:
    ids = [text.eos]
    ids += [field(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    special = dict(text.special_tokens)
    ids += [special.get(token) for token in END_TOKENS]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _pad_id(field: Callable[[str], Any], text: tokenizer.Tokenizer) -> int:
    pad = field("tokenizer.ggml.padding_token_id")
    return int(next(i for i in (pad, text.eos, 0) if i is not None))


def _read_template(
    field: Callable[[str], Any], text: tokenizer.Tokenizer
) -> ChatTemplate | None:
    source = field("tokenizer.chat_template")
    if not source:
        return None
    return ChatTemplate(
        source=source,
        bos_token="" if text.bos is None else text.token_of(text.bos),
        eos_token="" if text.eos is None else text.token_of(text.eos),
    )


def _dequantise(tensor: Any, where: str) -> np.ndarray:
    """`(out, in)` float32."""
    try:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UserError(
            f"{where}: tensor {tensor.name} has type {tensor.tensor_type.name}, which "
            "cannot be dequantised here; quantise the model to Q8_0, Q4_1, F16 or F32"
        ) from error
    return np.asarray(weight, np.float32)


def _shortest(value: float) -> float:
    """The decimal that a float32 was written as: 9.99999975e-06 -> 1e-05."""
    return float(str(np.float32(value)))
