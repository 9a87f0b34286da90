"""DFlash 2's candidate selector: pairwise scores over each row's best tokens.

    S_j(p, c) = U_j(c) + < A[p] * (h_j P), B[c] >

U_j are the K best unary logits of row j, p the token before it, A and B the
codebooks of predecessors and successors (drafter contracts, section 6.3). B
starts at zero: a fresh selector keeps the unary order.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn


class SelectorWeights(nn.Module):
    """The selector's parameters, float32.

    `predecessor_codebook` [V, E], `successor_codebook` [U, E] and
    `hidden_projection` [D, E].

    Attributes:
      vocab_size: V, what may precede a draft.
      draft_vocab_size: U, what may be drafted.
      hidden_size: D.
      rank: E.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    rank: int

    @nn.compact
    def __call__(self):
        init, zeros = nn.initializers.normal(0.02), nn.initializers.zeros_init()
        v, u, e = self.vocab_size, self.draft_vocab_size, self.rank
        self.param("predecessor_codebook", init, (v, e), jnp.float32)
        self.param("successor_codebook", zeros, (u, e), jnp.float32)
        self.param("hidden_projection", init, (self.hidden_size, e), jnp.float32)


def project(weights, hidden_XD):
    """Projected hidden rows `[..., E]`: the part that no draft waits for."""
    return hidden_XD @ weights["hidden_projection"]


def query(weights, previous_X, projected_XE):
    """What a row asks of its candidates, given the token before it (target id)."""
    return jnp.take(weights["predecessor_codebook"], previous_X, axis=0) * projected_XE


def scores(unary_XK, query_XE, codes_XKE):
    """Scores `[..., K]` of a row's candidates."""
    return unary_XK + jnp.einsum("...e,...ke->...k", query_XE, codes_XKE)
