"""A target's weights as read from disk, arranged as the forward wants them.

Every file format maps its names to one list of weights, stored `[out, in]` as
Hugging Face and GGUF do (`weight_shapes`); `arrange` fuses, transposes and
stacks them into the parameter tree that `TargetSpec` describes, and
`export_llama_names` is its inverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.target.chat import ChatTemplate
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What one file or folder holds.

    Attributes:
      spec: the model's sizes.
      params: `{"params": tree}` of float32 numpy arrays, see `TargetSpec`.
      tokenizer: the model's tokenizer, or None where the folder has none.
      chat_template: the model's chat template, or None.
    """

    spec: TargetSpec
    params: Tree = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = dataclasses.field(repr=False)
    chat_template: ChatTemplate | None = dataclasses.field(repr=False)


def weight_shapes(spec: TargetSpec) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> `(out, in)` shape of every weight of a target."""
    d, f, c = spec.hidden_size, spec.mlp_size, spec.head_dim
    h, g = spec.num_heads, spec.num_kv_heads
    layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (h * c, d),
        "self_attn.k_proj": (g * c, d),
        "self_attn.v_proj": (g * c, d),
        "self_attn.o_proj": (d, h * c),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    if spec.qk_norm:
        layer |= {"self_attn.q_norm": (c,), "self_attn.k_norm": (c,)}
    shapes = {"model.embed_tokens.weight": (spec.vocab_size, d)}
    for n in range(spec.num_layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{n}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (d,)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, d)
    return shapes


def tree_shapes(spec: TargetSpec) -> dict[str, tuple[int, ...]]:
    """Path in the parameter tree -> shape, as `TargetSpec`'s module states."""
    n, d, f, c = spec.num_layers, spec.hidden_size, spec.mlp_size, spec.head_dim
    h, g, v = spec.num_heads, spec.num_kv_heads, spec.vocab_size
    shapes = {
        "embed": (v, d),
        "head": (d, v),
        "final_norm": (d,),
        "layers/attn_norm": (n, d),
        "layers/qkv": (n, d, g, spec.group + 2, c),
        "layers/out": (n, h * c, d),
        "layers/mlp_norm": (n, d),
        "layers/gate_up": (n, d, 2, f),
        "layers/down": (n, f, d),
    }
    if spec.qk_norm:
        shapes |= {"layers/q_norm": (n, c), "layers/k_norm": (n, c)}
    return shapes


def check_layers(spec: TargetSpec, num_tensors: int, where: str) -> None:
    """Refuses more layers than the weights can hold, before anything counts them.

    Raises:
      UserError: there are fewer tensors than layers.
    """
    if spec.num_layers > num_tensors:
        raise UserError(
            f"{where} has {num_tensors} tensors, too few for its {spec.num_layers} "
            "layers; weights and configuration are not of one model"
        )


def check_names(
    names: Iterable[str], expected: Iterable[str], where: str, fix: str
) -> None:
    """Refuses a checkpoint whose tensor names differ from the expected ones.

    Raises:
      UserError: names the missing and the surplus tensors (the first few).
    """
    names, expected = set(names), set(expected)
    for what, some in (
        ("lacks", sorted(expected - names)),
        ("has unknown", sorted(names - expected)),
    ):
        if some:
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            raise UserError(
                f"{where} {what} tensor(s) {', '.join(some[:3])}{more}; {fix}"
            )


def check_shape(
    name: str, shape: tuple[int, ...], expected: tuple[int, ...], where: str
) -> None:
    """Refuses a tensor of another shape than the configuration implies.

    Raises:
      UserError: names the tensor and both shapes.
    """
    if tuple(shape) != tuple(expected):
        raise UserError(
            f"{where}: tensor {name} has shape {tuple(shape)} where the sizes of the "
            f"model give {tuple(expected)}; weights and configuration are not of one "
            "model"
        )


def arrange(get: Callable[[str], np.ndarray], spec: TargetSpec) -> Tree:
    """Fuses, transposes and stacks a target's weights.

    Args:
      get: returns the weight of a name in `weight_shapes`, `(out, in)`, any
        float dtype. It is called once per name.
      spec: the model's sizes.

    Returns:
      `{"params": tree}`, float32, C-contiguous.
    """
    tree = {path: np.empty(s, np.float32) for path, s in tree_shapes(spec).items()}
    g, group, c = spec.num_kv_heads, spec.group, spec.head_dim
    embed_VD = get("model.embed_tokens.weight")
    tree["embed"][...] = embed_VD
    tree["head"][...] = (embed_VD if spec.tied else get("lm_head.weight")).T
    tree["final_norm"][...] = get("model.norm.weight")
    for n in range(spec.num_layers):

        def layer(name: str, n: int = n) -> np.ndarray:
            return get(f"model.layers.{n}.{name}.weight")

        def heads(name: str, per_group: int, layer=layer) -> np.ndarray:
            """[G * per_group * C, D] -> [D, G, per_group, C]."""
            return layer(name).reshape(g, per_group, c, -1).transpose(3, 0, 1, 2)

        qkv_DGxC = tree["layers/qkv"][n]
        qkv_DGxC[:, :, :group] = heads("self_attn.q_proj", group)
        qkv_DGxC[:, :, group : group + 1] = heads("self_attn.k_proj", 1)
        qkv_DGxC[:, :, group + 1 :] = heads("self_attn.v_proj", 1)
        tree["layers/out"][n] = layer("self_attn.o_proj").T
        tree["layers/gate_up"][n, :, 0] = layer("mlp.gate_proj").T
        tree["layers/gate_up"][n, :, 1] = layer("mlp.up_proj").T
        tree["layers/down"][n] = layer("mlp.down_proj").T
        tree["layers/attn_norm"][n] = layer("input_layernorm")
        tree["layers/mlp_norm"][n] = layer("post_attention_layernorm")
        if spec.qk_norm:
            tree["layers/q_norm"][n] = layer("self_attn.q_norm")
            tree["layers/k_norm"][n] = layer("self_attn.k_norm")
    return nest(tree)


def export_llama_names(params: Tree, spec: TargetSpec) -> dict[str, np.ndarray]:
    """Inverse of `arrange`: Hugging Face names, `(out, in)`, C-contiguous.

    Args:
      params: `{"params": tree}`.
      spec: the model's sizes; a tied target has no `lm_head.weight`.
    """
    tree = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    d, group = spec.hidden_size, spec.group
    weights = {
        "model.embed_tokens.weight": tree["embed"],
        "model.norm.weight": tree["final_norm"],
    }
    if not spec.tied:
        weights["lm_head.weight"] = tree["head"].T
    for n in range(spec.num_layers):
        qkv_GxCD = tree["layers/qkv"][n].transpose(1, 2, 3, 0)
        layer = {
            "input_layernorm": tree["layers/attn_norm"][n],
            "self_attn.q_proj": qkv_GxCD[:, :group].reshape(-1, d),
            "self_attn.k_proj": qkv_GxCD[:, group].reshape(-1, d),
            "self_attn.v_proj": qkv_GxCD[:, group + 1].reshape(-1, d),
            "self_attn.o_proj": tree["layers/out"][n].T,
            "post_attention_layernorm": tree["layers/mlp_norm"][n],
            "mlp.gate_proj": tree["layers/gate_up"][n, :, 0].T,
            "mlp.up_proj": tree["layers/gate_up"][n, :, 1].T,
            "mlp.down_proj": tree["layers/down"][n].T,
        }
        if spec.qk_norm:
            layer["self_attn.q_norm"] = tree["layers/q_norm"][n]
            layer["self_attn.k_norm"] = tree["layers/k_norm"][n]
        for name, weight in layer.items():
            weights[f"model.layers.{n}.{name}.weight"] = weight
    return {name: np.ascontiguousarray(weight) for name, weight in weights.items()}


def nest(flat: dict[str, Any]) -> Tree:
    """`{"layers/qkv": x}` -> `{"params": {"layers": {"qkv": x}}}`."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return {"params": tree}


def flatten(params: Tree) -> dict[str, Any]:
    """Inverse of `nest`."""
    flat: dict[str, Any] = {}

    def walk(node: Tree, prefix: str) -> None:
        for name, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}/")
            else:
                flat[prefix + name] = value

    walk(params["params"], "")
    return flat
