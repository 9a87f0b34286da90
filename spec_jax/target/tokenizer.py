"""Text to token ids and back, with no model hub and no torch.

A `Tokenizer` is a frozen record around one `tokenizers` backend. It comes from
a `tokenizer.json` or is rebuilt from the vocabulary and merges that a GGUF file
carries. Text from outside (a user's message) goes through `encode_untrusted`:
a special token spelled out in it would otherwise become that token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from spec_jax.core.errors import UserError
from spec_jax.target import config_fields

_REPLACEMENT = "\ufffd"

# Types of `tokenizer.ggml.token_type`: control tokens are special, user-defined
# ones are matched whole but are ordinary text.
_GGUF_CONTROL = 3
_GGUF_USER_DEFINED = 4

# The word split of the Llama 3 and Qwen tokenizers; they differ in how many
# digits may stand together.
_WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the facts about it that other records compare.

    Attributes:
      hash: sha256 of the canonical tokenizer json, hexadecimal.
      vocab_size: number of tokens it knows; the model's V may be larger.
      special_ids: ids of the special (control) tokens.
      bos: id of the begin token, or None.
      eos: id of the end token, or None.
      json_text: the tokenizer as json text, for export and caching.
    """

    hash: str
    vocab_size: int
    special_ids: frozenset[int]
    bos: int | None
    eos: int | None
    json_text: str = dataclasses.field(repr=False, compare=False)
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)

    @property
    def num_ids(self) -> int:
        """All its ids lie below it; from here on a vocabulary is padding."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of trusted text: special tokens in it become their ids.

        No begin or end token is added; templates spell those out.
        """
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_untrusted(self, text: str, field: str = "text") -> list[int]:
        """Token ids of text that must hold no special token.

        Args:
          text: text from outside.
          field: what to call it in the error.

        Raises:
          UserError: a special token is spelled out in `text`.
        """
        self.check_untrusted(text, field)
        return self.encode(text)

    def check_untrusted(self, text: str, field: str = "text") -> None:
        """Refuses `text` when it spells out a special token.

        Raises:
          UserError: names the field, the token and its place.
        """
        for token, token_id in self.special_tokens:
            at = text.find(token)
            if at >= 0:
                raise UserError(
                    f"{field} contains the special token {token!r} (id {token_id}) "
                    f"at character {at}; remove it or write it differently"
                )

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; incomplete UTF-8 becomes U+FFFD."""
        return self.backend.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special
        )

    def id_of(self, token: str) -> int:
        """Id of one token by its text.

        Raises:
          UserError: no such token.
        """
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise UserError(
                f"token {token!r} is not in the tokenizer's vocabulary of "
                f"{self.vocab_size}; use a token it has"
            )
        return token_id

    def token_of(self, token_id: int) -> str:
        """Text of one token by its id, as the vocabulary spells it.

        Raises:
          UserError: the id is outside the vocabulary.
        """
        token = self.backend.id_to_token(int(token_id))
        if token is None:
            raise UserError(
                f"token id {token_id} is not in the tokenizer's vocabulary; use an "
                f"id in [0, {self.vocab_size})"
            )
        return token

    @functools.cached_property
    def special_tokens(self) -> tuple[tuple[str, int], ...]:
        """(text, id) of every special token, by id."""
        return tuple(
            (added.content, token_id)
            for token_id, added in sorted(_added(self.backend).items())
            if added.special
        )


class StreamDecoder:
    """Text of a growing token stream, never cutting a character in two.

    The pieces that `push` returns, plus `flush`, add up to `decode` of all ids.
    (Not so after bytes that are no UTF-8 where the tokenizer has byte tokens:
    its `decode` then takes back good characters before them.)
    """

    # An unfinished character shows as at most three U+FFFD. A decoder of byte
    # tokens also shows the character before it as up to four.
    _MAX_HELD = 7

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Ids being decoded, of which the first `_old` made text that is all out.
        # They stay as context: some decoders treat the first token differently.
        self._window: list[int] = []
        self._old = 0
        self._emitted = 0  # characters of the window's text that are out

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text that is now certain (may be empty)."""
        return "".join(self._push_one(int(i)) for i in ids)

    def flush(self) -> str:
        """Returns what is still held back and starts afresh."""
        piece = self._decode()[self._emitted :]
        self._window, self._old, self._emitted = [], 0, 0
        return piece

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        certain = max(len(text) - min(held, self._MAX_HELD), self._emitted)
        piece = text[self._emitted : certain]
        self._emitted = certain
        if piece and not held:
            self._window = self._window[self._old :]
            self._old = len(self._window)
            self._emitted = len(self._decode())
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special=self._skip_special)


def from_json(
    text: str, *, bos: int | None = None, eos: int | None = None
) -> Tokenizer:
    """Tokenizer from the text of a `tokenizer.json`.

    Args:
      text: the json text.
      bos: id of the begin token, where known.
      eos: id of the end token, where known.

    Raises:
      UserError: the text is not a tokenizer.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the backend raises plain Exception
        raise UserError(
            f"tokenizer.json cannot be read ({error}); restore the file that came "
            "with the model"
        ) from error
    return _wrap(backend, bos, eos)


def from_folder(folder: str | os.PathLike[str]) -> Tokenizer:
    """Tokenizer of a Hugging Face folder (`tokenizer.json`, `tokenizer_config.json`).

    Raises:
      UserError: there is no readable `tokenizer.json`.
    """
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise UserError(
            f"target folder {os.fspath(folder)!r} has no tokenizer.json; save the "
            "fast tokenizer next to the weights"
        )
    tokenizer = from_json(read_text(path))
    name = "tokenizer_config.json"
    config = read_json_if_there(os.path.join(folder, name))

    def named(key: str) -> int | None:
        token = config_fields.token(config, name, key)
        return tokenizer.id_of(token) if token else None

    return dataclasses.replace(
        tokenizer, bos=named("bos_token"), eos=named("eos_token")
    )


def from_gguf(field: Callable[[str], Any]) -> Tokenizer:
    """Tokenizer from the metadata of a GGUF file (byte-level BPE).

    Args:
      field: returns the value of a metadata key, or None where it is absent.

    Raises:
      UserError: the tokenizer kind or its word split is not one known here, or
        the vocabulary is damaged.
    """
    kind = field("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(
            f"tokenizer.ggml.model is {kind!r}, and only 'gpt2' (byte-level BPE) can "
            "be rebuilt from a GGUF file; use a safetensors folder with a "
            "tokenizer.json"
        )
    split = field("tokenizer.ggml.pre")
    if split not in _SPLITS:
        raise UserError(
            f"tokenizer.ggml.pre is {split!r}, which is none of "
            f"{', '.join(sorted(_SPLITS))}; use a safetensors folder with a "
            "tokenizer.json"
        )
    tokens = field("tokenizer.ggml.tokens") or []
    types = field("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens) or not tokens:
        raise UserError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, {len(vocab)} of them "
            f"different, and {len(types)} types; convert the model again"
        )
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges") or []]
    try:
        model = models.BPE(
            vocab=vocab,
            merges=merges,
            # Llama 3: a word that is itself a token is not built from merges.
            ignore_merges=split == "llama-bpe",
        )
    except Exception as error:  # the backend raises plain Exception
        raise UserError(
            f"tokenizer.ggml.merges do not fit the tokens ({error}); convert the model "
            "again"
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _SPLITS[split]()
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    added = []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in (_GGUF_CONTROL, _GGUF_USER_DEFINED):
            special = token_type == _GGUF_CONTROL
            added.append(AddedToken(token, special=special, normalized=False))
    # Both kinds go through one call: ids are those of the vocabulary, and each
    # token keeps its own `special` flag.
    backend.add_tokens(added)
    return _wrap(
        backend,
        field("tokenizer.ggml.bos_token_id"),
        field("tokenizer.ggml.eos_token_id"),
    )


def read_text(path: str) -> str:
    """The text of a model folder's file.

    Raises:
      UserError: it is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except ValueError as error:
        raise UserError(
            f"{path} is not text in UTF-8 ({error}); restore the file that came with "
            "the model"
        ) from error


def read_json_if_there(path: str) -> dict[str, Any]:
    """The json object in `path`, or an empty one where there is no such file.

    Raises:
      UserError: the file holds no json object.
    """
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except ValueError as error:
        raise UserError(
            f"{path} is not json ({error}); restore the file that came with the model"
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path} holds a {type(value).__name__}, not a json object; restore the "
            "file that came with the model"
        )
    return value


def _wrap(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> Tokenizer:
    backend.no_truncation()
    backend.no_padding()
    json_text = backend.to_str()
    canonical = json.dumps(
        json.loads(json_text), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return Tokenizer(
        hash=hashlib.sha256(canonical.encode()).hexdigest(),
        vocab_size=backend.get_vocab_size(),
        special_ids=frozenset(
            token_id for token_id, added in _added(backend).items() if added.special
        ),
        bos=None if bos is None else int(bos),
        eos=None if eos is None else int(eos),
        json_text=json_text,
        backend=backend,
    )


def _added(backend: tokenizers.Tokenizer) -> dict[int, AddedToken]:
    return backend.get_added_tokens_decoder()


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit apart, then the GPT-2 words."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    )


def _split_words(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_WORD_SPLIT.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), _byte_level(use_regex=False)]
    )


_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _split_smollm,
    "gpt-2": lambda: _byte_level(use_regex=True),
    "qwen2": lambda: _split_words(""),
    "llama-bpe": lambda: _split_words("{1,3}"),
}
