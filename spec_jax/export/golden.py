"""The golden round: draft logits that travel with the weights.

A probe is a short text the target ran, its features and a few anchors. At
export the drafter, read back from the files just written, drafts once at every
anchor; top logits, random projections of whole rows and tokens are stored. A
reader drafts again and compares, so that a wrong transpose, rotary base, mask
or precision is found at load time and not as a poor accept length.

The same probe answers whether training and serving see the same drafter:
`train_outputs` and `prefill` + `propose` must give equal logits for the same
prefix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import masks
from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.core.proposal import TokenLaw
from spec_jax.core.topology import CHAIN_TOPOLOGY
from spec_jax.core.vocab import DraftVocab
from spec_jax.drafters.base import Drafter, Frozen, Rows
from spec_jax.drafters.frozen import frozen_for
from spec_jax.target import model
from spec_jax.target.cache import init_cache
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

# Largest difference of a float32 logit that reordered sums explain.
TOLERANCE = 1e-3
# Embedding and head in another float type than at export: relative to the
# largest logit, about eight bits of mantissa through the whole drafter.
LOOSE_TOLERANCE = 0.05

_TOP = 32
_PROJECTIONS = 8
_ANCHORS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """A text to draft from.

    Attributes:
      tokens_S: [S] int32 ids the target ran.
      features_SLD: [S, L, D] float32 captured features of every row.
      anchors: positions drafted from; each needs a row before it and M after.
      frozen: the target's embedding and head columns.
    """

    tokens_S: np.ndarray
    features_SLD: np.ndarray
    anchors: tuple[int, ...]
    frozen: Frozen


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
    features_SLD = _capture_program(target.spec, drafter.needs.layer_ids)(
        target.params, jnp.asarray(tokens_S)[None]
    )
    return Probe(
        tokens_S,
        np.asarray(features_SLD, np.float32),
        anchors,
        frozen_for(target, draft_vocab),
    )


def serving_logits(drafter: Drafter, params: Any, probe: Probe) -> np.ndarray:
    """Draft logits `[K, M, U]` at each anchor, through `prefill` and `propose`."""
    return _serve(drafter, params, probe)[0]


def training_logits(drafter: Drafter, params: Any, probe: Probe) -> np.ndarray:
    """Draft logits `[K, M, U]` at each anchor, through `train_outputs`.

    Only an anchor and its next token are supervised, so it is the one position
    that can be sampled.
    """
    probe = _checked(probe, drafter)
    run = _training_program(drafter)
    tokens_1S = jnp.asarray(probe.tokens_S, jnp.int32)[None]
    features_1SLD = jnp.asarray(probe.features_SLD)[None]
    rows = []
    with jax.default_matmul_precision("highest"):
        for anchor in probe.anchors:
            supervised_1S = np.zeros(tokens_1S.shape, bool)
            supervised_1S[0, anchor : anchor + 2] = True
            batch = Batch(
                tokens_BS=tokens_1S,
                supervised_BS=jnp.asarray(supervised_1S),
                length_B=jnp.full((1,), tokens_1S.shape[1], jnp.int32),
                features_BSLD=features_1SLD,
            )
            logits_XMU, anchors_X, valid_XM = run(params, probe.frozen, batch)
            found = (np.asarray(anchors_X) == anchor) & (np.asarray(valid_XM)[:, 0] > 0)
            if not found.any():
                raise ValueError(
                    f"drafter {drafter.name!r} sampled anchors "
                    f"{np.asarray(anchors_X).tolist()} where only {anchor} has a "
                    "supervised next token; fix its anchor sampling"
                )
            rows.append(np.asarray(logits_XMU)[int(np.argmax(found))])
    return np.stack(rows)


def parity_max_abs(drafter: Drafter, params: Any, probe: Probe) -> float:
    """Largest difference of training-time and serving-time draft logits."""
    served_KMU = serving_logits(drafter, params, probe)
    trained_KMU = training_logits(drafter, params, probe)
    return _max_abs(served_KMU - trained_KMU)


def record(drafter: Drafter, params: Any, probe: Probe) -> dict[str, np.ndarray]:
    """Arrays to store beside the weights.

    Raises:
      ValueError: the drafter offers no usable draft, or logits are not finite:
        such weights must not be exported.
    """
    logits_KMU, tokens_KM, usable_K = _serve(drafter, params, probe)
    num_draft = drafter.layout.num_draft
    if not np.isfinite(logits_KMU).all() or (usable_K < num_draft).any():
        raise ValueError(
            f"drafter {drafter.name!r} gives {usable_K.tolist()} usable drafts of "
            f"{num_draft} at golden positions {list(probe.anchors)}; its weights are "
            "not finite, so keep an earlier checkpoint"
        )
    top_ids_KMT = np.argsort(-logits_KMU, -1, kind="stable")[..., :_TOP]
    head = probe.frozen.head_DU
    return {
        "tokens": probe.tokens_S.astype(np.int32),
        "features": probe.features_SLD.astype(np.float32),
        "anchors": np.asarray(probe.anchors, np.int32),
        "top_ids": top_ids_KMT.astype(np.int32),
        "top_logits": np.take_along_axis(logits_KMU, top_ids_KMT, -1),
        "projections": _project(logits_KMU),
        "draft_tokens": tokens_KM.astype(np.int32),
        # Not a string: safetensors stores numbers only.
        "head_bits": np.asarray([jnp.finfo(head.dtype).bits], np.int32),
    }


def check(
    stored: dict[str, np.ndarray],
    drafter: Drafter,
    params: Any,
    frozen: Frozen,
    where: str,
) -> float:
    """Drafts the stored round again and compares.

    Args:
      stored: arrays that `record` made.
      drafter: rebuilt from the folder, at its trained block size.
      params: read from the folder.
      frozen: the target's embedding and head columns.
      where: names the folder in errors.

    Returns:
      The largest absolute difference of a logit.

    Raises:
      UserError: the round is damaged, or the logits differ by more than
        `TOLERANCE` (`LOOSE_TOLERANCE` with a head of another float type).
    """
    try:
        probe = Probe(
            stored["tokens"],
            stored["features"],
            tuple(int(a) for a in stored["anchors"]),
            frozen,
        )
        top_logits, tokens_KM = stored["top_logits"], stored["draft_tokens"]
        top_ids, projections = stored["top_ids"], stored["projections"]
        bits = int(stored["head_bits"][0])
    except (KeyError, IndexError) as error:
        raise UserError(
            f"{where}: the golden round lacks {error}; export the drafter again"
        ) from error
    logits_KMU, drafted_KM, usable_K = _serve(drafter, params, probe)
    if top_ids.max() >= logits_KMU.shape[-1] or top_ids.shape[:2] != drafted_KM.shape:
        raise UserError(
            f"{where}: the golden round was made for another block size or vocabulary; "
            "export the drafter again"
        )
    found = np.take_along_axis(logits_KMU, top_ids, -1)
    worst = max(
        _max_abs(found - top_logits), _max_abs(_project(logits_KMU) - projections)
    )
    allowed = TOLERANCE
    if bits != jnp.finfo(frozen.head_DU.dtype).bits:
        allowed = LOOSE_TOLERANCE * float(np.abs(top_logits).max())
    # A token may differ only where two logits are nearly equal.
    gap = top_logits[..., 0] - top_logits[..., 1] if top_logits.shape[-1] > 1 else 1.0
    moved = (drafted_KM != tokens_KM) & (gap > 2 * allowed)
    if worst > allowed or moved.any() or (usable_K < drafter.layout.num_draft).any():
        raise UserError(
            f"{where}: its golden round differs by {worst:.3g} in the draft logits "
            f"(allowed {allowed:.3g}), so these weights do not compute here what they "
            "did when exported; export the drafter again, or use the target and "
            "version it was made with"
        )
    return worst


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
    expected = (size, drafter.needs.num_layers, drafter.needs.width)
    if probe.features_SLD.shape != expected:
        raise UserError(
            f"golden features have shape {probe.features_SLD.shape}, expected "
            f"{expected}; capture the drafter's own layers"
        )
    return probe


# Programs are kept: exports of a run, and a folder read twice, compile once.
@functools.lru_cache(maxsize=8)
def _capture_program(spec: TargetSpec, layer_ids: tuple[int, ...]) -> Callable:
    """(target params, tokens) -> features `[S, L, D]` of one text."""

    @jax.jit
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
        return out.features_BTLD[0]

    return run


@functools.lru_cache(maxsize=8)
def _training_program(drafter: Drafter) -> Callable:
    """(params, frozen, batch) -> logits of every block, its anchor, validity."""

    @jax.jit
    def run(params, frozen, batch):
        out = drafter.train_outputs(params, frozen, batch, jax.random.key(0))
        logits_XMU = jnp.matmul(
            out.hidden_XMD, frozen.head_DU, preferred_element_type=jnp.float32
        )
        return logits_XMU, out.anchors_BN.reshape(-1), out.valid_XM

    return run


@functools.lru_cache(maxsize=8)
def _serving_program(drafter: Drafter) -> Callable:
    """(params, frozen, tokens, features, anchor) -> logits, ids, usable drafts."""

    @jax.jit
    def run(params, frozen, tokens_1S, features_SLD, anchor):
        size = tokens_1S.shape[1]
        before_S = jnp.arange(size) < anchor
        length_B = anchor[None].astype(jnp.int32)
        # Rows from the anchor on are padding here: the target has not run them.
        rows = Rows(
            tokens_BT=jnp.where(before_S[None], tokens_1S, 0),
            next_tokens_BT=jnp.where(before_S[None], jnp.roll(tokens_1S, -1, 1), 0),
            features_BTLD=jnp.where(before_S[:, None, None], features_SLD, 0.0)[None],
            hidden_BTD=jnp.zeros((1, size, features_SLD.shape[-1])),
            start_B=jnp.zeros((1,), jnp.int32),
            length_B=length_B,
        )
        state = drafter.init_state(1, size + drafter.layout.window)
        state = drafter.prefill(params, frozen, state, rows)
        anchor_B = jnp.take(tokens_1S[0], anchor)[None]
        proposal, _ = drafter.propose(
            params, frozen, state, anchor_B, length_B, _greedy(frozen), CHAIN_TOPOLOGY
        )
        return proposal.law.logits_BTV[0], proposal.tokens_BM[0], proposal.usable_B[0]

    return run


def _serve(drafter: Drafter, params: Any, probe: Probe):
    """Logits [K, M, U], target ids [K, M] and usable drafts [K]."""
    probe = _checked(probe, drafter)
    run = _serving_program(drafter)
    tokens_1S = jnp.asarray(probe.tokens_S, jnp.int32)[None]
    features_SLD = jnp.asarray(probe.features_SLD)
    with jax.default_matmul_precision("highest"):
        rounds = [
            jax.device_get(
                run(
                    params,
                    probe.frozen,
                    tokens_1S,
                    features_SLD,
                    jnp.asarray(anchor, jnp.int32),
                )
            )
            for anchor in probe.anchors
        ]
    logits, tokens, usable = (np.stack(each) for each in zip(*rounds, strict=True))
    return logits.astype(np.float32), tokens, usable


def _greedy(frozen: Frozen) -> Callable:
    """A draw that takes the best id of each row; its law is one-hot there."""

    def draw(logits_BTU, first_row):
        del first_row
        best_BT = jnp.argmax(logits_BTU, -1).astype(jnp.int32)
        law = TokenLaw(
            logits_BTV=logits_BTU,
            inv_temperature_B=jnp.ones(logits_BTU.shape[:1], jnp.float32),
            floor_BT=jnp.full(best_BT.shape, -jnp.inf, jnp.float32),
            log_norm_BT=jnp.zeros(best_BT.shape, jnp.float32),
            one_hot_BT=best_BT,
            target_ids_U=frozen.target_ids_U,
        )
        return best_BT, law

    return draw


def _project(logits_KMU: np.ndarray) -> np.ndarray:
    """Random projections `[K, M, R]` of whole rows: any entry moves them."""
    size = logits_KMU.shape[-1]
    noise_UR = np.random.default_rng(0).standard_normal((size, _PROJECTIONS))
    return (logits_KMU.astype(np.float64) @ (noise_UR / size**0.5)).astype(np.float32)


def _max_abs(difference: np.ndarray) -> float:
    """NaN counts as infinite."""
    return float(np.nan_to_num(np.abs(difference), nan=np.inf).max())
