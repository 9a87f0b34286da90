"""An engine's programs and the arrays they take, all made before it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core.verify_layout import Ladder
from spec_jax.decode import prefill, recorder, step
from spec_jax.decode.forward import Weights
from spec_jax.decode.jobs import Job
from spec_jax.decode.options import EngineOptions, alternatives
from spec_jax.decode.regimes import regime_of
from spec_jax.decode.request import NUM_BIASES, NUM_STOP_IDS, Settings, stop_ids_of
from spec_jax.decode.state import DecodeState, Slots, empty_slots
from spec_jax.drafters.base import Drafter
from spec_jax.sampling.penalties import Rules
from spec_jax.sampling.transform import Sampling
from spec_jax.target.cache import init_cache
from spec_jax.target.spec import TargetSpec


def fresh_state(
    spec: TargetSpec,
    drafter: Drafter | None,
    options: EngineOptions,
    dtype=jnp.float32,
) -> DecodeState:
    """Empty slots, and the caches they own.

    Args:
      spec: target sizes.
      drafter: whose state is kept, or None.
      options: of the engine.
      dtype: of the target's weights, hence of its keys and values.
    """
    o = options
    draft = None if drafter is None else drafter.init_state(o.slots, o.max_context)
    return DecodeState(
        cache=init_cache(spec, o.slots, o.max_context, dtype),
        draft=draft,
        slots=empty_slots(
            o.slots,
            NUM_STOP_IDS,
            num_biases=NUM_BIASES,
            vocab_size=spec.vocab_size if o.penalties else None,
            logprobs=o.logprobs is not None,
            num_sts=o.round.plan.num_own,
        ),
    )


def switched(slots: Slots, leave_B, speculate_B) -> Slots:
    """Slots without those that leave; a program of its own, between rounds."""
    return dataclasses.replace(
        slots,
        active_B=slots.active_B & ~leave_B,
        length_B=jnp.where(leave_B, 0, slots.length_B),
        speculate_B=speculate_B,
    )


def compile_programs(
    spec: TargetSpec,
    drafter: Drafter | None,
    options: EngineOptions,
    ladder: Ladder,
    weights: Weights,
    state: DecodeState,
) -> dict:
    """Compiles everything an engine will run, ahead of its first request.

    Args:
      spec: target sizes.
      drafter: or None.
      options: of the engine.
      ladder: its (R, T).
      weights: parameters.
      state: what `fresh_state` makes, or its shapes.

    Returns:
      ("plain", R), ("round", R, T), a prefill bucket's length, "switch" or "rows" ->
      the compiled program. All take (weights, state, ...) and consume the state;
      "switch" takes the slots, who leaves and who speculates; "rows", of a
      recorder, takes its state and a slot, and consumes nothing.
    """
    drafts = drafter is not None and bool(drafter.topologies)
    taps = drafter.needs.layer_ids if drafter else ()
    is_packed = options.round.plan.is_packed
    round_options = dataclasses.replace(
        options.round,
        top_logprobs=alternatives(options, spec) or 0,
        num_ids=options.num_ids,
    )
    abstract = jax.eval_shape(lambda x: x, (weights, state))

    def aot(function, *args):
        return jax.jit(function, donate_argnums=1).lower(*abstract, *args).compile()

    def round_of(requests, rows, speculate):
        def run(weights, state, extra=None):
            return step.round_step(
                spec,
                drafter,
                taps,
                round_options,
                weights,
                state,
                extra,
                speculate=speculate,
                requests=requests,
                rows=rows,
            )

        return run

    programs: dict = {}
    is_planned = round_options.plan.is_planned
    scalar = [jax.ShapeDtypeStruct((), jnp.int32)] if is_planned else []
    for requests, each in ladder.buckets:
        if options.plain or not drafts:
            programs["plain", requests] = aot(round_of(requests, None, False))
        if not drafts:
            continue
        for rows in each if is_packed else each[-1:]:
            packed = rows if is_packed else None
            program = aot(round_of(requests, packed, True), *scalar)
            programs["round", requests, rows] = program

    def fill(weights, state, chunk):
        return prefill.prefill_step(
            spec,
            drafter,
            taps,
            weights,
            state,
            chunk,
            top_logprobs=round_options.top_logprobs,
            num_ids=options.num_ids,
        )

    for size in options.prefill_buckets:
        chunk = jax.eval_shape(
            lambda x: x, make_chunk(spec, options, [0], 0, 0, 0, size)
        )
        programs[size] = aot(fill, chunk)
    mask = jax.ShapeDtypeStruct((options.slots,), bool)
    programs["switch"] = (
        jax.jit(switched, donate_argnums=0)
        .lower(abstract[1].slots, mask, mask)
        .compile()
    )
    if options.record is not None:
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        kept = jax.jit(recorder.rows_of).lower(abstract[1].draft, slot)
        programs["rows"] = kept.compile()
    return programs


def make_chunk(
    spec: TargetSpec,
    options: EngineOptions,
    tokens: list[int],
    following: int,
    start: int,
    slot: int,
    size: int,
    job: Job | None = None,
    is_last: bool = False,
) -> prefill.Chunk:
    """A piece of a prompt, and its request's settings, as a prefill program takes it.

    Args:
      spec: target sizes.
      options: of the engine.
      tokens: the piece, at most `size` tokens.
      following: the token after it: of the prompt, or a returning request's anchor.
      start: the piece's first position.
      slot: where it is filled in.
      size: the bucket it is padded to.
      job: the request; None: nobody's, for its shapes.
      is_last: the prompt ends with it.

    Its arrays are the host's own, each made here and never written again: an array
    made on the device first would wait behind what runs there.
    """
    settings = job.settings if job else Settings()
    stops = stop_ids_of(settings, spec.eos_ids, spec.vocab_size)
    # Negative seeds are nobody's: requests without one never share a stream
    # with a seeded request.
    handle = job.handle if job else 0
    seed = -1 - handle if settings.seed is None else settings.seed
    tokens_out = job.generation.tokens if job else []
    own = settings.num_draft if settings.speculate else None
    stop_X: Any = np.full((1, NUM_STOP_IDS), -1, np.int32)
    stop_X[0, : len(stops)] = stops
    padded_T: Any = np.full(size, spec.pad_id, np.int32)
    padded_T[: len(tokens)] = tokens

    def one(value, dtype=np.int32):
        return np.array([value], dtype)

    def scalar(value, dtype=np.int32):
        return np.array(value, dtype)

    greedy = settings.temperature == 0
    request = Slots(
        anchor_B=one(0),
        length_B=one(0),
        remaining_B=one(settings.max_new_tokens - len(tokens_out)),
        active_B=one(False, bool),
        speculate_B=one(job is not None and job.speculating, bool),
        seed_B=one(seed),
        # Prefill is round 0; a request that comes back goes on counting.
        round_B=one(1 + job.generation.rounds if job and tokens_out else 0),
        sampling=Sampling(
            greedy_B=one(greedy, bool),
            temperature_B=one(1.0 if greedy else settings.temperature, np.float32),
            top_k_B=one(settings.top_k),
            top_p_B=one(settings.top_p, np.float32),
            min_p_B=one(settings.min_p, np.float32),
            rules=rules_of(settings) if options.penalties else None,
        ),
        stop_ids_BX=stop_X,
        window_B=one(0 if own is None else own + 1),
        logprobs_B=(None if options.logprobs is None else one(settings.logprobs, bool)),
        sts_BM=sts_of(settings, options.round),
    )
    return prefill.Chunk(
        tokens_T=padded_T,
        next_token=scalar(following),
        start=scalar(start),
        count=scalar(len(tokens)),
        slot=scalar(slot),
        is_last=scalar(is_last, bool),
        known=scalar(bool(tokens_out), bool),
        prompt_len=scalar(len(job.generation.prompt) if job else 0),
        request=request,
    )


def sts_of(settings: Settings, options: step.RoundOptions):
    """Temperatures `[1, M]` of one request's confidence, or None."""
    if not options.plan.num_own:
        return None
    regime = regime_of(settings, one_hot_draft=options.one_hot_draft)
    return np.array([options.plan.temperatures_of(regime)], np.float32)


def rules_of(settings: Settings) -> Rules:
    """One request's penalties and biases, `B = 1`."""
    ids_X: Any = np.full((1, NUM_BIASES), -1, np.int32)
    bias_X: Any = np.zeros((1, NUM_BIASES), np.float32)
    for index, (token, bias) in enumerate(settings.logit_bias):
        ids_X[0, index], bias_X[0, index] = token, bias

    def one(value):
        return np.array([value], np.float32)

    return Rules(
        repetition_B=one(settings.repetition_penalty),
        presence_B=one(settings.presence_penalty),
        frequency_B=one(settings.frequency_penalty),
        bias_ids_BX=ids_X,
        bias_BX=bias_X,
    )
