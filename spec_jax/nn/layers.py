"""Norm, rotary embedding and the gated MLP, as functions of their weights.

float32 statistics whatever the activations' dtype (training notes B1, B2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x_XD, scale_D, eps: float):
    """RMSNorm over the last axis; statistics in float32."""
    x32_XD = x_XD.astype(jnp.float32)
    mean_X1 = jnp.mean(x32_XD * x32_XD, -1, keepdims=True)
    normed_XD = (x32_XD * jax.lax.rsqrt(mean_X1 + eps)).astype(x_XD.dtype)
    return normed_XD * scale_D.astype(x_XD.dtype)


def rotary_tables(positions_X, head_dim: int, theta: float):
    """cos and sin `[..., C/2]` in float32 for half-split rotary embedding."""
    exponent_C = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    freq_C = 1.0 / (theta**exponent_C)
    angle_XC = positions_X[..., None].astype(jnp.float32) * freq_C
    return jnp.cos(angle_XC), jnp.sin(angle_XC)


def rotate(x_XHC, cos_XC, sin_XC):
    """Half-split (NeoX) rotation; tables broadcast over the head axis H."""
    first, second = jnp.split(x_XHC, 2, -1)
    cos = cos_XC[..., None, :].astype(x_XHC.dtype)
    sin = sin_XC[..., None, :].astype(x_XHC.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def gated_mlp(x_XD, gate_up_D2F, down_FD):
    """SwiGLU with fused gate and up projections."""
    both_X2F = jnp.einsum("...d,dtf->...tf", x_XD, gate_up_D2F)
    hidden_XF = jax.nn.silu(both_X2F[..., 0, :]) * both_X2F[..., 1, :]
    return hidden_XF @ down_FD


def split_qkv(fused_XGPC):
    """`[..., G, H/G + 2, C]` -> q `[..., G, H/G, C]`, k and v `[..., G, C]`."""
    return fused_XGPC[..., :-2, :], fused_XGPC[..., -2, :], fused_XGPC[..., -1, :]
