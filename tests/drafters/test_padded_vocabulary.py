"""Ids that only pad the vocabulary are never drafted, and q has no mass there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core import proposal as laws
from spec_jax.core.topology import CHAIN_TOPOLOGY, Topology
from spec_jax.drafters import base
from tests.support import drafting

V, REAL, SIZE_S = 67, 21, 12
KEPT = np.arange(1, V, 2)
TREE = Topology("dynamic_tree", 3, 3, 6)
BLOCK = {"num_layers": 1, "num_draft": 4, "mask_id": 3}
CASES = {
    "dflash": ("dflash", BLOCK, CHAIN_TOPOLOGY),
    "dspark": ("dspark", BLOCK, CHAIN_TOPOLOGY),
    "dflash2": ("dflash2", BLOCK, CHAIN_TOPOLOGY),
    "dflash2, capped": (
        "dflash2",
        BLOCK | {"final_logit_softcapping": 2.0},
        CHAIN_TOPOLOGY,
    ),
    "eagle": ("eagle", {"num_draft": 4}, CHAIN_TOPOLOGY),
    "eagle, tree": ("eagle", {"num_draft": 4}, TREE),
    "eagle3, tree": ("eagle3", {"num_draft": 4}, TREE),
}


@functools.cache
def programs(case):
    name, options, topology = CASES[case]
    drafter = base.load(name, options, drafting.TINY)
    draw = drafting.draw_softmax(jax.random.key(1))
    made = drafting.Programs(drafter, draw, topology)
    return made, drafting.stir(made.init(jax.random.key(0)), scale=0.5)


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("case", CASES)
def test_padding_is_not_drafted(case, kept):
    made, params = programs(case)
    if kept is not None and case.startswith("eagle3"):
        pytest.skip("its head was made for the whole vocabulary")
    frozen = drafting.make_frozen(target_ids=kept)
    batch = drafting.make_batch(made.drafter, [SIZE_S] * 6, SIZE_S)
    serve = functools.partial(
        made.serve, params, batch=batch, anchors_B=[5, 6, 7, 8, 9, 10]
    )
    shape = {"widths": [8], "bucket": 8, "allocated": 24}
    free, _ = serve(frozen=frozen, **shape)
    assert (np.asarray(free.tokens_BM) >= REAL).any(), "it would have come up"
    for whole in (0, V):
        same, _ = serve(frozen=frozen.replace(num_ids=whole), **shape)
        np.testing.assert_array_equal(same.tokens_BM, free.tokens_BM)
    cut, _ = serve(frozen=frozen.replace(num_ids=REAL), **shape)
    tokens_BM = np.asarray(cut.tokens_BM)
    assert tokens_BM.max() < REAL
    np.testing.assert_array_equal(cut.usable_B, free.usable_B)
    for row in range(tokens_BM.shape[1]):
        q_BV = np.asarray(laws.row_probs(cut.law, jnp.full(6, row), V))
        np.testing.assert_allclose(q_BV.sum(1), 1.0, rtol=1e-5)
        assert not q_BV[:, REAL:].any()
