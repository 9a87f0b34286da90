"""Terms against the target's whole law p, rebuilt from its last hidden rows.

All of them are float32 and come from logarithms (a difference of two nearly
equal probabilities loses the digits that the gradient is made of):

    A = sum_v min(p_v, q_v) = exp(logsumexp(min(log p, log q)))

p sums to one: over the full vocabulary, or, renormalised, over the draft
vocabulary. With the mass p keeps outside the sum counted, `sum |p - q| = 2 (1 - A)`:
total variation is `1 - A`. Of a renormalised p, A leaves the mass outside the draft
vocabulary out and is more than the probability of acceptance (see `terms`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.objectives.hard_labels import lambda_mix
from spec_jax.objectives.records import ObjectiveOptions


def teacher_law(
    teacher_XD, head_DU, full_head_DV=None, target_ids_U=None, mass: str = "full"
):
    """log p over the draft vocabulary, and the target's favourite token.

    Args:
      teacher_XD: the target's post-norm hidden rows.
      head_DU: the target's head columns of the draft vocabulary.
      full_head_DV: the whole head, where its law is to be known; None: p is the
        softmax over `head_DU`.
      target_ids_U: target id of each column; needed with `full_head_DV`.
      mass: with `full_head_DV`, "full": p is the full vocabulary's softmax; "draft":
        p is renormalised over the draft vocabulary.

    Returns:
      log_p_XU: float32, without gradient.
      best_X: the likeliest token: a target id with `full_head_DV`, else a column.
    """
    head = head_DU if full_head_DV is None else full_head_DV
    logits = jax.lax.stop_gradient(
        jnp.matmul(teacher_XD, head, preferred_element_type=jnp.float32)
    ).astype(jnp.float32)
    best_X = jnp.argmax(logits, -1)
    if full_head_DV is not None and mass == "draft":
        logits = jnp.take(logits, target_ids_U, axis=-1)
    log_p = logits - jax.nn.logsumexp(logits, -1, keepdims=True)
    if full_head_DV is not None and mass == "full":
        log_p = jnp.take(log_p, target_ids_U, axis=-1)
    return log_p, best_X


def teacher_rows(log_p_XU, log_q_XU, terms) -> dict[str, jnp.ndarray]:
    """Sums over the draft vocabulary, one per row, as the active terms need.

    Returns:
      `log_overlap`: log A, of p as it is given; and where a term asks for them
      `soft_ce`: `-sum p log q`; `kl`: `sum p (log p - log q)`.
    """
    rows = {"log_overlap": jax.nn.logsumexp(jnp.minimum(log_p_XU, log_q_XU), axis=-1)}
    if "soft_ce" in terms or "kl" in terms:
        p_XU = jnp.exp(log_p_XU)
        if "soft_ce" in terms:
            rows["soft_ce"] = -(p_XU * log_q_XU).sum(-1)
        if "kl" in terms:
            rows["kl"] = (p_XU * (log_p_XU - log_q_XU)).sum(-1)
    return rows


def lk_losses(log_overlap_XM, kl_XM, options: ObjectiveOptions):
    """The "lk" term: `-log A`, a mix of KL and `1 - A`, or `1 - A`.

    Args:
      log_overlap_XM: log A.
      kl_XM: None unless the kind is "lambda".
      options: `lk_kind`, `kl_scale` and `kl_decay` (drafter contracts, 3.4).
    """
    if options.lk_kind == "alpha":
        return -log_overlap_XM
    overlap_XM = jnp.exp(log_overlap_XM)
    if options.lk_kind == "tv":
        return 1.0 - overlap_XM
    return lambda_mix(kl_XM, overlap_XM, options)


def l1_losses(log_overlap_XM):
    """`sum |p - q|`, twice the total variation, over the vocabulary p is a law of:
    the full one, or the draft vocabulary it was renormalised over.
    """
    return -2.0 * jnp.expm1(log_overlap_XM)
