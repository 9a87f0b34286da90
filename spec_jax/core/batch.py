"""One training batch: what the data pipeline yields and a drafter trains on."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Batch:
    """One training batch, padded to a static S.

    Attributes:
      tokens_BS: token ids.
      supervised_BS: bool, tokens the target itself produced.
      length_B: real tokens of each row.
      features_BSLD: captured features (float; cast to float32 inside).
      teacher_BSD: None, or post-norm last hidden states.
    """

    tokens_BS: jnp.ndarray  # [B, S]
    supervised_BS: jnp.ndarray  # [B, S]
    length_B: jnp.ndarray  # [B]
    features_BSLD: jnp.ndarray  # [B, S, L, D]
    teacher_BSD: jnp.ndarray | None = None  # [B, S, D]
