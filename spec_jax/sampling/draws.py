"""Draws by inverse CDF: one uniform a row, two short cumulative sums.

The vocabulary is cut into chunks; the draw finds its chunk among the chunks'
masses, then its token inside it. One uniform per row keeps the streams of
`core.keys` small and a seeded request reproducible.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.core.proposal import TokenLaw
from spec_jax.core.shapes import bind

_CHUNK = 256


def inverse_cdf(mass_XV, uniform_X):
    """Index `[...]` int32 drawn with probability mass / sum(mass).

    Args:
      mass_XV: non-negative, not necessarily normalised; an index with zero mass
        is never returned (unless all are zero, which gives 0).
      uniform_X: in [0, 1).
    """
    size = mass_XV.shape[-1]
    chunk = min(_CHUNK, size)
    chunks = -(-size // chunk)
    lead = mass_XV.shape[:-1]
    pad = [(0, 0)] * len(lead) + [(0, chunks * chunk - size)]
    mass_XKC = jnp.pad(mass_XV, pad).reshape(*lead, chunks, chunk)
    per_chunk_XK = mass_XKC.sum(-1)
    upto_XK = jnp.cumsum(per_chunk_XK, -1)
    goal_X = uniform_X * upto_XK[..., -1]
    # First chunk whose cumulative mass exceeds the goal and that has any mass.
    hit_XK = (upto_XK > goal_X[..., None]) & (per_chunk_XK > 0)
    which_X = jnp.where(
        hit_XK.any(-1), jnp.argmax(hit_XK, -1), _last_true(per_chunk_XK > 0)
    )
    before_X = (
        jnp.take_along_axis(upto_XK, which_X[..., None], -1)[..., 0]
        - jnp.take_along_axis(per_chunk_XK, which_X[..., None], -1)[..., 0]
    )
    inside_XC = jnp.take_along_axis(mass_XKC, which_X[..., None, None], -2)[..., 0, :]
    upto_XC = jnp.cumsum(inside_XC, -1)
    hit_XC = (upto_XC > (goal_X - before_X)[..., None]) & (inside_XC > 0)
    offset_X = jnp.where(
        hit_XC.any(-1), jnp.argmax(hit_XC, -1), _last_true(inside_XC > 0)
    )
    return (which_X * chunk + offset_X).astype(jnp.int32)


def _last_true(mask_XK):
    size = mask_XK.shape[-1]
    last = size - 1 - jnp.argmax(mask_XK[..., ::-1], -1)
    return jnp.where(mask_XK.any(-1), last, 0)


def draw(law: TokenLaw, uniform_BT):
    """One id per row `[B, T]`, in the law's own vocabulary.

    One-hot rows return their id whatever the uniform; a batch of one-hot rows
    computes nothing else.
    """
    bind(logits_BTV=law.logits_BTV, uniform_BT=uniform_BT)

    def sampled(_):
        scaled_BTV = law.logits_BTV * law.inv_temperature_B[:, None, None]
        mass_BTV = jnp.where(
            scaled_BTV >= law.floor_BT[..., None],
            jnp.exp(scaled_BTV - law.log_norm_BT[..., None]),
            0.0,
        )
        return inverse_cdf(mass_BTV, uniform_BT)

    ids_BT = jax.lax.cond(
        (law.one_hot_BT < 0).any(), sampled, lambda _: law.one_hot_BT, operand=None
    )
    return jnp.where(law.one_hot_BT >= 0, law.one_hot_BT, ids_BT).astype(jnp.int32)
