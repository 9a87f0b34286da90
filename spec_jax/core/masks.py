"""Who may see whom: one predicate each, on broadcasting integer arrays.

The XLA mask, a Pallas kernel, the gradient test and a notebook's plot call the
same function. All return booleans, True where the query may see the key.
"""

from __future__ import annotations

import jax.numpy as jnp


def before_anchor(key_pos, anchor_pos):
    """Context strictly before the anchor: its own feature is the label's leak."""
    return key_pos < anchor_pos


def in_window(query_pos, key_pos, window: int | None):
    """Sliding window, measured per query; None sees everything."""
    if window is None:
        return jnp.broadcast_to(
            True, jnp.broadcast_shapes(jnp.shape(query_pos), jnp.shape(key_pos))
        )
    return query_pos - key_pos < window


def same_block(query_block, key_block):
    """Rows of another draft block are never visible."""
    return query_block == key_block


def causal(query_row, key_row):
    """A row sees itself and the rows before it."""
    return key_row <= query_row


def committed(key_row, length):
    """Cache rows the target has confirmed."""
    return key_row < length


def block_rows(num_rows: int, *, is_causal: bool):
    """In-block visibility `[Q, Q]`: bidirectional, or causal (sliding layers)."""
    row = jnp.arange(num_rows)
    if is_causal:
        return causal(row[:, None], row[None, :])
    return jnp.ones((num_rows, num_rows), bool)


def rollout(query_column, query_step, key_column, key_step):
    """Training-time test: who sees whom among rollouts of fed-back rows.

    Column t at step 0 is the target's own row t; at step k it is what a drafter
    that started at t has after k rows of its own. A row sees the target's rows
    up to its column, and of the fed-back rows its own rollout's, itself included
    (drafter contracts, section 3.3).
    """
    prefix = (key_step == 0) & causal(query_column, key_column)
    own = (key_step > 0) & (key_step <= query_step) & (key_column == query_column)
    return prefix | own


def ancestors(parents_XT):
    """Tree visibility `[..., T, T]` from parent row indices (root: -1).

    Row i sees j when j is i or an ancestor of i. A chain's parents are the row
    before, which gives the causal mask. Parents must precede their children.
    """
    num_rows = parents_XT.shape[-1]
    row = jnp.arange(num_rows)
    seen_XTT = jnp.broadcast_to(
        row[:, None] == row[None, :], (*parents_XT.shape, num_rows)
    )
    for child in range(1, num_rows):
        parent_X = parents_XT[..., child]
        inherited_XT = jnp.take_along_axis(
            seen_XTT, jnp.maximum(parent_X, 0)[..., None, None], -2
        )[..., 0, :]
        inherited_XT = inherited_XT & (parent_X >= 0)[..., None]
        seen_XTT = seen_XTT.at[..., child, :].set(
            seen_XTT[..., child, :] | inherited_XT
        )
    return seen_XTT
