"""The slot engine: requests in, tokens out, one compiled program per shape.

Programs: a prefill per chunk bucket, a plain step (one row), a speculative
round (W rows). All are compiled before the first request; state is donated.
The host reads results one round late and through one door (`fetch`), so the
device never waits for it: a request that ended in round n is noticed while
round n + 1 runs, in which its slot is already inactive.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core.calibration import CostTable
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder, full_ladder
from spec_jax.decode import budget, plan, prefill, step
from spec_jax.decode.auto_off import LOAD, REASONS, AutoOff, reason_off
from spec_jax.decode.budget import BudgetOptions, Choice, Planner
from spec_jax.decode.forward import Weights
from spec_jax.decode.request import (
    NUM_BIASES,
    NUM_STOP_IDS,
    Generation,
    Offer,
    Settings,
    check_features,
    check_prompt,
    stop_ids_of,
)
from spec_jax.decode.state import DecodeState, Slots, empty_slots
from spec_jax.decode.step import RoundOptions
from spec_jax.decode.text import TextStream
from spec_jax.drafters.base import Drafter
from spec_jax.sampling.penalties import Rules
from spec_jax.sampling.transform import Sampling
from spec_jax.target.cache import init_cache
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

GREEDY = Settings()


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Shapes an engine compiles for.

    Attributes:
      slots: B, requests decoded together.
      max_context: A, allocated tokens per slot.
      prefill_buckets: chunk lengths, ascending; longer prompts take several
        chunks of the largest.
      chunks_per_tick: prefill chunks run between two rounds; 1 bounds the time
        between a running request's tokens, `slots` suits offline work.
      plain: also compile the one-row step that runs when nobody speculates.
        Without it such requests run in the round, their window cut to the
        anchor. An engine without a drafter always has it.
      round: static choices of the round.
      penalties: serve penalties and logit bias (keeps counts `[B, V]`); without,
        requests that ask for them are refused.
      logprobs: most alternatives a request may ask for beside the tokens' own
        log-probabilities; None: log-probabilities are refused.
      auto_off: when speculation switches itself off; None: never.
      ladder: the (R, T) programs; None: all slots, full windows.
      cost: seconds of each; None: a planned round verifies everything.
      budget: how budgets are chosen, in a planned mode (see `round.plan`).
      keep_rounds: records of the newest rounds that `trace` holds.
    """

    slots: int = 1
    max_context: int = 1024
    prefill_buckets: tuple[int, ...] = (32, 128)
    chunks_per_tick: int = 1
    plain: bool = True
    round: RoundOptions = dataclasses.field(default_factory=RoundOptions)
    penalties: bool = False
    logprobs: int | None = None
    auto_off: AutoOff | None = None
    ladder: Ladder | None = None
    cost: CostTable | None = None
    budget: BudgetOptions = dataclasses.field(default_factory=BudgetOptions)
    keep_rounds: int = 4096

    def __post_init__(self):
        if self.slots < 1:
            raise UserError(f"serve.slots={self.slots} must be at least 1")
        buckets = self.prefill_buckets
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise UserError(
                f"serve.prefill_buckets={buckets} must be ascending positive lengths"
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise UserError(
                f"serve.logprobs={self.logprobs} must be None (off) or at least 0"
            )


def room_of(max_context: int, window: int, spec: TargetSpec) -> int:
    """Tokens that one slot can hold, prompt and answer together.

    Two windows of slack: a round runs before the last one's result is read.
    """
    return min(max_context - 2 * window, spec.max_context)


def switched(slots: Slots, leave_B, speculate_B) -> Slots:
    """Slots without those that leave; a program of its own, between rounds."""
    return dataclasses.replace(
        slots,
        active_B=slots.active_B & ~leave_B,
        length_B=jnp.where(leave_B, 0, slots.length_B),
        speculate_B=speculate_B,
    )


def _rules_of(settings: Settings) -> Rules:
    """One request's penalties and biases, `B = 1`."""
    ids_X = np.full((1, NUM_BIASES), -1, np.int32)
    bias_X = np.zeros((1, NUM_BIASES), np.float32)
    for index, (token, bias) in enumerate(settings.logit_bias):
        ids_X[0, index], bias_X[0, index] = token, bias

    def one(value):
        return jnp.asarray(np.array([value], np.float32))

    return Rules(
        repetition_B=one(settings.repetition_penalty),
        presence_B=one(settings.presence_penalty),
        frequency_B=one(settings.frequency_penalty),
        bias_ids_BX=jnp.asarray(ids_X),
        bias_BX=jnp.asarray(bias_X),
    )


@dataclasses.dataclass
class RoundRecord:
    """One round, as the host saw it.

    Attributes:
      choice: its program, budget and predicted time.
      running: requests in it.
      late: its confidence had not arrived, so that it had no budget.
      stale: of its planned requests, how many had no history.
      verify_lens: rows of each live request, anchors included.
      seconds: from its dispatch, or from the end of the round before, until its
        result was here; prefill in between counts.
    """

    choice: Choice
    running: int
    late: bool
    stale: int
    started: float
    verify_lens: list[int] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


@dataclasses.dataclass
class _Job:
    """A request's host side, whether it waits, fills or decodes.

    Attributes:
      text: its growing text, where the engine has a tokenizer.
      speculating: its drafter is on now.
      off: why it is off for good, or "".
      filled: rows filled of what it has to fill.
      drafted_accepted: r of its rounds with drafts, the newest few.
    """

    handle: int
    generation: Generation
    settings: Settings
    text: TextStream | None
    speculating: bool
    off: str = ""
    filled: int = 0
    drafted_accepted: collections.deque = dataclasses.field(
        default_factory=collections.deque
    )

    @property
    def to_fill(self) -> list[int]:
        """Tokens the target has to run before a round: all but the anchor."""
        return self.generation.prompt + self.generation.tokens[:-1]

    @property
    def known(self) -> int | None:
        """The anchor of a request that was retracted; None before any token."""
        return self.generation.tokens[-1] if self.generation.tokens else None

    @property
    def length(self) -> int:
        return len(self.generation.prompt) + len(self.generation.tokens)


def _book_logprobs(job: _Job, count: int, row: int, made) -> None:
    """Log-probabilities of a round's first `count` tokens."""
    generation, num_top = job.generation, job.settings.top_logprobs
    generation.logprobs.extend(made.chosen_BT[row, :count].tolist())
    for index in range(count if num_top else 0):
        ids = made.top_ids_BTN[row, index, :num_top].tolist()
        values = made.top_BTN[row, index, :num_top].tolist()
        generation.top_logprobs.append(list(zip(ids, values, strict=True)))


class Engine:
    """Decodes requests over a fixed batch of slots.

    The only mutable object here: it owns the donated state and the queue.
    """

    def __init__(
        self,
        spec: TargetSpec,
        weights: Weights,
        options: EngineOptions,
        drafter: Drafter | None = None,
        mask_id: int = -1,
        tokenizer: Tokenizer | None = None,
    ):
        """Compiles every program; nothing compiles later.

        Args:
          spec: target sizes.
          weights: target parameters, and the drafter's with one.
          options: shapes.
          drafter: None for plain decoding only.
          mask_id: the drafter's mask token, refused in prompts.
          tokenizer: makes text and matches stop strings; without it requests
            with stop strings are refused.

        Raises:
          UserError: the allocation cannot hold a prompt and a round, or the
            drafter cannot propose the round's topology.
        """
        self.spec, self.weights, self.options = spec, weights, options
        self.drafter, self.mask_id = drafter, mask_id
        self.tokenizer = tokenizer
        topology = options.round.topology
        if drafter is not None and topology.kind not in drafter.topologies:
            raise UserError(
                f"serve.topology={topology.kind!r} is not what drafter.name="
                f"{drafter.name!r} can propose; choose "
                + " or ".join(repr(kind) for kind in drafter.topologies)
            )
        self.window = topology.window(drafter.layout.num_draft) if drafter else 1
        taps = drafter.needs.layer_ids if drafter else ()
        self.room = room_of(options.max_context, self.window, spec)
        if self.room < 2:
            raise UserError(
                f"serve.max_context={options.max_context} leaves no room beside two "
                f"verify windows of {self.window}; raise it"
            )
        self.offer = Offer(
            vocab_size=spec.vocab_size,
            penalties=options.penalties,
            logprobs=options.logprobs,
            text=tokenizer is not None,
            num_draft=self.window - 1,
            is_chain=topology.is_chain,
        )
        self.ladder = options.ladder or full_ladder((options.slots,), self.window)
        if drafter is None:  # plain programs only, of the same slot buckets
            sizes = tuple(size for size, _ in self.ladder.buckets)
            self.ladder = full_ladder(sizes, self.window)
        self.ladder.check(options.slots, self.window)
        if options.cost is not None:
            options.cost.check(
                num_draft=self.window - 1,
                ladder=self.ladder.buckets,
                allow_unmarked=True,
            )
        self.planner = Planner(
            budget.Terms(
                self.ladder, self.window - 1, options.round.plan, options.cost
            ),
            dataclasses.replace(
                options.budget, may_stop=options.budget.may_stop and options.plain
            ),
        )
        self.trace: collections.deque[RoundRecord] = collections.deque(
            maxlen=options.keep_rounds
        )
        self._in_flight: collections.deque[RoundRecord] = collections.deque()
        self._settled_at = 0.0
        self.host_reads = 0
        self.rounds = 0
        self._counts: collections.Counter = collections.Counter()
        self._ended: list[tuple[int, Generation]] = []
        self._news: list[tuple[int, list[int], bool]] = []
        self._release: set[int] = set()
        self._queue: collections.deque[_Job] = collections.deque()
        self._running: dict[int, _Job] = {}
        self._filling: _Job | None = None
        self._filling_slot = -1
        self._free = list(range(options.slots))[::-1]
        self._pending: collections.deque = collections.deque()
        self._next_handle = 0
        self.state = self._fresh_state()
        self._programs = self._compile(taps)

    def _fresh_state(self) -> DecodeState:
        o = self.options
        draft = None
        if self.drafter is not None:
            draft = self.drafter.init_state(o.slots, o.max_context)
        return DecodeState(
            cache=init_cache(self.spec, o.slots, o.max_context),
            draft=draft,
            slots=empty_slots(
                o.slots,
                NUM_STOP_IDS,
                num_biases=NUM_BIASES,
                vocab_size=self.spec.vocab_size if o.penalties else None,
                logprobs=o.logprobs is not None,
            ),
        )

    def _compile(self, taps):
        spec, drafter, options = self.spec, self.drafter, self.options
        round_options = dataclasses.replace(
            options.round, top_logprobs=options.logprobs or 0
        )
        abstract = jax.eval_shape(lambda x: x, (self.weights, self.state))

        def aot(function, *args):
            return jax.jit(function, donate_argnums=1).lower(*abstract, *args).compile()

        def round_of(requests, rows, speculate):
            def run(weights, state, extra=None):
                return step.round_step(
                    spec,
                    drafter,
                    taps,
                    round_options,
                    weights,
                    state,
                    extra,
                    speculate=speculate,
                    requests=requests,
                    rows=rows,
                )

            return run

        programs: dict = {}
        is_planned = round_options.plan.is_planned
        scalar = [jax.ShapeDtypeStruct((), jnp.int32)] if is_planned else []
        for requests, each in self.ladder.buckets:
            if drafter is None or options.plain:
                programs["plain", requests] = aot(round_of(requests, None, False))
            if drafter is None:
                continue
            for rows in each if self._is_packed else each[-1:]:
                packed = rows if self._is_packed else None
                program = aot(round_of(requests, packed, True), *scalar)
                programs["round", requests, rows] = program

        def fill(weights, state, chunk):
            return prefill.prefill_step(
                spec,
                drafter,
                taps,
                weights,
                state,
                chunk,
                top_logprobs=round_options.top_logprobs,
            )

        for size in options.prefill_buckets:
            chunk = jax.eval_shape(lambda x: x, self._chunk([0], 0, 0, 0, size))
            programs[size] = aot(fill, chunk)
        mask = jax.ShapeDtypeStruct((options.slots,), bool)
        programs["switch"] = (
            jax.jit(switched, donate_argnums=0)
            .lower(abstract[1].slots, mask, mask)
            .compile()
        )
        return programs

    def _chunk(self, tokens, following, start, slot, size, job=None, is_last=False):
        settings = job.settings if job else Settings()
        stops = stop_ids_of(settings, self.spec.eos_ids, self.spec.vocab_size)
        # Negative seeds are nobody's: requests without one never share a stream
        # with a seeded request.
        handle = job.handle if job else 0
        seed = -1 - handle if settings.seed is None else settings.seed
        tokens_out = job.generation.tokens if job else []
        own = settings.num_draft if settings.speculate else None
        stop_X = np.full((1, NUM_STOP_IDS), -1, np.int32)
        stop_X[0, : len(stops)] = stops
        padded_T = np.full(size, self.spec.pad_id, np.int32)
        padded_T[: len(tokens)] = tokens

        def one(value, dtype=np.int32):
            return jnp.asarray(np.array([value], dtype))

        def scalar(value, dtype=np.int32):
            return jnp.asarray(np.array(value, dtype))

        greedy = settings.temperature == 0
        request = Slots(
            anchor_B=one(0),
            length_B=one(0),
            remaining_B=one(settings.max_new_tokens - len(tokens_out)),
            active_B=one(False, bool),
            speculate_B=one(job is not None and job.speculating, bool),
            seed_B=one(seed),
            # Prefill is round 0; a request that comes back goes on counting.
            round_B=one(1 + job.generation.rounds if job and tokens_out else 0),
            sampling=Sampling(
                greedy_B=one(greedy, bool),
                temperature_B=one(1.0 if greedy else settings.temperature, np.float32),
                top_k_B=one(settings.top_k),
                top_p_B=one(settings.top_p, np.float32),
                min_p_B=one(settings.min_p, np.float32),
                rules=_rules_of(settings) if self.options.penalties else None,
            ),
            stop_ids_BX=jnp.asarray(stop_X),
            window_B=one(0 if own is None else own + 1),
            logprobs_B=(
                None if self.options.logprobs is None else one(settings.logprobs, bool)
            ),
        )
        return prefill.Chunk(
            tokens_T=jnp.asarray(padded_T),
            next_token=scalar(following),
            start=scalar(start),
            count=scalar(len(tokens)),
            slot=scalar(slot),
            is_last=scalar(is_last, bool),
            known=scalar(bool(tokens_out), bool),
            prompt_len=scalar(len(job.generation.prompt) if job else 0),
            request=request,
        )

    def fetch(self, tree):
        """The one door through which the host reads the device."""
        self.host_reads += 1
        return jax.device_get(tree)

    def submit(self, prompt: Iterable[int], settings: Settings = GREEDY) -> int:
        """Queues a request; returns its handle.

        Raises:
          UserError: the request cannot be served (see `check_prompt` and
            `check_features`).
        """
        tokens = [int(t) for t in prompt]
        check_prompt(
            tokens,
            settings,
            vocab_size=self.spec.vocab_size,
            mask_id=self.mask_id,
            room=self.room,
        )
        check_features(settings, self.offer)
        stop_ids_of(settings, self.spec.eos_ids, self.spec.vocab_size)
        text = None
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer, settings.stop)
        job = _Job(
            self._next_handle,
            Generation(prompt=tokens),
            settings,
            text,
            speculating=settings.speculate and self.drafter is not None,
        )
        self._next_handle += 1
        self._queue.append(job)
        return job.handle

    def _fill_next(self) -> None:
        """Dispatches one prefill chunk, if a request waits and a slot is free."""
        if self._filling is None:
            if not self._queue or not self._free:
                return
            # The lowest slot, so that the smallest programs cover what runs.
            self._filling, self._filling_slot = self._queue.popleft(), min(self._free)
            self._free.remove(self._filling_slot)
        job, slot = self._filling, self._filling_slot
        prompt, start = job.to_fill, job.filled
        left = len(prompt) - start
        buckets = self.options.prefill_buckets
        size = next((b for b in buckets if b >= left), buckets[-1])
        piece = prompt[start : start + size]
        is_last = start + len(piece) == len(prompt)
        following = (job.known or 0) if is_last else prompt[start + len(piece)]
        chunk = self._chunk(piece, following, start, slot, size, job, is_last)
        self.state, result = self._programs[size](self.weights, self.state, chunk)
        job.filled += len(piece)
        if is_last:
            self._running[slot] = job
            self._pending.append(("first", {slot: job}, result))
            self._filling = None

    @property
    def _is_packed(self) -> bool:
        return self.options.round.plan.mode == plan.COMPACT

    def _choose(self) -> Choice:
        """The next round's program and budget."""
        live = {slot: job.handle for slot, job in self._running.items()}
        drafts = any(job.speculating for job in self._running.values())
        if self.drafter is None or (not drafts and self.options.plain):
            requests = self.ladder.requests(max(live) + 1)
            return budget.plain(self.planner.terms, requests)
        own_rows = {}
        for slot, job in self._running.items():
            if not job.speculating:
                own_rows[slot] = 1
            elif job.settings.num_draft is not None:
                own_rows[slot] = min(job.settings.num_draft + 1, self.window)
        return self.planner.decide(self.rounds, live, own_rows)

    def _dispatch_round(self) -> None:
        self._switch_speculation()
        counts = self.planner.counts
        late, stale = counts.not_ready, counts.stale
        choice = self._choose()
        self._in_flight.append(
            RoundRecord(
                choice,
                len(self._running),
                counts.not_ready > late,
                counts.stale - stale,
                time.perf_counter(),
            )
        )
        if choice.draft:
            rows = choice.rows if self._is_packed else choice.requests * self.window
            program = self._programs["round", choice.requests, rows]
            is_planned = self.options.round.plan.is_planned
            extra = [np.asarray(choice.budget, np.int32)] if is_planned else []
        else:
            program, extra = self._programs["plain", choice.requests], []
        self.state, result = program(self.weights, self.state, *extra)
        for leaf in jax.tree.leaves(result):
            leaf.copy_to_host_async()
        live = {slot: job.handle for slot, job in self._running.items()}
        self.planner.dispatched(self.rounds, live, result.survival_BM)
        self.rounds += 1
        self._pending.append(("round", dict(self._running), result))

    def _book_round(self, result) -> None:
        """What a round took, and the rows it ran."""
        record = self._in_flight.popleft()
        now = time.perf_counter()
        record.seconds = now - max(record.started, self._settled_at)
        record.verify_lens = result.verify_len_B[result.ran_B].tolist()
        self._settled_at = now
        self.trace.append(record)

    def _settle(self) -> None:
        """Reads the oldest pending result and books it."""
        jobs: dict[int, _Job]
        kind, jobs, result = self._pending.popleft()
        result = self.fetch(result)
        if kind == "round":
            self._book_round(result)
        for slot, job in jobs.items():
            if self._running.get(slot) is not job:
                continue
            generation = job.generation
            if kind == "first":
                # None is drawn for a request that was retracted.
                new = [] if result.bad or result.token < 0 else [int(result.token)]
                done, stopped, bad = result.finished, result.stopped, result.bad
            else:
                if not result.ran_B[slot]:
                    continue
                count = int(result.emitted_B[slot])
                new = result.tokens_BW[slot, :count].tolist()
                done, stopped = result.finished_B[slot], result.stopped_B[slot]
                bad = result.bad_B[slot]
            stop = new[-1] if stopped and new else None
            new, found = self._book_text(job, new, ends_with_id=stop is not None)
            if kind == "round":
                accepted = int(result.num_accepted_B[slot])
                drafted = int(result.verify_len_B[slot]) - 1
                generation.emitted.append(len(new))
                generation.accepted.append(accepted)
                generation.drafted.append(drafted)
                self._counts["accepted"] += accepted
                if drafted and self.options.auto_off is not None:
                    job.drafted_accepted.append(accepted)
                    if len(job.drafted_accepted) > self.options.auto_off.rounds:
                        job.drafted_accepted.popleft()
            if job.settings.logprobs and new:
                row = 0 if kind == "first" else slot
                _book_logprobs(job, len(new), row, result.logprobs)
            generation.tokens.extend(new)
            self._counts["emitted"] += len(new)
            if new:
                self._news.append((job.handle, new, kind == "first"))
            if found is not None:
                # The device does not know: it is told, and what it has emitted
                # since is dropped.
                self._release.add(slot)
                generation.stopped_by, stopped = found, True
            elif stopped:
                generation.stopped_by = stop
            if done or found is not None:
                del self._running[slot]
                self._free.append(slot)
                self._end(job, "error" if bad else "stop" if stopped else "length")

    def _book_text(self, job: _Job, new: list[int], ends_with_id: bool):
        """The tokens up to a stop string that they complete, and that string.

        An id that ended the request makes no text.
        """
        if job.text is None:
            return new, None
        for index, token in enumerate(new):
            if ends_with_id and index == len(new) - 1:
                break
            job.text.push(token)
            if job.text.matched is not None:
                return new[: index + 1], job.text.matched
        job.generation.text = job.text.text
        return new, None

    def _end(self, job: _Job, reason: str) -> None:
        """A request leaves; `step` hands it out."""
        generation = job.generation
        if job.text is not None:
            job.text.finish()
            generation.text = job.text.text
        generation.finish_reason = reason
        self._counts[f"finish_{reason}"] += 1
        self._ended.append((job.handle, generation))

    def _apply_switches(self, always: bool = False) -> None:
        """Tells the device who left and who speculates, if that changed."""
        if not (self._release or always):
            return
        leave_B = np.zeros(self.options.slots, bool)
        leave_B[list(self._release)] = True
        speculate_B = np.zeros(self.options.slots, bool)
        for slot, job in self._running.items():
            speculate_B[slot] = job.speculating
        self._release.clear()
        # As they are: making device arrays of them first would compile.
        slots = self._programs["switch"](self.state.slots, leave_B, speculate_B)
        self.state = dataclasses.replace(self.state, slots=slots)

    def _switch_speculation(self) -> None:
        """Turns drafting off (or on again) where the options say so."""
        limits, changed = self.options.auto_off, False
        if limits is None or self.drafter is None:
            return
        for job in self._running.values():
            if not job.settings.speculate or job.settings.num_draft is not None:
                continue
            reason: str | None = job.off or reason_off(
                limits, list(job.drafted_accepted), job.length, len(self._running)
            )
            if reason and job.speculating:
                self._counts[f"auto_off_{reason}"] += 1
            if reason and reason != LOAD:
                job.off = reason
            changed |= job.speculating == bool(reason)
            job.speculating = not reason
        if changed:
            self._apply_switches(always=True)

    def abort(self, handle: int) -> bool:
        """Ends a request wherever it is; `step` hands it out with what it has.

        Tokens still in flight are dropped. Its slot is free at once; neighbours
        do not notice.

        Returns:
          False where there is no such request any more.
        """
        job = self._pull(handle)
        if job is None:
            return False
        self._counts["aborted"] += 1
        self._end(job, "abort")
        return True

    def retract(self, handle: int) -> bool:
        """Takes a request out of its slot and puts it first in the queue.

        It keeps its tokens and its round counter, so its random streams go on
        where they were; prompt and answer are filled again when it comes back.

        Returns:
          False where it has ended, or waits already.
        """
        while self._pending:  # what is in flight belongs to its answer
            self._settle()
        self._apply_switches()
        if any(job.handle == handle for job in self._queue):
            return False
        job = self._pull(handle)
        if job is None:
            return False
        job.filled = 0
        self._counts["retracted"] += 1
        self._queue.appendleft(job)
        return True

    def _pull(self, handle: int) -> _Job | None:
        """Takes a request out of the queue or its slot, which is freed."""
        for job in self._queue:
            if job.handle == handle:
                self._queue.remove(job)
                return job
        if self._filling is not None and self._filling.handle == handle:
            job, slot = self._filling, self._filling_slot
            self._filling = None
        else:
            slot = next((s for s, j in self._running.items() if j.handle == handle), -1)
            if slot < 0:
                return None
            job = self._running.pop(slot)
        self._free.append(slot)
        self._release.add(slot)
        self._apply_switches()
        return job

    def metrics(self) -> dict:
        """Counts since the engine was made, and what it holds now."""
        names = ("emitted", "accepted", "aborted", "retracted")
        return {
            "rounds": self.rounds,
            "host_reads": self.host_reads,
            **{name: self._counts[name] for name in names},
            "finished": {
                reason: self._counts[f"finish_{reason}"]
                for reason in ("stop", "length", "error", "abort")
            },
            "auto_off": {r: self._counts[f"auto_off_{r}"] for r in REASONS},
            "queued": len(self._queue) + (self._filling is not None),
            "running": len(self._running),
            "planner": dataclasses.asdict(self.planner.counts),
        }

    def step(self, on_tokens: Callable | None = None) -> list:
        """One engine tick: a prefill chunk, a round, and last tick's results.

        Args:
          on_tokens: called with (handle, new tokens, from_prefill) as text grows.

        Returns:
          [(handle, Generation)] that finished.
        """
        for _ in range(self.options.chunks_per_tick):
            self._fill_next()
        if self._running:
            self._dispatch_round()
        # Results stay one round behind while there is work to overlap with.
        keep = 1 if self._running else 0
        while len(self._pending) > keep:
            self._settle()
        self._apply_switches()
        news, self._news = self._news, []
        if on_tokens is not None:
            for handle, new, from_prefill in news:
                on_tokens(handle, new, from_prefill)
        finished, self._ended = self._ended, []
        return finished

    def running(self, handle: int) -> Generation:
        """What is booked so far of a request that decodes in a slot.

        One whose last tokens are being told (`on_tokens`) still counts.
        """
        held = {job.handle: job.generation for job in self._running.values()}
        return (held | dict(self._ended))[handle]

    @property
    def busy(self) -> bool:
        return bool(
            self._queue
            or self._running
            or self._pending
            or self._ended
            or self._filling is not None
        )

    def run(self, on_tokens: Callable | None = None) -> dict[int, Generation]:
        """Steps until every submitted request has finished."""
        done: dict[int, Generation] = {}
        while self.busy:
            done.update(self.step(on_tokens))
        # An idle engine hands out slots in the same order every time.
        self._free.sort(reverse=True)
        return done

    def generate(
        self, prompts: list[list[int]], settings: Settings | list[Settings] = GREEDY
    ) -> list[Generation]:
        """Decodes prompts; results in the same order."""
        each = settings if isinstance(settings, list) else [settings] * len(prompts)
        handles = [self.submit(p, s) for p, s in zip(prompts, each, strict=True)]
        done = self.run()
        return [done[handle] for handle in handles]
