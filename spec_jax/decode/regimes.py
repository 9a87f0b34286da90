"""The sampling regime of a request: what temperatures of confidence are fitted for.

A drafter's confidence is off by other amounts when texts are greedy, when they are
sampled, and when penalties move the law, so that temperatures are fitted once for
each regime (article 5.4); `configs/calibrate.py` fits those that a recipe's `serve`
can say, which have no penalties or biases. Regimes only decide which temperatures a
request's confidence is divided by: whatever they are, its text keeps its law.
"""

from __future__ import annotations

from typing import Any

GREEDY = "greedy"
# Settings that make a regime, and their values where they are off.
_SAMPLING = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_RULES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


def regime_of(settings: Any, *, one_hot_draft: bool | None = None) -> str:
    """The sampling regime in words: what one STS file is fitted for.

    Args:
      settings: of a request (`decode.request.Settings`), or a recipe's `serve`.
      one_hot_draft: of the engine; None: the section's own, which a request lacks.
    """
    if one_hot_draft is None:
        one_hot_draft = getattr(settings, "one_hot_draft", False)
    off: dict[str, Any] = dict(_RULES)
    parts = [GREEDY]
    if settings.temperature > 0:
        off, parts = _SAMPLING | off, []
    for name, value in off.items():
        mine = getattr(settings, name, value)
        if mine != value:
            parts.append(f"{name}={mine:g}")
    biases = getattr(settings, "logit_bias", ())
    if biases:
        parts.append(f"logit_bias of {len(biases)} tokens")
    if one_hot_draft and settings.temperature > 0:
        parts.append("one_hot_draft")
    return ", ".join(parts)
