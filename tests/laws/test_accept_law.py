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

from spec_jax.core import verify_layout
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.features import FeatureSchema
from spec_jax.core.proposal import Proposal, join_rows, row_probs, target_ids_of
from spec_jax.decode import propose, verify
from spec_jax.decode.state import DecodeState, empty_slots
from spec_jax.drafters import base
from spec_jax.sampling import transform
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
    live_slots,
    padded,
    partition,
    planted,
    settled,
    worst_bias,
)

M = 3


def table_drafter(table_XU, target_ids):
    """Draft rows read their logits from a table indexed by the drafts so far.

    `target_ids`: None, of each column (U), or of each table row's own candidates
    (rows of K: a sparse law).
    """
    ids = None if target_ids is None else jnp.asarray(target_ids, jnp.int32)

    def propose_rows(params, frozen, state, anchor_B, length_B, draw, topology):
        index_B = jnp.zeros_like(anchor_B)
        draft_ids, tokens, rows = [], [], []
        for j in range(M):
            row_B = LEVEL[j] + index_B
            own = ids if ids is None or ids.ndim == 1 else ids[row_B][:, None]
            id_B1, law = draw(table_XU[row_B][:, None], j, own)
            token_B1 = target_ids_of(law, id_B1)
            index_B = index_B * V + token_B1[:, 0]
            draft_ids.append(id_B1)
            tokens.append(token_B1)
            rows.append(law)
        usable_B = jnp.full(anchor_B.shape, M, jnp.int32)
        proposal = Proposal(
            jnp.concatenate(tokens, 1),
            jnp.concatenate(draft_ids, 1),
            join_rows(rows),
            usable_B,
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
    p_table, q_table, size_b, sampling, cut_X, *, one_hot, target_ids, mutate=None
):
    """Production stages on planted uniforms.

    Args:
      size_b: B, rounds.
      cut_X: verify_len by the three drafts (27 entries).

    Returns:
      emitted tokens [B, 4] (-1 past the end) and q [B, M, V] as emitted.
    """
    slots = live_slots(size_b, sampling)
    drafter = table_drafter(q_table, target_ids)
    proposal = propose.propose(
        drafter, None, None, DecodeState(None, None, slots), one_hot=one_hot
    )
    if mutate is not None:
        proposal = mutate(proposal)
    q = [row_probs(proposal.law, jnp.full((size_b,), j), V) for j in range(M)]
    return settled(p_table, slots, proposal, cut_X), jnp.stack(q, 1)


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

    `extra`: function of q's table, the law a mutant compares with instead.

    Returns:
      bias, (emitted tokens, q as the proposal recorded it, q by the oracle).
    """
    p_table, q_table = tables(seed, target_ids is not None)
    if same:
        q_table = p_table
    p = laws_of(p_table, setting)
    q = laws_of(q_table, (one_hot or setting[0], *setting[1:]), target_ids)
    extra_q = () if extra is None else (extra(q_table),)
    sparse = np.ndim(target_ids) == 2
    rows, weights = partition(p, q, extra_q, target_ids if sparse else None)
    uniform = padded(rows)

    def run(p_table, q_table, uniform, sampling, cut_X):
        with planted(monkeypatch, uniform):
            return run_round(
                p_table,
                q_table,
                uniform.shape[0],
                sampling,
                cut_X,
                one_hot=one_hot,
                target_ids=target_ids,
                mutate=mutate,
            )

    # One program per static shape; a mutant never shares it.
    static = (one_hot, target_ids, mutant, len(uniform))
    if static not in _compiled:
        _compiled[static] = jax.jit(run)
    emitted, recorded = _compiled[static](
        jnp.asarray(p_table),
        jnp.asarray(q_table),
        uniform,
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


def candidates(seed):
    """Two of the three target ids in each table row, in any order."""
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.permutation(V)[:2].tolist()) for _ in range(40))


@pytest.mark.parametrize("setting", [PLAIN, WARM, TOP_K, TOP_P, MIN_P, GREEDY])
@pytest.mark.parametrize("cut", ["full", "earlier"])
def test_sparse_q(monkeypatch, setting, cut):
    """Each row has its own candidates, and lacks a token that p may give."""
    ids = candidates(5)
    assert len({row for row in ids}) == 6
    bias, (emitted, recorded, q) = enumerate_law(
        monkeypatch, setting, cut, target_ids=ids, seed=4
    )
    assert bias < 1e-6
    np.testing.assert_allclose(recorded[:1, 0], q[:1], atol=1e-6)
    assert (recorded == 0).any(-1).all()
    if setting == PLAIN:
        assert set(emitted[:, 0].tolist()) == set(range(V))


def test_candidates_taken_for_target_ids_are_caught(monkeypatch):
    """q's mass lands on ids 0 and 1, whatever the candidates are."""

    def misplaced(proposal):
        shape = proposal.law.target_ids.shape
        ids = jnp.broadcast_to(jnp.arange(2), shape)
        return proposal.replace(law=proposal.law.replace(target_ids=ids))

    bias, _ = enumerate_law(
        monkeypatch,
        PLAIN,
        "full",
        target_ids=candidates(5),
        seed=4,
        mutant="candidates",
        mutate=misplaced,
        extra=lambda q_table: laws_of(q_table, PLAIN, (0, 1)),
    )
    assert bias > 0.05


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
        extra=lambda q_table: laws_of(q_table, (False, TOP_K[1], 0, 1.0, 0.0)),
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
