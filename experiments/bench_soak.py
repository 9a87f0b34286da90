"""A soak: thousands of requests come, leave and are taken back at random.

One engine in `compact` mode with a cost table, on a random float32 target, and
a shorter one on a real target. Requests differ in everything a request may ask
for. Afterwards every greedy answer is compared with a plain engine's, and what
the run must leave as it was (slots, programs, memory, counts) is looked at.
"""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments import random_target, runtime, serving, training
from spec_jax.config import schema
from spec_jax.core.calibration import AdditiveCost, CostTable
from spec_jax.core.verify_layout import Ladder, even_ladder
from spec_jax.decode import plan
from spec_jax.decode.auto_off import AutoOff
from spec_jax.decode.budget import BudgetOptions, Choice
from spec_jax.decode.engine import Engine, EngineOptions
from spec_jax.decode.forward import Weights
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.request import Generation, Settings
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import compiles, identity

VOCAB, EOS, NUM_DRAFT = 64, 3, 4
REAL_SLOTS, REAL_DRAFT, REAL_NEW_TOKENS = 4, 3, 16
REPEATED = 40  # seeded requests that are decoded again, alone
PHASE = 150  # ticks between the loads of `_phase`
SAMPLE_EVERY = 100  # ticks between two looks at memory


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    settings: Settings


@dataclasses.dataclass(frozen=True)
class Part:
    """One engine of the soak, and how its requests are made.

    Attributes:
      name: in the report.
      engine: decodes them.
      reference: the same target without a drafter.
      requests: to come, in order.
    """

    name: str
    engine: Engine
    reference: Engine
    requests: list[Request]


@dataclasses.dataclass
class Log:
    """What a soak left behind.

    Attributes:
      asked: handle -> request.
      done: handle -> generation.
      aborted, retracted: calls that found their request.
      rss_mb, buffers: resident memory and live device arrays, sampled.
    """

    asked: dict[int, Request] = dataclasses.field(default_factory=dict)
    done: dict[int, Generation] = dataclasses.field(default_factory=dict)
    aborted: int = 0
    retracted: int = 0
    rss_mb: list[float] = dataclasses.field(default_factory=list)
    buffers: list[int] = dataclasses.field(default_factory=list)


def cost_table(ladder: Ladder) -> CostTable:
    """Round times under which every way of planning pays at some time."""
    sizes = tuple(size for size, _ in ladder.buckets)
    rows = (1, ladder.buckets[-1][1][-1])
    alpha = tuple(2e-5 * size for size in sizes)
    cost = AdditiveCost(1e-3, sizes, alpha, rows, (0.0, 2e-5 * rows[1]))
    return CostTable(cost, sizes, tuple(9e-4 + a for a in alpha))


def engine_of(spec, weights, drafter, serve: schema.Serve, ladder, **options) -> Engine:
    """A compact engine with its planner, or (without a drafter) a plain one."""
    planned = {}
    if drafter is not None:
        planned = {
            "round": RoundOptions(plan=PlanOptions(mode=plan.COMPACT)),
            "ladder": ladder,
            "cost": cost_table(ladder),
            "budget": BudgetOptions(probe_every=16),
        }
    return Engine(
        spec,
        weights,
        EngineOptions(
            slots=serve.slots,
            max_context=serve.max_context,
            prefill_buckets=serve.prefill_buckets or (16, 48),
            **planned,
            **options,
        ),
        drafter,
        -1 if drafter is None else serving.mask_id_of(drafter),
    )


def random_requests(
    rng: random.Random,
    count: int,
    token: Callable[[], int],
    *,
    room: int,
    max_new_tokens: int,
    num_draft: int,
    rules: bool,
) -> list[Request]:
    """Requests that differ in everything; three in four are greedy."""
    made = []
    for _ in range(count):
        length = min(int(rng.expovariate(1 / 20)) + 1, 64)
        changes: dict[str, Any] = {"max_new_tokens": rng.randint(1, max_new_tokens)}
        if rng.random() < 0.25:
            changes |= {
                "temperature": rng.choice([0.3, 0.7, 1.0, 1.5]),
                "top_k": rng.choice([0, 0, 5, 20]),
                "top_p": rng.choice([1.0, 0.9, 0.6]),
                "min_p": rng.choice([0.0, 0.0, 0.1]),
                "seed": rng.choice([None, rng.randrange(2**31)]),
            }
            if rules and rng.random() < 0.4:
                changes |= {
                    "presence_penalty": rng.choice([0.0, 0.8]),
                    "repetition_penalty": rng.choice([1.0, 1.3]),
                    "logit_bias": ((token(), 2.0),),
                    "logprobs": True,
                    "top_logprobs": rng.choice([0, 1]),
                }
        way = rng.random()
        if way < 0.15:
            changes["speculate"] = False
        elif way < 0.35:
            changes["num_draft"] = rng.randint(0, num_draft)
        if rng.random() < 0.2:
            changes["stop_ids"] = (token(),)
        changes["ignore_eos"] = rng.random() < 0.3
        length = min(length, room - changes["max_new_tokens"])
        prompt = tuple(token() for _ in range(length))
        made.append(Request(prompt, Settings(**changes)))
    return made


def random_part(cfg: schema.BenchSoak) -> Part:
    """The random target, with a drafter that knows its bigrams."""
    spec = random_target.spec_of(VOCAB, eos_ids=(EOS,))
    params = random_target.params_of(spec, cfg.seed, sharp=3.0)
    drafter, weights = random_target.bigram_dspark(
        spec, params, NUM_DRAFT, cfg.seed, noise=0.5
    )
    serve = cfg.serve
    ladder = even_ladder(
        runtime.slot_buckets(serve.slots), NUM_DRAFT + 1, cfg.row_buckets
    )
    engine = engine_of(
        spec,
        weights,
        drafter,
        serve,
        ladder,
        penalties=True,
        logprobs=1,
        auto_off=AutoOff(min_accept_length=1.2, rounds=12, max_context=100),
    )
    reference = engine_of(spec, Weights(params), None, serve, None)
    rng = random.Random(cfg.seed)
    requests = random_requests(
        rng,
        cfg.requests,
        lambda: rng.randrange(VOCAB - 1),  # the last one is the drafter's mask
        room=engine.room,
        max_new_tokens=serve.max_new_tokens,
        num_draft=NUM_DRAFT,
        rules=True,
    )
    return Part("random", engine, reference, requests)


def real_part(cfg: schema.BenchSoak) -> Part:
    """The recipe's target, with its drafter or one of random weights.

    Raises:
      UserError: no such target or drafter, or they do not fit.
    """
    target, params = serving.load_serving_target(cfg.target)
    if cfg.drafter:
        exported = serving.load_drafter(
            cfg.drafter, target, num_draft=cfg.serve.num_draft
        )
        drafter, draft, frozen = serving.unpack(exported, params)
        weights = Weights(params, draft, frozen)
    else:
        options = {"num_layers": 1, "num_draft": cfg.serve.num_draft or REAL_DRAFT}
        options["mask_id"] = 16 if target.spec.vocab_size > 16 else 0
        drafter = base.load("dflash", options, target.spec)
        draft = jax.jit(drafter.init)(jax.random.key(cfg.seed))
        weights = Weights(params, draft, frozen_from_params(params))
    slots = min(cfg.serve.slots, REAL_SLOTS)
    serve = dataclasses.replace(cfg.serve, slots=slots)
    num_draft, mask_id = drafter.layout.num_draft, serving.mask_id_of(drafter)
    rows = min(cfg.row_buckets, 2)
    ladder = even_ladder(runtime.slot_buckets(slots), num_draft + 1, rows)
    engine = engine_of(target.spec, weights, drafter, serve, ladder)
    reference = engine_of(target.spec, Weights(params), None, serve, None)
    rng = random.Random(cfg.seed + 1)

    def token() -> int:
        found = rng.randrange(target.spec.vocab_size)
        return found if found != mask_id else found + 1

    requests = random_requests(
        rng,
        cfg.real_requests,
        token,
        room=engine.room,
        max_new_tokens=min(serve.max_new_tokens, REAL_NEW_TOKENS),
        num_draft=num_draft,
        rules=False,
    )
    return Part("real", engine, reference, requests)


# ---- Which programs ran, and at which edges of their buckets.


Edge = tuple[str, int, int]  # ("rows", R, granted rows) or ("plain", R, 0)


def edges_of(ladder: Ladder) -> dict[Edge, tuple[int, int]]:
    """Every edge -> the (R, T) bucket that it belongs to.

    A bucket's edges are the most rows it holds and the fewest that the bucket
    before it does not; the first bucket of an R has the upper one alone.
    """
    found: dict[Edge, tuple[int, int]] = {}
    for requests, each in ladder.buckets:
        found["plain", requests, 0] = (requests, requests)
        for index, rows in enumerate(each):
            if index:
                found["rows", requests, each[index - 1] + 1] = (requests, rows)
            found["rows", requests, rows] = (requests, rows)
    return found


class Watch:
    """Sees every choice of an engine's planner, and plants some at the end."""

    def __init__(self, engine: Engine):
        self.engine, self.edges = engine, edges_of(engine.ladder)
        self.visited: dict[Edge, int] = dict.fromkeys(self.edges, 0)
        self.programs: set[tuple[bool, int, int]] = set()
        self.planted = 0
        self._wanted: list[Edge] = []
        self._decide = engine.planner.decide
        self._choose = engine._choose
        engine.planner.decide = self.decide  # type: ignore[method-assign]
        engine._choose = self.choose  # type: ignore[method-assign]

    def close(self) -> None:
        """Leaves the engine as it was."""
        del self.engine.planner.decide, self.engine._choose

    def choose(self) -> Choice:
        """What runs, plain rounds included."""
        choice = self._choose()
        self.programs.add((choice.draft, choice.requests, choice.rows))
        if not choice.draft:
            self._visit(("plain", choice.requests, 0))
        return choice

    def decide(self, round_index, live, own_rows) -> Choice:
        """The planner's choice, or a planted one where all R slots can take it."""
        requests = self.engine.ladder.requests(max(live) + 1)
        if self._wanted and not own_rows and len(live) == requests:
            for edge in self._wanted:
                if edge[1] == requests:
                    self._wanted.remove(edge)
                    self.planted += 1
                    self._visit(edge)
                    rows = self.edges[edge][1]
                    return Choice(True, edge[2] - requests, requests, rows)
        choice = self._decide(round_index, live, own_rows)
        if choice.draft:
            planned = len(live) - len(own_rows)
            rows = planned + sum(own_rows.values()) + choice.budget
            self._visit(("rows", choice.requests, rows))
        return choice

    def _visit(self, edge: Edge) -> None:
        if edge in self.visited:
            self.visited[edge] += 1

    @property
    def missing(self) -> list[Edge]:
        return [edge for edge, count in self.visited.items() if not count]

    def force(self, log: Log, token: int = 0) -> None:
        """Requests that fill R slots, so that what was not visited is."""
        engine = self.engine
        for requests, _ in engine.ladder.buckets:
            for kind in ("plain", "rows"):
                wanted = [e for e in self.missing if e[:2] == (kind, requests)]
                if not wanted:
                    continue
                settings = Settings(
                    max_new_tokens=engine.room - 2,
                    speculate=kind == "rows",
                    ignore_eos=True,
                )
                for _ in range(requests):
                    request = Request((token, token + 1), settings)
                    log.asked[engine.submit(request.prompt, settings)] = request
                self._wanted = [e for e in wanted if kind == "rows"]
                while engine.busy:
                    log.done.update(engine.step())
                    if not [e for e in self.missing if e in wanted]:
                        for handle in set(log.asked) - set(log.done):
                            log.aborted += engine.abort(handle)
                self._wanted = []


# ---- The soak.


def _phase(tick: int, join: float) -> float:
    """The chance of a join: full, half and few, in turn."""
    return join * (1.0, 0.5, 0.08)[tick // PHASE % 3]


def resident_mb() -> float:
    """Memory that this process holds, in MiB; 0 where the system does not tell."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text().split("\n")
    except OSError:
        return 0.0
    found = [x.split()[1] for x in lines if x.startswith("VmRSS:")]
    return int(found[0]) / 1024 if found else 0.0


def look_at_memory(log: Log) -> None:
    gc.collect()
    log.rss_mb.append(resident_mb())
    log.buffers.append(len(jax.live_arrays()))


def warm_up(engine: Engine, requests: list[Request]) -> None:
    """Everything that a request can meet, once."""
    engine.generate([list(r.prompt) for r in requests], [r.settings for r in requests])
    for leave in (engine.retract, engine.abort):
        handle = engine.submit([0, 1], Settings(max_new_tokens=8))
        for _ in range(3):
            engine.step()
        leave(handle)
    engine.run()


def soak(part: Part, cfg: schema.BenchSoak, watch: Watch) -> Log:
    """Runs every request of a part, and then what the programs still lack."""
    engine, rng, log = part.engine, random.Random(cfg.seed + 2), Log()
    waiting = list(reversed(part.requests))
    tick, told = 0, 0
    look_at_memory(log)
    while waiting or engine.busy:
        join = _phase(tick, cfg.join)
        while waiting and rng.random() < join:
            if engine.metrics()["queued"] > 2 * engine.options.slots:
                break
            request = waiting.pop()
            handle = engine.submit(request.prompt, request.settings)
            log.asked[handle] = request
        for chance, leave in (
            (cfg.abort, engine.abort),
            (cfg.retract, engine.retract),
        ):
            if rng.random() < chance:
                recent = range(max(0, engine_next(engine) - 40), engine_next(engine))
                open_now = [h for h in recent if h in log.asked and h not in log.done]
                if open_now:
                    left = leave(rng.choice(open_now))
                    log.aborted += left and leave == engine.abort
                    log.retracted += left and leave == engine.retract
        log.done.update(engine.step())
        tick += 1
        if tick % SAMPLE_EVERY == 0:
            look_at_memory(log)
        if len(log.done) - told >= max(len(part.requests) // 10, 1):
            told = len(log.done)
            training.say(f"{part.name}: {told} of {len(part.requests)} requests")
    watch.force(log)
    look_at_memory(log)
    return log


def engine_next(engine: Engine) -> int:
    """The handle that the next request will have."""
    return engine._next_handle


# ---- What must be true afterwards.


def check_outputs(part: Part, log: Log, share: float) -> dict[str, Any]:
    """Greedy answers against plain decoding's; an aborted one is a beginning."""
    greedy = [h for h, r in log.asked.items() if r.settings.temperature == 0]
    greedy = greedy[: round(share * len(greedy))]
    expected = part.reference.generate(
        [list(log.asked[h].prompt) for h in greedy],
        [
            dataclasses.replace(
                log.asked[h].settings, num_draft=None, logprobs=False, top_logprobs=0
            )
            for h in greedy
        ],
    )
    wrong, ties, first = 0, 0, ""
    for handle, plain in zip(greedy, expected, strict=True):
        got, request = log.done[handle], log.asked[handle]
        is_whole = got.finish_reason != "abort"
        want = plain.tokens if is_whole else plain.tokens[: len(got.tokens)]
        same_end = not is_whole or got.finish_reason == plain.finish_reason
        if got.tokens == want and same_end:
            continue
        found = identity.compare(
            part.engine.spec,
            part.engine.weights.target,
            part.engine,
            [request.prompt],
            [want],
            [got.tokens],
            dataclasses.replace(request.settings, max_new_tokens=max(len(want), 1))
            if not is_whole
            else request.settings,
        )
        ties += found.near_ties
        if not found.identical or (got.tokens == want and not same_end):
            wrong += 1
            first = first or (
                f"request {handle}: {found.first_difference or got.finish_reason}"
            )
    return {
        "greedy_compared": len(greedy),
        "wrong_outputs": wrong,
        "near_ties": ties,
        "first_wrong": first,
    }


def check_seeds(part: Part, log: Log) -> dict[str, int]:
    """Seeded requests with a window of their own, again and alone."""
    own = [
        handle
        for handle, request in log.asked.items()
        if request.settings.temperature > 0
        and request.settings.seed is not None
        and (request.settings.num_draft is not None or not request.settings.speculate)
    ][:REPEATED]
    differ = 0
    for handle in own:
        request, got = log.asked[handle], log.done[handle]
        again = part.engine.generate([list(request.prompt)], request.settings)[0]
        differ += again.tokens[: len(got.tokens)] != got.tokens
    return {"seeds_repeated": len(own), "seeds_not_reproduced": differ}


def check_books(part: Part, log: Log, before: dict) -> dict[str, Any]:
    """Slots, queue and counts after the last request."""
    engine, after = part.engine, part.engine.metrics()
    finished = {
        reason: count - before["finished"][reason]
        for reason, count in after["finished"].items()
    }
    emitted = sum(len(g.tokens) for g in log.done.values())
    is_balanced = (
        set(log.done) == set(log.asked)
        and sum(finished.values()) == len(log.asked)
        and after["emitted"] - before["emitted"] == emitted
        and finished["abort"] == after["aborted"] - before["aborted"] == log.aborted
        and after["retracted"] - before["retracted"] == log.retracted
        and finished["error"] == 0
        and all(g.finish_reason for g in log.done.values())
    )
    idle = after["running"] == after["queued"] == 0 and not engine.busy
    slots = engine.state.slots
    device_idle = not bool(np.asarray(slots.active_B).any())
    return {
        "finished": finished,
        "emitted": emitted,
        "rounds": after["rounds"] - before["rounds"],
        "auto_off": {
            reason: count - before["auto_off"][reason]
            for reason, count in after["auto_off"].items()
        },
        "metrics_balanced": bool(is_balanced),
        "slots_returned": sorted(engine._free) == list(range(engine.options.slots))
        and idle
        and device_idle,
    }


def growth(values: list[float]) -> float:
    """How much the last value exceeds those of the first fifth."""
    return values[-1] - max(values[: max(len(values) // 5, 1)])


def run_part(part: Part, cfg: schema.BenchSoak) -> dict[str, Any]:
    """Soaks one engine and checks what is left."""
    warm_up(part.engine, part.requests[: part.engine.options.slots])
    watch = Watch(part.engine)
    before = part.engine.metrics()
    try:
        with compiles.counting() as count:
            log = soak(part, cfg, watch)
    finally:
        watch.close()
    books = check_books(part, log, before)
    grown = growth(log.rss_mb)
    programs = {key for key in part.engine._programs if isinstance(key, tuple)}
    visited = sum(bool(n) for n in watch.visited.values())
    return {
        "requests": len(part.requests),
        "forced_requests": len(log.asked) - len(part.requests),
        **check_outputs(part, log, cfg.reference_share),
        **check_seeds(part, log),
        "compiles_after_warmup": count.compiles,
        **books,
        "aborted": log.aborted,
        "retracted": log.retracted,
        "programs": len(programs),
        "programs_run": len(watch.programs),
        "buckets_visited": visited,
        "buckets_total": len(watch.visited),
        "buckets_planted": watch.planted,
        "memory_growth_mb": grown,
        "memory_mb": log.rss_mb[-1],
        "buffers_growth": log.buffers[-1] - log.buffers[0],
        "passed": bool(
            books["slots_returned"]
            and books["metrics_balanced"]
            and not count.compiles
            and visited == len(watch.visited)
            and grown <= cfg.max_growth_mb
            # The relay's ring may have been empty before.
            and log.buffers[-1] - log.buffers[0] <= part.engine.planner.relay.lag + 1
        ),
    }


def main(cfg: schema.BenchSoak, workdir: pathlib.Path) -> dict[str, Any]:
    """Soaks the random target, then the real one where it is asked for."""
    del workdir  # nothing is kept but the report
    makers = [random_part] + ([real_part] if cfg.real_requests else [])
    parts: dict[str, dict[str, Any]] = {}
    for make in makers:
        part = make(cfg)
        training.say(f"{part.name}: {len(part.requests)} requests, compiled")
        found = run_part(part, cfg)
        found["passed"] = (
            found["passed"]
            and not found["wrong_outputs"]
            and not found["seeds_not_reproduced"]
        )
        parts[part.name] = found
        training.say(
            f"{part.name}: {found['wrong_outputs']} wrong, {found['near_ties']} near "
            f"ties, {found['compiles_after_warmup']} compiles"
        )
        del part
        gc.collect()

    def total(name: str) -> Any:
        return sum(found[name] for found in parts.values())

    summed = (
        "requests",
        "wrong_outputs",
        "near_ties",
        "compiles_after_warmup",
        "aborted",
        "retracted",
        "buckets_visited",
        "buckets_total",
        "seeds_not_reproduced",
    )
    reasons = ("stop", "length", "error", "abort")
    return {
        **{name: total(name) for name in summed},
        "slots_returned": all(found["slots_returned"] for found in parts.values()),
        "metrics_balanced": all(found["metrics_balanced"] for found in parts.values()),
        "memory_growth_mb": max(f["memory_growth_mb"] for f in parts.values()),
        "finished": {r: sum(f["finished"][r] for f in parts.values()) for r in reasons},
        "passed": all(found["passed"] for found in parts.values()),
        **parts,
    }
