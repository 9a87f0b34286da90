"""Typed settings of a model folder's json files, or a sentence that names one.

`what` is the file ("config.json"). A null counts as absent, as the writers of such
files mean it; true and false are no numbers.

Raises, in every function:
  UserError: the setting is missing or has another form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.core.json_fields import is_number, is_whole

_FIX = "restore the file that came with the model"


def size(config: Mapping[str, Any], what: str, key: str, default: Any = None) -> int:
    """A whole number, 1 or more; `default` where it is absent, None to refuse that."""
    found = _there(config, what, key, default)
    if type(found) is not int or not is_whole(found, 1):
        raise _refuse(what, key, found, "a whole number, 1 or more")
    return found


def positive(
    config: Mapping[str, Any], what: str, key: str, default: Any = None
) -> float:
    """A finite number above 0; `default` as in `size`."""
    found = _there(config, what, key, default)
    if not is_number(found) or found <= 0:
        raise _refuse(what, key, found, "a number above 0")
    return float(found)


def switch(config: Mapping[str, Any], what: str, key: str) -> bool:
    """True or false; false where it is absent."""
    found = config.get(key)
    if found is not None and not isinstance(found, bool):
        raise _refuse(what, key, found, "true or false")
    return bool(found)


def text(config: Mapping[str, Any], what: str, key: str) -> str:
    """A text; "" where it is absent."""
    found = config.get(key)
    if found is not None and not isinstance(found, str):
        raise _refuse(what, key, found, "a text")
    return found or ""


def texts(config: Mapping[str, Any], what: str, key: str) -> list[str]:
    """A list of texts; empty where it is absent."""
    found = config.get(key)
    found = [] if found is None else found
    if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
        raise _refuse(what, key, found, "a list of texts")
    return found


def section(config: Mapping[str, Any], what: str, key: str) -> Mapping[str, Any]:
    """An object; empty where it is absent."""
    found = config.get(key)
    found = {} if found is None else found
    if not isinstance(found, Mapping):
        raise _refuse(what, key, found, "a json object")
    return found


def token_ids(
    config: Mapping[str, Any], what: str, key: str, vocab_size: int
) -> list[int]:
    """One token id or a list of them; empty where it is absent."""
    found = config.get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(x) is int and 0 <= x < vocab_size for x in ids):
        rule = f"a token id, or a list of them, in [0, {vocab_size})"
        raise _refuse(what, key, found, rule)
    return ids


def token(config: Mapping[str, Any], what: str, key: str) -> str:
    """The text of a token, plain or in an object's `content`; "" where absent."""
    found = config.get(key)
    if isinstance(found, Mapping):
        return text(found, f"{what}: {key}", "content")
    return text(config, what, key)


def _there(config: Mapping[str, Any], what: str, key: str, default: Any) -> Any:
    found = config.get(key)
    if found is None and default is None:
        raise UserError(f"{what} lacks {key}; {_FIX}")
    return default if found is None else found


def _refuse(what: str, key: str, found: Any, rule: str) -> UserError:
    return UserError(f"{what} has {key}={found!r}, which is not {rule}; {_FIX}")
