"""DSpark's two small heads: the Markov correction and the confidence.

The Markov head corrects a row's logits by what was chosen just before it, at
low rank: `logits_k += correction_k @ markov_w2`, with `e = markov_w1[prev_k]`
(drafter contracts, section 5.3):

    vanilla   correction = e
    gated     correction = sigmoid([h; e] G + b) * e
    rnn       [g, c, o] = [s; e; h] J + b
              s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),   s_0 = 0
              correction = tanh(o)

The confidence of row k is `w . [h_k; e_k] + b`: it reads the token before the
row and never the row's own, which is what keeps a cut by confidence lossless.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
KINDS = (VANILLA, GATED, RNN)


class MarkovWeights(nn.Module):
    """The Markov head's parameters, float32.

    `markov_w1` [V, E] and `markov_w2` [E, U]; gated adds `gate_proj` [D + E, E]
    and `gate_bias` [E]; rnn adds `joint_proj` [2 E + D, 3 E] and `joint_bias`.

    Attributes:
      kind: "vanilla", "gated" or "rnn".
      vocab_size: V, what may precede a draft.
      draft_vocab_size: U, what may be drafted.
      hidden_size: D.
      rank: E.
    """

    kind: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    rank: int

    @nn.compact
    def __call__(self):
        d, e = self.hidden_size, self.rank
        init, zeros = nn.initializers.normal(0.02), nn.initializers.zeros_init()
        shapes = {
            "markov_w1": (init, (self.vocab_size, e)),
            "markov_w2": (init, (e, self.draft_vocab_size)),
        }
        if self.kind == GATED:
            shapes |= {"gate_proj": (init, (d + e, e)), "gate_bias": (zeros, (e,))}
        if self.kind == RNN:
            shapes |= {
                "joint_proj": (init, (2 * e + d, 3 * e)),
                "joint_bias": (zeros, (3 * e,)),
            }
        for name, (fn, shape) in shapes.items():
            self.param(name, fn, shape, jnp.float32)


class ConfidenceWeights(nn.Module):
    """The confidence head: `proj` [D] or [D + E], and `bias`; float32.

    Attributes:
      input_size: D, or D + E with the previous token's embedding.
    """

    input_size: int

    @nn.compact
    def __call__(self):
        init, zeros = nn.initializers.normal(0.02), nn.initializers.zeros_init()
        self.param("proj", init, (self.input_size,), jnp.float32)
        self.param("bias", zeros, (), jnp.float32)


def previous(weights, previous_X):
    """Embedding `[..., E]` of the token before each row (a target id)."""
    return jnp.take(weights["markov_w1"], previous_X, axis=0)


def step(weights, kind: str, state_XE, hidden_XD, previous_XE):
    """One row's correction and the state it leaves.

    Args:
      weights: the tree of `MarkovWeights`.
      kind: which head.
      state_XE: what the row before left; read and written by "rnn" alone.
      hidden_XD: post-norm hidden row.
      previous_XE: embedding of the token before the row.

    Returns:
      correction_XE, state_XE.
    """
    if kind == VANILLA:
        return previous_XE, state_XE
    if kind == GATED:
        joined = jnp.concatenate([hidden_XD, previous_XE], -1)
        gate_XE = jax.nn.sigmoid(joined @ weights["gate_proj"] + weights["gate_bias"])
        return gate_XE * previous_XE, state_XE
    joined = jnp.concatenate([state_XE, previous_XE, hidden_XD], -1)
    mixed = joined @ weights["joint_proj"] + weights["joint_bias"]
    gate_XE, candidate_XE, output_XE = jnp.split(mixed, 3, -1)
    gate_XE = jax.nn.sigmoid(gate_XE)
    state_XE = gate_XE * state_XE + (1.0 - gate_XE) * jnp.tanh(candidate_XE)
    return jnp.tanh(output_XE), state_XE


def corrections(weights, kind: str, hidden_XMD, previous_XME):
    """Corrections `[X, M, E]` of rows whose previous tokens are all known."""
    start_XE = jnp.zeros_like(previous_XME[:, 0])

    def body(state_XE, row):
        correction_XE, state_XE = step(weights, kind, state_XE, *row)
        return state_XE, correction_XE

    if kind != RNN:  # rows do not depend on each other
        return step(weights, kind, None, hidden_XMD, previous_XME)[0]
    rows = jnp.moveaxis(hidden_XMD, 1, 0), jnp.moveaxis(previous_XME, 1, 0)
    return jnp.moveaxis(jax.lax.scan(body, start_XE, rows)[1], 0, 1)


def confidence(weights, hidden_XD, previous_XE):
    """Log-odds `[...]`, float32, that a row is accepted.

    Args:
      weights: the tree of `ConfidenceWeights`.
      hidden_XD: post-norm hidden row.
      previous_XE: embedding of the token before the row; read if the head was
        built for it.
    """
    size_d = hidden_XD.shape[-1]
    proj = weights["proj"]
    logit_X = hidden_XD.astype(jnp.float32) @ proj[:size_d] + weights["bias"]
    if proj.shape[0] > size_d:
        logit_X += previous_XE.astype(jnp.float32) @ proj[size_d:]
    return logit_X
