"""Visibility predicates against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import block_layout, masks
from spec_jax.nn import block
from tests.support import oracles


@pytest.mark.parametrize("seed", range(6))
def test_ancestors_of_random_trees_match_a_walk_to_the_root(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 12))
    parents = [-1] + [
        int(rng.integers(-1 if seed == 5 else 0, i)) for i in range(1, size)
    ]
    got = masks.ancestors(jnp.asarray(parents))
    np.testing.assert_array_equal(got, oracles.ancestors(parents))


def test_ancestors_of_a_batch_of_trees():
    trees = np.array([[-1, 0, 1, 2], [-1, 0, 0, 1], [-1, 0, 0, 0]])
    got = jax.jit(masks.ancestors)(jnp.asarray(trees))
    np.testing.assert_array_equal(got, np.stack([oracles.ancestors(t) for t in trees]))


def test_a_chains_ancestors_are_the_causal_mask():
    got = masks.ancestors(jnp.arange(6) - 1)
    np.testing.assert_array_equal(got, np.tril(np.ones((6, 6), bool)))
    np.testing.assert_array_equal(got, masks.block_rows(6, is_causal=True))


@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_block_and_context_visibility_match_loops(window, causal):
    anchors, size_q, size_s = np.array([0, 2, 4, 11]), 5, 13
    want_context, want_block = oracles.block_visibility(
        anchors, size_q, size_s, window, causal
    )
    pos = np.asarray(
        block_layout.query_positions(block_layout.BlockLayout(4), jnp.asarray(anchors))
    )
    key = np.arange(size_s)
    context = masks.before_anchor(key, anchors[:, None, None]) & masks.in_window(
        pos[..., None], key, window
    )
    np.testing.assert_array_equal(context, want_context)
    inside = block.block_visible(size_q, block.LayerKind(causal, window))
    index = np.arange(len(anchors))
    same = masks.same_block(index[:, None, None, None], index[None, None, :, None])
    np.testing.assert_array_equal(
        same & np.asarray(inside)[None, :, None, :], want_block
    )


def test_committed_rows_are_those_before_the_length():
    got = masks.committed(jnp.arange(4), jnp.array([[0], [3], [4]]))
    np.testing.assert_array_equal(
        got, [[False] * 4, [True, True, True, False], [True] * 4]
    )
