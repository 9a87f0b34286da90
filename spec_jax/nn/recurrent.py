"""One decoder layer whose output is fed back as its next input (EAGLE).

A row's input is a token and a feature, fused by the drafter; the layer keeps a
KV cache of its own. Only the last row's output is ever read, so rows that are
only seen need their keys and values and nothing else: serving runs one query
per absorbed piece, training one query per start and step.

Parameters of the layer, all `[in, out]`; I is the fused input's width:

    qkv [I, G, H/G + 2, C], out [H*C, D], mlp_norm [D], gate_up [D, 2, F], down [F, D]
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from spec_jax.core import masks
from spec_jax.core.shapes import bind
from spec_jax.nn import layers

_LOW = -1e30


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """Sizes of the layer.

    Attributes:
      input_size: I, width of the fused input (D for EAGLE-1, 2 D for EAGLE-3).
      hidden_size: D.
      mlp_size: F.
      num_heads: H.
      num_kv_heads: G; divides H.
      head_dim: C, even.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every norm.
    """

    input_size: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float

    @property
    def group(self) -> int:
        """Query heads per KV head, H / G."""
        return self.num_heads // self.num_kv_heads


class LayerWeights(nn.Module):
    """The layer's parameters, float32."""

    sizes: LayerSizes

    @nn.compact
    def __call__(self):
        s = self.sizes
        d, c, f = s.hidden_size, s.head_dim, s.mlp_size
        init, ones = nn.initializers.normal(0.02), nn.initializers.ones_init()
        shapes = {
            "qkv": (init, (s.input_size, s.num_kv_heads, s.group + 2, c)),
            "out": (init, (s.num_heads * c, d)),
            "mlp_norm": (ones, (d,)),
            "gate_up": (init, (d, 2, f)),
            "down": (init, (f, d)),
        }
        for name, (fn, shape) in shapes.items():
            self.param(name, fn, shape, jnp.float32)


def queries(weights, sizes: LayerSizes, input_BTI, positions_BT):
    """Rotated queries `[B, T, G, H/G, C]` of fused rows."""
    cos, sin = layers.rotary_tables(positions_BT, sizes.head_dim, sizes.rope_theta)
    q_BTGPC = jnp.einsum("bti,igpc->btgpc", input_BTI, weights["qkv"][:, :, :-2])
    return layers.rotate(q_BTGPC, cos[..., None, :], sin[..., None, :])


def keys_values(weights, sizes: LayerSizes, input_BTI, positions_BT):
    """Rotated keys and values, `[B, T, G, C]` each, of fused rows."""
    cos, sin = layers.rotary_tables(positions_BT, sizes.head_dim, sizes.rope_theta)
    both_BTGXC = jnp.einsum("bti,igxc->btgxc", input_BTI, weights["qkv"][:, :, -2:])
    return layers.rotate(both_BTGXC[..., 0, :], cos, sin), both_BTGXC[..., 1, :]


def finish(weights, sizes: LayerSizes, residual_BTD, mixed_BTGPC):
    """The layer's output `[B, T, D]` from its residual and attention."""
    lead = residual_BTD.shape[:-1]
    x_BTD = residual_BTD + mixed_BTGPC.reshape(*lead, -1) @ weights["out"]
    y_BTD = layers.rms_norm(x_BTD, weights["mlp_norm"], sizes.norm_eps)
    return x_BTD + layers.gated_mlp(y_BTD, weights["gate_up"], weights["down"])


def attend_rollouts(
    q_BNGPC, prefix_k_BSGC, prefix_v_BSGC, own_k_BNKGC, own_v_BNKGC, starts_BN
):
    """Attention of N rollouts of one sequence, each at its own step K (training).

    One softmax, in float32, over the target's rows up to the start and the K
    rows the rollout made: scores are `[B, G, N, P, S + K]`, so the rows of other
    rollouts are invisible by construction. Nothing here depends on another
    start, so a rollout costs K rows and not K rows of every column.

    Args:
      q_BNGPC: rotated queries of step K.
      prefix_k_BSGC: rotated keys of the target's rows (step 0).
      prefix_v_BSGC: their values; finite everywhere.
      own_k_BNKGC: keys of steps 1..K, the query's own last; K may be 0.
      own_v_BNKGC: their values.
      starts_BN: column of each rollout.

    Returns:
      [B, N, G, P, C].
    """
    sizes = bind(
        q_BNGPC=q_BNGPC,
        prefix_k_BSGC=prefix_k_BSGC,
        own_k_BNKGC=own_k_BNKGC,
        starts_BN=starts_BN,
    )
    size_s, step = sizes["S"], sizes["K"]
    q_BNGPC = q_BNGPC * sizes["C"] ** -0.5
    at_BN1 = starts_BN[..., None]
    seen_BNX = jnp.concatenate(
        [
            masks.rollout(at_BN1, step, jnp.arange(size_s), 0),
            masks.rollout(at_BN1, step, at_BN1, 1 + jnp.arange(step)),
        ],
        -1,
    )
    seen = seen_BNX[:, None, :, None]  # [B, 1, N, 1, S + K]
    scores = jnp.concatenate(
        [
            jnp.einsum("bngpc,bsgc->bgnps", q_BNGPC, prefix_k_BSGC),
            jnp.einsum("bngpc,bnkgc->bgnpk", q_BNGPC, own_k_BNKGC),
        ],
        -1,
    ).astype(jnp.float32)
    scores = jnp.where(seen, scores, _LOW)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    mass = jnp.where(seen, jnp.exp(scores - top), 0.0)
    mass = mass / mass.sum(-1, keepdims=True)  # a start always sees its own row
    out = jnp.einsum("bgnps,bsgc->bngpc", mass[..., :size_s], prefix_v_BSGC)
    out += jnp.einsum("bgnpk,bnkgc->bngpc", mass[..., size_s:], own_v_BNKGC)
    return out.astype(q_BNGPC.dtype)
