"""Wall seconds of a run's parts, over all the processes that worked on it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

from spec_jax.data import files

NAME = "seconds.json"
# How often a running part is written down: what a killed process may lose.
EVERY_S = 10.0

_writing = threading.Lock()  # parts of one file may run at once


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds by part, in a JSON file; one process at a time writes it."""

    path: pathlib.Path

    def read(self) -> dict[str, float]:
        """Seconds of each part; none where the file is absent or torn."""
        try:
            return dict(json.loads(self.path.read_text()))
        except (OSError, ValueError, TypeError):  # only times
            return {}

    @contextlib.contextmanager
    def running(self, part: str) -> Iterator[Callable[[], float]]:
        """Counts the block towards a part, however the block or the process ends.

        Yields:
          A function that gives the part's seconds until now.
        """
        before, started = self.read().get(part, 0.0), time.monotonic()

        def total() -> float:
            return before + time.monotonic() - started

        ended = threading.Event()

        def write_now_and_then() -> None:
            while not ended.wait(EVERY_S):
                self._set(part, total())

        writer = threading.Thread(target=write_now_and_then, daemon=True)
        writer.start()
        try:
            yield total
        finally:
            ended.set()
            writer.join()
            self._set(part, total())

    def forget(self, part: str) -> None:
        """Begins a part anew."""
        self._set(part, None)

    def _set(self, part: str, seconds: float | None) -> None:
        with _writing, contextlib.suppress(OSError):  # a folder that is not there yet
            parts = {**self.read(), part: seconds}
            kept = {name: value for name, value in parts.items() if value is not None}
            files.write_atomically(str(self.path), json.dumps(kept).encode())
