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
import functools
import time
from collections.abc import Callable, Iterable

import jax
import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.decode import auto_off, budget, memory, programs
from spec_jax.decode.budget import Choice, Planner
from spec_jax.decode.forward import Weights
from spec_jax.decode.jobs import Job, Made, RoundRecord, book, of_prefill, of_round
from spec_jax.decode.options import (
    EngineOptions,
    alternatives,
    check_proposes,
    emitted_ids,
    ladder_of,
    room_of,
)
from spec_jax.decode.recorder import make_recorder
from spec_jax.decode.request import (
    Generation,
    Offer,
    Settings,
    check_features,
    check_prompt,
    stop_ids_of,
)
from spec_jax.decode.slot_table import SlotTable
from spec_jax.decode.text import TextStream
from spec_jax.drafters.base import Drafter
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

GREEDY = Settings()


class Engine:
    """Decodes requests over a fixed batch of slots.

    It owns the donated state, what is in flight, and the table of its slots.
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
            drafter cannot propose the round's topology, or rows are to be
            recorded beside a drafter's own state, or the device states a limit that
            weights, state and programs exceed.
        """
        keeper = drafter
        if options.record is not None:
            if drafter is not None:
                raise UserError(
                    f"EngineOptions.record={options.record} is for plain decoding and "
                    f"drafter.name={drafter.name!r} drafts; leave one of them out"
                )
            keeper = make_recorder(options.record)
            weights = dataclasses.replace(weights, draft={}, frozen=())
        elif drafter is not None and weights.frozen is not None:
            lent = weights.frozen.replace(num_ids=options.num_ids)
            weights = dataclasses.replace(weights, frozen=lent)
        self.spec, self.weights, self.options = spec, weights, options
        self.drafter, self.mask_id = drafter, mask_id
        self.tokenizer = tokenizer
        topology = options.round.topology
        if drafter is not None:
            check_proposes(drafter, topology)
        self.window = topology.window(drafter.layout.num_draft) if drafter else 1
        self.room = room_of(options.max_context, self.window, spec)
        if self.room < 2:
            raise UserError(
                f"serve.max_context={options.max_context} leaves no room beside two "
                f"verify windows of {self.window}; raise it"
            )
        self.offer = Offer(
            vocab_size=emitted_ids(options, spec),
            penalties=options.penalties,
            logprobs=alternatives(options, spec),
            text=tokenizer is not None,
            num_draft=self.window - 1,
            is_chain=topology.is_chain,
            features=options.record is not None,
        )
        self.ladder = ladder_of(options, self.window, plain=drafter is None)
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
        self._news: collections.deque[tuple[int, list[int], bool]] = collections.deque()
        self.table = SlotTable.of(options.slots)
        self._pending: collections.deque = collections.deque()
        self._next_handle = 0
        make_state = functools.partial(
            programs.fresh_state,
            spec,
            keeper,
            options,
            weights.target["params"]["embed"].dtype,
        )
        shapes = jax.eval_shape(make_state)
        self._programs = programs.compile_programs(
            spec, keeper, options, self.ladder, weights, shapes
        )
        self.memory = memory.plan_memory(weights, shapes, self._programs)
        memory.check_memory(self.memory, options.slots, options.max_context)
        self.state = make_state()

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
        job = Job(
            self._next_handle,
            Generation(prompt=tokens),
            settings,
            text,
            speculating=settings.speculate and self.drafter is not None,
        )
        self._next_handle += 1
        self.table.queue.append(job)
        return job.handle

    def _fill_next(self) -> None:
        """Dispatches one prefill chunk, if a request waits and a slot is free."""
        job = self.table.next_to_fill()
        if job is None:
            return
        prompt, start = job.to_fill, job.filled
        left = len(prompt) - start
        buckets = self.options.prefill_buckets
        size = next((b for b in buckets if b >= left), buckets[-1])
        piece = prompt[start : start + size]
        is_last = start + len(piece) == len(prompt)
        following = (job.known or 0) if is_last else prompt[start + len(piece)]
        chunk = programs.make_chunk(
            self.spec,
            self.options,
            piece,
            following,
            start,
            self.table.filling_slot,
            size,
            job,
            is_last,
        )
        self.state, result = self._programs[size](self.weights, self.state, chunk)
        job.filled += len(piece)
        if is_last:
            self._pending.append(("first", dict([self.table.filled()]), result))

    def _choose(self) -> Choice:
        """The next round's program and budget."""
        live, running = self.table.handles, self.table.running
        drafts = any(job.speculating for job in running.values())
        if self.drafter is None or (not drafts and self.options.plain):
            requests = self.ladder.requests(max(live) + 1)
            return budget.plain(self.planner.terms, requests)
        own_rows = {}
        for slot, job in running.items():
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
        live = self.table.handles
        self._in_flight.append(
            RoundRecord(
                choice,
                len(live),
                counts.not_ready > late,
                counts.stale - stale,
                time.perf_counter(),
                handles=live,
            )
        )
        if choice.draft:
            plan = self.options.round.plan
            rows = choice.rows if plan.is_packed else choice.requests * self.window
            program = self._programs["round", choice.requests, rows]
            extra = [np.asarray(choice.budget, np.int32)] if plan.is_planned else []
        else:
            program, extra = self._programs["plain", choice.requests], []
        self.state, result = program(self.weights, self.state, *extra)
        for leaf in jax.tree.leaves(result):
            leaf.copy_to_host_async()
        self.planner.dispatched(self.rounds, live, result.survival_BM)
        self.rounds += 1
        self._pending.append(("round", dict(self.table.running), result))

    def _book_round(self, result) -> None:
        """What a round took, and the rows it ran."""
        record = self._in_flight.popleft()
        now = time.perf_counter()
        record.seconds = now - max(record.started, self._settled_at)
        record.verify_lens = result.verify_len_B[result.ran_B].tolist()
        self.planner.observe(record.choice, result.num_accepted_B, result.ran_B)
        self._settled_at = now
        self.trace.append(record)

    def _settle(self) -> None:
        """Reads the oldest pending result and books it."""
        jobs: dict[int, Job]
        kind, jobs, result = self._pending.popleft()
        result = self.fetch(result)
        if kind == "round":
            self._book_round(result)
        for slot, job in jobs.items():
            if self.table.running.get(slot) is not job:
                continue
            if kind == "round" and not result.ran_B[slot]:
                continue
            made = of_prefill(result) if kind == "first" else of_round(result, slot)
            new, found = book(job, made, result.logprobs)
            if kind == "round":
                self._count_drafts(job, made)
            self._counts["emitted"] += len(new)
            if new:
                self._news.append((job.handle, new, kind == "first"))
            if found:
                # The device does not know: it is told, and what it has emitted
                # since is dropped.
                self.table.left.add(slot)
            if made.done or found:
                if job.settings.features:
                    self._hand_out_rows(job, slot)
                self.table.end(slot)
                stopped = made.stopped or found
                self._end(job, "error" if made.bad else "stop" if stopped else "length")

    def _hand_out_rows(self, job: Job, slot: int) -> None:
        """The features of a request that ends, before its slot is another's."""
        kept = self._programs["rows"](self.state.draft, np.asarray(slot, np.int32))
        kept = self.fetch({name: kept[name] for name in ("features", "hidden")})
        count = job.length - 1
        job.generation.features = kept["features"][:count].copy()
        job.generation.hidden = kept["hidden"][:count].copy()

    def _count_drafts(self, job: Job, made: Made) -> None:
        """A round's acceptance, for the counts and for `auto_off`."""
        self._counts["accepted"] += made.accepted
        if made.drafted and self.options.auto_off is not None:
            job.drafted_rounds.append((made.accepted, made.drafted))
            if len(job.drafted_rounds) > self.options.auto_off.rounds:
                job.drafted_rounds.popleft()

    def _end(self, job: Job, reason: str) -> None:
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
        left = self.table.left
        if not (left or always):
            return
        leave_B = np.zeros(self.options.slots, bool)
        leave_B[list(left)] = True
        speculate_B = np.zeros(self.options.slots, bool)
        for slot, job in self.table.running.items():
            speculate_B[slot] = job.speculating
        left.clear()
        # As they are: making device arrays of them first would compile.
        slots = self._programs["switch"](self.state.slots, leave_B, speculate_B)
        self.state = dataclasses.replace(self.state, slots=slots)

    def _switch_speculation(self) -> None:
        """Turns drafting off (or on again) where the options say so."""
        limits = self.options.auto_off
        if limits is None or self.drafter is None:
            return
        changed, reasons = auto_off.switch(limits, list(self.table.running.values()))
        self._counts.update(f"auto_off_{reason}" for reason in reasons)
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
        if self.table.waits(handle):
            return False
        job = self._pull(handle)
        if job is None:
            return False
        job.filled = 0
        self._counts["retracted"] += 1
        self.table.queue.appendleft(job)
        return True

    def _pull(self, handle: int) -> Job | None:
        """Takes a request from where it is, and tells the device."""
        job = self.table.pull(handle)
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
            "auto_off": {r: self._counts[f"auto_off_{r}"] for r in auto_off.REASONS},
            "queued": self.table.waiting,
            "running": len(self.table.running),
            "planner": dataclasses.asdict(self.planner.counts),
            "memory": self.memory.as_metrics(),
        }

    def step(self, on_tokens: Callable | None = None) -> list:
        """One engine tick: a prefill chunk, a round, and last tick's results.

        Args:
          on_tokens: called with (handle, new tokens, from_prefill) as text grows,
            in the order in which it grew. What it raises leaves this tick; what
            was not told by then is told by the next, and so is who finished.

        Returns:
          [(handle, Generation)] that finished.
        """
        for _ in range(self.options.chunks_per_tick):
            self._fill_next()
        if self.table.running:
            self._dispatch_round()
        # Results stay one round behind while there is work to overlap with.
        keep = 1 if self.table.running else 0
        while len(self._pending) > keep:
            self._settle()
        self._apply_switches()
        while self._news:
            news = self._news.popleft()
            if on_tokens is not None:
                on_tokens(*news)
        finished, self._ended = self._ended, []
        return finished

    def running(self, handle: int) -> Generation:
        """What is booked so far of a request, whether it waits, fills or decodes.

        One whose last tokens are being told (`on_tokens`) still counts.

        Raises:
          KeyError: there is no such request, or `step` has handed it out.
        """
        held = {job.handle: job.generation for job in self.table.jobs}
        return (held | dict(self._ended))[handle]

    @property
    def busy(self) -> bool:
        return bool(self.table.jobs or self._pending or self._ended)

    def run(self, on_tokens: Callable | None = None) -> dict[int, Generation]:
        """Steps until every submitted request has finished."""
        done: dict[int, Generation] = {}
        while self.busy:
            done.update(self.step(on_tokens))
        self.table.rest()
        return done

    def generate(
        self, prompts: list[list[int]], settings: Settings | list[Settings] = GREEDY
    ) -> list[Generation]:
        """Decodes prompts; results in the same order."""
        each = settings if isinstance(settings, list) else [settings] * len(prompts)
        handles = [self.submit(p, s) for p, s in zip(prompts, each, strict=True)]
        done = self.run()
        return [done[handle] for handle in handles]
