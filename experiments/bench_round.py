"""Times of one round and of its parts, taken in turn in one process.

A plain step, a verify of each width, drafting alone and the whole round are
compiled apart from the production stages and run one after the other, again and
again; medians are compared. The cache that a program writes is donated to it,
as in a real round, and handed on to the next, so that no copy is timed that a
round would not make; `cache_copies` counts the copies that the compiler made.

Every call starts from the same committed context. Weights of the drafter are
random: times do not depend on them. What the round costs beside drafting and
verifying (the accept law, commit, draft state) is `overhead_fraction`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import serving
from spec_jax.config import schema
from spec_jax.core import verify_layout
from spec_jax.core.errors import UserError
from spec_jax.core.vocab import DraftVocab
from spec_jax.decode import forward, propose, step
from spec_jax.decode.forward import Weights
from spec_jax.decode.state import DecodeState, Slots, empty_slots
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters.base import Drafter, Rows
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.sampling.transform import Sampling
from spec_jax.target.cache import init_cache
from spec_jax.target.loading import Target

GREEDY, SAMPLED = "greedy", "sampled"
_STANDARD_WIDTH = 8  # `verify8_over_plain`
_NUM_STOP_IDS = 1
# Tokens of a drafter that is timed for its trunk alone.
TRUNK_VOCAB = 64


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program and what it is called with.

    Attributes:
      run: (state, slots) -> (state, outputs); `state` is donated where written.
      compiled: the executable.
      sampling: GREEDY or SAMPLED.
    """

    run: Callable
    compiled: Any
    sampling: str


def main(cfg: schema.BenchRound, workdir: pathlib.Path) -> dict[str, Any]:
    """Metrics and the cost split of `configs/bench/round.py`."""
    del workdir
    target, params = serving.load_serving_target(cfg.target)
    drafter = sized(cfg, target, cfg.drafter.draft_vocab)
    small = sized(cfg, target, TRUNK_VOCAB)
    return measure(cfg, target, params, drafter, small=small)


def sized(cfg: schema.BenchRound, target: Target, draft_vocab: int) -> Drafter:
    """The recipe's drafter, proposing `draft_vocab` tokens (0: all)."""
    drafter = serving.new_drafter(cfg, target, draft_vocab_size=draft_vocab)
    return serving.with_num_draft(drafter, cfg.serve.num_draft, target)


def measure(
    cfg: schema.BenchRound,
    target: Target,
    params: Any,
    drafter: Drafter,
    *,
    standard: bool = True,
    small: Drafter | None = None,
) -> dict[str, Any]:
    """Compiles, warms up, measures in turn.

    Args:
      cfg: the recipe; `bench` says how, `serve` gives the sampled settings.
      target: the target; only its spec is read.
      params: its parameters in the serving layout.
      drafter: what is timed, with random weights.
      standard: also time a verify of eight rows (`verify8_over_plain`).
      small: the drafter with `TRUNK_VOCAB` tokens to propose: also time what a
        draft is made of (`draft_parts_ms`: the trunk; what grows with the
        vocabulary).

    Returns:
      Metrics; `series` holds the cost split.

    Raises:
      UserError: the allocation cannot hold the context and the widest verify.
    """
    window = serving.topology_of(cfg.serve).window(drafter.layout.num_draft)
    widths = sorted({*cfg.bench.widths, window})
    if standard:
        widths = sorted({*widths, _STANDARD_WIDTH})
    if cfg.bench.context + widths[-1] > cfg.serve.max_context:
        raise UserError(
            f"serve.max_context={cfg.serve.max_context} must be at least bench.context "
            f"plus the widest verify, {cfg.bench.context + widths[-1]}; raise it"
        )
    weights = random_weights(cfg, target, params, drafter, cfg.drafter.draft_vocab)
    state = _live_state(cfg, target, drafter)
    programs = compile_programs(cfg, target, drafter, weights, state, widths)
    if small is not None:
        few = random_weights(cfg, target, params, small, TRUNK_VOCAB)
        programs["trunk", GREEDY] = draft_program(cfg, small, few, state, GREEDY)
    times, emitted = _run_in_turn(cfg, target, programs, state)
    ms = {name: statistics.median(values) for name, values in times.items()}
    found = {
        "plain_step_ms": ms["plain", GREEDY],
        "verify_ms": {str(w): ms[f"verify{w}", GREEDY] for w in widths},
    }
    if _STANDARD_WIDTH in widths:
        verify8 = ms[f"verify{_STANDARD_WIDTH}", GREEDY]
        found["verify8_over_plain"] = verify8 / ms["plain", GREEDY]
    for kind, suffix in ((GREEDY, ""), (SAMPLED, "_sampled")):
        draft, whole = ms["draft", kind], ms["round", kind]
        rest = whole - draft - ms[f"verify{window}", GREEDY]
        found[f"draft_ms{suffix}"] = draft
        found[f"round_ms{suffix}"] = whole
        found[f"overhead_fraction{suffix}"] = rest / whole
    found["plain_step_ms_sampled"] = ms["plain", SAMPLED]
    found["extend_ms"] = ms["extend", GREEDY]
    if small is not None:
        trunk = ms["trunk", GREEDY]
        found["draft_parts_ms"] = {
            "trunk": trunk,
            "vocabulary": ms["draft", GREEDY] - trunk,
        }
    return found | {
        "cache_copies": sum(
            cache_copies(program.compiled, state) for program in programs.values()
        ),
        "window": window,
        "context": cfg.bench.context,
        "slots": cfg.serve.slots,
        "repeats": cfg.bench.repeats,
        "series": {"cost": _cost(ms, emitted, window, cfg.serve.slots)},
    }


def random_weights(cfg, target: Target, params, drafter: Drafter, kept: int):
    """Random weights over `kept` tokens; which ids does not matter to a time."""
    vocab = DraftVocab(tuple(range(kept)), target.spec.vocab_size) if kept else None
    return Weights(
        target=params,
        draft=jax.jit(drafter.init)(jax.random.key(cfg.seed)),
        frozen=frozen_from_params(params, vocab),
    )


def draft_program(cfg, drafter: Drafter, weights, state: DecodeState, kind: str):
    """Propose alone."""
    options = round_options(cfg)

    def draft_only(weights, draft, slots):
        # The cache is no part of it: a drafter reads its own state alone.
        before = DecodeState(None, draft, slots)
        return propose.propose(
            drafter,
            weights.draft,
            weights.frozen,
            before,
            one_hot=options.one_hot_draft,
            topology=options.topology,
        )

    draft = jax.jit(draft_only).lower(weights, state.draft, state.slots).compile()

    def run_draft(state, slots):
        return state, draft(weights, state.draft, slots)

    return Program(run_draft, draft, kind)


def extend_program(cfg, drafter: Drafter, weights, state: DecodeState):
    """The draft state's step after a verify whose drafts were all accepted."""
    batch = cfg.serve.slots
    window = serving.topology_of(cfg.serve).window(drafter.layout.num_draft)
    needs = drafter.needs
    rng = np.random.default_rng(cfg.seed)

    def noise(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    rows = Rows(
        tokens_BT=jnp.ones((batch, window), jnp.int32),
        next_tokens_BT=jnp.ones((batch, window), jnp.int32),
        features_BTLD=noise(batch, window, needs.num_layers, needs.width),
        hidden_BTD=noise(batch, window, needs.width),
        start_B=state.slots.length_B,
        length_B=jnp.full((batch,), window, jnp.int32),
    )

    def extend_only(weights, draft, rows):
        return drafter.extend(weights.draft, weights.frozen, draft, rows)

    lowered = jax.jit(extend_only, donate_argnums=1).lower(weights, state.draft, rows)
    extend = lowered.compile()

    def run_extend(state, slots):
        del slots
        draft = extend(weights, state.draft, rows)
        return state.replace(draft=draft), draft

    return Program(run_extend, extend, GREEDY)


def round_options(cfg: schema.BenchRound) -> RoundOptions:
    """The static choices of the recipe's round."""
    return RoundOptions(
        one_hot_draft=cfg.serve.one_hot_draft, topology=serving.topology_of(cfg.serve)
    )


def compile_programs(
    cfg: schema.BenchRound,
    target: Target,
    drafter: Drafter,
    weights: Weights,
    state: DecodeState,
    widths: list[int],
) -> dict[tuple[str, str], Program]:
    """What is timed, by (name, sampling), in the order of one turn."""
    taps, options = drafter.needs.layer_ids, round_options(cfg)
    programs = target_programs(cfg, target, weights, state, widths, taps)
    plain = programs["plain", GREEDY]

    def whole_round(weights, state):
        return step.round_step(target.spec, drafter, taps, options, weights, state)

    abstract = jax.eval_shape(lambda x: x, state)
    whole = jax.jit(whole_round, donate_argnums=1).lower(weights, abstract).compile()

    def run_round(state, slots):
        return whole(weights, state.replace(slots=slots))

    drafting = draft_program(cfg, drafter, weights, state, GREEDY)
    for kind in (GREEDY, SAMPLED):
        programs["draft", kind] = dataclasses.replace(drafting, sampling=kind)
        programs["round", kind] = Program(run_round, whole, kind)
    programs["plain", SAMPLED] = dataclasses.replace(plain, sampling=SAMPLED)
    programs["extend", GREEDY] = extend_program(cfg, drafter, weights, state)
    return programs


def target_programs(
    cfg: schema.BenchRound,
    target: Target,
    weights: Weights,
    state: DecodeState,
    widths: Sequence[int],
    taps: tuple[int, ...],
) -> dict[tuple[str, str], Program]:
    """A plain step and a verify of each width, features of `taps` kept."""
    spec, options = target.spec, round_options(cfg)
    slots = jax.eval_shape(lambda: _slots(cfg, spec.vocab_size, GREEDY))
    cache = jax.eval_shape(lambda x: x, state.cache)
    batch = cfg.serve.slots

    def aot(function, *args):
        """Compiles `function(weights, cache, ...)`; the cache is donated."""
        jitted = jax.jit(function, donate_argnums=1)
        return jitted.lower(weights, cache, *args).compile()

    def plain_step(weights, cache, slots):
        before = DecodeState(cache, None, slots)
        after, result = step.round_step(
            spec, None, (), options, weights, before, speculate=False
        )
        return after.cache, result

    plain = aot(plain_step, slots)

    def run_plain(state, slots):
        cache, result = plain(weights, state.cache, slots)
        return state.replace(cache=cache), result

    def verify_program(width):
        drafts_BM = jnp.ones((batch, width - 1), jnp.int32)
        full_B = jnp.full((batch,), width, jnp.int32)

        def verify_only(weights, cache, slots, drafts_BM, full_B):
            layout = verify_layout.chain(slots.anchor_B, drafts_BM, full_B)
            before = DecodeState(cache, None, slots)
            logits_BWV, output = forward.target_rows(
                spec, weights, before, layout, taps
            )
            return output.cache, (logits_BWV, output.features_BTLD)

        verify = aot(verify_only, slots, drafts_BM, full_B)

        def run_verify(state, slots):
            cache, rows = verify(weights, state.cache, slots, drafts_BM, full_B)
            return state.replace(cache=cache), rows

        return Program(run_verify, verify, GREEDY)

    programs = {("plain", GREEDY): Program(run_plain, plain, GREEDY)}
    for width in widths:
        programs[f"verify{width}", GREEDY] = verify_program(width)
    return programs


def verify_times(
    cfg: schema.BenchRound,
    target: Target,
    params: Any,
    widths: Sequence[int],
    taps: tuple[int, ...] = (),
) -> dict[int, float]:
    """Milliseconds of a verify of each width, a plain step's under 1; medians.

    A tree of as many rows has other masks and positions, and the same sizes.

    Args:
      cfg: `bench` says how, `serve` the slots and their length.
      target: the target; only its spec is read.
      params: its parameters in the serving layout.
      widths: rows W of a verify, above 1.
      taps: layers whose features a round keeps.
    """
    state = _live_state(cfg, target, None)
    weights = Weights(params)
    programs = target_programs(cfg, target, weights, state, widths, taps)
    times, _ = _run_in_turn(cfg, target, programs, state)
    ms = {1: statistics.median(times["plain", GREEDY])}
    return ms | {w: statistics.median(times[f"verify{w}", GREEDY]) for w in widths}


def cache_copies(compiled: Any, state: DecodeState) -> int:
    """Copies of a whole target or draft cache in a compiled program.

    A donated cache that is written where it lies needs none. A copy would be
    timed in a part and not in the round, or the other way about.
    """
    shapes = {
        ",".join(map(str, leaf.shape))
        for leaf in jax.tree.leaves((state.cache, state.draft))
        if leaf.ndim > 3
    }
    made = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    return sum(shape in shapes for shape in made)


def _run_in_turn(cfg, target, programs: Mapping, state: DecodeState):
    """Milliseconds of every call, and tokens that each kind of round emitted."""
    times: dict = {name: [] for name in programs}
    emitted: dict = {}
    for repeat in range(cfg.bench.warmup + cfg.bench.repeats):
        for name, program in programs.items():
            slots = _slots(cfg, target.spec.vocab_size, program.sampling)
            jax.block_until_ready((state, slots))
            start = time.perf_counter()
            state, outputs = jax.block_until_ready(program.run(state, slots))
            seconds = time.perf_counter() - start
            if repeat >= cfg.bench.warmup:
                times[name].append(1e3 * seconds)
            if name[0] == "round":
                emitted[name[1]] = int(np.sum(outputs.emitted_B))
    return times, emitted


def _live_state(cfg: schema.BenchRound, target: Target, drafter: Drafter | None):
    """Caches whose first `bench.context` rows count; what they hold is random."""
    size = cfg.serve.slots, cfg.serve.max_context
    cache = init_cache(target.spec, *size)
    draft = None if drafter is None else drafter.init_state(*size)
    rng = np.random.default_rng(cfg.seed)

    def fill(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(noise, leaf.dtype)

    cache, draft = jax.tree.map(fill, (cache, draft))
    return DecodeState(cache, draft, _slots(cfg, target.spec.vocab_size, GREEDY))


def _slots(cfg: schema.BenchRound, vocab_size: int, kind: str) -> Slots:
    """Live slots, new buffers each time: a round takes them away."""
    batch, serve = cfg.serve.slots, cfg.serve

    def each(value, dtype=np.int32):
        return jnp.asarray(np.full((batch,), value, dtype))

    sampled = kind == SAMPLED
    return empty_slots(batch, _NUM_STOP_IDS).replace(
        anchor_B=jnp.asarray(np.arange(1, batch + 1, dtype=np.int32) % vocab_size),
        length_B=each(cfg.bench.context),
        remaining_B=each(1 << 20),
        active_B=each(True, bool),
        speculate_B=each(True, bool),
        seed_B=each(cfg.seed),
        sampling=Sampling(
            greedy_B=each(not sampled, bool),
            temperature_B=each(serve.temperature if sampled else 1.0, np.float32),
            top_k_B=each(serve.top_k if sampled else 0),
            top_p_B=each(serve.top_p if sampled else 1.0, np.float32),
            min_p_B=each(serve.min_p if sampled else 0.0, np.float32),
        ),
    )


def _cost(ms: Mapping, emitted: Mapping, window: int, batch: int) -> dict:
    """Milliseconds per emitted token, part by part."""
    bars = {"plain": {"verify": ms["plain", GREEDY] / batch}}
    for kind in (GREEDY, SAMPLED):
        bars[f"round, {kind}"] = round_parts(
            ms["draft", kind],
            ms[f"verify{window}", GREEDY],
            ms["extend", GREEDY],
            ms["round", kind],
            emitted[kind],
        )
    return bars


def round_parts(
    draft_ms: float, verify_ms: float, state_ms: float, round_ms: float, tokens: float
) -> dict[str, float]:
    """A round's milliseconds per emitted token, part by part.

    Args:
      draft_ms, verify_ms, state_ms, round_ms: medians of one run, of programs of
        their own; what the compiled round fuses between them shortens the rest.
      tokens: emitted by the round, all slots together.
    """
    parts = {"draft": draft_ms, "verify": verify_ms, "draft state": state_ms}
    parts["accept, commit"] = max(0.0, round_ms - sum(parts.values()))
    return {part: value / tokens for part, value in parts.items()}
