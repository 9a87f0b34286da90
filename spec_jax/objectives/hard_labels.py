"""Losses against the token that follows: CE, D-PACE and the LK variants.

With a hard label the target's law is one-hot, so the acceptance of a draft is
q's probability of the label: `A = q(label)`, `-log A` is CE, and `1 - A` is the
total variation distance (drafter contracts, section 4.4).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.core.shapes import bind
from spec_jax.drafters.base import Frozen, TrainOutputs
from spec_jax.objectives import vocabulary, weights
from spec_jax.objectives.records import LossSums, ObjectiveOptions


def row_losses(ce_XM, options: ObjectiveOptions):
    """The differentiated loss of each draft from its CE, `[X, M]`."""
    if options.kind in ("ce", "dpace", "lk_alpha"):
        return ce_XM
    accept_XM = jnp.exp(-ce_XM)
    if options.kind == "lk_tv":
        return 1.0 - accept_XM
    mix_XM = options.kl_scale * jnp.exp(
        -options.kl_decay * jax.lax.stop_gradient(accept_XM)
    )
    return mix_XM * ce_XM + (1.0 - mix_XM) * (1.0 - accept_XM)


def loss(
    outputs: TrainOutputs, frozen: Frozen, options: ObjectiveOptions, terms=()
):
    """Loss sums and metrics of a batch.

    Labels outside the draft vocabulary weigh nothing in the loss; the metrics
    count them as misses, as serving would.

    Args:
      outputs: rows, labels and validity of a drafter.
      frozen: the borrowed head and the draft vocabulary.
      options: which loss.

    Returns:
      LossSums, and metrics as `name -> (sum, count)`: `loss`; `acc` and
      `acc_<j>` (top-1 hits, draft j from 1); `label_prob`; `accept_length`
      (tokens a round would emit if the text were the target's: the teacher-forced
      accepted prefix and the token after it, within the supervised text; counted
      in blocks); `unrepresentable` (labels outside the draft vocabulary).
    """
    size = bind(
        hidden_XMD=outputs.hidden_XMD,
        labels_XM=outputs.labels_XM,
        valid_XM=outputs.valid_XM,
    )
    shape = (size["X"], size["M"])
    columns_XM, known_XM = vocabulary.draft_columns(frozen, outputs.labels_XM)
    ce_R, hit_R = vocabulary.label_terms(
        frozen,
        outputs.hidden_XMD.reshape(-1, size["D"]),
        columns_XM.reshape(-1),
        options.chunk_rows,
    )
    valid_XM = outputs.valid_XM.astype(jnp.float32)
    trained_XM = valid_XM * known_XM
    # Rows without a label may hold anything; a select keeps it out of the sums.
    ce_XM = jnp.where(trained_XM > 0, ce_R.reshape(shape), 0.0)
    hit_XM = jnp.where(trained_XM > 0, hit_R.reshape(shape), 0.0)
    prob_XM = jax.lax.stop_gradient(jnp.exp(-ce_XM)) * (trained_XM > 0)

    weight_XM = trained_XM * weights.decay_weights(size["M"], options.decay_gamma)
    if options.kind == "dpace":
        weight_XM *= weights.dpace_weights(prob_XM, trained_XM, options.dpace_alpha)
    sums = LossSums((weight_XM * row_losses(ce_XM, options)).sum(), weight_XM.sum())

    count = valid_XM.sum()
    emitted_X, blocks_X = emitted_tokens(hit_XM, valid_XM)
    metrics = {
        "loss": (jax.lax.stop_gradient(sums.numerator), sums.denominator),
        "acc": (hit_XM.sum(), count),
        "label_prob": (prob_XM.sum(), count),
        "accept_length": (emitted_X.sum(), blocks_X.sum()),
        "unrepresentable": ((valid_XM * ~known_XM).sum(), count),
    }
    for j in range(size["M"]):
        metrics[f"acc_{j + 1}"] = (hit_XM[:, j].sum(), valid_XM[:, j].sum())
    return sums, metrics


def emitted_tokens(hit_XM, valid_XM):
    """Tokens each block's round would emit, teacher-forced.

    The accepted prefix r and one more, as in a decode loop; text that ends
    inside the block ends the round there.

    Returns:
      emitted_X: min(r + 1, labels before the text ends), r + 1 where none ends.
      blocks_X: 1.0 for a block with a label at its first draft.
    """
    num_draft = hit_XM.shape[1]
    run_X = jnp.cumprod((valid_XM > 0).astype(jnp.float32), axis=1).sum(1)
    prefix_X = jnp.cumprod(hit_XM * (valid_XM > 0), axis=1).sum(1)
    limit_X = jnp.where(run_X == num_draft, num_draft + 1.0, run_X)
    return jnp.minimum(prefix_X + 1.0, limit_X), (run_X > 0).astype(jnp.float32)
