"""The target's slot cache: one row of storage per token and slot.

`committed_len <= allocated_len` always; the committed length is the slot's
`length_B` in the decode state, the allocated length is A. Rows at or past the
committed length are invisible whatever they hold, so a rejected draft needs no
rollback, only that the length is not advanced.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from spec_jax.target.spec import TargetSpec


@struct.dataclass
class KVCache:
    """Keys and values of every layer and slot.

    Attributes:
      k_NBGAC: [N, B, G, A, C] rotated keys.
      v_NBGAC: [N, B, G, A, C] values.
    """

    k_NBGAC: jnp.ndarray  # [N, B, G, A, C]
    v_NBGAC: jnp.ndarray  # [N, B, G, A, C]

    @property
    def allocated(self) -> int:
        """A, rows per slot."""
        return self.k_NBGAC.shape[3]


def init_cache(spec: TargetSpec, slots: int, allocated: int, dtype=jnp.float32):
    """An empty cache: `slots` requests of `allocated` rows each."""
    shape = (spec.num_layers, slots, spec.num_kv_heads, allocated, spec.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
