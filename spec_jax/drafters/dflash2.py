"""DFlash 2: DFlash with a convolution inside the block and a choice among K.

Two additions to DFlash's fill-in block (drafter contracts, section 6; article
6). A grouped dynamic convolution around both sublayers lets a row read its
neighbours' channels directly. A candidate selector keeps each row's K best
tokens and walks the rows from left to right, scoring the candidates by the
token chosen before them. q is the law of those scores: K tokens a row hold all
mass, and it stays that sparse up to verification. A fresh DFlash 2 drafts what
the DFlash of the same backbone does.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.core.proposal import Proposal, join_rows, target_ids_of
from spec_jax.drafters import blocks
from spec_jax.drafters.base import Drafter, Frozen, Selector, TrainOutputs
from spec_jax.nn import conv, selector
from spec_jax.target.cache import KVCache
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class Options(blocks.BlockOptions):
    """Options of a DFlash 2 drafter, after those of its backbone.

    The public `block_size` is num_draft + 1.

    Attributes:
      conv_kernel_size: rows each convolved row reads, itself included.
      conv_group_size: contiguous channels that share a dynamic coefficient.
      selector_rank: E of the selector's codebooks.
      selector_top_k: K, candidates kept of each row.
      use_selector: choose among the candidates when drafting; False drafts from
        the unary logits, as DFlash does. Training always has it. Where its held-out
        lift is not positive, a drafter trained with True is exported with False.
      output_multiplier: factor of the unary logits.
      final_logit_softcapping: unary logits become `cap * tanh(logits / cap)`;
        0: off. Serving only, for drafters trained elsewhere.
      draft_vocab_size: U, entries of the draft vocabulary; 0: all of the target's.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 32
    selector_top_k: int = 16
    use_selector: bool = True
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    draft_vocab_size: int = 0


def resolve(options: Options, target: TargetSpec) -> Options:
    """Fills what the options leave to the target, and checks the result.

    Raises:
      UserError: naming the field, the value and the fix.
    """
    for name in ("conv_kernel_size", "selector_rank", "selector_top_k"):
        if getattr(options, name) < 1:
            raise UserError(
                f"drafter.options.{name}={getattr(options, name)} must be at least 1"
            )
    group = options.conv_group_size
    if group < 1 or target.hidden_size % group:
        raise UserError(
            f"drafter.options.conv_group_size={group} must divide the target's width, "
            f"{target.hidden_size}"
        )
    if not options.output_multiplier > 0:
        raise UserError(
            f"drafter.options.output_multiplier={options.output_multiplier} must be "
            "above 0"
        )
    if not options.final_logit_softcapping >= 0:
        raise UserError(
            "drafter.options.final_logit_softcapping="
            f"{options.final_logit_softcapping} must be above 0, or 0 for off"
        )
    return dataclasses.replace(
        blocks.resolve(options, target),
        draft_vocab_size=blocks.vocabulary_size(options.draft_vocab_size, target),
    )


def make(options: Options, target_spec: TargetSpec) -> Drafter:
    """Binds a DFlash 2 drafter to a target.

    To serve fewer drafts than were trained, replace `num_draft` and make again:
    no weight depends on it.

    Raises:
      UserError: for options that do not fit the target.
    """
    options = resolve(options, target_spec)
    backbone = blocks.make_backbone(options, target_spec, anchor_predicts=False)
    absorb = functools.partial(blocks.absorb, backbone)
    size_d = target_spec.hidden_size
    modules = {
        "conv": conv.ConvWeights(
            num_layers=options.num_layers,
            hidden_size=size_d,
            taps=options.conv_kernel_size,
            group=options.conv_group_size,
        ),
        "selector": selector.SelectorWeights(
            vocab_size=target_spec.vocab_size,
            draft_vocab_size=options.draft_vocab_size,
            hidden_size=size_d,
            rank=options.selector_rank,
        ),
    }

    def successors(frozen: Frozen, weights):
        codes_UE = weights["selector"]["successor_codebook"]
        return blocks.draft_columns(frozen, codes_UE, 0, "the selector's codebook")

    def unary_logits(frozen: Frozen, hidden_BMD):
        logits_BMU = blocks.head_logits(frozen, hidden_BMD) * options.output_multiplier
        cap = options.final_logit_softcapping
        if cap:  # which would lift -inf to -cap
            logits_BMU = cap * jnp.tanh(logits_BMU / cap)
        return blocks.without_padding(frozen, logits_BMU)

    def walk(frozen: Frozen, weights, hidden_BMD, unary_BMU, anchor_B, draw):
        """Candidate index `[B, M]` and law of each row, left to right."""
        size_k = min(options.selector_top_k, unary_BMU.shape[-1])
        # The lattice: everything that no draft has to wait for.
        unary_BMK, columns_BMK = jax.lax.top_k(unary_BMU, size_k)
        tokens_BMK = blocks.target_tokens(frozen, columns_BMK)
        codes_BMKE = jnp.take(successors(frozen, weights), columns_BMK, axis=0)
        projected_BME = selector.project(weights["selector"], hidden_BMD)
        previous_B = anchor_B
        ids, laws = [], []
        for row in range(backbone.layout.num_draft):
            query_BE = selector.query(
                weights["selector"], previous_B, projected_BME[:, row]
            )
            scores_BK = selector.scores(unary_BMK[:, row], query_BE, codes_BMKE[:, row])
            id_B1, law = draw(scores_BK[:, None], row, tokens_BMK[:, row : row + 1])
            previous_B = target_ids_of(law, id_B1)[:, 0]
            ids.append(id_B1)
            laws.append(law)
        return jnp.concatenate(ids, 1), join_rows(laws)

    def propose(
        params, frozen: Frozen, state: KVCache, anchor_B, length_B, draw, topology
    ) -> tuple[Proposal, KVCache]:
        del topology  # a block is a chain
        weights = params["params"]
        hidden_BMD = blocks.draft_rows(
            backbone,
            weights,
            frozen,
            state,
            anchor_B,
            length_B,
            conv.around(weights["conv"]),
        )
        unary_BMU = unary_logits(frozen, hidden_BMD)
        if options.use_selector:
            draft_ids_BM, law = walk(
                frozen, weights, hidden_BMD, unary_BMU, anchor_B, draw
            )
        else:
            draft_ids_BM, law = draw(unary_BMU, 0, frozen.target_ids_U)
        proposal = Proposal(
            tokens_BM=target_ids_of(law, draft_ids_BM),
            draft_ids_BM=draft_ids_BM,
            law=law,
            usable_B=blocks.usable_rows(law.logits_BTV),
        )
        return proposal, state

    def train_outputs(params, frozen: Frozen, batch: Batch, key) -> TrainOutputs:
        """The selector's queries follow the text's own tokens.

        Raises:
          UserError: with a softcap, which the objectives do not know.
        """
        if options.final_logit_softcapping:
            raise UserError(
                "drafter.options.final_logit_softcapping="
                f"{options.final_logit_softcapping} is for serving drafters "
                "trained elsewhere; train with 0"
            )
        weights = params["params"]
        rows = blocks.train_rows(
            backbone, weights, frozen, batch, key, conv.around(weights["conv"])
        )
        before_XM = blocks.before_labels(
            backbone, batch, rows.anchors_BN, batch.tokens_BS
        )
        successor_UE = successors(frozen, weights)

        def query(hidden_XMD):
            return selector.query(
                weights["selector"],
                before_XM,
                selector.project(weights["selector"], hidden_XMD),
            )

        return TrainOutputs(
            # A linear head: scaled rows give scaled logits.
            hidden_XMD=rows.hidden_XMD * options.output_multiplier,
            labels_XM=rows.labels_XM,
            valid_XM=rows.supervised_XM.astype(jnp.float32),
            anchors_BN=rows.anchors_BN,
            selector=Selector(
                query_XME=query(rows.hidden_XMD),
                successor_UE=successor_UE,
                size_k=min(options.selector_top_k, successor_UE.shape[0]),
                detached_query_XME=query(jax.lax.stop_gradient(rows.hidden_XMD)),
                drafts=options.use_selector,
            ),
        )

    return Drafter(
        name="dflash2",
        options=options,
        layout=backbone.layout,
        needs=FeatureSchema(options.layer_ids, size_d),
        topologies=("chain",),
        init=functools.partial(blocks.init, backbone, extras=modules),
        init_state=functools.partial(blocks.init_state, backbone),
        prefill=absorb,
        propose=propose,
        extend=absorb,
        train_outputs=train_outputs,
        terms=(("ce", 1.0), ("selector", 1.0)),
        optional_part="use_selector",
    )
