"""DSpark: DFlash's parallel rows, corrected from left to right.

The block `[anchor, MASK, ..., MASK]` has one row per draft: row k predicts the
token after its own position, so the anchor's row predicts too. The base logits
of all rows come from one pass; then a low-rank Markov head walks the rows, each
corrected by the token just chosen before it. q is the law of the corrected
logits. A confidence head estimates, for each row, the chance that the target
accepts its draft, from the row and the token before it (drafter contracts,
section 5; article 5).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.core.proposal import Proposal, join_rows
from spec_jax.drafters import blocks
from spec_jax.drafters.base import Drafter, Frozen, TrainOutputs
from spec_jax.nn import markov
from spec_jax.target.cache import KVCache
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class Options(blocks.BlockOptions):
    """Options of a DSpark drafter, after those of its backbone.

    The public `block_size` is num_draft.

    Attributes:
      markov_rank: E of the Markov head.
      markov_head_type: "vanilla", "gated" or "rnn".
      enable_confidence_head: estimate each draft's acceptance.
      confidence_with_markov: the confidence also reads the previous token's
        embedding in the Markov head.
      confidence_detach: train the confidence head alone; otherwise its loss also
        moves the rows and the embedding it reads.
      draft_vocab_size: U, entries of the draft vocabulary; 0: all of the target's.
    """

    markov_rank: int = 32
    markov_head_type: str = markov.VANILLA
    enable_confidence_head: bool = True
    confidence_with_markov: bool = True
    confidence_detach: bool = False
    draft_vocab_size: int = 0


def resolve(options: Options, target: TargetSpec) -> Options:
    """Fills what the options leave to the target, and checks the result.

    Raises:
      UserError: naming the field, the value and the fix.
    """
    if options.markov_rank < 1:
        raise UserError(
            f"drafter.options.markov_rank={options.markov_rank} must be at least 1; "
            "without a Markov head take the drafter 'dflash'"
        )
    if options.markov_head_type not in markov.KINDS:
        raise UserError(
            f"drafter.options.markov_head_type={options.markov_head_type!r} must be "
            f"one of {', '.join(markov.KINDS)}"
        )
    return dataclasses.replace(
        blocks.resolve(options, target),
        draft_vocab_size=blocks.vocabulary_size(options.draft_vocab_size, target),
    )


def make(options: Options, target_spec: TargetSpec) -> Drafter:
    """Binds a DSpark drafter to a target.

    To serve fewer drafts than were trained, replace `num_draft` and make again:
    no weight depends on it.

    Raises:
      UserError: for options that do not fit the target.
    """
    options = resolve(options, target_spec)
    backbone = blocks.make_backbone(options, target_spec, anchor_predicts=True)
    absorb = functools.partial(blocks.absorb, backbone)
    kind = options.markov_head_type
    size_d, size_e = target_spec.hidden_size, options.markov_rank
    modules = {
        "markov": markov.MarkovWeights(
            kind=kind,
            vocab_size=target_spec.vocab_size,
            draft_vocab_size=options.draft_vocab_size,
            hidden_size=size_d,
            rank=size_e,
        )
    }
    if options.enable_confidence_head:
        modules["confidence"] = markov.ConfidenceWeights(
            size_d + (size_e if options.confidence_with_markov else 0)
        )

    def correction_head(frozen: Frozen, weights):
        head_EU = weights["markov"]["markov_w2"]
        return blocks.draft_columns(frozen, head_EU, 1, "the Markov head")

    def propose(
        params, frozen: Frozen, state: KVCache, anchor_B, length_B, draw, topology
    ) -> tuple[Proposal, KVCache]:
        del topology  # a block is a chain
        weights = params["params"]
        hidden_BMD = blocks.draft_rows(
            backbone, weights, frozen, state, anchor_B, length_B
        )
        base_BMU = blocks.head_logits(frozen, hidden_BMD)
        head_EU = correction_head(frozen, weights)
        previous_B = anchor_B
        walk_BE = jnp.zeros((anchor_B.shape[0], size_e), jnp.float32)
        ids, laws, before = [], [], []
        for row in range(backbone.layout.num_draft):
            previous_BE = markov.previous(weights["markov"], previous_B)
            correction_BE, walk_BE = markov.step(
                weights["markov"], kind, walk_BE, hidden_BMD[:, row], previous_BE
            )
            logits_BU = base_BMU[:, row] + correction_BE @ head_EU
            id_B1, law = draw(logits_BU[:, None], row, frozen.target_ids_U)
            previous_B = blocks.target_tokens(frozen, id_B1[:, 0])
            ids.append(id_B1)
            laws.append(law)
            before.append(previous_BE)
        draft_ids_BM = jnp.concatenate(ids, 1)
        law = join_rows(laws)
        confidence_BM = None
        if options.enable_confidence_head:
            confidence_BM = markov.confidence(
                weights["confidence"], hidden_BMD, jnp.stack(before, 1)
            )
        proposal = Proposal(
            tokens_BM=blocks.target_tokens(frozen, draft_ids_BM),
            draft_ids_BM=draft_ids_BM,
            law=law,
            usable_B=blocks.usable_rows(law.logits_BTV),
            confidence_logit_BM=confidence_BM,
        )
        return proposal, state

    def train_outputs(params, frozen: Frozen, batch: Batch, key) -> TrainOutputs:
        """Teacher-forced: the text's own tokens precede each row.

        Gradients: the correction moves the Markov head, and through its gate or
        state the rows; the confidence moves its head and what it reads, unless
        `confidence_detach`. Its target is the objective's to detach.
        """
        weights = params["params"]
        rows = blocks.train_rows(backbone, weights, frozen, batch, key)
        before_XM = blocks.before_labels(
            backbone, batch, rows.anchors_BN, batch.tokens_BS
        )
        previous_XME = markov.previous(weights["markov"], before_XM)
        confidence_XM = None
        if options.enable_confidence_head:
            read = rows.hidden_XMD, previous_XME
            if options.confidence_detach:
                read = jax.lax.stop_gradient(read)
            confidence_XM = markov.confidence(weights["confidence"], *read)
        teacher_XMD = None
        if batch.teacher_BSD is not None:
            teacher_XMD = blocks.before_labels(
                backbone, batch, rows.anchors_BN, batch.teacher_BSD
            )
        return TrainOutputs(
            hidden_XMD=rows.hidden_XMD,
            labels_XM=rows.labels_XM,
            # A row counts while every row before it does.
            valid_XM=jnp.cumprod(rows.supervised_XM.astype(jnp.float32), axis=1),
            anchors_BN=rows.anchors_BN,
            correction_XME=markov.corrections(
                weights["markov"], kind, rows.hidden_XMD, previous_XME
            ),
            correction_EU=correction_head(frozen, weights),
            teacher_XMD=teacher_XMD,
            confidence_XM=confidence_XM,
        )

    terms = (("ce", 0.1), ("l1", 0.9))
    if options.enable_confidence_head:
        terms = (*terms, ("confidence", 1.0))
    return Drafter(
        name="dspark",
        options=options,
        layout=backbone.layout,
        needs=FeatureSchema(options.layer_ids, size_d, teacher=True),
        topologies=("chain",),
        init=functools.partial(blocks.init, backbone, extras=modules),
        init_state=functools.partial(blocks.init_state, backbone),
        prefill=absorb,
        propose=propose,
        extend=absorb,
        train_outputs=train_outputs,
        terms=terms,
    )
