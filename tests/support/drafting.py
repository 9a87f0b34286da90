"""A tiny target's sizes, random features and a greedy draw, for drafter tests."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core.batch import Batch
from spec_jax.core.proposal import TokenLaw
from spec_jax.core.topology import CHAIN_TOPOLOGY
from spec_jax.drafters.base import Frozen, Rows
from spec_jax.target.spec import TargetSpec

TINY = TargetSpec(
    name="tiny",
    family="llama",
    num_layers=6,
    hidden_size=32,
    mlp_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=67,
    rope_theta=10000.0,
)
MASK_ID = 3


def draw_greedy(logits_BTU, first_row, target_ids=None):
    """The argmax of each row, and the law that says so."""
    del first_row
    ids_BT = jnp.argmax(logits_BTU, -1).astype(jnp.int32)
    size_b, size_t, _ = logits_BTU.shape
    law = TokenLaw(
        logits_BTV=logits_BTU,
        inv_temperature_B=jnp.ones(size_b),
        floor_BT=jnp.full((size_b, size_t), -jnp.inf),
        log_norm_BT=jnp.zeros((size_b, size_t)),
        one_hot_BT=ids_BT,
        target_ids=target_ids,
    )
    return ids_BT, law


def draw_softmax(key):
    """A draw at temperature 1 and the softmax it came from."""

    def draw(logits_BTU, first_row, target_ids=None):
        row_key = jax.random.fold_in(key, first_row)
        ids_BT = jax.random.categorical(row_key, logits_BTU).astype(jnp.int32)
        size_b, size_t, _ = logits_BTU.shape
        law = TokenLaw(
            logits_BTV=logits_BTU,
            inv_temperature_B=jnp.ones(size_b),
            floor_BT=jnp.full((size_b, size_t), -jnp.inf),
            log_norm_BT=jax.nn.logsumexp(logits_BTU, -1),
            one_hot_BT=jnp.full((size_b, size_t), -1),
            target_ids=target_ids,
        )
        return ids_BT, law

    return draw


def make_frozen(seed=0, spec=TINY, target_ids=None):
    """A random embedding and head; `target_ids` keeps some head columns."""
    rng = np.random.default_rng(seed)
    embed = rng.normal(size=(spec.vocab_size, spec.hidden_size))
    head = rng.normal(size=(spec.hidden_size, spec.vocab_size))
    if target_ids is not None:
        head = head[:, target_ids]
        target_ids = np.asarray(target_ids, np.int32)
    return Frozen(embed.astype(np.float32), head.astype(np.float32), target_ids)


def make_batch(drafter, lengths, size_s, seed=1, spec=TINY, prompt=2):
    """Random tokens and features; all after `prompt` tokens is supervised.

    Arrays are numpy's: slicing them in a test compiles nothing.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    size_b = len(lengths)
    shape = (size_b, size_s, drafter.needs.num_layers, spec.hidden_size)
    at = np.arange(size_s)[None]
    teacher = (size_b, size_s, spec.hidden_size)
    return Batch(
        tokens_BS=rng.integers(0, spec.vocab_size, (size_b, size_s)).astype(np.int32),
        supervised_BS=(at >= prompt) & (at < lengths[:, None]),
        length_B=lengths,
        features_BSLD=rng.normal(size=shape).astype(np.float32),
        teacher_BSD=rng.normal(size=teacher).astype(np.float32),
    )


def rows_of(batch, start_B, length_B, width):
    """Each request's own `length` rows from its own `start`, in `width` rows.

    What does not count is junk: NaN features, token 0.
    """
    size_b = len(start_B)
    tokens = np.zeros((size_b, width), np.int32)
    following = np.zeros((size_b, width), np.int32)
    features = np.full(
        (size_b, width, *batch.features_BSLD.shape[2:]), np.nan, np.float32
    )
    hidden = np.full((size_b, width, batch.features_BSLD.shape[-1]), np.nan, np.float32)
    after = np.roll(batch.tokens_BS, -1, 1)
    for b, (start, length) in enumerate(zip(start_B, length_B, strict=True)):
        tokens[b, :length] = batch.tokens_BS[b, start : start + length]
        following[b, :length] = after[b, start : start + length]
        features[b, :length] = batch.features_BSLD[b, start : start + length]
        hidden[b, :length] = batch.teacher_BSD[b, start : start + length]
    return Rows(
        tokens_BT=tokens,
        next_tokens_BT=following,
        features_BTLD=features,
        hidden_BTD=hidden,
        start_B=np.asarray(start_B, np.int32),
        length_B=np.asarray(length_B, np.int32),
    )


def stir(params, seed=7, scale=0.2):
    """The same tree moved off its initial values (norms included)."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    moved = [
        np.asarray(leaf) + (rng.normal(size=leaf.shape) * scale).astype(leaf.dtype)
        for leaf in leaves
    ]
    return jax.tree.unflatten(tree, moved)


def quick_jit(fn):
    """`jax.jit` that spends little on optimising: tests compile more than they run."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


class Programs:
    """A drafter's functions, each compiled once.

    `traces` counts compilations by name.
    """

    def __init__(self, drafter, draw=draw_greedy, topology=CHAIN_TOPOLOGY):
        self.drafter = drafter
        self.traces = collections.Counter()
        self.init = quick_jit(self._counted("init", drafter.init))
        self.train = quick_jit(self._counted("train", drafter.train_outputs))
        self.prefill = quick_jit(self._counted("prefill", drafter.prefill))
        self.extend = quick_jit(self._counted("extend", drafter.extend))
        self.propose = quick_jit(
            self._counted(
                "propose",
                lambda params, frozen, state, anchor_B, length_B: drafter.propose(
                    params, frozen, state, anchor_B, length_B, draw, topology
                ),
            )
        )

    def _counted(self, name, fn):
        def call(*args):
            self.traces[name] += 1
            return fn(*args)

        return call

    def serve(self, params, frozen, batch, anchors_B, widths, bucket, allocated):
        """The proposal at each request's anchor, after its rows came in pieces.

        Args:
          params: the drafter's parameters.
          frozen: what it borrows.
          batch: one row per request.
          anchors_B: where each request's block starts; its rows are those before.
          widths: most rows of the first, second, ... piece; the last repeats.
          bucket: rows of the (padded) arrays the pieces come in.
          allocated: A.

        Returns:
          The proposal and the state it was read from.
        """
        anchors_B = np.asarray(anchors_B, np.int32)
        state = self.drafter.init_state(len(anchors_B), allocated)
        start_B = np.zeros_like(anchors_B)
        pieces = itertools.chain(widths, itertools.repeat(widths[-1]))
        fn = self.prefill
        while (start_B < anchors_B).any():
            length_B = np.minimum(anchors_B - start_B, next(pieces))
            rows = rows_of(batch, start_B, length_B, bucket)
            state = fn(params, frozen, state, rows)
            start_B = start_B + length_B
            fn = self.extend
        anchor_tokens_B = batch.tokens_BS[np.arange(len(anchors_B)), anchors_B]
        return self.propose(params, frozen, state, anchor_tokens_B, anchors_B)
