"""EAGLE-3: fused features, its own head, trained on its own outputs.

Row t fuses the embedding of token t + 1 with a projection of several of the
target's layers at position t; later rows take the layer's output before the
final norm in its place, in training (test-time training, J steps) as in serving
(drafter contracts, section 3; article 3). Training forces the text's own tokens
and lets gradients flow through every feedback.

Parameters:

    fc          [L*D, D]   concatenated layers, low to high
    fc_norm     [L, D]     optional: a norm of each layer before `fc`
    embed_norm  [D]        norm of the embedding
    hidden_norm [D]        norm of the feature
    layer/                 as in `nn.recurrent`; its input is 2 D wide
    norm        [D]        before the head only
    head        [D, U]     trained, of the draft vocabulary

The published decay of 0.8 per step is the objective's: `decay_gamma` 4.48, since
exp(-1 / 4.48) = 0.8.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from flax import linen as nn

from spec_jax.core.batch import Batch
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema, check_layer_ids
from spec_jax.drafters import blocks, feedback, rollouts
from spec_jax.drafters.base import Drafter, Frozen, TrainOutputs
from spec_jax.nn import layers, recurrent
from spec_jax.target.spec import TargetSpec


@dataclasses.dataclass(frozen=True)
class Options(feedback.FeedbackOptions):
    """Options of an EAGLE-3 drafter, beside those of every feedback drafter.

    Attributes:
      ttt_length: J, training steps of each rollout.
      layer_ids: captured layer outputs, any number; () takes the public three.
      draft_vocab_size: U, columns of the drafter's head; 0: all of the target's.
      fc_norm: norm each captured layer before `fc` (EAGLE-3.1).
    """

    ttt_length: int = 7
    layer_ids: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    fc_norm: bool = False


class Weights(nn.Module):
    """The drafter's parameters, float32 (the module's docstring has the tree)."""

    sizes: recurrent.LayerSizes
    num_features: int
    draft_vocab_size: int
    fc_norm: bool

    @nn.compact
    def __call__(self):
        d, count = self.sizes.hidden_size, self.num_features
        init, ones = nn.initializers.normal(0.02), nn.initializers.ones_init()
        self.param("fc", init, (count * d, d), jnp.float32)
        if self.fc_norm:
            self.param("fc_norm", ones, (count, d), jnp.float32)
        for name in ("embed_norm", "hidden_norm", "norm"):
            self.param(name, ones, (d,), jnp.float32)
        self.param("head", init, (d, self.draft_vocab_size), jnp.float32)
        recurrent.LayerWeights(self.sizes, name="layer")()


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """The public three: outputs of layers 1, L // 2 - 1 and L - 4.

    A shallow target has fewer: ids that coincide or are the last layer's count
    once, moved to the nearest that may be captured.
    """
    last = num_layers - 2
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    return tuple(sorted({min(max(i, 0), last) for i in ids}))


def make(options: Options, target_spec: TargetSpec) -> Drafter:
    """Binds an EAGLE-3 drafter to a target.

    Raises:
      UserError: for options that do not fit the target.
    """
    layer_ids = tuple(options.layer_ids) or default_layer_ids(target_spec.num_layers)
    check_layer_ids(layer_ids, target_spec.num_layers)
    vocab = target_spec.vocab_size
    options = dataclasses.replace(
        options, layer_ids=layer_ids, draft_vocab_size=options.draft_vocab_size or vocab
    )
    options = feedback.resolve(options, target_spec, positive=("ttt_length",))
    if not 1 <= options.draft_vocab_size <= vocab:
        raise UserError(
            f"drafter.options.draft_vocab_size={options.draft_vocab_size} must be at "
            f"most the target's {vocab} tokens (0: all of them)"
        )
    size_d, eps = target_spec.hidden_size, options.norm_eps

    def features(weights, features_BTLD, hidden_BTD):
        del hidden_BTD  # the last layer is the teacher's alone
        x_BTLD = features_BTLD.astype(jnp.float32)
        if options.fc_norm:
            x_BTLD = layers.rms_norm(x_BTLD, weights["fc_norm"], eps)
        return x_BTLD.reshape(*x_BTLD.shape[:-2], -1) @ weights["fc"]

    def fuse(weights, embed_BTD, feature_BTD):
        both = (
            layers.rms_norm(embed_BTD, weights["embed_norm"], eps),
            layers.rms_norm(feature_BTD, weights["hidden_norm"], eps),
        )
        return jnp.concatenate(both, -1), feature_BTD

    def readout(weights, x_BTD):
        return layers.rms_norm(x_BTD, weights["norm"], eps)

    def head(weights, frozen: Frozen):
        return blocks.draft_columns(frozen, weights["head"], 1, "the drafter's head")

    cell = feedback.Cell(
        layout=BlockLayout(options.num_draft, anchor_predicts=True),
        sizes=feedback.layer_sizes(options, target_spec, 2 * size_d),
        num_starts=options.num_starts,
        features=features,
        fuse=fuse,
        readout=readout,
        head=head,
    )
    module = Weights(
        cell.sizes, len(layer_ids), options.draft_vocab_size, options.fc_norm
    )
    absorb = functools.partial(feedback.absorb, cell)

    def train_outputs(params, frozen: Frozen, batch: Batch, key) -> TrainOutputs:
        weights = params["params"]
        rows = rollouts.roll_out(
            cell, weights, frozen, batch, key, depth=options.ttt_length
        )
        return TrainOutputs(
            hidden_XMD=readout(weights, rows.x_XJD),
            labels_XM=rows.labels_XJ,
            valid_XM=rows.valid_XJ,
            anchors_BN=rows.anchors_BN,
            head_DU=head(weights, frozen),
            teacher_XMD=rows.teacher_XJD,
        )

    return Drafter(
        name="eagle3",
        options=options,
        layout=cell.layout,
        needs=FeatureSchema(layer_ids, size_d, teacher=True),
        topologies=feedback.TOPOLOGIES,
        init=module.init,
        init_state=functools.partial(feedback.init_state, cell),
        prefill=absorb,
        propose=functools.partial(feedback.propose, cell),
        extend=absorb,
        train_outputs=train_outputs,
        terms=(("soft_ce", 1.0),),
    )
