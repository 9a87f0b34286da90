"""Budget: how many draft rows a round may spend, and in which program.

The host knows the survival of earlier rounds and what each program costs. It
chooses the K that maximises expected tokens per second of the whole round,
`(R + sum of the K best) / round_time(R, R + K)`, over all K: round times have
steps, so the first local maximum may be a bad one. Not drafting at all is one of
the choices. Out come a number and a program, never positions: which drafts are
verified is decided on the device, from the current round (`decode.plan`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from spec_jax.core.calibration import CostTable
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.relay import History, Relay

# Share of the newest round in the running mean of survival.
MEAN_SHARE = 0.1
# Verified drafts whose outcome `feedback` remembers, and how far it corrects.
FEEDBACK_DRAFTS = 200.0
FEEDBACK_RANGE = (0.25, 4.0)
# Promises that count as kept before any was seen: a correction grows with the rest.
_PRIOR = FEEDBACK_DRAFTS / 4
OPTIMISTIC, MEAN = "optimistic", "mean"

# Where the round `lag` before left no confidence, the newest one is planned with
# while it is at most this many lags old.
OLDEST_LAGS = 4


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    """Choices of the host's planner.

    Attributes:
      align_rows: raise K until the chosen program's rows are full: they are run
        as padding otherwise.
      may_stop: not drafting at all is a choice (where its time is known).
      probe_every: rounds without drafts after which drafting is tried again, at
        the earliest.
      probe_share: most of the plain time that trying again may cost, by the table:
        dear looks come seldom, nearly free ones (lookup) often. 0: `probe_every`
        alone decides.
      lag: rounds between confidence and the budget made from it. An engine has read
        the round two before when it plans one, so that from 2 on nothing is late;
        at 1 the round before is still running, and each round whose confidence has
        not arrived verifies full windows.
      extra_lag: more of them.
      newcomers: what a request of which nothing is known counts: "optimistic", 1
        everywhere, which makes room to explore (article 8.1), or "mean", what known
        requests had on average, where drafting for everyone new costs more than it
        finds out (short answers, poor drafts).
      feedback: scale what histories promise by what earlier rounds kept of it:
        accepted drafts over what their budgets were chosen for; rounds that verify
        none slowly restore it. For confidence that temperatures alone do not
        calibrate (log-odds of max q are one), and for texts in which it does not
        last the lag (what is being copied is at its end).
      wait: wait for that round's confidence instead of giving up on a late one
        (tests and law runs).
    """

    align_rows: bool = False
    may_stop: bool = True
    probe_every: int = 64
    probe_share: float = 0.0
    lag: int = 2
    extra_lag: int = 0
    newcomers: str = OPTIMISTIC
    feedback: bool = False
    wait: bool = False

    def __post_init__(self):
        if self.newcomers not in (OPTIMISTIC, MEAN):
            raise UserError(
                f"plan.newcomers={self.newcomers!r} must be {OPTIMISTIC!r} or {MEAN!r}"
            )
        if not 0 <= self.probe_share <= 1:
            raise UserError(
                f"plan.probe_share={self.probe_share} must lie in [0, 1]; 0 leaves it "
                "to plan.probe_every"
            )
        for name, least in (("probe_every", 1), ("lag", 1), ("extra_lag", 0)):
            if getattr(self, name) < least:
                raise UserError(
                    f"plan.{name}={getattr(self, name)} must be at least {least}"
                )


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the next round runs.

    Attributes:
      draft: False for the plain program.
      budget: K, the most draft rows of all planned requests together.
      requests: R of the program.
      rows: T of the program.
      seconds: predicted time of the round; None without a table.
      promised: accepted drafts that the history gave this budget for, before any
        correction; None where no history did.
      planned: slots that the budget is for.
    """

    draft: bool
    budget: int
    requests: int
    rows: int
    seconds: float | None = None
    promised: float | None = dataclasses.field(default=None, compare=False)
    planned: tuple[int, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a budget is chosen from; fixed for an engine.

    Attributes:
      ladder: the (R, T) programs.
      num_draft: M.
      plan: clamps and `survival_eps`, the device's own.
      table: round times, or None: verify everything.
      align_rows: see `BudgetOptions`.
    """

    ladder: Ladder
    num_draft: int
    plan: PlanOptions
    table: CostTable | None = None
    align_rows: bool = False


def _program(terms: Terms, requests: int, budget: int, count: int) -> Choice:
    rows = terms.ladder.rows(requests, count)
    seconds = None
    if terms.table is not None:
        seconds = float(terms.table.round_time(requests, rows))
    return Choice(True, budget, requests, rows, seconds)


def uniform(terms: Terms, requests: int, planned: int, fixed_rows: int = 0) -> Choice:
    """No budget: every planned request gets its longest window."""
    _, most = terms.plan.bounds(terms.num_draft + 1)
    budget = planned * (most - 1)
    return _program(terms, requests, budget, planned + fixed_rows + budget)


def plain(terms: Terms, requests: int) -> Choice:
    """One row per request, nothing drafted."""
    seconds = None if terms.table is None else terms.table.plain_time(requests)
    return Choice(False, 0, requests, requests, seconds)


def choose(
    terms: Terms,
    requests: int,
    history: Sequence[np.ndarray | None],
    *,
    fixed: int = 0,
    fixed_rows: int = 0,
    may_stop: bool = True,
    newcomer_M: np.ndarray | None = None,
    kept: float = 1.0,
) -> Choice:
    """The best K by the history of each planned request; a pure function.

    Args:
      terms: programs, times, clamps.
      requests: R of the program: the slots that are in use fit in it.
      history: per planned request its survival `[M]`, or None where nothing is
        known of it.
      fixed: requests no budget decides for, with `fixed_rows` rows together.
      may_stop: not drafting is a choice; it comes first where it is as good.
      newcomer_M: what such a request counts; None: 1 everywhere.
      kept: share of the promised acceptance that is counted.

    Returns:
      The first maximum of tokens per second: ties take the smaller K.
    """
    planned = len(history)
    if terms.table is None:
        return uniform(terms, requests, planned, fixed_rows)
    least, most = terms.plan.bounds(terms.num_draft + 1)
    if newcomer_M is None:
        newcomer_M = np.ones(terms.num_draft)
    survival_XM = np.asarray(
        [newcomer_M if h is None else h for h in history], np.float64
    ).reshape(planned, terms.num_draft)
    paid = survival_XM[:, : least - 1].sum()
    values = survival_XM[:, least - 1 : most - 1].ravel()
    values = np.sort(values[values >= terms.plan.survival_eps])[::-1]
    gained_K = np.concatenate([[0.0], np.cumsum(values)])
    budget_K = planned * (least - 1) + np.arange(len(gained_K))
    count_K = planned + fixed_rows + budget_K
    buckets = np.asarray(dict(terms.ladder.buckets)[requests])
    rows_K = buckets[np.searchsorted(buckets, count_K)]
    tokens_K = planned + fixed + kept * (paid + gained_K)
    rate_K = tokens_K / terms.table.round_time(requests, rows_K)
    best = int(np.argmax(rate_K))
    stopped = plain(terms, requests)
    if may_stop and stopped.seconds is not None:
        stopped_rate = (planned + fixed) / stopped.seconds
        # To draft and verify nothing is never faster, whatever a fit says.
        if stopped_rate >= rate_K[best] or not budget_K[best]:
            return stopped
    budget, rows = int(budget_K[best]), int(rows_K[best])
    if terms.align_rows:
        budget = min(rows - planned - fixed_rows, planned * (most - 1))
    counted = min(budget - planned * (least - 1), len(values))
    return dataclasses.replace(
        _program(terms, requests, budget, rows), promised=paid + gained_K[counted]
    )


@dataclasses.dataclass
class Counts:
    """What a planner has seen.

    Attributes:
      decisions: rounds decided.
      no_budget: of them without any history (the first rounds), or none but what
        is too old; where newcomers count the mean, it alone was planned with.
      not_ready: of them whose entry had not arrived: full windows were verified.
        Always 0 in an engine with a lag of 2 or more, where it says nothing of how
        fast the host is (see `BudgetOptions.lag`).
      aged: of them planned with a history older than the lag: the round it should
        have come from did not draft.
      slots: planned requests in rounds that had a history.
      stale: of them whose slot had another request then, or none.
      stopped: rounds without drafts; probes: times drafting was tried again.
    """

    decisions: int = 0
    no_budget: int = 0
    not_ready: int = 0
    aged: int = 0
    slots: int = 0
    stale: int = 0
    stopped: int = 0
    probes: int = 0


class Planner:
    """Decides each round's program; the host's memory between rounds.

    Two cold starts stay apart: without any history there is no budget and the
    layout is uniform (unless a mean is known and counts); a request that is new in
    its slot counts survival 1 (or the running mean, see `BudgetOptions.newcomers`)
    beside neighbours whose history is known.

    A round that does not draft leaves no history. What is known then ages, is
    counted, and is forgotten after `OLDEST_LAGS` lags; while drafting is stopped by
    choice, the history that stopped it holds until the next probe's is there.
    """

    def __init__(self, terms: Terms, options: BudgetOptions):
        self.terms = dataclasses.replace(terms, align_rows=options.align_rows)
        self.options = options
        self.relay = Relay(options.lag + options.extra_lag, wait=options.wait)
        self.counts = Counts()
        self._last: History | None = None
        self._mean_M: np.ndarray | None = None
        self._promised = self._accepted = _PRIOR
        self._idle, self._pause = 0, options.probe_every
        self._probe_from: int | None = None

    def decide(
        self, round_index: int, live: Mapping[int, int], own_rows: Mapping[int, int]
    ) -> Choice:
        """The next round's program and budget.

        Args:
          round_index: rounds dispatched so far.
          live: slot -> generation of the request in it.
          own_rows: slots no budget decides for -> their rows.
        """
        self.counts.decisions += 1
        requests = self.terms.ladder.requests(max(live) + 1)
        planned = [slot for slot in sorted(live) if slot not in own_rows]
        fixed_rows = sum(own_rows[slot] for slot in live if slot in own_rows)
        if not self.terms.plan.is_planned:
            return uniform(self.terms, requests, len(planned), fixed_rows)
        history, late = self.relay.read(round_index)
        if late:
            self.counts.not_ready += 1
            return uniform(self.terms, requests, len(planned), fixed_rows)
        if history is not None:
            self._last = history
            self._average(history)
            probe_from = self._probe_from
            if probe_from is not None and history.round_index >= probe_from:
                self._probe_from = None
        elif self._last is not None:
            self._age(round_index - self._last.round_index)
        seen: list[np.ndarray | None] = [None] * len(planned)
        if self._last is None:
            self.counts.no_budget += 1
            if self._mean_M is None:
                return uniform(self.terms, requests, len(planned), fixed_rows)
        else:
            seen = [self._last.of(slot, live[slot]) for slot in planned]
            self.counts.slots += len(seen)
            self.counts.stale += sum(values is None for values in seen)
        has_window = any(own_rows[slot] > 1 for slot in live if slot in own_rows)
        choice = choose(
            self.terms,
            requests,
            seen,
            fixed=len(live) - len(planned),
            fixed_rows=fixed_rows,
            may_stop=self.options.may_stop
            and self._probe_from is None
            and not has_window,
            newcomer_M=self._mean_M,
            kept=self.kept,
        )
        if choice.draft:
            self._idle = 0
            return dataclasses.replace(choice, planned=tuple(planned))
        self._idle += 1
        self.counts.stopped += 1
        self._pause = self._rounds_between(requests, len(live), fixed_rows)
        if self._idle >= self._pause:
            # Drafts run from the next round until their confidence is back.
            self._idle, self._probe_from = 0, round_index + 1
            self.counts.probes += 1
        return choice

    def _rounds_between(self, requests: int, live: int, fixed_rows: int) -> int:
        """Rounds without drafts after which drafting is tried again."""
        least, share = self.options.probe_every, self.options.probe_share
        stopped = plain(self.terms, requests).seconds
        if not share or stopped is None:
            return least
        count = live * self.terms.plan.bounds(self.terms.num_draft + 1)[0]
        looked = _program(self.terms, requests, 0, max(count, fixed_rows)).seconds
        assert looked is not None
        lost = self.relay.lag * max(looked - stopped, 0.0)
        return max(least, math.ceil(lost / (share * stopped)))

    @property
    def kept(self) -> float:
        """Share of promised acceptance that came; 1 without `feedback`."""
        if not self.options.feedback:
            return 1.0
        return float(np.clip(self._accepted / self._promised, *FEEDBACK_RANGE))

    def observe(self, choice: Choice, accepted_R, ran_R) -> None:
        """Notes what came of a round that drafted, as the host reads it.

        Args:
          choice: what was chosen for it.
          accepted_R: r of each request.
          ran_R: requests that took part.
        """
        if not self.options.feedback or choice.promised is None:
            return
        planned = list(choice.planned)
        promised = float(choice.promised)
        accepted = float(np.where(ran_R, accepted_R, 0)[planned].sum())
        count = choice.budget
        if not count:
            # Nothing was learnt: what is not tried is believed again in time.
            count = len(planned) * self.terms.num_draft
            promised = accepted = (1 - 0.5 ** (count / FEEDBACK_DRAFTS)) * _PRIOR
        fade = 0.5 ** (count / FEEDBACK_DRAFTS)
        self._promised = fade * self._promised + promised
        self._accepted = fade * self._accepted + accepted

    def _average(self, history: History) -> None:
        """What a newcomer counts, where it counts the mean."""
        slots = sorted(history.generations)
        if self.options.newcomers != MEAN or not slots:
            return
        newest_M = np.asarray(history.survival_RM, np.float64)[slots].mean(0)
        if self._mean_M is None:
            self._mean_M = newest_M
        self._mean_M = self._mean_M + MEAN_SHARE * (newest_M - self._mean_M)

    def _age(self, rounds: int) -> None:
        """Counts a history that is older than the lag, or forgets it."""
        oldest = OLDEST_LAGS * self.relay.lag
        if self._idle or self._probe_from is not None:
            oldest += self._pause
        if rounds <= oldest:
            self.counts.aged += 1
        else:
            self._last, self._idle, self._probe_from = None, 0, None

    def dispatched(
        self, round_index: int, live: Mapping[int, int], survival_RM
    ) -> None:
        """Notes a round that runs; `survival_RM` is None where none was planned."""
        if survival_RM is not None:
            self.relay.push(round_index, survival_RM, live)
