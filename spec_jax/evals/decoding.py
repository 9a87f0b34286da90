"""What a drafter is worth: a real decode loop, plain and speculative in turn.

The four lengths stay apart: block, proposal M, verified rows, emitted tokens.
Accept length (tau) is tokens emitted by rounds, after trimming, per round; the
token that prefill draws is not a round's. Outputs that repeat an 8-gram three
times are reported apart: loops flatter every drafter.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.data.samples import distinct_ngrams, is_looping, longest_run
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Generation, Settings


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One prompt, decoded one at a time.

    Attributes:
      generation: tokens and rounds.
      seconds: wall time from the first token's result to the last.
    """

    generation: Generation
    seconds: float

    @property
    def looping(self) -> bool:
        return is_looping(self.generation.tokens)


def decode_one(engine: Engine, prompt: Sequence[int], settings: Settings) -> Decoded:
    """Decodes one prompt alone and times its rounds (prefill excluded)."""
    clock: dict[str, float] = {}

    def on_tokens(handle, new, from_prefill):
        del handle, new
        if from_prefill:
            clock["start"] = time.perf_counter()

    handle = engine.submit(prompt, settings)
    done = engine.run(on_tokens)
    end = time.perf_counter()
    return Decoded(done[handle], end - clock.get("start", end))


def decode_pairs(
    plain: Engine,
    speculative: Engine,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Decoded], list[Decoded]]:
    """Each prompt plainly and speculatively, in alternating order."""
    ours: list[Decoded] = []
    theirs: list[Decoded] = []
    for index, prompt in enumerate(prompts):
        turns = [(plain, theirs), (speculative, ours)]
        for engine, into in turns if index % 2 == 0 else turns[::-1]:
            into.append(decode_one(engine, prompt, settings))
        say(f"decoded {index + 1}/{len(prompts)}")
    return theirs, ours


def accept_length(items: Sequence[Generation]) -> float | None:
    """Tokens emitted by rounds per round, over a set; None without rounds."""
    rounds = sum(len(g.emitted) for g in items)
    return sum(sum(g.emitted) for g in items) / rounds if rounds else None


def accept_by_position(items: Sequence[Generation], num_draft: int) -> list[float]:
    """Share of rounds in which draft j and all before it were accepted."""
    accepted = np.array([a for g in items for a in g.accepted])
    if not accepted.size:
        return [0.0] * num_draft
    return [float((accepted >= j + 1).mean()) for j in range(num_draft)]


def summary(plain: Sequence[Decoded], ours: Sequence[Decoded], num_draft: int) -> dict:
    """Metrics of one prompt set: the sets' looping outputs stand apart.

    `speedup` is the ratio of tokens per second, both over the rounds of the same
    non-looping prompts, decoded in turn in one run.
    """
    # Greedy texts are equal; sampled ones are not, and either may loop.
    looping = [a.looping or b.looping for a, b in zip(plain, ours, strict=True)]
    keep = [i for i, loops in enumerate(looping) if not loops]
    apart = [i for i, loops in enumerate(looping) if loops]

    def rate(items, chosen):
        tokens = sum(len(items[i].generation.tokens) - 1 for i in chosen)
        seconds = sum(items[i].seconds for i in chosen)
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    plain_rate, our_rate = rate(plain, keep), rate(ours, keep)
    texts = [d.generation.tokens for d in plain]
    steps = sum(len(plain[i].generation.emitted) for i in keep)
    return {
        "prompts": len(plain),
        "looping_prompts": len(apart),
        "accept_length": accept_length([ours[i].generation for i in keep]),
        "accept_length_looping": accept_length([ours[i].generation for i in apart]),
        "accept_by_position": accept_by_position(
            [ours[i].generation for i in keep], num_draft
        ),
        "tokens_per_s": our_rate,
        "plain_tokens_per_s": plain_rate,
        "speedup": our_rate / plain_rate if our_rate and plain_rate else None,
        "plain_step_ms": (
            1e3 * sum(plain[i].seconds for i in keep) / steps if steps else None
        ),
        "mean_tokens": float(np.mean([len(t) for t in texts])) if texts else 0.0,
        "distinct_bigrams": float(np.mean([distinct_ngrams(t) for t in texts])),
        "longest_run": max((longest_run(t) for t in texts), default=0),
    }


def reads_features(params: Mapping[str, Any]) -> bool:
    """Whether a drafter has weights that read the target's features."""
    return "fc" in params.get("params", {})


def with_shuffled_features(params: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """The control: the same drafter, its features' channels shuffled.

    Shuffling the concatenated feature channels before `fc` is the same as
    shuffling the rows of `fc` that read them, so the control is a set of weights
    and needs no program of its own. Whatever it still accepts comes from the tokens
    (the anchor, and EAGLE's token of each row) and from chance, not from what the
    target computed. If it hardly drops, capture is broken.

    EAGLE's fed-back outputs go through the same rows of its `fc`, so they are
    shuffled with the features they stand for.

    Args:
      params: a drafter's parameters with the features' projection `fc`.
      seed: of the permutation.

    Raises:
      ValueError: the drafter has no `fc`.
    """
    tree = dict(params["params"])
    if "fc" not in tree:
        raise ValueError("the drafter has no fc, so its features cannot be shuffled")
    order, first = np.arange(tree["fc"].shape[0]), _token_rows(tree)
    order[first:] = np.random.default_rng(seed).permutation(order[first:])
    tree["fc"] = tree["fc"][order]
    return {**params, "params": tree}


def _token_rows(tree: Mapping[str, Any]) -> int:
    """Leading rows of `fc` that read the token's embedding, not features.

    EAGLE's `fc` makes its layer's whole input out of `[embedding; feature]`. Of the
    others `fc` reads features alone: EAGLE-3's layer is given the embedding beside
    what `fc` makes (its input is 2 D wide), a block drafter has no such layer.
    """
    width, layer = tree["fc"].shape[1], tree.get("layer")
    alone = isinstance(layer, Mapping) and layer["qkv"].shape[0] == width
    return width if alone else 0


def served_accept_length(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings
) -> float:
    """The validation metric: tau over the non-looping outputs of held-out prompts.

    All outputs count when every one of them loops.
    """
    made = engine.generate([list(p) for p in prompts], settings)
    kept = [g for g in made if not is_looping(g.tokens)] or made
    return accept_length(kept) or 1.0
