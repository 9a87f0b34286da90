"""`attend` against dense float64 attention by loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.nn import attention

G, P, C, LAYERS = 2, 3, 4, 2


def dense(q, k, v, visible, cache_k, cache_v, history, positions, window):
    """One request: every query over its history and its block, one softmax."""
    size_t = q.shape[0]
    out = np.zeros(q.shape)
    for t in range(size_t):
        for g in range(G):
            for p in range(P):
                keys, values = [], []
                for a in range(history):
                    if window is None or positions[t] - a < window:
                        keys.append(cache_k[g, a])
                        values.append(cache_v[g, a])
                for j in range(size_t):
                    near = window is None or positions[t] - positions[j] < window
                    if visible[t, j] and near:
                        keys.append(k[j, g])
                        values.append(v[j, g])
                if not keys:
                    continue
                scores = np.asarray(keys) @ q[t, g, p] / np.sqrt(C)
                weights = np.exp(scores - scores.max())
                out[t, g, p] = weights @ np.asarray(values) / weights.sum()
    return out


@pytest.mark.parametrize("slotwise_bytes", [0, 1 << 30])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize(
    ("allocated", "histories"), [(21, (0, 1, 20)), (8, (8, 7, 5)), (19, (16, 17, 0))]
)
def test_attend_equals_dense_attention(
    monkeypatch, allocated, histories, window, slotwise_bytes
):
    """Blocks of 8: no history, block edges, an allocation that is no multiple.

    Slot by slot and all slots at once; the cache has a slot that nobody reads.
    """
    monkeypatch.setattr(attention, "KV_BLOCK", 8)
    monkeypatch.setattr(attention, "SLOTWISE_BYTES", slotwise_bytes)
    rng = np.random.default_rng(allocated)
    size_b, size_t, layer = 3, 4, 1
    q = rng.normal(size=(size_b, size_t, G, P, C))
    k, v = rng.normal(size=(2, size_b, size_t, G, C))
    cache = rng.normal(size=(2, LAYERS, size_b + 1, G, allocated, C))
    stored = cache.copy()
    stored[:, :, size_b] = np.nan
    for b, history in enumerate(histories):
        stored[:, :, b, :, history:] = np.nan
    visible = np.tril(np.ones((size_t, size_t), bool))
    visible = np.stack([visible, rng.random((size_t, size_t)) < 0.5, visible.T])
    visible[1, 2] = False  # a row that sees nothing of its block
    positions = np.asarray(histories)[:, None] + np.arange(size_t)

    def f32(x):
        return jnp.asarray(x, jnp.float32)

    got = jax.jit(
        lambda *args: attention.attend(
            *args,
            layer,
            jnp.asarray(histories),
            query_pos_BT=jnp.asarray(positions),
            window=window,
        )
    )(f32(q), f32(k), f32(v), jnp.asarray(visible), f32(stored[0]), f32(stored[1]))
    for b, history in enumerate(histories):
        want = dense(
            q[b],
            k[b],
            v[b],
            visible[b],
            cache[0, layer, b],
            cache[1, layer, b],
            history,
            positions[b],
            window,
        )
        np.testing.assert_allclose(got[b], want, atol=2e-5)


@pytest.mark.parametrize("slotwise_bytes", [0, 1 << 30])
def test_rows_that_do_not_count_change_none_that_do(monkeypatch, slotwise_bytes):
    """A slot with one row, read by itself, costs one and gives the same."""
    monkeypatch.setattr(attention, "KV_BLOCK", 8)
    monkeypatch.setattr(attention, "SLOTWISE_BYTES", slotwise_bytes)
    rng = np.random.default_rng(0)
    size_b, size_t = 4, 3
    q, k, v = (
        jnp.asarray(rng.normal(size=(size_b, size_t, *shape)), jnp.float32)
        for shape in ((G, P, C), (G, C), (G, C))
    )
    cache = jnp.asarray(rng.normal(size=(2, LAYERS, size_b, G, 21, C)), jnp.float32)
    history_B = jnp.asarray([20, 0, 9, 17])
    visible = jnp.tril(jnp.ones((1, size_t, size_t), bool))
    where = (visible, cache[0], cache[1], 1, history_B)
    positions = history_B[:, None] + jnp.arange(size_t)
    for window in (None, 5):
        call = jax.jit(
            lambda count_B, window=window: attention.attend(
                q,
                k,
                v,
                *where,
                query_pos_BT=positions,
                window=window,
                count_B=count_B,
            )
        )
        everything = call(None)
        for count_B in ([1, 1, 2, 3], [0, 3, 1, 1]):
            got = call(jnp.asarray(count_B))
            assert jnp.isfinite(got).all()
            for b, count in enumerate(count_B):
                np.testing.assert_allclose(
                    got[b, :count], everything[b, :count], atol=2e-6
                )


def test_write_rows_drops_what_lies_past_the_allocation():
    cache = jnp.zeros((LAYERS, 3, G, 6, C))
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(LAYERS, 3, 4, G, C)), jnp.float32)
    start = jnp.asarray([0, 4, 6])
    out = np.asarray(jax.jit(attention.write_rows)(cache, rows, start))
    want = np.zeros(out.shape, np.float32)
    for b, first in enumerate((0, 4, 6)):
        for t in range(4):
            if first + t < 6:
                want[:, b, :, first + t] = np.asarray(rows)[:, b, t]
    np.testing.assert_array_equal(out, want)
