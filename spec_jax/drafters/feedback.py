"""What EAGLE and EAGLE-3 share: a drafter that takes its own output for a feature.

A row pairs the feature of position t with token t + 1 and predicts token t + 2
(`core.block_layout`). Rows that the target has run carry its features; the rows
of a round carry the output of the row before them. Here is serving (chains and
trees) around one layer (`nn.recurrent`), training is in `rollouts`; what a drafter
adds is its `Cell`.

State: the layer's keys and values over rows the target has run, and the last
such row's output (the latent): the first draft of a round costs no forward. A
round's own rows are kept apart and dropped; what a verify confirmed is run again
from the target's features by `extend` (never from the drafter's own).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.core import block_layout, masks
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError
from spec_jax.core.proposal import Proposal, join_rows, one_hot_law
from spec_jax.core.shapes import bind
from spec_jax.core.topology import Topology
from spec_jax.drafters import blocks
from spec_jax.drafters.base import Frozen, Rows
from spec_jax.nn import attention, recurrent
from spec_jax.sampling import trees
from spec_jax.target.cache import KVCache
from spec_jax.target.spec import TargetSpec

TOPOLOGIES = ("chain", "static_tree", "dynamic_tree")
_BORROWED = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_size",
    "rope_theta",
    "norm_eps",
)


@struct.dataclass
class FeedbackState:
    """Draft state; slots on axis 1.

    Attributes:
      cache: the layer's keys and values, row t at storage t.
      latent_NBD: output of the last row that the target confirmed (N = 1).
    """

    cache: KVCache
    latent_NBD: jnp.ndarray  # [1, B, D]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One drafter's pieces around the shared layer; all take the weights' tree.

    Attributes:
      layout: M; the anchor is no row of its own.
      sizes: of the layer, whose weights are `weights["layer"]`.
      num_starts: N, rollouts per training sequence.
      features: (weights, features_BTLD, hidden_BTD) -> feature_BTD of rows that
        the target has run.
      fuse: (weights, embed_BTD, feature_BTD) -> (input_BTI, residual_BTD).
      readout: (weights, x_BTD) -> the rows that meet the head.
      head: (weights, frozen) -> head_DU.
    """

    layout: BlockLayout
    sizes: recurrent.LayerSizes
    num_starts: int
    features: Callable[[Any, Any, Any], Any]
    fuse: Callable[[Any, Any, Any], tuple[Any, Any]]
    readout: Callable[[Any, Any], Any]
    head: Callable[[Any, Frozen], Any]


@dataclasses.dataclass(frozen=True)
class FeedbackOptions:
    """Fields of both drafters' options; None takes the target's value.

    Attributes:
      num_draft: M, drafts of a chain.
      num_starts: N, rollouts per training sequence.
      num_heads: query heads.
      num_kv_heads: key/value heads.
      head_dim: channels per head.
      mlp_size: F.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every norm.
    """

    num_draft: int = 7
    num_starts: int = 64
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_size: int | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None


OptionsT = TypeVar("OptionsT", bound=FeedbackOptions)


def resolve(options: OptionsT, target: TargetSpec, positive=()) -> OptionsT:
    """Fills the sizes that are left to the target, and checks the result.

    Args:
      options: of either drafter.
      target: sizes to borrow.
      positive: names of more fields that must be at least 1.

    Raises:
      UserError: naming the field, the value and the fix.
    """
    borrowed = {n: getattr(target, n) for n in _BORROWED if getattr(options, n) is None}
    options = dataclasses.replace(options, **borrowed)
    counts = ("num_draft", "num_starts", "num_heads", "num_kv_heads", *positive)
    for name in counts:
        if getattr(options, name) < 1:
            raise UserError(
                f"drafter.options.{name}={getattr(options, name)} must be at least 1"
            )
    if options.num_heads % options.num_kv_heads:
        raise UserError(
            f"drafter.options.num_heads={options.num_heads} must be a multiple of "
            f"num_kv_heads={options.num_kv_heads}"
        )
    if options.head_dim < 2 or options.head_dim % 2:
        raise UserError(
            f"drafter.options.head_dim={options.head_dim} must be even and positive "
            "(rotary)"
        )
    return options


def layer_sizes(
    options: FeedbackOptions, target: TargetSpec, input_size: int
) -> recurrent.LayerSizes:
    """The layer's sizes under resolved options."""
    return recurrent.LayerSizes(
        input_size=input_size,
        hidden_size=target.hidden_size,
        mlp_size=options.mlp_size,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        rope_theta=options.rope_theta,
        norm_eps=options.norm_eps,
    )


def embed(frozen: Frozen, tokens_BT):
    """The target's embedding of tokens, float32, without gradient."""
    embed_VD = jax.lax.stop_gradient(frozen.embed_VD)
    return jnp.take(embed_VD, tokens_BT, axis=0).astype(jnp.float32)


def init_state(cell: Cell, slots: int, allocated: int) -> FeedbackState:
    """No rows yet."""
    s = cell.sizes
    shape = (1, slots, s.num_kv_heads, allocated, s.head_dim)
    return FeedbackState(
        KVCache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)),
        jnp.zeros((1, slots, s.hidden_size), jnp.float32),
    )


def absorb(
    cell: Cell, params, frozen: Frozen, state: FeedbackState, rows: Rows
) -> FeedbackState:
    """Prefill and extend: caches every row, and runs the last one that counts."""
    weights = params["params"]
    size_t = rows.tokens_BT.shape[1]
    row_T = jnp.arange(size_t)
    # Nobody sees the rest, but a NaN times a weight of zero is a NaN.
    inside_BT = masks.committed(row_T[None], rows.length_B[:, None])
    feature_BTD = cell.features(
        weights,
        jnp.where(inside_BT[..., None, None], rows.features_BTLD, 0),
        jnp.where(inside_BT[..., None], rows.hidden_BTD, 0).astype(jnp.float32),
    )
    tokens_BT = jnp.where(inside_BT, rows.next_tokens_BT, 0)
    input_BTI, residual_BTD = cell.fuse(weights, embed(frozen, tokens_BT), feature_BTD)
    positions_BT = rows.start_B[:, None] + row_T[None]
    k_BTGC, v_BTGC = recurrent.keys_values(
        weights["layer"], cell.sizes, input_BTI, positions_BT
    )

    last_B1 = block_layout.last_rows(rows.length_B)[:, None]

    def last(values_BTX):
        return jnp.take_along_axis(values_BTX, last_B1[..., None], 1)

    mixed = attention.attend(
        recurrent.queries(
            weights["layer"],
            cell.sizes,
            last(input_BTI),
            jnp.take_along_axis(positions_BT, last_B1, 1),
        ),
        k_BTGC,
        v_BTGC,
        masks.causal(last_B1[..., None], row_T),
        state.cache.k_NBGAC,
        state.cache.v_NBGAC,
        0,
        rows.start_B,
    )
    latent_B1D = recurrent.finish(
        weights["layer"], cell.sizes, last(residual_BTD), mixed
    )
    some_B1 = (rows.length_B > 0)[:, None]
    return FeedbackState(
        KVCache(
            attention.write_rows(state.cache.k_NBGAC, k_BTGC[None], rows.start_B),
            attention.write_rows(state.cache.v_NBGAC, v_BTGC[None], rows.start_B),
        ),
        jnp.where(some_B1, latent_B1D[:, 0], state.latent_NBD[0])[None],
    )


@struct.dataclass
class _Round:
    """Rows that a round has run so far: keys, values, and the last step's output."""

    k_BRGC: jnp.ndarray
    v_BRGC: jnp.ndarray
    x_BKD: jnp.ndarray


def propose(
    cell: Cell,
    params,
    frozen: Frozen,
    state: FeedbackState,
    anchor_B,
    length_B,
    draw,
    topology: Topology,
) -> tuple[Proposal, FeedbackState]:
    """A chain or a tree after the rows that were absorbed.

    The anchor is not looked at: the last absorbed row was paired with it.
    """
    bind(anchor_B=anchor_B, length_B=length_B)
    weights = params["params"]
    head_DU = cell.head(weights, frozen)

    def logits(x_BKD):
        logits_BKU = jnp.matmul(
            cell.readout(weights, x_BKD), head_DU, preferred_element_type=jnp.float32
        )
        return blocks.without_padding(frozen, logits_BKU)

    def step(past: _Round, ids_BK, parent_BK, seen_BKR, level: int):
        """Runs one level of drafts (`sampling.trees.Step`)."""
        tokens_BK = blocks.target_tokens(frozen, ids_BK)
        feature_BKD = jnp.take_along_axis(past.x_BKD, parent_BK[..., None], 1)
        input_BKI, residual_BKD = cell.fuse(
            weights, embed(frozen, tokens_BK), feature_BKD
        )
        at_B1 = block_layout.feedback_positions(length_B, level)[:, None]
        positions_BK = jnp.broadcast_to(at_B1, tokens_BK.shape)
        k_BKGC, v_BKGC = recurrent.keys_values(
            weights["layer"], cell.sizes, input_BKI, positions_BK
        )
        k_BRGC = jnp.concatenate([past.k_BRGC, k_BKGC], 1)
        v_BRGC = jnp.concatenate([past.v_BRGC, v_BKGC], 1)
        mixed = attention.attend(
            recurrent.queries(weights["layer"], cell.sizes, input_BKI, positions_BK),
            k_BRGC,
            v_BRGC,
            seen_BKR,
            state.cache.k_NBGAC,
            state.cache.v_NBGAC,
            0,
            length_B,
        )
        x_BKD = recurrent.finish(weights["layer"], cell.sizes, residual_BKD, mixed)
        return _Round(k_BRGC, v_BRGC, x_BKD), logits(x_BKD)

    latent_BD = state.latent_NBD[0]
    s = cell.sizes
    empty = jnp.zeros((latent_BD.shape[0], 0, s.num_kv_heads, s.head_dim), jnp.float32)
    past = _Round(empty, empty, latent_BD[:, None])
    first_B1U = logits(latent_BD[:, None])
    if topology.is_chain:
        size_m = topology.num_draft(cell.layout.num_draft)
        return _chain(frozen, first_B1U, past, step, draw, size_m), state
    tree = trees.grow(topology, first_B1U[:, 0], past, step)
    tokens_BM = blocks.target_tokens(frozen, tree.ids_BM)
    proposal = Proposal(
        tokens_BM=tokens_BM,
        draft_ids_BM=jnp.zeros_like(tokens_BM),  # each row has one candidate
        law=one_hot_law(tokens_BM),
        usable_B=jnp.cumprod(tree.finite_BM.astype(jnp.int32), axis=1).sum(1),
        parents_BW=tree.parents_BW,
    )
    return proposal, state


def _chain(frozen: Frozen, logits_B1U, past: _Round, step, draw, size_m: int):
    """M drafts, each drawn before the next row is run."""
    size_b = logits_B1U.shape[0]
    ids, laws, rows = [], [], [logits_B1U]
    for row in range(size_m):
        ids_B1, law = draw(rows[-1], row, frozen.target_ids_U)
        ids.append(ids_B1)
        laws.append(law)
        if row + 1 < size_m:
            parent_B1 = jnp.zeros((size_b, 1), jnp.int32)
            seen_11R = jnp.ones((1, 1, row + 1), bool)
            past, logits_B1U = step(past, ids_B1, parent_B1, seen_11R, row + 1)
            rows.append(logits_B1U)
    ids_BM = jnp.concatenate(ids, 1)
    return Proposal(
        tokens_BM=blocks.target_tokens(frozen, ids_BM),
        draft_ids_BM=ids_BM,
        law=join_rows(laws),
        usable_B=blocks.usable_rows(jnp.concatenate(rows, 1)),
    )
