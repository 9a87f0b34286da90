"""The accept law of trees by exact enumeration: V = 3, no Monte Carlo.

The nodes of a tree are chosen, not drawn, so a round's uniforms are one per node
and one for the final draw. Every interval of each is a row of a batch that runs
the production `accept` and `settle`. Mutants must not pass.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import keys, outcome, verify_layout
from spec_jax.core.proposal import Proposal, one_hot_law, row_probs
from spec_jax.decode import verify
from spec_jax.decode.state import empty_slots
from spec_jax.sampling import transform
from tests.support.enumeration import (
    GREEDY,
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


@dataclasses.dataclass(frozen=True)
class Tree:
    """Parents and tokens of the draft rows 1, 2, ..."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def prefixes(self):
        """Tokens from below the root to each row, the root first."""
        out = [()]
        for parent, token in zip(self.parents, self.tokens, strict=True):
            out.append((*out[parent], token))
        return out

    @property
    def levels(self):
        return max(len(prefix) for prefix in self.prefixes)

    @property
    def nodes(self):
        """(token, parent) of each draft."""
        return list(zip(self.tokens, self.parents, strict=True))

    def siblings(self, draft):
        """Earlier children of the draft's parent, as draft indices."""
        mine = self.parents[draft]
        return [i for i in range(draft) if self.parents[i] == mine]


def random_tree(seed, size):
    """Any shape of depth 3 at most, any tokens: often twins."""
    rng = np.random.default_rng(seed)
    depths, parents = [0], []
    for _ in range(size):
        parent = rng.choice([i for i, d in enumerate(depths) if d < 3])
        parents.append(int(parent))
        depths.append(depths[parent] + 1)
    return Tree(tuple(parents), tuple(rng.integers(0, V, size).tolist()))


TREES = {
    "chain": Tree((0, 1, 2), (1, 0, 2)),
    "pair": Tree((0, 0, 1), (1, 0, 2)),
    "every token": Tree((0, 0, 0), (2, 0, 1)),
    "twins": Tree((0, 0, 0, 1, 2, 3), (1, 1, 0, 2, 2, 0)),
    "binary": Tree((0, 0, 1, 1, 2, 2), (2, 1, 0, 2, 1, 0)),
    "late sibling": Tree((0, 1, 2, 1, 0, 5), (0, 1, 1, 2, 2, 0)),
    "full below": Tree((0, 1, 1, 1, 3, 3), (1, 0, 1, 2, 2, 0)),
    **{f"random {seed}": random_tree(seed, 5) for seed in range(6)},
}


def partition(tree, p, wide=False):
    """Rows of uniforms (one per draft, one final), and their weights.

    Args:
      tree: the tree.
      p: laws by prefix.
      wide: also split where a mutant would.
    """
    law = [p[row_of(prefix)] for prefix in tree.prefixes]
    sides = []
    for draft, parent in enumerate(tree.parents):
        # A mutant may compare with p itself, or use one uniform for siblings.
        edges = []
        family = [i for i, q in enumerate(tree.parents) if q == parent]
        for other in family if wide else [draft]:
            before = {tree.tokens[i] for i in tree.siblings(other)}
            left = 1 - sum(law[parent][t] for t in before)
            mass = law[parent][tree.tokens[other]]
            if tree.tokens[other] not in before and left > 1e-9:
                edges.append(mass / left)
            if wide:
                edges += [mass, mass / max(left, 1e-9)]
        sides.append(middles(edges))
    final = []
    for row, p_V in enumerate(law):
        # Fewer children are refused where the rest is not usable.
        left_V, children = p_V.copy(), [t for t, q in tree.nodes if q == row]
        final += np.cumsum(p_V).tolist()
        for token in children:
            left_V[token] = 0.0
            if left_V.sum() > 1e-9:
                final += np.cumsum(left_V / left_V.sum()).tolist()
    picks = list(itertools.product(*sides, middles(final)))
    uniforms = np.asarray([[middle for middle, _ in pick] for pick in picks])
    weights = np.asarray([np.prod([width for _, width in pick]) for pick in picks])
    np.testing.assert_allclose(weights.sum(), 1, atol=1e-9)
    return uniforms, weights


LEVELS, SIZE = 3, 2048
_compiled = {}


def planted_round(monkeypatch, mutant, share):
    """The production stages on planted uniforms, one program per mutant."""

    def run(logits_BWV, proposal, verify_len_B, uniform_BM, next_B1, sampling):
        size_b, size_m = uniform_BM.shape
        parents_BW = proposal.parents_BW
        slots = empty_slots(size_b, 1).replace(
            sampling=jax.tree.map(lambda x: jnp.broadcast_to(x, (size_b,)), sampling),
            active_B=jnp.ones((size_b,), bool),
            remaining_B=jnp.full((size_b,), 99, jnp.int32),
        )
        # By (row, rank among its children); no other pair may be asked for.
        same = parents_BW[:, 1:, None] == parents_BW[:, None, 1:]
        rank_BM = jnp.tril(same, -1).sum(-1)
        b_B1 = jnp.arange(size_b)[:, None]
        table = jnp.full((size_b, size_m + 1, size_m), jnp.nan)
        table = table.at[b_B1, parents_BW[:, 1:], rank_BM].set(uniform_BM)

        def child_uniforms(seed_B, round_B, use, row_BX, child_BX, needed=True):
            assert use == keys.Use.ACCEPT
            return table[b_B1, row_BX, child_BX * (not share)]

        def round_uniforms(seed_B, round_B, use, num_rows, child=0, needed=True):
            assert use == keys.Use.TARGET and num_rows == 1
            return next_B1

        with monkeypatch.context() as patch:
            patch.setattr(keys, "child_uniforms", child_uniforms)
            patch.setattr(keys, "round_uniforms", round_uniforms)
            for name, function in mutant.items():
                patch.setattr(verify, name, function)
            layout = verify_layout.tree(
                slots.anchor_B, proposal.tokens_BM, parents_BW, verify_len_B, LEVELS
            )
            stored_B = jnp.ones((size_b,), bool)
            verdict = verify.accept(logits_BWV, stored_B, slots, proposal, layout)
        done = outcome.settle(
            verdict,
            proposal.tokens_BM,
            slots.anchor_B,
            slots.active_B,
            slots.remaining_B,
            slots.stop_ids_BX,
        )
        return done.tokens_BW, verdict

    key = (tuple(mutant.values()), share)
    if key not in _compiled:
        _compiled[key] = jax.jit(run)
    return _compiled[key]


def proposal_of(tree, batch, usable=None):
    tokens_BM = jnp.broadcast_to(jnp.asarray(tree.tokens), (batch, len(tree.tokens)))
    usable = len(tree.tokens) if usable is None else usable
    return Proposal(
        tokens_BM,
        jnp.zeros_like(tokens_BM),
        one_hot_law(tokens_BM),
        jnp.full((batch,), usable),
        parents_BW=jnp.broadcast_to(
            jnp.asarray([-1, *tree.parents]), (batch, len(tree.parents) + 1)
        ),
    )


def enumerate_law(
    monkeypatch,
    tree,
    setting,
    *,
    seed=0,
    verify_len=None,
    usable=None,
    mutant=None,
    share=False,
):
    """Worst bias, prefixes seen, emitted tokens and accepted counts."""
    rng = np.random.default_rng(seed)
    table = (1.2 * rng.normal(size=(40, V))).astype(np.float32)
    p = laws_of(table, setting)
    mutant = mutant or {}
    rows, weights = partition(tree, p, wide=bool(mutant) or share)
    assert len(rows) <= SIZE
    uniforms = np.full((SIZE, rows.shape[1]), 0.5, np.float32)
    uniforms[: len(rows)] = rows
    size_w = len(tree.parents) + 1
    logits_WV = jnp.asarray(table[[row_of(prefix) for prefix in tree.prefixes]])
    emitted, verdict = planted_round(monkeypatch, mutant, share)(
        jnp.broadcast_to(logits_WV, (SIZE, size_w, V)),
        proposal_of(tree, SIZE, usable),
        jnp.full((SIZE,), size_w if verify_len is None else verify_len),
        jnp.asarray(uniforms[:, :-1]),
        jnp.asarray(uniforms[:, -1:]),
        as_sampling(setting),
    )
    emitted = np.asarray(emitted)[: len(rows)]
    bias, seen = worst_bias(emitted, weights, p)
    return (
        bias,
        seen,
        emitted,
        jax.tree.map(lambda x: np.asarray(x)[: len(rows)], verdict),
    )


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("setting", [PLAIN, WARM, TOP_K, TOP_P, MIN_P, GREEDY])
def test_the_targets_law(monkeypatch, setting, name):
    tree = TREES[name]
    bias, seen, emitted, verdict = enumerate_law(monkeypatch, tree, setting)
    assert bias < 1e-6
    accepted = set(np.unique(verdict.num_accepted_B))
    if setting == PLAIN:
        # Every node is gone past, and the root.
        assert seen == len(set(tree.prefixes))
        # Children that hold all of p are never all refused.
        kept = {len(q) for q in tree.prefixes if not full_below(tree, q)}
        assert accepted == kept
    if setting == GREEDY:
        assert len(np.unique(emitted, axis=0)) == 1
    # The path lists rows from the root, each the child of the one before.
    for path, r, tokens in zip(
        verdict.path_BX, verdict.num_accepted_B, emitted, strict=True
    ):
        rows = path[: r + 1].tolist()
        assert rows[0] == 0
        assert [tree.parents[row - 1] for row in rows[1:]] == rows[:-1]
        assert tree.prefixes[rows[-1]] == tuple(tokens[:r])


def full_below(tree, prefix):
    """A node with this prefix was accepted and its children name every token."""
    row = tree.prefixes.index(prefix)  # twins: the first one is the one accepted
    return len({t for t, q in tree.nodes if q == row}) == V


@pytest.mark.parametrize("setting", [PLAIN, TOP_K])
@pytest.mark.parametrize("name", ["twins", "late sibling", "random 1"])
def test_cut_paths_keep_the_law(monkeypatch, name, setting):
    """A window of the anchor alone, and paths cut at a depth."""
    for verify_len in (1, 2, 3):
        bias, _, emitted, verdict = enumerate_law(
            monkeypatch, TREES[name], setting, verify_len=verify_len
        )
        assert bias < 1e-6
        assert verdict.num_accepted_B.max() <= verify_len - 1
        assert (emitted[:, verify_len:] == -1).all()
        if verify_len == 1:
            assert verdict.full_B.all()


@pytest.mark.parametrize("usable", range(6))
def test_unusable_drafts_are_not_there(monkeypatch, usable):
    """A draft from a broken row is neither accepted nor taken out of p."""
    tree = TREES["late sibling"]
    bias, _, _, verdict = enumerate_law(monkeypatch, tree, PLAIN, usable=usable)
    assert bias < 1e-6
    assert verdict.path_BX.max() <= usable
    if usable == 0:
        assert verdict.full_B.all()


def kept_mass(p_law, proposal, tried_BM):
    """Rejected siblings stay in p."""
    p_BM = verify.prob_at(p_law, proposal.parents_BW[:, 1:], proposal.tokens_BM)
    return jnp.where(tried_BM, p_BM, 0.0), jnp.ones_like(p_BM)


def last_child_only(p_law, proposal, tried_BM):
    p_BM, left_BM = kept_mass(p_law, proposal, tried_BM)
    later = verify.earlier_siblings(proposal.parents_BW).any(-2)
    return jnp.where(later, 0.0, p_BM), left_BM


def twins_have_mass(p_law, proposal, tried_BM):
    """A token that was rejected once may be accepted from its twin."""
    p_BM, _ = kept_mass(p_law, proposal, tried_BM)
    earlier = verify.earlier_siblings(proposal.parents_BW)
    return p_BM, 1 - jnp.where(earlier, p_BM[:, None], 0.0).sum(-1)


def correction_from_p(p_law, proposal, row_B, refused_BM):
    return row_probs(p_law, row_B, V)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ({"child_terms": kept_mass}, "pair"),
        ({"child_terms": last_child_only}, "pair"),
        ({"child_terms": twins_have_mass}, "two twins"),
        ({"after_children": correction_from_p}, "pair"),
        ({}, "pair"),
    ],
    ids=["kept_mass", "last_child", "twins", "correction", "shared_uniform"],
)
def test_planted_biases_are_caught(monkeypatch, mutant, name):
    tree = {**TREES, "two twins": Tree((0, 0, 1), (1, 1, 2))}[name]
    assert enumerate_law(monkeypatch, tree, PLAIN)[0] < 1e-6
    bias, *_ = enumerate_law(monkeypatch, tree, PLAIN, mutant=mutant, share=not mutant)
    assert bias > 0.05


@jax.jit
def judge_one(logits_BWV, sampling, shift, proposal, uniform_BM, final_B):
    p_law = transform.law_of(logits_BWV, sampling)
    p_law = p_law.replace(log_norm_BT=p_law.log_norm_BT + shift)
    layout = verify_layout.tree(
        jnp.zeros((1,), jnp.int32),
        proposal.tokens_BM,
        proposal.parents_BW,
        jnp.full((1,), logits_BWV.shape[1]),
    )
    finite_BW = transform.finite_rows(logits_BWV)
    return verify.judge_tree(p_law, finite_BW, proposal, layout, uniform_BM, final_B)


def judged(logits_WV, tree, uniforms, final, setting=PLAIN, shift=0.0):
    """`judge_tree` of one request; `shift` moves the law's normaliser."""
    verdict = judge_one(
        np.asarray(logits_WV, np.float32)[None],
        as_sampling(setting),
        shift,
        proposal_of(tree, 1),
        np.asarray([uniforms], np.float32),
        np.asarray([final], np.float32),
    )
    return jax.tree.map(lambda x: np.asarray(x)[0], verdict)


def test_zero_uniform_with_zero_p_rejects():
    logits = [[5.0, 4.0, 0.0]] * 3
    tree = Tree((0, 0), (2, 0))
    assert judged(logits, tree, [0, 1], 0, TOP_K).num_accepted_B == 0
    made = judged(logits, tree, [0, 0], 0, TOP_K)
    assert made.num_accepted_B == 1 and made.path_BX[1] == 2


def test_rounding_never_accepts_an_impossible_token():
    """Two refused children with more than all of p: the third has none."""
    logits = [[5.0, 4.0, 0.0]] * 4
    tree = Tree((0, 0, 0), (0, 1, 2))
    # Uniforms at one, which no draw reaches, refuse the first two.
    made = judged(logits, tree, [1, 1.1, 0.5], 0.999, TOP_K, shift=-1e-5)
    assert made.num_accepted_B == 0
    # The correction comes from p, for nothing else is left.
    assert made.next_token_B == 1


def test_nan_beside_the_path_stays_there():
    """A row nobody follows is broken, and so is the unused row of a dead node."""
    logits = np.asarray([[1.0, 2.0, 0.5]] * 5)
    tree = Tree((0, 0, 1, 2), (0, 1, 2, 2))
    whole = judged(logits, tree, [0.99, 0.1, 0.3, 0.05], 0.6)
    assert whole.path_BX[:3].tolist() == [0, 2, 4] and whole.num_accepted_B == 2
    logits[1] = np.nan
    broken = judged(logits, tree, [0.99, 0.1, 0.3, 0.05], 0.6)
    jax.tree.map(np.testing.assert_array_equal, broken, whole)
    logits[1], logits[2] = 0.0, np.nan
    broken = judged(logits, tree, [0.99, 0.1, 0.3, 0.05], 0.6)
    assert broken.bad_B and broken.num_accepted_B == 1


def test_a_path_longer_than_its_bound_is_cut():
    logits_BWV = jnp.zeros((1, 4, V)).at[..., 0].set(9.0)
    proposal = proposal_of(Tree((0, 1, 2), (0, 0, 0)), 1)
    layout = verify_layout.tree(
        jnp.zeros((1,), jnp.int32),
        proposal.tokens_BM,
        proposal.parents_BW,
        jnp.asarray([4]),
        2,
    )
    slots = empty_slots(1, 1)
    stored_B = jnp.asarray([True])
    verdict = jax.jit(verify.accept)(logits_BWV, stored_B, slots, proposal, layout)
    assert verdict.raw_accepted_B.tolist() == [3]
    assert verdict.num_accepted_B.tolist() == [2]
    assert verdict.path_BX.tolist() == [[0, 1, 2]]


def test_drafts_of_a_law_are_refused_in_a_tree():
    proposal = proposal_of(TREES["pair"], 1)
    law = transform.law_of(jnp.zeros((1, 3, V)), as_sampling(PLAIN))
    layout = verify_layout.of_proposal(jnp.zeros((1,)), proposal, jnp.asarray([4]))
    with pytest.raises(ValueError, match="one_hot_law"):
        verify.accept(
            jnp.zeros((1, 4, V)),
            jnp.asarray([True]),
            empty_slots(1, 1),
            proposal.replace(law=law),
            layout,
        )


def test_a_chain_as_a_tree_is_the_chain():
    """The same keys, the same verdict; greedy and sampled rows together."""
    size_b, size_m, vocab = 512, 4, 7
    rng = np.random.default_rng(3)
    logits_BWV = jnp.asarray(rng.normal(size=(size_b, size_m + 1, vocab)), jnp.float32)
    # Likely drafts, so that whole windows are accepted too.
    likely = logits_BWV[:, :-1] + 0.7 * rng.normal(size=(size_b, size_m, vocab))
    tokens_BM = jnp.argmax(likely, -1).astype(jnp.int32)
    sampling = transform.all_greedy(size_b).replace(
        greedy_B=jnp.arange(size_b) % 3 == 0,
        temperature_B=jnp.full((size_b,), 0.6),
        top_k_B=jnp.where(jnp.arange(size_b) % 2 == 0, 3, 0),
    )
    slots = empty_slots(size_b, 1).replace(
        seed_B=jnp.arange(size_b, dtype=jnp.int32),
        round_B=jnp.arange(size_b, dtype=jnp.int32) % 5,
        sampling=sampling,
    )
    usable_B = jnp.where(jnp.arange(size_b) % 11 == 0, 2, size_m)
    chain = Proposal(
        tokens_BM, jnp.zeros_like(tokens_BM), one_hot_law(tokens_BM), usable_B
    )
    tree = chain.replace(
        parents_BW=jnp.broadcast_to(jnp.arange(size_m + 1) - 1, (size_b, size_m + 1))
    )
    grant_B = jnp.where(jnp.arange(size_b) % 7 == 0, 1, size_m + 1)

    @jax.jit
    def verdict_of(proposal):
        layout = verify_layout.of_proposal(slots.anchor_B, proposal, grant_B)
        stored_B = jnp.ones((size_b,), bool)
        return verify.accept(logits_BWV, stored_B, slots, proposal, layout)

    one, other = verdict_of(chain), verdict_of(tree)
    assert one.path_BX is None
    assert set(np.unique(one.num_accepted_B)) == set(range(size_m + 1))
    np.testing.assert_array_equal(one.num_accepted_B, other.num_accepted_B)
    np.testing.assert_array_equal(one.raw_accepted_B, other.raw_accepted_B)
    np.testing.assert_array_equal(one.next_token_B, other.next_token_B)
    np.testing.assert_array_equal(one.full_B, other.full_B)
    np.testing.assert_array_equal(one.bad_B, other.bad_B)
    for path, r in zip(other.path_BX, other.num_accepted_B, strict=True):
        assert path[: int(r) + 1].tolist() == list(range(int(r) + 1))


def test_child_uniforms_are_the_rounds_own():
    seed_B, round_B = jnp.asarray([3, 4]), jnp.asarray([7, 8])
    row_BX = jnp.asarray([[0, 0, 1], [2, 0, 1]])
    child_BX = jnp.asarray([[0, 1, 0], [0, 0, 1]])
    mine = keys.child_uniforms(seed_B, round_B, keys.Use.ACCEPT, row_BX, child_BX)
    for child in (0, 1):
        rows = keys.round_uniforms(seed_B, round_B, keys.Use.ACCEPT, 3, child)
        for b, x in zip(*np.nonzero(np.asarray(child_BX) == child), strict=True):
            assert mine[b, x] == rows[b, row_BX[b, x]]
    assert len(np.unique(mine)) == 6
