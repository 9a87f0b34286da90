"""What a round decided, and the arithmetic of r and r + 1.

    anchor D, drafts E F G H; E F accepted, G rejected, correction X
    outputs                E F X     r + 1 tokens
    commit KV, features    D E F     r + 1 rows, a different set
    next anchor                X     emitted, not run: neither KV nor feature

(article 8.1). Four lengths stay apart: proposal M, `verify_len`, r, emitted.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from spec_jax.core.shapes import bind


@struct.dataclass
class Verdict:
    """The accept decision of one round.

    Attributes:
      raw_accepted_B: drafts accepted before the plan's cut.
      num_accepted_B: r, after the cut.
      next_token_B: correction or bonus, drawn from row r.
      full_B: every draft inside the plan was accepted (next token: a bonus).
      bad_B: a target row was not finite; the request must end with an error.
      path_BX: None for a chain. For a tree the verify rows of the accepted path,
        the root first; r + 1 of them count.
    """

    raw_accepted_B: jnp.ndarray  # [B]
    num_accepted_B: jnp.ndarray  # [B]
    next_token_B: jnp.ndarray  # [B]
    full_B: jnp.ndarray  # [B]
    bad_B: jnp.ndarray  # [B]
    path_BX: jnp.ndarray | None = None  # [B, levels + 1]


@struct.dataclass
class Commit:
    """What a round emits and what becomes history.

    Attributes:
      tokens_BW: emitted tokens, valid up to `emitted_B`, then -1.
      emitted_B: tokens handed to the user, after end-of-generation trimming.
      commit_len_B: rows of KV and features that became history (r + 1 for a
        live request that did not end, 0 for an inactive slot).
      anchor_B: the next anchor.
      finished_B: the request ended in this round.
      stopped_B: it ended by a stop id (else by the length cap).
    """

    tokens_BW: jnp.ndarray  # [B, W]
    emitted_B: jnp.ndarray  # [B]
    commit_len_B: jnp.ndarray  # [B]
    anchor_B: jnp.ndarray  # [B]
    finished_B: jnp.ndarray  # [B]
    stopped_B: jnp.ndarray  # [B]


def cut(raw_accepted_B, verify_len_B):
    """r: the accepted run cut at the plan (verify_len counts the anchor)."""
    return jnp.minimum(raw_accepted_B, jnp.maximum(verify_len_B - 1, 0))


def commit_len(num_accepted_B):
    """r + 1: the anchor's row and the accepted rows."""
    return num_accepted_B + 1


def along_path(path_BX, rows_BW):
    """Verify rows `[B, W, ...]` in the order of the path, `[B, X, ...]`.

    Without a path (a chain) the rows are in order already: they come back as
    they are, and nothing is gathered.
    """
    if path_BX is None:
        return rows_BW
    return rows_BW[jnp.arange(path_BX.shape[0])[:, None], path_BX]


def drafts_along_path(path_BX, drafts_BM):
    """Draft tokens in the order of the path, root left out (draft i is row i+1)."""
    if path_BX is None:
        return drafts_BM
    return jnp.take_along_axis(drafts_BM, jnp.maximum(path_BX[:, 1:] - 1, 0), 1)


def settle(
    verdict: Verdict, drafts_BM, anchor_B, active_B, remaining_B, stop_ids_BX
) -> Commit:
    """Emitted tokens, end of generation and committed rows of one round.

    The earliest of a stop id and the length cap ends the request; ids, KV and
    usage are trimmed together. Rows up to the last emitted token's predecessor
    stay committed: KV of the final token never exists.

    Args:
      verdict: the accept decision; a tree's path picks the drafts.
      drafts_BM: the proposal's tokens.
      anchor_B: this round's anchors (kept where the slot is inactive).
      active_B: [B] bool, live slots.
      remaining_B: tokens the request may still emit.
      stop_ids_BX: ids that end a request, padded with -1.
    """
    drafts_BM = drafts_along_path(verdict.path_BX, drafts_BM)
    bind(drafts_BM=drafts_BM, anchor_B=anchor_B, active_B=active_B)
    r_B = verdict.num_accepted_B
    slots_W = jnp.arange(drafts_BM.shape[1] + 1)
    padded_BW = jnp.concatenate([drafts_BM, anchor_B[:, None]], 1)
    tokens_BW = jnp.where(
        slots_W[None] == r_B[:, None], verdict.next_token_B[:, None], padded_BW
    )
    live_B = active_B & ~verdict.bad_B
    made_B = jnp.where(live_B, commit_len(r_B), 0)
    is_stop_BW = (tokens_BW[:, :, None] == stop_ids_BX[:, None, :]).any(-1)
    is_stop_BW &= slots_W[None] < made_B[:, None]
    stop_at_B = jnp.where(is_stop_BW.any(1), jnp.argmax(is_stop_BW, 1) + 1, made_B + 1)
    emitted_B = jnp.minimum(jnp.minimum(made_B, stop_at_B), remaining_B)
    emitted_B = jnp.maximum(emitted_B, 0)
    stopped_B = live_B & (stop_at_B <= emitted_B)
    finished_B = live_B & (stopped_B | (emitted_B >= remaining_B))
    finished_B |= active_B & verdict.bad_B
    last_B = jnp.take_along_axis(tokens_BW, jnp.maximum(emitted_B - 1, 0)[:, None], 1)[
        :, 0
    ]
    return Commit(
        tokens_BW=jnp.where(slots_W[None] < emitted_B[:, None], tokens_BW, -1),
        emitted_B=emitted_B,
        commit_len_B=emitted_B,
        anchor_B=jnp.where(live_B & (emitted_B > 0), last_B, anchor_B),
        finished_B=finished_B,
        stopped_B=stopped_B,
    )
