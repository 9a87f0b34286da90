"""EAGLE's rows in float64, one after the other, written from the formulas."""

import math

import numpy as np

from spec_jax.target.spec import TargetSpec
from tests.support import oracles

SMALL = TargetSpec(
    name="small",
    family="llama",
    num_layers=6,
    hidden_size=8,
    mlp_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=13,
    rope_theta=100.0,
)


def wide(tree):
    """The same tree in float64."""
    if isinstance(tree, dict):
        return {name: wide(value) for name, value in tree.items()}
    return np.asarray(tree, np.float64)


def layer(w, rows, positions, residual, spec):
    """The layer's output at the last of `rows`, which sees all of them.

    Args:
      w: the layer's weights.
      rows: fused inputs, in order.
      positions: their rotary positions.
      residual: of the last row.
      spec: sizes.
    """
    group, heads = spec.num_heads // spec.num_kv_heads, []
    for h in range(spec.num_heads):
        g = h // group
        query = rows[-1] @ w["qkv"][:, g, h % group]
        query = oracles.rope(query, positions[-1], spec.rope_theta)
        scores, values = [], []
        for row, position in zip(rows, positions, strict=True):
            key = oracles.rope(row @ w["qkv"][:, g, group], position, spec.rope_theta)
            scores.append(query @ key / math.sqrt(spec.head_dim))
            values.append(row @ w["qkv"][:, g, group + 1])
        prob = np.exp(oracles.log_softmax(np.array(scores)))
        heads.append(sum(p * v for p, v in zip(prob, values, strict=True)))
    x = residual + np.concatenate(heads) @ w["out"]
    y = oracles.rms_norm(x, w["mlp_norm"], spec.norm_eps)
    gate, up = y @ w["gate_up"][:, 0], y @ w["gate_up"][:, 1]
    return x + (gate / (1 + np.exp(-gate)) * up) @ w["down"]


def rollout(w, fuse, embed, features, tokens, start, depth, spec):
    """Outputs `[depth, D]` of the rollout that starts at row `start`.

    Args:
      w: the layer's weights.
      fuse: (embedding, feature) -> (input, residual).
      embed: [V, D].
      features: one row per position.
      tokens: the text; forced.
      start: t; the first output predicts token t + 2.
      depth: J.
      spec: sizes.
    """
    rows = [fuse(embed[tokens[i + 1]], features[i])[0] for i in range(start)]
    feature, out = features[start], []
    for step in range(depth):
        row, residual = fuse(embed[tokens[start + 1 + step]], feature)
        rows.append(row)
        feature = layer(w, rows, list(range(len(rows))), residual, spec)
        out.append(feature)
    return np.stack(out)
