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
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.decode import prefill, step
from spec_jax.decode.forward import Weights
from spec_jax.decode.request import Generation, Settings, check_prompt
from spec_jax.decode.state import DecodeState, Slots, empty_slots
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters.base import Drafter
from spec_jax.sampling.transform import Sampling
from spec_jax.target.cache import init_cache
from spec_jax.target.spec import TargetSpec

NUM_STOP_IDS = 8
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
    """

    slots: int = 1
    max_context: int = 1024
    prefill_buckets: tuple[int, ...] = (32, 128)
    chunks_per_tick: int = 1
    plain: bool = True
    round: RoundOptions = dataclasses.field(default_factory=RoundOptions)

    def __post_init__(self):
        if self.slots < 1:
            raise UserError(f"serve.slots={self.slots} must be at least 1")
        buckets = self.prefill_buckets
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise UserError(
                f"serve.prefill_buckets={buckets} must be ascending positive lengths"
            )


def room_of(max_context: int, window: int, spec: TargetSpec) -> int:
    """Tokens that one slot can hold, prompt and answer together.

    Two windows of slack: a round runs before the last one's result is read.
    """
    return min(max_context - 2 * window, spec.max_context)


@dataclasses.dataclass
class _Job:
    handle: int
    generation: Generation
    settings: Settings
    filled: int = 0
    round: int = 0


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
    ):
        """Compiles every program; nothing compiles later.

        Args:
          spec: target sizes.
          weights: target parameters, and the drafter's with one.
          options: shapes.
          drafter: None for plain decoding only.
          mask_id: the drafter's mask token, refused in prompts.

        Raises:
          UserError: the allocation cannot hold a prompt and a round.
        """
        self.spec, self.weights, self.options = spec, weights, options
        self.drafter, self.mask_id = drafter, mask_id
        self.window = drafter.layout.window if drafter else 1
        taps = drafter.needs.layer_ids if drafter else ()
        self.room = room_of(options.max_context, self.window, spec)
        if self.room < 2:
            raise UserError(
                f"serve.max_context={options.max_context} leaves no room beside two "
                f"verify windows of {self.window}; raise it"
            )
        self.host_reads = 0
        self.rounds = 0
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
            slots=empty_slots(o.slots, NUM_STOP_IDS),
        )

    def _compile(self, taps):
        spec, drafter, options = self.spec, self.drafter, self.options
        abstract = jax.eval_shape(lambda x: x, (self.weights, self.state))

        def aot(function, *args):
            return jax.jit(function, donate_argnums=1).lower(*abstract, *args).compile()

        def plain(weights, state):
            return step.round_step(
                spec, drafter, taps, options.round, weights, state, speculate=False
            )

        programs: dict = {}
        if drafter is None or options.plain:
            programs["plain"] = aot(plain)
        if drafter is not None:

            def speculative(weights, state):
                return step.round_step(
                    spec, drafter, taps, options.round, weights, state
                )

            programs["round"] = aot(speculative)

        def fill(weights, state, chunk):
            return prefill.prefill_step(spec, drafter, taps, weights, state, chunk)

        for size in options.prefill_buckets:
            chunk = jax.eval_shape(lambda x: x, self._chunk([0], 0, 0, 0, size))
            programs[size] = aot(fill, chunk)
        return programs

    def _stops(self, settings: Settings) -> tuple[int, ...]:
        """Ids that end a request; refused before it is queued."""
        ends = () if settings.ignore_eos else self.spec.eos_ids
        stops = tuple(dict.fromkeys((*settings.stop_ids, *ends)))
        if len(stops) > NUM_STOP_IDS:
            raise UserError(
                f"stop_ids has {len(stops)} ids with the target's own; at most "
                f"{NUM_STOP_IDS} are supported"
            )
        if any(not 0 <= s < self.spec.vocab_size for s in stops):
            raise UserError(
                f"stop_ids={stops} must be token ids of the target, 0 to "
                f"{self.spec.vocab_size - 1}"
            )
        return stops

    def _chunk(self, tokens, following, start, slot, size, job=None, is_last=False):
        settings = job.settings if job else Settings()
        stops = self._stops(settings)
        # Negative seeds are nobody's: requests without one never share a stream
        # with a seeded request.
        handle = job.handle if job else 0
        seed = -1 - handle if settings.seed is None else settings.seed
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
            remaining_B=one(settings.max_new_tokens),
            active_B=one(False, bool),
            speculate_B=one(settings.speculate and self.drafter is not None, bool),
            seed_B=one(seed),
            round_B=one(0),
            sampling=Sampling(
                greedy_B=one(greedy, bool),
                temperature_B=one(1.0 if greedy else settings.temperature, np.float32),
                top_k_B=one(settings.top_k),
                top_p_B=one(settings.top_p, np.float32),
                min_p_B=one(settings.min_p, np.float32),
            ),
            stop_ids_BX=jnp.asarray(stop_X),
        )
        return prefill.Chunk(
            tokens_T=jnp.asarray(padded_T),
            next_token=scalar(following),
            start=scalar(start),
            count=scalar(len(tokens)),
            slot=scalar(slot),
            is_last=scalar(is_last, bool),
            request=request,
        )

    def fetch(self, tree):
        """The one door through which the host reads the device."""
        self.host_reads += 1
        return jax.device_get(tree)

    def submit(self, prompt: Iterable[int], settings: Settings = GREEDY) -> int:
        """Queues a request; returns its handle.

        Raises:
          UserError: the prompt cannot be served (see `check_prompt`).
        """
        tokens = [int(t) for t in prompt]
        check_prompt(
            tokens,
            settings,
            vocab_size=self.spec.vocab_size,
            mask_id=self.mask_id,
            room=self.room,
        )
        self._stops(settings)
        job = _Job(self._next_handle, Generation(prompt=tokens), settings)
        self._next_handle += 1
        self._queue.append(job)
        return job.handle

    def _fill_next(self) -> None:
        """Dispatches one prefill chunk, if a request waits and a slot is free."""
        if self._filling is None:
            if not self._queue or not self._free:
                return
            self._filling, self._filling_slot = self._queue.popleft(), self._free.pop()
        job, slot = self._filling, self._filling_slot
        prompt, start = job.generation.prompt, job.filled
        left = len(prompt) - start
        buckets = self.options.prefill_buckets
        size = next((b for b in buckets if b >= left), buckets[-1])
        piece = prompt[start : start + size]
        is_last = start + len(piece) == len(prompt)
        following = 0 if is_last else prompt[start + len(piece)]
        chunk = self._chunk(piece, following, start, slot, size, job, is_last)
        self.state, result = self._programs[size](self.weights, self.state, chunk)
        job.filled += len(piece)
        if is_last:
            self._running[slot] = job
            self._pending.append(("first", {slot: job}, result))
            self._filling = None

    def _dispatch_round(self) -> None:
        speculate = any(job.settings.speculate for job in self._running.values())
        name = "round" if speculate else "plain"
        if name not in self._programs:  # one of the two may not be compiled
            (name,) = self._programs.keys() & {"round", "plain"}
        self.state, result = self._programs[name](self.weights, self.state)
        for leaf in jax.tree.leaves(result):
            leaf.copy_to_host_async()
        self.rounds += 1
        self._pending.append(("round", dict(self._running), result))

    def _settle(self, finished: list, on_tokens) -> None:
        """Reads the oldest pending result and books it."""
        jobs: dict[int, _Job]
        kind, jobs, result = self._pending.popleft()
        result = self.fetch(result)
        for slot, job in jobs.items():
            if self._running.get(slot) is not job:
                continue
            generation = job.generation
            if kind == "first":
                new = [] if result.bad else [int(result.token)]
                done, stopped, bad = result.finished, result.stopped, result.bad
            else:
                if not result.ran_B[slot]:
                    continue
                count = int(result.emitted_B[slot])
                new = result.tokens_BW[slot, :count].tolist()
                generation.emitted.append(count)
                generation.accepted.append(int(result.num_accepted_B[slot]))
                generation.drafted.append(int(result.verify_len_B[slot]) - 1)
                done, stopped = result.finished_B[slot], result.stopped_B[slot]
                bad = result.bad_B[slot]
            generation.tokens.extend(new)
            if on_tokens is not None and new:
                on_tokens(job.handle, new, kind == "first")
            if done:
                generation.finish_reason = (
                    "error" if bad else "stop" if stopped else "length"
                )
                del self._running[slot]
                self._free.append(slot)
                finished.append((job.handle, generation))

    def step(self, on_tokens: Callable | None = None) -> list:
        """One engine tick: a prefill chunk, a round, and last tick's results.

        Args:
          on_tokens: called with (handle, new tokens, from_prefill) as text grows.

        Returns:
          [(handle, Generation)] that finished.
        """
        finished: list = []
        for _ in range(self.options.chunks_per_tick):
            self._fill_next()
        if self._running:
            self._dispatch_round()
        # Results stay one round behind while there is work to overlap with.
        keep = 1 if self._running else 0
        while len(self._pending) > keep:
            self._settle(finished, on_tokens)
        return finished

    def running(self, handle: int) -> Generation:
        """What is booked so far of a request that decodes in a slot."""
        jobs = (j for j in self._running.values() if j.handle == handle)
        return next(jobs).generation

    @property
    def busy(self) -> bool:
        return bool(
            self._queue or self._running or self._pending or self._filling is not None
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
