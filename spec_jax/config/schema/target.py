"""The model whose law every output must keep."""

from __future__ import annotations

import dataclasses
import math

from spec_jax.config.schema.checks import DTYPES, at_least, check, one_of


@dataclasses.dataclass(frozen=True)
class TinyTarget:
    """A small random target, briefly trained offline (`target.source="tiny"`).

    Attributes:
      num_layers: layers of the target.
      hidden_size: D.
      mlp_size: F.
      num_heads: H.
      num_kv_heads: G; divides H.
      head_dim: C, even.
      max_context: longest position.
      family: "llama" or "qwen3".
      train_steps: optimiser steps on the synthetic corpus; 0 leaves it random.
      batch: rows of a step.
      seq_len: tokens of a row.
      lr: peak learning rate.
    """

    num_layers: int = 5
    hidden_size: int = 64
    mlp_size: int = 192
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_context: int = 512
    family: str = "llama"
    train_steps: int = 450
    batch: int = 8
    seq_len: int = 64
    lr: float = 6e-3

    def __post_init__(self):
        at_least(2, "target.tiny", self, "num_layers")
        at_least(1, "target.tiny", self, "hidden_size", "mlp_size", "num_heads")
        at_least(1, "target.tiny", self, "num_kv_heads", "batch")
        at_least(2, "target.tiny", self, "head_dim", "seq_len", "max_context")
        at_least(0, "target.tiny", self, "train_steps")
        check(
            self.head_dim % 2 == 0,
            "target.tiny.head_dim",
            self.head_dim,
            "must be even (rotary)",
        )
        one_of("target.tiny", self, "family", ("llama", "qwen3"))
        check(
            self.num_heads % self.num_kv_heads == 0,
            "target.tiny.num_heads",
            self.num_heads,
            f"must be a multiple of num_kv_heads={self.num_kv_heads}",
        )
        check(
            0 < self.lr < math.inf,
            "target.tiny.lr",
            self.lr,
            "must be a number above 0",
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """The model whose law every output must keep.

    Attributes:
      source: "tiny", a packaged name ("smollm2-135m-instruct"), a `.gguf` file or
        a folder with safetensors weights.
      dtype: of its weights; caches are float32.
      precision: JAX matmul precision of the run ("highest" for identity claims).
      tiny: used only when source is "tiny".
    """

    source: str = "smollm2-135m-instruct"
    dtype: str = "float32"
    precision: str = "highest"
    tiny: TinyTarget = TinyTarget()

    def __post_init__(self):
        check(
            bool(self.source),
            "target.source",
            self.source,
            'is empty; name "tiny", "smollm2-135m-instruct", a .gguf file or a folder',
        )
        one_of("target", self, "dtype", DTYPES)
        one_of("target", self, "precision", ("default", "high", "highest"))
