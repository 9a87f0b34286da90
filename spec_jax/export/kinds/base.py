"""What a kind of drafter says about its folder form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spec_jax.export.names import Piece

# The object of `config.json` that holds what no public key says.
OWN = "spec_jax"


def _nothing(options: Any, target: Any) -> dict[str, np.ndarray]:
    del options, target
    return {}


@dataclasses.dataclass(frozen=True)
class Form:
    """The folder form of one kind of drafter.

    Attributes:
      name: the drafter's module name.
      title: what errors call it.
      architectures: names in `config.json` that are read as this kind; the first
        is written.
      pieces: (path -> leaf shape) -> pieces; leaves without one are refused.
      to_config: (Drafter, TargetSpec, Header) -> the json object.
      from_config: (config, where, tensors, TargetSpec, Tokenizer | None)
        -> (options with every field set, notes); `where` names the folder in
        errors, `tensors` is name -> shape of the weights.
      constants: (options, TargetSpec) -> tensors that readers need and no leaf
        holds.
      table: the tensor with one row per draft token, where the drafter has one of
        its own.
      own_head: the drafter has an LM head of its own; the vocabulary map is then
        always written.
      reduced_by: other packages whose `table` has one row per draft token, too,
        where the vocabulary is reduced; other readers want one per target token.
      any_length: config -> whether it may serve any number of drafts: it runs once
        per draft, and the folder does not say how many it was trained for.
      second: None, or (Drafter, TargetSpec, Header) -> (file name, json object) of
        a second configuration, for readers that know the kind by another name.
    """

    name: str
    title: str
    architectures: tuple[str, ...]
    pieces: Callable[[Mapping[str, Any]], list[Piece]]
    to_config: Callable
    from_config: Callable
    constants: Callable[[Any, Any], dict[str, np.ndarray]] = _nothing
    table: str | None = None
    own_head: bool = False
    reduced_by: tuple[str, ...] = ()
    any_length: Callable[[Mapping[str, Any]], bool] = lambda config: False
    second: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Header:
    """What an export says beside the drafter's options.

    Attributes:
      dtype: float type of the stored weights.
      draft_vocab_size: U of a reduced vocabulary, else None.
    """

    dtype: str
    draft_vocab_size: int | None = None
