"""DFlash: one parallel pass fills a block of mask tokens.

The block `[anchor, MASK, ..., MASK]` attends to the target's features before
the anchor, fused into context rows whose keys and values are kept per layer,
and to itself. Row j predicts its own position, so the anchor row predicts
nothing (drafter contracts, section 4.3; article 4).

State: the context rows' keys and values. `prefill` and `extend` both project
rows and write them at their positions; `propose` only reads. What is visible
follows the committed length alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax.core import block_layout
from spec_jax.core.batch import Batch
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema, check_layer_ids, default_layer_ids
from spec_jax.core.proposal import Proposal
from spec_jax.core.shapes import bind
from spec_jax.drafters.base import Drafter, Frozen, Rows, TrainOutputs
from spec_jax.nn import anchors, attention, block
from spec_jax.target.cache import KVCache
from spec_jax.target.spec import TargetSpec

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a DFlash drafter; None takes the target's value.

    Attributes:
      num_layers: draft layers.
      num_draft: M; the public `block_size` is M + 1.
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


def resolve(options: Options, target: TargetSpec) -> Options:
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
                f"drafter.{name}={getattr(options, name)} must be at least 1"
            )
    if options.num_heads % options.num_kv_heads:
        raise UserError(
            f"drafter.num_heads={options.num_heads} must be a multiple of "
            f"num_kv_heads={options.num_kv_heads}"
        )
    if options.head_dim < 2 or options.head_dim % 2:
        raise UserError(
            f"drafter.head_dim={options.head_dim} must be even and positive (rotary)"
        )
    if not 0 <= options.mask_id < target.vocab_size:
        raise UserError(
            f"drafter.mask_id={options.mask_id} must name a token of the target, 0 to "
            f"{target.vocab_size - 1}; choose one that text never contains"
        )
    kinds = options.layer_types
    if len(kinds) != options.num_layers or set(kinds) - {FULL, SLIDING}:
        raise UserError(
            f"drafter.layer_types={kinds} must name {FULL!r} or {SLIDING!r} for each "
            f"of the {options.num_layers} layers"
        )
    if SLIDING in kinds and (options.sliding_window or 0) < 1:
        raise UserError(
            f"drafter.sliding_window={options.sliding_window} must be at least 1 when "
            f"layer_types has {SLIDING!r}"
        )
    return options


def block_sizes(options: Options, target: TargetSpec) -> block.BlockSizes:
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


def head_logits(frozen: Frozen, hidden_XD):
    """float32 logits `[..., U]` of post-norm rows."""
    return jnp.matmul(hidden_XD, frozen.head_DU, preferred_element_type=jnp.float32)


def make(options: Options, target_spec: TargetSpec) -> Drafter:
    """Binds a DFlash drafter to a target.

    To serve fewer drafts than were trained, replace `num_draft` and make again:
    no weight depends on it.

    Raises:
      UserError: for options that do not fit the target.
    """
    options = resolve(options, target_spec)
    sizes = block_sizes(options, target_spec)
    layout = BlockLayout(options.num_draft)
    module = block.BlockWeights(sizes)

    def embed_blocks(frozen: Frozen, anchor_tokens_X):
        tokens_XQ = block_layout.query_tokens(layout, anchor_tokens_X, options.mask_id)
        embed_VD = jax.lax.stop_gradient(frozen.embed_VD)
        return jnp.take(embed_VD, tokens_XQ, axis=0).astype(jnp.float32)

    def init(key):
        return module.init(key)

    def init_state(slots: int, allocated: int) -> KVCache:
        shape = (
            options.num_layers,
            slots,
            options.num_kv_heads,
            allocated,
            options.head_dim,
        )
        return KVCache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    def absorb(params, frozen, state: KVCache, rows: Rows) -> KVCache:
        """Prefill and extend: projects rows and writes them at their positions."""
        del frozen  # context rows depend on features alone
        weights = params["params"]
        size_t = rows.tokens_BT.shape[1]
        positions_BT = rows.start_B[:, None] + jnp.arange(size_t)[None]
        context_BTD = block.context_rows(weights, sizes, rows.features_BTLD)
        keys, values = block.context_kv(weights, sizes, context_BTD, positions_BT)
        return KVCache(
            attention.write_rows(state.k_NBGAC, jnp.stack(keys), rows.start_B),
            attention.write_rows(state.v_NBGAC, jnp.stack(values), rows.start_B),
        )

    def propose(
        params, frozen: Frozen, state: KVCache, anchor_B, length_B, draw, topology
    ) -> tuple[Proposal, KVCache]:
        del topology  # a block is a chain
        bind(anchor_B=anchor_B, length_B=length_B)
        # The anchor is the first position the target has not run.
        rows_BQD = block.run_block(
            params["params"],
            sizes,
            embed_blocks(frozen, anchor_B),
            block_layout.query_positions(layout, length_B),
            state,
            length_B,
        )
        hidden_BMD = block_layout.predicting_rows(layout, rows_BQD)
        logits_BMU = head_logits(frozen, hidden_BMD)
        draft_ids_BM, law = draw(logits_BMU, 0)
        tokens_BM = draft_ids_BM
        if frozen.target_ids_U is not None:
            tokens_BM = frozen.target_ids_U[draft_ids_BM]
            law = law.replace(target_ids=frozen.target_ids_U)
        # The maximum is finite unless the row holds NaN, +inf or only -inf.
        good_BM = jnp.isfinite(logits_BMU.max(-1)).astype(jnp.int32)
        proposal = Proposal(
            tokens_BM=tokens_BM,
            draft_ids_BM=draft_ids_BM,
            law=law,
            usable_B=jnp.cumprod(good_BM, axis=1).sum(1),
        )
        return proposal, state

    def train_outputs(params, frozen: Frozen, batch: Batch, key) -> TrainOutputs:
        s = bind(
            tokens_BS=batch.tokens_BS,
            supervised_BS=batch.supervised_BS,
            length_B=batch.length_B,
            features_BSLD=batch.features_BSLD,
        )
        weights = params["params"]
        position_S = jnp.arange(s["S"])
        inside_BS = position_S[None] < batch.length_B[:, None]
        supervised_BS = batch.supervised_BS.astype(bool) & inside_BS
        anchors_BN, real_BN = anchors.sample_anchors(
            key, supervised_BS, batch.length_B, options.num_anchors
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
            embed_blocks(frozen, tokens_BN),
            block_layout.query_positions(layout, anchors_BN),
            keys,
            values,
            anchors_BN,
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
        blocks = s["B"] * options.num_anchors
        return TrainOutputs(
            hidden_XMD=hidden_BNMD.reshape(blocks, layout.num_draft, -1),
            labels_XM=labels_BX.reshape(blocks, layout.num_draft),
            valid_XM=valid_BNM.reshape(blocks, -1).astype(jnp.float32),
            anchors_BN=anchors_BN,
        )

    return Drafter(
        name="dflash",
        options=options,
        layout=layout,
        needs=FeatureSchema(options.layer_ids, target_spec.hidden_size),
        topologies=("chain",),
        init=init,
        init_state=init_state,
        prefill=absorb,
        propose=propose,
        extend=absorb,
        train_outputs=train_outputs,
    )
