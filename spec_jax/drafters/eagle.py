"""EAGLE: predicts the target's next feature, and the next token by its head.

Row t fuses the embedding of token t + 1 with the target's last hidden state of
position t (after the final norm) and predicts the next such state; the frozen
head reads it without a norm, and it is the next row's feature (drafter
contracts, section 1; article 2). Serves chains, fixed trees (EAGLE-1) and grown
ones (EAGLE-2: a policy, not another drafter).

Parameters: fc [2 D, D] (embedding rows first), optional fc_bias [D], and
layer/ as in `nn.recurrent`. No norm before attention, none after the layer.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from spec_jax.core.batch import Batch
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.drafters import feedback, rollouts
from spec_jax.drafters.base import Drafter, Frozen, TrainOutputs
from spec_jax.nn import anchors, recurrent
from spec_jax.target.spec import TargetSpec

# Folded into a row's key beside its positions, which no sequence reaches.
_NOISE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Options(feedback.FeedbackOptions):
    """Options of an EAGLE drafter, beside those of every feedback drafter.

    A rollout is one row here, so there are more of them by default.

    Attributes:
      bias: `fc` has a bias (public configurations that lack the key mean yes).
      feature_noise: width of the uniform noise on training features, for a
        sequence of 512 tokens; it shrinks as 1 / length. 0: none.
    """

    num_draft: int = 5
    num_starts: int = 256
    bias: bool = True
    feature_noise: float = 0.2


class Weights(nn.Module):
    """The drafter's parameters, float32 (the module's docstring has the tree)."""

    sizes: recurrent.LayerSizes
    bias: bool

    @nn.compact
    def __call__(self):
        d = self.sizes.hidden_size
        self.param("fc", nn.initializers.normal(0.02), (2 * d, d), jnp.float32)
        if self.bias:
            self.param("fc_bias", nn.initializers.zeros_init(), (d,), jnp.float32)
        recurrent.LayerWeights(self.sizes, name="layer")()


def fuse(weights, embed_BTD, feature_BTD):
    """`fc` of the embedding and the feature: the layer's input and its residual."""
    x_BTD = jnp.concatenate([embed_BTD, feature_BTD], -1) @ weights["fc"]
    if "fc_bias" in weights:
        x_BTD = x_BTD + weights["fc_bias"]
    return x_BTD, x_BTD


def add_noise(key, feature_BSD, length_B, width: float):
    """Uniform noise of `width * 512 / length`, centred, on each row's features.

    Drawn per row and position, so it depends on neither padding nor devices.

    Args:
      key: one key, or one per row.
      feature_BSD: clean features.
      length_B: real tokens of each row.
      width: at a length of 512.
    """
    size_b, size_s, size_d = feature_BSD.shape
    keys_B = anchors.row_keys(key, size_b) if key.ndim == 0 else key

    def row(row_key):
        row_key = jax.random.fold_in(row_key, _NOISE)
        return jax.vmap(
            lambda at: jax.random.uniform(jax.random.fold_in(row_key, at), (size_d,))
        )(jnp.arange(size_s))

    scale_B = width * 512.0 / jnp.maximum(length_B, 1)
    return feature_BSD + (jax.vmap(row)(keys_B) - 0.5) * scale_B[:, None, None]


def make(options: Options, target_spec: TargetSpec) -> Drafter:
    """Binds an EAGLE drafter to a target.

    Raises:
      UserError: for options that do not fit the target.
    """
    options = feedback.resolve(options, target_spec)
    if not options.feature_noise >= 0:
        raise UserError(
            f"drafter.options.feature_noise={options.feature_noise} must not be "
            "negative"
        )
    size_d = target_spec.hidden_size
    cell = feedback.Cell(
        layout=BlockLayout(options.num_draft, anchor_predicts=True),
        sizes=feedback.layer_sizes(options, target_spec, size_d),
        num_starts=options.num_starts,
        features=lambda weights, features_BTLD, hidden_BTD: hidden_BTD,
        fuse=fuse,
        readout=lambda weights, x_BTD: x_BTD,
        head=lambda weights, frozen: frozen.head_DU,
    )
    module = Weights(cell.sizes, options.bias)
    absorb = functools.partial(feedback.absorb, cell)

    def train_outputs(params, frozen: Frozen, batch: Batch, key) -> TrainOutputs:
        noise = None
        if options.feature_noise:

            def noise(feature_BSD):
                return add_noise(
                    key, feature_BSD, batch.length_B, options.feature_noise
                )

        rows = rollouts.roll_out(
            cell, params["params"], frozen, batch, key, depth=1, noise=noise
        )
        return TrainOutputs(
            hidden_XMD=rows.x_XJD,
            labels_XM=rows.labels_XJ,
            valid_XM=rows.valid_XJ,
            anchors_BN=rows.anchors_BN,
            teacher_XMD=rows.teacher_XJD,
            feature_XMD=rows.x_XJD,
            feature_target_XMD=rows.teacher_XJD,
        )

    return Drafter(
        name="eagle",
        options=options,
        layout=cell.layout,
        needs=FeatureSchema((), size_d, teacher=True),
        topologies=feedback.TOPOLOGIES,
        init=module.init,
        init_state=functools.partial(feedback.init_state, cell),
        prefill=absorb,
        propose=functools.partial(feedback.propose, cell),
        extend=absorb,
        train_outputs=train_outputs,
        terms=(("smooth_l1", 1.0), ("soft_ce", 0.1)),
    )
