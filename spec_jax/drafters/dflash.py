"""DFlash: one parallel pass fills a block of mask tokens.

The block `[anchor, MASK, ..., MASK]` attends to the target's features before
the anchor and to itself. Row j predicts its own position, so the anchor row
predicts nothing (drafter contracts, section 4.3; article 4).
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from spec_jax.core.batch import Batch
from spec_jax.core.features import FeatureSchema
from spec_jax.core.proposal import Proposal
from spec_jax.drafters import blocks
from spec_jax.drafters.base import Drafter, Frozen, TrainOutputs
from spec_jax.drafters.blocks import FULL, SLIDING
from spec_jax.target.cache import KVCache
from spec_jax.target.spec import TargetSpec

__all__ = ["FULL", "SLIDING", "Options", "make"]


@dataclasses.dataclass(frozen=True)
class Options(blocks.BlockOptions):
    """Options of a DFlash drafter: the backbone's, nothing more.

    The public `block_size` is num_draft + 1.
    """


def make(options: Options, target_spec: TargetSpec) -> Drafter:
    """Binds a DFlash drafter to a target.

    To serve fewer drafts than were trained, replace `num_draft` and make again:
    no weight depends on it.

    Raises:
      UserError: for options that do not fit the target.
    """
    options = blocks.resolve(options, target_spec)
    backbone = blocks.make_backbone(options, target_spec, anchor_predicts=False)
    absorb = functools.partial(blocks.absorb, backbone)

    def propose(
        params, frozen: Frozen, state: KVCache, anchor_B, length_B, draw, topology
    ) -> tuple[Proposal, KVCache]:
        del topology  # a block is a chain
        hidden_BMD = blocks.draft_rows(
            backbone, params["params"], frozen, state, anchor_B, length_B
        )
        logits_BMU = blocks.head_logits(frozen, hidden_BMD)
        draft_ids_BM, law = draw(logits_BMU, 0, frozen.target_ids_U)
        proposal = Proposal(
            tokens_BM=blocks.target_tokens(frozen, draft_ids_BM),
            draft_ids_BM=draft_ids_BM,
            law=law,
            usable_B=blocks.usable_rows(logits_BMU),
        )
        return proposal, state

    def train_outputs(params, frozen: Frozen, batch: Batch, key) -> TrainOutputs:
        rows = blocks.train_rows(backbone, params["params"], frozen, batch, key)
        return TrainOutputs(
            hidden_XMD=rows.hidden_XMD,
            labels_XM=rows.labels_XM,
            valid_XM=rows.supervised_XM.astype(jnp.float32),
            anchors_BN=rows.anchors_BN,
        )

    return Drafter(
        name="dflash",
        options=options,
        layout=backbone.layout,
        needs=FeatureSchema(options.layer_ids, target_spec.hidden_size),
        topologies=("chain",),
        init=functools.partial(blocks.init, backbone),
        init_state=functools.partial(blocks.init_state, backbone),
        prefill=absorb,
        propose=propose,
        extend=absorb,
        train_outputs=train_outputs,
    )
