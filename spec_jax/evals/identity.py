"""Greedy identity: speculative text equals plain text, or the difference is a tie.

Rows computed in different static shapes may round differently, so a text may
part from the plain one where both tokens lie within `tolerance` of the best logit.
Such a place is counted, the rest is resumed teacher-forced from the plain token,
and the claim stays true; any other difference makes it false.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import masks
from spec_jax.decode import programs
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Settings
from spec_jax.sampling import penalties
from spec_jax.target import model
from spec_jax.target.cache import init_cache
from spec_jax.target.spec import TargetSpec

NEAR_TIE = 1e-3
# Logits that differ by less may change places: some tens of the last bits of
# activations of O(1), which the weights' dtype decides.
_TOLERANCES = {"float32": NEAR_TIE, "float16": 0.02, "bfloat16": 0.125}
_PAD = 64


@dataclasses.dataclass(frozen=True)
class Identity:
    """Verdict over a set of prompts.

    Attributes:
      identical: no difference but near-ties.
      near_ties: places where a near-tie parted the texts.
      prompts_with_ties: prompts that had one.
      first_difference: "" or a sentence about the first real difference.
      first_tie: "" or a sentence about the first near-tie and its gap.
    """

    identical: bool
    near_ties: int
    prompts_with_ties: int
    first_difference: str
    first_tie: str = dataclasses.field(default="", compare=False)


def tolerance(dtype) -> float:
    """How far below the best logit a token still ties with it.

    Args:
      dtype: of the target's weights.
    """
    return _TOLERANCES[jnp.dtype(dtype).name]


def plain_gap(spec: TargetSpec, params, tokens: Sequence[int]) -> float:
    """Top-two gap of the plain logits that follow `tokens`."""
    top = np.partition(plain_logits(spec, params, tokens), -2)[-2:]
    return float(abs(top[1] - top[0]))


def plain_logits(spec: TargetSpec, params, tokens: Sequence[int]) -> np.ndarray:
    """The target's logits `[V]` float32 that follow `tokens`, by a whole forward."""
    count = len(tokens)
    size = -(-count // _PAD) * _PAD
    padded_1T = np.full((1, size), spec.pad_id, np.int32)
    padded_1T[0, :count] = tokens
    row_T = jnp.arange(size)
    output = _forward(spec, params, jnp.asarray(padded_1T), row_T)
    return np.asarray(model.logits(params, output[0, count - 1]))


@functools.partial(jax.jit, static_argnums=0)
def _forward(spec, params, tokens_1T, row_T):
    return model.forward(
        spec,
        params,
        init_cache(spec, 1, tokens_1T.shape[1]),
        tokens_1T,
        row_T[None],
        masks.causal(row_T[:, None], row_T[None, :])[None],
        jnp.zeros((1,), jnp.int32),
    ).hidden_BTD


def ruled(logits_V, settings: Settings, prompt: Sequence[int], answer: Sequence[int]):
    """Logits `[V]` after a request's penalties and biases.

    Args:
      logits_V: that follow prompt and answer.
      settings: of the request.
      prompt, answer: token ids so far.
    """
    if not settings.has_rules:
        return logits_V
    history = penalties.no_history(1, len(logits_V))
    for tokens, is_given in ((prompt, True), (answer, False)):
        ids_1T = np.asarray(tokens, np.int32).reshape(1, -1)
        given_1T = np.full(ids_1T.shape, is_given)
        history = penalties.told(history, ids_1T, np.ones_like(given_1T), given_1T)
    past = penalties.only_history(history, 1)
    rules = programs.rules_of(settings)
    return np.asarray(
        penalties.adjusted(jnp.asarray(logits_V)[None, None], rules, past)
    )[0, 0]


@dataclasses.dataclass(frozen=True)
class _Judge:
    """What one prompt's answers are judged by."""

    spec: TargetSpec
    params: Any
    settings: Settings
    prompt: Sequence[int]
    num_ids: int

    @property
    def bound(self) -> float:
        return tolerance(self.params["params"]["embed"].dtype)

    def gap(self, answer: Sequence[int], tokens: Sequence[int]) -> float:
        """How far the worse of `tokens` lies below the best id after `answer`."""
        logits_V = plain_logits(self.spec, self.params, [*self.prompt, *answer])
        logits_V = ruled(logits_V, self.settings, self.prompt, answer)[: self.num_ids]
        return float(logits_V.max() - logits_V[list(tokens)].min())

    def first_fault(self, answer: Sequence[int], start: int) -> int:
        """The first token from `start` on that is not the best after its own past."""
        places = range(start, len(answer))
        return next(
            (i for i in places if self.gap(answer[:i], [answer[i]]) >= self.bound),
            len(answer),
        )


def _parting(got: Sequence[int], expected: Sequence[int]) -> int:
    """Where two texts part; the shorter's length where it begins the other."""
    pairs = enumerate(zip(got, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))


def compare(
    spec: TargetSpec,
    params,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    speculative: Sequence[Sequence[int]],
    settings: Settings,
) -> Identity:
    """Compares texts token by token; resumes past near-ties.

    A text that ends where the other goes on is a difference, whatever the logits.
    With penalties nothing can be resumed (what is known would count as prompt):
    past a near-tie each token is judged after the text's own past.

    Args:
      spec, params: the target, for the plain logits at a difference.
      engine: the speculative engine, to resume past a near-tie.
      prompts: token ids.
      plain: what plain decoding emitted for each.
      speculative: what the speculative engine emitted.
      settings: greedy settings both were decoded with.
    """
    ties = prompts_with_ties = 0
    difference = first_tie = ""
    offer = getattr(engine, "offer", None)  # a stand-in may have none
    num_ids = spec.vocab_size if offer is None else offer.vocab_size
    for index, prompt in enumerate(prompts):
        judge = _Judge(spec, params, settings, prompt, num_ids)
        expected, got = list(plain[index]), list(speculative[index])
        here = 0
        while got != expected and not difference:
            at = _parting(got, expected)
            found = (
                f"prompt {index}: token {at} is {got[at : at + 1]}, plain decoding "
                f"gives {expected[at : at + 1]}"
            )
            if at >= min(len(got), len(expected)):
                difference = f"{found}: one of them ends there"
                break
            gap = judge.gap(expected[:at], [got[at], expected[at]])
            if gap >= judge.bound:
                difference = f"{found}, {gap:.2g} below the best logit"
                break
            first_tie = first_tie or f"{found}, {gap:.2g} below the best logit"
            here += 1
            if settings.has_rules:
                fault = judge.first_fault(got, at + 1)
                if fault < len(got):
                    difference = (
                        f"prompt {index}: token {fault} is [{got[fault]}], which is "
                        "not the best after its own text"
                    )
                break
            known = expected[: at + 1]
            left = settings.max_new_tokens - len(known)
            if left < 1 or len(known) == len(expected):
                break
            resumed = engine.generate(
                [[*prompt, *known]], dataclasses.replace(settings, max_new_tokens=left)
            )[0]
            got = known + resumed.tokens
        ties += here
        prompts_with_ties += bool(here)
    return Identity(not difference, ties, prompts_with_ties, difference, first_tie)
