"""Log-probabilities of emitted tokens: the target's own, before the transform.

One meaning for every token of an answer, whether prefill drew it, a draft was
accepted, or it is a correction or bonus: the log-softmax of the target's raw
logits in the row that predicts it. Temperature, filters, penalties and bias do
not enter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.core.errors import UserError
from spec_jax.core.shapes import bind


@struct.dataclass
class Logprobs:
    """Natural-log probabilities of a round's tokens and their alternatives.

    Attributes:
      chosen_BT: of the token itself.
      top_ids_BTN: ids of the N likeliest tokens, best first (N may be 0).
      top_BTN: their log-probabilities.
    """

    chosen_BT: jnp.ndarray  # [B, T] float32
    top_ids_BTN: jnp.ndarray  # [B, T, N] int32
    top_BTN: jnp.ndarray  # [B, T, N] float32


def of_tokens(logits_BWV, tokens_BT, wanted_B, num_top: int, row_BT=None) -> Logprobs:
    """Log-probabilities where somebody wants them, else zeros.

    Args:
      logits_BWV: raw float32 target logits.
      tokens_BT: the tokens; negative ones are padding.
      wanted_B: [B] bool; with nobody, nothing is computed.
      num_top: N, alternatives of each token (static).
      row_BT: row that predicts each token; None: row t predicts token t.

    Raises:
      UserError: more alternatives than there are tokens.
    """
    if num_top > logits_BWV.shape[-1]:
        raise UserError(
            f"top_logprobs={num_top} is more than the target's "
            f"{logits_BWV.shape[-1]} tokens; ask for fewer"
        )
    bind(logits_BWV=logits_BWV, tokens_BT=tokens_BT, wanted_B=wanted_B)
    shape = tokens_BT.shape

    def asked(_):
        logits_BTV = logits_BWV
        if row_BT is not None:
            logits_BTV = jnp.take_along_axis(logits_BWV, row_BT[..., None], 1)
        norm_BT = jax.nn.logsumexp(logits_BTV, -1)
        ids_BT1 = jnp.maximum(tokens_BT, 0)[..., None]
        chosen_BT = jnp.take_along_axis(logits_BTV, ids_BT1, -1)[..., 0] - norm_BT
        if not num_top:
            return nobody(None).replace(chosen_BT=chosen_BT)
        top_BTN, ids_BTN = jax.lax.top_k(logits_BTV, num_top)
        return Logprobs(
            chosen_BT, ids_BTN.astype(jnp.int32), top_BTN - norm_BT[..., None]
        )

    def nobody(_):
        return Logprobs(
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, num_top), jnp.int32),
            jnp.zeros((*shape, num_top), jnp.float32),
        )

    return jax.lax.cond(wanted_B.any(), asked, nobody, None)
