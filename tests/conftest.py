"""Settings and fixtures that all tests share."""

import os

# Before jax is imported anywhere: tests run on the CPU unless told otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """The real target, loaded once (its converted weights are cached on disk)."""
    from spec_jax.target.loading import load_target

    return load_target("smollm2-135m-instruct")
