"""How much each draft position counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def decay_weights(num_draft: int, gamma: float):
    """`exp(-(j - 1) / gamma)` for drafts j = 1..M, `[M]`; gamma 0 is flat."""
    step_M = jnp.arange(num_draft, dtype=jnp.float32)
    return jnp.ones_like(step_M) if gamma == 0 else jnp.exp(-step_M / gamma)


def dpace_weights(prob_XM, valid_XM, alpha: float):
    """D-PACE: what draft j carries is every accepted length that needs it.

    `s_j = (1 - alpha) p_j + alpha`; `prefix_j = s_1 ... s_j`;
    `weight_j = sum over i >= j of prefix_i * valid_i`, detached, and 0 where
    `valid_j` is 0 (drafter contracts, section 4.4).

    Args:
      prob_XM: probability of each label.
      valid_XM: 1.0 where the position is supervised.
      alpha: floor of a step's survival.
    """
    survive_XM = (1.0 - alpha) * jax.lax.stop_gradient(prob_XM) + alpha
    prefix_XM = jnp.cumprod(survive_XM, axis=1) * valid_XM
    return jnp.cumsum(prefix_XM[:, ::-1], axis=1)[:, ::-1] * valid_XM
