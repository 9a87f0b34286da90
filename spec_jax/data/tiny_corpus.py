"""A small language of our own: its words, its tokenizer, its conversations.

The tiny recipes train a small target on it for some seconds. A question is
answered in two to four dozen tokens, of four kinds: counting, adding, saying a
list again, and telling a story. Much of an answer follows from its question
(numbers, names, a list's order), and some does not (which colour, which place,
where a story turns), so that a drafter can be right often and not always.
Nothing in an answer comes three times in the same words: no answer loops.

Words are whole tokens, everything else is spelled in characters, so any ASCII
text is encoded and decoded without loss.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from spec_jax.target import tokenizer as tokenizers_of_targets
from spec_jax.target.chat import ChatTemplate
from spec_jax.target.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|mask|>"
UNKNOWN = "<|unknown|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK, UNKNOWN)

# ChatML: a role's turn between two marks, no system message of its own.
TEMPLATE = (
    "{% for turn in messages %}"
    f"{{{{ '{TURN_START}' + turn['role'] + '\\n' + turn['content'] }}}}"
    f"{{{{ '{TURN_END}\\n' }}}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    f"{{{{ '{TURN_START}assistant\\n' }}}}"
    "{% endif %}"
)

NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn"]
ANIMALS = ["fox", "owl", "bear", "crab", "goat", "swan"]
COLOURS = ["red", "blue", "green", "grey", "white", "black"]
PLACES = ["forest", "river", "garden", "hill"]
THINGS = ["apple", "bell", "coin", "drum", "egg", "flag", "lamp", "nut"]

# What a story's animal mostly is, and where it mostly lives: (colour, place).
_HABITS = dict(
    zip(ANIMALS, zip(COLOURS, PLACES + PLACES[:2], strict=True), strict=True)
)
# What a child mostly carries, and how it mostly feels.
_CARRIED = dict(zip(NAMES, THINGS, strict=False))
_FRIENDS = dict(zip(ANIMALS, NAMES[::-1], strict=True))
_MOODS = ("happy", "tired")
_MOST = 0.8  # how often "mostly" is

_FIRST_WORDS = ["Add", "Count", "Say", "Tell", "Counting", "First", "Adding", "Saying"]
_OTHER_WORDS = [
    "from",
    "to",
    "down",
    "and",
    "is",
    "plus",
    "again",
    "backwards",
    "list",
    "a",
    "about",
    "the",
    "met",
    "went",
    "gave",
    "it",
    "home",
    "was",
    "with",
    "they",
    "Then",
    "First",
    "Last",
    "lived",
    "there",
    "It",
    "me",
    "too",
]
_ROLES = ("user", "assistant", "system")


def vocabulary() -> dict[str, int]:
    """Token text (in the byte-level spelling) -> id."""
    space = "\u0120"  # how a byte-level vocabulary spells a space
    inner = [*NUMBERS, *NAMES, *ANIMALS, *COLOURS, *PLACES, *THINGS, *_MOODS]
    inner += _OTHER_WORDS
    characters = [chr(c) for c in range(ord("!"), ord("~") + 1)] + [space, "\u010a"]
    tokens = [
        *SPECIAL_TOKENS,
        *characters,
        *_ROLES,
        *_FIRST_WORDS,
        *(space + word for word in inner),
    ]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def make_tokenizer() -> Tokenizer:
    """The language's tokenizer: whole words, else characters."""
    model = models.BPE(
        vocab=vocabulary(), merges=[], ignore_merges=True, unk_token=UNKNOWN
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    text = json.dumps(json.loads(backend.to_str()), indent=1, ensure_ascii=True)
    ids = vocabulary()
    return tokenizers_of_targets.from_json(text, eos=ids[TURN_END])


def make_template() -> ChatTemplate:
    """The language's chat template."""
    return ChatTemplate(TEMPLATE, eos_token=TURN_END)


def make_conversation(rng: np.random.Generator) -> list[dict[str, str]]:
    """One question and its answer, as messages."""
    kind = _KINDS[rng.choice(len(_KINDS), p=_SHARES)]
    question, answer = kind(rng)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def make_rows(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    rng: np.random.Generator,
    rows: int,
    seq_len: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Conversations as token rows, one to a row, each from position 0.

    Args:
      tokenizer: of the language.
      template: of the language.
      rng: what the conversations are drawn from.
      rows: number of rows.
      seq_len: tokens of a row; a longer text is cut, a shorter one padded.

    Returns:
      ids [rows, seq_len] int32, and 1.0 where there is text, float32.
    """
    texts = [
        template.render(make_conversation(rng), add_generation_prompt=False)
        + END_OF_TEXT
        for _ in range(rows)
    ]
    ids = np.full((rows, seq_len), tokenizer.id_of(END_OF_TEXT), np.int32)
    real = np.zeros((rows, seq_len), np.float32)
    batch = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    for row, encoding in enumerate(batch):
        tokens = encoding.ids[:seq_len]
        ids[row, : len(tokens)] = tokens
        real[row, : len(tokens)] = 1.0
    return ids, real


# ---- The kinds of question.


def _count(rng: np.random.Generator) -> tuple[str, str]:
    length = int(rng.integers(6, 16))
    first = int(rng.integers(0, 21 - length))
    numbers = NUMBERS[first : first + length]
    down = rng.random() < 0.4
    if down:
        numbers = numbers[::-1]
    way = "down from" if down else "from"
    span = f"{way} {numbers[0]} to {numbers[-1]}"
    return (
        f"Count {span}.",
        f"Counting {span}: {', '.join(numbers)}.",
    )


def _add(rng: np.random.Generator) -> tuple[str, str]:
    start, *steps = (int(x) for x in rng.integers(1, 5, int(rng.integers(4, 6))))
    total, sums = start, []
    for step in steps:
        sums.append(f"{NUMBERS[total]} plus {NUMBERS[step]} is {NUMBERS[total + step]}")
        total += step
    terms = [NUMBERS[start], *(NUMBERS[step] for step in steps)]
    return (
        f"Add {_join(terms)}.",
        f"Adding {_join(terms)}: {', '.join(sums)}.",
    )


def _say(rng: np.random.Generator) -> tuple[str, str]:
    pool = (COLOURS, THINGS, NAMES)[int(rng.integers(3))]
    words = [str(w) for w in rng.choice(pool, int(rng.integers(4, 7)), replace=False)]
    listed = _join(words)
    question = f"Say {listed} again."
    answer = f"Saying the list again: {listed}."
    if rng.random() < 0.7:
        answer += f" Then backwards: {_join(words[::-1])}."
    return question, answer


def _tell(rng: np.random.Generator) -> tuple[str, str]:
    name, animal = str(rng.choice(NAMES)), str(rng.choice(ANIMALS))
    colour, place = _HABITS[animal]
    colour = _mostly(rng, colour, COLOURS)
    place = _mostly(rng, place, PLACES)
    second = _mostly(rng, ANIMALS[ANIMALS.index(animal) - 1], ANIMALS)
    thing = _mostly(rng, _CARRIED[name], THINGS)
    mood = _mostly(rng, _MOODS[NAMES.index(name) % 2], _MOODS)
    meeting = f"First {name} went to the {place} and met a {colour} {animal}."
    friend = _mostly(rng, _FRIENDS[animal], NAMES)
    living = (
        f" It lived there with {friend} and a {_mostly(rng, colour, COLOURS)} {second}."
    )
    giving = f" Then {name} gave it the {thing}."
    if rng.random() < 0.3:
        giving = f" Then it gave {name} the {thing}."
    ending = f" Last they went home, and the {animal} was {mood} too."
    return f"Tell me about {name} and the {animal}.", meeting + living + giving + ending


_KINDS = (_count, _add, _say, _tell)
_SHARES = (0.25, 0.2, 0.2, 0.35)


def _join(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _mostly(rng: np.random.Generator, usual: str, pool: Sequence[str]) -> str:
    return usual if rng.random() < _MOST else str(rng.choice(pool))
