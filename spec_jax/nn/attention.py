"""Attention of a block of rows over committed history plus the block itself.

History lives in a slot cache `[N, B, G, A, C]`. It is read in KV blocks up to
the batch's longest live length (large batches on a CPU slot by slot, each up to
its own), so that a step costs what is live and not what is allocated. The
block's own rows come as a dense visibility mask (chain, tree, draft block): one
routine serves target verify, prefill chunks, plain decoding and a drafter's
context attention. Softmax is accumulated online, in float32; a row that sees
nothing yields zeros, never a uniform average.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spec_jax.core import masks
from spec_jax.core.shapes import bind

KV_BLOCK = 128
# On a CPU, slots whose KV blocks together exceed this many bytes run one by one.
SLOTWISE_BYTES = 512 * 1024
_LOW = -1e30


def _accumulate(state, scores, values, visible):
    """One online-softmax step; everything `[B, G, X, keys]` / `[B, G, X, C]`."""
    top, total, out = state
    scores = jnp.where(visible, scores, _LOW)
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
    shrink = jnp.exp(top - new_top)
    total = total * shrink + weights.sum(-1)
    out = out * shrink[..., None] + jnp.einsum("bgxk,bgkc->bgxc", weights, values)
    return new_top, total, out


def _nothing_seen(size_b: int, size_g: int, size_x: int, size_c: int):
    """Online-softmax state of rows that have seen nothing."""
    return (
        jnp.full((size_b, size_g, size_x), _LOW, jnp.float32),
        jnp.zeros((size_b, size_g, size_x), jnp.float32),
        jnp.zeros((size_b, size_g, size_x, size_c), jnp.float32),
    )


def _scores(q_BGXC, k_BGKC):
    """[B, G, X, keys] float32, whatever the dtype of queries and keys."""
    return jnp.einsum(
        "bgxc,bgkc->bgxk", q_BGXC, k_BGKC, preferred_element_type=jnp.float32
    )


def _rows(mask_BTK, size_p: int):
    """[B, T, K] -> [B, 1, T * P, K]."""
    return jnp.repeat(mask_BTK, size_p, axis=1)[:, None]


def is_slotwise(size_b: int, cache_NBGAC) -> bool:
    """Whether slots are read one by one, each up to its own length.

    A KV block of one slot stays in a core's cache between its copy and its
    products; a block of many slots goes through memory at each of them.
    """
    size_g, alloc, size_c = cache_NBGAC.shape[2:]
    rows = 2 * size_b * size_g * min(KV_BLOCK, alloc)
    block_bytes = rows * size_c * cache_NBGAC.dtype.itemsize
    is_large = size_b > 1 and block_bytes > SLOTWISE_BYTES
    return is_large and jax.default_backend() == "cpu"


def _attend_history(
    q_BGXC,
    history_B,
    query_pos_BT,
    first_slot=0,
    *,
    caches,
    layer,
    window: int | None,
    size_t: int,
):
    """Online-softmax state over the history of slots `first_slot ..+ B`.

    Args:
      q_BGXC: scaled queries, X = T * P.
      history_B: [B] cached rows each slot may see; the longest sets the cost.
      query_pos_BT: see `attend`.
      first_slot: where the B slots lie in the caches (may be traced).
      caches: keys and values, see `attend`; they may hold more slots.
      layer: which layer to read.
      window: see `attend`.
      size_t: T.

    Returns:
      Maxima `[B, G, X]`, sums `[B, G, X]` and outputs `[B, G, X, C]`, float32.
    """
    size_b, size_g, size_x, size_c = q_BGXC.shape
    cache_k_NBGAC, cache_v_NBGAC = caches
    alloc = cache_k_NBGAC.shape[3]
    step = min(KV_BLOCK, alloc)
    state = _nothing_seen(size_b, size_g, size_x, size_c)

    def history_block(index, state):
        start = jnp.minimum(index * step, alloc - step)
        at = (layer, first_slot, 0, start, 0)
        shape = (1, size_b, size_g, step, size_c)
        k_BGKC = jax.lax.dynamic_slice(cache_k_NBGAC, at, shape)[0]
        v_BGKC = jax.lax.dynamic_slice(cache_v_NBGAC, at, shape)[0]
        key_row = start + jnp.arange(step)
        # The last block may overlap its predecessor when A % step != 0.
        seen_BTK = (
            masks.committed(key_row[None, None], history_B[:, None, None])
            & (key_row >= index * step)[None, None]
        )
        if window is not None:
            seen_BTK = seen_BTK & masks.in_window(
                query_pos_BT[..., None], key_row[None, None], window
            )
        seen_BTK = jnp.broadcast_to(seen_BTK, (size_b, size_t, step))
        # Rows nobody may see can hold anything, NaN included.
        v_BGKC = jnp.where(
            masks.committed(key_row, history_B[:, None])[:, None, :, None], v_BGKC, 0
        )
        scores = _scores(q_BGXC, k_BGKC)
        visible = _rows(seen_BTK, size_x // size_t)
        return _accumulate(state, scores, v_BGKC.astype(jnp.float32), visible)

    longest = jnp.max(history_B)
    num_blocks = (longest + step - 1) // step
    return jax.lax.fori_loop(0, num_blocks, history_block, state)


def _first_row(over_history, q_BGXC, history_B, query_pos_BT, slot, *, size_t: int):
    """`over_history` of row 0 alone; the rows behind it have seen nothing."""
    size_b, size_g, size_x, size_c = q_BGXC.shape
    size_p = size_x // size_t
    first_pos_BT = None if query_pos_BT is None else query_pos_BT[:, :1]
    seen = over_history(q_BGXC[:, :, :size_p], history_B, first_pos_BT, slot, size_t=1)
    others = _nothing_seen(size_b, size_g, size_x - size_p, size_c)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), seen, others)


def attend(
    q_BTGPC,
    block_k_BKGC,
    block_v_BKGC,
    visible_BTK,
    cache_k_NBGAC,
    cache_v_NBGAC,
    layer,
    history_B,
    *,
    query_pos_BT=None,
    window: int | None = None,
    count_B=None,
):
    """Attends rows over `history_B` cached rows and over each other.

    Args:
      q_BTGPC: queries, P = H / G per KV head, already rotated.
      block_k_BKGC: keys of the block (rotated): the rows' own, K = T, or more
        rows of the same round; block_v_BKGC their values.
      visible_BTK: [B or 1, T, K] bool, in-block visibility.
      cache_k_NBGAC: cached keys of every layer; cache_v_NBGAC values.
      layer: which layer to read (may be traced).
      history_B: [B] cached rows each request may see (positions 0..len-1).
      query_pos_BT: absolute positions, needed only with a window.
      window: sliding window, or None; needs K = T.
      count_B: rows of each request that count, or None for all. The others may
        give anything finite: a slot with one row that is read by itself costs one.

    Returns:
      [B, T, G, P, C].
    """
    sizes = bind(q_BTGPC=q_BTGPC, block_k_BKGC=block_k_BKGC, history_B=history_B)
    size_b, size_t, size_g, size_p, size_c = (sizes[x] for x in "BTGPC")
    dtype = q_BTGPC.dtype
    q_BGXC = jnp.transpose(q_BTGPC, (0, 2, 1, 3, 4)).reshape(
        size_b, size_g, size_t * size_p, size_c
    ) * jnp.asarray(size_c**-0.5, dtype)

    over_history = functools.partial(
        _attend_history,
        caches=(cache_k_NBGAC, cache_v_NBGAC),
        layer=layer,
        window=window,
    )
    all_rows = functools.partial(over_history, size_t=size_t)

    def over_slot(slot_and_rows):
        slot, rows, count = slot_and_rows
        rows = (*jax.tree.map(lambda x: x[None], rows), slot)
        if count is None or size_t == 1:
            state = all_rows(*rows)
        else:
            one_row = functools.partial(_first_row, over_history, size_t=size_t)
            state = jax.lax.cond(count <= 1, one_row, all_rows, *rows)
        return jax.tree.map(lambda x: x[0], state)

    per_request = (q_BGXC, history_B, query_pos_BT)
    if is_slotwise(size_b, cache_k_NBGAC):
        state = jax.lax.map(over_slot, (jnp.arange(size_b), per_request, count_B))
    else:
        state = all_rows(*per_request)

    k_BGKC = jnp.swapaxes(block_k_BKGC, 1, 2)
    v_BGKC = jnp.swapaxes(block_v_BKGC, 1, 2)
    scores = _scores(q_BGXC, k_BGKC)
    visible_BTK = jnp.broadcast_to(visible_BTK, (size_b, size_t, sizes["K"]))
    if window is not None:
        visible_BTK = visible_BTK & masks.in_window(
            query_pos_BT[:, :, None], query_pos_BT[:, None, :], window
        )
    _, total, out = _accumulate(
        state, scores, v_BGKC.astype(jnp.float32), _rows(visible_BTK, size_p)
    )
    out = out / jnp.maximum(total, 1e-30)[..., None]
    out = out.reshape(size_b, size_g, size_t, size_p, size_c)
    return jnp.transpose(out, (0, 2, 1, 3, 4)).astype(dtype)


def write_rows(cache_NBGAC, rows_NBTGC, start_B):
    """Writes every layer's rows at each request's own offset, in place.

    One scatter after the layers have run: a cache that is only read while the
    layers are scanned is never copied. Rows past the allocation are dropped
    (context safety lives in `decode`).
    """
    size_b, size_t = rows_NBTGC.shape[1:3]
    at_BT = start_B[:, None] + jnp.arange(size_t)[None]
    return put_rows(cache_NBGAC, rows_NBTGC, jnp.arange(size_b)[:, None], at_BT)


def put_rows(cache_NBGAC, rows_NBTGC, slot_BT, at_BT):
    """Writes every layer's rows at the given slot and cache row, in place.

    `slot_BT` broadcasts against `at_BT`; what lies outside is dropped.
    """
    rows_BTNGC = jnp.transpose(rows_NBTGC, (1, 2, 0, 3, 4)).astype(cache_NBGAC.dtype)
    slot_BT = jnp.broadcast_to(slot_BT, at_BT.shape)
    return cache_NBGAC.at[:, slot_BT, :, at_BT].set(rows_BTNGC, mode="drop")
