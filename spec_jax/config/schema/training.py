"""Which drafter, how it is trained, and the folder it becomes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from spec_jax.config.schema.checks import DTYPES, Pairs, at_least, check, one_of, share


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Which drafter, and its own options.

    Attributes:
      name: a module of `spec_jax.drafters`, or a dotted path.
      options: pairs for that module's `Options`.
      draft_vocab: U, tokens it may propose; 0 is the full vocabulary.
    """

    name: str = "dflash"
    options: Pairs = ()
    draft_vocab: int = 0

    def __post_init__(self):
        check(bool(self.name), "drafter.name", self.name, 'is empty; try "dflash"')
        at_least(0, "drafter", self, "draft_vocab")

    def options_dict(self) -> dict[str, Any]:
        """The options as `drafters.base.load` takes them."""
        return dict(self.options)


@dataclasses.dataclass(frozen=True)
class Train:
    """The optimiser's side.

    Attributes:
      steps: optimiser steps.
      positions: supervised positions to train on instead: the steps follow from
        what a batch of this data holds; 0 leaves `steps`.
      starts: anchors, or starts of a chain of depths, to train on instead, however
        many positions follow each; 0 leaves `positions`.
      batch: conversations of one micro-batch.
      accumulation: micro-batches of one step.
      seq_len: S, tokens of a padded row.
      lr: peak learning rate.
      warmup_fraction: share of the steps spent warming up.
      schedule: "cosine", "constant" or "wsd" (warm up, stay, decay).
      optimiser: "adamw" or "muon".
      weight_decay: decoupled, on matrices only.
      clip: global norm of the gradients; 0 leaves them alone.
      log_every: steps between two loss lines.
      eval_every: steps between two served accept lengths.
      eval_prompts: held-out prompts decoded for each.
      eval_new_tokens: tokens decoded of each.
      checkpoint_every: steps between two checkpoints.
      keep_checkpoints: newest checkpoints kept beside the best one.
      max_minutes: stop training there, having saved; 0 is no limit.
    """

    steps: int = 400
    positions: int = 0
    starts: int = 0
    batch: int = 4
    accumulation: int = 1
    seq_len: int = 320
    lr: float = 1.5e-3
    warmup_fraction: float = 0.04
    schedule: str = "cosine"
    optimiser: str = "adamw"
    weight_decay: float = 0.0
    clip: float = 1.0
    log_every: int = 10
    eval_every: int = 100
    eval_prompts: int = 8
    eval_new_tokens: int = 64
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    max_minutes: float = 0.0

    def __post_init__(self):
        at_least(1, "train", self, "steps", "batch", "accumulation")
        at_least(1, "train", self, "log_every", "eval_every", "eval_prompts")
        at_least(1, "train", self, "eval_new_tokens", "checkpoint_every")
        at_least(1, "train", self, "keep_checkpoints")
        at_least(2, "train", self, "seq_len")
        at_least(0, "train", self, "weight_decay", "clip", "max_minutes")
        at_least(0, "train", self, "positions", "starts")
        check(
            not (self.positions and self.starts),
            "train.starts",
            self.starts,
            f"and train.positions={self.positions} both set the steps; set one to 0",
        )
        share("train", self, "warmup_fraction")
        one_of("train", self, "schedule", ("cosine", "constant", "wsd"))
        one_of("train", self, "optimiser", ("adamw", "muon"))
        check(0 < self.lr < math.inf, "train.lr", self.lr, "must be a number above 0")


@dataclasses.dataclass(frozen=True)
class Export:
    """The Hugging Face folder written at the end.

    Attributes:
      dtype: of its weights.
    """

    dtype: str = "float32"

    def __post_init__(self):
        one_of("export", self, "dtype", DTYPES)
