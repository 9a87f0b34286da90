"""Trees of drafts: grown level by level, reranked, or of a fixed shape.

Generic over the drafter: `step` runs it on a level's nodes. Static shapes: a
tree of `depth` levels runs `depth - 1` steps of at most `top_k` rows (or as many
as a fixed tree's level has inner nodes), and what is best is chosen on device.

The score of a node is the summed log q of its path under the untempered softmax
(EAGLE-2; drafter contracts, section 2). A child never scores above its parent
and ties go to the earlier node, so the best nodes are closed under ancestors.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from spec_jax.core.errors import UserError
from spec_jax.core.topology import DYNAMIC_TREE, Topology

# step(carry, ids_BK, parent_BK, seen_BKR, level) -> (carry, logits_BKU): runs the
# drafter on K nodes of one level. `ids_BK` are columns of the logits; `parent_BK`
# is each node's parent among the rows of the step before (0 at level 1, whose
# parent is the root); `seen_BKR` [B or 1, K, R] says which of all rows run so far
# in this tree, these K last, each node sees; `level` counts from 1.
Step = Callable[[Any, Any, Any, Any, int], tuple[Any, Any]]


@struct.dataclass
class Tree:
    """Nodes of a tree, parents before children, siblings likeliest first.

    Attributes:
      ids_BM: columns of the drafter's logits.
      parents_BW: parent row of each verify row; row 0 is the root, -1.
      score_BM: summed log q of each node's path.
      finite_BM: whether the logits the node was chosen from define a law.
    """

    ids_BM: jnp.ndarray  # [B, M]
    parents_BW: jnp.ndarray  # [B, W]
    score_BM: jnp.ndarray  # [B, M]
    finite_BM: jnp.ndarray  # [B, M]


def grow(topology: Topology, logits_BU, carry, step: Step) -> Tree:
    """The tree of a topology, from the logits of the root's row.

    Args:
      topology: a static or a dynamic tree.
      logits_BU: the first drafts' logits.
      carry: what `step` threads through.
      step: see `Step`.

    Raises:
      UserError: a node would have more children than there are tokens.
    """
    if topology.kind == DYNAMIC_TREE:
        tree = expand(logits_BU, carry, step, topology.depth, topology.top_k)
        return rerank(tree, topology.nodes)
    return fixed(logits_BU, carry, step, topology.parents)


def best_children(logits_XU, count: int):
    """The likeliest tokens of each row.

    Returns:
      log_q_XK: descending, never above 0; -inf where the row defines no law.
      ids_XK: their columns; ties go to the lower one.
      finite_X: the row defines a law.

    Raises:
      UserError: more children than tokens.
    """
    size_u = logits_XU.shape[-1]
    if count > size_u:
        raise UserError(
            f"serve.topology gives a node {count} children but the drafter has "
            f"{size_u} tokens; ask for fewer"
        )
    finite_X = jnp.isfinite(logits_XU.max(-1))
    log_q_XU = logits_XU - jax.nn.logsumexp(logits_XU, -1, keepdims=True)
    # Rounding may lift a certain token above 0, and it above its parent.
    log_q_XU = jnp.where(finite_X[..., None], jnp.minimum(log_q_XU, 0.0), -jnp.inf)
    return *jax.lax.top_k(log_q_XU, count), finite_X


def expand(logits_BU, carry, step: Step, depth: int, top_k: int) -> Tree:
    """Every node that EAGLE-2 generates, in the order it does.

    The root's best `top_k` children are the first frontier. Each further level
    runs the frontier, takes `top_k` children of each of its nodes, and keeps the
    best `top_k` of them as the next one.

    Returns:
      A tree of `top_k + (depth - 1) * top_k ** 2` nodes.
    """
    size_b = logits_BU.shape[0]
    score_BK, ids_BK, finite_B = best_children(logits_BU, top_k)
    own_KK = jnp.eye(top_k, dtype=bool)
    seen_BKR = jnp.broadcast_to(own_KK, (size_b, top_k, top_k))
    parent_BK = jnp.zeros((size_b, top_k), jnp.int32)
    # Rows of the frontier among all generated nodes (row 0 is the root).
    row_BK = jnp.broadcast_to(1 + jnp.arange(top_k), (size_b, top_k))
    levels = [
        (ids_BK, jnp.zeros_like(row_BK), score_BK, jnp.tile(finite_B[:, None], top_k))
    ]
    first_row = 1 + top_k
    for level in range(1, depth):
        carry, logits_BKU = step(carry, ids_BK, parent_BK, seen_BKR, level)
        log_q_BKK, child_BKK, finite_BK = best_children(logits_BKU, top_k)
        flat = (size_b, top_k * top_k)
        child_BX = child_BKK.reshape(flat)
        score_BX = (score_BK[..., None] + log_q_BKK).reshape(flat)
        levels.append(
            (
                child_BX,
                jnp.repeat(row_BK, top_k, axis=1),
                score_BX,
                jnp.repeat(finite_BK, top_k, axis=1),
            )
        )
        score_BK, best_BK = jax.lax.top_k(score_BX, top_k)
        parent_BK, row_BK = best_BK // top_k, first_row + best_BK
        first_row += top_k * top_k
        ids_BK = jnp.take_along_axis(child_BX, best_BK, 1)
        above_BKR = jnp.take_along_axis(seen_BKR, parent_BK[..., None], 1)
        seen_BKR = jnp.concatenate(
            [above_BKR, jnp.broadcast_to(own_KK, (size_b, top_k, top_k))], -1
        )
    ids_BM, parents_BM, score_BM, finite_BM = (
        jnp.concatenate(parts, 1) for parts in zip(*levels, strict=True)
    )
    return Tree(ids_BM, _with_root(parents_BM), score_BM, finite_BM)


def rerank(tree: Tree, nodes: int) -> Tree:
    """The best `nodes` nodes, in their old order, with parents renumbered.

    Ties go to the earlier node: a kept node's ancestors are kept, because they
    score no less and come first.
    """
    _, kept_BM = jax.lax.top_k(tree.score_BM, nodes)
    kept_BM = jnp.sort(kept_BM, axis=1)

    def take(values_BX):
        return jnp.take_along_axis(values_BX, kept_BM, 1)

    old_BM = take(tree.parents_BW[:, 1:])
    # Rows start at 1, so an old row's new one is how many kept rows reach to it.
    upto_BMM = kept_BM[:, None, :] < old_BM[..., None]
    return Tree(
        ids_BM=take(tree.ids_BM),
        parents_BW=_with_root(upto_BMM.sum(-1).astype(jnp.int32)),
        score_BM=take(tree.score_BM),
        finite_BM=take(tree.finite_BM),
    )


def fixed(logits_BU, carry, step: Step, parents: tuple[int, ...]) -> Tree:
    """A tree of a given shape (EAGLE): the n-th child is the n-th likeliest token.

    Only nodes that have children are run.

    Args:
      logits_BU: the first drafts' logits.
      carry: what `step` threads through.
      step: see `Step`.
      parents: parent row of rows 1, 2, ...; 0 is the root.
    """
    size_b, size_m = logits_BU.shape[0], len(parents)
    children: dict[int, list[int]] = {row: [] for row in range(size_m + 1)}
    for row, parent in enumerate(parents, 1):
        children[parent].append(row)
    ids: dict[int, Any] = {}
    finite: dict[int, Any] = {}
    score: dict[int, Any] = {0: jnp.zeros((size_b,), jnp.float32)}

    def assign(rows, logits_BKU):
        """Names the children of `rows` from the rows' logits."""
        most = max(len(children[row]) for row in rows)
        log_q_BKX, best_BKX, finite_BK = best_children(logits_BKU, most)
        for k, row in enumerate(rows):
            for rank, child in enumerate(children[row]):
                ids[child] = best_BKX[:, k, rank]
                score[child] = score[row] + log_q_BKX[:, k, rank]
                finite[child] = finite_BK[:, k]

    assign([0], logits_BU[:, None])
    ran: list[int] = []  # rows run so far
    above, level = [0], 1
    while True:
        rows = [c for row in above for c in children[row] if children[c]]
        if not rows:
            break
        parent_K = [above.index(parents[row - 1]) for row in rows]
        seen_KR = np.zeros((len(rows), len(ran) + len(rows)), bool)
        ran += rows
        for k, row in enumerate(rows):
            while row:
                seen_KR[k, ran.index(row)] = True
                row = parents[row - 1]
        carry, logits_BKU = step(
            carry,
            jnp.stack([ids[row] for row in rows], 1),
            jnp.broadcast_to(jnp.asarray(parent_K, jnp.int32), (size_b, len(rows))),
            jnp.asarray(seen_KR)[None],
            level,
        )
        assign(rows, logits_BKU)
        above, level = rows, level + 1

    def in_order(values):
        return jnp.stack([values[row] for row in range(1, size_m + 1)], 1)

    return Tree(
        ids_BM=in_order(ids),
        parents_BW=_with_root(
            jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (size_b, size_m))
        ),
        score_BM=in_order(score),
        finite_BM=in_order(finite),
    )


def _with_root(parents_BM):
    root_B1 = jnp.full_like(parents_BM[:, :1], -1)
    return jnp.concatenate([root_B1, parents_BM], 1)


def likeliest_shape(
    rank_rates: tuple[float, ...], nodes: int, max_depth: int
) -> tuple[int, ...]:
    """Parents of the fixed tree with the most expected accepted tokens.

    Takes the rate at which the n-th likeliest token is the right one to be the
    same at every node; a node's worth is then the product along its path, and
    the best tree is its `nodes` worthiest nodes.

    Args:
      rank_rates: rate of each rank, not increasing; ranks past the last never.
      nodes: drafts.
      max_depth: levels.

    Raises:
      UserError: rates that rise or are not rates, or too few nodes to choose from.
    """
    rates = tuple(rank_rates)
    rising = any(a < b for a, b in itertools.pairwise(rates))
    if not rates or rising or not all(0 < r <= 1 for r in rates):
        raise UserError(f"rank_rates={rates} must be rates that do not rise")
    # The heap holds nodes whose parent is taken: (-worth, order, path).
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    rows: dict[tuple[int, ...], int] = {}
    parents: list[int] = []
    made = 0
    while heap and len(parents) < nodes:
        worth, _, path = heapq.heappop(heap)
        if path:
            parents.append(rows[path[:-1]])
        rows[path] = len(parents)
        if len(path) == max_depth:
            continue
        for rank, rate in enumerate(rates):
            made += 1
            heapq.heappush(heap, (worth * rate, made, (*path, rank)))
    if len(parents) < nodes:
        raise UserError(
            f"nodes={nodes} is more than a tree of {len(rates)} ranks and depth "
            f"{max_depth} has; ask for fewer"
        )
    return tuple(parents)


# A fixed tree of 25 drafts in 5 levels, for a head whose first guess is right in
# three rounds of five.
DEFAULT_STATIC_TREE = likeliest_shape((0.6, 0.18, 0.08, 0.04), nodes=25, max_depth=5)


def cut(parents: tuple[int, ...], max_depth: int) -> tuple[int, ...]:
    """A fixed tree without its nodes below `max_depth` levels, rows renumbered.

    Args:
      parents: parent row of rows 1, 2, ...; 0 is the root.
      max_depth: levels that stay, at least 1.
    """
    depth, row_of, kept = [0], {0: 0}, []
    for row, parent in enumerate(parents, 1):
        depth.append(depth[parent] + 1)
        if depth[row] <= max_depth:
            kept.append(row_of[parent])
            row_of[row] = len(kept)
    return tuple(kept)
