"""From a recipe's words to an engine that decodes: shared by every task."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterable
from typing import Any

import jax

from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.core.topology import Topology
from spec_jax.decode.auto_off import AutoOff
from spec_jax.decode.engine import Engine
from spec_jax.decode.forward import Weights
from spec_jax.decode.options import EngineOptions, check_proposes
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter, Frozen
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.export.folder import Exported, read_folder
from spec_jax.sampling import trees
from spec_jax.target import checkpoint, loading, model, published
from spec_jax.target.loading import Target

# (drafter, its parameters, what it borrows from the target): a drafter that
# comes from training and not from a folder.
Trained = tuple[Drafter, Any, Frozen]

NO_PLAN = PlanOptions()  # every window is full


def load_serving_target(
    target: schema.Target, *, layers_apart: bool | None = None
) -> tuple[Target, Any]:
    """Loads a target and lays its weights out for decoding.

    Args:
      target: the recipe's section.
      layers_apart: see `serving_params`.

    Returns:
      The target (its own `params` have stacked layers) and the parameters that
      the engine runs.

    Raises:
      UserError: no such target (see `target.loading.load_target`).
    """
    if target.source == "tiny":
        from experiments import tiny_target

        loaded = tiny_target.load(target)
    else:
        loaded = loading.load_target(target.source, dtype=target.dtype)
    return loaded, serving_params(loaded.params, layers_apart=layers_apart)


def planned_target(target: schema.Target) -> Target:
    """What a plan needs of a target: its weights only where they are at hand.

    Args:
      target: the recipe's section. A published name without a folder of that name
        gives sizes and shapes, no tokenizer and no weights.

    Raises:
      UserError: no such target (see `target.loading.load_target`).
    """
    spec = published.SPECS.get(target.source)
    if spec is None or os.path.exists(target.source):
        return load_serving_target(target)[0]
    shapes = {
        path: jax.ShapeDtypeStruct(shape, target.dtype)
        for path, shape in checkpoint.tree_shapes(spec).items()
    }
    return Target(spec, checkpoint.nest(shapes), None, None, "")


def serving_params(params: Any, *, layers_apart: bool | None = None) -> Any:
    """A target's parameters in the layout that decodes fastest.

    On a CPU a scan copies each layer's weights out of the stack in every step,
    so the layers are kept apart there; a TPU or GPU scans the stack, and one
    layer is compiled. Embedding, head and final norm are shared, not copied.

    Args:
      params: `{"params": tree}` with stacked layers, or apart already.
      layers_apart: True or False instead of what the platform suggests.
    """
    if layers_apart is None:
        layers_apart = jax.default_backend() == "cpu"
    if not layers_apart or model.is_apart(params):
        return params
    tree = params["params"]
    layers = {"params": {"layers": tree["layers"]}}
    apart = jax.jit(model.unstack_layers)(layers)["params"]["layers"]
    return {"params": {**tree, "layers": apart}}


@functools.cache
def note(sentence: str) -> None:
    """A remark on what is served, on the error stream, once in a process."""
    print(f"note: {sentence}", file=sys.stderr)


def load_drafter(folder: str, target: Target, *, num_draft: int = 0) -> Exported:
    """Reads an exported drafter for a target, and says what its folder left open.

    Args:
      folder: an exported folder.
      target: the target it is to serve.
      num_draft: M of a round; 0 is what it was trained for.

    Raises:
      UserError: the folder is missing, torn, or made for another target; or more
        drafts are asked for than it was trained for.
    """
    try:
        exported = read_folder(folder, target, num_draft=num_draft or None)
    except UserError:
        raise
    except ValueError as error:  # the block layout refuses num_draft
        raise UserError(str(error)) from error
    for sentence in exported.notes:
        note(sentence)
    return exported


def new_drafter(cfg: Any, target: Target, *, draft_vocab_size: int = 0) -> Drafter:
    """The drafter that a recipe with a `drafter` section describes, untrained.

    Args:
      cfg: the recipe.
      target: what it drafts for.
      draft_vocab_size: U, for a drafter with rows of its own per draft token
        (a head, a correction); 0 is the target's vocabulary.

    Raises:
      UserError: no such drafter, an unknown option, or one that does not fit.
    """
    options = cfg.drafter.options_dict()
    # One outside the vocabulary is left for the drafter to refuse.
    if (
        cfg.target.source == "tiny"
        and -1 <= options.get("mask_id", -2) < target.spec.vocab_size
    ):
        from experiments import tiny_target

        options["mask_id"] = target.tokenizer.id_of(tiny_target.MASK)
    made = base.load(cfg.drafter.name, options, target.spec)
    if draft_vocab_size and hasattr(made.options, "draft_vocab_size"):
        options["draft_vocab_size"] = draft_vocab_size
        made = base.load(cfg.drafter.name, options, target.spec)
    return made


def make_engine(
    target: Target,
    params: Any,
    serve: schema.Serve,
    drafter: Exported | Trained | None = None,
    *,
    chunks_per_tick: int = 1,
    plain: bool = True,
    plan: PlanOptions = NO_PLAN,
    text: bool = False,
    **options: Any,
) -> Engine:
    """Compiles an engine for a recipe's `serve` section.

    Args:
      target: the target.
      params: its parameters, from `load_serving_target` or `serving_params`.
      serve: shapes and switches.
      drafter: what `load_drafter` returned, a `Trained` one, or None to decode
        plainly.
      chunks_per_tick: prefill chunks between two rounds (offline work: many).
      plain: also compile a drafter's engine for rounds in which nobody speculates.
      plan: how many of the drafts are verified.
      text: requests have text, and may have stop strings.
      options: further fields of `EngineOptions`.

    Raises:
      UserError: the allocation is too small, `serve.num_draft` is more than the
        drafter was trained for, or what `check_topology` refuses.
    """
    chosen, weights, mask_id = None, Weights(target=params), -1
    if drafter is not None:
        chosen, draft, frozen = unpack(drafter, params)
        check_topology(serve, chosen)
        if serve.num_draft not in (0, chosen.layout.num_draft):
            chosen = with_num_draft(chosen, serve.num_draft, target)
        weights = Weights(target=params, draft=draft, frozen=frozen)
        mask_id = mask_id_of(chosen)
    engine_options = EngineOptions(
        slots=serve.slots,
        max_context=serve.max_context,
        prefill_buckets=serve.prefill_ladder,
        chunks_per_tick=chunks_per_tick,
        plain=plain,
        round=RoundOptions(
            one_hot_draft=serve.one_hot_draft,
            topology=topology_of(serve),
            plan=plan,
        ),
        num_ids=target.tokenizer.num_ids if target.tokenizer is not None else 0,
        **options,
    )
    tokenizer = target.tokenizer if text else None
    return Engine(target.spec, weights, engine_options, chosen, mask_id, tokenizer)


def topology_of(serve: schema.Serve) -> Topology:
    """What the recipe drafts: a chain, or one of the trees.

    A static tree without `serve.tree_parents` is `trees.DEFAULT_STATIC_TREE`, cut
    to `serve.tree_depth` levels.

    Raises:
      UserError: a tree whose sizes cannot be.
    """
    if serve.topology == "dynamic_tree":
        return Topology(
            serve.topology, serve.tree_depth, serve.tree_top_k, serve.tree_nodes
        )
    parents: tuple[int, ...] = ()
    if serve.topology == "static_tree":
        parents = serve.tree_parents
        if not parents and serve.tree_depth < 1:
            raise UserError(
                f"serve.tree_depth={serve.tree_depth} must be at least 1 for "
                "serve.topology='static_tree'; raise it, or name serve.tree_parents"
            )
        parents = parents or trees.cut(trees.DEFAULT_STATIC_TREE, serve.tree_depth)
    return Topology(serve.topology, parents=parents)


def check_topology(serve: schema.Serve, drafter: Drafter) -> None:
    """Refuses a topology that a drafter cannot propose, and drafts that it ignores.

    Raises:
      UserError: `serve.topology` is none of the drafter's, or `serve.num_draft` is
        set for a tree, whose drafts are its nodes.
    """
    topology = topology_of(serve)
    check_proposes(drafter, topology)
    if serve.num_draft and not topology.is_chain:
        sizes = {
            "static_tree": "serve.tree_depth or serve.tree_parents",
            "dynamic_tree": "serve.tree_nodes",
        }
        raise UserError(
            f"serve.num_draft={serve.num_draft} is for serve.topology='chain', and "
            f"this is {serve.topology!r}: set {sizes[serve.topology]} instead, and "
            "leave serve.num_draft out"
        )


def one_by_one(serve: schema.Serve) -> schema.Serve:
    """One request at a time: validation and the final decode share programs."""
    return dataclasses.replace(serve, slots=1)


def features_of(settings: Iterable[Settings]) -> dict[str, Any]:
    """The fields of `EngineOptions` that these requests need compiled in."""
    found: dict[str, Any] = {}
    for one in settings:
        if one.has_rules:
            found["penalties"] = True
        if one.logprobs:
            found["logprobs"] = max(found.get("logprobs", 0), one.top_logprobs)
    return found


def auto_off_of(limits: schema.AutoOff) -> AutoOff | None:
    """The engine's limits of a recipe's; None where none is set."""
    if not limits.used:
        return None
    return AutoOff(
        limits.min_accept_length,
        limits.rounds,
        None if limits.max_active < 0 else limits.max_active,
        None if limits.max_context < 0 else limits.max_context,
    )


def settings_from(serve: schema.Serve, **overrides: Any) -> Settings:
    """One request's settings from the `serve` section; overrides win.

    Raises:
      UserError: a value is out of its range.
    """
    # `serve.num_draft` is the engine's M, a request's is a window of its own.
    fields = {f.name for f in dataclasses.fields(Settings)} - {"num_draft"}
    chosen = {
        f.name: getattr(serve, f.name)
        for f in dataclasses.fields(serve)
        if f.name in fields
    }
    return Settings(**chosen | overrides)


def unpack(drafter: Exported | Trained, params: Any) -> Trained:
    """The drafter, its parameters and what it borrows from `params`."""
    if isinstance(drafter, Exported):
        frozen = frozen_from_params(params, drafter.draft_vocab)
        return drafter.drafter, drafter.params, frozen
    return drafter


def with_num_draft(drafter: Drafter, num_draft: int, target: Target) -> Drafter:
    """The drafter serving `num_draft` drafts a round, and a note of it; 0 leaves it.

    Raises:
      UserError: more drafts than it was trained for.
    """
    if num_draft in (0, drafter.layout.num_draft):
        return drafter
    try:
        drafter.layout.with_num_draft(num_draft)
    except ValueError as error:
        raise UserError(str(error)) from error
    note(
        f"drafter {drafter.name!r} serves {num_draft} of the "
        f"{drafter.layout.num_draft} drafts a round that it was made for"
    )
    options = dataclasses.replace(drafter.options, num_draft=num_draft)
    return base.load(drafter.name, options, target.spec)


def mask_id_of(drafter: Drafter) -> int:
    """The drafter's mask token, or -1 for a drafter without one."""
    return getattr(drafter.options, "mask_id", -1)
