"""Where every request is on the host: waiting, filling, running, or gone.

The device knows slots alone. What the host moves without it (an abort, a stop
string) is noted in `left`, until the engine tells it.
"""

from __future__ import annotations

import collections
import dataclasses

from spec_jax.decode.jobs import Job


@dataclasses.dataclass
class SlotTable:
    """Requests and slots: a slot is free, filling or running, and never two of them.

    Attributes:
      free: slots that hold nothing.
      queue: requests that wait, the next first.
      running: slot -> the request that decodes in it.
      filling: the request whose prompt is being filled, in `filling_slot`.
      left: slots whose request left and whose device side has not been told.
    """

    free: list[int]
    queue: collections.deque[Job] = dataclasses.field(default_factory=collections.deque)
    running: dict[int, Job] = dataclasses.field(default_factory=dict)
    filling: Job | None = None
    filling_slot: int = -1
    left: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, num_slots: int) -> SlotTable:
        """A table whose slots are all free."""
        return cls(list(range(num_slots))[::-1])

    @property
    def handles(self) -> dict[int, int]:
        """slot -> handle of the request that decodes in it."""
        return {slot: job.handle for slot, job in self.running.items()}

    @property
    def jobs(self) -> list[Job]:
        """Every request that has not ended."""
        return [*self.running.values(), *self._filling(), *self.queue]

    @property
    def waiting(self) -> int:
        """Requests that do not decode yet."""
        return len(self.queue) + len(self._filling())

    def _filling(self) -> list[Job]:
        return [] if self.filling is None else [self.filling]

    def next_to_fill(self) -> Job | None:
        """The request to fill a chunk of: the one begun, or the next in the queue.

        It takes the lowest free slot, so that the smallest programs cover what
        runs. None where no request waits or no slot is free.
        """
        if self.filling is None and self.queue and self.free:
            self.filling, self.filling_slot = self.queue.popleft(), min(self.free)
            self.free.remove(self.filling_slot)
        return self.filling

    def filled(self) -> tuple[int, Job]:
        """The filling request decodes from now on; its slot and itself."""
        slot, job = self.filling_slot, self.filling
        assert job is not None
        self.running[slot], self.filling = job, None
        return slot, job

    def end(self, slot: int) -> None:
        """The request that decodes in a slot has ended."""
        del self.running[slot]
        self.free.append(slot)

    def waits(self, handle: int) -> bool:
        """Whether the queue holds a request."""
        return any(job.handle == handle for job in self.queue)

    def pull(self, handle: int) -> Job | None:
        """Takes a request out of the queue or out of its slot, which is freed."""
        for job in self.queue:
            if job.handle == handle:
                self.queue.remove(job)
                return job
        if self.filling is not None and self.filling.handle == handle:
            job, slot = self.filling, self.filling_slot
            self.filling = None
            self.free.append(slot)
        else:
            slot = next((s for s, j in self.running.items() if j.handle == handle), -1)
            if slot < 0:
                return None
            job = self.running[slot]
            self.end(slot)
        self.left.add(slot)
        return job

    def rest(self) -> None:
        """Nothing runs: slots are handed out in the same order every time."""
        self.free.sort(reverse=True)
