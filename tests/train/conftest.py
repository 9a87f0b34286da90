"""Compile events as a fixture."""

import jax.monitoring
import pytest

_EVENT = "/jax/core/compile/backend_compile_duration"
_seen = []


def _listen(event, duration, **_):
    if event == _EVENT:
        _seen.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture
def compile_events():
    """Durations of the compilations since the list was last cleared."""
    _seen.clear()
    return _seen
