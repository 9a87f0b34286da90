"""Who drafts for which target, and where the rounds that are compared start."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import random_target, serving
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.core.topology import DYNAMIC_TREE, STATIC_TREE, Topology
from spec_jax.core.vocab import DraftVocab
from spec_jax.decode import plan
from spec_jax.decode.engine import Engine
from spec_jax.decode.forward import Weights
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.state import DecodeState
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.evals import laws
from spec_jax.target.spec import TargetSpec

PROMPT = (1, 0, 2, 1, 1, 0)


@dataclasses.dataclass(frozen=True)
class Subject:
    """What drafts, and how.

    Attributes:
      name: in the report.
      drafter: a module of `spec_jax.drafters`.
      options: changes of its options.
      kind: of topology.
      one_hot: argmax drafts for sampled requests.
      reduced: the draft vocabulary lacks a token.
      sharp: confidence is a yes or a no and saturates from the second draft on:
        survivals tie, and what ties depends on the drafts.
      lag: of its budgets; 0 is the recipe's.
      budget: that is planted; None: each in turn.
      modes: that it can be run in.
    """

    name: str
    drafter: str
    options: tuple[tuple[str, Any], ...] = ()
    kind: str = "chain"
    one_hot: bool = False
    reduced: bool = False
    sharp: bool = False
    lag: int = 0
    budget: int | None = None
    modes: tuple[str, ...] = plan.MODES


SUBJECTS = (
    Subject("dflash", "dflash"),
    Subject("dflash, one-hot", "dflash", one_hot=True),
    Subject("dspark", "dspark"),
    Subject(
        "dspark, saturated",
        "dspark",
        sharp=True,
        lag=1,
        modes=(plan.CAP_ACCEPT, plan.COMPACT),
    ),
    Subject("dflash2", "dflash2", (("selector_top_k", 3),)),
    Subject("eagle3", "eagle3", reduced=True),
    Subject("eagle", "eagle"),
    Subject("lookup", "lookup"),
    Subject("eagle, static tree", "eagle", kind=STATIC_TREE, modes=(plan.STATIC,)),
    Subject("eagle3, dynamic tree", "eagle3", kind=DYNAMIC_TREE, modes=(plan.STATIC,)),
)


def chosen_subjects(cfg: schema.BenchLaw) -> list[Subject]:
    """The subjects that the recipe asks for.

    Raises:
      UserError: none has such a name.
    """
    unknown = [
        name
        for name in cfg.drafters
        if not any(s.name.startswith(name) for s in SUBJECTS)
    ]
    if unknown:
        raise UserError(
            f"drafters={unknown[0]!r} begins no case's name; use some of "
            + ", ".join(repr(s.name) for s in SUBJECTS)
        )
    asked = cfg.drafters or ("",)
    return [s for s in SUBJECTS if any(s.name.startswith(name) for name in asked)]


@dataclasses.dataclass(frozen=True)
class World:
    """A subject's drafter, the target, and where the compared rounds start.

    Attributes:
      state: of one slot, after its history.
      text: the tokens of that slot, its anchor last.
      ways_XK, logits_XKV: see `laws.continuations`.
    """

    subject: Subject
    spec: TargetSpec
    drafter: Drafter
    weights: Weights
    topology: Topology
    state: DecodeState
    text: tuple[int, ...]
    ways_XK: np.ndarray
    logits_XKV: np.ndarray


@functools.cache
def make_world(cfg: schema.BenchLaw, subject: Subject) -> World:
    """Builds the drafter and decodes the history in an engine; once for all cases.

    Raises:
      UserError: the drafter's options do not fit.
    """
    spec = random_target.spec_of(cfg.vocab)
    params = random_target.params_of(spec, cfg.seed)
    options = {"num_draft": cfg.serve.num_draft, **dict(subject.options)}
    if subject.drafter in ("dflash", "dspark", "dflash2"):
        options |= {"num_layers": 1, "mask_id": cfg.vocab - 1, "layer_ids": (0,)}
    vocab = None
    if subject.reduced:
        kept = tuple(i for i in range(cfg.vocab) if i != 2)
        vocab = DraftVocab(kept, cfg.vocab)
        options["draft_vocab_size"] = vocab.size
    drafter = base.load(subject.drafter, options, spec)
    weights = random_target.weights_of(drafter, params, cfg.seed, draft_vocab=vocab)
    if subject.sharp:
        weights = random_target.with_sure_confidence(weights)
    serve = dataclasses.replace(cfg.serve, topology=subject.kind)
    topology = serving.topology_of(serve)
    window = topology.window(drafter.layout.num_draft)
    rounds = cfg.history + 3 + cfg.tokens + 2
    engine = Engine(
        spec,
        weights,
        EngineOptions(
            slots=1,
            max_context=len(PROMPT) + 1 + rounds * window,
            prefill_buckets=(len(PROMPT),),
            plain=False,
            round=RoundOptions(one_hot_draft=subject.one_hot, topology=topology),
        ),
        drafter,
    )
    state, text = after_history(engine, cfg.history, cfg.seed)
    ways_XK, logits_XKV = laws.continuations(spec, params, text, cfg.tokens)
    return World(
        subject,
        spec,
        drafter,
        weights,
        topology,
        state,
        text,
        ways_XK,
        logits_XKV,
    )


def after_history(engine: Engine, rounds: int, seed: int):
    """A request's device state after `rounds` rounds or more, and its text."""
    left = engine.room - len(PROMPT)
    settings = Settings(max_new_tokens=left, temperature=1.0, seed=seed)
    handle = engine.submit(PROMPT, settings)
    engine.step()
    while engine.running(handle).rounds < rounds - 1:
        engine.step()
    state = jax.tree.map(jnp.array, engine.state)
    engine.step()  # books the round that made this state
    generation = engine.running(handle)
    text = (*PROMPT, *generation.tokens)
    if (
        generation.rounds < rounds
        or int(state.slots.length_B[0]) != len(text) - 1
        or int(state.slots.anchor_B[0]) != text[-1]
    ):
        raise AssertionError("the state is not the one after the booked text")
    engine.abort(handle)
    return state, text
