"""DFlash 2's term: choose among the strict unary top K after the true token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.core.errors import UserError
from spec_jax.nn.selector import scores
from spec_jax.objectives.records import ObjectiveOptions


def selector_rows(logits_XU, query_XE, successor_UE, size_k, columns_X):
    """Cross-entropy of the label among each row's candidates.

    The candidates are the K highest logits, the lower column first where two are
    equal; a label that is not among them is never put there.

    Args:
      logits_XU: unary scores.
      query_XE: the row's query after its true predecessor.
      successor_UE: codes of the columns.
      size_k: K.
      columns_X: the label's column.

    Returns:
      `selector_ce`; `selector_covered`: 1.0 where the label is a candidate (the
      other two mean nothing elsewhere); `selector_hit`: 1.0 where it alone has the
      highest score.
    """
    _, at_XK = jax.lax.top_k(jax.lax.stop_gradient(logits_XU), size_k)
    unary_XK = jnp.take_along_axis(logits_XU, at_XK, axis=1)
    code_XKE = jnp.take(successor_UE, at_XK, axis=0)
    score_XK = scores(unary_XK, query_XE, code_XKE).astype(jnp.float32)
    is_label_XK = at_XK == columns_X[:, None]
    label_X = jnp.where(is_label_XK, score_XK, 0.0).sum(-1)
    rank_X = (score_XK >= label_X[:, None]).sum(-1)
    return {
        "selector_ce": jax.nn.logsumexp(score_XK, -1) - label_X,
        "selector_covered": is_label_XK.any(-1).astype(jnp.float32),
        "selector_hit": (rank_X == 1).astype(jnp.float32),
    }


def ramp(options: ObjectiveOptions, progress):
    """How much of the selector's weight counts now, 0 to 1.

    Args:
      options: `selector_warmup` and `selector_ramp`.
      progress: share of training done, 0 to 1, or None where nobody knows.

    Raises:
      UserError: a warm-up or a ramp without progress.
    """
    warmup, length = options.selector_warmup, options.selector_ramp
    if warmup == 0 and length == 0:
        return 1.0
    if progress is None:
        name, value = (
            ("selector_warmup", warmup) if warmup > 0 else ("selector_ramp", length)
        )
        raise UserError(
            f"objective.{name}={value} needs the progress of training; pass "
            f"`progress` to the loss, or set objective.{name}=0"
        )
    since = jnp.asarray(progress, jnp.float32) - warmup
    if length == 0:
        return (since >= 0).astype(jnp.float32)
    return jnp.clip(since / length, 0.0, 1.0)
