"""What a drafter's training rows say of it, beside its served accept length.

Training writes its metrics as means over a few batches (`train.loop`), draft by
draft where there is one (`objectives.terms.loss` names them all); `read` finds them.
`measure` computes the same over texts that were never trained on: far below
training's, they say that it memorised. Every number here takes the text for the
target's output: before each draft stand the text's own tokens, not the drafts. The
served accept length alone is measured; these say where it comes from.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax import objectives
from spec_jax.core.batch import Batch
from spec_jax.data.capture import forward_rows
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.evals import calibration_metrics
from spec_jax.objectives.records import ObjectiveOptions
from spec_jax.target.loading import Target
from spec_jax.train import metrics as train_metrics
from spec_jax.train.metrics import read_records

_PAD = 64
_BY_DRAFT = re.compile(r"(.+)_(\d+)")


def read(path: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """The last training metrics of a finished training.

    Args:
      path: its `metrics.jsonl`.
      step: of the kept weights: nothing later is read. None: the end.

    Returns:
      `step`, of the record; every metric of one number under its own name (`acc`,
      `accept_length`, `overlap`, `selector_coverage`, `selector_accuracy`: of those
      covered, `walk_accept_length`, ...); those of one number per draft or depth as
      lists from the first on (`acc_by_position`, `overlap_by_position`); and with a
      confidence head `ece_by_position`, its expected calibration error. Empty where
      no such record was kept.
    """
    if not os.path.exists(path):
        return {}
    records = [
        record
        for record in read_records(path)
        if record.get("kind") == "train"
        and record.get("metrics")
        and (step is None or record["step"] <= step)
    ]
    if not records:
        return {}
    return {"step": records[-1]["step"]} | named(records[-1]["metrics"])


def measure(
    target: Target,
    drafter: Drafter,
    params: Any,
    frozen: Frozen,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, Any]:
    """Training's metrics over texts of the target, forward by forward, one at a time.

    Args:
      target: the target; its features are computed here.
      drafter: what is judged; it draws its anchors (and EAGLE its noise) as in
        training.
      params, frozen: its weights, and what it borrows.
      texts: (prompt, answer) token ids; answers are the target's own.
      dtype: features are rounded to it, as they were for training.
      seed: of the anchors.

    Returns:
      Metrics by the names of `named`; empty for a drafter without weights, or where
      no text has an answer.
    """
    texts = [(list(prompt), list(answer)) for prompt, answer in texts if answer]
    if not texts or not jax.tree.leaves(params):
        return {}
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    size = -(-longest // _PAD) * _PAD
    keys = jax.random.split(jax.random.key(seed), len(texts))
    total: dict[str, list] = {}
    for (prompt, answer), key in zip(texts, keys, strict=True):
        batch = _batch(target, drafter, prompt, answer, size, dtype)
        found = _metrics(drafter, params, frozen, batch, key)
        total = train_metrics.add(total, train_metrics.to_host(found))
    return named(train_metrics.means(total))


def _batch(target: Target, drafter: Drafter, prompt, answer, size: int, dtype: str):
    """One text as a training batch of one row, padded to `size`."""
    tokens_1S = np.full((1, size), target.spec.pad_id, np.int32)
    count = len(prompt) + len(answer)
    tokens_1S[0, :count] = [*prompt, *answer]
    length_1 = np.array([count], np.int32)
    at_1S = np.arange(size)[None]
    features, teacher, *_ = forward_rows(
        target.spec,
        target.params,
        tokens_1S,
        length_1,
        drafter.needs.layer_ids,
        True,
        dtype,
    )
    return Batch(
        tokens_BS=tokens_1S,
        supervised_BS=(at_1S >= len(prompt)) & (at_1S < count),
        length_B=length_1,
        features_BSLD=features,
        teacher_BSD=teacher,
    )


@functools.partial(jax.jit, static_argnums=0)
def _metrics(drafter: Drafter, params, frozen, batch: Batch, key):
    outputs = drafter.train_outputs(params, frozen, batch, key)
    return objectives.loss(outputs, frozen, ObjectiveOptions(), drafter.terms)[1]


def named(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of one number under their own names, those per draft as lists."""
    found: dict[str, Any] = {}
    by_draft: dict[str, dict[int, float]] = {}
    for name, value in metrics.items():
        numbered = _BY_DRAFT.fullmatch(name)
        if numbered:
            by_draft.setdefault(numbered[1], {})[int(numbered[2])] = value
        elif name not in calibration_metrics.NAMES:
            found[name] = value
    for name, values in by_draft.items():
        found[f"{name}_by_position"] = [values[j] for j in sorted(values)]
    ece = calibration_metrics.ece_of_metrics(metrics)
    return found if ece is None else found | {"ece_by_position": ece}
