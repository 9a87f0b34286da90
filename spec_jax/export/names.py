"""Our fused `[in, out]` DFlash tree and the public tensor names.

Public tensors are `[out, in]`, one per projection (drafter contracts, section
4.2). Ours are fused per GEMM:

    fc                   [L*D, Dd]             fc.weight [Dd, L*D]
    hidden_norm, norm    [Dd]
    layers_i/input_norm  [Dd]                  layers.i.input_layernorm
    layers_i/qkv         [Dd, G, H/G + 2, C]   self_attn.{q,k,v}_proj
    layers_i/q_norm      [C]                   self_attn.q_norm (k_norm alike)
    layers_i/out         [H*C, Dd]             self_attn.o_proj
    layers_i/mlp_norm    [Dd]                  post_attention_layernorm
    layers_i/gate_up     [Dd, 2, F]            mlp.{gate,up}_proj
    layers_i/down        [F, Dd]               mlp.down_proj

Query head h of a public tensor is head (h // (H/G), h % (H/G)) here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError

D2T = "d2t"
T2D = "t2d"

_LAYER_NAMES = {
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that the names and shapes follow from.

    Attributes:
      num_layers: draft layers.
      hidden_size: Dd.
      feature_width: L * D, width of the concatenated context features.
      num_heads: H.
      num_kv_heads: G.
      head_dim: C.
      mlp_size: F.
    """

    num_layers: int
    hidden_size: int
    feature_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int

    @property
    def group(self) -> int:
        """Query heads per KV head, H / G."""
        return self.num_heads // self.num_kv_heads


def sizes_of(params: Mapping[str, Any]) -> Sizes:
    """Sizes of a DFlash tree of arrays or of shapes (`jax.eval_shape`).

    Raises:
      UserError: the tree is not a DFlash tree with per-head q/k norms.
    """
    tree = params["params"]
    num_layers = sum(name.startswith("layers_") for name in tree)
    expected = {"fc", "hidden_norm", "norm"}
    expected |= {f"layers_{i}" for i in range(num_layers)}
    if set(tree) != expected or not num_layers:
        raise UserError(
            f"drafter parameters {sorted(tree)} are not a DFlash tree "
            f"({sorted(expected)}); only DFlash drafters have this folder form"
        )
    first = tree["layers_0"]
    if "q_norm" not in first or "k_norm" not in first:
        raise UserError(
            "drafter.options.qk_norm is False, and the public DFlash classes always "
            "normalise queries and keys; train with qk_norm=True to export"
        )
    _, num_kv_heads, fused, head_dim = first["qkv"].shape
    feature_width, hidden_size = tree["fc"].shape
    return Sizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        feature_width=feature_width,
        num_heads=num_kv_heads * (fused - 2),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_size=first["gate_up"].shape[-1],
    )


def public_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Public name -> shape of every weight, without the vocabulary map."""
    d, c, f = sizes.hidden_size, sizes.head_dim, sizes.mlp_size
    q, kv = sizes.num_heads * c, sizes.num_kv_heads * c
    layer = {
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "self_attn.q_norm": (c,),
        "self_attn.k_norm": (c,),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    shapes = {
        "fc.weight": (d, sizes.feature_width),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for i in range(sizes.num_layers):
        for name, shape in layer.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
    return shapes


def strip_prefix(names: Iterable[str]) -> dict[str, str]:
    """Plain name -> stored name; a `model.` before every weight is optional.

    The vocabulary map never has the prefix.
    """
    names = list(names)
    weights = [name for name in names if name not in (D2T, T2D)]
    prefix = "model." if all(name.startswith("model.") for name in weights) else ""
    return {name if name in (D2T, T2D) else name[len(prefix) :]: name for name in names}


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], sizes: Sizes, where: str
) -> None:
    """Refuses a set of weights that is not exactly the public one.

    Args:
      shapes: plain name -> shape of the weights (no vocabulary map).
      sizes: what the configuration says.
      where: names the folder or file in the error.

    Raises:
      UserError: a tensor is missing, surplus or misshaped; it names them.
    """
    expected = public_shapes(sizes)
    for verb, fix, some in (
        (
            "lacks",
            "export the drafter again",
            sorted(set(expected) - set(shapes)),
        ),
        (
            "has unknown",
            "only plain DFlash weights are read here",
            sorted(set(shapes) - set(expected)),
        ),
    ):
        if some:
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            raise UserError(f"{where} {verb} tensor {', '.join(some[:3])}{more}; {fix}")
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise UserError(
                f"{where}: tensor {name} has shape {tuple(shapes[name])} where the "
                f"configuration gives {shape}; weights and config.json are not of one "
                "drafter"
            )


def to_public(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Splits and transposes a DFlash tree into public tensors.

    Args:
      params: `{"params": tree}` of arrays; dtypes are kept.

    Returns:
      Public name -> C-contiguous array.

    Raises:
      UserError: see `sizes_of`; or the tree holds a leaf the folder has no name
        for.
    """
    sizes = sizes_of(params)
    tree = params["params"]
    weights = {
        "fc.weight": np.asarray(tree["fc"]).T,
        "hidden_norm.weight": np.asarray(tree["hidden_norm"]),
        "norm.weight": np.asarray(tree["norm"]),
    }
    group, d = sizes.group, sizes.hidden_size
    for i in range(sizes.num_layers):
        layer = {name: np.asarray(leaf) for name, leaf in tree[f"layers_{i}"].items()}
        qkv_GxCD = layer.pop("qkv").transpose(1, 2, 3, 0)
        gate_up_D2F = layer.pop("gate_up")
        public = {
            "input_layernorm": layer.pop("input_norm"),
            "post_attention_layernorm": layer.pop("mlp_norm"),
            "self_attn.q_proj": qkv_GxCD[:, :group].reshape(-1, d),
            "self_attn.k_proj": qkv_GxCD[:, group].reshape(-1, d),
            "self_attn.v_proj": qkv_GxCD[:, group + 1].reshape(-1, d),
            "self_attn.o_proj": layer.pop("out").T,
            "self_attn.q_norm": layer.pop("q_norm"),
            "self_attn.k_norm": layer.pop("k_norm"),
            "mlp.gate_proj": gate_up_D2F[:, 0].T,
            "mlp.up_proj": gate_up_D2F[:, 1].T,
            "mlp.down_proj": layer.pop("down").T,
        }
        if layer:
            raise UserError(
                f"drafter parameter layers_{i}/{sorted(layer)[0]} has no public DFlash "
                "name; leave it out of an exported drafter"
            )
        for name, weight in public.items():
            weights[f"layers.{i}.{name}.weight"] = weight
    check_tensors(
        {name: weight.shape for name, weight in weights.items()},
        sizes,
        "the drafter's parameters",
    )
    return {name: np.ascontiguousarray(weight) for name, weight in weights.items()}


def from_public(
    weights: Mapping[str, np.ndarray], sizes: Sizes, where: str = "the weights"
) -> dict[str, Any]:
    """Inverse of `to_public`: fuses public tensors into a DFlash tree.

    Args:
      weights: plain public name -> array, without the vocabulary map.
      sizes: what the configuration says.
      where: names the folder or file in errors.

    Returns:
      `{"params": tree}` of numpy arrays in the dtype they came in.

    Raises:
      UserError: see `check_tensors`.
    """
    check_tensors({name: w.shape for name, w in weights.items()}, sizes, where)
    g, c, group = sizes.num_kv_heads, sizes.head_dim, sizes.group

    def heads(weight: np.ndarray, per_group: int) -> np.ndarray:
        """[G * per_group * C, Dd] -> [Dd, G, per_group, C]."""
        return weight.reshape(g, per_group, c, -1).transpose(3, 0, 1, 2)

    tree: dict[str, Any] = {
        "fc": weights["fc.weight"].T,
        "hidden_norm": weights["hidden_norm.weight"],
        "norm": weights["norm.weight"],
    }
    for i in range(sizes.num_layers):
        w = {name: weights[f"layers.{i}.{name}.weight"] for name in _LAYER_NAMES}
        tree[f"layers_{i}"] = {
            "input_norm": w["input_layernorm"],
            "qkv": np.concatenate(
                [
                    heads(w["self_attn.q_proj"], group),
                    heads(w["self_attn.k_proj"], 1),
                    heads(w["self_attn.v_proj"], 1),
                ],
                2,
            ),
            "q_norm": w["self_attn.q_norm"],
            "k_norm": w["self_attn.k_norm"],
            "out": w["self_attn.o_proj"].T,
            "mlp_norm": w["post_attention_layernorm"],
            "gate_up": np.stack([w["mlp.gate_proj"].T, w["mlp.up_proj"].T], 1),
            "down": w["mlp.down_proj"].T,
        }
    return {"params": _contiguous(tree)}


def _contiguous(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _contiguous(leaf) for name, leaf in tree.items()}
    return np.ascontiguousarray(tree)
