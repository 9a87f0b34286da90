"""Relay: confidence of earlier rounds on its way to the host, never waited for.

Round n leaves its survival here while it is still running; the host plans round
n + lag with it. The lag is part of the rule even where results are there sooner:
a budget then never depends on how fast the host is. An entry that has not
arrived gives no budget, and is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spec_jax.core.errors import UserError

LAG = 2


@dataclasses.dataclass(frozen=True)
class History:
    """Survival of an earlier round, as the host planned with it.

    Attributes:
      round_index: the round.
      survival_RM: survival of each slot's drafts then.
      generations: which request was in a slot then (slots that took part).
    """

    round_index: int
    survival_RM: np.ndarray
    generations: Mapping[int, int]

    def of(self, slot: int, generation: int) -> np.ndarray | None:
        """Survival `[M]` of a request; None if another one had the slot."""
        if self.generations.get(slot) != generation:
            return None
        return self.survival_RM[slot]


@dataclasses.dataclass(frozen=True)
class _Entry:
    round_index: int
    survival_RM: Any
    generations: Mapping[int, int]


class Relay:
    """A ring of the last rounds' survival.

    Attributes:
      lag: rounds between an entry and the round planned with it.
      not_ready: reads that found an entry on its way.
      reads: reads that found one at all.
    """

    def __init__(self, lag: int = LAG, *, wait: bool = False):
        """An empty ring of depth lag + 1.

        Args:
          lag: at least 1: a round cannot be planned with itself.
          wait: block until the entry is there (tests and law runs), so that the
            trace of budgets does not depend on the machine.

        Raises:
          UserError: a lag below 1.
        """
        if lag < 1:
            raise UserError(f"plan.lag={lag} must be at least 1")
        self.lag, self.wait = lag, wait
        self._ring: list[_Entry | None] = [None] * (lag + 1)
        self.not_ready = self.reads = 0

    def push(self, round_index: int, survival_RM, generations: Mapping[int, int]):
        """Leaves a dispatched round's survival and starts its way to the host."""
        if isinstance(survival_RM, jax.Array):
            survival_RM.copy_to_host_async()
        entry = _Entry(round_index, survival_RM, dict(generations))
        self._ring[round_index % len(self._ring)] = entry

    def read(self, round_index: int) -> tuple[History | None, bool]:
        """`(history, late)` for the round about to be planned.

        The history is None if the round `lag` before left nothing (it did not
        draft, or there was none), and late says that it did but has not arrived.
        """
        wanted = round_index - self.lag
        entry = self._ring[wanted % len(self._ring)] if wanted >= 0 else None
        if entry is None or entry.round_index != wanted:
            return None, False
        self.reads += 1
        values: Any = entry.survival_RM
        is_here = getattr(values, "is_ready", lambda: True)
        if not self.wait and not is_here():
            self.not_ready += 1
            return None, True
        return History(wanted, np.asarray(values), entry.generations), False
