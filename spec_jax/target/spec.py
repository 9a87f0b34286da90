"""What a target model is: sizes, family and the switches its forward needs.

A `TargetSpec` is frozen and hashable, so it may be a static jit argument.
Parameter tree it describes (linen `params`, all `[in, out]`, layers stacked
on a leading axis N so that the forward scans over them):

    embed                [V, D]
    head                 [D, V]     stored apart even when tied: layout is speed
    final_norm           [D]
    layers/attn_norm     [N, D]
    layers/qkv           [N, D, G, H/G + 2, C]   per KV head: its queries, key, value
    layers/q_norm        [N, C]     only when `qk_norm` (Qwen3)
    layers/k_norm        [N, C]
    layers/out           [N, H*C, D]             query heads in order (G, H/G)
    layers/mlp_norm      [N, D]
    layers/gate_up       [N, D, 2, F]
    layers/down          [N, F, D]
"""

from __future__ import annotations

import dataclasses

from spec_jax.core.errors import UserError

_FIX = "use the configuration that the weights were trained with"
_SIZES = (
    "num_layers",
    "hidden_size",
    "mlp_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_context",
)


@dataclasses.dataclass(frozen=True)
class TargetSpec:
    """Sizes of a Llama-like decoder (Llama, SmolLM2, Qwen3).

    Attributes:
      name: what a person calls this model; not used for identity.
      family: "llama" or "qwen3".
      num_layers: N.
      hidden_size: D.
      mlp_size: F.
      num_heads: H query heads.
      num_kv_heads: G key/value heads; G divides H.
      head_dim: C channels per head (explicit: never D / H).
      vocab_size: V, unpadded.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every RMSNorm.
      qk_norm: RMSNorm over each head's queries and keys (Qwen3).
      tied: whether the checkpoint tied head and embedding (export only).
      max_context: longest position the model was made for, in tokens.
      eos_ids: token ids that end a generation.
      pad_id: id used for padding rows; any valid id.

    Raises:
      UserError: another family, a size below 1, heads that G does not divide, or an
        odd C.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied: bool = False
    max_context: int = 2048
    eos_ids: tuple[int, ...] = ()
    pad_id: int = 0

    def __post_init__(self):
        if self.family not in ("llama", "qwen3"):
            raise UserError(
                f"the target's family is {self.family!r}; this decoder covers 'llama' "
                "(SmolLM2 included) and 'qwen3'"
            )
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise UserError(
                    f"the target's {name}={getattr(self, name)} must be at least 1; "
                    f"{_FIX}"
                )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"the target's num_heads={self.num_heads} is not a multiple of its "
                f"num_kv_heads={self.num_kv_heads}; {_FIX}"
            )
        if self.head_dim % 2:
            raise UserError(
                f"the target's head_dim={self.head_dim} must be even (rotary); {_FIX}"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head, H / G."""
        return self.num_heads // self.num_kv_heads
