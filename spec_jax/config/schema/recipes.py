"""One class per task of `experiments`: which sections it has, and what must agree."""

from __future__ import annotations

import dataclasses

from spec_jax.config.schema.checks import Pairs, check
from spec_jax.config.schema.data import Capture, Data
from spec_jax.config.schema.serving import Serve
from spec_jax.config.schema.target import Target
from spec_jax.config.schema.training import Drafter, Export, Train


@dataclasses.dataclass(frozen=True)
class Common:
    """What every recipe says.

    Attributes:
      task: the module of `experiments` that runs it.
      seed: of every random stream.
      max_load: share of the machine that other processes may use while this run
        measures; above it the report says `valid: false`.
      imports: modules to import first: where drafters of your own live, so that
        their folders can be read.
      target: the target.
    """

    task: str = "pipeline"
    seed: int = 0
    max_load: float = 0.15
    imports: tuple[str, ...] = ()
    target: Target = Target()

    def __post_init__(self):
        check(0 <= self.seed < 2**31, "seed", self.seed, "must lie in [0, 2147483647]")
        check(0 < self.max_load <= 1, "max_load", self.max_load, "must lie in (0, 1]")


# Of a `Serve` section, what decides the shape of each topology's proposal.
TREE_FIELDS = ("tree_depth", "tree_top_k", "tree_nodes", "tree_parents")


def _check_training_serve(serve: Serve) -> None:
    """Refuses values of `serve` that a recipe which makes texts or trains overrides.

    Raises:
      UserError: one of them is not its default.
    """
    unused = {
        name: "is not read where answers train and validate: data.greedy_share and "
        "data.answer_temperature are how they are drawn, and validation is greedy"
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    if serve.slots != 1:  # what validation has
        unused["slots"] = (
            "is not read: answers are made in many slots, and validation has one"
        )
    used = {
        "static_tree": ("tree_parents" if serve.tree_parents else "tree_depth",),
        "dynamic_tree": ("tree_depth", "tree_top_k", "tree_nodes"),
    }.get(serve.topology, ())
    for name in TREE_FIELDS:
        if name not in used:
            unused[name] = f"is not read for serve.topology={serve.topology!r}"
    for name, rule in unused.items():
        value = getattr(serve, name)
        check(
            value == getattr(Serve, name),
            f"serve.{name}",
            value,
            f"{rule}; leave it out",
        )


@dataclasses.dataclass(frozen=True)
class Pipeline(Common):
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
        _check_training_serve(self.serve)
        check(
            self.data.max_tokens <= self.train.seq_len,
            "train.seq_len",
            self.train.seq_len,
            f"must be at least data.max_tokens={self.data.max_tokens}: conversations "
            "are never cut",
        )
        check(
            self.data.max_tokens <= self.serve.max_context,
            "serve.max_context",
            self.serve.max_context,
            f"must be at least data.max_tokens={self.data.max_tokens}",
        )
        check(
            self.train.eval_prompts <= self.data.held_out,
            "train.eval_prompts",
            self.train.eval_prompts,
            f"must be at most data.held_out={self.data.held_out}",
        )


@dataclasses.dataclass(frozen=True)
class Generate(Common):
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
        check(
            bool(self.prompt.strip()),
            "prompt",
            self.prompt,
            'is empty; say --config.prompt="..."',
        )
        check(
            self.colour in ("auto", "always", "never"),
            "colour",
            self.colour,
            "must be one of ['auto', 'always', 'never']",
        )


@dataclasses.dataclass(frozen=True)
class Why(Common):
    """Training against serving of one exported drafter, on one prompt.

    Attributes:
      prompt: the user's turn, as it is served.
      drafter: an exported drafter folder.
      system: system message of both; "" leaves the template's own.
      thinking: the chat template's thinking switch as it is served.
      raw: prompts are served without the chat template.
      serve: `max_context` is the longest text that is looked at, and
        `max_new_tokens` what the target answers.
    """

    task: str = "why"
    prompt: str = ""
    drafter: str = ""
    system: str = ""
    thinking: bool = False
    raw: bool = False
    serve: Serve = Serve(slots=1, max_context=1024, max_new_tokens=48)

    def __post_init__(self):
        super().__post_init__()
        check(
            bool(self.prompt.strip()),
            "prompt",
            self.prompt,
            'is empty; say --config.prompt="..."',
        )
        check(
            bool(self.drafter),
            "drafter",
            self.drafter,
            "is empty; name an exported drafter folder with --config.drafter=<folder>",
        )


@dataclasses.dataclass(frozen=True)
class Synthesise(Common):
    """Prompts and the target's answers to them, as one file."""

    task: str = "synthesise"
    data: Data = Data()
    serve: Serve = Serve()

    def __post_init__(self):
        super().__post_init__()
        _check_training_serve(self.serve)
