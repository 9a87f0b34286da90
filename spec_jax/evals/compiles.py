"""Counts compilations from JAX's own monitoring events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Count:
    """How many programs the backend compiled while the block ran."""

    def __init__(self):
        self.compiles = 0


@contextlib.contextmanager
def counting() -> Iterator[Count]:
    """Counts every compilation in the block, eager operations included."""
    count = Count()
    live = True

    def listen(event: str, duration: float, **_):
        del duration
        if live and event == _EVENT:
            count.compiles += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        live = False
