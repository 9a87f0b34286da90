"""Draft rounds of a probe: what serving proposes and what training computes.

A probe is a short text the target ran, its features, last hidden rows and a few
anchors. `serve` drafts at every anchor through `prefill` and `propose`, greedily;
`train` gives the logits of the same rows through `train_outputs`. Training may be
given the drafts that serving chose, so that rows which depend on earlier drafts
have the same prefix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import block_layout, masks
from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.core.proposal import TokenLaw, first_request
from spec_jax.core.quick import quick_jit
from spec_jax.core.topology import CHAIN_TOPOLOGY
from spec_jax.core.vocab import DraftVocab
from spec_jax.drafters.base import Drafter, Frozen, Rows
from spec_jax.drafters.frozen import frozen_for, in_columns
from spec_jax.objectives.vocabulary import output_logits
from spec_jax.target import model
from spec_jax.target.cache import init_cache
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

_ANCHORS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """A text to draft from.

    Attributes:
      tokens_S: [S] int32 ids the target ran.
      features_SLD: [S, L, D] float32 captured features of every row.
      hidden_SD: [S, D] float32 last hidden state after the target's final norm.
      anchors: positions drafted from; each needs a row before it and M after.
      frozen: the target's embedding and head columns.
    """

    tokens_S: np.ndarray
    features_SLD: np.ndarray
    hidden_SD: np.ndarray
    anchors: tuple[int, ...]
    frozen: Frozen


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """What a drafter proposed at each of K anchors.

    Attributes:
      logits_KMU: logits that were drawn from; -inf where a row had no such
        candidate.
      tokens_KM: target ids of the drafts.
      usable_K: drafts before the first row that is not finite.
      confidence_KM: log-odds, or None.
    """

    logits_KMU: np.ndarray
    tokens_KM: np.ndarray
    usable_K: np.ndarray
    confidence_KM: np.ndarray | None


def probe_from_target(
    target: Target,
    tokens: Sequence[int],
    drafter: Drafter,
    draft_vocab: DraftVocab | None = None,
    anchors: Sequence[int] | None = None,
) -> Probe:
    """Runs the target over a text and keeps what `drafter` conditions on.

    Args:
      target: the target the drafter is for.
      tokens: the text, at least M + 2 ids; two dozen are plenty.
      drafter: says which layers, and M.
      draft_vocab: the drafter's kept ids, or None for the full vocabulary.
      anchors: positions to draft from; default a few, evenly spread.

    Raises:
      UserError: the text is too short, or an anchor lies outside of it.
    """
    tokens_S = np.asarray(tokens, np.int32)
    size = len(tokens_S)
    last = size - 1 - drafter.layout.num_draft
    if last < 1:
        raise UserError(
            f"golden text has {size} tokens; drafting {drafter.layout.num_draft} needs "
            f"at least {drafter.layout.num_draft + 2}"
        )
    if anchors is None:
        spread = np.linspace(max(1, last // _ANCHORS), last, _ANCHORS).astype(int)
        anchors = sorted({int(a) for a in spread})
    anchors = tuple(int(a) for a in anchors)
    _check_anchors(anchors, size, drafter)
    features_SLD, hidden_SD = _capture_program(target.spec, drafter.needs.layer_ids)(
        target.params, jnp.asarray(tokens_S)[None]
    )
    return Probe(
        tokens_S,
        np.asarray(features_SLD, np.float32),
        np.asarray(hidden_SD, np.float32),
        anchors,
        frozen_for(target, draft_vocab),
    )


def serve(drafter: Drafter, params: Any, probe: Probe) -> Round:
    """Drafts greedily at each anchor, through `prefill` and `propose`."""
    probe = _checked(probe, drafter)
    run = _serving_program(drafter)
    tokens_1S = jnp.asarray(probe.tokens_S, jnp.int32)[None]
    features_SLD = jnp.asarray(probe.features_SLD)
    hidden_SD = jnp.asarray(probe.hidden_SD)
    rounds = []
    with jax.default_matmul_precision("highest"):
        for anchor in probe.anchors:
            at = jnp.asarray(anchor, jnp.int32)
            made = jax.device_get(
                run(params, probe.frozen, tokens_1S, features_SLD, hidden_SD, at)
            )
            rounds.append(made)
    logits, ids, tokens, usable, confidence = zip(*rounds, strict=True)
    logits_KMU = np.stack(logits).astype(np.float32)
    if ids[0] is not None:
        logits_KMU = in_columns(logits_KMU, np.stack(ids), probe.frozen)
    return Round(
        logits_KMU,
        np.stack(tokens),
        np.stack(usable),
        None if confidence[0] is None else np.stack(confidence),
    )


def serving_logits(drafter: Drafter, params: Any, probe: Probe) -> np.ndarray:
    """Draft logits `[K, M, U]` at each anchor, through `prefill` and `propose`."""
    return serve(drafter, params, probe).logits_KMU


def train(
    drafter: Drafter, params: Any, probe: Probe, tokens_KM: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Draft logits and confidences at each anchor, through `train_outputs`.

    Only an anchor and its next token are supervised, so it is the one position
    that can be sampled.

    Args:
      drafter: without noise on its features.
      params: its parameters.
      probe: the text.
      tokens_KM: drafts that follow each anchor; None: the text's own tokens.

    Returns:
      Logits `[K, R, U]` of the R rows that training makes, and `[K, R]` log-odds or
      None.
    """
    probe = _checked(probe, drafter)
    run = _training_program(drafter)
    size = len(probe.tokens_S)
    teacher = jnp.asarray(probe.hidden_SD)[None] if drafter.needs.teacher else None
    logits, confidences = [], []
    with jax.default_matmul_precision("highest"):
        for index, anchor in enumerate(probe.anchors):
            tokens_S = np.array(probe.tokens_S, np.int32)
            if tokens_KM is not None:
                at = block_layout.label_positions(drafter.layout, np.asarray(anchor))
                tokens_S[np.asarray(at)] = tokens_KM[index]
            supervised_1S = np.zeros((1, size), bool)
            supervised_1S[0, anchor : anchor + 2] = True
            batch = Batch(
                tokens_BS=jnp.asarray(tokens_S)[None],
                supervised_BS=jnp.asarray(supervised_1S),
                length_B=jnp.full((1,), size, jnp.int32),
                features_BSLD=jnp.asarray(probe.features_SLD)[None],
                teacher_BSD=teacher,
            )
            logits_XMU, confidence_XM, anchors_X, valid_XM = jax.device_get(
                run(params, probe.frozen, batch)
            )
            found = (anchors_X == anchor) & (valid_XM[:, 0] > 0)
            if not found.any():
                raise UserError(
                    f"drafter {drafter.name!r} sampled anchors {anchors_X.tolist()} "
                    f"where only {anchor} has a supervised next token; fix its anchor "
                    "sampling"
                )
            row = int(np.argmax(found))
            logits.append(logits_XMU[row])
            if confidence_XM is not None:
                confidences.append(confidence_XM[row])
    return np.stack(logits), np.stack(confidences) if confidences else None


def training_logits(
    drafter: Drafter, params: Any, probe: Probe, tokens_KM: np.ndarray | None = None
) -> np.ndarray:
    """Draft logits `[K, R, U]` at each anchor, see `train`."""
    return train(drafter, params, probe, tokens_KM)[0]


def _check_anchors(anchors: Sequence[int], size: int, drafter: Drafter) -> None:
    last = size - 1 - drafter.layout.num_draft
    for anchor in anchors:
        if not 1 <= anchor <= last:
            raise UserError(
                f"golden anchor {anchor} must lie between 1 and {last} in a text of "
                f"{size} tokens, so that a row precedes it and "
                f"{drafter.layout.num_draft} follow"
            )


def _checked(probe: Probe, drafter: Drafter) -> Probe:
    size = len(probe.tokens_S)
    _check_anchors(probe.anchors, size, drafter)
    needs = drafter.needs
    for name, found, expected in (
        ("features", probe.features_SLD.shape, (size, needs.num_layers, needs.width)),
        ("hidden rows", probe.hidden_SD.shape, (size, needs.width)),
    ):
        if found != expected:
            raise UserError(
                f"golden {name} have shape {found}, expected {expected}; capture the "
                "drafter's own layers"
            )
    return probe


# Programs are kept: exports of a run, and a folder read twice, compile once.
@functools.lru_cache(maxsize=32)
def _capture_program(spec: TargetSpec, layer_ids: tuple[int, ...]) -> Callable:
    """(target params, tokens) -> `[S, L, D]` features and `[S, D]` last rows."""

    @quick_jit
    def run(params, tokens_1S):
        size = tokens_1S.shape[1]
        row_S = jnp.arange(size)
        out = model.forward(
            spec,
            params,
            init_cache(spec, 1, size, params["params"]["embed"].dtype),
            tokens_1S,
            row_S[None],
            masks.causal(row_S[:, None], row_S[None, :])[None],
            jnp.zeros((1,), jnp.int32),
            layer_ids,
        )
        return out.features_BTLD[0], out.hidden_BTD[0]

    return run


@functools.lru_cache(maxsize=32)
def _training_program(drafter: Drafter) -> Callable:
    """(params, frozen, batch) -> logits and confidence of every row, anchor, validity.

    Of a selector that drafts, the scores of all tokens: the candidates' are among
    them.
    """

    @quick_jit
    def run(params, frozen, batch):
        out = drafter.train_outputs(params, frozen, batch, jax.random.key(0))
        logits_XMU = output_logits(out, frozen)
        return logits_XMU, out.confidence_XM, out.anchors_BN.reshape(-1), out.valid_XM

    return run


@functools.lru_cache(maxsize=32)
def _serving_program(drafter: Drafter) -> Callable:
    """(params, frozen, tokens, features, hidden, anchor) -> one request's round.

    Logits, target ids of a sparse row's candidates or None, drafts, usable drafts,
    confidence or None.
    """

    @quick_jit
    def run(params, frozen, tokens_1S, features_SLD, hidden_SD, anchor):
        size = tokens_1S.shape[1]
        before_S = jnp.arange(size) < anchor
        length_B = anchor[None].astype(jnp.int32)
        # Rows from the anchor on are padding here: the target has not run them.
        rows = Rows(
            tokens_BT=jnp.where(before_S[None], tokens_1S, 0),
            next_tokens_BT=jnp.where(before_S[None], jnp.roll(tokens_1S, -1, 1), 0),
            features_BTLD=jnp.where(before_S[:, None, None], features_SLD, 0.0)[None],
            hidden_BTD=jnp.where(before_S[:, None], hidden_SD, 0.0)[None],
            start_B=jnp.zeros((1,), jnp.int32),
            length_B=length_B,
        )
        state = drafter.init_state(1, size + drafter.layout.window)
        state = drafter.prefill(params, frozen, state, rows)
        anchor_B = jnp.take(tokens_1S[0], anchor)[None]
        made, _ = drafter.propose(
            params, frozen, state, anchor_B, length_B, _greedy, CHAIN_TOPOLOGY
        )
        return first_request(made)

    return run


def _greedy(logits_BTU, first_row: int, target_ids=None):
    """A draw that takes the best id of each row; its law is one-hot there."""
    del first_row
    best_BT = jnp.argmax(logits_BTU, -1).astype(jnp.int32)
    law = TokenLaw(
        logits_BTV=logits_BTU,
        inv_temperature_B=jnp.ones(logits_BTU.shape[:1], jnp.float32),
        floor_BT=jnp.full(best_BT.shape, -jnp.inf, jnp.float32),
        log_norm_BT=jnp.zeros(best_BT.shape, jnp.float32),
        one_hot_BT=best_BT,
        target_ids=target_ids,
    )
    return best_BT, law
