"""The draft block backbone: a few layers that read context and fill a block.

DFlash, DSpark and DFlash 2 compose these functions. Linen holds the parameters
(`BlockWeights`); everything else is a function of the tree it makes (keys that
a drafter adds beside them are not read here):

    fc               [L*D, D]     concatenated features -> drafter width
    hidden_norm      [D]          norm of the context rows
    norm             [D]          final norm of the block rows
    layers_<i>/      input_norm [D], qkv [D, G, H/G + 2, C], q_norm [C], k_norm [C],
                     out [H*C, D], mlp_norm [D], gate_up [D, 2, F], down [F, D]

There is no separate context projection: context keys and values come from the
same k and v columns of `qkv`, with `k_norm` but without `input_norm` (drafter
contracts, section 4.3). The two attention paths, serving (`run_block`, over a
slot cache) and training (`run_blocks`, over sampled anchors), share every other
line.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from spec_jax.core import masks
from spec_jax.core.shapes import bind
from spec_jax.nn import attention, layers

_LOW = -1e30
ATTENTION, MLP = "attention", "mlp"


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What one layer's rows see.

    Attributes:
      is_causal: rows see only themselves and earlier rows of their block.
      window: keys further behind the query than this are hidden; None: no limit.
    """

    is_causal: bool = False
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the backbone.

    Attributes:
      num_features: L, captured target layers.
      hidden_size: D, the target's width and the drafter's.
      mlp_size: F.
      num_heads: H.
      num_kv_heads: G; divides H.
      head_dim: C, even.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every norm.
      qk_norm: norm each head's queries and keys.
      kinds: one per layer.
    """

    num_features: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    kinds: tuple[LayerKind, ...]

    @property
    def group(self) -> int:
        """Query heads per KV head, H / G."""
        return self.num_heads // self.num_kv_heads


class LayerWeights(nn.Module):
    """One layer's parameters, float32."""

    sizes: BlockSizes

    @nn.compact
    def __call__(self):
        s = self.sizes
        d, c, f = s.hidden_size, s.head_dim, s.mlp_size
        init, ones = nn.initializers.normal(0.02), nn.initializers.ones_init()
        shapes = {
            "input_norm": (ones, (d,)),
            "qkv": (init, (d, s.num_kv_heads, s.group + 2, c)),
            "out": (init, (s.num_heads * c, d)),
            "mlp_norm": (ones, (d,)),
            "gate_up": (init, (d, 2, f)),
            "down": (init, (f, d)),
        }
        if s.qk_norm:
            shapes |= {"q_norm": (ones, (c,)), "k_norm": (ones, (c,))}
        for name, (fn, shape) in shapes.items():
            self.param(name, fn, shape, jnp.float32)


class BlockWeights(nn.Module):
    """The backbone's parameters, float32 (the module's docstring has the tree)."""

    sizes: BlockSizes

    @nn.compact
    def __call__(self):
        s = self.sizes
        d = s.hidden_size
        init, ones = nn.initializers.normal(0.02), nn.initializers.ones_init()
        self.param("fc", init, (s.num_features * d, d), jnp.float32)
        self.param("hidden_norm", ones, (d,), jnp.float32)
        self.param("norm", ones, (d,), jnp.float32)
        for index in range(len(s.kinds)):
            LayerWeights(s, name=f"layers_{index}")()


def context_rows(weights, sizes: BlockSizes, features_XLD):
    """Context rows `c [..., D]`: `hidden_norm(fc(concatenated features))`."""
    flat = features_XLD.reshape(*features_XLD.shape[:-2], -1)
    return layers.rms_norm(
        flat.astype(jnp.float32) @ weights["fc"], weights["hidden_norm"], sizes.norm_eps
    )


def context_kv(weights, sizes: BlockSizes, context_BTD, positions_BT):
    """Every layer's keys and values of context rows.

    Args:
      weights: the backbone's tree.
      sizes: its sizes.
      context_BTD: rows from `context_rows`.
      positions_BT: absolute positions.

    Returns:
      k, v: lists with one `[B, T, G, C]` per layer; keys are rotated.
    """
    cos, sin = layers.rotary_tables(positions_BT, sizes.head_dim, sizes.rope_theta)
    keys, values = [], []
    for index in range(len(sizes.kinds)):
        w = weights[f"layers_{index}"]
        fused_BTGXC = jnp.einsum("btd,dgxc->btgxc", context_BTD, w["qkv"][:, :, -2:])
        k_BTGC, v_BTGC = fused_BTGXC[..., 0, :], fused_BTGXC[..., 1, :]
        if sizes.qk_norm:
            k_BTGC = layers.rms_norm(k_BTGC, w["k_norm"], sizes.norm_eps)
        keys.append(layers.rotate(k_BTGC, cos, sin))
        values.append(v_BTGC)
    return keys, values


def block_visible(num_rows: int, kind: LayerKind):
    """In-block visibility `[Q, Q]` of one layer: order and window.

    A window that is not causal is symmetric: it also bounds the rows ahead.
    """
    seen_QQ = masks.block_rows(num_rows, is_causal=kind.is_causal)
    row = jnp.arange(num_rows)
    for query, key in ((row[:, None], row[None]), (row[None], row[:, None])):
        seen_QQ &= masks.in_window(query, key, kind.window)
    return seen_QQ


def plain(index: int, name: str, sublayer, y_XD):
    """Runs a sublayer on its normed input and nothing around it."""
    del index, name
    return sublayer(y_XD)


def _mix(w, sizes: BlockSizes, tables, attend, y_XD):
    """The attention sublayer; `attend(q, k, v)` mixes the rows."""
    cos, sin = tables
    fused = jnp.einsum("...d,dgpc->...gpc", y_XD, w["qkv"])
    q_XGPC, k_XGC, v_XGC = layers.split_qkv(fused)
    if sizes.qk_norm:
        q_XGPC = layers.rms_norm(q_XGPC, w["q_norm"], sizes.norm_eps)
        k_XGC = layers.rms_norm(k_XGC, w["k_norm"], sizes.norm_eps)
    q_XGPC = layers.rotate(q_XGPC, cos[..., None, :], sin[..., None, :])
    k_XGC = layers.rotate(k_XGC, cos, sin)
    mixed = attend(q_XGPC, k_XGC, v_XGC)
    return mixed.reshape(*y_XD.shape[:-1], -1) @ w["out"]


def _run_layers(weights, sizes: BlockSizes, x_XD, positions_X, attend, around):
    """The layers over rows `[..., D]`; `attend(index, q, k, v)` mixes them."""
    tables = layers.rotary_tables(positions_X, sizes.head_dim, sizes.rope_theta)
    for index in range(len(sizes.kinds)):
        w = weights[f"layers_{index}"]
        mix = functools.partial(
            _mix, w, sizes, tables, functools.partial(attend, index)
        )
        y_XD = layers.rms_norm(x_XD, w["input_norm"], sizes.norm_eps)
        x_XD = x_XD + around(index, ATTENTION, mix, y_XD)
        mlp = functools.partial(
            layers.gated_mlp, gate_up_D2F=w["gate_up"], down_FD=w["down"]
        )
        y_XD = layers.rms_norm(x_XD, w["mlp_norm"], sizes.norm_eps)
        x_XD = x_XD + around(index, MLP, mlp, y_XD)
    return layers.rms_norm(x_XD, weights["norm"], sizes.norm_eps)


def run_block(
    weights, sizes: BlockSizes, x_BQD, positions_BQ, cache, history_B, around=plain
):
    """One block per request over its cached context (serving).

    Args:
      weights: the backbone's tree.
      sizes: its sizes.
      x_BQD: embedded block rows.
      positions_BQ: absolute positions.
      cache: keys and values of the context rows, one plane per layer.
      history_B: context rows each request may see.
      around: `(layer, ATTENTION or MLP, sublayer, y) -> rows`, what is added to
        the residual given the sublayer and its normed input `[..., Q, D]`.

    Returns:
      [B, Q, D] rows after the final norm.
    """
    size_q = x_BQD.shape[1]

    def attend(index, q, k, v):
        kind = sizes.kinds[index]
        return attention.attend(
            q,
            k,
            v,
            block_visible(size_q, kind)[None],
            cache.k_NBGAC,
            cache.v_NBGAC,
            index,
            history_B,
            query_pos_BT=positions_BQ,
            window=kind.window,
        )

    return _run_layers(weights, sizes, x_BQD, positions_BQ, attend, around)


def run_blocks(
    weights,
    sizes: BlockSizes,
    x_BNQD,
    positions_BNQ,
    keys,
    values,
    anchors_BN,
    around=plain,
):
    """N blocks per sequence, each over the context before its anchor (training).

    Args:
      weights: the backbone's tree.
      sizes: its sizes.
      x_BNQD: embedded block rows.
      positions_BNQ: absolute positions.
      keys: one `[B, S, G, C]` per layer, rotated; values likewise.
      values: see `keys`; finite everywhere.
      anchors_BN: a block sees the context at positions below its anchor.
      around: see `run_block`.

    Returns:
      [B, N, Q, D] rows after the final norm.
    """

    def attend(index, q, k, v):
        return attend_blocks(
            q,
            k,
            v,
            keys[index],
            values[index],
            anchors_BN,
            positions_BNQ,
            sizes.kinds[index],
        )

    return _run_layers(weights, sizes, x_BNQD, positions_BNQ, attend, around)


def attend_blocks(
    q_BNQGPC,
    k_BNQGC,
    v_BNQGC,
    context_k_BSGC,
    context_v_BSGC,
    anchors_BN,
    positions_BNQ,
    kind: LayerKind,
):
    """Attention of many blocks over one sequence's context and themselves.

    One softmax, in float32, over two score arrays: `[.., N*Q*P, S]` for the
    context and `[.., N, Q*P, Q]` inside each block. No `[N*Q, S + N*Q]` mask is
    built, so other blocks are invisible by construction.

    Returns:
      [B, N, Q, G, P, C]; a row that sees nothing yields zeros.
    """
    sizes = bind(
        q_BNQGPC=q_BNQGPC,
        k_BNQGC=k_BNQGC,
        context_k_BSGC=context_k_BSGC,
        anchors_BN=anchors_BN,
        positions_BNQ=positions_BNQ,
    )
    b, n, q, g, p, c, s = (sizes[letter] for letter in "BNQGPCS")
    q_BGNQPC = jnp.transpose(q_BNQGPC, (0, 3, 1, 2, 4, 5)) * c**-0.5
    key_S = jnp.arange(s)
    seen_BNQS = masks.before_anchor(key_S, anchors_BN[..., None, None])
    if kind.window is not None:
        seen_BNQS &= masks.in_window(positions_BNQ[..., None], key_S, kind.window)
    seen = seen_BNQS[:, None, :, :, None]  # [B, 1, N, Q or 1, 1, S]
    own_seen = block_visible(q, kind)[:, None]  # [Q, 1, Q]

    past = jnp.einsum(
        "bgxc,bsgc->bgxs", q_BGNQPC.reshape(b, g, n * q * p, c), context_k_BSGC
    ).reshape(b, g, n, q, p, s)
    own = jnp.einsum("bgnqpc,bnkgc->bgnqpk", q_BGNQPC, k_BNQGC)
    past = jnp.where(seen, past.astype(jnp.float32), _LOW)
    own = jnp.where(own_seen, own.astype(jnp.float32), _LOW)
    top = jnp.maximum(past.max(-1), own.max(-1))
    top = jax.lax.stop_gradient(top)[..., None]
    past = jnp.where(seen, jnp.exp(past - top), 0.0)
    own = jnp.where(own_seen, jnp.exp(own - top), 0.0)
    total = past.sum(-1) + own.sum(-1)
    out = jnp.einsum(
        "bgxs,bsgc->bgxc", past.reshape(b, g, n * q * p, s), context_v_BSGC
    ).reshape(b, g, n, q, p, c)
    out += jnp.einsum("bgnqpk,bnkgc->bgnqpc", own, v_BNQGC)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return jnp.transpose(out, (0, 2, 3, 1, 4, 5)).astype(q_BNQGPC.dtype)
