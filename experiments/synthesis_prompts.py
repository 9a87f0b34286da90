"""Prompts to train on and prompts to validate with: never the same ones.

They come from the files that a recipe names, or are the target's own user turns,
completed from the template's prefix. Two prompts of the same token ids are one.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence

import numpy as np

from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import prompts as prompt_files
from spec_jax.data import provenance
from spec_jax.data import samples as sample_files
from spec_jax.data.prompts import Prompt
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Settings
from spec_jax.target.loading import Target

_HERE = "\u2063user-turn\u2063"

# Token ids of a prompt, or None for one that cannot be used.
Render = Callable[[Prompt], Sequence[int] | None]
# A prompt and its token ids.
Pair = tuple[Prompt, tuple[int, ...]]


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


def facts_of(target: Target, data: schema.Data, seed: int, *fields: str) -> dict:
    """What decides the text that a target makes: itself, and fields of `data`."""
    embed_VD = target.params["params"]["embed"]
    return {
        "target fingerprint": target.fingerprint[:12],
        "chat template": target.chat_template.hash[:12],
        "tokenizer": target.tokenizer.hash[:12],
        "target.dtype": str(embed_VD.dtype),
        "seed": seed,
        **{f"data.{field}": getattr(data, field) for field in fields},
    }


def synthesise_prompts(
    target: Target,
    engine: Callable[[], Engine],
    data: schema.Data,
    seed: int,
    folder: pathlib.Path,
    say: Callable[[str], None],
    group_size: int,
) -> list[Prompt]:
    """User turns the target makes up itself; unfinished and repeated ones drop out.

    Raises:
      UserError: turns that do not end or do not differ, or a folder of turns that
        another recipe made.
    """
    if not data.num_synth_prompts:
        return []
    openings = data.synth_openings or ("",)
    prefixes = [user_turn_prefix(target, data.system, words) for words in openings]
    cache = folder / "turns"
    cache.mkdir(parents=True, exist_ok=True)
    facts = facts_of(
        target,
        data,
        seed,
        "system",
        "synth_openings",
        "synth_temperature",
        "synth_top_p",
        "synth_max_tokens",
    )
    there = sample_files.list_chunks(str(cache))
    provenance.claim(str(cache), facts, started=bool(there), say=say)
    texts: dict[str, None] = {}
    group, empty = 0, 0
    while len(texts) < data.num_synth_prompts:
        if group not in there:
            settings = [
                Settings(
                    max_new_tokens=data.synth_max_tokens,
                    temperature=data.synth_temperature,
                    top_p=data.synth_top_p,
                    seed=seed_of(seed, 1, group, i),
                )
                for i in range(group_size)
            ]
            begun = [i % len(openings) for i in range(group_size)]
            made = engine().generate([prefixes[i] for i in begun], settings)
            turns = [
                sample_files.make_sample(
                    prefixes[begun[i]],
                    g.tokens,
                    f"turn/{group}/{i}/{begun[i]}",
                    data.synth_temperature,
                    target.fingerprint,
                )
                for i, g in enumerate(made)
                if g.finish_reason == "stop"
            ]
            if not turns:
                raise UserError(
                    f"data.synth_max_tokens={data.synth_max_tokens}: none of "
                    f"{group_size} turns that the target made up ended within it; "
                    "raise it"
                )
            sample_files.write_chunk(str(cache), group, turns)
        before = len(texts)
        for turn in sample_files.read_chunk(str(cache), group):
            body = turn.answer[:-1]
            if target.tokenizer.special_ids & set(body) or turn.looping:
                continue
            opening = _opening_of(turn, openings, cache)
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


def _opening_of(turn, openings: Sequence[str], folder: pathlib.Path) -> str:
    """The words that a made-up turn began with."""
    index = int(turn.source.rsplit("/", 1)[1])
    if index >= len(openings):
        raise UserError(
            f"{folder} holds a turn that begins with the {index + 1}. of "
            f"data.synth_openings, which are {tuple(openings)} now; set them back, or "
            "name another --workdir= (or data.folder)"
        )
    return openings[index]


def read_prompts(data: schema.Data) -> list[Prompt]:
    """The prompts of every file that the recipe names, in file order.

    Raises:
      UserError: an absent or unreadable file, or two that are one set by their name.
    """
    found: list[Prompt] = []
    paths: dict[str, str] = {}
    for path in filter(None, map(str.strip, data.prompts.split(","))):
        prompts = prompt_files.named_prompts(path)
        if path == prompt_files.BUILTIN:
            prompts = [_renamed(p, prompt_files.BUILTIN) for p in prompts]
        name = set_of(prompts[0].source)
        if name in paths:
            raise UserError(
                f"data.prompts={data.prompts!r} names {paths[name]!r} and {path!r}, "
                f"which are both the set {name!r}: prompts are held out of each set; "
                "give one of the files another name, or leave it out"
            )
        paths[name] = path
        found += prompts
    return found


def _renamed(prompt: Prompt, name: str) -> Prompt:
    """A prompt whose source names another file, at the same line."""
    line = prompt.source.rpartition(":")[2]
    return dataclasses.replace(prompt, source=f"{name}:{line}")


def set_of(source: str) -> str:
    """The prompt set of a source: its file without suffixes, "builtin" or "synth"."""
    name = re.split(r"[:/]", source)[0]
    return name.removesuffix(".gz").removesuffix(".jsonl")


@dataclasses.dataclass(frozen=True)
class Split:
    """Prompts on the two sides.

    Attributes:
      held_out: for validation, of each set in turn.
      rest: the others.
      unusable: prompts met that cannot be rendered.
      repeated: prompts met whose token ids were there before.
    """

    held_out: list[Pair]
    rest: list[Pair]
    unusable: int
    repeated: int


def split(
    prompts: Sequence[Prompt],
    render: Render,
    held_out: int,
    most: int,
    seen: set[tuple[int, ...]],
) -> Split:
    """Holds out usable prompts of each set; every prompt is on one side, once.

    Args:
      prompts: in the order in which they are taken.
      render: see `Render`.
      held_out: prompts held out of each set, as far as it has them.
      most: prompts of the rest; whoever wants fewer renders fewer.
      seen: token ids of prompts that count as repeated; those taken are added.
    """
    groups: dict[str, list[Pair]] = {set_of(p.source): [] for p in prompts}
    rest: list[Pair] = []
    unusable = repeated = 0
    wanting = len(groups) if held_out else 0
    for prompt in prompts:
        group = groups[set_of(prompt.source)]
        if len(group) >= held_out and len(rest) >= most:
            if not wanting:
                break
            continue
        rendered = render(prompt)
        if rendered is None:
            unusable += 1
            continue
        ids = tuple(rendered)
        if ids in seen:
            repeated += 1
            continue
        seen.add(ids)
        if len(group) < held_out:
            group.append((prompt, ids))
            wanting -= len(group) == held_out
        else:
            rest.append((prompt, ids))
    # One of each set in turn: whoever takes the first few takes from all.
    in_turn = [
        group[i] for i in range(held_out) for group in groups.values() if i < len(group)
    ]
    return Split(in_turn, rest, unusable, repeated)


def gather_prompts(
    target: Target,
    engine: Callable[[], Engine],
    data: schema.Data,
    seed: int,
    folder: pathlib.Path,
    render: Render,
    say: Callable[[str], None],
    group_size: int,
) -> tuple[list[Pair], list[Pair]]:
    """Prompts to train on and prompts held out, in a seeded order.

    `data.held_out` of each named file are held out; of the turns that the target
    makes up only where no file is named.

    Raises:
      UserError: nothing is left on one of the sides.
    """
    # Shuffled before it is cut: a larger max_file_prompts only adds prompts.
    named = shuffled(read_prompts(data), seed, 2)
    made = synthesise_prompts(target, engine, data, seed, folder, say, group_size)
    most = data.max_file_prompts or len(named)
    seen: set[tuple[int, ...]] = set()
    found = split(
        named, render, data.held_out, most if data.train_on_prompts else 0, seen
    )
    own = split(made, render, 0 if named else data.held_out, len(made), seen)
    held = found.held_out[:most] if named else own.held_out
    rest = found.rest[: most - len(held)] if named else []
    train = [*rest, *own.rest]
    if rest and own.rest:
        train = shuffled(train, seed, 6)
    unusable = found.unusable + own.unusable
    room = data.max_tokens - data.max_new_tokens
    if not held or not train:
        what = "train on" if held else "validate with"
        raise UserError(
            f"data.held_out={data.held_out} leaves none of {len(named)} named and "
            f"{len(made)} synthesised prompts to {what} ({unusable} are longer than "
            f"{room} tokens, data.max_tokens - data.max_new_tokens, or hold special "
            "tokens); hold out fewer, add prompts, or raise data.max_tokens"
        )
    if unusable:
        say(
            f"{unusable} prompts left out: longer than {room} tokens, or with special "
            "tokens in them"
        )
    if repeated := found.repeated + own.repeated:
        say(f"{repeated} prompts left out: repeated")
    return train, held


def shuffled(items: Sequence, seed: int, use: int) -> list:
    """The items in an order of their own for each use."""
    order = np.random.default_rng([seed, use]).permutation(len(items))
    return [items[i] for i in order]


def seed_of(*parts: int) -> int:
    """A request's seed."""
    return int(np.random.default_rng(list(parts)).integers(0, 2**31))
