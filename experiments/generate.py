"""One prompt, streamed to the terminal, so that a person sees what speculation does.

A round emits the drafts that the target accepted and then one token that the
target chose itself. The drafts are coloured; what the target chose (and the
first token, which prefill draws) is not. Without a drafter nothing is coloured.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from typing import TextIO

from experiments import serving
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import prompts
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import room_of
from spec_jax.decode.request import Generation, Settings, check_prompt
from spec_jax.target.loading import Target
from spec_jax.target.tokenizer import StreamDecoder, Tokenizer

_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_REASONS = {
    "stop": "the target ended it",
    "length": "max_new_tokens reached",
    "error": "the target's logits were not finite",
}


class Painter:
    """Writes pieces of text; equal neighbours share one colour switch."""

    def __init__(self, stream: TextIO, colour: str = "auto"):
        """Args: the stream, and "auto" (colour on a terminal), "always", "never"."""
        auto = stream.isatty() and not os.environ.get("NO_COLOR")
        self.coloured = colour == "always" or (colour == "auto" and auto)
        self._stream = stream
        self._style = ""

    def write(self, text: str, style: str = "") -> None:
        """Writes `text` under an ANSI style; "" is the terminal's own."""
        if not text:
            return
        if self.coloured and style != self._style:
            self._stream.write((_PLAIN if self._style else "") + style)
            self._style = style
        self._stream.write(text)
        self._stream.flush()

    def line(self, text: str = "", style: str = "") -> None:
        """Ends a line; the style ends with it."""
        self.write(text, style)
        self.write("\n")

    def reset(self) -> None:
        """Leaves the terminal in its own style, whatever happened."""
        if self._style:
            self._stream.write(_PLAIN)
            self._stream.flush()
            self._style = ""


def main(cfg: schema.Generate, workdir: pathlib.Path) -> None:
    """Decodes `cfg.prompt` onto the terminal; leaves no file behind.

    Raises:
      UserError: no such target or drafter, a prompt that cannot be served, or a
        target whose logits were not finite.
    """
    del workdir
    target, params = serving.load_serving_target(cfg.target)
    drafter = None
    if cfg.drafter:
        drafter = serving.load_drafter(
            cfg.drafter, target, num_draft=cfg.serve.num_draft
        )
    mask_id = serving.mask_id_of(drafter.drafter) if drafter else -1
    window = 1
    if drafter:
        topology = serving.topology_of(cfg.serve)
        window = topology.window(drafter.drafter.layout.num_draft)
    settings = serving.settings_from(cfg.serve, seed=cfg.seed)
    ids = encode_prompt(cfg, target, mask_id)
    # Before anything is compiled: a prompt that is too long is answered at once.
    check_prompt(
        ids,
        settings,
        vocab_size=target.spec.vocab_size,
        mask_id=mask_id,
        room=room_of(cfg.serve.max_context, window, target.spec),
    )
    engine = serving.make_engine(target, params, cfg.serve, drafter)
    painter = Painter(sys.stdout, cfg.colour)
    check_whole(stream(engine, target.tokenizer, ids, settings, painter), cfg.target)


def check_whole(generation: Generation, target: schema.Target) -> None:
    """Refuses a text that broke off.

    Raises:
      UserError: the target's logits were not finite.
    """
    if generation.finish_reason == "error":
        raise UserError(
            f"target.source={target.source!r} gave logits that are not finite after "
            f"{_count(len(generation.tokens), 'token')}, so the text ends there; "
            f"restore its weights, or take another target.dtype than {target.dtype!r}"
        )


def encode_prompt(cfg: schema.Generate, target: Target, mask_id: int = -1) -> list[int]:
    """The prompt's token ids: through the chat template, or raw.

    Raises:
      UserError: special-token text or the mask token in it, no template, or
        chat settings beside `raw`.
    """
    if cfg.raw:
        for name in ("system", "thinking"):
            if getattr(cfg, name):
                raise UserError(
                    f"{name}={getattr(cfg, name)!r} has no place in a raw prompt; "
                    "leave it out, or set raw=False"
                )
        return target.tokenizer.encode_untrusted(cfg.prompt, "prompt")
    return prompts.render_prompt(
        target, prompt_of(cfg), mask_id=mask_id, thinking=cfg.thinking
    )


def prompt_of(cfg: schema.Generate) -> prompts.Prompt:
    """The recipe's prompt as a conversation, with its system message if it has one."""
    turns = [{"role": "user", "content": cfg.prompt}]
    if cfg.system:
        turns.insert(0, {"role": "system", "content": cfg.system})
    return prompts.Prompt(tuple(turns), "config")


def stream(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: list[int],
    settings: Settings,
    painter: Painter,
) -> Generation:
    """Decodes one prompt onto the painter, text as it grows, a summary below."""
    speculates = engine.drafter is not None and settings.speculate
    if speculates and painter.coloured:
        painter.write("accepted drafts", _GREEN)
        painter.write(" and tokens the target chose\n\n")
    decoder = StreamDecoder(tokenizer, skip_special=True)
    clock: dict[bool, float] = {}  # when prefill's token came; when the last did

    def on_tokens(handle, new, from_prefill):
        clock[from_prefill] = time.perf_counter()
        drafted = 0 if from_prefill else engine.running(handle).accepted[-1]
        for place, token in enumerate(new):
            painter.write(decoder.push([token]), _GREEN if place < drafted else "")

    try:
        handle = engine.submit(prompt, settings)
        generation = engine.run(on_tokens)[handle]
    finally:
        painter.reset()
    painter.line(decoder.flush())
    seconds = clock.get(False, 0.0) - clock.get(True, 0.0)
    painter.line(summary(generation, seconds, speculates), _DIM)
    return generation


def summary(generation: Generation, seconds: float, speculates: bool) -> str:
    """One line: tokens, rounds, accept length, speed, why it ended.

    Args:
      generation: the finished request.
      seconds: from the first token to the last, so prefill is left out.
      speculates: whether drafts were proposed.
    """
    made, rounds = len(generation.tokens), generation.rounds
    words = [_count(made, "token"), _count(rounds, "round")]
    if speculates and rounds:
        words.append(f"accept length {generation.accept_length:.2f}")
    if rounds and seconds > 0:
        words.append(f"{sum(generation.emitted) / seconds:.1f} tokens/s")
    words.append(_REASONS[generation.finish_reason])
    return "[" + ", ".join(words) + "]"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
