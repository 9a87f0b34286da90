"""One drafter, run both ways: its training rows and its proposals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core.batch import Batch
from spec_jax.core.proposal import first_request
from spec_jax.core.quick import quick_jit
from spec_jax.core.topology import CHAIN_TOPOLOGY
from spec_jax.decode import propose
from spec_jax.decode.state import empty_slots
from spec_jax.drafters.base import Drafter, Frozen, Rows
from spec_jax.drafters.frozen import in_columns
from spec_jax.evals.why.text import Text
from spec_jax.objectives.vocabulary import output_logits

# Blocks of one training sequence in the visibility probe, one position apart.
NUM_ANCHORS = 8
# Rows of the text that shares each training batch: few, but two may be anchors.
SHORT = 4
# Logits, relative to the largest; the second where the head is rounded too.
LOGIT_TOLERANCE, LOOSE_TOLERANCE = 2e-4, 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class TrainRows:
    """What a drafter trains on, at each anchor that it sampled.

    Attributes:
      logits_XMU: draft logits (of a selector, with every token's score).
      labels_XM: what the rows are taught.
      valid_XM: where they are.
      anchors_X: positions; 0 where none was sampled.
      confidence_XM: log-odds, or None.
      teacher_XM: first entry of the target's row that each learns from, or None.
    """

    logits_XMU: np.ndarray
    labels_XM: np.ndarray
    valid_XM: np.ndarray
    anchors_X: np.ndarray
    confidence_XM: np.ndarray | None
    teacher_XM: np.ndarray | None

    def at(self, anchor: int) -> int | None:
        """Index of the block at this anchor (from 1: a missing one says 0)."""
        found = np.nonzero(self.anchors_X == anchor)[0]
        return int(found[0]) if found.size else None


@dataclasses.dataclass(frozen=True, eq=False)
class Drafts:
    """One proposal: logits `[M, U]`, -inf where no candidate is; ids; confidence."""

    logits_MU: np.ndarray
    tokens_M: np.ndarray
    usable: int
    confidence_M: np.ndarray | None


class Runner:
    """One drafter's training rows and proposals; each program compiles once.

    Attributes:
      drafter: without noise on its features, with `NUM_ANCHORS` anchors.
      params: its parameters.
      frozen: what it borrows.
      allocated: A of its states, and S of its texts.
      trains: it has parameters.
      reads: planes it conditions on (-1: the last hidden rows).
    """

    def __init__(
        self,
        drafter: Drafter,
        params: Any,
        frozen: Frozen,
        allocated: int,
        jit: Callable = quick_jit,
    ):
        self.drafter, self.params, self.frozen = drafter, params, frozen
        self.allocated, self.jit = allocated, jit
        self.trains = bool(jax.tree.leaves(params))
        planes = tuple(range(drafter.needs.num_layers))
        self.reads = planes or ((-1,) if drafter.needs.teacher else ())
        self._train = jit(functools.partial(train_rows, drafter))
        self._prefill = jit(drafter.prefill)
        self._extend = jit(drafter.extend)
        self._propose = jit(functools.partial(proposal, drafter))

    def train(self, text: Text, first: int, last: int) -> TrainRows:
        """Training rows where tokens `first` to `last` are supervised."""
        return self.train_beside(text, first, last)[0]

    def train_beside(
        self, text: Text, first: int, last: int
    ) -> tuple[TrainRows, TrainRows]:
        """Training rows of the text, and of the short one that shares its batch."""
        short = text.cut(SHORT)
        at_S = np.arange(len(text.tokens_S))
        inside_S = (at_S >= first) & (at_S <= last)
        junk_S = at_S >= short.length  # padding may hold anything
        features = np.where(junk_S[:, None, None], np.nan, short.features_SLD)
        hidden = np.where(junk_S[:, None], np.nan, short.hidden_SD)
        teacher_BSD = None
        if self.drafter.needs.teacher:
            both = np.stack([text.hidden_SD, hidden.astype(np.float32)])
            teacher_BSD = jnp.asarray(both)
        batch = Batch(
            tokens_BS=jnp.asarray(np.stack([text.tokens_S, short.tokens_S])),
            supervised_BS=jnp.asarray(np.stack([inside_S, at_S > 0])),
            length_B=jnp.asarray([text.length, short.length], jnp.int32),
            features_BSLD=jnp.asarray(
                np.stack([text.features_SLD, features.astype(np.float32)])
            ),
            teacher_BSD=jnp.asarray(teacher_BSD)
            if self.drafter.needs.teacher
            else None,
        )
        made = jax.device_get(self._train(self.params, self.frozen, batch))
        size_x = len(made[0]) // 2

        def rows(part: slice) -> TrainRows:
            return TrainRows(*(None if a is None else a[part] for a in made))

        return rows(slice(size_x)), rows(slice(size_x, None))

    def empty(self):
        """No rows absorbed."""
        return self.drafter.init_state(1, self.allocated)

    def absorb(self, state, text: Text, start: int, count: int, width: int, *, extend):
        """Absorbs rows `start ..+ count` in arrays of `width`; the rest is junk."""
        size = len(text.tokens_S)
        at_T = np.minimum(start + np.arange(width), size - 1)
        real_T = np.arange(width) < count
        junk = np.float32(np.nan)
        following = text.tokens_S[np.minimum(at_T + 1, size - 1)]
        rows = Rows(
            tokens_BT=jnp.asarray(np.where(real_T, text.tokens_S[at_T], 0))[None],
            next_tokens_BT=jnp.asarray(np.where(real_T, following, 0))[None],
            features_BTLD=jnp.asarray(
                np.where(real_T[:, None, None], text.features_SLD[at_T], junk)
            )[None],
            hidden_BTD=jnp.asarray(
                np.where(real_T[:, None], text.hidden_SD[at_T], junk)
            )[None],
            start_B=jnp.full((1,), start, jnp.int32),
            length_B=jnp.full((1,), count, jnp.int32),
        )
        step = self._extend if extend else self._prefill
        return step(self.params, self.frozen, state, rows)

    def propose(self, state, anchor: int, length: int) -> Drafts:
        """Greedy drafts after `length` rows, through the one transform."""
        logits, ids, tokens, usable, confidence = jax.device_get(
            self._propose(
                self.params,
                self.frozen,
                state,
                jnp.full((1,), anchor, jnp.int32),
                jnp.full((1,), length, jnp.int32),
            )
        )
        if ids is not None:
            logits = in_columns(logits, ids, self.frozen)
        return Drafts(logits, tokens, int(usable), confidence)

    def serve(self, text: Text, anchor: int) -> Drafts:
        """Drafts at an anchor; the rows before it came in one piece."""
        rows = Rows(  # those from the anchor on are there and do not count
            tokens_BT=jnp.asarray(text.tokens_S)[None],
            next_tokens_BT=jnp.asarray(np.roll(text.tokens_S, -1))[None],
            features_BTLD=jnp.asarray(text.features_SLD)[None],
            hidden_BTD=jnp.asarray(text.hidden_SD)[None],
            start_B=jnp.zeros((1,), jnp.int32),
            length_B=jnp.full((1,), anchor, jnp.int32),
        )
        state = self._prefill(self.params, self.frozen, self.empty(), rows)
        return self.propose(state, int(text.tokens_S[anchor]), anchor)

    @property
    def tolerance(self) -> float:
        """Of logits, relative to the largest."""
        wide = jnp.finfo(self.frozen.head_DU.dtype).bits >= 32
        return LOGIT_TOLERANCE if wide else LOOSE_TOLERANCE


def train_rows(drafter: Drafter, params, frozen: Frozen, batch: Batch):
    """The fields of `TrainRows`, on the device."""
    with jax.default_matmul_precision("highest"):
        out = drafter.train_outputs(params, frozen, batch, jax.random.key(0))
        logits_XMU = output_logits(out, frozen)
    teacher_XM = None if out.teacher_XMD is None else out.teacher_XMD[..., 0]
    return (
        logits_XMU,
        out.labels_XM,
        out.valid_XM,
        out.anchors_BN.reshape(-1),
        out.confidence_XM,
        teacher_XM,
    )


def proposal(drafter: Drafter, params, frozen: Frozen, state, anchor_B, length_B):
    """Logits, their target ids (None: all), drafts, usable, confidence; B = 1."""
    draw = propose.make_draw(empty_slots(1, 1), one_hot=False)
    with jax.default_matmul_precision("highest"):
        made, _ = drafter.propose(
            params, frozen, state, anchor_B, length_B, draw, CHAIN_TOPOLOGY
        )
    return first_request(made)
