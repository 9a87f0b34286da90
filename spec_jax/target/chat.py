"""Chat templates, and which tokens of a conversation the assistant produced.

A template is text from a checkpoint, so it runs in jinja2's immutable sandbox.
The loss mask never comes from marks inside the template: each turn is rendered
as a server would render it at that turn, and the tokens that the assistant then
produced (its text and the end-of-turn token) are appended to it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox

from spec_jax.core.errors import UserError
from spec_jax.target.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A jinja2 chat template.

    Attributes:
      source: the template's text.
      bos_token: text it may insert as `bos_token`.
      eos_token: text it may insert as `eos_token`.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    @property
    def hash(self) -> str:
        """sha256 of the source text, hexadecimal."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        thinking: bool = False,
    ) -> str:
        """Text of `messages`, each a mapping with `role` and `content`.

        Args:
          messages: the conversation.
          add_generation_prompt: whether to open an assistant turn at the end.
          thinking: the template's own switch (`enable_thinking`).

        Raises:
          UserError: the template cannot be parsed, refuses the messages, or has
            no thinking switch to turn on.
        """
        if thinking and "enable_thinking" not in self.source:
            raise UserError(
                f"thinking={thinking} but chat template {self.hash[:12]} has no "
                "thinking switch; leave it False for this target"
            )
        try:
            return _compile(self.source).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                enable_thinking=thinking,
            )
        except jinja2.TemplateError as error:
            raise UserError(
                f"chat template {self.hash[:12]} refuses these messages ({error}); "
                "send the roles in the order it expects"
            ) from error


def check_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    """Refuses messages that a template must not see.

    Raises:
      UserError: no messages, an unknown role, content that is not text, or
        content that spells out a special token.
    """
    if not messages:
        raise UserError("messages is empty; send at least one user message")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(
                f"messages[{i}].role is {role!r}; use one of {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise UserError(
                f"messages[{i}].content is {type(content).__name__}; send text"
            )
        tokenizer.check_untrusted(content, f"messages[{i}].content")


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    thinking: bool = False,
) -> list[int]:
    """Token ids of a rendered conversation, as a server's prompt.

    Args:
      tokenizer: the target's tokenizer.
      template: the target's template.
      messages: mappings with `role` and `content`.
      add_generation_prompt: whether to open an assistant turn at the end.
      thinking: the template's thinking switch.

    Raises:
      UserError: see `check_messages`; or there is no template.
    """
    check_messages(tokenizer, messages)
    text = _need(template).render(messages, add_generation_prompt, thinking)
    return tokenizer.encode(text)


def encode_turns(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Message],
) -> list[tuple[list[int], list[int]]]:
    """Token ids and loss masks of a conversation, one pair per rendering.

    Turns share one sequence while each turn's prompt continues the text before
    it. A template that rewrites history (drops earlier reasoning, say) gives a
    new sequence for every turn whose prompt differs from what was produced, and
    there only the turns not yet supervised are.

    Args:
      tokenizer: the target's tokenizer.
      template: the target's template.
      messages: mappings with `role` and `content`. The last one, when it is an
        assistant's, may have `finished: False`: it was cut off by a token
        limit, and no end-of-turn token follows it.

    Returns:
      (ids, mask) pairs: `mask[i]` is 1 exactly where `ids[i]` was produced by
      the assistant. Nothing follows the last supervised token.

    Raises:
      UserError: see `check_messages`; or there is no assistant message; or an
        assistant text is not what its own tokens decode to, alone or after the
        prompt.
    """
    check_messages(tokenizer, messages)
    end_id = end_of_turn(tokenizer, template)
    end_text = tokenizer.token_of(end_id)
    pairs: list[tuple[list[int], list[int]]] = []
    produced_text = None  # the text of the sequence being built, pairs[-1]
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        finished = message.get("finished", True)
        if not finished and i + 1 < len(messages):
            raise UserError(
                f"messages[{i}].finished is False but {len(messages) - i - 1} more "
                "message(s) follow; only the last message may be unfinished"
            )
        answer_ids = _encode_answer(tokenizer, message["content"], i)
        answer_text = message["content"]
        if finished:
            answer_ids = [*answer_ids, end_id]
            answer_text = answer_text + end_text
        prompt_text = _need(template).render(messages[:i], add_generation_prompt=True)
        if produced_text is not None and prompt_text.startswith(produced_text):
            ids, mask = pairs[-1]
            prompt_ids = tokenizer.encode(prompt_text[len(produced_text) :])
        else:
            ids, mask = [], []
            pairs.append((ids, mask))
            prompt_ids = tokenizer.encode(prompt_text)
        ids += prompt_ids
        before_text = tokenizer.decode(ids)
        ids += answer_ids
        if tokenizer.decode(ids) != before_text + answer_text:
            raise UserError(
                f"messages[{i}].content cannot be supervised: this tokenizer adds "
                "text (a space, say) between a prompt and the answer's own tokens; "
                "use a byte-level tokenizer"
            )
        mask += [0] * len(prompt_ids) + [1] * len(answer_ids)
        produced_text = prompt_text + answer_text
    if not pairs:
        raise UserError(
            "messages has no assistant message, so nothing can be supervised; add one"
        )
    return pairs


def encode_with_mask(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Message],
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of a conversation that is one sequence.

    See `encode_turns` for arguments, mask and errors.

    Raises:
      UserError: also when the template rewrites earlier turns, so that no one
        sequence holds what a server saw at every turn.
    """
    pairs = encode_turns(tokenizer, template, messages)
    if len(pairs) > 1:
        raise UserError(
            f"chat template {_need(template).hash[:12]} rewrites earlier turns, so "
            f"this conversation is {len(pairs)} sequences and not one; split it into "
            "single-answer conversations"
        )
    return pairs[0]


def end_of_turn(tokenizer: Tokenizer, template: ChatTemplate | None) -> int:
    """Id of the special token that ends an assistant's turn.

    It is the first token that the template writes after an assistant's text.

    Raises:
      UserError: the template ends a turn with no special token.
    """
    return _end_of_turn(tokenizer, _need(template))


@functools.lru_cache(maxsize=32)
def _end_of_turn(tokenizer: Tokenizer, template: ChatTemplate) -> int:
    answer = "An answer to probe with."
    text = template.render(
        [
            {"role": "user", "content": "A question."},
            {"role": "assistant", "content": answer},
        ],
        add_generation_prompt=False,
    )
    _, found, rest = text.rpartition(answer)
    first = tokenizer.encode(rest)[:1] if found else []
    if first and first[0] in tokenizer.special_ids:
        return first[0]
    raise UserError(
        f"chat template {template.hash[:12]} writes {rest[:20]!r} after an "
        "assistant's text, which is no special token; use a template that ends "
        "turns with one"
    )


def _encode_answer(tokenizer: Tokenizer, content: str, index: int) -> list[int]:
    ids = tokenizer.encode(content)
    back = tokenizer.decode(ids)
    if back != content:
        at = next(
            (i for i, (a, b) in enumerate(zip(content, back, strict=False)) if a != b),
            min(len(content), len(back)),
        )
        raise UserError(
            f"messages[{index}].content cannot be supervised: its tokens decode to "
            f"another text from character {at} ({content[at : at + 8]!r} becomes "
            f"{back[at : at + 8]!r}); remove what the tokenizer cannot hold"
        )
    return ids


def _need(template: ChatTemplate | None) -> ChatTemplate:
    if template is None:
        raise UserError(
            "target has no chat template, so messages cannot be rendered; use a "
            "target with one (tokenizer_config.json or chat_template.jinja), or "
            "plain text prompts"
        )
    return template


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Json without the HTML escapes that jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
