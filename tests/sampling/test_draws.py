"""Draws by inverse CDF: exact intervals, no token without mass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.sampling import draws, transform

inverse_cdf = jax.jit(draws.inverse_cdf)


@pytest.mark.parametrize("size", [1, 3, 255, 257, 1000])
def test_intervals_are_the_masses(size):
    """The middle of each token's interval returns it; so do points near its ends."""
    rng = np.random.default_rng(size)
    mass = rng.integers(1, 9, size) * (rng.random(size) < 0.7)
    mass[rng.integers(size)] = 3
    scale = 0.37  # masses need not be normalised
    upto = np.cumsum(mass) / mass.sum()
    for place in (0.5, 0.02, 0.98):
        kept = np.nonzero(mass)[0]
        uniform = upto[kept] - (1 - place) * mass[kept] / mass.sum()
        rows = np.broadcast_to(mass * scale, (len(kept), size)).astype(np.float32)
        got = inverse_cdf(jnp.asarray(rows), jnp.asarray(uniform, jnp.float32))
        np.testing.assert_array_equal(got, kept)


def test_ends_of_the_unit_interval():
    """u = 0 gives the first token with mass, u just below 1 the last."""
    size = 700
    masses = np.zeros((4, size), np.float32)
    masses[0, [300, 650]] = 1e-20, 1e-20
    masses[1, [1, 256]] = 1e8, 1e-3
    masses[2, 5] = 1.0
    masses[3, [255, 256]] = 0.1, 0.7
    low = inverse_cdf(jnp.asarray(masses), jnp.zeros(4))
    below_one = np.nextafter(1, 0, dtype=np.float32)
    high = inverse_cdf(jnp.asarray(masses), jnp.full(4, below_one))
    assert low.tolist() == [300, 1, 5, 255]
    assert high[0] == 650 and high[2] == 5 and high[3] == 256
    assert masses[1, high[1]] > 0


def test_tokens_without_mass_never_come():
    rng = np.random.default_rng(0)
    mass = rng.random((2000, 531)) * (rng.random((2000, 531)) < 0.02)
    mass[:, 77] += 1e-7
    mass = mass.astype(np.float32)
    got = inverse_cdf(jnp.asarray(mass), jnp.asarray(rng.random(2000), jnp.float32))
    assert (mass[np.arange(2000), np.asarray(got)] > 0).all()


def test_draw_mixes_one_hot_and_sampled_rows():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(2, 3, 11)), jnp.float32)
    sampling = transform.all_greedy(2).replace(greedy_B=jnp.asarray([True, False]))
    law = transform.law_of(logits, sampling)
    uniform = jnp.asarray(rng.random((2, 3)), jnp.float32)
    ids = jax.jit(draws.draw)(law, uniform)
    np.testing.assert_array_equal(ids[0], logits[0].argmax(-1))
    prob = np.exp(np.asarray(logits[1], np.float64))
    prob /= prob.sum(-1, keepdims=True)
    want = (np.cumsum(prob, -1) > np.asarray(uniform[1])[:, None]).argmax(-1)
    np.testing.assert_array_equal(ids[1], want)
