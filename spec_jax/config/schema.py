"""What a recipe may say: frozen sections, checked when they are made.

A recipe file builds a ConfigDict; `loading.to_recipe` turns it into one of the
classes of `SCHEMAS` once, at the entry point. Every section is frozen and
hashable, so it may be a static jit argument, and its defaults live here alone.
Options that belong to a higher floor (a drafter's, an objective's) travel as
sorted `(name, value)` pairs and become that floor's own record through
`loading.to_dataclass`.

Lengths are in tokens, counts in items, probabilities and shares in [0, 1].
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from spec_jax.core.errors import UserError

# Sorted (name, value) pairs: a mapping that can be hashed.
Pairs = tuple[tuple[str, Any], ...]

DTYPES = ("float32", "bfloat16")


def _check(ok: bool, field: str, value: Any, rule: str) -> None:
    if not ok:
        raise UserError(f"{field}={value!r} {rule}")


def _at_least(low: int, section: str, record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _check(value >= low, f"{section}.{name}", value, f"must be {low} or more")


def _share(section: str, record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _check(0 <= value <= 1, f"{section}.{name}", value, "must lie in [0, 1]")


def _temperature(section: str, record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _check(
            math.isfinite(value) and value >= 0,
            f"{section}.{name}",
            value,
            "must be 0 (greedy) or more",
        )


def _top_p(section: str, record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _check(
            0 < value <= 1,
            f"{section}.{name}",
            value,
            "must lie in (0, 1]; 1.0 keeps the whole vocabulary",
        )


def _one_of(section: str, record: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(record, name)
    _check(
        value in allowed, f"{section}.{name}", value, f"must be one of {list(allowed)}"
    )


def _ascending(section: str, record: Any, name: str) -> None:
    values = getattr(record, name)
    good = all(v > 0 for v in values) and list(values) == sorted(set(values))
    _check(good, f"{section}.{name}", values, "must be positive and ascending")


@dataclasses.dataclass(frozen=True)
class TinyTarget:
    """A small random target, briefly trained offline (`target.source="tiny"`).

    Attributes:
      num_layers: layers of the target.
      hidden_size: D.
      mlp_size: F.
      num_heads: H.
      num_kv_heads: G; divides H.
      head_dim: C, even.
      max_context: longest position.
      family: "llama" or "qwen3".
      train_steps: optimiser steps on the synthetic corpus; 0 leaves it random.
      batch: rows of a step.
      seq_len: tokens of a row.
      lr: peak learning rate.
    """

    num_layers: int = 5
    hidden_size: int = 64
    mlp_size: int = 192
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_context: int = 512
    family: str = "llama"
    train_steps: int = 450
    batch: int = 8
    seq_len: int = 64
    lr: float = 6e-3

    def __post_init__(self):
        _at_least(2, "target.tiny", self, "num_layers")
        _at_least(1, "target.tiny", self, "hidden_size", "mlp_size", "num_heads")
        _at_least(1, "target.tiny", self, "num_kv_heads", "batch")
        _at_least(2, "target.tiny", self, "head_dim", "seq_len", "max_context")
        _at_least(0, "target.tiny", self, "train_steps")
        _check(
            self.head_dim % 2 == 0,
            "target.tiny.head_dim",
            self.head_dim,
            "must be even (rotary)",
        )
        _one_of("target.tiny", self, "family", ("llama", "qwen3"))
        _check(
            self.num_heads % self.num_kv_heads == 0,
            "target.tiny.num_heads",
            self.num_heads,
            f"must be a multiple of num_kv_heads={self.num_kv_heads}",
        )
        _check(
            0 < self.lr < math.inf,
            "target.tiny.lr",
            self.lr,
            "must be a number above 0",
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """The model whose law every output must keep.

    Attributes:
      source: "tiny", a packaged name ("smollm2-135m-instruct"), a `.gguf` file or
        a folder with safetensors weights.
      dtype: of its weights and caches.
      precision: JAX matmul precision of the run ("highest" for identity claims).
      tiny: used only when source is "tiny".
    """

    source: str = "smollm2-135m-instruct"
    dtype: str = "float32"
    precision: str = "highest"
    tiny: TinyTarget = TinyTarget()

    def __post_init__(self):
        _check(
            bool(self.source),
            "target.source",
            self.source,
            'is empty; name "tiny", "smollm2-135m-instruct", a .gguf file or a folder',
        )
        _one_of("target", self, "dtype", DTYPES)
        _one_of("target", self, "precision", ("default", "high", "highest"))


@dataclasses.dataclass(frozen=True)
class Data:
    """Prompts, and the answers the target itself gives to them.

    Attributes:
      prompts: a `.jsonl` file of prompts, "builtin" for the project's own list,
        or "" for synthesised prompts only.
      train_on_prompts: whether prompts of the file are answered for training too;
        False keeps the file for validation only.
      max_file_prompts: how many of the file are used; 0 is all.
      num_synth_prompts: user turns the target makes up itself.
      synth_openings: words that those user turns begin with, in turn; () leaves
        the whole turn to the target. A few openings make a narrow task, which a
        small drafter learns in minutes.
      synth_temperature: of those user turns.
      synth_top_p: of those user turns.
      synth_max_tokens: longest synthesised user turn.
      answer_temperature: of the answers that are not greedy.
      answer_top_p: of the answers that are not greedy.
      greedy_share: share of the answers that are greedy.
      max_new_tokens: longest answer.
      max_tokens: longest conversation (prompt and answer); longer ones are left
        out, never cut.
      held_out: prompts kept away from training, for validation.
      drop_looping: leave out answers that repeat an 8-gram three times.
      system: system message of every conversation; "" leaves the template's own.
      thinking: the chat template's thinking switch.
      samples: a file of token samples made before; "" makes them in this run.
    """

    prompts: str = ""
    train_on_prompts: bool = True
    max_file_prompts: int = 0
    num_synth_prompts: int = 256
    synth_openings: tuple[str, ...] = ()
    synth_temperature: float = 1.0
    synth_top_p: float = 0.95
    synth_max_tokens: int = 64
    answer_temperature: float = 0.7
    answer_top_p: float = 0.9
    greedy_share: float = 0.5
    max_new_tokens: int = 128
    max_tokens: int = 320
    held_out: int = 16
    drop_looping: bool = True
    system: str = ""
    thinking: bool = False
    samples: str = ""

    def __post_init__(self):
        _temperature("data", self, "synth_temperature", "answer_temperature")
        _top_p("data", self, "synth_top_p", "answer_top_p")
        _share("data", self, "greedy_share")
        _at_least(0, "data", self, "max_file_prompts", "num_synth_prompts")
        _at_least(1, "data", self, "synth_max_tokens", "max_new_tokens", "held_out")
        _check(
            self.max_tokens > self.max_new_tokens,
            "data.max_tokens",
            self.max_tokens,
            f"must be more than data.max_new_tokens={self.max_new_tokens}: it counts "
            "the prompt too",
        )
        _check(
            bool(self.prompts or self.samples or self.num_synth_prompts),
            "data.num_synth_prompts",
            self.num_synth_prompts,
            "leaves nothing to train on; synthesise some, or name data.prompts",
        )


@dataclasses.dataclass(frozen=True)
class Capture:
    """The frozen target's features on disk.

    Attributes:
      dtype: features are stored in it.
      batch: conversations of one capture step (and of one synthesis batch).
      shard_samples: conversations of one shard (one writer each).
      teacher: also keep the post-norm last hidden state.
    """

    dtype: str = "float32"
    batch: int = 8
    shard_samples: int = 64
    teacher: bool = False

    def __post_init__(self):
        _one_of("capture", self, "dtype", (*DTYPES, "float16"))
        _at_least(1, "capture", self, "batch", "shard_samples")


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Which drafter, and its own options.

    Attributes:
      name: a module of `spec_jax.drafters`, or a dotted path.
      options: pairs for that module's `Options`.
      draft_vocab: U, tokens it may propose; 0 is the full vocabulary.
    """

    name: str = "dflash"
    options: Pairs = ()
    draft_vocab: int = 0

    def __post_init__(self):
        _check(bool(self.name), "drafter.name", self.name, 'is empty; try "dflash"')
        _at_least(0, "drafter", self, "draft_vocab")

    def options_dict(self) -> dict[str, Any]:
        """The options as `drafters.base.load` takes them."""
        return dict(self.options)


@dataclasses.dataclass(frozen=True)
class Train:
    """The optimiser's side.

    Attributes:
      steps: optimiser steps.
      batch: conversations of one micro-batch.
      accumulation: micro-batches of one step.
      seq_len: S, tokens of a padded row.
      lr: peak learning rate.
      warmup_fraction: share of the steps spent warming up.
      schedule: "cosine", "constant" or "wsd" (warm up, stay, decay).
      optimiser: "adamw" or "muon".
      weight_decay: decoupled, on matrices only.
      clip: global norm of the gradients; 0 leaves them alone.
      log_every: steps between two loss lines.
      eval_every: steps between two served accept lengths.
      eval_prompts: held-out prompts decoded for each.
      eval_new_tokens: tokens decoded of each.
      checkpoint_every: steps between two checkpoints.
      keep_checkpoints: newest checkpoints kept beside the best one.
      max_minutes: stop training there, having saved; 0 is no limit.
    """

    steps: int = 400
    batch: int = 4
    accumulation: int = 1
    seq_len: int = 320
    lr: float = 1.5e-3
    warmup_fraction: float = 0.04
    schedule: str = "cosine"
    optimiser: str = "adamw"
    weight_decay: float = 0.0
    clip: float = 1.0
    log_every: int = 10
    eval_every: int = 100
    eval_prompts: int = 8
    eval_new_tokens: int = 64
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    max_minutes: float = 0.0

    def __post_init__(self):
        _at_least(1, "train", self, "steps", "batch", "accumulation")
        _at_least(1, "train", self, "log_every", "eval_every", "eval_prompts")
        _at_least(1, "train", self, "eval_new_tokens", "checkpoint_every")
        _at_least(1, "train", self, "keep_checkpoints")
        _at_least(2, "train", self, "seq_len")
        _at_least(0, "train", self, "weight_decay", "clip", "max_minutes")
        _share("train", self, "warmup_fraction")
        _one_of("train", self, "schedule", ("cosine", "constant", "wsd"))
        _one_of("train", self, "optimiser", ("adamw", "muon"))
        _check(0 < self.lr < math.inf, "train.lr", self.lr, "must be a number above 0")


@dataclasses.dataclass(frozen=True)
class Serve:
    """How tokens are decoded.

    Attributes:
      slots: B, requests decoded together.
      max_context: A, tokens a slot may hold.
      prefill_buckets: lengths a prompt chunk is padded to; () is powers of two.
      num_draft: M, drafts of a round; 0 is what the drafter was trained for.
      speculate: False decodes plainly.
      one_hot_draft: at temperature > 0, draft the likeliest token (q one-hot)
        instead of sampling q.
      temperature: 0 is greedy.
      top_k: 0 keeps all.
      top_p: 1.0 keeps all.
      min_p: 0.0 keeps all.
      max_new_tokens: longest answer.
    """

    slots: int = 4
    max_context: int = 512
    prefill_buckets: tuple[int, ...] = ()
    num_draft: int = 0
    speculate: bool = True
    one_hot_draft: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128

    def __post_init__(self):
        _at_least(1, "serve", self, "slots", "max_new_tokens")
        _at_least(2, "serve", self, "max_context")
        _at_least(0, "serve", self, "num_draft", "top_k")
        _temperature("serve", self, "temperature")
        _top_p("serve", self, "top_p")
        _share("serve", self, "min_p")
        _ascending("serve", self, "prefill_buckets")
        _check(
            not self.prefill_buckets or self.prefill_buckets[-1] <= self.max_context,
            "serve.prefill_buckets",
            self.prefill_buckets,
            f"must end at or below serve.max_context={self.max_context}",
        )
        _check(
            self.max_new_tokens < self.max_context,
            "serve.max_new_tokens",
            self.max_new_tokens,
            f"must be less than serve.max_context={self.max_context}",
        )

    @property
    def prefill_ladder(self) -> tuple[int, ...]:
        """The prefill buckets, derived where none were named (longest 256)."""
        return self.prefill_buckets or _powers(32, min(256, self.max_context))


def _powers(first: int, last: int) -> tuple[int, ...]:
    """Doubling from `first`, below `last`; then `last` itself."""
    ladder = []
    while first < last:
        ladder.append(first)
        first *= 2
    return (*ladder, last)


@dataclasses.dataclass(frozen=True)
class Export:
    """The Hugging Face folder written at the end.

    Attributes:
      dtype: of its weights.
      golden_rounds: prompts whose first round is stored beside the weights and
        run again after loading.
    """

    dtype: str = "float32"
    golden_rounds: int = 1

    def __post_init__(self):
        _one_of("export", self, "dtype", DTYPES)
        _at_least(1, "export", self, "golden_rounds")


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
        _at_least(0, "bench", self, "warmup", "max_prompts", "threads")
        _at_least(1, "bench", self, "repeats", "context", "max_new_tokens")
        _ascending("bench", self, "widths")
        _check(1 in self.widths, "bench.widths", self.widths, "must hold 1 (plain)")
        for name, path in self.prompt_sets:
            _check(
                isinstance(path, str),
                f"bench.prompt_sets.{name}",
                path,
                'must be a path, "builtin" or ""',
            )


@dataclasses.dataclass(frozen=True)
class _Common:
    """What every recipe says.

    Attributes:
      task: the module of `experiments` that runs it.
      seed: of every random stream.
      max_load: share of the machine that other processes may use while this run
        measures; above it the report says `valid: false`.
      target: the target.
    """

    task: str = "pipeline"
    seed: int = 0
    max_load: float = 0.15
    target: Target = Target()

    def __post_init__(self):
        _check(0 <= self.seed < 2**31, "seed", self.seed, "must lie in [0, 2147483647]")
        _check(0 < self.max_load <= 1, "max_load", self.max_load, "must lie in (0, 1]")


@dataclasses.dataclass(frozen=True)
class Pipeline(_Common):
    """Prompts, capture, training, export and a check of the exported drafter.

    Attributes:
      objective: pairs for the objective's own options.
      mesh: pairs for the mesh's own options.
    """

    data: Data = Data()
    capture: Capture = Capture()
    drafter: Drafter = Drafter()
    objective: Pairs = ()
    mesh: Pairs = ()
    train: Train = Train()
    serve: Serve = Serve()
    export: Export = Export()

    def __post_init__(self):
        super().__post_init__()
        _check(
            self.data.max_tokens <= self.train.seq_len,
            "train.seq_len",
            self.train.seq_len,
            f"must be at least data.max_tokens={self.data.max_tokens}: conversations "
            "are never cut",
        )
        _check(
            self.data.max_tokens <= self.serve.max_context,
            "serve.max_context",
            self.serve.max_context,
            f"must be at least data.max_tokens={self.data.max_tokens}",
        )
        _check(
            self.train.eval_prompts <= self.data.held_out,
            "train.eval_prompts",
            self.train.eval_prompts,
            f"must be at most data.held_out={self.data.held_out}",
        )


@dataclasses.dataclass(frozen=True)
class Generate(_Common):
    """One prompt, streamed to the terminal.

    Attributes:
      prompt: the user's turn.
      drafter: an exported drafter folder; "" decodes plainly.
      system: system message; "" leaves the template's own.
      thinking: the chat template's thinking switch.
      raw: True skips the chat template.
      colour: "auto", "always" or "never".
    """

    task: str = "generate"
    prompt: str = ""
    drafter: str = ""
    system: str = ""
    thinking: bool = False
    raw: bool = False
    colour: str = "auto"
    serve: Serve = Serve(slots=1)

    def __post_init__(self):
        super().__post_init__()
        _check(
            bool(self.prompt.strip()),
            "prompt",
            self.prompt,
            'is empty; say --config.prompt="..."',
        )
        _check(
            self.colour in ("auto", "always", "never"),
            "colour",
            self.colour,
            "must be one of ['auto', 'always', 'never']",
        )


@dataclasses.dataclass(frozen=True)
class BenchRound(_Common):
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
        _check(
            self.serve.temperature > 0,
            "serve.temperature",
            self.serve.temperature,
            "must be above 0: it is the sampled round's",
        )
        widest = self.bench.context + max(self.bench.widths)
        _check(
            widest <= self.serve.max_context,
            "serve.max_context",
            self.serve.max_context,
            f"must be at least bench.context plus the widest verify, {widest}",
        )


@dataclasses.dataclass(frozen=True)
class BenchDecode(_Common):
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
        _check(
            bool(self.drafter),
            "drafter",
            self.drafter,
            "is empty; name an exported drafter folder with --config.drafter=<folder>",
        )


@dataclasses.dataclass(frozen=True)
class BenchPeers(_Common):
    """Our plain decoding beside transformers', same prompts and weights."""

    task: str = "bench_peers"
    serve: Serve = Serve(slots=1)
    bench: Bench = Bench()


SCHEMAS: dict[str, type[_Common]] = {
    "pipeline": Pipeline,
    "generate": Generate,
    "bench_round": BenchRound,
    "bench_decode": BenchDecode,
    "bench_peers": BenchPeers,
}
