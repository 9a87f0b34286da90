"""Plan: how many rows of each request the target verifies.

`static` mode: the full window for a request that speculates, the anchor alone
for one that does not. The plan never reads a draft token it could cut: a cut
that looks at its own token is biased (article 5.5; planted in the law tests).
"""

from __future__ import annotations

import jax.numpy as jnp

from spec_jax.core.proposal import Proposal
from spec_jax.decode.state import Slots


def static_window(slots: Slots, proposal: Proposal):
    """`verify_len_B`, anchor included."""
    window = proposal.tokens_BM.shape[1] + 1
    return jnp.where(slots.speculate_B, window, 1).astype(jnp.int32)
