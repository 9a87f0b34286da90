"""What a caller asks for and what comes back; checked at the door."""

from __future__ import annotations

import dataclasses

from spec_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Settings:
    """How one request is decoded.

    Attributes:
      max_new_tokens: cap on emitted tokens.
      temperature: 0 is greedy; else within [1e-4, 1e4], where float32 logits
        divided by it keep their order.
      top_k: 0 for off.
      top_p: in (0, 1].
      min_p: in [0, 1).
      seed: of the request's random streams; None: one of its own, by the order
        of submission.
      speculate: use the drafter for this request.
      stop_ids: ids that end it besides the target's own end ids.
      ignore_eos: keep going past the target's end ids (benchmarks).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    speculate: bool = True
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.temperature != 0 and not 1e-4 <= self.temperature <= 1e4:
            raise UserError(
                f"temperature={self.temperature} must be 0 (greedy) or positive, "
                "between 0.0001 and 10000"
            )
        if not 0 <= self.top_k < 2**31:
            raise UserError(
                f"top_k={self.top_k} must be 0 (off) or positive, below 2**31"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie in (0, 1]; 1 is off")
        if not 0 <= self.min_p < 1:
            raise UserError(f"min_p={self.min_p} must lie in [0, 1); 0 is off")
        if self.seed is not None and not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed} must lie in [0, 2**31)")


@dataclasses.dataclass
class Generation:
    """One finished (or running) request.

    Attributes:
      prompt: its token ids.
      tokens: emitted ids, the first from prefill.
      finish_reason: "stop", "length", "error", or "" while running.
      emitted: tokens of each round, after trimming (prefill excluded).
      accepted: r of each round, after the cut.
      drafted: drafts verified in each round.
    """

    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    emitted: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.emitted)

    @property
    def accept_length(self) -> float:
        """Tokens emitted by rounds, after trimming, per round (tau)."""
        return sum(self.emitted) / max(len(self.emitted), 1)


def check_prompt(
    prompt: list[int], settings: Settings, *, vocab_size: int, mask_id: int, room: int
) -> None:
    """Refuses a prompt that cannot be served.

    Args:
      prompt: token ids.
      settings: the request's settings.
      vocab_size: V of the target.
      mask_id: the drafter's mask id, or -1.
      room: tokens one slot can hold, prompt and answer together.

    Raises:
      UserError: one sentence naming the field, the value and the fix.
    """
    if not prompt:
        raise UserError("prompt is empty; give at least one token")
    top, low = max(prompt), min(prompt)
    if low < 0 or top >= vocab_size:
        bad = low if low < 0 else top
        raise UserError(
            f"prompt holds token id {bad}, outside the target's {vocab_size} tokens"
        )
    if mask_id >= 0 and mask_id in prompt:
        raise UserError(
            f"prompt holds the drafter's mask token {mask_id}; remove it from the text"
        )
    if len(prompt) + settings.max_new_tokens > room:
        raise UserError(
            f"prompt has {len(prompt)} tokens and max_new_tokens is "
            f"{settings.max_new_tokens}: together more than the {room} a slot can "
            "hold; shorten the prompt, ask for fewer tokens, or raise max_context "
            "up to the target's own context"
        )
