"""Text for a drafter to learn from, made by the target itself.

The origin of the answers beats their amount: they must come from the target,
through its own chat template. Prompts come from a file or are the target's own
user turns, completed from the template's prefix. Answers are decoded by the
same engine that serves, in groups; each finished group is one checked file, so
a run killed anywhere continues and makes the same samples again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import time
from collections.abc import Callable, Sequence

import numpy as np

from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import files
from spec_jax.data import prompts as prompt_files
from spec_jax.data import samples as sample_files
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Settings
from spec_jax.target.loading import Target

GROUP = 128
_HERE = "\u2063user-turn\u2063"


@dataclasses.dataclass(frozen=True)
class Synthesis:
    """Prompts and answers, and what they cost.

    Attributes:
      train: samples to train on.
      held_out: prompts (token ids) kept away from training, for validation.
      held_out_sets: the set of each: its file's name, "builtin" or "synth".
      seconds: wall time, added up over the runs that made them.
      answer_tokens: answer tokens of `train`.
      looping: samples left out because they loop.
    """

    train: tuple[sample_files.Sample, ...]
    held_out: tuple[tuple[int, ...], ...]
    held_out_sets: tuple[str, ...]
    seconds: float
    answer_tokens: int
    looping: int


def user_turn_prefix(target: Target, system: str = "", opening: str = "") -> list[int]:
    """Token ids of the template up to the user's text, and its first words."""
    messages = [{"role": "user", "content": _HERE}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    text = target.chat_template.render(messages, add_generation_prompt=False)
    before, found, _ = text.partition(_HERE)
    if not found:
        raise UserError(
            "the chat template rewrites the user's text, so the target cannot be asked "
            "to complete it; set data.num_synth_prompts=0 and name data.prompts"
        )
    return target.tokenizer.encode(before) + target.tokenizer.encode(opening)


def synthesise_prompts(
    target: Target,
    engine: Callable[[], Engine],
    data: schema.Data,
    seed: int,
    folder: pathlib.Path,
    say: Callable[[str], None],
) -> list[prompt_files.Prompt]:
    """User turns the target makes up itself; unfinished and repeated ones drop out."""
    openings = data.synth_openings or ("",)
    prefixes = [user_turn_prefix(target, data.system, words) for words in openings]
    cache = folder / "turns"
    cache.mkdir(parents=True, exist_ok=True)
    texts: dict[str, None] = {}
    group, empty = 0, 0
    while len(texts) < data.num_synth_prompts:
        if group not in sample_files.list_chunks(str(cache)):
            settings = [
                Settings(
                    max_new_tokens=data.synth_max_tokens,
                    temperature=data.synth_temperature,
                    top_p=data.synth_top_p,
                    seed=_seed(seed, 1, group, i),
                )
                for i in range(GROUP)
            ]
            begun = [i % len(openings) for i in range(GROUP)]
            made = engine().generate([prefixes[i] for i in begun], settings)
            turns = [
                sample_files.make_sample(
                    prefixes[begun[i]],
                    g.tokens,
                    f"turn/{group}/{i}/{begun[i]}",
                    data.synth_temperature,
                )
                for i, g in enumerate(made)
                if g.finish_reason == "stop"
            ]
            if not turns:
                raise UserError(
                    f"data.synth_max_tokens={data.synth_max_tokens}: none of {GROUP} "
                    "turns that the target made up ended within it; raise it"
                )
            sample_files.write_chunk(str(cache), group, turns)
        before = len(texts)
        for turn in sample_files.read_chunk(str(cache), group):
            body = turn.answer[:-1]
            if target.tokenizer.special_ids & set(body) or turn.looping:
                continue
            opening = openings[int(turn.source.rsplit("/", 1)[1])]
            text = (opening + target.tokenizer.decode(body)).strip()
            if len(text) >= 8:
                texts.setdefault(text)
        empty = empty + 1 if len(texts) == before else 0
        if empty == 3:
            raise UserError(
                f"data.num_synth_prompts={data.num_synth_prompts}: the target made "
                f"only {len(texts)} distinct turns; raise data.synth_temperature or "
                "data.synth_max_tokens, or ask for fewer"
            )
        group += 1
        ready = min(len(texts), data.num_synth_prompts)
        say(f"prompts {ready}/{data.num_synth_prompts}")
    chosen = list(texts)[: data.num_synth_prompts]
    return [prompt_files.user_prompt(t, f"synth/{i}") for i, t in enumerate(chosen)]


def read_prompts(data: schema.Data) -> list[prompt_files.Prompt]:
    """The prompts of every file that the recipe names, in file order.

    Raises:
      UserError: an absent or unreadable file.
    """
    found: list[prompt_files.Prompt] = []
    for path in filter(None, data.prompts.split(",")):
        found += prompt_files.named_prompts(path.strip())
    return found


def set_of(source: str) -> str:
    """The prompt set that a prompt's source names: its file, without suffixes."""
    name = re.split(r"[:/]", source)[0]
    return name.removesuffix(".gz").removesuffix(".jsonl")


def gather_prompts(
    target: Target,
    engine: Callable[[], Engine],
    data: schema.Data,
    seed: int,
    folder: pathlib.Path,
    say: Callable[[str], None],
) -> tuple[list, list]:
    """Prompts to train on and prompts held out, in a seeded order."""
    from_file = read_prompts(data)
    # Shuffled before it is cut: a larger max_file_prompts only adds prompts.
    from_file = _shuffled(from_file, seed, 2)[: data.max_file_prompts or None]
    made = synthesise_prompts(target, engine, data, seed, folder, say)
    if from_file and not data.train_on_prompts:
        return made, from_file[: data.held_out]
    shuffled = [*from_file, *made]
    if from_file and made:
        shuffled = _shuffled(shuffled, seed, 6)
    if len(shuffled) <= data.held_out:
        raise UserError(
            f"data.held_out={data.held_out} leaves nothing of {len(shuffled)} prompts "
            "to train on; hold out fewer or add prompts"
        )
    return shuffled[data.held_out :], shuffled[: data.held_out]


def synthesise(
    target: Target,
    engine: Callable[[], Engine],
    data: schema.Data,
    seed: int,
    folder: pathlib.Path,
    mask_id: int = -1,
    say: Callable[[str], None] = lambda text: None,
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

    Raises:
      UserError: no usable prompts, or a torn sample file.
    """
    started = time.monotonic()
    render = functools.partial(_render, target, data, mask_id)
    if data.samples:
        return _from_file(target, data, seed, render)
    train, held = gather_prompts(target, engine, data, seed, folder, say)
    room = data.max_tokens - data.max_new_tokens
    if data.thinking:  # a template without the switch is refused here
        target.chat_template.render([{"role": "user", "content": "?"}], True, True)
    held_pairs = [(p, ids) for p in held if (ids := render(p)) is not None]
    pairs = [(p, ids) for p in train if (ids := render(p)) is not None]
    if not pairs or not held_pairs:
        raise UserError(
            f"data.max_tokens={data.max_tokens} leaves {room} tokens for a prompt: "
            f"{len(pairs)} of {len(train)} prompts to train on and "
            f"{len(held_pairs)} of {len(held)} held out fit (and hold no special "
            "token); raise it, lower data.max_new_tokens or name other prompts"
        )
    left_out = len(train) + len(held) - len(pairs) - len(held_pairs)
    if left_out:
        say(
            f"{left_out} prompts left out: longer than {room} tokens, or with special "
            "tokens in them"
        )
    answers = folder / "answers"
    answers.mkdir(parents=True, exist_ok=True)
    done = set(sample_files.list_chunks(str(answers)))
    samples: list[sample_files.Sample] = []
    made_tokens, clock = 0, time.monotonic()
    for group, first in enumerate(range(0, len(pairs), GROUP)):
        part = pairs[first : first + GROUP]
        if group not in done:
            settings = [
                _answer_settings(data, seed, group, i) for i in range(len(part))
            ]
            made = engine().generate([ids for _, ids in part], settings)
            chunk = [
                sample_files.make_sample(ids, g.tokens, p.source, s.temperature)
                for (p, ids), g, s in zip(part, made, settings, strict=True)
                if g.finish_reason in ("stop", "length")
            ]
            sample_files.write_chunk(str(answers), group, chunk)
            made_tokens += sum(len(s.answer) for s in chunk)
        kept = sample_files.read_chunk(str(answers), group)
        asked = {tuple(ids) for _, ids in part}
        if any(s.tokens[: s.prompt_len] not in asked for s in kept):
            raise UserError(
                f"{answers / sample_files.chunk_name(group)} answers other prompts "
                f"than data.prompts={data.prompts!r} holds now; restore that file, or "
                "name another --workdir="
            )
        samples += kept
        ready = min(first + GROUP, len(pairs))
        speed = made_tokens / max(time.monotonic() - clock, 1e-6)
        eta = _eta(samples, len(pairs), speed)
        say(f"answers {ready}/{len(pairs)}, {speed:.0f} tokens/s{eta}")
    corpus = sample_files.select_samples(
        samples,
        data.max_tokens,
        looping=data.looping,
        template=target.chat_template.hash[:12],
    )
    seconds = _add_seconds(folder, time.monotonic() - started)
    return Synthesis(
        train=corpus.samples,
        held_out=tuple(tuple(ids) for _, ids in held_pairs),
        held_out_sets=tuple(set_of(p.source) for p, _ in held_pairs),
        seconds=seconds,
        answer_tokens=sum(len(s.answer) for s in corpus.samples),
        looping=corpus.looping,
    )


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


def _from_file(target: Target, data: schema.Data, seed: int, render) -> Synthesis:
    """Samples made before, and prompts for validation that none of them answers.

    Without prompt files a seeded share of the samples' prompts is held out.
    """
    samples = sample_files.read_file(data.samples, target.spec.vocab_size)
    if data.prompts:
        held = _not_answered(data, seed, render, samples)
    else:
        order = np.random.default_rng([seed, 5]).permutation(len(samples))
        if len(samples) <= data.held_out:
            raise UserError(
                f"data.held_out={data.held_out} leaves nothing of {len(samples)} "
                f"samples in {data.samples}; hold out fewer"
            )
        chosen = [samples[i] for i in order[: data.held_out]]
        held = [(s.tokens[: s.prompt_len], set_of(s.source)) for s in chosen]
        samples = [samples[i] for i in order[data.held_out :]]
    corpus = sample_files.select_samples(
        samples, data.max_tokens, looping=data.looping, max_skipped=1.0
    )
    return Synthesis(
        train=corpus.samples,
        held_out=tuple(tuple(ids) for ids, _ in held),
        held_out_sets=tuple(name for _, name in held),
        seconds=0.0,
        answer_tokens=sum(len(s.answer) for s in corpus.samples),
        looping=corpus.looping,
    )


def _not_answered(data: schema.Data, seed: int, render, samples) -> list:
    """Up to `held_out` prompts of each file that no sample answers, and the set."""
    answered = {tuple(s.tokens[: s.prompt_len]) for s in samples}
    found: dict[str, list] = {}
    for prompt in _shuffled(read_prompts(data), seed, 2):
        group = found.setdefault(set_of(prompt.source), [])
        if len(group) < data.held_out:
            ids = render(prompt)
            if ids is not None and tuple(ids) not in answered:
                group.append(ids)
    # One of each file in turn: whoever takes the first few takes from all.
    held = [
        (group[i], name)
        for i in range(data.held_out)
        for name, group in found.items()
        if i < len(group)
    ]
    if not held:
        raise UserError(
            f"data.prompts={data.prompts!r} leaves no prompt for validation: each is "
            f"answered in data.samples={data.samples!r} or does not fit; name other "
            "prompts"
        )
    return held


def _answer_settings(data: schema.Data, seed: int, group: int, index: int) -> Settings:
    greedy = np.random.default_rng([seed, 3, group, index]).random() < data.greedy_share
    return Settings(
        max_new_tokens=data.max_new_tokens,
        temperature=0.0 if greedy else data.answer_temperature,
        top_p=1.0 if greedy else data.answer_top_p,
        seed=_seed(seed, 4, group, index),
    )


def _shuffled(items: list, seed: int, use: int) -> list:
    order = np.random.default_rng([seed, use]).permutation(len(items))
    return [items[i] for i in order]


def _seed(*parts: int) -> int:
    return int(np.random.default_rng(list(parts)).integers(0, 2**31))


def _add_seconds(folder: pathlib.Path, seconds: float) -> float:
    """Adds this run's wall time to the folder's and returns the sum."""
    path = folder / "seconds.json"
    try:
        before = float(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or torn: only a time
        before = 0.0
    files.write_atomically(str(path), json.dumps(before + seconds).encode())
    return before + seconds


def _eta(samples: Sequence, total: int, speed: float) -> str:
    if not samples or speed <= 1:
        return ""
    mean = sum(len(s.answer) for s in samples) / len(samples)
    return f", {(total - len(samples)) * mean / speed / 60:.1f} min left"
