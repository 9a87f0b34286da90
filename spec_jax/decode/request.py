"""What a caller asks for and what comes back; checked at the door."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from spec_jax.core.errors import UserError

# Static widths of a slot's lists: a request with more is refused.
NUM_STOP_IDS = 8
NUM_BIASES = 64
NUM_STOPS = 16
NUM_TOP_LOGPROBS = 20

# How a field is annotated -> what its values are, in code and in words.
_KINDS: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
}


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
      stop: strings that end it; the text ends before the string, the tokens with
        the one that completes it.
      presence_penalty: in [-2, 2]; subtracted from tokens in the answer.
      frequency_penalty: in [-2, 2]; subtracted per occurrence in the answer.
      repetition_penalty: in (0, 10]; divides positive and multiplies negative
        logits of tokens in the prompt or the answer. 1 is off.
      logit_bias: pairs (token id, bias in [-100, 100]); a mapping is accepted.
      logprobs: report the log-probability of every emitted token.
      top_logprobs: and of this many likeliest alternatives, at most
        `NUM_TOP_LOGPROBS`.
      features: hand out the features of the rows that the target ran.
      num_draft: a window of its own, outside any budget and never switched off:
        this many drafts are verified every round. None: the engine decides.
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
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    features: bool = False
    num_draft: int | None = None

    def __post_init__(self):
        self._check_types()
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
        self._check_stops()
        self._check_penalties()
        if not 0 <= self.top_logprobs <= NUM_TOP_LOGPROBS:
            raise UserError(
                f"top_logprobs={self.top_logprobs} must be 0 (none) or positive, at "
                f"most {NUM_TOP_LOGPROBS}"
            )
        if self.top_logprobs and not self.logprobs:
            raise UserError(
                f"top_logprobs={self.top_logprobs} needs logprobs=True; set both"
            )
        if self.num_draft is not None and self.num_draft < 0:
            raise UserError(
                f"num_draft={self.num_draft} must be None (the engine decides) or at "
                "least 0"
            )

    def _check_types(self):
        """Refuses a scalar of another type: `2.5` tokens, the text "false"."""
        for field in dataclasses.fields(self):
            kind, _, optional = str(field.type).partition(" | ")
            value = getattr(self, field.name)
            if kind not in _KINDS or (optional and value is None):
                continue
            if not _is(value, _KINDS[kind][0]):
                raise UserError(
                    f"{field.name}={value!r} must be {_KINDS[kind][1]}"
                    f"{', or None' if optional else ''}"
                )

    def _check_stops(self):
        ids = self.stop_ids
        if not isinstance(ids, _LISTS) or not all(_is(i, Integral) for i in ids):
            raise UserError(f"stop_ids={ids!r} must be a list of token ids")
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in ids))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, _LISTS):
            raise UserError(
                f"stop={self.stop!r} must be a string, or a list of strings"
            )
        object.__setattr__(self, "stop", tuple(self.stop))
        if len(self.stop) > NUM_STOPS:
            raise UserError(
                f"stop has {len(self.stop)} strings; at most {NUM_STOPS} are supported"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text or "\ufffd" in text:
                raise UserError(
                    f"stop={text!r} must be a string of at least one character, "
                    "without U+FFFD"
                )

    def _check_penalties(self):
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UserError(
                    f"{name}={getattr(self, name)} must lie in [-2, 2]; 0 is off"
                )
        if not 0 < self.repetition_penalty <= 10:
            raise UserError(
                f"repetition_penalty={self.repetition_penalty} must lie in (0, 10]; 1 "
                "is off"
            )
        pairs = _pairs_of(self.logit_bias)
        if len(pairs) > NUM_BIASES:
            raise UserError(
                f"logit_bias has {len(pairs)} ids; at most {NUM_BIASES} are supported"
            )
        ids = [token for token, _ in pairs]
        if len(set(ids)) != len(ids):
            raise UserError("logit_bias names an id twice; give each id once")
        for token, bias in pairs:
            if not -100 <= bias <= 100:
                raise UserError(
                    f"logit_bias of id {token} is {bias}; it must lie in [-100, 100]"
                )
        biases = tuple((token, float(bias)) for token, bias in pairs)
        object.__setattr__(self, "logit_bias", biases)

    @property
    def has_rules(self) -> bool:
        """Any penalty or bias is on."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
        )


_LISTS = (tuple, list)


def _is(value: Any, kind: type) -> bool:
    """Of that kind; True and False are no numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _pairs_of(given: Any) -> list[tuple[int, Any]]:
    """Pairs from pairs or from a mapping, whose ids may be JSON's texts.

    Raises:
      UserError: something else, an id that is no whole number, or a bias that is
        no number.
    """
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    wanted = "must be pairs of a token id and a bias, or an object of them"
    if not isinstance(pairs, _LISTS):
        raise UserError(f"logit_bias={given!r} {wanted}")
    found = []
    for pair in pairs:
        if not (isinstance(pair, _LISTS) and len(pair) == 2):
            raise UserError(f"logit_bias holds {pair!r}; it {wanted}")
        token, bias = pair
        if isinstance(token, str) and token.isdecimal() and token.isascii():
            token = int(token)
        if not (_is(token, Integral) and _is(bias, Real)):
            raise UserError(f"logit_bias holds {pair!r}; it {wanted}")
        found.append((int(token), bias))
    return found


def settings_of(fields: Mapping[str, Any]) -> Settings:
    """Settings from a caller's fields; what is not supported is never ignored.

    Raises:
      UserError: an unknown field, or a value of the wrong type or out of its
        range; the sentence names the field.
    """
    known = {f.name for f in dataclasses.fields(Settings)}
    unknown = sorted(set(fields) - known)
    if unknown:
        name = unknown[0]
        raise UserError(
            f"{name}={fields[name]!r} is not supported; leave it out, or use one of "
            f"{', '.join(sorted(known))}"
        )
    return Settings(**fields)


@dataclasses.dataclass
class Generation:
    """One finished (or running) request.

    Attributes:
      prompt: its token ids.
      tokens: emitted ids, the first from prefill.
      finish_reason: "stop", "length", "error", "abort", or "" while running.
      emitted: tokens of each round, after trimming (prefill excluded).
      accepted: r of each round, after the cut.
      drafted: drafts verified in each round.
      stopped_by: the stop string or stop id that ended it, or None.
      text: the answer's text so far, where the engine has a tokenizer: whole
        characters, without what may begin a stop string, without the stop.
      logprobs: natural log of each token's probability under the target's own
        softmax, if asked for.
      top_logprobs: (id, log-probability) of its likeliest alternatives.
      features: [T, L, D] layer outputs of the rows that the target ran, the T tokens
        of prompt and answer but the last, if asked for and not aborted.
      hidden: [T, D] post-norm last hidden rows of the same.
    """

    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    emitted: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    stopped_by: str | int | None = None
    text: str = ""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = dataclasses.field(
        default_factory=list
    )
    features: np.ndarray | None = None
    hidden: np.ndarray | None = None

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


def stop_ids_of(
    settings: Settings, eos_ids: tuple[int, ...], vocab_size: int
) -> tuple[int, ...]:
    """Ids that end a request: its own and the target's.

    Raises:
      UserError: too many, or outside the vocabulary.
    """
    ends = () if settings.ignore_eos else eos_ids
    stops = tuple(dict.fromkeys((*settings.stop_ids, *ends)))
    if len(stops) > NUM_STOP_IDS:
        raise UserError(
            f"stop_ids has {len(stops)} ids with the target's own; at most "
            f"{NUM_STOP_IDS} are supported"
        )
    if any(not 0 <= s < vocab_size for s in stops):
        raise UserError(
            f"stop_ids={stops} must be token ids of the target, 0 to {vocab_size - 1}"
        )
    return stops


@dataclasses.dataclass(frozen=True)
class Offer:
    """What an engine was built for; `check_features` refuses the rest.

    Attributes:
      vocab_size: V, without its padding.
      penalties: penalties and logit bias were compiled.
      logprobs: None, or the most alternatives a token may ask for; at most V.
      text: there is a tokenizer.
      num_draft: M of the round, 0 without a drafter.
      is_chain: drafts form a chain.
      features: rows are recorded.
    """

    vocab_size: int
    penalties: bool
    logprobs: int | None
    text: bool
    num_draft: int
    is_chain: bool
    features: bool = False


def check_features(settings: Settings, offer: Offer) -> None:
    """Refuses settings that the engine was not built for.

    Raises:
      UserError: one sentence naming the field, the value and the fix.
    """
    if settings.has_rules and not offer.penalties:
        fields = dataclasses.fields(Settings)
        name = next(
            f.name
            for f in fields
            if ("penalty" in f.name or f.name == "logit_bias")
            and getattr(settings, f.name) != f.default
        )
        raise UserError(
            f"{name}={getattr(settings, name)} needs an engine built with "
            "EngineOptions.penalties=True; build it so, or leave the field out"
        )
    bad = [t for t, _ in settings.logit_bias if not 0 <= t < offer.vocab_size]
    if bad:
        raise UserError(
            f"logit_bias names id {bad[0]}, outside the target's {offer.vocab_size} "
            "tokens"
        )
    if settings.top_logprobs > offer.vocab_size:
        raise UserError(
            f"top_logprobs={settings.top_logprobs} is more than the target's "
            f"{offer.vocab_size} tokens; ask for fewer"
        )
    if settings.logprobs and (
        offer.logprobs is None or settings.top_logprobs > offer.logprobs
    ):
        raise UserError(
            f"logprobs with top_logprobs={settings.top_logprobs} needs an engine built "
            f"with EngineOptions.logprobs of at least that; it has {offer.logprobs}"
        )
    if settings.stop and not offer.text:
        raise UserError(
            f"stop={settings.stop} needs an engine with a tokenizer; use stop_ids, or "
            "build the engine with one"
        )
    if settings.features and not offer.features:
        raise UserError(
            "features=True needs an engine that records rows; build it without a "
            "drafter and with EngineOptions.record, or leave the field out"
        )
    asked = settings.num_draft
    if asked is None or not settings.speculate:
        return
    if asked > offer.num_draft:
        raise UserError(
            f"num_draft={asked} is more than the {offer.num_draft} drafts of this "
            "engine's round; ask for fewer"
        )
    if not offer.is_chain and asked not in (0, offer.num_draft):
        raise UserError(
            f"num_draft={asked} cuts a tree, whose rows stand or fall together; use 0 "
            f"or {offer.num_draft}"
        )
