"""A workload file through the engine: requests in, records out.

Leaves `requests.jsonl` (one row per request) and `rounds.jsonl` (one row per
round, see `round_log`) in the workdir; a request's `handle` is what the rounds
call it. One that cannot be served ends with the reason "refused" and one whose
numbers break with "error"; `error` says why, and their neighbours do not notice.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import progress, runtime, serving
from experiments.round_log import RoundLog
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import prompts as prompt_files
from spec_jax.data import workload
from spec_jax.data.workload import WorkItem
from spec_jax.decode import regimes
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Generation, Settings
from spec_jax.evals import compiles
from spec_jax.target.loading import Target

REQUESTS_NAME, ROUNDS_NAME = "requests.jsonl", "rounds.jsonl"
REFUSED, BROKEN = "refused", "error"


@dataclasses.dataclass
class Served:
    """One request's way through the engine; times in seconds from the start.

    Attributes:
      item: the request.
      settings: its settings, or None where they cannot be.
      prompt: its token ids.
      error: why it was refused, or "".
      handle: the engine's name for it; None where it was refused.
      submitted: when the engine got it.
      deliveries: (when, how many tokens), in order.
      finished: when its end was known.
      generation: what came of it.
    """

    item: WorkItem
    settings: Settings | None = None
    prompt: list[int] = dataclasses.field(default_factory=list)
    error: str = ""
    handle: int | None = None
    submitted: float = 0.0
    deliveries: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    finished: float | None = None
    generation: Generation | None = None

    @property
    def first_token(self) -> float | None:
        return self.deliveries[0][0] if self.deliveries else None

    def row(self) -> dict[str, Any]:
        """What `requests.jsonl` says of it.

        `accepted` and `drafted` are sums over its rounds: r after the cut, and the
        drafts verified. A `seed` of None is one of its own, by its `handle`.
        """
        made = self.generation
        return {
            "id": self.item.name,
            "handle": self.handle,
            "arrival_s": self.item.arrival,
            "submitted_s": self.submitted,
            "first_token_s": self.first_token,
            "finish_s": self.finished,
            "sampling": regimes.regime_of(self.settings) if self.settings else None,
            "seed": self.settings.seed if self.settings else None,
            "speculate": self.settings.speculate if self.settings else None,
            "prompt_tokens": len(self.prompt),
            "tokens": len(made.tokens) if made else 0,
            "finish_reason": made.finish_reason if made else REFUSED,
            "stopped_by": made.stopped_by if made else None,
            "rounds": made.rounds if made else 0,
            "accepted": sum(made.accepted) if made else 0,
            "drafted": sum(made.drafted) if made else 0,
            "accept_length": made.accept_length if made and made.rounds else None,
            "token_ids": made.tokens if made else [],
            "text": made.text if made else "",
            "error": self.error or self._broken(),
            **self._logprobs(),
        }

    def _broken(self) -> str:
        """Why an answer ended with an error, or ""."""
        if self.generation is None or self.generation.finish_reason != BROKEN:
            return ""
        return (
            f"the target's logits after {len(self.generation.tokens)} tokens of the "
            "answer are not finite (NaN or infinite), so that it ends there; check "
            "the target's weights and target.dtype"
        )

    def _logprobs(self) -> dict[str, Any]:
        """Log-probabilities of the tokens, for a request that asked for them."""
        if not (self.generation and self.settings and self.settings.logprobs):
            return {}
        found: dict[str, Any] = {"logprobs": self.generation.logprobs}
        if self.settings.top_logprobs:
            found["top_logprobs"] = self.generation.top_logprobs
        return found


def prepare(
    items: Sequence[WorkItem], target: Target, serve: schema.Serve, mask_id: int
) -> list[Served]:
    """Prompts as ids and settings of every request; wrong ones say why."""
    made = []
    for item in items:
        request = Served(item)
        made.append(request)
        try:
            request.settings = serving.settings_from(
                serve, **dict(item.settings), stop=item.stop
            )
            request.prompt = prompt_files.render_prompt(
                target, item.prompt, mask_id=mask_id
            )
        except UserError as error:
            request.error = str(error)
    return made


def serve(
    engine: Engine,
    log: RoundLog,
    requests: Sequence[Served],
    *,
    keep_pace: bool,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = lambda text: None,
) -> float:
    """Runs prepared requests, in order of arrival; returns the seconds it took.

    Args:
      engine: idle, and watched by `log`.
      log: of the engine's rounds.
      requests: from `prepare`; filled in here.
      keep_pace: submit each at its arrival; False: all at once.
      clock, sleep: time.
      say: progress.
    """
    waiting = collections.deque(r for r in requests if not r.error)
    by_handle: dict[int, Served] = {}
    start, done, total = clock(), 0, len(waiting)

    def on_tokens(handle: int, new: list[int], from_prefill: bool) -> None:
        del from_prefill
        by_handle[handle].deliveries.append((clock() - start, len(new)))

    while waiting or engine.busy:
        now = clock() - start
        while waiting and (not keep_pace or waiting[0].item.arrival <= now):
            request = waiting.popleft()
            request.submitted = now
            try:
                handle = engine.submit(request.prompt, request.settings)
            except UserError as error:
                request.error = str(error)
                continue
            request.handle, by_handle[handle] = handle, request
        if not engine.busy:
            if waiting:
                sleep(max(0.0, waiting[0].item.arrival - (clock() - start)))
            continue
        for handle, generation in log.step(on_tokens):
            request = by_handle[handle]
            request.generation, request.finished = generation, clock() - start
            done += 1
            if done % 8 == 0 or done == total:
                say(f"served {done}/{total} in {clock() - start:.1f} s")
    return clock() - start


def main(cfg: schema.ServeOffline, workdir: pathlib.Path) -> dict[str, Any]:
    """Serves the workload; returns the report's metrics.

    Raises:
      UserError: a wrong workload file, or a table or temperatures that were made
        for something else.
    """
    items = workload.read_workload(runtime.find_file(cfg.workload))
    target, params = serving.load_serving_target(cfg.target)
    exported = None
    if cfg.drafter:
        exported = serving.load_drafter(
            cfg.drafter, target, num_draft=cfg.serve.num_draft
        )
    mask_id = serving.mask_id_of(exported.drafter) if exported else -1
    requests = prepare(items, target, cfg.serve, mask_id)
    asked = [r.settings for r in requests if r.settings]
    planning = runtime.load_planning(cfg, target, exported, asked)
    engine = serving.make_engine(
        target,
        params,
        cfg.serve,
        exported,
        text=True,
        auto_off=serving.auto_off_of(cfg.auto_off),
        **serving.features_of(asked),
        **planning,
    )
    log = RoundLog(engine)
    with compiles.counting() as counted:
        seconds = serve(
            engine,
            log,
            requests,
            keep_pace=cfg.pace == "arrival",
            say=progress.say,
        )
    runtime.write_rows(workdir / REQUESTS_NAME, [r.row() for r in requests])
    runtime.write_rows(workdir / ROUNDS_NAME, log.rows)
    num_draft = engine.window - 1
    found = {
        "mode": cfg.mode,
        "seconds": seconds,
        **request_metrics(requests, seconds),
        **round_metrics(log.rows, num_draft),
        "plan_fraction": log.plan_s / max(sum(r["measured_s"] for r in log.rows), 1e-9),
        "compiles_after_warmup": counted.compiles,
        "auto_off": engine.metrics()["auto_off"],
        "ladder": {str(size): list(rows) for size, rows in engine.ladder.buckets},
    }
    emitted = [n for row in log.rows if row["draft"] for n in row["emitted"]]
    verified = [n for row in log.rows if row["draft"] for n in row["verify_lens"]]
    window = num_draft + 1
    series = {
        "histogram": {cfg.mode: _counts(emitted, window)},
        "verify_len": {cfg.mode: _counts(verified, window)},
    }
    return found | {"series": series}


def request_metrics(requests: Sequence[Served], seconds: float) -> dict[str, Any]:
    """Counts, speed and latencies of served requests.

    A delivery of n tokens after a gap counts as n tokens, each of an n-th of the
    gap (`inter_token_ms`); `delivery_gap_ms` are the gaps themselves.
    """
    ended = [r for r in requests if r.generation is not None]
    reasons = collections.Counter(
        r.generation.finish_reason if r.generation else REFUSED for r in requests
    )
    tokens = sum(len(r.generation.tokens) for r in ended if r.generation)
    gaps, shares = [], []
    for request in ended:
        times = request.deliveries
        for (before, _), (now, count) in itertools.pairwise(times):
            gaps.append(1e3 * (now - before))
            shares += [1e3 * (now - before) / count] * count
    waits = [
        1e3 * (r.first_token - min(r.item.arrival, r.submitted))
        for r in ended
        if r.first_token is not None
    ]
    drafted = [
        (sum(g.emitted), g.rounds)
        for r in ended
        if (g := r.generation) is not None and r.settings and r.settings.speculate
    ]
    rounds = sum(n for _, n in drafted)
    return {
        "requests": len(requests),
        "finished": dict(sorted(reasons.items())),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "accept_length": sum(e for e, _ in drafted) / rounds if rounds else None,
        "inter_token_ms": _quantiles(shares),
        "delivery_gap_ms": _quantiles(gaps),
        "first_token_ms": _quantiles(waits),
    }


def round_metrics(rows: Sequence[Mapping[str, Any]], num_draft: int) -> dict[str, Any]:
    """Shares and times of an engine's rounds.

    `shares` are of all rounds; `partial_budget` are those with 0 < K < M drafts for
    each of the requests that share K; `stale_slots` are of the requests whose
    history was looked up. Predicted times are compared where nothing was filled:
    of all rounds, and apart of those that draft and of plain ones (None: no such
    round).
    """
    total = max(len(rows), 1)
    lengths = collections.Counter(
        n for row in rows if row["draft"] for n in row["verify_lens"]
    )
    programs: dict[str, dict[str, int]] = {}
    for row in rows:
        name = str(row["T"]) if row["draft"] else "plain"
        counts = programs.setdefault(str(row["R"]), {})
        counts[name] = counts.get(name, 0) + 1
    ratios: dict[str, list[float]] = {"draft": [], "plain": []}
    for row in rows:
        if row["predicted_s"] is not None and not row["filled"]:
            ratio = row["predicted_s"] / row["measured_s"]
            ratios["draft" if row["draft"] else "plain"].append(ratio)

    def share(condition: Callable[[Mapping[str, Any]], bool]) -> float:
        return sum(bool(condition(row)) for row in rows) / total

    looked_up = sum(row["looked_up"] for row in rows)
    return {
        "rounds": len(rows),
        "verify_len_histogram": {
            str(n): lengths[n] for n in range(1, num_draft + 2) if lengths[n]
        },
        "programs": programs,
        "shares": {
            "plain": share(lambda row: not row["draft"]),
            "anchors_only": share(lambda row: row["draft"] and not row["K"]),
            "partial_budget": share(
                lambda row: 0 < row["K"] < row["planned"] * num_draft
            ),
            "not_ready": share(lambda row: row["not_ready"]),
            "stale_slots": sum(row["stale"] for row in rows) / max(looked_up, 1),
        },
        "predicted_over_measured": {
            **_quantiles([*ratios["draft"], *ratios["plain"]], (0.1, 0.5, 0.9)),
            **{
                kind: _quantiles(values, (0.1, 0.5, 0.9)) if values else None
                for kind, values in ratios.items()
            },
        },
        "compared_rounds": sum(len(values) for values in ratios.values()),
    }


def _quantiles(values: Sequence[float], at=(0.5, 0.99)) -> dict[str, float | None]:
    return {
        f"p{round(100 * q)}": float(np.quantile(values, q)) if values else None
        for q in at
    }


def _counts(values: Sequence[int], most: int) -> list[int]:
    """How many are 1, 2, ... `most`."""
    found = collections.Counter(values)
    return [found[n] for n in range(1, most + 1)]
