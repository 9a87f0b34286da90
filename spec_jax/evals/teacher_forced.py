"""What training's own rows say of a drafter, beside its served accept length.

Training writes its metrics as means over a few batches (`train.loop`), draft by
draft where there is one (`objectives.terms.loss` names them all). Every number
here takes the text for the target's output: before each draft stand the text's own
tokens, not the drafts. The served accept length alone is measured; these say where
it comes from.
"""

from __future__ import annotations

import os
import re
from typing import Any

from spec_jax.evals import calibration_metrics
from spec_jax.train.metrics import read_records

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
    metrics = records[-1]["metrics"]
    found: dict[str, Any] = {"step": records[-1]["step"]}
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
