"""Checks that sections share: one sentence with the field, the value and the rule."""

from __future__ import annotations

import math
from typing import Any

from spec_jax.core.errors import UserError

# Sorted (name, value) pairs: a mapping that can be hashed.
Pairs = tuple[tuple[str, Any], ...]

DTYPES = ("float32", "bfloat16")


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def check(ok: bool, field: str, value: Any, rule: str) -> None:
    if not ok:
        raise UserError(f"{field}={value!r} {rule}")


def at_least(low: int, section: str, record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        check(value >= low, _join(section, name), value, f"must be {low} or more")


def share(section: str, record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        check(0 <= value <= 1, _join(section, name), value, "must lie in [0, 1]")


def temperature(section: str, record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        check(
            math.isfinite(value) and value >= 0,
            _join(section, name),
            value,
            "must be 0 (greedy) or more",
        )


def top_p(section: str, record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        check(
            0 < value <= 1,
            _join(section, name),
            value,
            "must lie in (0, 1]; 1.0 keeps the whole vocabulary",
        )


def one_of(section: str, record: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(record, name)
    check(
        value in allowed, _join(section, name), value, f"must be one of {list(allowed)}"
    )


def ascending(section: str, record: Any, name: str) -> None:
    values = getattr(record, name)
    good = all(v > 0 for v in values) and list(values) == sorted(set(values))
    check(good, _join(section, name), values, "must be positive and ascending")


def needs_drafter(drafter: str) -> None:
    """Refuses a recipe for exported drafters that names none."""
    check(
        bool(drafter),
        "drafter",
        drafter,
        "is empty; name an exported drafter folder with --config.drafter=<folder>",
    )
