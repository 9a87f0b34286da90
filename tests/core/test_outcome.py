"""Ends of generation inside an accepted run, in every order, by a loop oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import outcome

M = 3


def expected(drafts, num_accepted, next_token, remaining, stops):
    """Walks the run token by token: the earliest of a stop id and the cap ends it."""
    emitted, reason = [], ""
    for token in [*drafts[:num_accepted], next_token]:
        emitted.append(token)
        if token in stops:
            reason = "stop"
        elif len(emitted) == remaining:
            reason = "length"
        if reason:
            break
    return emitted, reason


def settle_all(cases, active=True, bad=False):
    drafts, accepted, following, remaining, stops = zip(*cases, strict=True)
    size = len(cases)

    def filled(value):
        return jnp.full((size,), value, jnp.int32)

    verdict = outcome.Verdict(
        raw_accepted_B=jnp.asarray(accepted, jnp.int32),
        num_accepted_B=jnp.asarray(accepted, jnp.int32),
        next_token_B=jnp.asarray(following, jnp.int32),
        full_B=jnp.asarray(accepted) == M,
        bad_B=jnp.full((size,), bad),
    )
    return jax.jit(outcome.settle)(
        verdict,
        jnp.asarray(drafts, jnp.int32),
        filled(9),
        jnp.full((size,), active),
        jnp.asarray(remaining, jnp.int32),
        jnp.asarray(stops, jnp.int32),
    )


def all_cases():
    for run in itertools.product((0, 1, 2), repeat=M + 1):
        for accepted in range(M + 1):
            for remaining in range(1, M + 4):
                for stops in ((-1, -1), (2, -1), (1, 2)):
                    yield list(run[:M]), accepted, run[M], remaining, stops


def test_every_order_of_ends():
    cases = list(all_cases())
    done = jax.tree.map(np.asarray, settle_all(cases))
    for row, case in enumerate(cases):
        tokens, reason = expected(*case)
        assert done.tokens_BW[row, : len(tokens)].tolist() == tokens, case
        assert (done.tokens_BW[row, len(tokens) :] == -1).all()
        assert done.emitted_B[row] == done.commit_len_B[row] == len(tokens)
        assert done.anchor_B[row] == tokens[-1]
        assert bool(done.finished_B[row]) == bool(reason)
        assert bool(done.stopped_B[row]) == (reason == "stop")


def test_idle_and_bad_slots_emit_nothing():
    cases = list(all_cases())[::17]
    idle = settle_all(cases, active=False)
    bad = settle_all(cases, bad=True)
    for done in (idle, bad):
        assert not done.emitted_B.any() and not done.commit_len_B.any()
        assert (done.tokens_BW == -1).all() and (done.anchor_B == 9).all()
        assert not done.stopped_B.any()
    assert not idle.finished_B.any() and bad.finished_B.all()


def test_cut_counts_the_anchor():
    raw = jnp.asarray([3, 3, 0, 2])
    assert outcome.cut(raw, jnp.asarray([4, 2, 4, 1])).tolist() == [3, 1, 0, 0]
