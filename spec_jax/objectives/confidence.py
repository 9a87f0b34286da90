"""The confidence head's term and what its calibration is read from."""

from __future__ import annotations

import jax
import jax.numpy as jnp

NUM_BINS = 10  # equal parts of [0, 1]


def bce(logit_XM, target_XM):
    """`-t log s - (1 - t) log (1 - s)`, s = sigmoid(logit); t gets no gradient."""
    target_XM = jax.lax.stop_gradient(target_XM)
    return jax.nn.softplus(logit_XM) - target_XM * logit_XM


def confidence_metrics(logit_XM, overlap_XM, mask_XM):
    """How far the confidence is from the acceptance it stands for.

    Args:
      logit_XM: log-odds.
      overlap_XM: what the confidence should be: A (see `terms`).
      mask_XM: 1.0 where both mean something.

    Returns:
      name -> (sum, count): `confidence_abs_error`, `confidence_bias` (confidence
      minus overlap), `confidence_cumprod_bias` (the same of the products up to each
      draft: survival); and for every draft and bin of the confidence, `[M, bins]`:
      `calibration_confidence`, `calibration_accept` (means in a bin) and
      `calibration_share` (the bin's share of that draft's rows).
    """
    logit_XM, overlap_XM = jax.lax.stop_gradient((logit_XM, overlap_XM))
    prob_XM = jnp.where(mask_XM > 0, jax.nn.sigmoid(logit_XM), 0.0)
    error_XM = prob_XM - overlap_XM
    run_XM = jnp.cumprod(mask_XM, axis=1)
    survival_XM = jnp.cumprod(prob_XM, axis=1) - jnp.cumprod(overlap_XM, axis=1)
    bin_XM = jnp.clip((prob_XM * NUM_BINS).astype(jnp.int32), 0, NUM_BINS - 1)
    in_bin = (bin_XM[..., None] == jnp.arange(NUM_BINS)) * mask_XM[..., None]
    count = in_bin.sum(0)  # [M, bins]
    total = jnp.broadcast_to(mask_XM.sum(0)[:, None], count.shape)
    return {
        "confidence_abs_error": ((mask_XM * jnp.abs(error_XM)).sum(), mask_XM.sum()),
        "confidence_bias": ((mask_XM * error_XM).sum(), mask_XM.sum()),
        "confidence_cumprod_bias": ((run_XM * survival_XM).sum(), run_XM.sum()),
        "calibration_confidence": ((in_bin * prob_XM[..., None]).sum(0), count),
        "calibration_accept": ((in_bin * overlap_XM[..., None]).sum(0), count),
        "calibration_share": (count, total),
    }
