"""Names the first thing in which training and serving of a drafter differ.

Everything on the training side goes the way training goes (the template's
rendering, `data.capture` into a store and out of it, `train_outputs`), everything
on the serving side the way serving goes (`decode.prefill` and rounds of
`decode.step`, drafts from the exported folder alone). The checks themselves are
`evals.why`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import rich.text

from experiments import generate, serving, session
from spec_jax.config import loading, schema
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema
from spec_jax.data import capture, prompts, samples, store
from spec_jax.data.pipeline import read_batch
from spec_jax.decode import prefill, step
from spec_jax.decode.forward import Weights
from spec_jax.decode.prefill import Chunk
from spec_jax.decode.request import NUM_STOP_IDS, check_prompt
from spec_jax.decode.state import DecodeState, empty_slots
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import report, why
from spec_jax.evals.why import DIFFERS, OK, SKIPPED, Finding, Runner, Text
from spec_jax.export import folder as export_folder
from spec_jax.export import golden, names, storage
from spec_jax.export.kinds import own
from spec_jax.target.cache import init_cache
from spec_jax.target.loading import Target

# What a request may still emit, in the loops here: they end by themselves.
_MANY = 1 << 20
ROUNDS = 4

_FIXES = {
    "thinking": "serve with --config.thinking as it was trained",
    "layer_ids": "layer outputs, 0-based; correct the side that counts inputs",
    "template_hash": "serve the template it was trained with, or train again",
    "tokenizer_hash": "serve the tokenizer it was trained with",
    "target_fingerprint": "serve the weights it was trained for",
    "anchor_predicts": "weights of one row convention do not serve the other",
}
_FIX = "export it again, or use it with the target it was made for"


def main(cfg: schema.Why, workdir: pathlib.Path) -> int:
    """Prints the table and the sentence; leaves `report.json`.

    Returns:
      0 where all agree, 1 where something differs.

    Raises:
      UserError: no such target or folder, or a prompt that cannot be served.
    """
    target, params = serving.load_serving_target(cfg.target)
    findings = list(examine(cfg, target, params))
    said = why.sentence(findings)
    show(findings, said)
    found = why.first_difference(findings)
    metrics = {
        "agrees": found is None,
        "first_difference": said,
        "checks": why.table(findings),
    }
    with session.hold(workdir, cfg):
        report.write_report(
            workdir,
            "why",
            loading.config_hash(cfg),
            metrics,
            config=loading.plain(cfg),
            root=session.ROOT,
        )
    return 0 if found is None else 1


def show(findings: list[Finding], said: str) -> None:
    """The table, then one sentence."""
    console = rich.console.Console(highlight=False)
    shown = rich.table.Table("check", "item", "result", "detail")
    colours = {OK: "green", DIFFERS: "bold red", SKIPPED: "dim"}
    last = ""
    for f in findings:
        shown.add_row(
            f.check if f.check != last else "",
            rich.text.Text(f.item),
            rich.text.Text(f.status, colours[f.status]),
            rich.text.Text(f.detail),
        )
        last = f.check
    console.print(shown)
    console.print(said, soft_wrap=True, markup=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    """A drafter folder, read as far as it can be.

    Attributes:
      path: where it lies.
      config: its `config.json`.
      contract: its `contract.json`, or None.
      tensors: as stored.
      exported: the drafter, or None where it is refused.
      refusal: why, or "".
    """

    path: str
    config: Mapping[str, Any]
    contract: Mapping[str, Any] | None
    tensors: Mapping[str, np.ndarray] = dataclasses.field(repr=False)
    exported: export_folder.Exported | None
    refusal: str


def read(path: str, target: Target) -> Folder:
    """Reads a folder; what a reader would refuse for its contract is read anyway.

    Raises:
      UserError: it is missing, torn or changed since it was written.
    """
    path = os.path.abspath(path)
    where = f"drafter folder {path!r}"
    storage.check_whole(path, where)
    config = storage.read_json(os.path.join(path, storage.CONFIG), where)
    tensors, _ = storage.read_weights(path, where)
    contract, file = None, os.path.join(path, storage.CONTRACT)
    if os.path.isfile(file):
        contract = storage.read_json(file, where)
    exported, refusal = None, ""
    try:
        exported = export_folder.read_folder(path, target, run_golden=False)
    except UserError as error:
        refusal = str(error)
        with tempfile.TemporaryDirectory() as bare:
            # The same configuration and weights, without a contract to refuse.
            for name in os.listdir(path):
                if name not in (storage.CONTRACT, storage.MANIFEST, storage.GOLDEN):
                    os.symlink(os.path.join(path, name), os.path.join(bare, name))
            with contextlib.suppress(UserError):
                exported = export_folder.read_folder(bare, target, run_golden=False)
    return Folder(path, config, contract, tensors, exported, refusal)


def probed(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with few anchors and no noise on its features."""
    changes = {}
    for name, value in (
        ("num_anchors", why.NUM_ANCHORS),
        ("num_starts", why.NUM_ANCHORS),
        ("feature_noise", 0.0),
    ):
        if hasattr(drafter.options, name):
            changes[name] = value
    options = dataclasses.replace(drafter.options, **changes)
    return _load(own.path_of(drafter), options, target.spec)


# One record per options: its compiled programs are then kept too.
_load = functools.lru_cache(maxsize=32)(base.load)


def examine(
    cfg: schema.Why,
    target: Target,
    params: Any,
    *,
    stop: bool = False,
    jit: Callable = why.quick_jit,
) -> Iterator[Finding]:
    """Every finding in forward order.

    Args:
      cfg: the recipe.
      target: the target.
      params: its parameters in the serving layout.
      stop: nothing after the first difference is computed.
      jit: compiles what is the drafter's.

    Raises:
      UserError: see `main`.
    """
    found = read(cfg.drafter, target)
    mask_id = -1
    if found.exported is not None:
        mask_id = serving.mask_id_of(found.exported.drafter)
    served = generate.encode_prompt(cfg, target, mask_id)
    findings = _examine(cfg, target, params, found, served, jit)
    return why.until_first(findings) if stop else findings


def _examine(cfg, target, params, found: Folder, served, jit) -> Iterator[Finding]:
    yield from contract_findings(cfg, target, found)
    yield from prompt_findings(cfg, target, found, served)
    if found.exported is None:
        for check in why.CHECKS[2:]:
            if check == "weights":
                yield from why.weight_findings(*_weights(cfg, found, None))
            else:
                detail = "the drafter could not be read"
                yield Finding(check, "all", SKIPPED, detail)
        return
    drafter = probed(found.exported.drafter, target)
    size_m, window = drafter.layout.num_draft, drafter.layout.window
    rows = len(served) + cfg.serve.max_new_tokens
    room = cfg.serve.max_context
    why.require_rows(rows, 2 * (why.NUM_ANCHORS + size_m + 2), "the prompt's text")
    check_prompt(
        served,
        serving.settings_from(cfg.serve),
        vocab_size=target.spec.vocab_size,
        mask_id=serving.mask_id_of(drafter),
        room=min(room - 2 * window, target.spec.max_context),
    )
    # `why`'s own chunks: several of them, and the last one short.
    chunk = next((c for c in (32, 16, 8) if 2 * c < rows), 4)
    paths = Paths(target, params, served, cfg.serve.max_new_tokens, chunk, room)
    frozen = frozen_from_params(params, found.exported.draft_vocab)
    runner = Runner(drafter, found.exported.params, frozen, room, jit)
    planes = drafter.needs.layer_ids
    one = paths.one_by_one
    text = one.text(planes).padded(room)
    yield from why.visibility_findings(runner, text)
    yield from feature_findings(paths, found, planes)
    yield from why.logit_findings(runner, text, _positions(paths, text, size_m, window))
    yield golden_finding(found, frozen)
    yield from why.weight_findings(*_weights(cfg, found, runner.drafter))
    anchor = text.length - size_m - 1
    yield from why.state_findings(runner, text, anchor, chunk, window)
    yield from round_findings(runner, paths, text, chunk)


def _positions(paths: Paths, text: Text, size_m: int, window: int):
    """Name -> (text, anchor): near the start, in the middle, at the end, beyond."""
    last = text.length - size_m - 1
    found = {
        "position 3": (text, 3),
        f"position {last // 2}": (text, last // 2),
        f"position {last}": (text, last),
    }
    far = paths.room - window - 1
    if far > last:
        beyond = text.tiled(paths.room)
        found[f"position {far}, beyond the text"] = (beyond, far)
    return found


def contract_findings(cfg, target: Target, found: Folder) -> Iterator[Finding]:
    """The folder's contract and configuration against target and drafter."""
    facts = export_folder.target_facts(target)
    expected: dict[str, Any] = dict(facts)
    drafter = None if found.exported is None else found.exported.drafter
    if drafter is not None:
        expected |= {
            "layer_ids": list(drafter.needs.layer_ids),
            "mask_id": serving.mask_id_of(drafter),
            "num_draft": drafter.layout.num_draft,
            "anchor_predicts": drafter.layout.anchor_predicts,
        }
    expected["thinking"] = cfg.thinking
    contract, before = found.contract, []
    if contract is None:
        before.append(
            Finding("contract", "contract.json", SKIPPED, "the folder has none")
        )
    else:
        for name, value in expected.items():
            fix = _FIXES.get(name, _FIX)
            said = contract.get(name)
            before.append(why.compare("contract", name, value, said, fix))
        dtype = contract.get("feature_dtype")
        if dtype not in store.DTYPES:
            fault = f"is {dtype!r}, expected one of {', '.join(store.DTYPES)}"
            before.append(Finding("contract", "feature_dtype", DIFFERS, fault))
        else:
            before.append(Finding("contract", "feature_dtype", OK, dtype))
        said = found.config.get("sample_from_anchor")
        if said is not None:
            before.append(
                why.compare(
                    "contract",
                    "row convention",
                    bool(contract.get("anchor_predicts")),
                    bool(said),
                    "config.json sample_from_anchor and the contract disagree",
                )
            )
    used = getattr(getattr(drafter, "options", None), "rope_theta", None)
    rope = why.rope_finding(found.config, None if used is None else float(used))
    before.append(rope)
    vocab = why.vocabulary_finding(
        found.tensors.get(names.D2T),
        found.tensors.get(names.T2D),
        target.spec.vocab_size,
        found.config.get("draft_vocab_size"),
    )
    before.append(vocab)
    yield from before
    # Weights that are not finite are refused as well; that is their check's.
    known = [*before, *why.weight_findings(*_weights(None, found, None))]
    if found.refusal and why.first_difference(known) is None:
        yield Finding("contract", "configuration", DIFFERS, found.refusal)
    elif found.exported is None:
        yield Finding("contract", "configuration", SKIPPED, found.refusal)
    else:
        yield Finding("contract", "configuration", OK, "every setting is read")


def _weights(cfg, found: Folder, drafter: Drafter | None):
    tensors = {
        name: tensor
        for name, tensor in found.tensors.items()
        if name not in (names.D2T, names.T2D)
    }
    dtype = str(found.config.get("dtype") or found.config.get("torch_dtype") or "")
    if not dtype and tensors:
        dtype = str(next(iter(tensors.values())).dtype)
    if drafter is None or found.exported is None:
        return tensors, None, None, dtype
    leaves = names.flatten(found.exported.params)
    initial = names.flatten(drafter.init(jax.random.key(cfg.seed)))
    return tensors, leaves, initial, dtype


def prompt_findings(cfg, target: Target, found: Folder, served) -> Iterator[Finding]:
    """The prompt as training renders it, against the served ids."""
    contract = found.contract or {}
    thinking = bool(contract.get("thinking", cfg.thinking))
    turns = [{"role": "user", "content": cfg.prompt}]
    if cfg.system:
        turns.insert(0, {"role": "system", "content": cfg.system})
    try:
        trained = prompts.render_prompt(
            target, prompts.Prompt(tuple(turns), "config"), thinking=thinking
        )
    except UserError as error:
        yield Finding("template", "rendering", DIFFERS, str(error))
        return
    tokenizer = target.tokenizer
    yield from why.template_findings(
        trained, served, tokenizer.decode, tokenizer.special_ids
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """What serving tells a drafter about the rows it ran.

    Attributes:
      layer_ids: of the planes.
      tokens_S: ids; next_tokens_S the token told to come after each.
      next_tokens_S: see `tokens_S`.
      features_SLD: every layer output that can be captured.
      hidden_SD: last hidden rows.
    """

    layer_ids: tuple[int, ...]
    tokens_S: np.ndarray
    next_tokens_S: np.ndarray
    features_SLD: np.ndarray
    hidden_SD: np.ndarray

    def plane(self, layer_id: int) -> np.ndarray:
        return self.features_SLD[:, self.layer_ids.index(layer_id)]

    def text(self, layer_ids: tuple[int, ...]) -> Text:
        at = [self.layer_ids.index(i) for i in layer_ids]
        return Text(
            self.tokens_S, self.features_SLD[:, at], self.hidden_SD, len(self.tokens_S)
        )


class Paths:
    """One prompt and its greedy answer, run every way there is.

    Attributes:
      target: the target; params its parameters in the serving layout.
      room: A of every state.
      prompt: its tokens.
      layer_ids: every layer that may be captured.
    """

    def __init__(self, target: Target, params, prompt, new: int, chunk: int, room: int):
        self.target, self.params, self.room = target, params, room
        self.prompt, self.new, self.chunk = list(prompt), new, chunk
        self.layer_ids = tuple(range(target.spec.num_layers - 1))

    @functools.cached_property
    def one_by_one(self) -> Recorded:
        """Decoded row by row: the prompt, then what the target answers."""
        recorder, run = _recording(self.target.spec, self.layer_ids)
        state = _start(self.target.spec, recorder, self.room)
        weights = Weights(target=self.params, draft={}, frozen=())
        tokens = list(self.prompt)
        for row in range(len(self.prompt) + self.new):
            known = row + 1 < len(self.prompt)
            following = tokens[row + 1] if known else 0
            piece = _chunk([tokens[row]], following, row, 1, last=not known)
            state, result = run(weights, state, piece)
            if not known:
                if bool(result.bad):
                    raise UserError(
                        "the target's logits are not finite; check target.source"
                    )
                tokens.append(int(result.token))
        return _recorded(state, self.layer_ids, len(tokens) - 1)

    @functools.cached_property
    def chunks(self) -> Recorded:
        """The same text, prefilled in chunks."""
        recorder, run = _recording(self.target.spec, self.layer_ids)
        tokens = self.one_by_one.tokens_S.tolist()
        state = _start(self.target.spec, recorder, self.room)
        weights = Weights(target=self.params, draft={}, frozen=())
        for piece in _pieces(tokens, self.chunk):
            state, _ = run(weights, state, piece)
        return _recorded(state, self.layer_ids, len(tokens))

    def captured(self, layer_ids, dtype: str) -> Text:
        """The same text through `data.capture`, a store, and a training batch."""
        tokens = self.one_by_one.tokens_S.tolist()
        size_p = len(self.prompt)
        sample = samples.make_sample(tokens[:size_p], tokens[size_p:], "why")
        contract = Contract(
            target=self.target.spec.name,
            layer_ids=tuple(layer_ids),
            feature_dtype=dtype,
            **export_folder.target_facts(self.target),
        )
        kept = FeatureSchema(
            tuple(layer_ids), self.target.spec.hidden_size, teacher=True
        )
        size = -(-len(tokens) // 16) * 16
        with tempfile.TemporaryDirectory() as place:
            path = os.path.join(place, "store")
            capture.capture(
                dataclasses.replace(self.target, params=self.params),
                [sample],
                kept,
                path,
                contract,
                dtype,
                batch=1,
                buckets=(size,),
                shard_samples=1,
            )
            batch = read_batch(store.open_store(path, contract), [0], size, kept)
        count = len(tokens)
        return Text(
            np.asarray(batch.tokens_BS[0, :count]),
            np.asarray(batch.features_BSLD[0, :count], np.float32),
            np.asarray(batch.teacher_BSD[0, :count], np.float32),
            count,
        )


def _recorder(width: int, layer_ids: tuple[int, ...]) -> Drafter:
    """A drafter that proposes nothing and keeps every row it is told."""

    def init_state(slots, allocated):
        lead = (1, slots, allocated)
        return {
            "tokens": jnp.full(lead, -1, jnp.int32),
            "next": jnp.full(lead, -1, jnp.int32),
            "features": jnp.zeros((*lead, len(layer_ids), width), jnp.float32),
            "hidden": jnp.zeros((*lead, width), jnp.float32),
        }

    def absorb(params, frozen, state, rows):
        del params, frozen
        size_t = rows.tokens_BT.shape[1]
        at_BT = rows.start_B[:, None] + jnp.arange(size_t)[None]
        slot_B1 = jnp.arange(at_BT.shape[0])[:, None]
        told = {
            "tokens": rows.tokens_BT,
            "next": rows.next_tokens_BT,
            "features": rows.features_BTLD.astype(jnp.float32),
            "hidden": rows.hidden_BTD.astype(jnp.float32),
        }
        return {
            name: state[name].at[0, slot_B1, at_BT].set(value, mode="drop")
            for name, value in told.items()
        }

    return Drafter(
        name="recorder",
        options=None,
        layout=BlockLayout(1),
        needs=FeatureSchema(layer_ids, width),
        topologies=(),
        init=lambda key: {},
        init_state=init_state,
        prefill=absorb,
        propose=lambda *args: None,
        extend=absorb,
        train_outputs=lambda *args: None,
        terms=(),
    )


@functools.lru_cache(maxsize=8)
def _recording(spec, layer_ids: tuple[int, ...]):
    recorder = _recorder(spec.hidden_size, layer_ids)
    run = functools.partial(prefill.prefill_step, spec, recorder, layer_ids)
    return recorder, why.quick_jit(run)


def _start(spec, drafter: Drafter, room: int) -> DecodeState:
    return DecodeState(
        cache=init_cache(spec, 1, room),
        draft=drafter.init_state(1, room),
        slots=empty_slots(1, NUM_STOP_IDS),
    )


def _chunk(tokens, following: int, start: int, size: int, *, last: bool) -> Chunk:
    padded_T = np.zeros(size, np.int32)
    padded_T[: len(tokens)] = tokens

    def scalar(value, dtype=np.int32):
        return jnp.asarray(np.array(value, dtype))

    request = dataclasses.replace(
        empty_slots(1, NUM_STOP_IDS),
        remaining_B=jnp.full((1,), _MANY, jnp.int32),
        speculate_B=jnp.ones((1,), bool),
    )
    return Chunk(
        tokens_T=jnp.asarray(padded_T),
        next_token=scalar(following),
        start=scalar(start),
        count=scalar(len(tokens)),
        slot=scalar(0),
        is_last=scalar(last, bool),
        known=scalar(not last, bool),
        prompt_len=scalar(_MANY),
        request=request,
    )


def _pieces(tokens, size: int) -> Iterator[Chunk]:
    """Chunks of a prompt; the last one draws the first token."""
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        end = start + len(part)
        last = end == len(tokens)
        yield _chunk(part, 0 if last else tokens[end], start, size, last=last)


def _recorded(state: DecodeState, layer_ids, count: int) -> Recorded:
    told = jax.device_get(state.draft)
    return Recorded(
        layer_ids,
        told["tokens"][0, 0, :count],
        told["next"][0, 0, :count],
        told["features"][0, 0, :count],
        told["hidden"][0, 0, :count],
    )


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


def golden_finding(found: Folder, frozen) -> Finding:
    """The round that was recorded when the weights were exported (A2)."""
    item, file = "golden round", os.path.join(found.path, storage.GOLDEN)
    if not os.path.isfile(file):
        return Finding("logits", item, SKIPPED, "the folder has none")
    exported = found.exported
    where = os.path.basename(found.path)
    try:
        worst = golden.check(
            storage.load_safetensors(file, where),
            exported.drafter,
            exported.params,
            frozen,
            where,
        )
    except UserError as error:
        return Finding("logits", item, DIFFERS, str(error))
    return Finding("logits", item, OK, f"max abs {worst:.1e}")


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
    state = _start(spec, drafter, paths.room)
    for piece in _pieces(paths.prompt, chunk):
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
