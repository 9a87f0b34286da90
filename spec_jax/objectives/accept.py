"""Tokens a round would emit, teacher-forced, within the supervised text."""

from __future__ import annotations

import jax.numpy as jnp


def _run(valid_XM):
    """Supervised drafts before the first gap, and blocks that have one."""
    run_X = jnp.cumprod((valid_XM > 0).astype(jnp.float32), axis=1).sum(1)
    return run_X, (run_X > 0).astype(jnp.float32)


def emitted_tokens(hit_XM, valid_XM):
    """Tokens each block's round would emit, teacher-forced.

    The accepted prefix r and one more, as in a decode loop; text that ends
    inside the block ends the round there.

    Returns:
      emitted_X: min(r + 1, labels before the text ends), r + 1 where none ends.
      blocks_X: 1.0 for a block with a label at its first draft.
    """
    num_draft = hit_XM.shape[1]
    run_X, blocks_X = _run(valid_XM)
    prefix_X = jnp.cumprod(hit_XM * (valid_XM > 0), axis=1).sum(1)
    limit_X = jnp.where(run_X == num_draft, num_draft + 1.0, run_X)
    return jnp.minimum(prefix_X + 1.0, limit_X), blocks_X


def expected_tokens(overlap_XM, valid_XM):
    """What `emitted_tokens` is on average where draft j is accepted with its
    overlap: one, and the product of the overlaps up to each draft that has a
    token after it.

    Returns:
      expected_X, blocks_X: as `emitted_tokens`.
    """
    num_draft = overlap_XM.shape[1]
    run_X, blocks_X = _run(valid_XM)
    last_X = jnp.where(run_X == num_draft, num_draft, run_X - 1)
    counts_XM = jnp.arange(1, num_draft + 1) <= last_X[:, None]
    reach_XM = jnp.cumprod(overlap_XM, axis=1)
    return blocks_X + jnp.where(counts_XM, reach_XM, 0.0).sum(1), blocks_X
