"""The frozen target: a linen decoder for Llama, SmolLM2 and Qwen3.

The cache is read by the layers and written by one scatter after them (a cache
that the layers also write is copied at each). Projections are fused per GEMM.
Features are the residual stream at layer outputs, written into an
`[L, B, T, D]` carry; the last hidden state is returned after the final norm.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from spec_jax.core import verify_layout
from spec_jax.core.shapes import bind
from spec_jax.core.verify_layout import Packing
from spec_jax.nn import attention, layers
from spec_jax.target.cache import KVCache, init_cache
from spec_jax.target.spec import TargetSpec


@struct.dataclass
class TargetOutput:
    """One forward's results.

    Attributes:
      hidden_BTD: last hidden state after the final norm.
      features_BTLD: layer outputs at the tapped ids (L may be 0).
      cache: the cache with this forward's rows written at `history_B`, but those
        that are not finite.
    """

    hidden_BTD: jnp.ndarray  # [B, T, D]
    features_BTLD: jnp.ndarray  # [B, T, L, D]
    cache: KVCache


def _layer_shapes(s: TargetSpec):
    """Initialiser and shape of one layer's weights, by name."""
    d, c = s.hidden_size, s.head_dim
    init = nn.initializers.normal(0.02)
    ones = nn.initializers.ones_init()
    shapes = {
        "attn_norm": (ones, (d,)),
        "qkv": (init, (d, s.num_kv_heads, s.group + 2, c)),
        "out": (init, (s.num_heads * c, d)),
        "mlp_norm": (ones, (d,)),
        "gate_up": (init, (d, 2, s.mlp_size)),
        "down": (init, (s.mlp_size, d)),
    }
    if s.qk_norm:
        shapes |= {"q_norm": (ones, (c,)), "k_norm": (ones, (c,))}
    return shapes


class LayerStack(nn.Module):
    """The layers' weights: stacked on a leading axis N, or a tree per layer.

    Stacked layers are scanned: one layer is compiled. On a CPU the scan's slice
    of each weight is a copy that doubles a step's traffic, so `unstack_layers`
    keeps them apart there and the loop is unrolled.
    """

    spec: TargetSpec
    apart: bool = False
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        n = self.spec.num_layers
        shapes = _layer_shapes(self.spec)
        if self.apart:
            self.weights = [
                {
                    name: self.param(f"{i}.{name}", fn, shape, self.dtype)
                    for name, (fn, shape) in shapes.items()
                }
                for i in range(n)
            ]
        else:
            self.weights = {
                name: self.param(name, fn, (n, *shape), self.dtype)
                for name, (fn, shape) in shapes.items()
            }

    def run(self, layer_step, carry, planes):
        """Runs `layer_step(carry, (weights, index, plane))` over the layers."""
        if not self.apart:
            indices = jnp.arange(len(planes))
            scanned = (self.weights, indices, jnp.asarray(planes))
            return jax.lax.scan(layer_step, carry, scanned)
        rows = []
        for index, weights in enumerate(self.weights):
            carry, row = layer_step(carry, (weights, index, int(planes[index])))
            rows.append(row)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *rows)


def is_apart(params) -> bool:
    """Whether the layers are kept apart (see `LayerStack`)."""
    return "qkv" not in params["params"]["layers"]


def unstack_layers(params):
    """The same parameters with the layers apart: the fast layout on a CPU."""
    tree = params["params"]
    stacked = tree["layers"]
    count = next(iter(stacked.values())).shape[0]
    apart = {
        f"{i}.{name}": value[i] for i in range(count) for name, value in stacked.items()
    }
    return {"params": {**tree, "layers": apart}}


class Decoder(nn.Module):
    """Parameters and forward of one decoder; see `TargetSpec` for the tree."""

    spec: TargetSpec
    apart: bool = False
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        s = self.spec
        init = nn.initializers.normal(0.02)
        d, v = s.hidden_size, s.vocab_size
        self.embed = self.param("embed", init, (v, d), self.dtype)
        self.head = self.param("head", init, (d, v), self.dtype)
        ones = nn.initializers.ones_init()
        self.final_norm = self.param("final_norm", ones, (d,), self.dtype)
        self.layers = LayerStack(s, self.apart, self.dtype)

    def __call__(
        self,
        tokens_BT,
        positions_BT,
        visible_BTT,
        cache,
        history_B,
        taps,
        packing: Packing | None = None,
    ):
        """Runs T rows per request; see `forward`."""
        s = self.spec
        bind(tokens_BT=tokens_BT, positions_BT=positions_BT)
        if packing is None:
            bind(tokens_BT=tokens_BT, history_B=history_B)
        size_b, size_t = tokens_BT.shape
        x_BTD = jnp.take(self.embed, tokens_BT, axis=0)
        cos, sin = layers.rotary_tables(positions_BT, s.head_dim, s.rope_theta)
        # Layer -> plane of the feature carry; layers nobody taps share a spare.
        plane_N = np.full(s.num_layers, len(taps), np.int32)
        for plane, layer_id in enumerate(taps):
            plane_N[layer_id] = plane
        planes = len(taps) + 1 if taps else 0
        features = jnp.zeros((planes, size_b, size_t, s.hidden_size), x_BTD.dtype)

        def layer_step(carry, scanned):
            x_BTD, features = carry
            w, index, plane = scanned
            y_BTD = layers.rms_norm(x_BTD, w["attn_norm"], s.norm_eps)
            fused = jnp.einsum("btd,dgpc->btgpc", y_BTD, w["qkv"])
            q, k, v = layers.split_qkv(fused)
            if s.qk_norm:
                q = layers.rms_norm(q, w["q_norm"], s.norm_eps)
                k = layers.rms_norm(k, w["k_norm"], s.norm_eps)
            q = layers.rotate(q, cos[:, :, None], sin[:, :, None])
            k = layers.rotate(k, cos, sin)
            mixed = _attend(q, k, v, visible_BTT, cache, index, history_B, packing)
            x_BTD = x_BTD + mixed.reshape(size_b, size_t, -1) @ w["out"]
            y_BTD = layers.rms_norm(x_BTD, w["mlp_norm"], s.norm_eps)
            x_BTD = x_BTD + layers.gated_mlp(y_BTD, w["gate_up"], w["down"])
            if not isinstance(plane, int) or plane < len(taps):
                features = _put_plane(features, x_BTD, plane)
            return (x_BTD, features), (k, v)

        (x_BTD, features), (k_NBTGC, v_NBTGC) = self.layers.run(
            layer_step, (x_BTD, features), plane_N
        )
        hidden_BTD = layers.rms_norm(x_BTD, self.final_norm, s.norm_eps)
        if packing is None:
            at_BT = history_B[:, None] + jnp.arange(size_t)[None]
            slot_BT = jnp.arange(size_b)[:, None]
        else:
            # Padding has no request: it is written past the allocation.
            start_T = jnp.take(
                history_B, packing.request_T, mode="fill", fill_value=cache.allocated
            )
            at_BT, slot_BT = (start_T + packing.row_T)[None], packing.request_T[None]
        # A row that is not finite is not stored. The condition also orders the
        # write after every read, without which XLA copies the donated cache.
        finite_BT = jnp.isfinite(hidden_BTD).all(-1)
        at_BT = jnp.where(finite_BT, at_BT, cache.allocated)
        return TargetOutput(
            hidden_BTD=hidden_BTD,
            features_BTLD=jnp.moveaxis(features[: len(taps)], 0, 2),
            cache=KVCache(
                attention.put_rows(cache.k_NBGAC, k_NBTGC, slot_BT, at_BT),
                attention.put_rows(cache.v_NBGAC, v_NBTGC, slot_BT, at_BT),
            ),
        )


def _attend(q, k, v, visible_BTT, cache, index, history_B, packing):
    """`attention.attend` over each request's own rows, which may come packed.

    A row whose key or value is not finite breaks the rows that see it and no other:
    its value is zero, which no weight of zero turns into NaN, and its key is NaN.
    """
    is_sound = (jnp.isfinite(k) & jnp.isfinite(v)).all((-1, -2), keepdims=True)
    k, v = jnp.where(is_sound, k, jnp.nan), jnp.where(is_sound, v, 0)
    rows, count_B = [q, k, v], None
    if packing is not None:
        # Rows outside the plan are zeros that no row may see.
        rows = [verify_layout.unpacked(packing, x[0]) for x in rows]
        count_B = packing.count_B
    mixed = attention.attend(
        *rows,
        visible_BTT,
        cache.k_NBGAC,
        cache.v_NBGAC,
        index,
        history_B,
        count_B=count_B,
    )
    if packing is None:
        return mixed
    return verify_layout.packed(packing, mixed)[None]


def _put_plane(features_LBTD, x_BTD, plane):
    if features_LBTD.shape[0] == 0:
        return features_LBTD
    return jax.lax.dynamic_update_index_in_dim(features_LBTD, x_BTD, plane, 0)


@functools.cache
def decoder(spec: TargetSpec, apart: bool = False) -> Decoder:
    """The one module of a spec and weight layout."""
    return Decoder(spec, apart)


def init_params(spec: TargetSpec, key):
    """Random parameters of this spec (tests and the tiny recipes)."""
    tokens_BT = jnp.zeros((1, 1), jnp.int32)
    return decoder(spec).init(
        key,
        tokens_BT,
        tokens_BT,
        jnp.ones((1, 1, 1), bool),
        init_cache(spec, 1, 2),
        jnp.zeros((1,), jnp.int32),
        (),
    )


def forward(
    spec: TargetSpec,
    params,
    cache: KVCache,
    tokens_BT,
    positions_BT,
    visible_BTT,
    history_B,
    taps: tuple[int, ...] = (),
    packing: Packing | None = None,
) -> TargetOutput:
    """Runs T rows of every slot over its committed history.

    Packed rows of several requests run as one batch row: everything is dense
    but attention, which sees each request's own rows, and the cache write.

    Args:
      spec: sizes.
      params: the tree of `TargetSpec`.
      cache: KV; rows `history_B ..+ T` are overwritten. It may have more slots
        than there are requests: those behind are left alone.
      tokens_BT: input ids.
      positions_BT: absolute positions (history + depth).
      visible_BTT: [B or 1, T, T] in-block visibility (causal for a chain).
      history_B: committed rows of each slot.
      taps: layer outputs to return, ascending.
      packing: where the rows of each request lie; tokens and positions are then
        `[1, T]`, `visible_BTT` covers a window `[B or 1, W, W]`, and only rows
        that count are written.

    Returns:
      TargetOutput (`[1, T, ...]` where packed).
    """
    output: Any = decoder(spec, is_apart(params)).apply(
        params,
        tokens_BT,
        positions_BT,
        visible_BTT,
        cache,
        history_B,
        taps,
        packing,
    )
    return output


def logits(params, hidden_XD):
    """float32 logits `[..., V]` of post-norm hidden states."""
    head_DV = params["params"]["head"]
    return jnp.matmul(hidden_XD, head_DV, preferred_element_type=jnp.float32)
