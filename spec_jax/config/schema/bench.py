"""Recipes that measure."""

from __future__ import annotations

import dataclasses

from spec_jax.config.schema.checks import Pairs, ascending, at_least, check
from spec_jax.config.schema.data import Capture, Data
from spec_jax.config.schema.recipes import Common
from spec_jax.config.schema.serving import Serve
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
        check(
            bool(self.drafter),
            "drafter",
            self.drafter,
            "is empty; name an exported drafter folder with --config.drafter=<folder>",
        )


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
      positions: supervised positions of each drafter.
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
    data: Data = Data()
    capture: Capture = Capture()
    serve: Serve = Serve(slots=1)
    bench: Bench = Bench()

    def __post_init__(self):
        super().__post_init__()
        check(bool(self.drafters), "drafters", self.drafters, "is empty; name some")
        at_least(1, "", self, "positions")
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
        check(
            bool(self.drafter),
            "drafter",
            self.drafter,
            "is empty; name an exported drafter folder with --config.drafter=<folder>",
        )
