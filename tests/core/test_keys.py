"""Streams: apart by seed, round, use, row and child; stable otherwise."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import keys


def test_streams_never_meet():
    seeds = jnp.repeat(jnp.asarray([0, 1, 5, -1, -6, 2**31 - 1]), 4)
    rounds = jnp.tile(jnp.arange(4), 6)
    drawn = [
        keys.round_uniforms(seeds, rounds, use, 5, child)
        for use in keys.Use
        for child in (0, 1)
    ]
    values = np.stack(drawn)
    assert values.shape == (8, 24, 5)
    assert ((values >= 0) & (values < 1)).all()
    # 960 floats of 24 bits: chance repeats 960^2 / 2^25 = 0.03 pairs.
    assert len(np.unique(values)) >= values.size - 1


def test_more_rows_extend_a_stream():
    seeds, rounds = jnp.asarray([3, 4]), jnp.asarray([7, 0])
    few = keys.round_uniforms(seeds, rounds, keys.Use.DRAFT, 2)
    many = keys.round_uniforms(seeds, rounds, keys.Use.DRAFT, 6)
    np.testing.assert_array_equal(few, many[:, :2])


def test_slots_do_not_matter():
    seeds, rounds = jnp.asarray([3, 4, 9]), jnp.asarray([7, 0, 2])
    crowd = keys.round_uniforms(seeds, rounds, keys.Use.ACCEPT, 4)
    alone = keys.round_uniforms(seeds[2:], rounds[2:], keys.Use.ACCEPT, 4)
    np.testing.assert_array_equal(crowd[2:], alone)


def test_nothing_is_drawn_when_nothing_is_needed():
    seeds, rounds = jnp.asarray([3]), jnp.asarray([7])
    draw = jax.jit(
        lambda needed: keys.round_uniforms(
            seeds, rounds, keys.Use.ACCEPT, 4, needed=needed
        )
    )
    assert not draw(False).any()
    np.testing.assert_array_equal(
        draw(True), keys.round_uniforms(seeds, rounds, keys.Use.ACCEPT, 4)
    )
