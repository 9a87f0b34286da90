"""What recipes share: the schema's defaults as a ConfigDict, options included.

The options of a drafter, of the objective and of the mesh are spelled out with
their own defaults, so that each can be set from the command line
(`--config.drafter.options.num_layers=1`). An option without a value ("the
target's own") may be set to a number there, too.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import types
import typing
from typing import Any

import ml_collections
from ml_collections import config_dict

from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.objectives.records import ObjectiveOptions
from spec_jax.parallel.mesh import MeshOptions

SMOLLM2 = "smollm2-135m-instruct"
# SmolLM2's vocabulary has no mask token; `<empty_output>` is never produced.
SMOLLM2_MASK_ID = 16
# Qwen3's, of the public drafters for it.
QWEN3_MASK_ID = 151669


def base(task: str = "pipeline", drafter: str = "dflash") -> ml_collections.ConfigDict:
    """Every default of a task's recipe, locked: recipes change values only.

    Args:
      task: a key of `schema.SCHEMAS`.
      drafter: whose options the `drafter` section holds, where there is one.
    """
    tree = loading.defaults(schema.SCHEMAS[task])
    if isinstance(tree.get("drafter"), dict):
        tree["drafter"] = {
            **tree["drafter"],
            "name": drafter,
            "options": _drafter_options(drafter),
        }
    if "objective" in tree:
        tree["objective"] = _open(ObjectiveOptions)
    if "mesh" in tree:
        tree["mesh"] = _open(MeshOptions)
    return loading.to_config_dict(tree)


def takes_no_word(path: str, word: str) -> None:
    """Refuses what stands after the colon of a recipe that has no variants.

    Raises:
      UserError: there is a word.
    """
    if word:
        raise UserError(
            f"{path}:{word} names a variant and this recipe has none; leave "
            f"':{word}' out"
        )


def base_of(recipe: Any) -> dict[str, Any]:
    """The plain defaults that a frozen recipe started from."""
    drafter = getattr(recipe, "drafter", "")
    name = drafter.name if isinstance(drafter, schema.Drafter) else "dflash"
    return base(recipe.task, name).to_dict()


def set_options(config: ml_collections.ConfigDict, **values: Any) -> None:
    """Sets those of the drafter's options that this drafter has.

    One recipe serves every drafter of the family, and one from elsewhere: the
    values say how large each kind is to be, and other kinds' are left out.
    """
    options = config.drafter.options
    options.update({name: v for name, v in values.items() if name in options})


def smollm2_drafter(config: ml_collections.ConfigDict) -> None:
    """Makes the recipe's target SmolLM2 and its drafter one for SmolLM2."""
    config.target.source = SMOLLM2
    set_options(config, mask_id=SMOLLM2_MASK_ID)


def qwen3(config: ml_collections.ConfigDict, source: str) -> None:
    """A drafter of published size for a Qwen3 target (a folder of that name)."""
    name = config.drafter.name
    config.target.source = source
    config.target.dtype = "bfloat16"
    config.data.num_synth_prompts = 256
    config.data.max_new_tokens = 384
    config.data.max_tokens = 512
    config.capture.dtype = "bfloat16"
    config.train.seq_len = 512
    config.train.steps = 10000
    config.train.clip = 1.0
    config.train.lr = 6e-4
    config.train.warmup_fraction = 0.04
    config.export.dtype = "bfloat16"
    options = config.drafter.options
    set_options(config, mask_id=QWEN3_MASK_ID)
    # 128 blocks of 7: half a gigabyte of logits over the whole vocabulary at a time.
    config.objective.chunk_rows = 128 * 7
    if name in ("dflash", "dspark", "dflash2"):
        options.num_layers = 5
        options.num_anchors = 512
        options.layer_ids = (1, 9, 17, 25, 33)
        options.num_draft = {"dflash": 15, "dspark": 7, "dflash2": 7}[name]
        config.objective.decay_gamma = 4.0 if name == "dspark" else 7.0
    if name == "dspark":
        options.markov_rank = 256
    if name == "dflash2":
        options.selector_rank = 256
    if name == "eagle3":
        options.layer_ids = (1, 17, 32)
        options.ttt_length = 7
        config.drafter.draft_vocab = 32000
        config.objective.decay_gamma = 4.48  # 0.8 per depth
        config.train.lr = 1e-4
        config.train.clip = 0.5
    if name == "eagle":
        config.train.lr = 3e-5
        config.train.clip = 0.5


def newest_export(recipe: str) -> str:
    """The drafter folder of a recipe's latest finished run below `runs`, or ""."""
    reports = pathlib.Path("runs").glob(f"{recipe}-*/report.json")
    folders = [(p.stat().st_mtime, p.parent / "export") for p in reports]
    return max(((t, str(f)) for t, f in folders if f.is_dir()), default=(0, ""))[1]


def tiny_serving(config: ml_collections.ConfigDict) -> None:
    """Serves the tiny target with the drafter of the latest `configs/tiny.py:dflash`.

    The sizes are those of that recipe.
    """
    config.target.source = "tiny"
    config.drafter = newest_export("tiny-dflash")
    config.serve.slots = 4
    config.serve.max_context = 160
    config.serve.prefill_buckets = (64,)
    config.serve.max_new_tokens = 48


def _drafter_options(name: str) -> dict[str, Any]:
    path = name if "." in name else f"spec_jax.drafters.{name}"
    try:
        return _open(importlib.import_module(path).Options)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"drafter {name!r} is not a drafter: {path} must be importable and define "
            "Options and make(options, target_spec)"
        ) from error


def _open(options: type) -> dict[str, Any]:
    """An options class as values; None becomes a typed place for a value."""
    hints = typing.get_type_hints(options)
    return {
        field.name: field.default
        if field.default is not None
        else config_dict.placeholder(_inner(hints[field.name]))
        for field in dataclasses.fields(options)
    }


def _inner(hint: Any) -> type:
    """X of `X | None`."""
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint
