"""Training rollouts of EAGLE and EAGLE-3: a drafter runs on from its own output.

What a round does at serving (`feedback`), from many starts of a conversation at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.core import block_layout, masks
from spec_jax.core.batch import Batch
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError
from spec_jax.core.shapes import bind
from spec_jax.drafters.base import Frozen
from spec_jax.drafters.feedback import Cell, embed
from spec_jax.nn import anchors, recurrent


@struct.dataclass
class Rollouts:
    """Training rows of a batch, X = B * N starts, J steps each.

    Attributes:
      x_XJD: the layer's outputs; step 0 first.
      labels_XJ: the token each row predicts.
      valid_XJ: 1.0 where that token is supervised.
      teacher_XJD: the target's post-norm hidden row that predicts it.
      anchors_BN: the anchor of each start.
    """

    x_XJD: jnp.ndarray  # [X, J, D]
    labels_XJ: jnp.ndarray  # [X, J]
    valid_XJ: jnp.ndarray  # [X, J]
    teacher_XJD: jnp.ndarray  # [X, J, D]
    anchors_BN: jnp.ndarray  # [B, N]


def roll_out(
    cell: Cell, weights, frozen: Frozen, batch: Batch, key, depth: int, noise=None
) -> Rollouts:
    """Starts rollouts before sampled anchors and runs them, tokens teacher-forced.

    A start at t stands for the round whose anchor is token t + 1 and whose first
    draft is token t + 2: both are supervised, as a block drafter's anchor and
    first label are. Its later steps see the target's rows up to t and their own
    (`core.masks.rollout`), and take their own output for a feature, through
    which gradients flow.

    Args:
      cell: the drafter.
      weights: its parameters' tree.
      frozen: the borrowed embedding.
      batch: needs `teacher_BSD`.
      key: of the anchors: one key, or one per row.
      depth: J.
      noise: None, or feature_BSD -> feature_BSD, before the rows are fused.

    Raises:
      UserError: the batch has no teacher hidden rows.
    """
    if batch.teacher_BSD is None:
        raise UserError(
            "batch.teacher_BSD is None but this drafter learns from the target's last "
            "hidden rows; capture the features again with the teacher kept"
        )
    s = bind(
        tokens_BS=batch.tokens_BS,
        supervised_BS=batch.supervised_BS,
        length_B=batch.length_B,
        features_BSLD=batch.features_BSLD,
        teacher_BSD=batch.teacher_BSD,
    )
    position_S = jnp.arange(s["S"])
    inside_BS = masks.committed(position_S[None], batch.length_B[:, None])
    supervised_BS = batch.supervised_BS.astype(bool) & inside_BS
    anchors_BN, real_BN = anchors.sample_anchors(
        key,
        block_layout.pair_candidates(supervised_BS),
        batch.length_B,
        cell.num_starts,
    )
    starts_BN = block_layout.pair_starts(anchors_BN)

    # Padding may hold anything; zeros here keep NaN out of the gradients too.
    tokens_BS = jnp.where(inside_BS, batch.tokens_BS, 0)
    features_BSLD = jnp.where(inside_BS[..., None, None], batch.features_BSLD, 0)
    teacher_BSD = jnp.where(inside_BS[..., None], batch.teacher_BSD, 0)
    teacher_BSD = teacher_BSD.astype(jnp.float32)
    feature_BSD = cell.features(weights, features_BSLD, teacher_BSD)
    if noise is not None:
        feature_BSD = noise(feature_BSD)

    following_BS = block_layout.following_tokens(
        tokens_BS, jnp.zeros_like(tokens_BS[:, 0])
    )
    input_BSI, residual_BSD = cell.fuse(
        weights, embed(frozen, following_BS), feature_BSD
    )
    prefix_k_BSGC, prefix_v_BSGC = recurrent.keys_values(
        weights["layer"],
        cell.sizes,
        input_BSI,
        jnp.broadcast_to(position_S[None], inside_BS.shape),
    )

    def at(values_BSX, positions_BN):
        index = jnp.minimum(positions_BN, s["S"] - 1)
        return jnp.take_along_axis(
            values_BSX, index.reshape(*index.shape, *(1,) * (values_BSX.ndim - 2)), 1
        )

    input_BNI, residual_BND = at(input_BSI, starts_BN), at(residual_BSD, starts_BN)
    g, c = cell.sizes.num_kv_heads, cell.sizes.head_dim
    own_k = own_v = jnp.zeros((s["B"], cell.num_starts, 0, g, c), jnp.float32)
    x_BND, steps = None, []
    for step in range(depth):
        positions_BN = block_layout.feedback_positions(anchors_BN, step)
        if step:
            drafts_BN = at(tokens_BS, block_layout.draft_positions(anchors_BN, step))
            input_BNI, residual_BND = cell.fuse(
                weights, embed(frozen, drafts_BN), x_BND
            )
            k_BNGC, v_BNGC = recurrent.keys_values(
                weights["layer"], cell.sizes, input_BNI, positions_BN
            )
            own_k = jnp.concatenate([own_k, k_BNGC[:, :, None]], 2)
            own_v = jnp.concatenate([own_v, v_BNGC[:, :, None]], 2)
        mixed = recurrent.attend_rollouts(
            recurrent.queries(weights["layer"], cell.sizes, input_BNI, positions_BN),
            prefix_k_BSGC,
            prefix_v_BSGC,
            own_k,
            own_v,
            starts_BN,
        )
        x_BND = recurrent.finish(weights["layer"], cell.sizes, residual_BND, mixed)
        steps.append(x_BND)

    layout = BlockLayout(depth, anchor_predicts=True)
    label_at_BNJ = block_layout.label_positions(layout, anchors_BN)
    label_at_BX = label_at_BNJ.reshape(s["B"], -1)
    teacher_at_BX = block_layout.teacher_positions(layout, anchors_BN).reshape(
        s["B"], -1
    )
    valid_BNJ = (
        at(supervised_BS, label_at_BX).reshape(label_at_BNJ.shape)
        & (label_at_BNJ < batch.length_B[:, None, None])
        & real_BN[..., None]
    )
    lead = (s["B"] * cell.num_starts, depth)
    return Rollouts(
        x_XJD=jnp.stack(steps, 2).reshape(*lead, -1),
        labels_XJ=at(tokens_BS, label_at_BX).reshape(lead),
        valid_XJ=valid_BNJ.reshape(lead).astype(jnp.float32),
        teacher_XJD=jax.lax.stop_gradient(at(teacher_BSD, teacher_at_BX)).reshape(
            *lead, -1
        ),
        anchors_BN=anchors_BN,
    )
