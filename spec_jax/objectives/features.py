"""EAGLE's term: the predicted feature against the target's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def smooth_l1(feature_XMD, target_XMD):
    """Mean over D of `d^2 / 2` where |d| < 1, else `|d| - 1/2`; `[X, M]`.

    No gradient enters the target (drafter contracts, section 1.4).
    """
    apart = feature_XMD.astype(jnp.float32) - jax.lax.stop_gradient(target_XMD)
    size = jnp.abs(apart)
    return jnp.where(size < 1.0, 0.5 * apart * apart, size - 0.5).mean(-1)
