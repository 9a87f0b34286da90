"""Greedy identity: speculative text equals plain text, or the difference is a tie.

Rows computed in different static shapes may round differently, so a text may
part from the plain one where the plain logits' top two are closer than
`NEAR_TIE`. Such a place is counted, the rest is resumed teacher-forced from the
plain token, and the claim stays true; any other difference makes it false.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import masks
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Settings
from spec_jax.target import model
from spec_jax.target.cache import init_cache
from spec_jax.target.spec import TargetSpec

NEAR_TIE = 1e-3
_PAD = 64


@dataclasses.dataclass(frozen=True)
class Identity:
    """Verdict over a set of prompts.

    Attributes:
      identical: no difference but near-ties.
      near_ties: places where a near-tie parted the texts.
      prompts_with_ties: prompts that had one.
      first_difference: "" or a sentence about the first real difference.
    """

    identical: bool
    near_ties: int
    prompts_with_ties: int
    first_difference: str


def plain_gap(spec: TargetSpec, params, tokens: Sequence[int]) -> float:
    """Top-two gap of the plain logits that follow `tokens`."""
    count = len(tokens)
    size = -(-count // _PAD) * _PAD
    padded_1T = np.full((1, size), spec.pad_id, np.int32)
    padded_1T[0, :count] = tokens
    row_T = jnp.arange(size)
    output = _forward(spec, params, jnp.asarray(padded_1T), row_T)
    logits_V = np.asarray(model.logits(params, output[0, count - 1]))
    top = np.partition(logits_V, -2)[-2:]
    return float(abs(top[1] - top[0]))


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

    Args:
      spec, params: the target, for the plain logits at a difference.
      engine: the speculative engine, to resume past a near-tie.
      prompts: token ids.
      plain: what plain decoding emitted for each.
      speculative: what the speculative engine emitted.
      settings: greedy settings both were decoded with.
    """
    ties = prompts_with_ties = 0
    difference = ""
    for index, prompt in enumerate(prompts):
        expected, got = list(plain[index]), list(speculative[index])
        here = 0
        while got != expected and not difference:
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(got, expected, strict=False))
                    if a != b
                ),
                min(len(got), len(expected)),
            )
            known = expected[: at + 1]
            gap = plain_gap(spec, params, [*prompt, *expected[:at]])
            if at >= len(expected) or gap >= NEAR_TIE:
                difference = (
                    f"prompt {index}: token {at} is {got[at : at + 1]}, plain decoding "
                    f"gives {expected[at : at + 1]}, with a top-two gap of {gap:.2g}"
                )
                break
            here += 1
            left = settings.max_new_tokens - len(known)
            if left < 1 or len(known) == len(expected):
                break
            resumed = engine.generate(
                [[*prompt, *known]], dataclasses.replace(settings, max_new_tokens=left)
            )[0]
            got = known + resumed.tokens
        ties += here
        prompts_with_ties += bool(here)
    return Identity(not difference, ties, prompts_with_ties, difference)
