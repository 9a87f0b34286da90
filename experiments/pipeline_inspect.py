"""A small batch of a recipe's training data, token by token."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.markup
import rich.table

from experiments import preparing, serving, training
from spec_jax.config import schema
from spec_jax.core import block_layout
from spec_jax.core.batch import Batch
from spec_jax.data.samples import Sample
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.objectives.weights import decay_weights
from spec_jax.target.loading import Target
from spec_jax.train.state import run_keys
from spec_jax.train.step import step_keys

SHOWN = 3  # conversations, the shortest of those made
MADE = 8  # conversations made for it
GROUP = 32  # user turns made up at once


@dataclasses.dataclass(frozen=True)
class Block:
    """A sampled anchor of one conversation and what it is to predict.

    Attributes:
      anchor: its position.
      at_M: position of each label.
      label_M: token ids.
      weight_M: share of each in the loss by its place; 0 without supervision.
    """

    anchor: int
    at_M: np.ndarray
    label_M: np.ndarray
    weight_M: np.ndarray


def show(cfg: schema.Pipeline) -> None:
    """Prints a few short conversations, and of each one block's labels and weights.

    Without `data.samples` a few prompts are answered for it, in a folder that is
    gone afterwards.
    """
    target, params = serving.load_serving_target(cfg.target)
    drafter = serving.new_drafter(cfg, target)
    few = dataclasses.replace(
        cfg,
        data=few_of(cfg.data),
        train=dataclasses.replace(cfg.train, eval_prompts=1),
    )
    mask_id = serving.mask_id_of(drafter)
    with tempfile.TemporaryDirectory() as folder:
        made = preparing.synthesise(
            few, target, params, mask_id, pathlib.Path(folder), GROUP
        )
    samples = sorted(made.train, key=lambda s: len(s.tokens))[:SHOWN]
    blocks: list[Block | None] = [None] * len(samples)
    if preparing.trains(drafter):
        blocks = blocks_of(cfg, drafter, params, samples)
    console = rich.console.Console(highlight=False)
    for sample, block in zip(samples, blocks, strict=True):
        console.print(table_of(target, drafter, sample, block))
    objective = training.make_objective(cfg)
    more = "; objective.kind='dpace' multiplies it" if objective.kind == "dpace" else ""
    console.print(
        "features of row p are those of the target at p; the weight is that of the "
        f"draft's place (objective.decay_gamma={objective.decay_gamma}){more}"
    )


def few_of(data: schema.Data) -> schema.Data:
    """The section with a handful of prompts in place of all."""
    if data.samples:
        return data
    num_files = len(list(filter(None, data.prompts.split(","))))
    from_files = bool(num_files) and data.train_on_prompts
    return dataclasses.replace(
        data,
        held_out=1,
        max_file_prompts=num_files + MADE,
        num_synth_prompts=0 if from_files else min(data.num_synth_prompts, MADE + 1),
    )


def blocks_of(
    cfg: schema.Pipeline, drafter: Drafter, params, samples: list[Sample]
) -> list[Block | None]:
    """One block of each conversation, as a first step over them would draw it."""
    size_s = max(len(s.tokens) for s in samples)
    tokens_BS = np.zeros((len(samples), size_s), np.int32)
    length_B = np.asarray([len(s.tokens) for s in samples], np.int32)
    for row, sample in enumerate(samples):
        tokens_BS[row, : length_B[row]] = sample.tokens
    first_B = np.asarray([s.prompt_len for s in samples])
    at_S, needs = np.arange(size_s), drafter.needs
    teacher_BSD = np.zeros((*tokens_BS.shape, needs.width), np.float32)
    batch = Batch(
        tokens_BS,
        (at_S >= first_B[:, None]) & (at_S < length_B[:, None]),
        length_B,
        np.zeros((*tokens_BS.shape, needs.num_layers, needs.width), np.float32),
        teacher_BSD if needs.teacher else None,
    )

    @jax.jit
    def draw(params, frozen, batch, rng):  # all but the drawing is dead code
        key_B = step_keys(rng, 0, len(samples))
        outputs = drafter.train_outputs(params, frozen, batch, key_B)
        return outputs.anchors_BN, outputs.labels_XM, outputs.valid_XM

    shapes = jax.eval_shape(drafter.init, jax.random.key(0))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    rng, _ = run_keys(cfg.seed)
    anchors_BN, labels_XM, valid_XM = jax.device_get(
        draw(zeros, frozen_from_params(params), batch, rng)
    )
    size_m = labels_XM.shape[1]
    layout = dataclasses.replace(drafter.layout, num_draft=size_m)
    at_BNM = np.asarray(block_layout.label_positions(layout, jnp.asarray(anchors_BN)))
    label_BNM, valid_BNM = (x.reshape(at_BNM.shape) for x in (labels_XM, valid_XM))
    gamma = training.make_objective(cfg).decay_gamma
    weight_BNM = valid_BNM * np.asarray(decay_weights(size_m, gamma))
    found: list[Block | None] = []
    for b in range(len(samples)):
        real = np.flatnonzero(valid_BNM[b].any(-1))
        if real.size:
            n = real[0]
            parts = at_BNM[b, n], label_BNM[b, n], weight_BNM[b, n]
            found.append(Block(int(anchors_BN[b, n]), *parts))
        else:
            found.append(None)
    return found


def table_of(
    target: Target, drafter: Drafter, sample: Sample, block: Block | None
) -> rich.table.Table:
    """A conversation: a row for each token."""
    names = ("position", "token", "text", "supervised", "label", "weight")
    source, layers = rich.markup.escape(sample.source), drafter.needs.layer_ids
    title = f"{source}: features of layers {layers}"
    table = rich.table.Table(*names, title=title, title_justify="left")
    label, weight = {}, {}
    if block is not None:
        label[block.anchor] = "anchor: sees features of the rows above"
        for j, at in enumerate(block.at_M):
            if block.weight_M[j]:
                label[int(at)] = f"draft {j + 1}: {block.label_M[j]}"
                weight[int(at)] = f"{block.weight_M[j]:.3f}"
    for position, token in enumerate(sample.tokens):
        table.add_row(
            str(position),
            str(token),
            rich.markup.escape(repr(target.tokenizer.decode([token]))),
            "yes" if position >= sample.prompt_len else "",
            label.get(position, ""),
            weight.get(position, ""),
        )
    return table
