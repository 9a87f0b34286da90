"""Typed fields of a JSON object from outside: a value, or a sentence that names it.

`what` is the file's short name ("cost"), so that messages read `cost.m_probes=...`.
Numbers are finite and never booleans; Python's JSON also reads `NaN`, `Infinity` and
whole numbers of any size.

Raises, in every function:
  UserError: the field is missing or has another form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.core.errors import UserError

REQUIRED: Any = object()
LARGEST = 2**53  # whole numbers below it survive a float64


def is_number(value: Any) -> bool:
    """A finite int or float, and not True or False."""
    if type(value) is int:
        return abs(value) < LARGEST
    return type(value) is float and math.isfinite(value)


def is_whole(value: Any, least: int = 0) -> bool:
    """A number without a fraction, at least `least`."""
    return is_number(value) and value == int(value) and value >= least


def _field(data: Mapping, what: str, name: str, default: Any, rule: str) -> Any:
    value = data.get(name, default)
    if value is REQUIRED:
        raise UserError(f"{what}.{name} is missing; it {rule}")
    return value


def _refuse(what: str, name: str, value: Any, rule: str) -> UserError:
    return UserError(f"{what}.{name}={value!r} {rule}")


def text(data: Mapping, what: str, name: str, default: Any = REQUIRED) -> str:
    """A text."""
    rule = "must be a text"
    value = _field(data, what, name, default, rule)
    if not isinstance(value, str):
        raise _refuse(what, name, value, rule)
    return value


def number(data: Mapping, what: str, name: str, default: Any = REQUIRED) -> float:
    """A finite number."""
    rule = "must be a finite number"
    value = _field(data, what, name, default, rule)
    if not is_number(value):
        raise _refuse(what, name, value, rule)
    return float(value)


def whole(data: Mapping, what: str, name: str, default: Any = REQUIRED) -> int:
    """A whole number, 0 or more."""
    rule = "must be a whole number, 0 or more"
    value = _field(data, what, name, default, rule)
    if not is_whole(value):
        raise _refuse(what, name, value, rule)
    return int(value)


def numbers(
    data: Mapping, what: str, name: str, default: Any = REQUIRED
) -> tuple[float, ...]:
    """A list of finite numbers."""
    rule = "must be a list of finite numbers"
    value = _field(data, what, name, default, rule)
    if not _is_list(value) or not all(is_number(x) for x in value):
        raise _refuse(what, name, value, rule)
    return tuple(float(x) for x in value)


def wholes(
    data: Mapping, what: str, name: str, default: Any = REQUIRED
) -> tuple[int, ...]:
    """A list of whole numbers, 0 or more."""
    rule = "must be a list of whole numbers, 0 or more"
    value = _field(data, what, name, default, rule)
    if not _is_list(value) or not all(is_whole(x) for x in value):
        raise _refuse(what, name, value, rule)
    return tuple(int(x) for x in value)


def section(data: Mapping, what: str, name: str) -> Mapping | None:
    """An object inside the object; None where there is none.

    A null is refused: nobody writes one.
    """
    if name not in data:
        return None
    if not isinstance(data[name], Mapping):
        raise _refuse(what, name, data[name], "must be an object")
    return data[name]


def ladder(
    data: Mapping, what: str, name: str
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Pairs [R, [T, ...]] of whole numbers, 1 or more; () where there are none."""
    value = data.get(name, ())
    rule = "must be a list of pairs [R, [T, ...]] of whole numbers, 1 or more"
    if not _is_list(value):
        raise _refuse(what, name, value, rule)
    for pair in value:
        if not (_is_list(pair) and len(pair) == 2 and _is_list(pair[1])):
            raise _refuse(what, name, value, rule)
        if not all(is_whole(x, 1) for x in (pair[0], *pair[1])):
            raise _refuse(what, name, value, rule)
    return tuple((int(size), tuple(int(x) for x in rows)) for size, rows in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
