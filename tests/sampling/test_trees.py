"""Trees against enumeration in Python; the drafter is a table with a memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.core.topology import Topology
from spec_jax.sampling import trees
from tests.support import drafting, oracles

SIZE_U, LEVELS = 6, 5
_RNG = np.random.default_rng(0)
FIRST_BU = _RNG.normal(size=(3, SIZE_U)).astype(np.float32)
BY_PATH = 1.5 * _RNG.normal(size=(LEVELS, SIZE_U, SIZE_U)).astype(np.float32)
BY_PARENT = _RNG.normal(size=(SIZE_U + 1, SIZE_U)).astype(np.float32)


def logits_after(first_U, path):
    """What the table says after a path of tokens; float64."""
    out = first_U.astype(np.float64)
    for level, token in enumerate(path):
        out = out + BY_PATH[level, token]
    if path:
        out = out + BY_PARENT[path[-2] if len(path) > 1 else SIZE_U]
    return out


def step(carry, ids_BK, parent_BK, seen_BKR, level):
    """The same through what a drafter is given: parents, visibility, level.

    The carry is every row's effect on those that see it, and the tokens of the
    last level.
    """
    effects_BRU, last_BK = carry
    mine_BKU = jnp.asarray(BY_PATH)[level - 1][ids_BK]
    effects_BRU = jnp.concatenate([effects_BRU, mine_BKU], 1)
    seen_BKR = jnp.broadcast_to(seen_BKR, (*ids_BK.shape, effects_BRU.shape[1]))
    parent_token_BK = jnp.take_along_axis(last_BK, parent_BK, 1)
    logits_BKU = (
        jnp.asarray(FIRST_BU)[:, None]
        + jnp.einsum("bkr,bru->bku", seen_BKR.astype(jnp.float32), effects_BRU)
        + jnp.asarray(BY_PARENT)[parent_token_BK]
    )
    return (effects_BRU, ids_BK), logits_BKU


CARRY = (np.zeros((3, 0, SIZE_U), np.float32), np.full((3, 1), SIZE_U, np.int32))


@functools.cache
def compiled(topology, step):
    return drafting.quick_jit(
        lambda logits_BU, carry: trees.grow(topology, logits_BU, carry, step)
    )


def grow(topology, first_BU=FIRST_BU, step=step, carry=CARRY):
    """A tree, of the table unless told otherwise; as numpy arrays."""
    return jax.tree.map(np.asarray, compiled(topology, step)(first_BU, carry))


def ranked(scores, count):
    """Indices of the best, ties to the earlier."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def generated(logits_of, depth, top_k):
    """EAGLE-2's nodes `(path, score)` in the order they are made."""
    made, frontier = [], [((), 0.0)]
    for _ in range(depth):
        level = []
        for path, score in frontier:
            log_q = oracles.log_softmax(logits_of(path))
            for token in ranked(list(log_q), top_k):
                level.append(((*path, token), score + log_q[token]))
        made += level
        frontier = [level[i] for i in ranked([s for _, s in level], top_k)]
    return made


def paths_of(ids_M, parents_W):
    """Each row's tokens from the root, following parents."""
    paths = [()]
    for token, parent in zip(ids_M, parents_W[1:], strict=True):
        assert 0 <= parent < len(paths), "a parent comes first"
        paths.append((*paths[parent], int(token)))
    return paths[1:]


@pytest.mark.parametrize(
    ("depth", "top_k", "nodes"),
    [(4, 3, 9), (4, 3, 30), (2, SIZE_U, 14), (1, 4, 3), (5, 1, 4)],
)
def test_the_best_nodes_are_kept(depth, top_k, nodes):
    tree = grow(Topology("dynamic_tree", depth=depth, top_k=top_k, nodes=nodes))
    assert tree.ids_BM.shape == (3, nodes)
    for b in range(3):
        made = generated(lambda p, b=b: logits_after(FIRST_BU[b], p), depth, top_k)
        assert len(made) == top_k + (depth - 1) * top_k**2
        kept = sorted(ranked([score for _, score in made], nodes))
        want = [made[i] for i in kept]
        assert paths_of(tree.ids_BM[b], tree.parents_BW[b]) == [p for p, _ in want]
        np.testing.assert_allclose(tree.score_BM[b], [s for _, s in want], atol=1e-4)
        assert tree.parents_BW[b, 0] == -1


def test_with_every_child_kept_no_path_at_all_is_better():
    tree = grow(Topology("dynamic_tree", depth=2, top_k=SIZE_U, nodes=12))
    for b in range(3):
        scores = {}
        for a in range(SIZE_U):
            one = oracles.log_softmax(logits_after(FIRST_BU[b], ()))[a]
            two = oracles.log_softmax(logits_after(FIRST_BU[b], (a,)))
            scores |= {(a,): one} | {(a, c): one + two[c] for c in range(SIZE_U)}
        best = sorted(scores, key=scores.get, reverse=True)[:12]
        assert set(paths_of(tree.ids_BM[b], tree.parents_BW[b])) == set(best)


def _flat_step(logits_U):
    def flat_step(carry, ids_BK, parent_BK, seen_BKR, level):
        del parent_BK, seen_BKR, level
        return carry, jnp.broadcast_to(logits_U, (*ids_BK.shape, logits_U.size))

    return flat_step


def test_ties_go_to_the_earlier_node():
    even_U = np.zeros(4, np.float32)
    topology = Topology("dynamic_tree", depth=3, top_k=2, nodes=5)
    tree = grow(topology, even_U[None], _flat_step(even_U), None)
    # Both nodes of level 1, then level 2 as it was made, then level 3.
    assert paths_of(tree.ids_BM[0], tree.parents_BW[0]) == [
        *[(0,), (1,)],
        *[(0, 0), (0, 1), (1, 0)],
    ]


def test_certain_children_do_not_push_out_their_parents():
    # All mass on token 2: its whole path ties at a score of zero.
    sure_U = np.where(np.arange(4) == 2, np.float32(80.0), np.float32(0.0))
    topology = Topology("dynamic_tree", depth=4, top_k=2, nodes=3)
    tree = grow(topology, sure_U[None], _flat_step(sure_U), None)
    assert paths_of(tree.ids_BM[0], tree.parents_BW[0]) == [(2,), (2, 2), (2, 2, 2)]
    np.testing.assert_array_equal(tree.score_BM, 0.0)
    # Rounding of log_softmax above zero must not lift a child above its parent.
    noisy = trees.best_children(jnp.array([[1e6, 0.0]]), 2)
    assert (noisy[0] <= 0).all()


def test_a_fixed_tree_takes_the_nth_likeliest():
    # Children of a node need not stand together, nor levels.
    parents = (0, 0, 1, 3, 1, 2, 4, 0)
    tree = grow(Topology("static_tree", parents=parents))
    rank = {1: 0, 2: 1, 8: 2, 3: 0, 5: 1, 6: 0, 4: 0, 7: 0}
    for b in range(3):
        paths, scores = {0: ()}, {0: 0.0}
        for row, parent in enumerate(parents, 1):
            log_q = oracles.log_softmax(logits_after(FIRST_BU[b], paths[parent]))
            token = ranked(list(log_q), SIZE_U)[rank[row]]
            paths[row] = (*paths[parent], token)
            scores[row] = scores[parent] + log_q[token]
        got = paths_of(tree.ids_BM[b], tree.parents_BW[b])
        assert got == [paths[row] for row in range(1, 9)]
        want = [scores[row] for row in range(1, 9)]
        np.testing.assert_allclose(tree.score_BM[b], want, atol=1e-4)


def test_only_inner_nodes_are_run():
    ran = []

    def counting(carry, ids_BK, parent_BK, seen_BKR, level):
        ran.append((level, ids_BK.shape[1], seen_BKR.shape[-1]))
        return step(carry, ids_BK, parent_BK, seen_BKR, level)

    def shapes(topology):
        ran.clear()
        jax.eval_shape(
            lambda first_BU, carry: trees.grow(topology, first_BU, carry, counting),
            FIRST_BU,
            CARRY,
        )
        return ran

    parents = (0, 0, 1, 3, 1, 2)
    assert shapes(Topology("static_tree", parents=parents)) == [(1, 2, 2), (2, 1, 3)]
    grown = Topology("dynamic_tree", depth=3, top_k=2, nodes=4)
    assert shapes(grown) == [(1, 2, 2), (2, 2, 4)]


def test_nodes_without_a_law_are_told():
    first_BU = FIRST_BU.copy()
    first_BU[1] = np.nan
    tree = grow(Topology("dynamic_tree", depth=2, top_k=2, nodes=4), first_BU)
    assert not tree.finite_BM[1, :2].any()  # children of the root: no law
    assert tree.finite_BM[0].all() and tree.finite_BM[2].all()
    assert not np.isnan(tree.score_BM).any()


def test_more_children_than_tokens_are_refused():
    with pytest.raises(UserError, match="7 children"):
        grow(Topology("dynamic_tree", depth=1, top_k=SIZE_U + 1, nodes=3))


def test_the_likeliest_shape_is_the_likeliest():
    rates, nodes = (0.5, 0.3, 0.1), 6
    parents = trees.likeliest_shape(rates, nodes, 3)
    worth = [1.0]
    seen = dict.fromkeys(range(nodes + 1), 0)
    for parent in parents:
        worth.append(worth[parent] * rates[seen[parent]])
        seen[parent] += 1
    every = [
        rates[a] * (1 if b < 0 else rates[b]) * (1 if c < 0 else rates[c])
        for a in range(3)
        for b in range(-1, 3)
        for c in range(-1, 3)
        if b >= 0 or c < 0
    ]
    np.testing.assert_allclose(sorted(worth[1:]), sorted(every)[-nodes:])
    assert Topology("static_tree", parents=trees.DEFAULT_STATIC_TREE).levels(1) == 5
    assert len(trees.DEFAULT_STATIC_TREE) == 25
    with pytest.raises(UserError, match="rank_rates"):
        trees.likeliest_shape((0.2, 0.3), 2, 2)
    with pytest.raises(UserError, match="nodes=9"):
        trees.likeliest_shape((0.5, 0.3), 9, 2)
