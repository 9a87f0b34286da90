"""The accept law by exact enumeration: V = 3, M = 3, no Monte Carlo.

A round is a piecewise-constant function of its seven uniforms (three drafts,
three acceptances, one final draw). Each draft's interval, each acceptance's two
sides and every interval of every possible final draw is one row of one batch
that runs the production `propose`, `accept` and `settle`; the intervals' widths
weigh the outcomes. The law of the next token given what the round has emitted
so far must be p, at every prefix. Mutants must not pass.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import keys, outcome, verify_layout
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.features import FeatureSchema
from spec_jax.core.proposal import Proposal, join_rows, row_probs
from spec_jax.decode import propose, verify
from spec_jax.decode.state import DecodeState, empty_slots
from spec_jax.drafters import base
from spec_jax.sampling import transform
from tests.support import laws
from tests.support.enumeration import (
    GREEDY,
    LEVEL,
    MIN_P,
    PLAIN,
    TOP_K,
    TOP_P,
    WARM,
    V,
    as_sampling,
    laws_of,
    middles,
    row_of,
    worst_bias,
)

M = 3


def table_drafter(table_XU, target_ids):
    """Draft rows read their logits from a table indexed by the drafts so far."""
    ids_U = None if target_ids is None else jnp.asarray(target_ids, jnp.int32)

    def propose_rows(params, frozen, state, anchor_B, length_B, draw, topology):
        index_B = jnp.zeros_like(anchor_B)
        ids, tokens, rows = [], [], []
        for j in range(M):
            id_B1, law = draw(table_XU[LEVEL[j] + index_B][:, None], j)
            token_B1 = id_B1 if ids_U is None else ids_U[id_B1]
            index_B = index_B * V + token_B1[:, 0]
            ids.append(id_B1)
            tokens.append(token_B1)
            rows.append(law)
        law = join_rows(rows).replace(target_ids=ids_U)
        usable_B = jnp.full(anchor_B.shape, M, jnp.int32)
        proposal = Proposal(
            jnp.concatenate(tokens, 1), jnp.concatenate(ids, 1), law, usable_B
        )
        return proposal, state

    return base.Drafter(
        name="table",
        options=None,
        layout=BlockLayout(M),
        needs=FeatureSchema((), 1),
        topologies=("chain",),
        init=None,
        init_state=None,
        prefill=None,
        propose=propose_rows,
        extend=None,
        train_outputs=None,
    )


def run_round(
    p_table, q_table, uniforms, sampling, cut_X, *, one_hot, target_ids, mutate=None
):
    """Production stages on planted uniforms.

    Args:
      uniforms: dict of `keys.Use` -> [B, rows].
      cut_X: verify_len by the three drafts (27 entries).

    Returns:
      emitted tokens [B, 4] (-1 past the end) and q [B, M, V] as emitted.
    """
    size_b = uniforms[keys.Use.TARGET].shape[0]
    slots = empty_slots(size_b, 1).replace(
        sampling=jax.tree.map(lambda x: jnp.broadcast_to(x, (size_b,)), sampling),
        active_B=jnp.ones((size_b,), bool),
        remaining_B=jnp.full((size_b,), 99, jnp.int32),
    )
    drafter = table_drafter(q_table, target_ids)
    proposal = propose.propose(
        drafter, None, None, DecodeState(None, None, slots), one_hot=one_hot
    )
    if mutate is not None:
        proposal = mutate(proposal)
    tokens = proposal.tokens_BM
    index = [jnp.zeros((size_b,), jnp.int32)]
    for j in range(M):
        index.append(index[-1] * V + tokens[:, j])
    logits = jnp.stack([p_table[LEVEL[k] + index[k]] for k in range(M + 1)], 1)
    layout = verify_layout.chain(slots.anchor_B, tokens, cut_X[index[M]])
    stored_B = jnp.ones((size_b,), bool)
    verdict = verify.accept(logits, stored_B, slots, proposal, layout)
    done = outcome.settle(
        verdict,
        tokens,
        slots.anchor_B,
        slots.active_B,
        slots.remaining_B,
        slots.stop_ids_BX,
    )
    q = [row_probs(proposal.law, jnp.full((size_b,), j), V) for j in range(M)]
    return done.tokens_BW, jnp.stack(q, 1)


def partition(p, q, extra_q=()):
    """Rows of seven uniforms and their weights, in float64.

    Args:
      p, q: laws by prefix, over target ids; q is what drafts are drawn from.
      extra_q: laws a mutant might compare with instead; their edges join.
    """
    rows, weights = [], []
    for drafts in itertools.product(range(V), repeat=M):
        before = [row_of(drafts[:k]) for k in range(M + 1)]
        mass = np.prod([q[before[j]][drafts[j]] for j in range(M)])
        if mass == 0:
            continue
        middle = [
            q[before[j]][: drafts[j]].sum() + q[before[j]][drafts[j]] / 2
            for j in range(M)
        ]
        sides = []
        for j in range(M):
            qs = [law[before[j]][drafts[j]] for law in (q, *extra_q)]
            sides.append(middles([p[before[j]][drafts[j]] / x for x in qs if x > 0]))
        edges = []
        for k in range(M + 1):
            finals = [p[before[k]]]
            if k < M:
                finals += [
                    laws.residual(p[before[k]], law[before[k]]) for law in (q, *extra_q)
                ]
            edges += [x for f in finals if f is not None for x in np.cumsum(f)]
        for accept in itertools.product(*sides):
            for final, width in middles(edges):
                rows.append([*middle, *(a for a, _ in accept), final])
                weights.append(mass * width * np.prod([w for _, w in accept]))
    weights = np.asarray(weights)
    np.testing.assert_allclose(weights.sum(), 1, atol=1e-9)
    return np.asarray(rows), weights


def tables(seed, reduced=False):
    rng = np.random.default_rng(seed)
    p = rng.normal(size=(40, V)).astype(np.float32) * 1.2
    q = rng.normal(size=(40, 2 if reduced else V)).astype(np.float32) * 1.2
    return p, q


def cut_table(name):
    """verify_len (anchor included) by the three drafts."""
    out = []
    for d in itertools.product(range(V), repeat=M):
        # include[j] may read drafts before j only, but for "own".
        include = {
            "full": [True] * 3,
            "none": [False] * 3,
            "one": [True, False, False],
            "two": [True, True, False],
            "earlier": [True, d[0] != 1, (d[0] + d[1]) % 2 == 0],
            "own": [d[0] != 2, d[1] != 0, d[2] != 1],
        }[name]
        out.append(1 + sum(np.cumprod(include)))
    return jnp.asarray(out, jnp.int32)


_compiled = {}


def enumerate_law(
    monkeypatch,
    setting,
    cut,
    *,
    seed=0,
    one_hot=False,
    target_ids=None,
    same=False,
    mutant=None,
    mutate=None,
    extra=None,
):
    """Worst bias of the next-token law, and what the round recorded.

    Returns:
      bias, (emitted tokens, q as the proposal recorded it, q by the oracle).
    """
    p_table, q_table = tables(seed, target_ids is not None)
    if same:
        q_table = p_table
    p = laws_of(p_table, setting)
    q = laws_of(q_table, (one_hot or setting[0], *setting[1:]), target_ids)
    extra_q = () if extra is None else (laws_of(q_table, extra, target_ids),)
    rows, weights = partition(p, q, extra_q)
    size = 1 << (len(rows) - 1).bit_length()
    padded = np.full((max(size, 8192), 7), 0.5, np.float32)
    padded[: len(rows)] = rows

    def run(p_table, q_table, uniform, sampling, cut_X):
        planted = {
            keys.Use.DRAFT: uniform[:, :3],
            keys.Use.ACCEPT: uniform[:, 3:6],
            keys.Use.TARGET: uniform[:, 6:],
        }

        def fake(seed_B, round_B, use, num_rows, child=0, needed=True):
            return planted[use][:, :num_rows]

        with monkeypatch.context() as patch:
            patch.setattr(keys, "round_uniforms", fake)
            return run_round(
                p_table,
                q_table,
                planted,
                sampling,
                cut_X,
                one_hot=one_hot,
                target_ids=target_ids,
                mutate=mutate,
            )

    # One program per static shape; a mutant never shares it.
    static = (one_hot, target_ids, mutant, len(padded))
    if static not in _compiled:
        _compiled[static] = jax.jit(run)
    emitted, recorded = _compiled[static](
        jnp.asarray(p_table),
        jnp.asarray(q_table),
        jnp.asarray(padded),
        as_sampling(setting),
        cut_table(cut),
    )
    emitted, recorded = np.asarray(emitted), np.asarray(recorded)
    bias, seen = worst_bias(emitted[: len(rows)], weights, p)
    # The empty prefix always counts; a full dense window goes past many more.
    dense = setting == PLAIN and not one_hot and target_ids is None
    assert seen >= (20 if cut == "full" and dense else 1)
    return bias, (emitted, recorded, q)


CUTS = ("full", "none", "one", "two", "earlier")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("setting", [PLAIN, WARM, TOP_K, TOP_P, MIN_P])
def test_dense_q(monkeypatch, setting, cut):
    bias, (_, recorded, q) = enumerate_law(monkeypatch, setting, cut)
    assert bias < 1e-6
    np.testing.assert_allclose(recorded[:1, 0], q[:1], atol=1e-6)


@pytest.mark.parametrize("setting", [PLAIN, TOP_K, TOP_P, GREEDY])
@pytest.mark.parametrize("cut", ["full", "earlier"])
def test_one_hot_q(monkeypatch, setting, cut):
    bias, (_, recorded, _) = enumerate_law(monkeypatch, setting, cut, one_hot=True)
    assert bias < 1e-6
    assert set(np.unique(recorded)) <= {0.0, 1.0}


@pytest.mark.parametrize("setting", [PLAIN, TOP_K, GREEDY])
@pytest.mark.parametrize("cut", ["full", "earlier"])
def test_reduced_vocabulary(monkeypatch, setting, cut):
    """Two of three target ids can be drafted; tokens are never reduced ids."""
    bias, (emitted, recorded, _) = enumerate_law(
        monkeypatch, setting, cut, target_ids=(0, 2), seed=3
    )
    assert bias < 1e-6
    assert (recorded[..., 1] == 0).all()
    assert (emitted == 2).any() or setting == GREEDY


def test_q_equal_to_p_accepts_everything(monkeypatch):
    bias, (emitted, _, _) = enumerate_law(monkeypatch, PLAIN, "full", same=True)
    assert bias < 1e-6
    assert (emitted >= 0).all()


def test_cut_that_looks_at_its_own_token_is_caught(monkeypatch):
    bias, _ = enumerate_law(monkeypatch, PLAIN, "own")
    assert bias > 0.05


def test_wrong_q_is_caught(monkeypatch):
    """q before top-k, while drafts are drawn after it."""

    def unfiltered(proposal):
        law = proposal.law
        scaled = law.logits_BTV * law.inv_temperature_B[:, None, None]
        law = law.replace(
            floor_BT=jnp.full_like(law.floor_BT, -jnp.inf),
            log_norm_BT=jax.nn.logsumexp(scaled, -1),
        )
        return proposal.replace(law=law)

    bias, _ = enumerate_law(
        monkeypatch,
        TOP_K,
        "full",
        mutant="q",
        mutate=unfiltered,
        extra=(False, TOP_K[1], 0, 1.0, 0.0),
    )
    assert bias > 0.05


def test_correction_from_p_is_caught(monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p, q: p)
    bias, _ = enumerate_law(monkeypatch, PLAIN, "full", mutant="residual")
    assert bias > 0.05


def test_forward_that_stored_nothing_is_an_error():
    """Finite logits over rows that were never written must not become history."""
    slots = empty_slots(2, 1)
    proposal = propose.no_proposal(slots)
    layout = verify_layout.chain(slots.anchor_B, proposal.tokens_BM, jnp.ones(2, int))
    verdict = verify.accept(
        jnp.zeros((2, 1, V)), jnp.asarray([True, False]), slots, proposal, layout
    )
    assert verdict.bad_B.tolist() == [False, True]


def test_zero_uniform_with_zero_p_rejects():
    """u = 0 is drawn once in 2^23; p(d) = 0 must reject it."""
    logits = jnp.asarray([[[5.0, 4.0, 0.0], [5.0, 4.0, 0.0]]])
    setting = as_sampling(TOP_K)
    p_law = transform.law_of(logits, setting)
    q_law = transform.law_of(logits[:, :1] * 0, as_sampling(PLAIN))
    for token, accepted in ((2, 0), (0, 1)):
        ids = jnp.asarray([[token]], jnp.int32)
        verdict = verify.judge(
            p_law,
            jnp.ones((1, 2), bool),
            Proposal(ids, ids, q_law, jnp.asarray([1])),
            jnp.asarray([2]),
            jnp.zeros((1, 1)),
            jnp.zeros((1,)),
        )
        assert verdict.num_accepted_B.tolist() == [accepted]
