"""Plain and speculative decoding of the same prompts: one set's whole verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Settings
from spec_jax.evals import compiles, decoding, identity

# Share of prompts that may have a near-tie (design, section 13.2); one always may.
MAX_NEAR_TIES = 0.01


def measure(
    plain: Engine,
    ours: Engine,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], list[decoding.Decoded], list[decoding.Decoded]]:
    """Decodes a set both ways, one prompt at a time, in alternating order.

    Args:
      plain: an engine without a drafter, of one slot.
      ours: the speculative engine over the same target, of one slot.
      prompts: token ids.
      settings: of every request; identity is claimed for greedy ones only.
      say: progress.

    Returns:
      Metrics (see `decoding.summary`, plus compiles and `identity_metrics`), the
      plain runs and ours.
    """
    # Once before the clock: the first call of a program is slower.
    decoding.decode_pairs(plain, ours, prompts[:1], settings)
    with compiles.counting() as counted:
        base, runs = decoding.decode_pairs(plain, ours, prompts, settings, say)
    found = decoding.summary(base, runs, ours.window - 1)
    found["compiles_after_warmup"] = counted.compiles
    tokens = [[d.generation.tokens for d in made] for made in (base, runs)]
    found |= greedy_identity(ours, prompts, *tokens, settings)
    return found, base, runs


def greedy_identity(engine, prompts, plain, ours, settings) -> dict[str, Any]:
    """`identity_metrics` of greedy texts; nothing where they are sampled.

    Args:
      engine: what made `ours`.
      prompts: token ids.
      plain: what plain decoding answers.
      ours: what the engine answered.
      settings: of every request.
    """
    if settings.temperature != 0:
        return {}
    same = identity.compare(
        engine.spec, engine.weights.target, engine, prompts, plain, ours, settings
    )
    return identity_metrics(same, len(prompts))


def identity_metrics(same: identity.Identity, num_prompts: int) -> dict[str, Any]:
    """What a report says of greedy identity.

    Returns:
      `greedy_identical`: no difference but near-ties, and these on at most
      `MAX_NEAR_TIES` of the prompts or on one; `near_ties`: their number;
      `near_tie_share`: of the prompts; `first_tie` and `first_difference`: where the
      first of each is, and how far apart the two tokens are.
    """
    few = same.prompts_with_ties <= max(1, MAX_NEAR_TIES * num_prompts)
    return {
        "greedy_identical": same.identical and few,
        "near_ties": same.near_ties,
        "near_tie_share": same.prompts_with_ties / max(num_prompts, 1),
        "first_tie": same.first_tie,
        "first_difference": same.first_difference,
    }
