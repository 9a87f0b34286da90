"""Recipes that measure."""

from __future__ import annotations

import dataclasses

from spec_jax.config.schema.checks import (
    Pairs,
    ascending,
    at_least,
    check,
    needs_drafter,
    share,
)
from spec_jax.config.schema.data import Capture, Data
from spec_jax.config.schema.recipes import Common
from spec_jax.config.schema.serving import Plan, Serve, needs_drafts
from spec_jax.config.schema.training import Drafter


@dataclasses.dataclass(frozen=True)
class Bench:
    """A measurement.

    Attributes:
      warmup: rounds, or prompts, thrown away first.
      repeats: measured repetitions; medians are reported.
      widths: verify widths W that are timed.
      context: live context in tokens at which a step is timed.
      prompt_sets: (name, path) pairs; "builtin" is the project's own list, and a
        set whose path is "" is left out and named as left out.
      max_prompts: prompts taken of each set; 0 is all.
      max_new_tokens: tokens decoded of each prompt.
      threads: of each peer; 0 is every core.
    """

    warmup: int = 3
    repeats: int = 20
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    context: int = 256
    prompt_sets: Pairs = (("builtin", "builtin"),)
    max_prompts: int = 16
    max_new_tokens: int = 128
    threads: int = 2

    def __post_init__(self):
        at_least(0, "bench", self, "warmup", "max_prompts", "threads")
        at_least(1, "bench", self, "repeats", "context", "max_new_tokens")
        ascending("bench", self, "widths")
        check(1 in self.widths, "bench.widths", self.widths, "must hold 1 (plain)")
        for name, path in self.prompt_sets:
            check(
                isinstance(path, str),
                f"bench.prompt_sets.{name}",
                path,
                'must be a path, "builtin" or ""',
            )


@dataclasses.dataclass(frozen=True)
class BenchRound(Common):
    """Times of a plain step, of verifies and of the stages of one round.

    Attributes:
      drafter: timed with random weights: a time does not depend on them.
      serve: its sampling values are those of the sampled round; the greedy one
        is timed beside it.
    """

    task: str = "bench_round"
    drafter: Drafter = Drafter()
    serve: Serve = Serve(slots=1, temperature=1.0, top_p=0.9)
    bench: Bench = Bench()

    def __post_init__(self):
        super().__post_init__()
        check(
            self.serve.temperature > 0,
            "serve.temperature",
            self.serve.temperature,
            "must be above 0: it is the sampled round's",
        )
        widest = self.bench.context + max(self.bench.widths)
        check(
            widest <= self.serve.max_context,
            "serve.max_context",
            self.serve.max_context,
            f"must be at least bench.context plus the widest verify, {widest}",
        )


@dataclasses.dataclass(frozen=True)
class BenchDecode(Common):
    """Accept length and speed-up of an exported drafter, per prompt set.

    Attributes:
      drafter: an exported drafter folder.
    """

    task: str = "bench_decode"
    drafter: str = ""
    serve: Serve = Serve(slots=1)
    bench: Bench = Bench()

    def __post_init__(self):
        super().__post_init__()
        needs_drafter(self.drafter)


@dataclasses.dataclass(frozen=True)
class BenchPeers(Common):
    """Our plain decoding beside transformers', same prompts and weights."""

    task: str = "bench_peers"
    serve: Serve = Serve(slots=1)
    bench: Bench = Bench()


@dataclasses.dataclass(frozen=True)
class BenchFamily(Common):
    """Every drafter on the same text, features and number of positions.

    Attributes:
      drafters: names; each is trained as `recipe` says for it.
      recipe: the recipe file whose word after the colon names a drafter.
      temperatures: each prompt set is decoded at each of them; 0 is greedy.
      positions: supervised positions of each drafter; 0 counts `starts`.
      starts: anchors, or starts of a chain of depths, of each drafter instead.
      batch: conversations of one optimiser step, the same for all; a few, since the
        positions are few: half the batch is twice the steps.
      validation_prompts: held-out prompts that choose the kept weights; the
        others are what is measured.
    """

    task: str = "bench_family"
    drafters: tuple[str, ...] = (
        "lookup",
        "eagle",
        "eagle3",
        "dflash",
        "dspark",
        "dflash2",
    )
    recipe: str = "configs/smollm2.py"
    temperatures: tuple[float, ...] = (0.0, 1.0)
    positions: int = 1_000_000
    starts: int = 0
    batch: int = 3
    validation_prompts: int = 8
    data: Data = Data()
    capture: Capture = Capture()
    serve: Serve = Serve(slots=1)
    bench: Bench = Bench()

    def __post_init__(self):
        super().__post_init__()
        check(bool(self.drafters), "drafters", self.drafters, "is empty; name some")
        at_least(0, "", self, "positions", "starts")
        at_least(1, "", self, "batch", "validation_prompts")
        check(
            bool(self.positions) != bool(self.starts),
            "starts",
            self.starts,
            f"must be 0 where positions={self.positions} is not, and the reverse",
        )
        check(
            self.validation_prompts < self.data.held_out,
            "validation_prompts",
            self.validation_prompts,
            f"must be less than data.held_out={self.data.held_out}: the rest is "
            "measured",
        )
        for value in self.temperatures:
            check(value >= 0, "temperatures", value, "must not be negative")


@dataclasses.dataclass(frozen=True)
class BenchTree(Common):
    """One autoregressive drafter, drafting a chain and trees of several sizes.

    Attributes:
      drafter: an exported drafter folder.
      nodes: drafts verified by each tree.
    """

    task: str = "bench_tree"
    drafter: str = ""
    nodes: tuple[int, ...] = (8, 16, 32)
    serve: Serve = Serve(slots=1)
    bench: Bench = Bench()

    def __post_init__(self):
        super().__post_init__()
        ascending("", self, "nodes")
        needs_drafter(self.drafter)


@dataclasses.dataclass(frozen=True)
class BenchVariants(Common):
    """One exported drafter, served in several ways: accept lengths side by side.

    Attributes:
      drafter: an exported drafter folder.
      temperatures: each prompt set is decoded at each of them; 0 is greedy.
      roundings: types that features are rounded to, a variant each:
        "bfloat16", "float8_e4m3", "int8".
      serve: `slots` is not read: one request at a time.
    """

    task: str = "bench_variants"
    drafter: str = ""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    roundings: tuple[str, ...] = ("bfloat16", "float8_e4m3", "int8")
    serve: Serve = Serve(slots=1)
    bench: Bench = Bench()

    def __post_init__(self):
        super().__post_init__()
        needs_drafter(self.drafter)
        check(
            bool(self.temperatures) and all(0 <= t < 100 for t in self.temperatures),
            "temperatures",
            self.temperatures,
            "must name some, in [0, 100)",
        )
        for kind in self.roundings:
            known = ("bfloat16", "float8_e4m3", "int8")
            check(kind in known, "roundings", kind, f"must be one of {list(known)}")
        for name, value, fix in (
            ("temperature", 0.0, "name them in temperatures"),
            ("one_hot_draft", False, "it is a variant"),
            ("speculate", True, "every variant drafts"),
            ("topology", "chain", "variants are served in chains"),
        ):
            given = getattr(self.serve, name)
            check(given == value, f"serve.{name}", given, f"is not read: {fix}")


@dataclasses.dataclass(frozen=True)
class BenchLaw(Common):
    """The sampled law of the running round, drafter by drafter and mode by mode.

    Attributes:
      samples: of each case.
      chunk: requests that one program decodes together.
      vocab: V of the random target; all `vocab ** tokens` ways to go on count.
      tokens: whose joint law is compared.
      history: rounds that ran before them, at least.
      lag: rounds between a confidence and the budget made from it.
      drafters: cases whose name begins with one of these; () is all.
      modes: budgets' modes that are run.
      settings: of the list of sampling settings, how many; 0 is all.
      planted: also plant biases, which must be found.
      serve: `slots` are the requests that share a budget, `num_draft` is M, and
        the tree fields are those of the trees.
    """

    task: str = "bench_law"
    samples: int = 50_000
    chunk: int = 10_000
    vocab: int = 4
    tokens: int = 4
    history: int = 4
    lag: int = 2
    drafters: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("static", "cap_accept", "compact")
    settings: int = 0
    planted: bool = True
    serve: Serve = Serve(slots=2, num_draft=4)

    def __post_init__(self):
        super().__post_init__()
        at_least(1, "", self, "samples", "chunk", "tokens", "history", "lag")
        at_least(0, "", self, "settings")
        at_least(1, "serve", self.serve, "num_draft")
        at_least(2, "serve", self.serve, "slots")
        check(3 <= self.vocab <= 8, "vocab", self.vocab, "must lie in [3, 8]")
        for mode in self.modes:
            known = ("static", "cap_accept", "compact")
            check(mode in known, "modes", mode, f"must be one of {list(known)}")


@dataclasses.dataclass(frozen=True)
class BenchSoak(Common):
    """Thousands of requests that come, leave and are taken back at random.

    Attributes:
      requests: on a random float32 target of a few tokens.
      real_requests: on `target`; 0 leaves it out.
      drafter: an exported drafter folder for `target`; "" drafts with random
        weights, which cost what trained ones do.
      join: chance that a waiting request is submitted, before each tick.
      abort, retract: chance of each tick that one request is.
      reference_share: share of the greedy requests that are also decoded plainly.
      row_buckets: T of each R, at most, beside T = R.
      max_growth_mb: resident memory that may be gained after the first fifth.
      serve: `slots`, `max_context` and `max_new_tokens` of both engines.
    """

    task: str = "bench_soak"
    requests: int = 4800
    real_requests: int = 200
    drafter: str = ""
    join: float = 0.7
    abort: float = 0.02
    retract: float = 0.02
    reference_share: float = 1.0
    row_buckets: int = 4
    max_growth_mb: float = 64.0
    serve: Serve = Serve(slots=8, max_context=160, max_new_tokens=32)

    def __post_init__(self):
        super().__post_init__()
        at_least(1, "", self, "requests", "row_buckets")
        at_least(0, "", self, "real_requests", "max_growth_mb")
        share("", self, "join", "abort", "retract", "reference_share")
        check(self.join > 0, "join", self.join, "must be above 0")


@dataclasses.dataclass(frozen=True)
class BenchSchedule(Common):
    """Plain decoding, fixed windows and planned budgets under several loads.

    Attributes:
      drafter: an exported drafter folder whose drafts have a confidence.
      concurrency: requests in flight, each load in turn; the last one is the
        number of slots, and all of them are the R of the programs.
      requests: served at each load, more than are in flight.
      windows: fixed windows that are swept; () is 0 to M.
      row_buckets: row buckets T of each R, beside T = R; 0 is one for each fixed
        window.
      cost: a cost table of these very programs; "" measures one first.
      sts: temperatures of this regime; "" fits them first.
      allow_unmarked: accept files that do not say what they were measured on.
      form: of the cost table that is used: "additive", "flat", or "best" for the
        one that is nearer to the measured times in the median.
      cost_repeats: timed rounds of each shape of the table.
      fit_prompts: prompts of each set that temperatures are fitted on, at most
        half of the set; they are not measured.
      fit_slots: of those, how many decode together.
      min_rounds: rounds below which no temperature is fitted.
      sampled_share: share of the requests that use the sampling values of
        `serve`; the others are greedy.
      plan: how budgets are made and shared.
      serve: `slots` and `max_new_tokens` are not read: see `concurrency` and
        `bench.max_new_tokens`.
      bench: `prompt_sets` are mixed in equal shares (a `.txt` file is cut into
        long prompts), `max_prompts` of each; `repeats` turns; `max_new_tokens`
        is the longest answer; `warmup` and `context` are the cost table's.
    """

    task: str = "bench_schedule"
    drafter: str = ""
    concurrency: tuple[int, ...] = (1, 4, 16, 32)
    requests: tuple[int, ...] = (12, 24, 48, 80)
    windows: tuple[int, ...] = ()
    row_buckets: int = 0
    cost: str = ""
    sts: str = ""
    allow_unmarked: bool = False
    form: str = "best"
    cost_repeats: int = 12
    fit_prompts: int = 16
    fit_slots: int = 8
    min_rounds: int = 200
    sampled_share: float = 0.0
    plan: Plan = Plan()
    serve: Serve = Serve()
    bench: Bench = Bench(
        warmup=2, repeats=3, context=128, max_prompts=64, max_new_tokens=64
    )

    def __post_init__(self):
        super().__post_init__()
        needs_drafter(self.drafter)
        check(bool(self.concurrency), "concurrency", (), "is empty; name some loads")
        ascending("", self, "concurrency")
        check(
            len(self.requests) == len(self.concurrency)
            and all(n > c for c, n in self.loads),
            "requests",
            self.requests,
            f"must have one number above each of concurrency={self.concurrency}",
        )
        check(
            all(w >= 0 for w in self.windows),
            "windows",
            self.windows,
            "must not be negative; () is all of them",
        )
        forms = ("best", "additive", "flat")
        check(self.form in forms, "form", self.form, f"must be one of {list(forms)}")
        at_least(0, "", self, "row_buckets")
        at_least(1, "", self, "cost_repeats", "fit_prompts", "fit_slots", "min_rounds")
        share("", self, "sampled_share")
        check(
            (self.sampled_share > 0) == (self.serve.temperature > 0),
            "sampled_share",
            self.sampled_share,
            f"does not go with serve.temperature={self.serve.temperature:g}: give "
            "both a value above 0, or neither",
        )
        needs_drafts(self.serve)

    @property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Pairs (requests in flight, requests served)."""
        return tuple(zip(self.concurrency, self.requests, strict=False))
