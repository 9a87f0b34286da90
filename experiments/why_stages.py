"""What the ways of running a text gave, and rounds of the real decoder."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from experiments.why_folder import Folder
from experiments.why_paths import Paths, pieces
from spec_jax.core.errors import UserError
from spec_jax.data import store
from spec_jax.decode import prefill, step
from spec_jax.decode.forward import Weights
from spec_jax.evals import why
from spec_jax.evals.why import DIFFERS, SKIPPED, Finding, Runner, Text

ROUNDS = 4


def feature_findings(paths: Paths, found: Folder, layer_ids) -> Iterator[Finding]:
    """Every plane as captured, against what serving gives the drafter."""
    ways = {"chunks": paths.chunks, "one row at a time": paths.one_by_one}
    tokens_S = ways["one row at a time"].tokens_S
    for way, told in ways.items():
        wrong = np.nonzero(told.tokens_S != tokens_S)[0]
        pairs = np.nonzero(told.next_tokens_S[:-1] != tokens_S[1:])[0]
        fault = ""
        if wrong.size:
            fault = f"row {wrong[0]} is told token {told.tokens_S[wrong[0]]}"
        elif pairs.size:
            at = int(pairs[0])
            fault = (
                f"row {at} is told that token {told.next_tokens_S[at]} follows, and "
                f"{tokens_S[at + 1]} does"
            )
        yield why.verdict(
            "features", f"rows told, {way}", fault, f"{len(tokens_S)} rows"
        )
    dtype = (found.contract or {}).get("feature_dtype", "float32")
    if dtype not in store.DTYPES:
        dtype = "float32"
    try:
        stored = paths.captured(layer_ids, dtype)
    except UserError as error:
        yield Finding("features", "capture", DIFFERS, str(error))
        return
    tolerance = why.FEATURE_TOLERANCE[dtype]
    embed_VD = paths.params["params"]["embed"]
    if embed_VD.dtype != jnp.float32:
        tolerance = max(tolerance, why.FEATURE_TOLERANCE["bfloat16"] * 3)
    for plane, layer_id in enumerate(layer_ids):
        for way, told in ways.items():
            others = {
                f"the output of layer {i}": told.plane(i)
                for i in told.layer_ids
                if i != layer_id
            }
            rows = np.asarray(embed_VD)[tokens_S].astype(np.float32)
            others["the embedding, layer 0's input"] = rows
            yield why.plane_finding(
                f"layer {layer_id}, {way}",
                stored.features_SLD[:, plane],
                told.plane(layer_id),
                tolerance,
                others,
            )
    for way, told in ways.items():
        yield why.plane_finding(
            f"last hidden, {way}",
            stored.hidden_SD,
            told.hidden_SD,
            tolerance,
            {f"the output of layer {i}": told.plane(i) for i in told.layer_ids},
        )
    head_DV = np.asarray(paths.params["params"]["head"], np.float32)
    margin = max(1e-3, 4 * tolerance)
    logits_SV = stored.hidden_SD @ head_DV
    first = len(paths.prompt) - 1
    yield why.teacher_finding(logits_SV, tokens_S, first, margin)


def round_findings(
    runner: Runner, paths: Paths, text: Text, chunk: int
) -> Iterator[Finding]:
    """Rounds of the real decoder: what they leave behind, and that they draft."""
    spec, drafter = paths.target.spec, runner.drafter
    taps, window = drafter.needs.layer_ids, drafter.layout.window
    fill = runner.jit(functools.partial(prefill.prefill_step, spec, drafter, taps))
    options = step.RoundOptions()
    advance = runner.jit(
        functools.partial(step.round_step, spec, drafter, taps, options)
    )
    weights = Weights(paths.params, runner.params, runner.frozen)
    state = paths.start_state(drafter)
    for piece in pieces(spec, paths.prompt, chunk):
        state, _ = fill(weights, state, piece)
    anchor, length = int(state.slots.anchor_B[0]), len(paths.prompt)
    first = runner.propose(state.draft, anchor, length)
    expected = runner.serve(text, length)
    yield why.drafts_finding("decode prefill", runner, first, expected)
    usable, accepted, rounds = [first.usable], [], 0
    strange = ""
    while rounds < ROUNDS and length + 2 * window < text.length and not strange:
        state, result = advance(weights, state)
        emitted = int(result.emitted_B[0])
        made = np.asarray(result.tokens_BW)[0, :emitted]
        plain = text.tokens_S[length + 1 : length + 1 + emitted]
        if emitted < 1 or not np.array_equal(made, plain):
            strange = (
                f"after {length} rows a round emits {made.tolist()}, plain decoding "
                f"{plain.tolist()}"
            )
            break
        accepted.append(int(result.raw_accepted_B[0]))
        length, rounds = length + emitted, rounds + 1
        anchor = int(state.slots.anchor_B[0])
        drafts = runner.propose(state.draft, anchor, length)
        usable.append(drafts.usable)
    if rounds:
        expected = runner.serve(text, length)
        yield why.drafts_finding(f"{rounds} rounds", runner, drafts, expected)
    else:
        yield Finding("draft state", "rounds", SKIPPED, "none could be run")
    yield why.verdict(
        "served", "tokens", strange, f"those of plain decoding in {rounds} rounds"
    )
    most = max(usable)
    if not most and not runner.trains:
        yield Finding("served", "drafts", SKIPPED, "the text repeats nothing")
        return
    fault = "" if most else "no round proposes a usable draft: its rows are not finite"
    mean = 1 + sum(accepted) / len(accepted) if accepted else 1.0
    yield why.verdict(
        "served",
        "drafts",
        fault,
        f"up to {most} a round, accept length {mean:.2f} here",
    )
