"""The shape of a proposal: a chain, a fixed tree, or a tree grown per round.

A serve option, not a property of a checkpoint: the same EAGLE head drafts a
chain or a tree (article 2, 3). Static shapes: W, the rows of a verify, follows
from the topology alone.
"""

from __future__ import annotations

import dataclasses

from spec_jax.core.errors import UserError

CHAIN, STATIC_TREE, DYNAMIC_TREE = "chain", "static_tree", "dynamic_tree"
KINDS = (CHAIN, STATIC_TREE, DYNAMIC_TREE)


@dataclasses.dataclass(frozen=True)
class Topology:
    """What is drafted and how much of it is verified.

    Attributes:
      kind: "chain", "static_tree" (EAGLE) or "dynamic_tree" (EAGLE-2).
      depth: levels drafted below the root (trees).
      top_k: children of an expanded node, and nodes expanded per level (dynamic
        tree). Together with `depth` this is the generation budget:
        top_k + (depth - 1) * top_k^2 nodes.
      nodes: drafts verified, root excluded: the verification budget (dynamic
        tree; a static tree has `len(parents)`).
      parents: of a static tree, the parent row of each draft row 1, 2, ...
        (0 is the root); parents come first, and the n-th child of a node, in
        order, is its n-th likeliest token.
    """

    kind: str = CHAIN
    depth: int = 0
    top_k: int = 0
    nodes: int = 0
    parents: tuple[int, ...] = ()

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(
                f"serve.topology={self.kind!r} must be one of {', '.join(KINDS)}"
            )
        if self.kind == DYNAMIC_TREE:
            for name in ("depth", "top_k", "nodes"):
                if getattr(self, name) < 1:
                    raise UserError(
                        f"serve.tree_{name}={getattr(self, name)} must be at least 1 "
                        f"for serve.topology={DYNAMIC_TREE!r}"
                    )
            grown = self.top_k + (self.depth - 1) * self.top_k**2
            if self.nodes > grown:
                raise UserError(
                    f"serve.tree_nodes={self.nodes} is more than the {grown} nodes "
                    f"that depth {self.depth} and top_k {self.top_k} draft; verify "
                    "fewer, or draft more"
                )
        if self.kind == STATIC_TREE:
            bad = [i for i, p in enumerate(self.parents) if not 0 <= p <= i]
            if bad or not self.parents:
                raise UserError(
                    f"serve.tree_parents={self.parents} must name, for draft rows 1, "
                    "2, ..., an earlier row each (0 is the root)"
                )

    @property
    def is_chain(self) -> bool:
        return self.kind == CHAIN

    def num_draft(self, trained: int) -> int:
        """M, drafts of a round, for a drafter that proposes chains of `trained`."""
        if self.kind == CHAIN:
            return trained
        return len(self.parents) if self.kind == STATIC_TREE else self.nodes

    def levels(self, trained: int) -> int:
        """Longest path below the root: drafts that one round can accept."""
        if self.kind == CHAIN:
            return trained
        if self.kind == DYNAMIC_TREE:
            return min(self.depth, self.nodes)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)

    def window(self, trained: int) -> int:
        """W, rows of a verify: the anchor and the drafts."""
        return self.num_draft(trained) + 1


CHAIN_TOPOLOGY = Topology()
