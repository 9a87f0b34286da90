"""What the block drafters share: options, context, block rows, training rows.

DFlash, DSpark and DFlash 2 have one backbone (`nn.block`): a block of rows, the
anchor and then mask tokens, attends to the target's features before the anchor,
fused into context rows whose keys and values are kept per layer, and to itself
(drafter contracts, section 4.3). Here are the functions around it, of a
`Backbone` (sizes and layout), its weights and what the target lends. What a
drafter adds stays in its own file.

State: the context rows' keys and values. What is visible follows the committed
length alone.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.core import block_layout
from spec_jax.core.batch import Batch
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError
from spec_jax.core.features import check_layer_ids, default_layer_ids
from spec_jax.core.shapes import bind
from spec_jax.drafters.base import Frozen, Rows
from spec_jax.nn import anchors, attention, block
from spec_jax.target.cache import KVCache
from spec_jax.target.spec import TargetSpec

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """Fields of every block drafter's options; None takes the target's value.

    Attributes:
      num_layers: draft layers.
      num_draft: M, tokens proposed.
      layer_ids: captured layer outputs; () takes the public formula for five.
      num_heads: query heads.
      num_kv_heads: key/value heads.
      head_dim: channels per head.
      mlp_size: F.
      mask_id: the token that fills draft rows.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every norm.
      layer_types: "full_attention" or "sliding_attention" per layer; () is full.
      sliding_window: window of the sliding layers, in tokens.
      is_causal: overrides both kinds; None: full layers see the whole block,
        sliding layers are causal inside it.
      num_anchors: N, blocks sampled per training sequence.
      qk_norm: norm each head's queries and keys.
    """

    num_layers: int = 2
    num_draft: int = 7
    layer_ids: tuple[int, ...] = ()
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_size: int | None = None
    mask_id: int = -1
    rope_theta: float | None = None
    norm_eps: float | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    num_anchors: int = 40
    qk_norm: bool = True


OptionsT = TypeVar("OptionsT", bound=BlockOptions)


def resolve(options: OptionsT, target: TargetSpec) -> OptionsT:
    """Fills what the options leave to the target, and checks the result.

    Raises:
      UserError: naming the field, the value and the fix.
    """
    layer_ids = tuple(options.layer_ids)
    if not layer_ids:
        # A shallow target has fewer than five layers that may be captured, and
        # the formula repeats ids there.
        count = min(5, max(1, target.num_layers - 3))
        layer_ids = default_layer_ids(target.num_layers, count)
    check_layer_ids(layer_ids, target.num_layers)
    borrowed = {
        name: getattr(target, name)
        for name in (
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_size",
            "rope_theta",
            "norm_eps",
        )
        if getattr(options, name) is None
    }
    options = dataclasses.replace(
        options,
        layer_ids=layer_ids,
        layer_types=tuple(options.layer_types) or (FULL,) * options.num_layers,
        **borrowed,
    )
    for name in ("num_layers", "num_draft", "num_anchors", "num_heads", "num_kv_heads"):
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
    if not 0 <= options.mask_id < target.vocab_size:
        raise UserError(
            f"drafter.options.mask_id={options.mask_id} must name a token of the "
            f"target, 0 to {target.vocab_size - 1}; choose one that text never contains"
        )
    kinds = options.layer_types
    if len(kinds) != options.num_layers or set(kinds) - {FULL, SLIDING}:
        raise UserError(
            f"drafter.options.layer_types={kinds} must name {FULL!r} or {SLIDING!r} "
            f"for each of the {options.num_layers} layers"
        )
    if SLIDING in kinds and (options.sliding_window or 0) < 1:
        raise UserError(
            f"drafter.options.sliding_window={options.sliding_window} must be at "
            f"least 1 when layer_types has {SLIDING!r}"
        )
    return options


def vocabulary_size(size: int, target: TargetSpec) -> int:
    """U of a drafter with tables of the draft vocabulary; 0 is the target's.

    Raises:
      UserError: it is negative or larger than the target's vocabulary.
    """
    if not 0 <= size <= target.vocab_size:
        raise UserError(
            f"drafter.options.draft_vocab_size={size} must lie between 0 (all) and the "
            f"target's {target.vocab_size} tokens"
        )
    return size or target.vocab_size


def block_sizes(options: BlockOptions, target: TargetSpec) -> block.BlockSizes:
    """The backbone's sizes under resolved options."""

    def kind(name: str) -> block.LayerKind:
        sliding = name == SLIDING
        return block.LayerKind(
            is_causal=sliding if options.is_causal is None else options.is_causal,
            window=options.sliding_window if sliding else None,
        )

    return block.BlockSizes(
        num_features=len(options.layer_ids),
        hidden_size=target.hidden_size,
        mlp_size=options.mlp_size,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        rope_theta=options.rope_theta,
        norm_eps=options.norm_eps,
        qk_norm=options.qk_norm,
        kinds=tuple(kind(name) for name in options.layer_types),
    )


@dataclasses.dataclass(frozen=True)
class Backbone:
    """The backbone of one drafter: static, hashable.

    Attributes:
      layout: rows of a block and what each predicts.
      sizes: of the weights.
      mask_id: the token that fills draft rows.
      num_anchors: N, blocks sampled per training sequence.
    """

    layout: BlockLayout
    sizes: block.BlockSizes
    mask_id: int
    num_anchors: int


def make_backbone(
    options: BlockOptions, target: TargetSpec, *, anchor_predicts: bool
) -> Backbone:
    """The backbone under resolved options."""
    return Backbone(
        layout=BlockLayout(options.num_draft, anchor_predicts),
        sizes=block_sizes(options, target),
        mask_id=options.mask_id,
        num_anchors=options.num_anchors,
    )


def init(backbone: Backbone, key, extras: dict | None = None):
    """Parameters: the backbone's, and beside them each extra module's.

    The backbone's values depend on the key alone, so drafters that share it start
    from the same ones.

    Args:
      backbone: sizes.
      key: random key.
      extras: name -> linen module, the key of its subtree.
    """
    tree = block.BlockWeights(backbone.sizes).init(key)["params"]
    for index, (name, module) in enumerate((extras or {}).items()):
        own = module.init(jax.random.fold_in(key, index))
        tree = {**tree, name: own["params"]}
    return {"params": tree}


def init_state(backbone: Backbone, slots: int, allocated: int) -> KVCache:
    """No context yet."""
    s = backbone.sizes
    shape = (len(s.kinds), slots, s.num_kv_heads, allocated, s.head_dim)
    return KVCache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def absorb(backbone: Backbone, params, frozen, state: KVCache, rows: Rows) -> KVCache:
    """Prefill and extend: projects rows and writes them at their positions."""
    del frozen  # context rows depend on features alone
    weights, sizes = params["params"], backbone.sizes
    size_t = rows.tokens_BT.shape[1]
    positions_BT = rows.start_B[:, None] + jnp.arange(size_t)[None]
    context_BTD = block.context_rows(weights, sizes, rows.features_BTLD)
    keys, values = block.context_kv(weights, sizes, context_BTD, positions_BT)
    return KVCache(
        attention.write_rows(state.k_NBGAC, jnp.stack(keys), rows.start_B),
        attention.write_rows(state.v_NBGAC, jnp.stack(values), rows.start_B),
    )


def embed_blocks(backbone: Backbone, frozen: Frozen, anchor_tokens_X):
    """Embedded rows `[..., Q, D]`, float32: the anchor, then the mask."""
    tokens_XQ = block_layout.query_tokens(
        backbone.layout, anchor_tokens_X, backbone.mask_id
    )
    embed_VD = jax.lax.stop_gradient(frozen.embed_VD)
    return jnp.take(embed_VD, tokens_XQ, axis=0).astype(jnp.float32)


def draft_rows(
    backbone: Backbone,
    weights,
    frozen: Frozen,
    state: KVCache,
    anchor_B,
    length_B,
    around=block.plain,
):
    """Post-norm hidden rows `[B, M, D]` of one block per request (serving).

    Args:
      backbone: sizes and layout.
      weights: the parameters' tree.
      frozen: the borrowed embedding.
      state: context rows.
      anchor_B: the block's first token.
      length_B: committed rows; the anchor stands at that position.
      around: see `block.run_block`.
    """
    bind(anchor_B=anchor_B, length_B=length_B)
    rows_BQD = block.run_block(
        weights,
        backbone.sizes,
        embed_blocks(backbone, frozen, anchor_B),
        block_layout.query_positions(backbone.layout, length_B),
        state,
        length_B,
        around,
    )
    return block_layout.predicting_rows(backbone.layout, rows_BQD)


def head_logits(frozen: Frozen, hidden_XD):
    """float32 logits `[..., U]` of post-norm rows, as they are served."""
    logits_XU = jnp.matmul(
        hidden_XD, frozen.head_DU, preferred_element_type=jnp.float32
    )
    return without_padding(frozen, logits_XU)


def without_padding(frozen: Frozen, logits_XU):
    """-inf in columns whose ids only pad the vocabulary: nothing would accept them."""
    if frozen.num_ids in (0, frozen.embed_VD.shape[0]):
        return logits_XU
    ids_U = target_tokens(frozen, jnp.arange(logits_XU.shape[-1]))
    return jnp.where(ids_U < frozen.num_ids, logits_XU, -jnp.inf)


def target_tokens(frozen: Frozen, columns_X):
    """Target ids of head columns."""
    return columns_X if frozen.target_ids_U is None else frozen.target_ids_U[columns_X]


def draft_columns(frozen: Frozen, table, axis: int, what: str):
    """A table of the draft vocabulary, cut to the head columns that are lent.

    A drafter made for the whole vocabulary may be served over a part of it.

    Args:
      frozen: the borrowed head, U columns.
      table: U entries along `axis`, or one per target id.
      axis: the vocabulary's axis.
      what: the table's name, for the error.

    Raises:
      UserError: the table belongs to another draft vocabulary.
    """
    size_u, ids_U = frozen.head_DU.shape[1], frozen.target_ids_U
    if table.shape[axis] == size_u:
        return table
    if ids_U is None or table.shape[axis] != frozen.embed_VD.shape[0]:
        raise UserError(
            f"{what} has {table.shape[axis]} entries but the head lends {size_u} "
            "columns; set drafter.options.draft_vocab_size to the draft vocabulary's "
            "size (0: all of the target's)"
        )
    return jnp.take(table, ids_U, axis=axis)


def usable_rows(logits_BMU):
    """Rows `[B]` before the first that defines no law.

    The maximum is finite unless the row holds NaN, +inf or only -inf.
    """
    good_BM = jnp.isfinite(logits_BMU.max(-1)).astype(jnp.int32)
    return jnp.cumprod(good_BM, axis=1).sum(1)


@struct.dataclass
class TrainRows:
    """Block rows of a batch, X = B * N blocks.

    Attributes:
      hidden_XMD: post-norm hidden rows.
      labels_XM: the token each row stands for; anything where not supervised.
      supervised_XM: bool, the label is supervised text of a sampled block.
      anchors_BN: anchor positions.
    """

    hidden_XMD: jnp.ndarray  # [X, M, D]
    labels_XM: jnp.ndarray  # [X, M]
    supervised_XM: jnp.ndarray  # [X, M]
    anchors_BN: jnp.ndarray  # [B, N]


def train_rows(
    backbone: Backbone,
    weights,
    frozen: Frozen,
    batch: Batch,
    key,
    around=block.plain,
) -> TrainRows:
    """Samples anchors and runs a block at each."""
    s = bind(
        tokens_BS=batch.tokens_BS,
        supervised_BS=batch.supervised_BS,
        length_B=batch.length_B,
        features_BSLD=batch.features_BSLD,
    )
    layout, sizes = backbone.layout, backbone.sizes
    position_S = jnp.arange(s["S"])
    inside_BS = position_S[None] < batch.length_B[:, None]
    supervised_BS = batch.supervised_BS.astype(bool) & inside_BS
    anchors_BN, real_BN = anchors.sample_anchors(
        key, supervised_BS, batch.length_B, backbone.num_anchors
    )
    # Padding may hold anything; zeros here keep NaN out of the gradients too.
    features_BSLD = jnp.where(inside_BS[..., None, None], batch.features_BSLD, 0)
    context_BSD = block.context_rows(weights, sizes, features_BSLD)
    positions_BS = jnp.broadcast_to(position_S[None], inside_BS.shape)
    keys, values = block.context_kv(weights, sizes, context_BSD, positions_BS)
    tokens_BN = jnp.take_along_axis(batch.tokens_BS, anchors_BN, 1)
    rows_BNQD = block.run_blocks(
        weights,
        sizes,
        embed_blocks(backbone, frozen, tokens_BN),
        block_layout.query_positions(layout, anchors_BN),
        keys,
        values,
        anchors_BN,
        around,
    )
    hidden_BNMD = block_layout.predicting_rows(layout, rows_BNQD)
    at_BNM = block_layout.label_positions(layout, anchors_BN)
    flat_BX = jnp.minimum(at_BNM, s["S"] - 1).reshape(s["B"], -1)
    labels_BX = jnp.take_along_axis(batch.tokens_BS, flat_BX, 1)
    supervised_BX = jnp.take_along_axis(supervised_BS, flat_BX, 1)
    valid_BNM = (
        supervised_BX.reshape(at_BNM.shape)
        & (at_BNM < batch.length_B[:, None, None])
        & real_BN[..., None]
    )
    blocks = s["B"] * backbone.num_anchors
    return TrainRows(
        hidden_XMD=hidden_BNMD.reshape(blocks, layout.num_draft, -1),
        labels_XM=labels_BX.reshape(blocks, layout.num_draft),
        supervised_XM=valid_BNM.reshape(blocks, -1),
        anchors_BN=anchors_BN,
    )


def before_labels(backbone: Backbone, batch: Batch, anchors_BN, values_BSX):
    """A value `[X, M, ...]` of the position before each label; 0 past the text.

    Of the tokens it gives the previous token (the anchor's for the first draft),
    of the teacher's hidden rows the one that predicts the label.
    """
    s = bind(tokens_BS=batch.tokens_BS, anchors_BN=anchors_BN)
    at_BNM = block_layout.teacher_positions(backbone.layout, anchors_BN)
    at_BX = at_BNM.reshape(s["B"], -1)
    rest = values_BSX.shape[2:]
    lead = (*at_BX.shape, *(1,) * len(rest))
    taken = jnp.take_along_axis(
        values_BSX, jnp.minimum(at_BX, s["S"] - 1).reshape(lead), 1
    )
    inside_BX = at_BX < batch.length_B[:, None]
    taken = jnp.where(inside_BX.reshape(lead), taken, 0)
    return taken.reshape(s["B"] * s["N"], backbone.layout.num_draft, *rest)
