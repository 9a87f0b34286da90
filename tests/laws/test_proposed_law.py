"""The accept law under drafters' own proposals, by exact enumeration: V = 3, M = 3.

Each drafter proposes on a random target of three tokens. A draw that is told what
to draw walks all of its draft sequences and records what every row was drawn from.
From those laws come the middles of all the uniforms' intervals, and the production
`propose`, `accept` and `settle` run on each (`tests.support.enumeration`): weighed
by q of the drafts and by the accept law, what they emit must have the target's
exact joint law. Two classic mistakes are planted: drafts are corrected, and q is
the softmax of the rows before the correction.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.topology import CHAIN_TOPOLOGY
from spec_jax.core.vocab import DraftVocab
from spec_jax.decode import propose
from spec_jax.decode.state import DecodeState
from spec_jax.drafters import base
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.sampling import transform
from tests.support import drafting, tiny
from tests.support.enumeration import (
    DEPTH,
    GREEDY,
    MIN_P,
    PLAIN,
    PREFIXES,
    TOP_K,
    TOP_P,
    WARM,
    V,
    as_sampling,
    joint_of,
    laws_of,
    live_slots,
    mass_of,
    padded,
    partition,
    planted,
    row_of,
    settled,
    worst_bias,
)

M = DEPTH
PROMPT, ANCHOR = (1, 0, 2, 0, 1), 0  # "1 0" was there before: lookup drafts 2 0 1
ALLOCATED = 16
WAYS = np.asarray(list(itertools.product(range(V), repeat=M)))
BLOCK = {"num_layers": 1, "num_draft": M, "mask_id": V - 1, "layer_ids": (0,)}
# Drafter, its options, and the target ids it may propose.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...] | None]] = {
    "dflash": ("dflash", BLOCK, None),
    "dspark": ("dspark", {**BLOCK, "markov_rank": 4}, None),
    "dspark, rnn, reduced": (
        "dspark",
        {
            **BLOCK,
            "markov_rank": 4,
            "markov_head_type": "rnn",
            "draft_vocab_size": 2,
        },
        (0, 2),
    ),
    "dflash2": (
        "dflash2",
        {**BLOCK, "selector_rank": 4, "selector_top_k": 2},
        None,
    ),
    "eagle": ("eagle", {"num_draft": M}, None),
    "eagle3, reduced": (
        "eagle3",
        {"num_draft": M, "layer_ids": (0,), "draft_vocab_size": 2},
        (0, 2),
    ),
    "lookup": ("lookup", {"num_draft": M}, None),
}


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter, its parameters, and what it drafts from: one request after PROMPT."""

    drafter: base.Drafter
    params: Any
    frozen: base.Frozen
    state: Any


@functools.cache
def target():
    """Sizes, weights, and logits by prefix of what follows the anchor."""
    spec = tiny.spec_of(V)
    params = tiny.random_params(spec, seed=2, sharp=1.2)
    head = np.broadcast_to([*PROMPT, ANCHOR], (len(WAYS), len(PROMPT) + 1))
    tokens = jnp.asarray(np.concatenate([head, WAYS], 1), jnp.int32)
    logits = np.asarray(tiny.full_forward(spec, params, tokens)[0])
    table = np.zeros((len(PREFIXES), V), np.float32)
    for way, rows in zip(WAYS, logits, strict=True):
        for k in range(M + 1):
            table[row_of(way[:k])] = rows[len(PROMPT) + k]
    return spec, params, table


@functools.cache
def subject(name) -> Drafting:
    """The drafter of a case, off its initial values, after the prompt."""
    module, options, ids = CASES[name]
    spec, params, _ = target()
    drafter = base.load(module, options, spec)
    scale = 0.2 if module == "eagle" else 0.8  # it has no norm before the head
    draft = drafting.stir(drafter.init(jax.random.key(1)), seed=6, scale=scale)
    frozen = frozen_from_params(params, DraftVocab(ids, V) if ids else None)
    tokens = jnp.asarray([PROMPT])
    _, output = tiny.full_forward(spec, params, tokens, drafter.needs.layer_ids)
    rows = base.Rows(
        tokens_BT=tokens,
        next_tokens_BT=jnp.asarray([[*PROMPT[1:], ANCHOR]]),
        features_BTLD=output.features_BTLD,
        hidden_BTD=output.hidden_BTD,
        start_B=jnp.zeros((1,), jnp.int32),
        length_B=jnp.full((1,), len(PROMPT), jnp.int32),
    )
    state = drafting.quick_jit(drafter.prefill)(
        draft, frozen, drafter.init_state(1, ALLOCATED), rows
    )
    return Drafting(drafter, draft, frozen, state)


def started(made: Drafting, size_b, sampling) -> DecodeState:
    """The request `size_b` times."""
    slots = live_slots(size_b, sampling, ANCHOR, len(PROMPT))
    draft = jax.tree.map(lambda x: jnp.repeat(x, size_b, axis=1), made.state)
    return DecodeState(None, draft, slots)


def walked(made: Drafting):
    """Every draft sequence: what it was drawn from, and what it is.

    Returns:
      logits [X, M, U] that each row was drawn from, the target ids of their columns
      [X, M, U], and the drafts' target ids [X, M]. U is the law's own vocabulary; the
      sequences of ids that it lacks repeat others.
    """

    def walk():
        drawn = []
        state = started(made, len(WAYS), as_sampling(PLAIN))
        slots = state.slots

        def draw(logits_BTU, first_row, target_ids=None):
            size_t, size_u = logits_BTU.shape[1:]
            columns = jnp.arange(size_u) if target_ids is None else target_ids
            drawn.append((logits_BTU, jnp.broadcast_to(columns, logits_BTU.shape)))
            ids_BM = jnp.minimum(jnp.asarray(WAYS, jnp.int32), size_u - 1)
            law = transform.law_of(logits_BTU, slots.sampling, target_ids)
            return ids_BM[:, first_row : first_row + size_t], law

        proposal, _ = made.drafter.propose(
            made.params,
            made.frozen,
            state.draft,
            slots.anchor_B,
            slots.length_B,
            draw,
            CHAIN_TOPOLOGY,
        )
        if not drawn:  # chosen, not drawn: the one candidate of each row
            drawn.append((proposal.law.logits_BTV, proposal.law.target_ids))
        logits, columns = zip(*drawn, strict=True)
        return (
            jnp.concatenate(logits, 1),
            jnp.concatenate(columns, 1),
            (proposal.tokens_BM),
        )

    return [np.asarray(x) for x in drafting.quick_jit(walk)()]


@functools.cache
def tables(name, leaf=None, **options):
    """Logits by prefix of drafts, and the target ids of their columns (both [40, U]).

    Rows that no sequence of drafts comes to hold zeros.
    """
    logits_XMU, columns_XMU, tokens_XM = walked(changed(subject(name), leaf, **options))
    logits = np.zeros((len(PREFIXES), logits_XMU.shape[-1]), np.float32)
    columns = np.zeros(logits.shape, int)
    for x, tokens in enumerate(tokens_XM):
        for j in range(M):
            row = row_of(tokens[:j])
            logits[row], columns[row] = logits_XMU[x, j], columns_XMU[x, j]
    return logits, columns


def changed(made: Drafting, leaf=None, **options) -> Drafting:
    """The same drafter with other options, or one leaf (module, name) zero."""
    params, drafter = made.params, made.drafter
    if leaf is not None:
        module, name = leaf
        tree = params["params"]
        zero = {**tree[module], name: jnp.zeros_like(tree[module][name])}
        params = {"params": {**tree, module: zero}}
    if options:
        drafter = base.load(
            drafter.name, dataclasses.replace(drafter.options, **options), target()[0]
        )
    return dataclasses.replace(made, drafter=drafter, params=params)


_compiled: dict[Any, Any] = {}


def enumerate_law(monkeypatch, name, setting, mistake=None):
    """Worst bias of the next-token law, and the distance of the joint laws.

    Args:
      setting: of the request.
      mistake: None, or the `leaf` and options of `changed` whose law stands in for q.

    Returns:
      (bias, total variation, emitted tokens [X, M + 1], their weights).
    """
    _, _, p_table = target()
    made = subject(name)
    p = laws_of(p_table, setting)
    logits, columns = tables(name)
    q = laws_of(logits, setting, columns)
    leaf, options = mistake or (None, {})
    extra = ()
    if mistake:
        other, other_columns = tables(name, leaf, **options)
        extra = (laws_of(other, setting, other_columns),)
    rows, weights = partition(p, q, extra, columns.tolist())
    uniform = padded(rows)

    def run(p_table, uniform, sampling):
        with planted(monkeypatch, uniform):
            state = started(made, uniform.shape[0], sampling)

            def proposed(by: Drafting):
                return propose.propose(
                    by.drafter, by.params, by.frozen, state, one_hot=False
                )

            proposal = proposed(made)
            if mistake:
                law = proposed(changed(made, leaf, **options)).law
                ids = proposal.draft_ids_BM if law.is_sparse else proposal.tokens_BM
                proposal = proposal.replace(law=law, draft_ids_BM=ids)
            full = jnp.full((len(WAYS),), M + 1, jnp.int32)
            return settled(p_table, state.slots, proposal, full)

    static = (name, repr(mistake), len(uniform))
    if static not in _compiled:
        _compiled[static] = drafting.quick_jit(run)
    emitted = _compiled[static](jnp.asarray(p_table), uniform, as_sampling(setting))
    emitted = np.asarray(emitted)[: len(rows)]
    bias, _ = worst_bias(emitted, weights, p)
    off = joint_of(mass_of(emitted, weights), p) - joint_of({(): 1.0}, p)
    return bias, np.abs(off).sum() / 2, emitted, weights


@pytest.mark.parametrize("setting", [PLAIN, WARM, TOP_K, TOP_P, MIN_P, GREEDY])
@pytest.mark.parametrize("name", CASES)
def test_the_targets_joint_law(monkeypatch, name, setting):
    bias, distance, emitted, weights = enumerate_law(monkeypatch, name, setting)
    assert bias < 1e-6
    assert distance < 1e-6
    if setting == PLAIN:
        # Some rounds are refused at once, some keep every draft.
        counts = (emitted >= 0).sum(1)
        share = np.bincount(counts, weights, M + 2)[1:]
        assert (share > 1e-3).all(), share


def test_candidates_lack_a_token():
    """K = 2 of V = 3, and not in the order of their ids everywhere."""
    _, columns = tables("dflash2")
    reached = columns[: row_of((0,) * M)]
    reached = reached[reached.any(1)]
    assert reached.shape[1] == 2 and (reached[:, 0] != reached[:, 1]).all()
    assert (reached[:, 0] > reached[:, 1]).any()


# What the law of the drafts lost, by drafter.
MISTAKES = {
    "no Markov correction": ("dspark", (("markov", "markov_w2"), {})),
    "no selector": ("dflash2", (("selector", "successor_codebook"), {})),
    "softmax of every token": ("dflash2", (None, {"use_selector": False})),
}


@pytest.mark.parametrize("setting", [PLAIN, TOP_K])
@pytest.mark.parametrize("what", MISTAKES)
def test_uncorrected_softmax_is_caught(monkeypatch, what, setting):
    """Drafts come from the corrected law, and q says otherwise."""
    name, mistake = MISTAKES[what]
    bias, distance, _, _ = enumerate_law(monkeypatch, name, setting, mistake)
    assert bias > 0.02
    assert distance > 0.02
