"""A drafter of somebody's own, which tests put where no package looks.

Draft j follows from the target's features of the last row before the anchor and
from the token before it, one small step per draft:

    x_j = features @ fc + embed(previous) @ mix + place_j
    hidden_j = x_j + silu(x_j) @ out           read by the target's own head
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax.core import block_layout
from spec_jax.core.batch import Batch
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.features import FeatureSchema, check_layer_ids
from spec_jax.core.proposal import Proposal, join_rows
from spec_jax.drafters import blocks
from spec_jax.drafters.base import Drafter, Frozen, Rows, TrainOutputs
from spec_jax.nn import anchors
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of this drafter.

    Attributes:
      num_draft: M.
      layer_ids: captured layer outputs; () is the layer in the middle.
      num_anchors: N, blocks sampled per training sequence.
    """

    num_draft: int = 3
    layer_ids: tuple[int, ...] = ()
    num_anchors: int = 12


def make(options: Options, target_spec: TargetSpec) -> Drafter:
    """Binds the drafter to a target.

    Raises:
      UserError: layers that the target does not have.
    """
    size_d = target_spec.hidden_size
    layer_ids = tuple(options.layer_ids) or (target_spec.num_layers // 2 - 1,)
    check_layer_ids(layer_ids, target_spec.num_layers)
    options = dataclasses.replace(options, layer_ids=layer_ids)
    layout = BlockLayout(options.num_draft, anchor_predicts=True)
    shapes = {
        "fc": (len(layer_ids) * size_d, size_d),
        "mix": (size_d, size_d),
        "place": (options.num_draft, size_d),
        "out": (size_d, size_d),
    }

    def init(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {
            "params": {
                name: shape[0] ** -0.5 * jax.random.normal(keys[name], shape)
                for name, shape in shapes.items()
            }
        }

    def hidden_rows(weights, frozen: Frozen, feature_XC, previous_X, place_XD):
        """Rows `[..., D]` that the head reads."""
        embed_VD = jax.lax.stop_gradient(frozen.embed_VD).astype(jnp.float32)
        x_XD = feature_XC @ weights["fc"] + embed_VD[previous_X] @ weights["mix"]
        x_XD = x_XD + place_XD
        return x_XD + jax.nn.silu(x_XD) @ weights["out"]

    def init_state(slots: int, allocated: int):
        del allocated  # the last row's features are all that is kept
        return jnp.zeros((1, slots, shapes["fc"][0]), jnp.float32)

    def absorb(params, frozen, state, rows: Rows):
        """Prefill and extend: keeps the last row that counts."""
        del params, frozen
        at_B = block_layout.last_rows(rows.length_B)
        last_B1LD = jnp.take_along_axis(
            rows.features_BTLD, at_B[:, None, None, None], 1
        )
        last_BC = last_B1LD.reshape(at_B.shape[0], -1).astype(jnp.float32)
        return jnp.where((rows.length_B > 0)[None, :, None], last_BC[None], state)

    def propose(params, frozen: Frozen, state, anchor_B, length_B, draw, topology):
        del length_B, topology
        weights, previous_B, ids, laws = params["params"], anchor_B, [], []
        for row in range(layout.num_draft):
            hidden_BD = hidden_rows(
                weights, frozen, state[0], previous_B, weights["place"][row]
            )
            logits_BU = blocks.head_logits(frozen, hidden_BD)
            id_B1, law = draw(logits_BU[:, None], row, frozen.target_ids_U)
            previous_B = blocks.target_tokens(frozen, id_B1[:, 0])
            ids.append(id_B1)
            laws.append(law)
        draft_ids_BM, law = jnp.concatenate(ids, 1), join_rows(laws)
        proposal = Proposal(
            tokens_BM=blocks.target_tokens(frozen, draft_ids_BM),
            draft_ids_BM=draft_ids_BM,
            law=law,
            usable_B=blocks.usable_rows(law.logits_BTV),
        )
        return proposal, state

    def train_outputs(params, frozen: Frozen, batch: Batch, key) -> TrainOutputs:
        weights = params["params"]
        size_b, size_s = batch.tokens_BS.shape
        inside_BS = jnp.arange(size_s)[None] < batch.length_B[:, None]
        supervised_BS = batch.supervised_BS.astype(bool) & inside_BS
        anchors_BN, real_BN = anchors.sample_anchors(
            key,
            block_layout.pair_candidates(supervised_BS),
            batch.length_B,
            options.num_anchors,
        )

        def at(values_BS, position_BNM):
            flat_BX = jnp.minimum(position_BNM, size_s - 1).reshape(size_b, -1)
            return jnp.take_along_axis(values_BS, flat_BX, 1).reshape(
                position_BNM.shape
            )

        # Padding may hold any token; a known one keeps it out of the gradients.
        tokens_BS = jnp.where(inside_BS, batch.tokens_BS, 0)
        label_BNM = block_layout.label_positions(layout, anchors_BN)
        before_BNM = block_layout.teacher_positions(layout, anchors_BN)
        valid_BNM = at(supervised_BS, label_BNM) & real_BN[..., None]
        valid_BNM &= label_BNM < batch.length_B[:, None, None]
        row_BN = block_layout.pair_starts(anchors_BN)
        feature_BNLD = jnp.take_along_axis(
            batch.features_BSLD, row_BN[..., None, None], 1
        )
        feature_BN1C = feature_BNLD.reshape(*row_BN.shape, 1, -1).astype(jnp.float32)
        hidden_BNMD = hidden_rows(
            weights, frozen, feature_BN1C, at(tokens_BS, before_BNM), weights["place"]
        )
        rows = (size_b * options.num_anchors, layout.num_draft)
        return TrainOutputs(
            hidden_XMD=hidden_BNMD.reshape(*rows, -1),
            labels_XM=at(tokens_BS, label_BNM).reshape(rows),
            valid_XM=valid_BNM.reshape(rows).astype(jnp.float32),
            anchors_BN=anchors_BN,
        )

    return Drafter(
        name=__name__,
        options=options,
        layout=layout,
        needs=FeatureSchema(layer_ids, size_d),
        topologies=("chain",),
        init=init,
        init_state=init_state,
        prefill=absorb,
        propose=propose,
        extend=absorb,
        train_outputs=train_outputs,
    )
