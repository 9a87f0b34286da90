"""Text for a drafter to learn from, made by the target itself.

The origin of the answers beats their amount: they must come from the target,
through its own chat template (which prompts: `synthesis_prompts`). They are decoded
by the same engine that serves, in groups; each finished group is one checked file,
so a run killed anywhere continues and makes the same samples again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments import clock
from experiments.synthesis_prompts import (
    Pair,
    Render,
    facts_of,
    gather_prompts,
    read_prompts,
    seed_of,
    set_of,
    shuffled,
    split,
)
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import prompts as prompt_files
from spec_jax.data import provenance, recording
from spec_jax.data import samples as sample_files
from spec_jax.data.store import StoreWriter
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Settings
from spec_jax.target.loading import Target

GROUP = 128
ANSWERS = "answers"

# Opens the store that keeps features while answers are generated: of so many groups
# of so many prompts, made from this, with facts by name. None: what is there was
# captured, and is not recorded into.
Record = Callable[[int, int, Any, dict[str, Any]], StoreWriter | None]


@dataclasses.dataclass(frozen=True)
class Synthesis:
    """Prompts and answers, and what they cost.

    Attributes:
      train: samples to train on.
      held_out: prompts (token ids) kept away from training, for validation.
      held_out_sets: the set of each: its file's name, "builtin" or "synth".
      seconds: wall time, added up over the runs that made them.
      answer_tokens: answer tokens of `train`.
      looping: samples left out, or cut, because they loop.
      recorded: their features are in the store, kept while they were generated.
    """

    train: tuple[sample_files.Sample, ...]
    held_out: tuple[tuple[int, ...], ...]
    held_out_sets: tuple[str, ...]
    seconds: float
    answer_tokens: int
    looping: int
    recorded: bool = False


def synthesise(
    target: Target,
    engine: Callable[[], Engine],
    data: schema.Data,
    seed: int,
    folder: pathlib.Path,
    mask_id: int = -1,
    say: Callable[[str], None] = lambda text: None,
    group_size: int = GROUP,
    record: Record | None = None,
) -> Synthesis:
    """Makes (or reads back) the samples of a recipe.

    Args:
      target: the frozen target.
      engine: makes (once) an engine that decodes plainly over the same target;
        not called when everything is there.
      data: what to make.
      seed: of prompts, settings and order.
      folder: where groups are kept.
      mask_id: the drafter's mask token; prompts that hold it are left out.
      say: progress, one line at a time.
      group_size: prompts decoded, and kept, together.
      record: see `Record`; the engine must record rows. None: text alone.

    Raises:
      UserError: no usable prompts, a torn sample file, or a folder or file of
        samples that another recipe or target made.
    """
    render = functools.partial(_render, target, data, mask_id)
    if data.samples:
        return _from_file(target, data, seed, render, say)
    if data.thinking:  # a template without the switch is refused here
        target.chat_template.render([{"role": "user", "content": "?"}], True, True)
    with clock.Clock(folder / clock.NAME).running("synthesis") as seconds:
        train, held = gather_prompts(
            target, engine, data, seed, folder, render, say, group_size
        )
        samples, recorded = _answers(
            target, engine, data, seed, folder, train, say, group_size, record
        )
        corpus = sample_files.select_samples(
            samples,
            data.max_tokens,
            looping=data.looping,
            template=target.chat_template.hash[:12],
        )
        say(f"samples: {corpus}")
        return Synthesis(
            train=corpus.samples,
            held_out=tuple(ids for _, ids in held),
            held_out_sets=tuple(set_of(p.source) for p, _ in held),
            seconds=seconds(),
            answer_tokens=sum(len(s.answer) for s in corpus.samples),
            looping=corpus.looping,
            recorded=recorded,
        )


def _answers(
    target: Target,
    engine: Callable[[], Engine],
    data: schema.Data,
    seed: int,
    folder: pathlib.Path,
    pairs: Sequence[Pair],
    say: Callable[[str], None],
    group_size: int,
    record: Record | None,
) -> tuple[list[sample_files.Sample], bool]:
    """The target's answers to rendered prompts, group by group.

    Returns:
      The samples, and whether the store keeps the features of all of them.
    """
    answers = folder / ANSWERS
    answers.mkdir(parents=True, exist_ok=True)
    facts = facts_of(
        target,
        data,
        seed,
        "greedy_share",
        "answer_temperature",
        "answer_top_p",
        "max_new_tokens",
    )
    done = set(sample_files.list_chunks(str(answers)))
    provenance.claim(str(answers), facts, started=bool(done), say=say)
    parts = [pairs[i : i + group_size] for i in range(0, len(pairs), group_size)]
    opened: Any = contextlib.nullcontext()
    if record is not None:
        kept_by = {name: getattr(data, name) for name in ("looping", "max_tokens")}
        prompts = [ids for _, ids in pairs]
        named = facts | {f"data.{name}": value for name, value in kept_by.items()}
        named["prompts (sha256)"] = hashlib.sha256(repr(prompts).encode()).hexdigest()
        made_from = [facts, kept_by, prompts]
        opened = record(len(parts), group_size, made_from, named) or opened
    samples: list[sample_files.Sample] = []
    made_tokens, ready, started = 0, 0, time.monotonic()
    with opened as store:
        for group, part in enumerate(parts):
            records = store is not None and group not in store.written
            if group not in done or records:
                settings = [
                    _answer_settings(data, seed, group, i, records)
                    for i in range(len(part))
                ]
                made = engine().generate([list(ids) for _, ids in part], settings)
                chunk, rows = _samples_of(target, part, made, settings)
                if records:
                    _write_rows(store, group, chunk, rows, data, len(pairs))
                sample_files.write_chunk(str(answers), group, chunk)
                made_tokens += sum(len(s.answer) for s in chunk)
            kept = sample_files.read_chunk(str(answers), group)
            asked = {ids for _, ids in part}
            if any(s.tokens[: s.prompt_len] not in asked for s in kept):
                raise UserError(
                    f"{answers / sample_files.chunk_name(group)} answers other prompts "
                    f"than data.prompts={data.prompts!r} holds now; restore that file, "
                    "or name another --workdir="
                )
            samples += kept
            ready += len(part)
            speed = made_tokens / max(time.monotonic() - started, 1e-6)
            eta = _eta(samples, len(pairs), speed)
            say(f"answers {ready}/{len(pairs)}, {speed:.0f} tokens/s{eta}")
    if len(samples) < len(pairs):
        say(f"{len(pairs) - len(samples)} prompts without an answer in {answers}")
    return samples, store is not None


def _samples_of(target: Target, part: Sequence[Pair], made, settings):
    """Samples of a group, and the features that each came with."""
    samples, rows = [], []
    for (prompt, ids), one, asked in zip(part, made, settings, strict=True):
        if one.finish_reason in ("stop", "length"):
            samples.append(
                sample_files.make_sample(
                    ids,
                    one.tokens,
                    prompt.source,
                    asked.temperature,
                    target.fingerprint,
                )
            )
            rows.append((one.features, one.hidden))
    return samples, rows


def _write_rows(store: StoreWriter, group: int, chunk, rows, data, total: int) -> None:
    """The features of a group's usable samples."""
    pairs = [
        (kept, each)
        for sample, each in zip(chunk, rows, strict=True)
        for kept in sample_files.usable([sample], data.max_tokens, data.looping)
    ]
    samples, kept_rows = [kept for kept, _ in pairs], [each for _, each in pairs]
    recording.write_recorded(store, group, samples, kept_rows, total)


def _render(target: Target, data: schema.Data, mask_id: int, prompt):
    """Token ids of a prompt, or None for one that cannot be used."""
    if data.system:
        system = {"role": "system", "content": data.system}
        prompt = dataclasses.replace(prompt, messages=(system, *prompt.messages))
    room = data.max_tokens - data.max_new_tokens
    try:
        return prompt_files.render_prompt(
            target, prompt, context=room, mask_id=mask_id, thinking=data.thinking
        )
    except UserError:
        return None


def _from_file(
    target: Target,
    data: schema.Data,
    seed: int,
    render: Render,
    say: Callable[[str], None],
) -> Synthesis:
    """Samples made before, and prompts for validation that none of them answers.

    Without prompt files some of the samples' own prompts are held out, each with
    all of its answers.
    """
    samples = sample_files.read_file(data.samples, target.spec.vocab_size)
    _check_target(samples, target, data.samples)
    if data.prompts:
        held = _not_answered(data, seed, render, samples)
    else:
        samples = shuffled(samples, seed, 5)
        sources: dict[tuple[int, ...], str] = {}
        for s in samples:
            sources.setdefault(s.tokens[: s.prompt_len], s.source)
        room = data.max_tokens - data.max_new_tokens
        fitting = [ids for ids in sources if len(ids) <= room][: data.held_out]
        if len(fitting) in (0, len(sources)):
            raise UserError(
                f"data.held_out={data.held_out} leaves nothing to validate with, or to "
                f"train on, of {len(sources)} prompts in {data.samples}; hold out "
                f"fewer, or raise data.max_tokens={data.max_tokens}"
            )
        held = [(ids, set_of(sources[ids])) for ids in fitting]
        samples = [s for s in samples if s.tokens[: s.prompt_len] not in set(fitting)]
    corpus = sample_files.select_samples(
        samples, data.max_tokens, looping=data.looping, long_is_fault=False
    )
    say(f"samples of {data.samples}: {corpus}")
    return Synthesis(
        train=corpus.samples,
        held_out=tuple(tuple(ids) for ids, _ in held),
        held_out_sets=tuple(name for _, name in held),
        seconds=0.0,
        answer_tokens=sum(len(s.answer) for s in corpus.samples),
        looping=corpus.looping,
    )


def _check_target(samples, target: Target, path: str) -> None:
    """Refuses answers that say they are another target's."""
    for sample in samples:
        maker = sample.target_fingerprint
        if maker not in ("", target.fingerprint):
            raise UserError(
                f"data.samples={path!r} holds answers of target {maker[:12]}, this is "
                f"{target.fingerprint[:12]}; name samples of this target, or leave "
                "data.samples out to make them"
            )


def _not_answered(
    data: schema.Data, seed: int, render: Render, samples
) -> list[tuple[tuple[int, ...], str]]:
    """Up to `held_out` prompts of each file that no sample answers, and the set."""
    answered = {s.tokens[: s.prompt_len] for s in samples}
    prompts = shuffled(read_prompts(data), seed, 2)
    found = split(prompts, render, data.held_out, 0, answered)
    if not found.held_out:
        raise UserError(
            f"data.prompts={data.prompts!r} leaves no prompt for validation: each is "
            f"answered in data.samples={data.samples!r} or does not fit; name other "
            "prompts"
        )
    return [(ids, set_of(p.source)) for p, ids in found.held_out]


def _answer_settings(
    data: schema.Data, seed: int, group: int, index: int, features: bool
) -> Settings:
    greedy = np.random.default_rng([seed, 3, group, index]).random() < data.greedy_share
    return Settings(
        max_new_tokens=data.max_new_tokens,
        temperature=0.0 if greedy else data.answer_temperature,
        top_p=1.0 if greedy else data.answer_top_p,
        seed=seed_of(seed, 4, group, index),
        features=features,
    )


def _eta(samples: Sequence, total: int, speed: float) -> str:
    if not samples or speed <= 1:
        return ""
    mean = sum(len(s.answer) for s in samples) / len(samples)
    return f", {(total - len(samples)) * mean / speed / 60:.1f} min left"
