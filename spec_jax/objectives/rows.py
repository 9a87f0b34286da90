"""Everything of a row that needs logits, computed once for all active terms."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.drafters.base import Frozen, TrainOutputs
from spec_jax.objectives import hard_labels, selector, teacher, vocabulary
from spec_jax.objectives.records import TEACHER_TERMS, ObjectiveOptions


def uses_full_head(frozen: Frozen, options: ObjectiveOptions) -> bool:
    """Whether p is the full vocabulary's softmax over a reduced vocabulary."""
    return options.teacher_mass == "full" and frozen.target_ids_U is not None


def reads_full_head(frozen: Frozen, options: ObjectiveOptions) -> bool:
    """Whether a teacher's term looks at the whole vocabulary of a reduced one."""
    asked = options.teacher_mass == "full" or options.teacher_rows == "argmax"
    return asked and frozen.target_ids_U is not None


def vocabulary_rows(
    outputs: TrainOutputs,
    frozen: Frozen,
    options: ObjectiveOptions,
    active,
    columns_XM,
    valid_XM,
) -> dict[str, jnp.ndarray]:
    """The vocabulary-wide values of each row, `[X, M]` each.

    At most `options.chunk_rows` rows of logits (the drafter's and the teacher's)
    exist at once. Only the drafter's own head and correction get gradient; the
    frozen head gets none.

    Args:
      outputs: rows of a drafter; rows without supervision may hold anything.
      frozen: the borrowed head.
      options: chunks, teacher mass, selector.
      active: names of the terms that count.
      columns_XM: each label's column.
      valid_XM: 1.0 where a row is supervised.

    Returns:
      `ce` and `hit`; with a teacher's term `log_overlap`, `agree`, `best_known`
      (1.0 where the target's likeliest token is in the draft vocabulary, or nobody
      looks: see `reads_full_head`), and what the terms need of `soft_ce` and `kl`;
      with the selector `selector_ce`, `selector_covered`, `selector_hit`.
    """
    rows = {"hidden": outputs.hidden_XMD, "column": columns_XM}
    if outputs.correction_XME is not None:
        rows["correction"] = outputs.correction_XME
    wanted = {name for name in TEACHER_TERMS if name in active}
    if wanted:
        rows["teacher"] = outputs.teacher_XMD
    if "lk" in wanted and options.lk_kind == "lambda":
        wanted.add("kl")
    select = outputs.selector if "selector" in active else None
    detach = options.selector_stop_gradient
    if select is not None:
        rows["query"] = select.detached_query_XME if detach else select.query_XME
    frozen_head_DU = jax.lax.stop_gradient(frozen.head_DU)
    head_DU = frozen_head_DU if outputs.head_DU is None else outputs.head_DU
    looks = reads_full_head(frozen, options)
    full_head_DV = jax.lax.stop_gradient(frozen.full_head_DV) if looks else None

    def of_chunk(*arrays):
        row = dict(zip(rows, arrays, strict=True))
        logits_XU = vocabulary.row_logits(
            head_DU, row["hidden"], outputs.correction_EU, row.get("correction")
        )
        norm_X = jax.nn.logsumexp(logits_XU, -1)
        ce_X, hit_X = hard_labels.label_rows(logits_XU, norm_X, row["column"])
        found = {"ce": ce_X, "hit": hit_X}
        if wanted:
            log_p_XU, best_X = teacher.teacher_law(
                row["teacher"],
                frozen_head_DU,
                full_head_DV,
                frozen.target_ids_U,
                options.teacher_mass,
            )
            known_X = jnp.ones(best_X.shape, bool)
            if looks:
                best_X, known_X = vocabulary.draft_columns(frozen, best_X)
            log_q_XU = logits_XU - norm_X[:, None]
            found |= teacher.teacher_rows(log_p_XU, log_q_XU, wanted)
            same_X = (jnp.argmax(logits_XU, -1) == best_X) & known_X
            found["agree"] = same_X.astype(jnp.float32)
            found["best_known"] = known_X.astype(jnp.float32)
        if select is not None:
            unary_XU = jax.lax.stop_gradient(logits_XU) if detach else logits_XU
            found |= selector.selector_rows(
                unary_XU,
                row["query"],
                select.successor_UE,
                select.size_k,
                row["column"],
            )
        return found

    found = vocabulary.in_chunks(
        of_chunk,
        options.chunk_rows,
        *(_flat(only_valid(array, valid_XM)) for array in rows.values()),
    )
    return {name: value.reshape(valid_XM.shape) for name, value in found.items()}


def only_valid(array, valid_XM):
    """The supervised rows, zeros elsewhere: a NaN there reaches no gradient."""
    keep = (valid_XM > 0).reshape(valid_XM.shape + (1,) * (array.ndim - 2))
    return jnp.where(keep, array, 0)


def _flat(array):
    return array.reshape(-1, *array.shape[2:])
