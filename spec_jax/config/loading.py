"""From a recipe's ConfigDict to the frozen schema: once, strictly, with words.

    recipe file -> ConfigDict (+ command line) -> to_recipe -> frozen record

No ConfigDict passes this module. `to_dataclass` is generic: a higher floor hands
it its own options class, so this floor imports none of them. The ways back
(`plain`, `to_config_dict`) serve reports and recipe files.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from spec_jax.config import schema
from spec_jax.core.errors import UserError

_PAIRS = schema.Pairs


def to_recipe(config: Any) -> Any:
    """The frozen recipe of the class that `config.task` names in `SCHEMAS`.

    Args:
      config: a ConfigDict or a mapping.

    Raises:
      UserError: an unknown task, an unknown key (with a suggestion), a value of
        the wrong type, or whatever the schema refuses.
    """
    tree = _as_dict(config, "the recipe")
    task = tree.get("task", "pipeline")
    if task not in schema.SCHEMAS:
        raise UserError(
            f"task={task!r} is not a task{_suggest(task, schema.SCHEMAS)}; "
            f"known tasks: {', '.join(schema.SCHEMAS)}"
        )
    return to_dataclass(schema.SCHEMAS[task], tree)


def to_dataclass(cls: type, values: Any, where: str = "") -> Any:
    """Makes `cls` (a dataclass) from a mapping or from `Pairs`.

    Absent fields keep their defaults. An int is taken where a float is asked
    for, a list where a tuple is; nothing else is cast.

    Args:
      cls: the dataclass.
      values: a ConfigDict, a mapping, `Pairs`, or an instance of `cls`.
      where: the section's name in messages ("objective").

    Raises:
      UserError: an unknown or missing field, or a value of the wrong type.
    """
    if isinstance(values, cls):
        return values
    tree = _as_dict(values, where or cls.__name__)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    owner = where or f"the {cls.__name__} recipe"
    for name in tree:
        if name not in fields:
            raise UserError(
                f"{_join(where, name)} is not a field of {owner}"
                f"{_suggest(name, fields, where)}; known: {', '.join(sorted(fields))}"
            )
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in tree:
            raise UserError(f"{_join(where, name)} is missing and has no default")
    return cls(
        **{
            name: _convert(hints[name], value, _join(where, name))
            for name, value in tree.items()
        }
    )


def plain(record: Any) -> dict[str, Any]:
    """A record as nested dicts of plain values (`Pairs` become dicts)."""
    hints = typing.get_type_hints(type(record))
    return {
        field.name: _plain_value(hints[field.name], getattr(record, field.name))
        for field in dataclasses.fields(record)
    }


def defaults(cls: type) -> dict[str, Any]:
    """The defaults of a dataclass as `plain` would give them.

    Unlike `plain(cls())` this works where the defaults alone are refused (a
    recipe that asks for a prompt).
    """
    hints = typing.get_type_hints(cls)
    return {
        field.name: _plain_value(hints[field.name], field.default)
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    }


def to_config_dict(tree: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """A locked ConfigDict: an unknown key on the command line is refused."""
    return ml_collections.ConfigDict(dict(tree)).lock()


def config_hash(recipe: Any) -> str:
    """sha256 of everything the recipe says, 64 hexadecimal digits.

    Two recipes that resolve to the same values share it, whatever file or
    override they came from.
    """
    text = json.dumps(plain(recipe), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changes(
    recipe: Any, base: Mapping[str, Any] | None = None
) -> list[tuple[str, Any, Any]]:
    """(path, default, value) of every value that differs from `base`.

    Args:
      recipe: a record.
      base: nested plain values to compare with; the schema's defaults without it.
    """
    before = _flatten(defaults(type(recipe)) if base is None else base)
    after = _flatten(plain(recipe))
    return [
        (path, before.get(path), value)
        for path, value in after.items()
        if path not in before or before[path] != value
    ]


def describe(recipe: Any, base: Mapping[str, Any] | None = None) -> str:
    """Every value, one per line; what differs from `base` says so."""
    changed = {path: default for path, default, _ in changes(recipe, base)}
    lines = []
    for path, value in _flatten(plain(recipe)).items():
        line = f"{path} = {value!r}"
        if path in changed:
            line += f"    (default {changed[path]!r})"
        lines.append(line)
    return "\n".join(lines)


def _as_dict(values: Any, where: str) -> dict[str, Any]:
    if isinstance(values, ml_collections.ConfigDict):
        return values.to_dict()
    if isinstance(values, Mapping):
        return dict(values)
    if isinstance(values, tuple) and all(
        isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str) for v in values
    ):
        return dict(values)
    raise UserError(f"{where}={values!r} must be a section with named fields")


def _convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, or a sentence."""
    if kind is Any:
        return _freeze(value)
    if kind == _PAIRS:
        tree = _as_dict(value, where)
        return tuple((name, _freeze(tree[name])) for name in sorted(tree))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return to_dataclass(kind, value, where)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            try:
                return _convert(option, value, where)
            except UserError:
                continue
    elif origin is tuple:
        items = typing.get_args(kind)
        if isinstance(value, (list, tuple)):
            if len(items) == 2 and items[1] is Ellipsis:
                items = (items[0],) * len(value)
            if len(items) == len(value):
                return tuple(
                    _convert(item, v, f"{where}[{i}]")
                    for i, (item, v) in enumerate(zip(items, value, strict=True))
                )
    elif kind is type(None):
        if value is None:
            return None
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif isinstance(kind, type) and type(value) is kind:
        return value
    raise UserError(
        f"{where}={value!r} is a {type(value).__name__}; it must be {_kind_name(kind)}"
    )


def _kind_name(kind: Any) -> str:
    names = {int: "an int", float: "a number", str: "a string", bool: "True or False"}
    if kind in names:
        return names[kind]
    return f"a {kind.__name__}" if isinstance(kind, type) else str(kind)


def _freeze(value: Any) -> Any:
    """Hashable: lists become tuples, mappings become sorted pairs."""
    if isinstance(value, Mapping):
        return tuple((name, _freeze(value[name])) for name in sorted(value))
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value


def _plain_value(kind: Any, value: Any) -> Any:
    if kind == _PAIRS:
        return dict(value)
    return plain(value) if dataclasses.is_dataclass(value) else value


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = _join(prefix, name)
        if isinstance(value, Mapping):
            flat.update(_flatten(value, path))
        else:
            flat[path] = value
    return flat


def _join(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)


def _suggest(name: Any, known: Any, where: str = "") -> str:
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f" (did you mean {_join(where, close[0])}?)" if close else ""
