"""A drafter small enough to compile at once, and data for it.

It keeps what a trainer must get right: a matrix, a norm weight at 1.0, anchors
drawn from keys, and logits through the borrowed head.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import objectives
from spec_jax.core import block_layout
from spec_jax.core.batch import Batch
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.features import FeatureSchema
from spec_jax.drafters.base import Drafter, Frozen, TrainOutputs
from spec_jax.nn import anchors, layers

VOCAB, WIDTH, TAPS, DRAFTS, ANCHORS = 17, 8, 2, 3, 4
LAYOUT = BlockLayout(DRAFTS)


def make_drafter(dtype=jnp.float32) -> Drafter:
    def init(key):
        fc_key, slot_key = jax.random.split(key)
        return {
            "fc": jax.random.normal(fc_key, (TAPS * WIDTH, WIDTH), dtype) * 0.3,
            "slot": jax.random.normal(slot_key, (DRAFTS, WIDTH), dtype),
            "norm": jnp.ones(WIDTH, dtype),
        }

    def train_outputs(params, frozen, batch, key):
        size_s = batch.tokens_BS.shape[1]
        supervised_BS = batch.supervised_BS
        anchors_BN, real_BN = anchors.sample_anchors(
            key, supervised_BS, batch.length_B, ANCHORS
        )
        features_BSX = batch.features_BSLD.reshape(*batch.tokens_BS.shape, -1)
        before_BN = jnp.maximum(anchors_BN - 1, 0)
        at_BNX = jnp.take_along_axis(features_BSX, before_BN[..., None], 1)
        token_BN = jnp.take_along_axis(batch.tokens_BS, anchors_BN, 1)
        base_BND = at_BNX @ params["fc"] + frozen.embed_VD[token_BN]
        rows_BNMD = base_BND[:, :, None] + params["slot"]
        hidden_BNMD = layers.rms_norm(rows_BNMD, params["norm"], 1e-5)
        at_BNM = block_layout.label_positions(LAYOUT, anchors_BN)
        flat_BX = jnp.minimum(at_BNM, size_s - 1).reshape(anchors_BN.shape[0], -1)
        labels_BX = jnp.take_along_axis(batch.tokens_BS, flat_BX, 1)
        marked_BX = jnp.take_along_axis(supervised_BS, flat_BX, 1)
        valid_BNM = marked_BX.reshape(at_BNM.shape) & real_BN[..., None]
        valid_BNM &= at_BNM < batch.length_B[:, None, None]
        return TrainOutputs(
            hidden_XMD=hidden_BNMD.reshape(-1, DRAFTS, WIDTH),
            labels_XM=labels_BX.reshape(-1, DRAFTS),
            valid_XM=valid_BNM.reshape(-1, DRAFTS).astype(jnp.float32),
            anchors_BN=anchors_BN,
        )

    def unused(*_):
        raise AssertionError("training must not serve")

    return Drafter(
        name="toy",
        options=None,
        layout=LAYOUT,
        needs=FeatureSchema((0, 1), WIDTH),
        topologies=("chain",),
        init=init,
        init_state=unused,
        prefill=unused,
        propose=unused,
        extend=unused,
        train_outputs=train_outputs,
    )


def make_frozen() -> Frozen:
    rng = np.random.default_rng(7)
    return Frozen(
        jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32),
        jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), jnp.float32),
    )


_ce = functools.partial(objectives.loss, options=objectives.ObjectiveOptions())


def loss(outputs, frozen, progress=None):
    """The real objective, and the anchors as exactly summable metrics."""
    sums, metrics = _ce(outputs, frozen, progress=progress)
    at_BN = outputs.anchors_BN.astype(jnp.float32)
    one = jnp.ones(())
    metrics["anchor_sum"] = (at_BN.sum(), one)
    metrics["anchor_squares"] = ((at_BN**2).sum(), one)
    hit_M = (outputs.valid_XM).sum(0)
    metrics["by_slot"] = (hit_M, jnp.full(DRAFTS, outputs.valid_XM.shape[0], float))
    return sums, metrics


def make_batch(index: int, rows: int = 8, length: int = 12) -> Batch:
    """Batch `index`: learnable (tokens follow features), rows of unequal length."""
    rng = np.random.default_rng(1000 + index)
    tokens_BS = rng.integers(0, VOCAB, (rows, length)).astype(np.int32)
    length_B = rng.integers(5, length + 1, rows).astype(np.int32)
    position_S = np.arange(length)
    supervised_BS = (position_S >= 2) & (position_S < length_B[:, None])
    embed_VD = np.random.default_rng(3).normal(size=(VOCAB, TAPS, WIDTH))
    features_BSLD = embed_VD[np.roll(tokens_BS, -1, 1)].astype(np.float32)
    return Batch(tokens_BS, supervised_BS, length_B, features_BSLD)


class Data:
    """An endless iterator with a state; may fill the same buffers again."""

    def __init__(self, reuse_buffers: bool = False, on_next=lambda index: None):
        self.index = 0
        self.buffers = make_batch(0) if reuse_buffers else None
        self.on_next = on_next

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        batch = make_batch(self.index)
        self.on_next(self.index)
        self.index += 1
        if self.buffers is None:
            return batch
        for old, new in zip(
            jax.tree.leaves(self.buffers), jax.tree.leaves(batch), strict=True
        ):
            old[...] = new
        return self.buffers

    def get_state(self):
        return {"index": self.index}

    def set_state(self, state):
        self.index = state["index"]


def leaves(tree) -> dict[str, np.ndarray]:
    """Every leaf's bits by path; typed keys as words."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        # A copy: a view of a live array would block its donation.
        found[jax.tree_util.keystr(path)] = np.array(leaf)
    return found


def require_equal(ours: dict, theirs: dict) -> None:
    """Fails on the first leaf whose bits, shape or dtype differ."""
    assert list(ours) == list(theirs)
    for name, leaf in ours.items():
        assert leaf.dtype == theirs[name].dtype, name
        assert leaf.shape == theirs[name].shape, name
        assert leaf.tobytes() == theirs[name].tobytes(), name
