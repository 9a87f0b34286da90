"""The term against the token that follows: CE and its LK variants.

With a hard label the target's law is one-hot, so the acceptance of a draft is
q's probability of the label: `A = q(label)`, `-log A` is CE, and `1 - A` is the
total variation distance (drafter contracts, section 4.4).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.objectives.records import ObjectiveOptions


def label_rows(logits_XU, norm_X, columns_X):
    """Cross-entropy and top-1 hit of each row.

    Args:
      logits_XU: float32.
      norm_X: their logsumexp.
      columns_X: the label's column.

    Returns:
      ce_X: -log softmax at the label, float32.
      hit_X: 1.0 where the label alone has the highest logit (a tie is a miss, so
        that a head fed zeros does not look perfect).
    """
    ids_U = jnp.arange(logits_XU.shape[1])
    # A masked sum, not a gather: its gradient is a select, not a scatter.
    label_X = jnp.where(ids_U == columns_X[:, None], logits_XU, 0.0).sum(-1)
    rank_X = (logits_XU >= label_X[:, None]).sum(-1)
    return norm_X - label_X, (rank_X == 1).astype(jnp.float32)


def row_losses(ce_XM, options: ObjectiveOptions):
    """The "ce" term of each draft from its CE, `[X, M]`."""
    if options.kind in ("ce", "dpace", "lk_alpha"):
        return ce_XM
    accept_XM = jnp.exp(-ce_XM)
    if options.kind == "lk_tv":
        return 1.0 - accept_XM
    return lambda_mix(ce_XM, accept_XM, options)


def lambda_mix(divergence_XM, accept_XM, options: ObjectiveOptions):
    """`w * divergence + (1 - w) (1 - A)`, `w = scale * exp(-decay * A)` detached."""
    mix_XM = options.kl_scale * jnp.exp(
        -options.kl_decay * jax.lax.stop_gradient(accept_XM)
    )
    return mix_XM * divergence_XM + (1.0 - mix_XM) * (1.0 - accept_XM)
