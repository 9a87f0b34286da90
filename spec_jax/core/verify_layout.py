"""Rows of a verify: tokens, parents, positions and how many of them count.

One representation for chains and trees: each row has a `parent` row. A chain
is the tree whose parent is the row before (`parents = -1, 0, 1, ...`), so its
visibility is causal and its position is its index.

Ragged chains are packed: the rows that count, request after request, in T static
rows (`Packing`). The (R, T) programs that are compiled form the `Ladder`.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from flax import struct

from spec_jax.core import masks
from spec_jax.core.errors import UserError
from spec_jax.core.proposal import Proposal
from spec_jax.core.shapes import bind
from spec_jax.core.topology import CHAIN_TOPOLOGY, Topology


@struct.dataclass
class VerifyLayout:
    """What one target forward runs.

    Attributes:
      tokens_BW: row 0 is the anchor, the rest are drafts.
      parents_BW: row index of each row's parent, -1 for the root (B may be 1:
        every request has the same shape).
      depth_BW: distance from the root; position = committed length + depth.
      verify_len_B: rows that count, anchor included; later ones are padding.
      levels: static bound of the depths: tokens a path has below the root.
    """

    tokens_BW: jnp.ndarray  # [B, W]
    parents_BW: jnp.ndarray  # [B or 1, W]
    depth_BW: jnp.ndarray  # [B or 1, W]
    verify_len_B: jnp.ndarray  # [B]
    levels: int = struct.field(pytree_node=False)

    def positions(self, length_B):
        """Absolute positions `[B, W]`."""
        return length_B[:, None] + self.depth_BW

    def visible(self):
        """In-block visibility `[B or 1, W, W]`: ancestors and self."""
        return masks.ancestors(self.parents_BW)


def chain(anchor_B, drafts_BM, verify_len_B) -> VerifyLayout:
    """The anchor followed by a chain of drafts; M may be 0 (plain decoding)."""
    bind(anchor_B=anchor_B, drafts_BM=drafts_BM, verify_len_B=verify_len_B)
    tokens_BW = jnp.concatenate([anchor_B[:, None], drafts_BM], 1)
    row_1W = jnp.arange(tokens_BW.shape[1])[None]
    return VerifyLayout(tokens_BW, row_1W - 1, row_1W, verify_len_B, drafts_BM.shape[1])


def tree(
    anchor_B, drafts_BM, parents_BW, verify_len_B, levels: int | None = None
) -> VerifyLayout:
    """The anchor as the root of a tree of drafts.

    Args:
      anchor_B: the root.
      drafts_BM: tokens of rows 1..M.
      parents_BW: parent row of every row (root: -1); parents come first.
      verify_len_B: rows that count: all of them, or the anchor alone.
      levels: static bound of the nodes' depths; None: as many as there are
        drafts. A path longer than the bound would be cut.
    """
    bind(anchor_B=anchor_B, drafts_BM=drafts_BM, parents_BW=parents_BW)
    most = drafts_BM.shape[1]
    tokens_BW = jnp.concatenate([anchor_B[:, None], drafts_BM], 1)
    depth_BW = masks.ancestors(parents_BW).sum(-1) - 1
    levels = most if levels is None else min(levels, most)
    return VerifyLayout(tokens_BW, parents_BW, depth_BW, verify_len_B, levels)


def of_proposal(
    anchor_B, proposal: Proposal, verify_len_B, topology: Topology = CHAIN_TOPOLOGY
) -> VerifyLayout:
    """The rows of a round: a chain, or the proposal's own tree.

    Args:
      anchor_B: the anchors.
      proposal: the drafts.
      verify_len_B: rows that count.
      topology: what was asked for: it bounds the tree's depth.
    """
    if proposal.parents_BW is None:
        return chain(anchor_B, proposal.tokens_BM, verify_len_B)
    return tree(
        anchor_B,
        proposal.tokens_BM,
        proposal.parents_BW,
        verify_len_B,
        topology.levels(proposal.tokens_BM.shape[1]),
    )


@struct.dataclass
class Packing:
    """Where the rows that count lie when they are packed into T rows.

    Packed rows past the last one that counts are padding: their request is B.

    Attributes:
      request_T: request of each packed row (B: padding).
      row_T: its row in that request's window (0 for padding).
      index_BW: packed row of each window row; T where the row does not count.
    """

    request_T: jnp.ndarray  # [T]
    row_T: jnp.ndarray  # [T]
    index_BW: jnp.ndarray  # [B, W]

    @property
    def count_B(self):
        """Rows of each request."""
        return (self.index_BW < self.request_T.shape[0]).sum(1)


def pack(verify_len_B, window: int, rows: int) -> Packing:
    """Packs the first `verify_len` rows of every request, in request order.

    Args:
      verify_len_B: rows of each request; their sum is at most `rows` (what does
        not fit is left out, as if it did not count).
      window: W.
      rows: T.
    """
    ends_B = jnp.cumsum(verify_len_B)
    starts_B = ends_B - verify_len_B
    row_W = jnp.arange(window)
    index_BW = starts_B[:, None] + row_W[None]
    counts_BW = (row_W[None] < verify_len_B[:, None]) & (index_BW < rows)
    at_T = jnp.arange(rows)
    request_T = (at_T[:, None] >= ends_B[None]).sum(1, dtype=jnp.int32)
    before_T = jnp.take(starts_B, request_T, mode="fill", fill_value=0)
    is_real_T = request_T < verify_len_B.shape[0]
    return Packing(
        request_T=request_T,
        row_T=jnp.where(is_real_T, at_T - before_T, 0),
        index_BW=jnp.where(counts_BW, index_BW, rows),
    )


def packed(packing: Packing, rows_BWX, fill=0):
    """`[B, W, ...]` -> `[T, ...]`; padding rows hold `fill`."""
    return rows_BWX.at[packing.request_T, packing.row_T].get(
        mode="fill", fill_value=fill
    )


def unpacked(packing: Packing, rows_TX, fill=0):
    """`[T, ...]` -> `[B, W, ...]`; rows that do not count hold `fill`."""
    return rows_TX.at[packing.index_BW].get(mode="fill", fill_value=fill)


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The (R, T) programs of an engine, compiled before its first request.

    A program of R requests runs slots 0..R-1 and leaves the others alone; T is
    the rows it verifies for all of them together. Keyed by both: programs of
    equal T and different R are not interchangeable.

    Attributes:
      buckets: pairs (R, (T, ...)), R ascending, each T list ascending and ending
        with R * W, the full window.
    """

    buckets: tuple[tuple[int, tuple[int, ...]], ...]

    def __post_init__(self):
        sizes = [size for size, _ in self.buckets]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise UserError(
                f"serve.ladder has slot buckets {sizes}; they must be ascending and "
                "positive"
            )
        for size, rows in self.buckets:
            if not rows or list(rows) != sorted(set(rows)) or rows[0] < size:
                raise UserError(
                    f"serve.ladder has row buckets {list(rows)} for {size} slots; "
                    f"they must be ascending, at least {size}"
                )

    def check(self, slots: int, window: int) -> Ladder:
        """Itself, if it fits an engine of `slots` slots and W = `window`.

        Raises:
          UserError: naming the bucket that does not fit.
        """
        if self.buckets[-1][0] != slots:
            raise UserError(
                f"serve.ladder ends with {self.buckets[-1][0]} slots, but the engine "
                f"has {slots}; end it with the engine's"
            )
        for size, rows in self.buckets:
            if rows[-1] != size * window:
                raise UserError(
                    f"serve.ladder ends with {rows[-1]} rows for {size} slots, but a "
                    f"full window of {window} needs {size * window}"
                )
        return self

    def requests(self, count: int) -> int:
        """R, the smallest slot bucket that holds `count` slots."""
        return next(size for size, _ in self.buckets if size >= count)

    def rows(self, requests: int, count: int) -> int:
        """T, the smallest row bucket of `requests` slots that holds `count` rows."""
        return next(t for t in dict(self.buckets)[requests] if t >= count)


def full_ladder(slot_buckets: tuple[int, ...], window: int) -> Ladder:
    """Full windows only: what `static` and `cap_accept` run."""
    return Ladder(tuple((size, (size * window,)) for size in slot_buckets))


def even_ladder(
    slot_buckets: tuple[int, ...], window: int, row_buckets: int = 4
) -> Ladder:
    """Row buckets that cut the drafts of a full batch into equal parts.

    Args:
      slot_buckets: R of the programs, ascending.
      window: W.
      row_buckets: T of each R: R and the i-th part of its R * M drafts, at most;
        i = 0 is the program that drafts and verifies anchors only, which is how a
        planner that has stopped looks again.
    """

    def rows(size: int) -> tuple[int, ...]:
        drafts = size * (window - 1)
        parts = range(row_buckets + 1)
        return tuple(
            sorted({size + math.ceil(drafts * i / row_buckets) for i in parts})
        )

    return Ladder(tuple((size, rows(size)) for size in slot_buckets))
