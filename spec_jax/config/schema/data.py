"""Prompts, the answers to them, and the features of both."""

from __future__ import annotations

import dataclasses

from spec_jax.config.schema.checks import (
    DTYPES,
    at_least,
    check,
    one_of,
    share,
    temperature,
    top_p,
)

# What makes texts here, and has no effect beside `data.samples`. Recipes set the second
# ones whether samples are named or not, so only one that is typed is refused.
_MADE_HERE = (
    "answer_temperature",
    "answer_top_p",
    "synth_temperature",
    "synth_top_p",
    "max_file_prompts",
)
SET_BY_RECIPES = (
    "num_synth_prompts",
    "synth_openings",
    "synth_max_tokens",
    "greedy_share",
)


@dataclasses.dataclass(frozen=True)
class Data:
    """Prompts, and the answers the target itself gives to them.

    Attributes:
      prompts: a `.jsonl` file of prompts, or several with commas between them,
        "builtin" for the project's own list, or "" for synthesised prompts only.
      train_on_prompts: whether prompts of the files are answered for training
        too; False keeps them for validation only.
      max_file_prompts: how many of the files' prompts are used, held-out ones
        included; 0 is all.
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
      held_out: prompts kept away from training, for validation: of each file that
        `prompts` names, else of those that are trained on. A prompt is on one side
        only, and is used once.
      looping: what becomes of answers that repeat an 8-gram three times: "drop",
        "keep", or "cut", which ends them where they begin to repeat.
      system: system message of every conversation; "" leaves the template's own.
      thinking: the chat template's thinking switch.
      samples: a file of token samples made before (`configs/synthesise.py` makes
        one); "" makes them in this run. With `prompts` beside it, those prompts
        that no sample answers are for validation; without, some of the samples'
        own prompts are.
      mask_id: a token that prompts must not hold; -1 is the drafter's mask.
      folder: where samples and features are kept, so that several drafters train
        on the same ones; "" is the run's own folder.
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
    looping: str = "drop"
    system: str = ""
    thinking: bool = False
    samples: str = ""
    mask_id: int = -1
    folder: str = ""

    def __post_init__(self):
        temperature("data", self, "synth_temperature", "answer_temperature")
        top_p("data", self, "synth_top_p", "answer_top_p")
        share("data", self, "greedy_share")
        one_of("data", self, "looping", ("drop", "cut", "keep"))
        at_least(0, "data", self, "max_file_prompts", "num_synth_prompts")
        at_least(1, "data", self, "synth_max_tokens", "max_new_tokens", "held_out")
        check(
            self.max_tokens > self.max_new_tokens,
            "data.max_tokens",
            self.max_tokens,
            f"must be more than data.max_new_tokens={self.max_new_tokens}: it counts "
            "the prompt too",
        )
        check(
            bool(self.prompts or self.samples or self.num_synth_prompts),
            "data.num_synth_prompts",
            self.num_synth_prompts,
            "leaves nothing to train on; synthesise some, or name data.prompts",
        )
        for name in _MADE_HERE if self.samples else ():
            value = getattr(self, name)
            check(
                value == getattr(Data, name),
                f"data.{name}",
                value,
                f"makes texts, and data.samples={self.samples!r} are made already; "
                "leave it out",
            )


@dataclasses.dataclass(frozen=True)
class Capture:
    """The frozen target's features on disk.

    Attributes:
      dtype: features are stored in it.
      batch: conversations of one forward that captures a text which is there
        without features; answers keep theirs as they are made, in batches of their
        own.
      shard_samples: conversations of one shard (one writer each).
      teacher: also keep the post-norm last hidden state (kept in any case for a
        drafter that needs it).
      layer_ids: layer outputs to keep, so that drafters with other needs read the
        same store; () keeps the drafter's own.
    """

    dtype: str = "float32"
    batch: int = 8
    shard_samples: int = 64
    teacher: bool = False
    layer_ids: tuple[int, ...] = ()

    def __post_init__(self):
        one_of("capture", self, "dtype", (*DTYPES, "float16"))
        at_least(1, "capture", self, "batch", "shard_samples")
