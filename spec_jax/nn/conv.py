"""Grouped dynamic convolution around the sublayers of a draft block (DFlash 2).

Both sublayers of a layer are wrapped (drafter contracts, section 6.3):

    y  = norm(x)                     the sublayer's normed input
    o  = sublayer(conv(y, side 0))
    x += conv(o, side 1)

    conv(z)_j[c] = sum over taps t of (base[side, t, c] + delta_j[side, t, g(c)])
                   * z_{j-t}[c],     tap 0 is the row itself

`delta = y @ kernel_projection` is read from the row of `y` before any
convolution, for both sides; g(c) is the channel's contiguous group. Rows before
the block's first are zeros: a tap never crosses into another block, nor into
the context, whose keys and values are not convolved. A fresh convolution is the
identity.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn

from spec_jax.nn import block

SIDES = 2


class ConvWeights(nn.Module):
    """`layers_<i>/{attention, mlp}/{base_kernel, kernel_projection}`, float32.

    Attributes:
      num_layers: draft layers.
      hidden_size: D.
      taps: rows each output reads, itself included.
      group: contiguous channels that share a dynamic coefficient; divides D.
    """

    num_layers: int
    hidden_size: int
    taps: int
    group: int

    @nn.compact
    def __call__(self):
        for index in range(self.num_layers):
            _LayerConvs(
                self.hidden_size, self.taps, self.group, name=f"layers_{index}"
            )()


class _LayerConvs(nn.Module):
    hidden_size: int
    taps: int
    group: int

    @nn.compact
    def __call__(self):
        for name in (block.ATTENTION, block.MLP):
            _Kernel(self.hidden_size, self.taps, self.group, name=name)()


class _Kernel(nn.Module):
    hidden_size: int
    taps: int
    group: int

    @nn.compact
    def __call__(self):
        d = self.hidden_size

        def identity(key, shape, dtype):
            del key
            return jnp.zeros(shape, dtype).at[:, 0].set(1)

        self.param("base_kernel", identity, (SIDES, self.taps, d), jnp.float32)
        self.param(
            "kernel_projection",
            nn.initializers.zeros_init(),
            (d, SIDES, self.taps, d // self.group),
            jnp.float32,
        )


def convolve(z_XQD, base_TD, delta_XQTG):
    """One side's convolution of a block's rows.

    Args:
      z_XQD: the rows of whole blocks.
      base_TD: static coefficients, T taps.
      delta_XQTG: dynamic coefficients of each row, tap and channel group.
    """
    size_q, size_d = z_XQD.shape[-2:]
    taps, groups = delta_XQTG.shape[-2:]
    lead = [(0, 0)] * (z_XQD.ndim - 2)
    total_XQD = jnp.zeros_like(z_XQD)
    for tap in range(min(taps, size_q)):
        earlier_XQD = jnp.pad(z_XQD, [*lead, (tap, 0), (0, 0)])[..., :size_q, :]
        delta_XQD = jnp.repeat(
            delta_XQTG[..., tap, :], size_d // groups, -1, total_repeat_length=size_d
        )
        total_XQD += (base_TD[tap] + delta_XQD) * earlier_XQD
    return total_XQD


def around(weights):
    """The `around` of `block.run_block` that convolves every sublayer.

    Args:
      weights: the tree of `ConvWeights`.
    """

    def wrap(index: int, name: str, sublayer, y_XQD):
        w = weights[f"layers_{index}"][name]
        delta = jnp.einsum("...qd,dstg->...sqtg", y_XQD, w["kernel_projection"])
        before, after = delta[..., 0, :, :, :], delta[..., 1, :, :, :]
        base = w["base_kernel"]
        return convolve(sublayer(convolve(y_XQD, base[0], before)), base[1], after)

    return wrap
