"""Findings: what was compared, and how it came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

OK, DIFFERS, SKIPPED = "ok", "differs", "not applicable"
CHECKS = (
    "contract",
    "template",
    "visibility",
    "features",
    "logits",
    "weights",
    "draft state",
    "served",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
      check: one of `CHECKS`.
      item: what was compared.
      status: "ok", "differs" or "not applicable".
      detail: numbers, or what differs.
    """

    check: str
    item: str
    status: str
    detail: str = ""


def first_difference(findings: Iterable[Finding]) -> Finding | None:
    """The first finding that differs, or None."""
    return next((f for f in findings if f.status == DIFFERS), None)


def sentence(findings: Iterable[Finding]) -> str:
    """What to tell a person."""
    found = first_difference(findings)
    if found is None:
        return "training and serving agree in every check that applies"
    return f"first difference: {found.check}, {found.item}: {found.detail}"


def table(findings: Iterable[Finding]) -> dict[str, dict[str, str]]:
    """A report's table: a row for each finding."""
    return {
        f"{f.check}: {f.item}": {"result": f.status, "detail": f.detail}
        for f in findings
    }


def until_first(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings up to the first that differs; nothing after it is computed."""
    for finding in findings:
        yield finding
        if finding.status == DIFFERS:
            return


def compare(check: str, item: str, expected: Any, found: Any, fix: str) -> Finding:
    """A finding on two values that must be equal."""
    if expected == found:
        return Finding(check, item, OK, _short(found))
    detail = f"is {_short(found)}, expected {_short(expected)}; {fix}"
    return Finding(check, item, DIFFERS, detail)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def verdict(check: str, item: str, fault: str, good: str) -> Finding:
    """Differs where there is a fault to tell, else ok."""
    return Finding(check, item, DIFFERS if fault else OK, fault or good)
