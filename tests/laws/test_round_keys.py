"""Why keys fold the round and not the position.

A planner may read last round's confidence in a draft that was never reached. If
that draft is redrawn from the same uniform, its inclusion depends on itself and
the output is biased. The production fold passes, the tidy one is caught.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from spec_jax.core import keys, verify_layout
from spec_jax.core.proposal import Proposal
from spec_jax.decode import step
from spec_jax.decode.state import empty_slots
from spec_jax.sampling import draws, transform

M, SIZE = 2, 20_000


def by_round(seed_B, round_B, position_B, use, num_rows):
    return keys.round_uniforms(seed_B, round_B, use, num_rows)


def by_position(seed_B, round_B, position_B, use, num_rows):
    return jnp.concatenate(
        [
            keys.round_uniforms(seed_B, position_B + row, use, 1)
            for row in range(num_rows)
        ],
        1,
    )


@functools.partial(jax.jit, static_argnums=0)
def two_rounds(fold):
    """First token of a second round whose window an unreached draft decided."""
    size_b = SIZE
    slots = empty_slots(size_b, 1).replace(
        seed_B=jnp.arange(size_b, dtype=jnp.int32),
        sampling=transform.all_greedy(size_b).replace(
            greedy_B=jnp.zeros((size_b,), bool)
        ),
    )
    p_logits = jnp.log(jnp.asarray([0.5, 0.5]))
    q_logits = jnp.log(jnp.asarray([0.7, 0.3]))

    def rows_of(logits, count):
        rows = jnp.broadcast_to(logits, (size_b, count, 2))
        return transform.law_of(rows, slots.sampling)

    p_law, q_law = rows_of(p_logits, M + 1), rows_of(q_logits, M)

    def one_round(round_B, position_B, verify_len_B):
        uniforms = functools.partial(fold, slots.seed_B, round_B, position_B)
        ids = draws.draw(q_law, uniforms(keys.Use.DRAFT, M))
        proposal = Proposal(ids, ids, q_law, jnp.full((size_b,), M))
        layout = verify_layout.chain(slots.anchor_B, ids, verify_len_B)
        verdict = step.verify.judge(
            p_law,
            jnp.ones((size_b, M + 1), bool),
            proposal,
            layout.verify_len_B,
            uniforms(keys.Use.ACCEPT, M),
            uniforms(keys.Use.TARGET, 1)[:, 0],
        )
        first = jnp.where(verdict.num_accepted_B > 0, ids[:, 0], verdict.next_token_B)
        return ids, verdict.num_accepted_B, first

    zero = jnp.zeros((size_b,), jnp.int32)
    drafts, accepted, _ = one_round(zero, zero, zero + M + 1)
    # Nothing was accepted: draft 1 of round 0 stood for the position that draft 0
    # of round 1 stands for, and was not reached.
    unreached = accepted == 0
    grant = jnp.where(drafts[:, 1] == 1, M + 1, 1)
    _, _, first = one_round(zero + 1, zero + 1, grant)
    return unreached.sum(), (unreached & (first == 1)).sum() / unreached.sum()


@pytest.mark.parametrize(("fold", "biased"), [(by_round, False), (by_position, True)])
def test_fold(fold, biased):
    """P(token 1) is 0.5; the position fold gives 0.3 + 0.7 * 0.5 = 0.65.

    Rejection of draft 0 has probability 1 - sum(min(p, q)) = 0.2, so 4,000 rows
    count and one standard error is 0.008; the tolerance is four of them.
    """
    count, share = two_rounds(fold)
    assert 3_500 < int(count) < 4_500
    if biased:
        assert float(share) > 0.6
    else:
        assert abs(float(share) - 0.5) < 0.032
