"""Programs that run a few times only."""

from __future__ import annotations

from collections.abc import Callable

import jax


def quick_jit(function: Callable) -> Callable:
    """Compiles quickly where that matters: a program here runs a few times."""
    if jax.default_backend() != "cpu":
        return jax.jit(function)
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
