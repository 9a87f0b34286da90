"""Prompt files, and prompts as the token ids a server would run.

A prompt file is JSON lines (`.jsonl`, or `.jsonl.gz`), split on "\\n" only: other
line separators of Unicode may stand inside a JSON string. Each row is an object
with one of the fields of `FIELDS`.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.resources
import json
import os
import zlib
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.target.chat import Message, encode_chat
from spec_jax.target.loading import Target

# Fields that may hold the prompt, the first present one wins.
FIELDS = ("prompt", "question", "instruction", "turns")

BUILTIN = "builtin"  # in place of a path: the prompts that come with the package
_BUILTIN_FILE = "prompts.jsonl"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation that waits for the assistant.

    Attributes:
      messages: mappings with `role` and `content`, oldest first.
      source: where it came from, as `<file name>:<line number>`.
    """

    messages: tuple[Message, ...]
    source: str


def read_prompts(path: str, limit: int | None = None) -> list[Prompt]:
    """Reads a prompt file.

    Args:
      path: a `.jsonl` or `.jsonl.gz` file.
      limit: read at most this many prompts (default: all).

    Raises:
      UserError: the file is absent, of another kind, not readable, or empty; a
        row is no JSON object, has none of `FIELDS`, or holds an empty prompt.
    """
    path = os.path.expanduser(path)
    if not path.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(
            f"data.prompts={path!r} is not a prompt file; name a .jsonl or .jsonl.gz "
            "file"
        )
    try:
        with open(path, "rb") as file:
            content = file.read()
        if path.endswith(".gz"):
            content = gzip.decompress(content)
    except FileNotFoundError as error:
        raise UserError(
            f"data.prompts={path!r} is not there; name an existing .jsonl or .jsonl.gz "
            f"file, or {BUILTIN!r} for the list that comes with the package"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"data.prompts={path!r} cannot be read ({error}); restore the file"
        ) from error
    return _parse(content, os.path.basename(path), limit)


def builtin_prompts(limit: int | None = None) -> list[Prompt]:
    """The short prompt list that comes with the package."""
    package = importlib.resources.files("spec_jax.data")
    return _parse(package.joinpath(_BUILTIN_FILE).read_bytes(), _BUILTIN_FILE, limit)


def named_prompts(path: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, or under the name "builtin" the built-in ones.

    Raises:
      UserError: see `read_prompts`.
    """
    if path == BUILTIN:
        return builtin_prompts(limit)
    return read_prompts(path, limit)


def user_prompt(text: str, source: str = "config") -> Prompt:
    """A prompt of one user message."""
    return Prompt(({"role": "user", "content": text},), source)


def render_prompt(
    target: Target,
    prompt: Prompt,
    *,
    mask_id: int = -1,
    context: int | None = None,
    thinking: bool = False,
) -> list[int]:
    """Token ids of a prompt, through the target's chat template.

    Args:
      target: the target that will run it.
      prompt: the conversation.
      mask_id: the drafter's mask token, which must not be in a prompt; -1
        without one.
      context: the most tokens the prompt may have (default: no check).
      thinking: the template's thinking switch.

    Returns:
      Ids up to the opened assistant turn.

    Raises:
      UserError: an empty message, special-token text or the mask token inside
        it, more tokens than `context`, or a target without a template.
    """
    for i, message in enumerate(prompt.messages):
        content = message.get("content")
        if isinstance(content, str) and not content.strip():
            raise UserError(
                f"prompt {prompt.source}: messages[{i}].content is empty; write a "
                "prompt"
            )
    try:
        ids = encode_chat(
            target.tokenizer, target.chat_template, prompt.messages, thinking=thinking
        )
    except UserError as error:
        raise UserError(f"prompt {prompt.source}: {error}") from error
    if mask_id in ids:
        raise UserError(
            f"prompt {prompt.source} contains the drafter's mask token "
            f"{target.tokenizer.token_of(mask_id)!r} (id {mask_id}) at token "
            f"{ids.index(mask_id)}; remove it"
        )
    if context is not None and len(ids) > context:
        raise UserError(
            f"prompt {prompt.source} has {len(ids)} tokens, more than the limit of "
            f"{context}; shorten it or raise the context"
        )
    return ids


def _parse(content: bytes, name: str, limit: int | None) -> list[Prompt]:
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} must be at least 1, or None for all")
    prompts: list[Prompt] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if limit is not None and len(prompts) == limit:
            break
        if not line.strip():
            continue
        source = f"{name}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise UserError(
                f"data.prompts: line {source} is not JSON in UTF-8 ({error}); write "
                "one JSON object per line"
            ) from error
        prompts.append(user_prompt(text_of(row, source), source))
    if not prompts:
        raise UserError(
            f"data.prompts: {name} holds no prompt; write one JSON object per line "
            f"with one of the fields {', '.join(FIELDS)}"
        )
    return prompts


def text_of(row: Any, source: str, what: str = "data.prompts") -> str:
    """The prompt that a row of a file holds.

    Args:
      row: the row, parsed.
      source: `<file name>:<line number>`.
      what: the field of the recipe that names the file.

    Raises:
      UserError: it is no JSON object, has none of `FIELDS`, or an empty prompt.
    """
    if not isinstance(row, dict):
        raise UserError(
            f"{what}: line {source} is {type(row).__name__}; write a JSON object"
        )
    field = next((name for name in FIELDS if name in row), None)
    if field is None:
        raise UserError(
            f"{what}: line {source} has none of the fields {', '.join(FIELDS)} "
            f"(it has {', '.join(map(repr, sorted(row))) or 'none'}); name one of them"
        )
    text = row[field]
    if field == "turns":
        text = text[0] if isinstance(text, list) and text else ""
    if not isinstance(text, str):
        raise UserError(
            f"{what}: line {source}, field {field!r} is {type(text).__name__}; "
            "write text"
        )
    if field == "instruction":
        text = _with_input(text, row.get("instances"))
    if not text.strip():
        raise UserError(
            f"{what}: line {source}, field {field!r} is an empty prompt; write "
            "one or remove the line"
        )
    return text


def _with_input(text: str, instances: Any) -> str:
    """An instruction and, after an empty line, its first instance's input."""
    first = instances[0] if isinstance(instances, list) and instances else None
    extra = first.get("input") if isinstance(first, dict) else None
    if text.strip() and isinstance(extra, str) and extra.strip():
        return f"{text}\n\n{extra}"
    return text
