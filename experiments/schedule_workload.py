"""The requests of `bench_schedule`: prompts of every set, mixed in equal shares."""

from __future__ import annotations

import itertools
import pathlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import runtime, serving
from experiments.closed_loop import Job
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import prompts as prompt_files
from spec_jax.data.prompts import Prompt
from spec_jax.decode import regimes
from spec_jax.decode.request import Settings
from spec_jax.export.folder import Exported
from spec_jax.target.loading import Target

TEXT_WORDS = 180  # of a prompt cut from a text file
_TEXT_TASK = "Summarise the following text in three sentences.\n\n"


def read_set(name: str, path: str, limit: int) -> list[Prompt]:
    """Prompts of one set: a prompt or workload file, a text cut up, or "builtin".

    Raises:
      UserError: the file cannot be read, or has fewer than two prompts.
    """
    if path.endswith(".txt"):
        try:
            words = pathlib.Path(runtime.find_file(path)).read_text("utf-8").split()
        except (OSError, ValueError) as error:
            raise UserError(
                f"bench.prompt_sets.{name}={path!r} cannot be read ({error}); name a "
                "text file in UTF-8"
            ) from error
        found = [
            prompt_files.user_prompt(
                _TEXT_TASK + " ".join(words[at : at + TEXT_WORDS]), f"{name}:{at}"
            )
            for at in range(0, len(words), TEXT_WORDS)
        ]
    else:
        found = prompt_files.named_prompts(runtime.find_file(path))
    if len(found) < 2:
        raise UserError(
            f"bench.prompt_sets.{name}={path!r} has {len(found)} prompts; give at "
            "least 2: one half is for fitting"
        )
    random.Random(len(found)).shuffle(found)
    return found[: limit or None]


def rendered(
    target: Target,
    exported: Exported,
    prompts: Mapping[str, Sequence[Prompt]],
    limit: int,
) -> tuple[dict[str, list[list[int]]], int]:
    """Token ids of each set, and how many prompts are too long for a slot.

    Raises:
      UserError: a set of which fewer than two fit.
    """
    mask_id = serving.mask_id_of(exported.drafter)
    made: dict[str, list[list[int]]] = {}
    left_out = 0
    for name, each in prompts.items():
        ids = [prompt_files.render_prompt(target, p, mask_id=mask_id) for p in each]
        made[name] = [i for i in ids if len(i) <= limit]
        left_out += len(ids) - len(made[name])
        if len(made[name]) < 2:
            raise UserError(
                f"bench.prompt_sets.{name}: {len(made[name])} of its prompts fit into "
                f"the {limit} tokens that serve.max_context leaves beside "
                "bench.max_new_tokens, and 2 are needed; raise serve.max_context"
            )
    return made, left_out


def split(
    sets: Mapping[str, Sequence[Any]], held_out: int
) -> tuple[list[Any], list[list[Any]]]:
    """`(held out of every set, the rest of each set)`; none is in both."""
    fitting: list[Any] = []
    measured = []
    for values in sets.values():
        count = min(held_out, len(values) // 2)
        fitting += values[:count]
        measured.append(list(values[count:]))
    return fitting, measured


def settings_of(cfg: schema.BenchSchedule, rng: random.Random, cap: int) -> Settings:
    """A request's settings: greedy, or one of the sampled share."""
    changes: dict[str, Any] = {"max_new_tokens": cap, "seed": rng.randrange(2**31)}
    if rng.random() >= cfg.sampled_share:
        changes |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return serving.settings_from(cfg.serve, **changes)


def mixed(
    cfg: schema.BenchSchedule, sets: Sequence[Sequence[list[int]]], count: int
) -> list[Job]:
    """Requests with equal shares of all sets, in turn; their lengths differ.

    A set with too few prompts begins again. Caps are drawn between a half and the
    whole of `bench.max_new_tokens`, so that neighbours do not end together.
    """
    rng = random.Random(cfg.seed)
    turns = itertools.cycle([itertools.cycle(values) for values in sets])
    most = cfg.bench.max_new_tokens
    jobs = []
    for _ in range(count):
        cap = rng.randint((most + 1) // 2, most)
        jobs.append(Job(next(next(turns)), settings_of(cfg, rng, cap)))
    return jobs


def regime_of(cfg: schema.BenchSchedule) -> str:
    """The sampling regime that the temperatures are for."""
    if not cfg.sampled_share:
        return regimes.GREEDY
    return f"{regimes.regime_of(cfg.serve)} in {cfg.sampled_share:g} of requests"
