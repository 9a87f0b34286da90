"""What every drafter promises, for every file in the drafters' folder.

`pytest tests/drafters/test_conformance.py --drafter=my.drafter` asks the same of
one elsewhere, by its dotted path.
"""

import dataclasses
import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax import drafters
from spec_jax.core import proposal as laws
from spec_jax.drafters import base
from spec_jax.objectives import ObjectiveOptions, loss
from tests.support import drafting

SIZE_S = 20
KEY = jax.random.key(0)
REDUCED = np.arange(2, 67, 3)
# Small sizes; a drafter takes those its options have.
SMALL = {
    "num_layers": 2,
    "num_draft": 4,
    "mask_id": drafting.MASK_ID,
    "num_anchors": 12,
    "num_starts": 12,
    "ttt_length": 4,
    "feature_noise": 0.0,  # shrinks with the length, and these are short
}


def found():
    """Modules of the folder that define a drafter."""
    names = sorted(p.stem for p in pathlib.Path(drafters.__file__).parent.glob("*.py"))
    modules = {n: importlib.import_module(f"spec_jax.drafters.{n}") for n in names}
    return [n for n, m in modules.items() if hasattr(m, "make")]


def pytest_generate_tests(metafunc):
    """Every test that takes a `name` runs once for each drafter."""
    if "name" in metafunc.fixturenames:
        named = metafunc.config.getoption("drafter")
        metafunc.parametrize("name", named or found())


@functools.cache
def build(name):
    """Programs, stirred parameters, and what the target lends."""
    path = name if "." in name else f"spec_jax.drafters.{name}"
    options_type = importlib.import_module(path).Options
    known = {f.name for f in dataclasses.fields(options_type)}
    options = {k: v for k, v in SMALL.items() if k in known}
    programs = drafting.Programs(base.load(name, options, drafting.TINY))
    return programs, drafting.stir(programs.init(KEY)), drafting.make_frozen()


@functools.cache
def trainer(name):
    """(mean loss, metrics), gradient of the parameters and of the frozen."""
    drafter = build(name)[0].drafter

    def mean_loss(params, frozen, batch, key):
        outputs = drafter.train_outputs(params, frozen, batch, key)
        sums, metrics = loss(outputs, frozen, ObjectiveOptions(), drafter.terms)
        return sums.mean(), metrics

    return drafting.quick_jit(
        jax.value_and_grad(mean_loss, argnums=(0, 1), has_aux=True, allow_int=True)
    )


def trains(name):
    """Skips a drafter that has nothing to train."""
    if not jax.tree.leaves(build(name)[1]):
        pytest.skip("no parameters")


def batch_of(name, lengths=(SIZE_S, 13)):
    return drafting.make_batch(build(name)[0].drafter, lengths, SIZE_S)


def serve(name, frozen=None, widths=(8,), bucket=8, anchors=(9, 12), batch=None):
    """A proposal of two requests."""
    programs, params, lent = build(name)
    batch = batch_of(name) if batch is None else batch
    return programs.serve(
        params, frozen or lent, batch, list(anchors), list(widths), bucket, SIZE_S + 8
    )


def test_the_folder_was_searched():
    assert "dflash" in found() and "base" not in found()


def test_it_is_named_by_its_file_and_hashable(name):
    drafter = build(name)[0].drafter
    assert drafter.name == name
    assert {drafter.options: 1}[dataclasses.replace(drafter.options)] == 1


def test_init_follows_shapes_and_key(name):
    trains(name)
    programs, _, _ = build(name)
    shapes = jax.eval_shape(programs.drafter.init, KEY)
    one, again = programs.init(KEY), programs.init(KEY)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), one) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(one))
    jax.tree.map(np.testing.assert_array_equal, one, again)


def test_gradients_are_finite_and_reach_every_leaf_and_not_the_frozen(name):
    trains(name)
    _, params, frozen = build(name)
    (value, metrics), (grads, into_frozen) = trainer(name)(
        params, frozen, batch_of(name), KEY
    )
    assert np.isfinite(value) and value > 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        where = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), where
        assert np.abs(leaf).max() > 0, where
    for leaf in jax.tree.leaves(into_frozen):
        assert not np.asarray(leaf).any()
    for total, count in metrics.values():
        # Of a table (calibration bins), some entry was counted.
        assert np.isfinite(total).all() and np.max(count) > 0
    # The gradient came through the head: another head, another gradient.
    other = frozen.replace(head_DU=frozen.head_DU[:, ::-1])
    _, (moved, _) = trainer(name)(params, other, batch_of(name), KEY)
    assert not np.allclose(jax.tree.leaves(moved)[0], jax.tree.leaves(grads)[0])


def test_shapes_are_static(name):
    programs, params, frozen = build(name)
    drafter = programs.drafter
    size_m = drafter.layout.num_draft
    state = drafter.init_state(2, SIZE_S)
    shapes = jax.tree.map(jnp.shape, state)
    rows = drafting.rows_of(batch_of(name), [0, 0], [3, 2], 5)
    state = programs.prefill(params, frozen, state, rows)
    assert jax.tree.map(jnp.shape, state) == shapes
    state = programs.extend(params, frozen, state, rows.replace(start_B=rows.length_B))
    assert jax.tree.map(jnp.shape, state) == shapes
    made, state = programs.propose(
        params, frozen, state, np.array([1, 2], np.int32), rows.length_B
    )
    assert jax.tree.map(jnp.shape, state) == shapes
    assert made.tokens_BM.shape == made.draft_ids_BM.shape == (2, size_m)
    # Over the vocabulary, or over each row's own candidates.
    columns = made.law.logits_BTV.shape[2]
    assert made.law.logits_BTV.shape[:2] == (2, size_m)
    if made.law.is_sparse:
        assert made.law.target_ids.shape == (2, size_m, columns)
    else:
        assert columns == drafting.TINY.vocab_size
    assert made.usable_B.shape == (2,)
    assert made.confidence_logit_BM is None or made.confidence_logit_BM.shape == (
        2,
        size_m,
    )


def test_training_rows_have_the_layouts_shape(name):
    trains(name)
    programs, params, frozen = build(name)
    out = programs.train(params, frozen, batch_of(name), KEY)
    size_b, size_n = out.anchors_BN.shape
    blocks, size_m = size_b * size_n, out.labels_XM.shape[1]
    # Every draft of a block, or (EAGLE) one teacher-forced step.
    assert (size_b, size_n) == (2, 12)
    assert size_m in (1, programs.drafter.layout.num_draft)
    assert out.hidden_XMD.shape == (blocks, size_m, drafting.TINY.hidden_size)
    assert out.labels_XM.shape == out.valid_XM.shape == (blocks, size_m)
    assert out.hidden_XMD.dtype == jnp.float32
    assert set(np.unique(out.valid_XM)) <= {0.0, 1.0}


@pytest.mark.parametrize(("reduced", "greedy"), [(False, True), (True, False)])
def test_q_sums_to_one_and_holds_the_proposed_tokens(name, reduced, greedy):
    programs, params, frozen = build(name)
    if reduced:
        frozen = drafting.make_frozen(target_ids=REDUCED)
    if not greedy:
        programs = drafting.Programs(programs.drafter, drafting.draw_softmax(KEY))
    made, _ = programs.serve(
        params, frozen, batch_of(name), [9, 12], [8], 8, SIZE_S + 8
    )
    mass_BM = np.asarray(laws.prob_of(made.law, made.draft_ids_BM))
    tokens_BM = np.asarray(made.tokens_BM)
    if reduced and jax.tree.leaves(params):  # without parameters it has no head
        assert np.isin(tokens_BM, REDUCED).all()
    for j in range(tokens_BM.shape[1]):
        row_B = jnp.full((2,), j)
        q_BV = np.asarray(laws.row_probs(made.law, row_B, drafting.TINY.vocab_size))
        assert q_BV.shape == (2, drafting.TINY.vocab_size)
        np.testing.assert_allclose(q_BV.sum(-1), 1.0, atol=1e-5)
        at = q_BV[np.arange(2), tokens_BM[:, j]]
        np.testing.assert_allclose(at, mass_BM[:, j], rtol=1e-5)
        assert (at > 0).all()


def test_a_state_built_in_pieces_is_the_same_state(name):
    want, _ = serve(name, widths=[12], bucket=12)
    # Narrow pieces in wide buckets: the rest of each bucket is NaN.
    for widths in ([3], [1, 5, 2]):
        got, _ = serve(name, widths=widths)
        np.testing.assert_array_equal(got.tokens_BM, want.tokens_BM)
        np.testing.assert_allclose(
            got.law.logits_BTV, want.law.logits_BTV, atol=1e-4, rtol=1e-4
        )


def test_rejected_rows_leave_no_trace(name):
    programs, params, frozen = build(name)
    batch = batch_of(name)
    want, state = serve(name)
    # Rows of another text after the committed ones, then the same proposal.
    other = drafting.make_batch(programs.drafter, [SIZE_S] * 2, SIZE_S, seed=9)
    # Real rows, none of which counts: all that a verify refused.
    rows = drafting.rows_of(other, [9, 12], [5, 5], 8)
    rows = rows.replace(length_B=np.zeros(2, np.int32))
    state = programs.extend(params, frozen, state, rows)
    anchor_B = batch.tokens_BS[np.arange(2), [9, 12]]
    got, _ = programs.propose(
        params, frozen, state, anchor_B, np.array([9, 12], np.int32)
    )
    np.testing.assert_array_equal(got.law.logits_BTV, want.law.logits_BTV)


def test_a_neighbour_changes_nothing(name):
    batch = batch_of(name)
    want, _ = serve(name, batch=batch)
    features = batch.features_BSLD.copy()
    features[1] = np.nan
    got, _ = serve(name, batch=batch.replace(features_BSLD=features))
    np.testing.assert_array_equal(got.law.logits_BTV[0], want.law.logits_BTV[0])
    if not np.array_equal(got.law.logits_BTV[1], want.law.logits_BTV[1]):
        assert int(got.usable_B[1]) == 0, "NaN rows must not be verified"


def test_padding_is_inert_in_training(name):
    trains(name)
    _, params, frozen = build(name)
    batch = batch_of(name)
    inside = np.arange(SIZE_S)[None] < batch.length_B[:, None]
    poisoned = batch.replace(
        tokens_BS=np.where(inside, batch.tokens_BS, -7),
        supervised_BS=batch.supervised_BS | ~inside,
        features_BSLD=np.where(inside[..., None, None], batch.features_BSLD, np.nan),
        teacher_BSD=np.where(inside[..., None], batch.teacher_BSD, np.nan),
    )
    want, (want_grads, _) = trainer(name)(params, frozen, batch, KEY)
    got, (grads, _) = trainer(name)(params, frozen, poisoned, KEY)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(np.testing.assert_array_equal, grads, want_grads)


def test_nothing_trained_reads_the_row_of_the_last_token(name):
    """It was drawn and never run: features kept during decoding end before it."""
    trains(name)
    _, params, frozen = build(name)
    batch = batch_of(name)
    last = np.arange(SIZE_S)[None] == batch.length_B[:, None] - 1
    other = batch.replace(
        features_BSLD=np.where(last[..., None, None], 50.0, batch.features_BSLD),
        teacher_BSD=np.where(last[..., None], 50.0, batch.teacher_BSD),
    )
    want, (want_grads, _) = trainer(name)(params, frozen, batch, KEY)
    got, (grads, _) = trainer(name)(params, frozen, other, KEY)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(np.testing.assert_array_equal, grads, want_grads)


def test_nothing_is_traced_twice(name):
    drafter = build(name)[0].drafter
    programs = drafting.Programs(drafter)
    _, params, frozen = build(name)
    for seed, anchors in enumerate([(9, 12), (3, 15), (1, 2)]):
        batch = drafting.make_batch(drafter, [SIZE_S, 17 - seed], SIZE_S, seed=seed)
        programs.serve(params, frozen, batch, list(anchors), [2], 8, SIZE_S + 8)
        if jax.tree.leaves(params):
            programs.train(params, frozen, batch, jax.random.key(seed))
    assert max(programs.traces.values()) == 1, programs.traces


def test_one_batch_is_learned_and_then_served(name):
    """Teacher-forced accuracy and the served drafts reach the text itself."""
    trains(name)
    programs, _, frozen = build(name)
    batch = drafting.make_batch(programs.drafter, [12, 12], 12, seed=4)
    frozen = frozen.replace(head_DU=frozen.head_DU / np.float32(4))
    # The target is sure of the text: its hidden rows are its head's columns.
    sure_BSD = 8 * frozen.head_DU.T[np.roll(batch.tokens_BS, -1, 1)]
    batch = batch.replace(teacher_BSD=sure_BSD)
    params = programs.init(KEY)
    optimiser = optax.adam(1e-2)
    drafter = programs.drafter

    @drafting.quick_jit
    def step(params, state, key):
        def mean_loss(params):
            outputs = drafter.train_outputs(params, frozen, batch, key)
            sums, metrics = loss(outputs, frozen, ObjectiveOptions(), drafter.terms)
            return sums.mean(), metrics

        (value, metrics), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, value, metrics

    state = optimiser.init(params)
    losses = []
    for number in range(120):
        params, state, value, metrics = step(params, state, jax.random.key(number))
        losses.append(float(value))
    hits, count = metrics["acc"]
    assert losses[-1] < 0.1 * losses[0], losses[::20]
    assert hits / count > 0.97
    for anchor in (3, 6):
        made, _ = programs.serve(params, frozen, batch, [anchor] * 2, [8], 8, 20)
        size_m = drafter.layout.num_draft
        want = batch.tokens_BS[:, anchor + 1 : anchor + 1 + size_m]
        assert (np.asarray(made.tokens_BM) == want).mean() > 0.9
