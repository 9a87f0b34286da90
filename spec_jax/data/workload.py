"""Workload files: requests with the moment at which each arrives.

JSON lines, split on "\\n" only. A line is one request:

    arrival      seconds after the start, 0 or more; the one field that is required
                 beside the prompt
    prompt       the user's turn (or question, instruction, turns: see `prompts`)
    id           name in the records; the line number without one
    temperature, top_k, top_p, min_p, max_new_tokens
                 sampling settings; absent ones are the recipe's
    stop         text, or list of texts, that end the answer
    stop_ids     list of token ids that end it beside the target's own
    ignore_eos   true goes on past the target's own end ids
    presence_penalty, frequency_penalty, repetition_penalty
                 of tokens said before
    logit_bias   object: token id -> bias
    logprobs     true reports each token's log-probability; top_logprobs: and those
                 of so many alternatives
    num_draft    a window of its own, whatever the others' budget
    seed         of its random streams; absent: one of its own
    speculate    false decodes this request plainly

A field that is none of these is refused: a setting that is silently ignored
would be measured wrongly.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.data import prompts
from spec_jax.data.prompts import Prompt

# Sampling settings of a request and the type each must have.
SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "max_new_tokens": int,
    "stop_ids": list,
    "ignore_eos": bool,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "logit_bias": dict,
    "logprobs": bool,
    "top_logprobs": int,
    "num_draft": int,
    "seed": int,
    "speculate": bool,
}
_OTHERS = ("arrival", "id", "stop", "instances", *prompts.FIELDS)
_WORDS = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    dict: "an object of token ids and biases",
    list: "a list of token ids",
}


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """One request of a workload.

    Attributes:
      name: unique in its file.
      arrival: seconds after the workload's start.
      prompt: the conversation.
      settings: (name, value) pairs of `SETTINGS`, those the line has.
      stop: texts that end the answer.
    """

    name: str
    arrival: float
    prompt: Prompt
    settings: tuple[tuple[str, Any], ...] = ()
    stop: tuple[str, ...] = ()


def read_workload(path: str) -> list[WorkItem]:
    """Reads a workload file; requests by arrival, equal ones in file order.

    Raises:
      UserError: the file is absent or empty, or a line is not a request; one
        sentence names the line, the field, the value and the fix.
    """
    path = os.path.expanduser(path)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise UserError(
            f"workload={path!r} cannot be read ({error.strerror}); name an existing "
            ".jsonl file"
        ) from error
    name = os.path.basename(path)
    items: list[WorkItem] = []
    seen: dict[str, str] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        item = _item(line, f"{name}:{number}", str(number))
        if item.name in seen:
            raise UserError(
                f"workload: line {item.prompt.source}, id={item.name!r} is also that "
                f"of line {seen[item.name]}; give each request its own"
            )
        seen[item.name] = item.prompt.source
        items.append(item)
    if not items:
        raise UserError(
            f"workload: {name} holds no request; write one JSON object per line with "
            "arrival and prompt"
        )
    return sorted(items, key=lambda item: item.arrival)


def _item(line: bytes, source: str, number: str) -> WorkItem:
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise UserError(
            f"workload: line {source} is not JSON in UTF-8 ({error}); write one JSON "
            "object per line"
        ) from error
    text = prompts.text_of(row, source, "workload")
    known = (*SETTINGS, *_OTHERS)
    for field in row:
        if field not in known:
            close = difflib.get_close_matches(field, known, 1)
            meant = f"did you mean {close[0]!r}?" if close else "remove it"
            raise UserError(
                f"workload: line {source} has the unknown field {field!r}; {meant}"
            )
    if "arrival" not in row:
        raise UserError(
            f"workload: line {source} has no field 'arrival'; give the seconds after "
            "the start at which the request comes"
        )
    arrival = _typed(row, "arrival", float, source)
    if not 0 <= arrival < math.inf:
        raise UserError(
            f"workload: line {source}, arrival={row['arrival']!r} must be 0 or more "
            "seconds"
        )
    name = row.get("id", number)
    if not isinstance(name, (str, int)) or isinstance(name, bool):
        raise UserError(
            f"workload: line {source}, id={name!r} must be text or a whole number"
        )
    return WorkItem(
        name=str(name),
        arrival=arrival,
        prompt=prompts.user_prompt(text, source),
        settings=tuple(
            (field, _typed(row, field, kind, source))
            for field, kind in SETTINGS.items()
            if row.get(field) is not None
        ),
        stop=_stops(row.get("stop"), source),
    )


def _typed(row: dict, field: str, kind: type, source: str) -> Any:
    value = row[field]
    if kind is float and type(value) in (int, float):
        return float(value)
    is_list = kind is list and isinstance(value, list)
    if type(value) is not kind or (is_list and any(type(i) is not int for i in value)):
        raise UserError(
            f"workload: line {source}, {field}={value!r} must be {_WORDS[kind]}"
        )
    if kind is list:
        return tuple(value)
    return _biases(value, source) if kind is dict else value


def _biases(value: dict, source: str) -> tuple[tuple[int, float], ...]:
    """JSON names are texts: `{"17": -2.5}` is the pair (17, -2.5)."""
    try:
        return tuple((int(token), float(bias)) for token, bias in value.items())
    except (TypeError, ValueError) as error:
        raise UserError(
            f"workload: line {source}, logit_bias={value!r} must be "
            f'{_WORDS[dict]}, such as {{"17": -2.5}}'
        ) from error


def _stops(value: Any, source: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise UserError(
            f"workload: line {source}, stop={value!r} must be a text or a list of "
            "texts, none of them empty"
        )
    return tuple(texts)
