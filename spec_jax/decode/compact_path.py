"""Compaction: after a tree was verified, its accepted path becomes a chain.

The verify wrote row i of the tree at `history + i`. Row `path[d]`, at depth d,
moves to `history + d`, the place of its position: keys were rotated for that
position already, so that moving is all there is to do. A chain lies in place and
never comes here.
"""

from __future__ import annotations

import jax.numpy as jnp

from spec_jax.core.shapes import bind
from spec_jax.target.cache import KVCache


def compact(cache: KVCache, path_BX, num_accepted_B, history_B) -> KVCache:
    """The cache with the accepted path in order after each slot's history.

    The rows are read before any is written and only they are: a donated cache is
    changed where it lies.

    Args:
      cache: KV with the tree's rows written at `history_B`.
      path_BX: verify row at each depth, the root (0) first.
      num_accepted_B: r; deeper rows stay what they are.
      history_B: committed rows before this round.
    """
    bind(path_BX=path_BX, num_accepted_B=num_accepted_B, history_B=history_B)
    depth_1X = jnp.arange(1, path_BX.shape[1])[None]
    from_BX = history_B[:, None] + path_BX[:, 1:]
    to_BX = jnp.where(
        depth_1X <= num_accepted_B[:, None],
        history_B[:, None] + depth_1X,
        cache.allocated,
    )
    b_B1 = jnp.arange(path_BX.shape[0])[:, None]

    def moved(cache_NBGAC):
        rows_BXNGC = cache_NBGAC[:, b_B1, :, from_BX]
        return cache_NBGAC.at[:, b_B1, :, to_BX].set(rows_BXNGC, mode="drop")

    return KVCache(moved(cache.k_NBGAC), moved(cache.v_NBGAC))
