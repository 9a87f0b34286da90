"""Random streams: fresh each round, folded from what identifies the draw.

A key folds (seed, the request's own round counter, use, row, child). The round
counter survives retraction. Folding by position instead looks tidier and is
biased: a draft that was not reached feeds the lagged budget and would then be
redrawn with the same uniform (design, section 6; planted in the law tests).
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp


class Use(enum.IntEnum):
    """What a uniform is for; part of the key, so streams never meet."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2
    FIRST = 3


def round_uniforms(
    seed_B, round_B, use: Use, num_rows: int, child: int = 0, needed=True
):
    """Uniforms in [0, 1) for each row of each request's round.

    Args:
      seed_B: [B] int32, one per request.
      round_B: [B] int32, the request's own round counter.
      use: which draw.
      num_rows: rows drawn.
      child: rank among siblings (trees).
      needed: scalar bool (may be traced): False gives zeros and draws nothing,
        for a batch whose decisions are all deterministic.

    Returns:
      [B, num_rows] float32.
    """

    def one(seed, round_index):
        key = jax.random.key(seed)
        for part in (round_index, int(use), child):
            key = jax.random.fold_in(key, part)
        return jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row)))(
            jnp.arange(num_rows)
        )

    if needed is True:
        return jax.vmap(one)(seed_B, round_B)
    return jax.lax.cond(
        needed,
        lambda: jax.vmap(one)(seed_B, round_B),
        lambda: jnp.zeros((seed_B.shape[0], num_rows), jnp.float32),
    )


def child_uniforms(seed_B, round_B, use: Use, row_BX, child_BX, needed=True):
    """Uniforms of chosen (row, child) pairs: the nodes of a tree.

    A pair's uniform is the one `round_uniforms` gives that row and child, so the
    nodes of a chain (child 0 of each row in turn) draw what a chain draws.

    Args:
      seed_B, round_B, use, needed: as in `round_uniforms`.
      row_BX: the row each draw is made at.
      child_BX: rank among the children tried at that row.

    Returns:
      [B, X] float32.
    """

    def one(seed, round_index, row_X, child_X):
        key = jax.random.key(seed)
        for part in (round_index, int(use)):
            key = jax.random.fold_in(key, part)

        def uniform(row, child):
            folded = jax.random.fold_in(jax.random.fold_in(key, child), row)
            return jax.random.uniform(folded)

        return jax.vmap(uniform)(row_X, child_X)

    def every():
        return jax.vmap(one)(seed_B, round_B, row_BX, child_BX)

    if needed is True:
        return every()
    return jax.lax.cond(needed, every, lambda: jnp.zeros(row_BX.shape, jnp.float32))
