"""A drafter's loss: a weighted sum of terms over one denominator.

    loss = sum over terms of weight_t * sum_rows(w * term_t) / sum_rows(w)

w is a row's weight: its place in the block and, with D-PACE, what the accepted
lengths need. All terms are pooled over the same `sum(w)`, as DSpark's are, so a
loss stays one numerator and one denominator and is divided once, whatever the
micro-batches and devices. Public trainers differ: EAGLE-3's divide each depth by
all positions, masked ones included; EAGLE's by the supervised tokens; one form of
D-PACE by the batch. Against those the learning rate means something else; the
direction of the gradient does not.

Which rows carry weight, where the draft vocabulary is reduced:

- `ce` and `selector` need a label in it. The selector further drops labels
  outside its K candidates, from the numerator only.
- `soft_ce`, `l1` and `lk` need the target's likeliest token in it while p is
  renormalised over it (`teacher_mass="draft"`): a p without that token says nothing
  (EAGLE-3's supervised mask; drafter contracts, section 3.4). Whatever the label
  is: text that was sampled, or edited, need not be the favourite.
  `teacher_rows="label"` asks for the label instead. With "full" every supervised
  row counts.
- `confidence` and `smooth_l1` take every supervised row.

What is said of acceptance there: A = sum min(p, q) is the probability that a draft
drawn from q is accepted when p is the full vocabulary's softmax ("full"). With
"draft" p lacks the mass outside: of p = (.36, .24) and .4 outside, q = (.6, .4)
has an A of 1, and .6 in truth. Everything made of A is then too good: `l1`, `lk`,
the confidence's target, `overlap`, `tau_probabilistic` and the calibration. Where p
does not count, A is 0: nothing that greedy decoding emits there can be drafted.

The denominator holds the rows that at least one active term can use, once for all
of them: a term adds nothing where it cannot be used.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spec_jax.core.errors import UserError
from spec_jax.core.shapes import bind
from spec_jax.drafters.base import Frozen, TrainOutputs
from spec_jax.objectives import (
    confidence,
    features,
    hard_labels,
    selector,
    teacher,
    vocabulary,
    weights,
)
from spec_jax.objectives.accept import emitted_tokens, expected_tokens
from spec_jax.objectives.records import (
    TEACHER_TERMS,
    TERMS,
    LossSums,
    ObjectiveOptions,
    active_terms,
)
from spec_jax.objectives.rows import (
    only_valid,
    reads_full_head,
    uses_full_head,
    vocabulary_rows,
)

_LABEL_TERMS = ("ce", "selector")
_LAW_TERMS = tuple(term for term in TEACHER_TERMS if term != "confidence")


def loss(
    outputs: TrainOutputs,
    frozen: Frozen,
    options: ObjectiveOptions,
    terms=(("ce", 1.0),),
    progress=None,
):
    """Loss sums and metrics of a batch.

    The terms of a row, p the target's law and q the drafter's, float32:
    `ce` against its label (shaped by `options.kind`); `soft_ce` -sum p log q; `l1`
    sum |p - q|; `lk` by `options.lk_kind` of A = sum min(p, q); `smooth_l1` of the
    features, mean over D; `confidence` BCE against A (0 where p does not count, see
    the module), detached; `selector` CE over the K candidates.

    Args:
      outputs: rows, labels and validity of a drafter. Axis M is the draft's place
        in its block; for EAGLE-3 it is the depth of the unrolled training.
      frozen: the borrowed head and the draft vocabulary; gets no gradient.
      options: which loss; its weights go before the drafter's.
      terms: the drafter's own pairs (term, weight).
      progress: share of training done, 0 to 1; only the selector's warm-up and
        ramp read it.

    Returns:
      LossSums, and metrics as `name -> (sum, count)`.

      Always: `loss`; `<term>_loss` of each active term (the selector's without its
      warm-up); `acc` and `acc_<j>` (top-1 hits, draft or depth j from 1);
      `label_prob`; `accept_length` (tokens a round would emit if the text were the
      target's: the teacher-forced accepted prefix and the token after it, within
      the supervised text; counted in blocks); `unrepresentable` (labels outside
      the draft vocabulary; what compares with labels counts them as misses, as
      serving would).

      With a term that reads the teacher: `overlap` and `overlap_<j>` (A: the
      probability that a draft drawn from q is accepted, or with a p renormalised
      over the draft vocabulary more than it; 0 in the rows where p does not count,
      see the module); `teacher_agreement` (the favourites are the same);
      `tau_probabilistic` (as `accept_length`, expected under those overlaps).

      With `confidence`: see `confidence.confidence_metrics`. With `selector`:
      `selector_coverage` (the label is a candidate), `selector_accuracy` (it is
      chosen, of those covered), `walk_accept_length` (as `accept_length`, the
      chosen candidate after the true predecessor being the draft).

    Raises:
      UserError: no term, or a term whose inputs the drafter does not give.
      ValueError: arrays that do not fit each other.
    """
    size = bind(
        hidden_XMD=outputs.hidden_XMD,
        labels_XM=outputs.labels_XM,
        valid_XM=outputs.valid_XM,
    )
    active = active_terms(options, terms)
    require_inputs(outputs, frozen, options, active)
    scale = dict(active)
    if "selector" in active:
        scale["selector"] *= selector.ramp(options, progress)

    columns_XM, known_XM = vocabulary.draft_columns(frozen, outputs.labels_XM)
    valid_XM = outputs.valid_XM.astype(jnp.float32)
    label_XM = valid_XM * known_XM
    rows = vocabulary_rows(outputs, frozen, options, active, columns_XM, valid_XM)
    taught_XM = _taught_rows(rows, frozen, options, valid_XM, label_XM)
    masks = dict.fromkeys(TERMS, valid_XM)
    masks |= dict.fromkeys(_LAW_TERMS, taught_XM)
    masks |= dict.fromkeys(_LABEL_TERMS, label_XM)
    rows_of = {term: masks[term] for term in active}
    counted_XM = functools.reduce(jnp.maximum, rows_of.values())
    # Rows without a label may hold anything; a select keeps it out of the sums.
    ce_XM = jnp.where(label_XM > 0, rows["ce"], 0.0)
    hit_XM = jnp.where(label_XM > 0, rows["hit"], 0.0)
    prob_XM = jax.lax.stop_gradient(jnp.exp(-ce_XM)) * (label_XM > 0)

    losses, more = {}, {}
    if "ce" in active:
        losses["ce"] = hard_labels.row_losses(ce_XM, options)
    if "smooth_l1" in active:
        losses["smooth_l1"] = features.smooth_l1(
            only_valid(outputs.feature_XMD, valid_XM),
            only_valid(outputs.feature_target_XMD, valid_XM),
        )
    if "log_overlap" in rows:
        taught = rows, taught_XM, valid_XM
        more |= _teacher_terms(losses, active, outputs, *taught, options)
        more |= _teacher_metrics(*taught)
    if "selector" in active:
        covered_XM = rows["selector_covered"] * label_XM
        rows_of["selector"] = covered_XM
        losses["selector"] = rows["selector_ce"]
        more |= _selector_metrics(rows["selector_hit"], covered_XM, valid_XM)

    weight_XM = counted_XM * weights.decay_weights(size["M"], options.decay_gamma)
    if options.kind == "dpace":
        weight_XM *= weights.dpace_weights(prob_XM, counted_XM, options.dpace_alpha)
    parts = {}
    for term in active:
        keep_XM = rows_of[term] > 0
        parts[term] = (weight_XM * jnp.where(keep_XM, losses[term], 0.0)).sum()
    numerator = sum(scale[term] * parts[term] for term in active)
    sums = LossSums(numerator, weight_XM.sum())

    count = valid_XM.sum()
    emitted_X, blocks_X = emitted_tokens(hit_XM, valid_XM)
    metrics = {
        "loss": (jax.lax.stop_gradient(sums.numerator), sums.denominator),
        "acc": (hit_XM.sum(), count),
        "label_prob": (prob_XM.sum(), count),
        "accept_length": (emitted_X.sum(), blocks_X.sum()),
        "unrepresentable": ((valid_XM * ~known_XM).sum(), count),
    }
    for term, part in parts.items():
        metrics[f"{term}_loss"] = (jax.lax.stop_gradient(part), sums.denominator)
    metrics |= _by_draft("acc", hit_XM, valid_XM)
    return sums, metrics | more


def _taught_rows(rows, frozen, options, valid_XM, label_XM):
    """1.0 where p counts; see the module."""
    if uses_full_head(frozen, options):
        return valid_XM
    if options.teacher_rows == "label":
        return label_XM
    return valid_XM * rows.get("best_known", 1.0)


def _teacher_terms(losses, active, outputs, rows, taught_XM, valid_XM, options):
    """Adds the terms that read p to `losses`; returns the confidence's metrics."""
    log_overlap_XM = jnp.where(taught_XM > 0, rows["log_overlap"], 0.0)
    if "soft_ce" in active:
        losses["soft_ce"] = rows["soft_ce"]
    if "l1" in active:
        losses["l1"] = teacher.l1_losses(log_overlap_XM)
    if "lk" in active:
        losses["lk"] = teacher.lk_losses(log_overlap_XM, rows.get("kl"), options)
    if "confidence" not in active:
        return {}
    logit_XM = only_valid(outputs.confidence_XM, valid_XM).astype(jnp.float32)
    overlap_XM = jnp.exp(log_overlap_XM) * (taught_XM > 0)
    losses["confidence"] = confidence.bce(logit_XM, overlap_XM)
    return confidence.confidence_metrics(logit_XM, overlap_XM, valid_XM)


def _teacher_metrics(rows, taught_XM, valid_XM):
    overlap_XM = jnp.where(taught_XM > 0, jnp.exp(rows["log_overlap"]), 0.0)
    overlap_XM = jax.lax.stop_gradient(overlap_XM)
    agree_XM = jnp.where(taught_XM > 0, rows["agree"], 0.0)
    expected_X, blocks_X = expected_tokens(overlap_XM, valid_XM)
    return {
        "overlap": (overlap_XM.sum(), valid_XM.sum()),
        "teacher_agreement": (agree_XM.sum(), valid_XM.sum()),
        "tau_probabilistic": (expected_X.sum(), blocks_X.sum()),
        **_by_draft("overlap", overlap_XM, valid_XM),
    }


def _selector_metrics(hit_XM, covered_XM, valid_XM):
    chosen_XM = jnp.where(covered_XM > 0, hit_XM, 0.0)
    emitted_X, blocks_X = emitted_tokens(chosen_XM, valid_XM)
    return {
        "selector_coverage": (covered_XM.sum(), valid_XM.sum()),
        "selector_accuracy": (chosen_XM.sum(), covered_XM.sum()),
        "walk_accept_length": (emitted_X.sum(), blocks_X.sum()),
    }


def _by_draft(name, value_XM, valid_XM):
    """One metric per draft, from 1."""
    return {
        f"{name}_{j + 1}": (value_XM[:, j].sum(), valid_XM[:, j].sum())
        for j in range(value_XM.shape[1])
    }


_FIXES = {
    "teacher_XMD": "a drafter that asks for the teacher, and capture.teacher=True",
    "feature_XMD": "a drafter that predicts features",
    "feature_target_XMD": "a drafter that asks for the features it predicts",
    "confidence_XM": "a drafter with a confidence head",
    "selector": "a drafter with a candidate selector",
}


def require_inputs(
    outputs: TrainOutputs, frozen: Frozen, options: ObjectiveOptions, active
) -> None:
    """Refuses a term whose inputs are not there, or do not fit.

    Raises:
      UserError: naming the term, the field and the fix.
      ValueError: arrays that do not fit each other.
    """
    for term, weight in active.items():
        for field in TERMS[term]:
            if getattr(outputs, field) is None:
                raise UserError(
                    f"objective.{term}={weight} needs {field}, which the drafter does "
                    f"not give; set objective.{term}=0, or use {_FIXES[field]}"
                )
    taught = [term for term in active if term in TEACHER_TERMS]
    if taught and reads_full_head(frozen, options) and frozen.full_head_DV is None:
        asked, fix = "teacher_rows='argmax'", "teacher_rows='label'"
        if options.teacher_mass == "full":
            asked, fix = "teacher_mass='full'", f"teacher_mass='draft' and {fix}"
        raise UserError(
            f"objective.{asked} needs the target's whole head over a reduced "
            "vocabulary, and Frozen.full_head_DV is None; make it with "
            f"frozen_from_params, or set objective.{fix}"
        )
    if (outputs.correction_XME is None) != (outputs.correction_EU is None):
        raise ValueError(
            "TrainOutputs.correction_XME and correction_EU belong together; give both "
            "or neither"
        )
    select = outputs.selector
    if "selector" in active:
        size_u = frozen.head_DU.shape[1]
        if not 1 <= select.size_k <= size_u:
            raise UserError(
                f"the selector keeps size_k={select.size_k} candidates of {size_u} "
                f"draft tokens; choose 1 to {size_u}"
            )
        if options.selector_stop_gradient and select.detached_query_XME is None:
            raise UserError(
                "objective.selector_stop_gradient=True needs "
                "Selector.detached_query_XME (the query made from hidden rows without "
                "gradient), which the drafter does not give; set it to False"
            )
    given = {
        "labels_XM": outputs.labels_XM,
        "correction_XME": outputs.correction_XME,
        "confidence_XM": outputs.confidence_XM if "confidence" in active else None,
        "head_DU": frozen.head_DU,
        "teacher_XMD": outputs.teacher_XMD if taught else None,
    }
    bind(**{name: array for name, array in given.items() if array is not None})
