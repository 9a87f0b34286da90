"""Token samples made by the target, in chunk files that are whole or absent.

A chunk `samples-00007.jsonl` holds one JSON object per line (`Sample`'s fields)
and has a checksum beside it, `samples-00007.sha256`, in the form that
`sha256sum -c` reads. The checksum is written first and the chunk is renamed into
place last, so a chunk that is listed is complete. Chunks are never changed: a
producer lists what is there and makes the missing ones.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.data import sample_rows
from spec_jax.data.files import write_atomically

# Above this share of skipped samples the corpus is not what it is meant to be.
MAX_SKIPPED = 0.01
# An anchor and the token it is to predict: a shorter answer trains nothing.
MIN_ANSWER = 2

_CHUNK_NAME = re.compile(r"samples-(\d{5,})\.jsonl")


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the target ran: a prompt and its own answer.

    Attributes:
      tokens: ids of the prompt and the answer, end token included.
      prompt_len: tokens of the prompt; the rest is supervised.
      source: where the prompt came from.
      temperature: at which the answer was drawn; 0 is greedy.
      looping: whether the answer repeats itself (`is_looping`).
      target_fingerprint: sha256 of the answering target; "" where nobody says.
    """

    tokens: tuple[int, ...]
    prompt_len: int
    source: str
    temperature: float = 0.0
    looping: bool = False
    target_fingerprint: str = ""

    def __post_init__(self):
        object.__setattr__(self, "tokens", tuple(int(t) for t in self.tokens))
        if not 0 <= self.prompt_len <= len(self.tokens):
            raise UserError(
                f"sample {self.source}: prompt_len={self.prompt_len} must lie in "
                f"[0, {len(self.tokens)}], its number of tokens"
            )

    @property
    def answer(self) -> tuple[int, ...]:
        """The supervised tokens."""
        return self.tokens[self.prompt_len :]


def make_sample(
    prompt: Sequence[int],
    answer: Sequence[int],
    source: str,
    temperature: float = 0.0,
    target_fingerprint: str = "",
) -> Sample:
    """A sample of a prompt and the answer that the target gave to it."""
    answer = [int(token) for token in answer]
    return Sample(
        tokens=(*prompt, *answer),
        prompt_len=len(prompt),
        source=source,
        temperature=float(temperature),
        looping=is_looping(answer),
        target_fingerprint=target_fingerprint,
    )


# ---- How repetitive a text is.


def ngram_counts(tokens: Sequence[int], n: int) -> collections.Counter:
    """How often each run of `n` tokens occurs (occurrences may overlap)."""
    tokens = [int(token) for token in tokens]
    return collections.Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


def is_looping(tokens: Sequence[int], n: int = 8, times: int = 3) -> bool:
    """Whether some n-gram occurs `times` times or more."""
    return any(count >= times for count in ngram_counts(tokens, n).values())


def without_loop(sample: Sample, n: int = 8, times: int = 3) -> Sample:
    """The sample up to where its answer begins to repeat itself.

    The n-gram that first comes for the `times`-th time is kept once: the answer
    ends where it begins again. A sample that does not loop is returned as it is.
    """
    answer = sample.answer
    starts: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for start in range(len(answer) - n + 1):
        seen = starts[answer[start : start + n]]
        seen.append(start)
        if len(seen) == times:
            end = sample.prompt_len + seen[1]
            return dataclasses.replace(
                sample, tokens=sample.tokens[:end], looping=False
            )
    return sample


def distinct_ngrams(tokens: Sequence[int], n: int = 2) -> float:
    """Distinct n-grams over all n-grams, in (0, 1]; 1.0 where there is none."""
    counts = ngram_counts(tokens, n)
    return len(counts) / counts.total() if counts else 1.0


def longest_run(tokens: Sequence[int]) -> int:
    """Length of the longest run of one repeated token."""
    ids = np.asarray(tokens, np.int64)
    if ids.size == 0:
        return 0
    edges = np.flatnonzero(np.diff(ids)) + 1
    return int(np.diff(np.concatenate([[0], edges, [ids.size]])).max())


# ---- Chunk files.


def chunk_name(index: int) -> str:
    """File name of a chunk."""
    return f"samples-{index:05d}.jsonl"


def list_chunks(folder: str) -> list[int]:
    """Indices of the complete chunks in a folder, ascending (absent: none)."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = (_CHUNK_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def write_chunk(folder: str, index: int, samples: Sequence[Sample]) -> str:
    """Adds a chunk; the same samples again change nothing.

    Returns:
      The chunk's path.

    Raises:
      UserError: no samples, or the chunk exists with other content.
    """
    if not samples:
        raise UserError(f"chunk {index} of {folder} has no samples; write at least one")
    content = b"".join(
        json.dumps(dataclasses.asdict(sample)).encode() + b"\n" for sample in samples
    )
    name = chunk_name(index)
    path = os.path.join(folder, name)
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(path):
        with open(path, "rb") as file:
            same = file.read() == content
        if not same:
            raise UserError(
                f"{path} exists with other samples; chunks are only added, so use "
                "another index or an empty folder"
            )
    digest = hashlib.sha256(content).hexdigest()
    write_atomically(_checksum_path(path), f"{digest}  {name}\n".encode())
    write_atomically(path, content)
    return path


def read_samples(folder: str, num_chunks: int | None = None) -> list[Sample]:
    """Reads every chunk of a folder, in the order of their indices.

    Args:
      folder: where `write_chunk` put them.
      num_chunks: how many there must be, 0..n-1 (default: whatever is there).

    Raises:
      UserError: no chunk, a missing one, or one that differs from its checksum.
    """
    found = list_chunks(folder)
    if num_chunks is not None:
        missing = sorted(set(range(num_chunks)) - set(found))
        if missing:
            raise UserError(
                f"{folder} lacks {len(missing)} of {num_chunks} chunks, the first is "
                f"{chunk_name(missing[0])}; run the synthesis again to make them"
            )
        found = list(range(num_chunks))
    if not found:
        raise UserError(f"{folder} holds no samples; run the synthesis first")
    return [sample for index in found for sample in read_chunk(folder, index)]


def read_chunk(folder: str, index: int) -> list[Sample]:
    """Reads one chunk.

    Raises:
      UserError: it differs from its checksum, or has none.
    """
    path = os.path.join(folder, chunk_name(index))
    fix = "remove it and run the synthesis again"
    try:
        with open(path, "rb") as file:
            content = file.read()
        with open(_checksum_path(path), encoding="ascii") as file:
            expected = file.read().split()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be checked ({error}); {fix}") from error
    if hashlib.sha256(content).hexdigest() != expected:
        raise UserError(f"{path} is torn: it differs from its checksum; {fix}")
    try:
        rows = [json.loads(line) for line in content.split(b"\n") if line]
        return [Sample(**row) for row in rows]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} holds no sample in a row ({error}); {fix}") from error


def read_file(path: str, vocab_size: int) -> list[Sample]:
    """Reads samples made elsewhere: `.jsonl` or `.jsonl.gz`, one object a line.

    Args:
      path: rows with `tokens` (or `token_ids`) and `prompt_len`; `source`,
        `temperature` and `target_fingerprint` are kept where they are there.
      vocab_size: V of the target that is said to have made them.

    Raises:
      UserError: no such file or a torn one, a row without those fields or with
        another kind of them, no prompt or no answer in a row, or an id outside V.
    """
    opener = gzip.open if path.endswith(".gz") else open
    named = f"data.samples={path!r}"
    try:
        with opener(path, "rb") as file:
            lines = file.read().split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{named} cannot be read ({type(error).__name__}: {error}); name an "
            "existing .jsonl or .jsonl.gz file, or restore it"
        ) from error
    name = os.path.basename(path)
    rows = [
        sample_rows.fields_of(line, f"{named}, line {number + 1}", f"{name}:{number}")
        for number, line in enumerate(lines)
        if line
    ]
    found = [make_sample(**row) for row in rows]
    top = max((t for s in found for t in s.tokens), default=-1)
    if not found or top >= vocab_size:
        raise UserError(
            f"{named} holds {len(found)} samples with ids up to {top}; "
            f"the target has {vocab_size} tokens"
        )
    return found


def write_file(path: str, samples: Sequence[Sample]) -> None:
    """Writes samples as one `.jsonl` that `read_file` reads; whole or not at all."""
    rows = (
        {
            "tokens": list(s.tokens),
            "prompt_len": s.prompt_len,
            "source": s.source,
            "temperature": s.temperature,
            **(
                {"target_fingerprint": s.target_fingerprint}
                if s.target_fingerprint
                else {}
            ),
        }
        for s in samples
    )
    content = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(path, content.encode())


def _checksum_path(path: str) -> str:
    return path.removesuffix(".jsonl") + ".sha256"


# ---- Guards.


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The samples kept for training and why others were not.

    Attributes:
      samples: the kept ones, in order.
      skipped: reason -> number of samples that could not be used.
      looping: number left out, or cut, because they loop; a choice, not a fault.
      cut: of these, the ones that were kept up to where they loop.
    """

    samples: tuple[Sample, ...]
    skipped: Mapping[str, int]
    looping: int = 0
    cut: int = 0

    def __str__(self) -> str:
        """How many samples are kept, and how many are not and why."""
        out = dict(sorted(self.skipped.items()))
        if self.looping > self.cut:
            out["looping"] = self.looping - self.cut
        kept = len(self.samples)
        words = f"{kept} of {kept + sum(out.values())} samples kept"
        if out:
            reasons = ", ".join(f"{n} {reason}" for reason, n in out.items())
            words += f"; left out: {reasons}"
        return words + (f"; {self.cut} cut where they loop" if self.cut else "")


def select_samples(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    looping: str = "keep",
    long_is_fault: bool = True,
    template: str = "",
) -> Corpus:
    """Leaves out what cannot be trained on, and guards what remains.

    Args:
      samples: samples, in order.
      max_tokens: longer ones are skipped.
      looping: what becomes of looping answers: "keep", "drop", or "cut", which
        ends them where they begin to repeat themselves (`without_loop`) and leaves
        out those of which less than `MIN_ANSWER` tokens would be left.
      long_is_fault: whether samples longer than `max_tokens` count against
        `MAX_SKIPPED`; where they were made for a larger one they are a choice.
      template: name or hash of the chat template, for the errors.

    Raises:
      UserError: see `check_skipped` and `check_supervision`.
    """
    corpus, faults = _choose(samples, max_tokens, looping)
    long = {k: n for k, n in corpus.skipped.items() if k not in faults}
    check_skipped({**faults, **(long if long_is_fault else {})}, len(samples))
    check_supervision(corpus.samples, template)
    return corpus


def usable(
    samples: Sequence[Sample], max_tokens: int, looping: str = "keep"
) -> tuple[Sample, ...]:
    """Those of a part of a corpus that `select_samples` keeps of it."""
    return _choose(samples, max_tokens, looping)[0].samples


def _choose(samples, max_tokens: int, looping: str) -> tuple[Corpus, dict[str, int]]:
    """What is kept, and the faults among the reasons for what is not."""
    kept: list[Sample] = []
    faults, num_long, num_looping, num_cut = collections.Counter(), 0, 0, 0
    for sample in samples:
        if len(sample.tokens) > max_tokens:
            num_long += 1
        elif len(sample.answer) < MIN_ANSWER:
            faults[f"with less than {MIN_ANSWER} answer tokens"] += 1
        elif not sample.looping or looping == "keep":
            kept.append(sample)
        else:
            num_looping += 1
            cut = without_loop(sample)
            if looping == "cut" and len(cut.answer) >= MIN_ANSWER:
                kept.append(cut)
                num_cut += 1
    long = {f"longer than {max_tokens} tokens": num_long} if num_long else {}
    return Corpus(tuple(kept), {**faults, **long}, num_looping, num_cut), dict(faults)


def check_skipped(
    skipped: Mapping[str, int],
    total: int,
    max_skipped: float = MAX_SKIPPED,
    what: str = "corpus",
) -> None:
    """Stops when too many samples were skipped.

    Raises:
      UserError: more than `max_skipped` of `total` were, with the count of each
        reason.
    """
    count = sum(skipped.values())
    if count > max_skipped * total:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items()))
        raise UserError(
            f"{what}: {count} of {total} samples were skipped ({reasons}), more than "
            f"{max_skipped:.1%}; fix the samples or the limit that skips them"
        )


def check_supervision(samples: Sequence[Sample], template: str = "") -> None:
    """Stops when no token, or every token, of a corpus is supervised.

    Raises:
      UserError: naming the share and the template.
    """
    total = sum(len(sample.tokens) for sample in samples)
    supervised = sum(len(sample.answer) for sample in samples)
    named = f" (chat template {template})" if template else ""
    if total == 0:
        raise UserError(f"corpus{named} has no tokens left; add usable samples")
    if supervised in (0, total):
        raise UserError(
            f"corpus{named}: {supervised / total:.0%} of {total} tokens are "
            "supervised; the loss mask must cover the answers and not the prompts, so "
            "check prompt_len and the template"
        )
