"""Exact enumeration of a round over three tokens, in float64.

A round is a piecewise-constant function of its uniforms: the middle of every
interval, weighed by its width, stands for all of it. The law of the next token
given what the round has emitted so far must be p, at every prefix.
"""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import keys, outcome, verify_layout
from spec_jax.decode import verify
from spec_jax.decode.state import empty_slots
from spec_jax.sampling.transform import Sampling
from tests.support import laws

V, DEPTH = 3, 3
LEVEL = (0, 1, 4, 13)  # first table row of each prefix length
PREFIXES = [p for k in range(DEPTH + 1) for p in itertools.product(range(V), repeat=k)]

# greedy, temperature, top_k, top_p, min_p
PLAIN = (False, 1.0, 0, 1.0, 0.0)
WARM = (False, 1.4, 0, 1.0, 0.0)
TOP_K = (False, 0.8, 2, 1.0, 0.0)  # p(d) = 0 happens
TOP_P = (False, 1.0, 0, 0.7, 0.0)
MIN_P = (False, 1.1, 0, 1.0, 0.3)
GREEDY = (True, 1.0, 0, 1.0, 0.0)


def row_of(prefix):
    """Table row of the law that follows a prefix."""
    index = 0
    for token in prefix:
        index = index * V + int(token)
    return LEVEL[len(prefix)] + index


def middles(edges):
    """Middle and width of each interval of [0, 1] between `edges`."""
    edges = np.unique(np.clip([0.0, *edges, 1.0], 0, 1))
    keep = np.diff(edges) > 1e-12
    return [
        ((a + b) / 2, b - a)
        for a, b, k in zip(edges[:-1], edges[1:], keep, strict=True)
        if k
    ]


def worst_bias(emitted, weights, p):
    """Largest |P(next | emitted so far) - p| over prefixes the round goes past.

    Returns:
      The bias, and how many prefixes were gone past.
    """
    mass = {}
    for tokens, weight in zip(emitted.tolist(), weights, strict=True):
        count = tokens.index(-1) if -1 in tokens else len(tokens)
        for k in range(1, count + 1):
            key = tuple(tokens[:k])
            mass[key] = mass.get(key, 0.0) + weight
    worst, seen = 0.0, 0
    for prefix in PREFIXES:
        each = np.asarray([mass.get((*prefix, t), 0.0) for t in range(V)])
        if each.sum() > 1e-3:
            seen += 1
            worst = max(worst, np.abs(each / each.sum() - p[row_of(prefix)]).max())
    return worst, seen


def mass_of(emitted, weights):
    """Probability by the tokens a round emitted (rows end with -1)."""
    mass = {}
    for row, weight in zip(emitted.tolist(), weights, strict=True):
        tokens = tuple(t for t in row if t >= 0)
        mass[tokens] = mass.get(tokens, 0.0) + weight
    return mass


def joint_of(mass, p):
    """Joint law `[V ** (DEPTH + 1)]` of the next tokens.

    What was emitted (`mass_of`) goes on as p does: the result is p's own joint law,
    which `{(): 1}` gives, exactly where the round keeps it.
    """
    ways = np.asarray(list(itertools.product(range(V), repeat=DEPTH + 1)))
    law = np.zeros(len(ways))
    for begun, weight in mass.items():
        same = ways[:, : len(begun)] == np.asarray(begun, int)
        for at in np.nonzero(same.all(1))[0]:
            way = ways[at].tolist()
            rest = range(len(begun), DEPTH + 1)
            law[at] += weight * np.prod([p[row_of(way[:k])][way[k]] for k in rest])
    return law


def laws_of(table, setting, target_ids=None):
    """The law `[rows, V]` of each table row under one setting.

    Args:
      table: logits by row.
      setting: as above.
      target_ids: None, or the target id of each column, of every row alike `[U]`
        or row by row `[rows, K]`.
    """
    ids = np.arange(V) if target_ids is None else np.asarray(target_ids)
    ids = np.broadcast_to(ids, (len(table), ids.shape[-1]))
    out = np.zeros((len(table), V))
    for row, logits in enumerate(table):
        out[row, ids[row]] = laws.law(logits, *setting)
    return out


def partition(p, q, extra_q=(), candidates=None):
    """Rows of a chain round's seven uniforms and their weights, in float64.

    Three drafts, three acceptances, one final draw.

    Args:
      p, q: laws by prefix, over target ids; q is what drafts are drawn from.
      extra_q: laws a mutant might compare with instead; their edges join.
      candidates: target ids by prefix, in the order in which an inverse CDF meets
        them; None: ascending.
    """
    rows, weights = [], []
    for drafts in itertools.product(range(V), repeat=DEPTH):
        before = [row_of(drafts[:k]) for k in range(DEPTH + 1)]
        mass = np.prod([q[before[j]][drafts[j]] for j in range(DEPTH)])
        if mass == 0:
            continue
        middle = []
        for row, draft in zip(before, drafts, strict=False):
            order = list(range(V) if candidates is None else candidates[row])
            lower = order[: order.index(draft)]
            middle.append(q[row][lower].sum() + q[row][draft] / 2)
        sides = []
        for j in range(DEPTH):
            qs = [law[before[j]][drafts[j]] for law in (q, *extra_q)]
            sides.append(middles([p[before[j]][drafts[j]] / x for x in qs if x > 0]))
        edges = []
        for k in range(DEPTH + 1):
            finals = [p[before[k]]]
            if k < DEPTH:
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


def padded(rows, least=8192):
    """Rows of uniforms as float32, as many as a program was made for."""
    size = max(1 << (len(rows) - 1).bit_length(), least)
    out = np.full((size, rows.shape[1]), 0.5, np.float32)
    out[: len(rows)] = rows
    return jnp.asarray(out)


@contextlib.contextmanager
def planted(monkeypatch, uniform_B7):
    """What is traced in the block draws these uniforms."""
    of = {
        keys.Use.DRAFT: uniform_B7[:, :DEPTH],
        keys.Use.ACCEPT: uniform_B7[:, DEPTH : 2 * DEPTH],
        keys.Use.TARGET: uniform_B7[:, 2 * DEPTH :],
    }

    def round_uniforms(seed_B, round_B, use, num_rows, child=0, needed=True):
        return of[use][:, :num_rows]

    with monkeypatch.context() as patch:
        patch.setattr(keys, "round_uniforms", round_uniforms)
        yield


def live_slots(size_b, sampling, anchor=0, length=0):
    """Requests in the middle of their text, all under one setting."""
    return empty_slots(size_b, 1).replace(
        sampling=jax.tree.map(lambda x: jnp.broadcast_to(x, (size_b,)), sampling),
        active_B=jnp.ones((size_b,), bool),
        remaining_B=jnp.full((size_b,), 99, jnp.int32),
        anchor_B=jnp.full((size_b,), anchor, jnp.int32),
        length_B=jnp.full((size_b,), length, jnp.int32),
    )


def settled(p_table, slots, proposal, cut_X):
    """Tokens `[B, DEPTH + 1]` that the production stages emit, -1 past the end.

    Args:
      p_table: the target's logits by prefix of drafts.
      slots: of the requests.
      proposal: their chains of `DEPTH` drafts.
      cut_X: verify_len by the drafts (`V ** DEPTH` entries).
    """
    tokens = proposal.tokens_BM
    index = [jnp.zeros_like(slots.anchor_B)]
    for j in range(DEPTH):
        index.append(index[-1] * V + tokens[:, j])
    logits = jnp.stack([p_table[LEVEL[k] + index[k]] for k in range(DEPTH + 1)], 1)
    layout = verify_layout.chain(slots.anchor_B, tokens, cut_X[index[DEPTH]])
    stored_B = jnp.ones(slots.anchor_B.shape, bool)
    verdict = verify.accept(logits, stored_B, slots, proposal, layout)
    return outcome.settle(
        verdict,
        tokens,
        slots.anchor_B,
        slots.active_B,
        slots.remaining_B,
        slots.stop_ids_BX,
    ).tokens_BW


def as_sampling(setting):
    """The setting as a batch of one."""
    greedy, temperature, top_k, top_p, min_p = setting
    return Sampling(
        jnp.asarray([greedy]),
        jnp.asarray([temperature], jnp.float32),
        jnp.asarray([top_k], jnp.int32),
        jnp.asarray([top_p], jnp.float32),
        jnp.asarray([min_p], jnp.float32),
    )
