"""Rows of sample files from elsewhere: typed, or a sentence with file and line."""

from __future__ import annotations

import json
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.core.json_fields import is_number


def fields_of(line: bytes, where: str, source: str) -> dict[str, Any]:
    """What one line of such a file says, as `samples.make_sample` takes it.

    Args:
      line: a JSON object.
      where: names file and line in errors.
      source: of a row that does not say one.

    Raises:
      UserError: it is no object, lacks a field, or has one of another kind.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{where} is not JSON ({error}); each line needs tokens and prompt_len"
        ) from error
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is {type(row).__name__}; each line needs an object with tokens "
            "and prompt_len"
        )
    name = "tokens" if "tokens" in row else "token_ids"
    for field in (name, "prompt_len"):
        if field not in row:
            raise UserError(
                f"{where} lacks {field}; each line needs tokens and prompt_len"
            )
    tokens, length = row[name], row["prompt_len"]
    if not isinstance(tokens, list) or not all(
        type(token) is int and token >= 0 for token in tokens
    ):
        raise UserError(
            f"{where}: {name} must be a list of whole numbers, 0 or more, the token "
            "ids of the prompt and of its answer"
        )
    if type(length) is not int or not 0 < length < len(tokens):
        raise UserError(
            f"{where}: prompt_len={length!r} must be a whole number in "
            f"[1, {len(tokens) - 1}], less than its {len(tokens)} tokens"
        )
    temperature = row.get("temperature", 0.0)
    if not is_number(temperature) or temperature < 0:
        raise UserError(
            f"{where}: temperature={temperature!r} must be a number, 0 or above"
        )
    return {
        "prompt": tokens[:length],
        "answer": tokens[length:],
        "source": str(row.get("source", source)),
        "temperature": float(temperature),
        "target_fingerprint": str(row.get("target_fingerprint", "")),
    }
