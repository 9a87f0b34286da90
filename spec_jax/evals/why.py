"""Why a drafter is accepted less than it should be: training against serving.

Checks in forward order, each a list of findings; the first that differs is the
one to mend, since whatever follows it differs too (training notes, A18). Here is
what needs a drafter and a text at most; who loads, captures and decodes them is
`experiments.why`.

    contract      what the folder says against the target and its configuration
    template      the prompt as in training and as served
    visibility    which features may and do move a block, by perturbation
    features      as captured against as served, every plane
    logits        labels and draft logits, slot by slot
    weights       what training never moved
    draft state   one piece, chunks, rounds: the same proposals
    served        a canned round has drafts
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import verify_layout
from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.core.topology import CHAIN_TOPOLOGY
from spec_jax.decode import propose
from spec_jax.decode.state import empty_slots
from spec_jax.drafters.base import Drafter, Frozen, Rows
from spec_jax.objectives.vocabulary import row_logits

OK, DIFFERS, SKIPPED = "ok", "differs", "not applicable"
CHECKS = (
    "contract",
    "template",
    "visibility",
    "features",
    "logits",
    "weights",
    "draft state",
    "served",
)

# Blocks of one training sequence in the visibility probe, one position apart.
NUM_ANCHORS = 8
# A row's features may differ by so much of its norm: reordered sums, or what
# rounding to the stored type leaves (`2**-9 / sqrt(3)` and less).
FEATURE_TOLERANCE = {"float32": 3e-4, "float16": 1e-3, "bfloat16": 8e-3}
# Logits, relative to the largest; the second where the head is rounded too.
LOGIT_TOLERANCE, LOOSE_TOLERANCE = 2e-4, 0.05
# Share of a norm's entries that may still be exactly 1.
STILL_ONE = 0.5


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
      check: one of `CHECKS`.
      item: what was compared.
      status: "ok", "differs" or "not applicable".
      detail: numbers, or what differs.
    """

    check: str
    item: str
    status: str
    detail: str = ""


def first_difference(findings: Iterable[Finding]) -> Finding | None:
    """The first finding that differs, or None."""
    return next((f for f in findings if f.status == DIFFERS), None)


def sentence(findings: Iterable[Finding]) -> str:
    """What to tell a person."""
    found = first_difference(findings)
    if found is None:
        return "training and serving agree in every check that applies"
    return f"first difference: {found.check}, {found.item}: {found.detail}"


def table(findings: Iterable[Finding]) -> dict[str, dict[str, str]]:
    """A report's table: a row for each finding."""
    return {
        f"{f.check}: {f.item}": {"result": f.status, "detail": f.detail}
        for f in findings
    }


def until_first(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings up to the first that differs; nothing after it is computed."""
    for finding in findings:
        yield finding
        if finding.status == DIFFERS:
            return


def compare(check: str, item: str, expected: Any, found: Any, fix: str) -> Finding:
    """A finding on two values that must be equal."""
    if expected == found:
        return Finding(check, item, OK, _short(found))
    detail = f"is {_short(found)}, expected {_short(expected)}; {fix}"
    return Finding(check, item, DIFFERS, detail)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def vocabulary_finding(
    d2t: np.ndarray | None,
    t2d: np.ndarray | None,
    vocab_size: int,
    said: int | None,
) -> Finding:
    """d2t holds offsets, t2d the kept ids; both, or neither.

    Args:
      d2t: `[U]` offsets, or None.
      t2d: `[V]` kept or not, or None.
      vocab_size: V of the target.
      said: U in the configuration, or None.
    """
    item = "vocabulary map d2t/t2d"

    def bad(detail):
        return Finding("contract", item, DIFFERS, detail)

    if d2t is None and t2d is None:
        if said not in (None, vocab_size):
            return bad(f"draft_vocab_size is {said} but there is no map")
        return Finding("contract", item, SKIPPED, "the vocabulary is not reduced")
    if d2t is None or t2d is None:
        return bad(f"{'d2t' if d2t is None else 't2d'} is missing; it takes both")
    ids, kept = np.asarray(d2t).astype(np.int64) + np.arange(len(d2t)), np.asarray(t2d)
    if len(kept) != vocab_size:
        return bad(f"t2d has {len(kept)} entries, the target {vocab_size} tokens")
    listed = np.nonzero(kept)[0]
    if not np.array_equal(listed, ids):
        if np.array_equal(listed, np.asarray(d2t)):
            return bad("d2t holds target ids where files hold offsets (id - index)")
        size = min(len(listed), len(ids))
        at = np.nonzero(listed[:size] != ids[:size])[0]
        where = int(at[0]) if at.size else size
        return bad(f"d2t and t2d disagree from draft id {where} on")
    if said is not None and said != len(ids):
        return bad(f"draft_vocab_size is {said}, d2t has {len(ids)} entries")
    return Finding("contract", item, OK, f"{len(ids)} of {vocab_size} tokens")


_WHOLE = {
    "partial_rotary_factor": (None, 1),
    "rope_dim": (None,),
    "factor": (None, 1),
    "mrope_section": (None,),
    "mrope_interleaved": (None, False),
}


def rope_finding(config: Mapping[str, Any], used: float | None) -> Finding:
    """Every rotary key of a configuration, against the base that is used.

    Args:
      config: a folder's `config.json`.
      used: the drafter's base, or None where it could not be read.
    """
    item, faults, bases = "rope keys", [], {}
    places = {"": config}
    for key in ("rope_parameters", "rope_scaling"):
        places[f"{key}."] = config.get(key) or {}
    for place, rope in places.items():
        if place and rope.get("rope_type", rope.get("type", "default")) != "default":
            kind = rope.get("rope_type", rope.get("type"))
            faults.append(f"{place}rope_type is {kind!r}, and positions are unscaled")
        for name, allowed in _WHOLE.items():
            if (place or name == "partial_rotary_factor") and (
                rope.get(name) not in allowed
            ):
                faults.append(
                    f"{place}{name} is {rope[name]!r}, and whole heads are rotated"
                )
        if rope.get("rope_theta") is not None:
            bases[f"{place}rope_theta"] = float(rope["rope_theta"])
    if len(set(bases.values())) > 1:
        faults.append("; ".join(f"{k} is {v:g}" for k, v in bases.items()))
    for name, base in bases.items():
        if used is not None and base != used:
            faults.append(f"{name} is {base:g}, the drafter uses {used:g}")
    if faults:
        return Finding("contract", item, DIFFERS, "; ".join(dict.fromkeys(faults)))
    if not bases:
        return Finding("contract", item, SKIPPED, "no rotary base is written")
    return Finding("contract", item, OK, f"base {next(iter(bases.values())):g}")


def template_findings(
    trained: list[int],
    served: list[int],
    decode: Callable[[list[int]], str],
    special_ids: Iterable[int],
) -> Iterator[Finding]:
    """The prompt's ids as in training and as served, its special tokens first.

    Args:
      trained: ids as training renders them.
      served: ids as serving renders them.
      decode: ids -> text.
      special_ids: ids of the tokenizer's special tokens.
    """
    special = set(special_ids)

    def marks(ids):
        return [i for i in ids if i in special]

    if marks(trained) != marks(served):
        yield Finding(
            "template",
            "special tokens",
            DIFFERS,
            f"training sees {decode(marks(trained))!r}, serving "
            f"{decode(marks(served))!r}; render both through one template",
        )
    else:
        yield Finding("template", "special tokens", OK, f"{len(marks(served))} of them")
    at = next(
        (i for i, (a, b) in enumerate(zip(trained, served, strict=False)) if a != b),
        min(len(trained), len(served)),
    )
    if trained == served:
        yield Finding("template", "token ids", OK, f"{len(served)} tokens")
    else:
        yield Finding(
            "template",
            "token ids",
            DIFFERS,
            f"training and serving differ from token {at} on: "
            f"{decode(trained[at : at + 8])!r} and {decode(served[at : at + 8])!r}",
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Rows that the target ran, padded to S.

    Attributes:
      tokens_S: ids.
      features_SLD: the drafter's planes, float32.
      hidden_SD: last hidden rows after the final norm, float32.
      length: rows that are real.
    """

    tokens_S: np.ndarray
    features_SLD: np.ndarray
    hidden_SD: np.ndarray
    length: int

    def tiled(self, size: int) -> Text:
        """The text over and over, `size` rows: as long as a slot may get."""
        at = np.arange(size) % self.length
        return Text(self.tokens_S[at], self.features_SLD[at], self.hidden_SD[at], size)

    def padded(self, size: int) -> Text:
        """The real rows, then zeros up to `size`."""

        def pad(array):
            out = np.zeros((size, *array.shape[1:]), array.dtype)
            out[: self.length] = array[: self.length]
            return out

        return Text(
            pad(self.tokens_S), pad(self.features_SLD), pad(self.hidden_SD), self.length
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainRows:
    """What a drafter trains on, at each anchor that it sampled.

    Attributes:
      logits_XMU: draft logits (of a selector, with every token's score).
      labels_XM: what the rows are taught.
      valid_XM: where they are.
      anchors_X: positions; 0 where none was sampled.
      confidence_XM: log-odds, or None.
    """

    logits_XMU: np.ndarray
    labels_XM: np.ndarray
    valid_XM: np.ndarray
    anchors_X: np.ndarray
    confidence_XM: np.ndarray | None

    def at(self, anchor: int) -> int | None:
        """Index of the block at this anchor (from 1: a missing one says 0)."""
        found = np.nonzero(self.anchors_X == anchor)[0]
        return int(found[0]) if found.size else None


@dataclasses.dataclass(frozen=True, eq=False)
class Drafts:
    """One proposal: logits `[M, U]`, -inf where no candidate is; ids; confidence."""

    logits_MU: np.ndarray
    tokens_M: np.ndarray
    usable: int
    confidence_M: np.ndarray | None


def quick_jit(function: Callable) -> Callable:
    """Compiles quickly where that matters: a program here runs a few times."""
    if jax.default_backend() != "cpu":
        return jax.jit(function)
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


class Runner:
    """One drafter's training rows and proposals; each program compiles once.

    Attributes:
      drafter: without noise on its features, with `NUM_ANCHORS` anchors.
      params: its parameters.
      frozen: what it borrows.
      allocated: A of its states, and S of its texts.
      trains: it has parameters.
      reads: planes it conditions on (-1: the last hidden rows).
    """

    def __init__(
        self,
        drafter: Drafter,
        params: Any,
        frozen: Frozen,
        allocated: int,
        jit: Callable = quick_jit,
    ):
        self.drafter, self.params, self.frozen = drafter, params, frozen
        self.allocated, self.jit = allocated, jit
        self.trains = bool(jax.tree.leaves(params))
        planes = tuple(range(drafter.needs.num_layers))
        self.reads = planes or ((-1,) if drafter.needs.teacher else ())
        self._train = jit(functools.partial(_train, drafter))
        self._prefill = jit(drafter.prefill)
        self._extend = jit(drafter.extend)
        self._propose = jit(functools.partial(_propose, drafter))

    def train(self, text: Text, first: int, last: int) -> TrainRows:
        """Training rows where tokens `first` to `last` are supervised."""
        at_S = np.arange(len(text.tokens_S))
        inside_S = (at_S >= first) & (at_S <= last)
        batch = Batch(
            tokens_BS=jnp.asarray(text.tokens_S)[None],
            supervised_BS=jnp.asarray(inside_S)[None],
            length_B=jnp.full((1,), text.length, jnp.int32),
            features_BSLD=jnp.asarray(text.features_SLD)[None],
            teacher_BSD=jnp.asarray(text.hidden_SD)[None]
            if self.drafter.needs.teacher
            else None,
        )
        return TrainRows(*jax.device_get(self._train(self.params, self.frozen, batch)))

    def empty(self):
        """No rows absorbed."""
        return self.drafter.init_state(1, self.allocated)

    def absorb(self, state, text: Text, start: int, count: int, width: int, *, extend):
        """Absorbs rows `start ..+ count` in arrays of `width`; the rest is junk."""
        size = len(text.tokens_S)
        at_T = np.minimum(start + np.arange(width), size - 1)
        real_T = np.arange(width) < count
        junk = np.float32(np.nan)
        following = text.tokens_S[np.minimum(at_T + 1, size - 1)]
        rows = Rows(
            tokens_BT=jnp.asarray(np.where(real_T, text.tokens_S[at_T], 0))[None],
            next_tokens_BT=jnp.asarray(np.where(real_T, following, 0))[None],
            features_BTLD=jnp.asarray(
                np.where(real_T[:, None, None], text.features_SLD[at_T], junk)
            )[None],
            hidden_BTD=jnp.asarray(
                np.where(real_T[:, None], text.hidden_SD[at_T], junk)
            )[None],
            start_B=jnp.full((1,), start, jnp.int32),
            length_B=jnp.full((1,), count, jnp.int32),
        )
        step = self._extend if extend else self._prefill
        return step(self.params, self.frozen, state, rows)

    def propose(self, state, anchor: int, length: int) -> Drafts:
        """Greedy drafts after `length` rows, through the one transform."""
        logits, ids, tokens, usable, confidence = jax.device_get(
            self._propose(
                self.params,
                self.frozen,
                state,
                jnp.full((1,), anchor, jnp.int32),
                jnp.full((1,), length, jnp.int32),
            )
        )
        if ids is not None:
            logits = _scatter(logits, ids, self.frozen)
        return Drafts(logits, tokens, int(usable), confidence)

    def serve(self, text: Text, anchor: int) -> Drafts:
        """Drafts at an anchor; the rows before it came in one piece."""
        # Rows from the anchor on are there and do not count.
        whole = len(text.tokens_S)
        state = self._one_piece(text, anchor, whole)
        return self.propose(state, int(text.tokens_S[anchor]), anchor)

    def _one_piece(self, text: Text, anchor: int, width: int):
        rows = Rows(
            tokens_BT=jnp.asarray(text.tokens_S)[None],
            next_tokens_BT=jnp.asarray(np.roll(text.tokens_S, -1))[None],
            features_BTLD=jnp.asarray(text.features_SLD)[None],
            hidden_BTD=jnp.asarray(text.hidden_SD)[None],
            start_B=jnp.zeros((1,), jnp.int32),
            length_B=jnp.full((1,), anchor, jnp.int32),
        )
        return self._prefill(self.params, self.frozen, self.empty(), rows)

    @property
    def tolerance(self) -> float:
        """Of logits, relative to the largest."""
        wide = jnp.finfo(self.frozen.head_DU.dtype).bits >= 32
        return LOGIT_TOLERANCE if wide else LOOSE_TOLERANCE


def _train(drafter: Drafter, params, frozen: Frozen, batch: Batch):
    with jax.default_matmul_precision("highest"):
        out = drafter.train_outputs(params, frozen, batch, jax.random.key(0))
        head_DU = frozen.head_DU if out.head_DU is None else out.head_DU
        logits_XMU = row_logits(
            head_DU, out.hidden_XMD, out.correction_EU, out.correction_XME
        )
        if out.selector is not None:
            logits_XMU += out.selector.query_XME @ out.selector.successor_UE.T
    anchors_X = out.anchors_BN.reshape(-1)
    return logits_XMU, out.labels_XM, out.valid_XM, anchors_X, out.confidence_XM


def _propose(drafter: Drafter, params, frozen: Frozen, state, anchor_B, length_B):
    draw = propose.make_draw(empty_slots(1, 1), one_hot=False)
    with jax.default_matmul_precision("highest"):
        made, _ = drafter.propose(
            params, frozen, state, anchor_B, length_B, draw, CHAIN_TOPOLOGY
        )
    confidence = made.confidence_logit_BM
    return (
        made.law.logits_BTV[0],
        made.law.target_ids[0] if made.law.is_sparse else None,
        made.tokens_BM[0],
        made.usable_B[0],
        None if confidence is None else confidence[0],
    )


def _scatter(logits_MC, ids_MC, frozen: Frozen) -> np.ndarray:
    """Candidates' logits in the columns they are of; -inf elsewhere."""
    columns_MC = ids_MC
    if frozen.target_ids_U is not None:  # kept ids ascend
        columns_MC = np.searchsorted(np.asarray(frozen.target_ids_U), ids_MC)
    full_MU = np.full((len(logits_MC), frozen.head_DU.shape[1]), -np.inf, np.float32)
    np.put_along_axis(full_MU, columns_MC, logits_MC, -1)
    return full_MU


def noised(text: Text, rows, plane: int | None = None) -> Text:
    """The text with noise of its own size on some rows.

    Args:
      text: clean.
      rows: a slice of rows.
      plane: of the features; -1 is the last hidden rows, None everything.
    """
    rng = np.random.default_rng(5)
    features, hidden = text.features_SLD.copy(), text.hidden_SD.copy()

    def shake(array):
        size = float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0
        scale = 2 * size or 1.0
        return array + scale * rng.standard_normal(array.shape).astype(np.float32)

    if plane is None or plane == -1:
        hidden[rows] = shake(hidden[rows])
    if plane is None:
        features[rows] = shake(features[rows])
    elif plane >= 0:
        features[rows, plane] = shake(features[rows, plane])
    return dataclasses.replace(text, features_SLD=features, hidden_SD=hidden)


def _plane_name(runner: Runner, plane: int) -> str:
    if plane == -1:
        return "last hidden"
    return f"layer {runner.drafter.needs.layer_ids[plane]}"


def visibility_findings(runner: Runner, text: Text) -> Iterator[Finding]:
    """Which features move a block, in training and in serving (A1, A15).

    The feature at p may move no block with anchor <= p, bit for bit; every plane
    before the anchor must move one.

    Args:
      runner: the drafter.
      text: padded, with `NUM_ANCHORS` + M real rows after its middle.
    """
    if not runner.reads:
        yield Finding("visibility", "features", SKIPPED, "it reads none")
        return
    first = max(2, min(text.length // 2, text.length - NUM_ANCHORS - 2))
    last = first + NUM_ANCHORS
    if runner.trains:
        yield from _training_visibility(runner, text, first, last)
    yield from _serving_visibility(runner, text, last)


def _training_visibility(runner: Runner, text: Text, first: int, last: int):
    clean = runner.train(text, first, last)
    wanted = list(range(first, last))
    absent = [a for a in wanted if clean.at(a) is None]
    if absent:
        yield Finding(
            "visibility",
            "training anchors",
            DIFFERS,
            f"tokens {first} to {last} are supervised, but no block is anchored at "
            f"{absent[0]}",
        )
        return
    leak = ""
    for edge in (last - 1, first + 3):
        moved = runner.train(noised(text, slice(edge, None)), first, last)
        for anchor in wanted[: edge - first + 1]:
            one, other = clean.logits_XMU[clean.at(anchor)], moved.logits_XMU
            slot = _first_moved(one, other[moved.at(anchor)])
            if slot is not None and not leak:
                leak = (
                    f"features from position {edge} on move slot {slot} of the block "
                    f"anchored at {anchor}, which must not see them"
                )
    item = "training, features from the anchor on"
    yield verdict("visibility", item, leak, "move nothing")
    # Padding may hold anything (A16).
    junk = text.padded(len(text.tokens_S))
    if junk.length < len(junk.tokens_S):
        junk.features_SLD[junk.length :] = np.nan
        junk.hidden_SD[junk.length :] = np.nan
        moved = runner.train(junk, first, last)
        leak = ""
        for anchor in wanted:
            one, other = clean.logits_XMU[clean.at(anchor)], moved.logits_XMU
            if _first_moved(one, other[moved.at(anchor)]) is not None:
                leak = f"NaN behind the text moves the block anchored at {anchor}"
        yield verdict("visibility", "training, padding", leak, "moves nothing")
    for plane in runner.reads:
        moved = runner.train(noised(text, slice(0, first), plane), first, last)
        alive = any(
            _first_moved(clean.logits_XMU[clean.at(a)], moved.logits_XMU[moved.at(a)])
            is not None
            for a in wanted
        )
        yield _alive(runner, "training", plane, alive)


def _serving_visibility(runner: Runner, text: Text, anchor: int):
    clean = runner.serve(text, anchor)
    moved = runner.serve(noised(text, slice(anchor, None)), anchor)
    slot = _first_moved(clean.logits_MU, moved.logits_MU)
    leak = (
        ""
        if slot is None
        else f"rows from position {anchor} on, which do not count, move slot {slot} of "
        f"the block anchored there"
    )
    item = "serving, features from the anchor on"
    yield verdict("visibility", item, leak, "move nothing")
    for plane in runner.reads:
        moved = runner.serve(noised(text, slice(0, anchor), plane), anchor)
        slot = _first_moved(clean.logits_MU, moved.logits_MU)
        yield _alive(runner, "serving", plane, slot is not None)


def _first_moved(one_MU: np.ndarray, other_MU: np.ndarray) -> int | None:
    moved_M = (one_MU != other_MU).any(-1)
    return int(np.argmax(moved_M)) if moved_M.any() else None


def _alive(runner: Runner, path: str, plane: int, alive: bool) -> Finding:
    name = _plane_name(runner, plane)
    dead = "" if alive else f"no block moves when {name} before it does: a dead plane"
    return verdict("visibility", f"{path}, {name} before the anchor", dead, "moves it")


def verdict(check: str, item: str, fault: str, good: str) -> Finding:
    """Differs where there is a fault to tell, else ok."""
    return Finding(check, item, DIFFERS if fault else OK, fault or good)


@dataclasses.dataclass(frozen=True)
class Gap:
    """Two planes of features `[S, D]`, row by row.

    Attributes:
      cosine: the smallest.
      ratio: of norms, the one farthest from 1.
      max_abs: largest difference of an entry.
      relative: largest difference of a row, of its norm.
      row: where that is.
    """

    cosine: float
    ratio: float
    max_abs: float
    relative: float
    row: int

    @property
    def words(self) -> str:
        return (
            f"cosine {self.cosine:.6f}, norm ratio {self.ratio:.5f}, "
            f"max abs {self.max_abs:.2e}"
        )


def gap_of(found_SD: np.ndarray, expected_SD: np.ndarray) -> Gap:
    """How far two planes are apart; what is not finite is infinitely far."""
    one, two = found_SD.astype(np.float64), expected_SD.astype(np.float64)
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        bad = ~(np.isfinite(one).all(-1) & np.isfinite(two).all(-1))
        return Gap(0.0, np.inf, np.inf, np.inf, int(np.argmax(bad)))
    size_one = np.linalg.norm(one, axis=-1)
    size_two = np.linalg.norm(two, axis=-1)
    tiny = 1e-30
    cosine = (one * two).sum(-1) / np.maximum(size_one * size_two, tiny)
    ratio = size_one / np.maximum(size_two, tiny)
    relative = np.linalg.norm(one - two, axis=-1) / np.maximum(size_two, tiny)
    row = int(np.argmax(relative))
    return Gap(
        float(cosine.min()),
        float(ratio[np.argmax(np.abs(ratio - 1))]),
        float(np.abs(one - two).max()),
        float(relative[row]),
        row,
    )


def constant_plane(plane_SD: np.ndarray) -> str:
    """Says that a plane holds one number, or one row throughout; else ""."""
    if plane_SD.size and (plane_SD == plane_SD.flat[0]).all():
        return f"all entries are {plane_SD.flat[0]:g}"
    if len(plane_SD) > 1 and (plane_SD == plane_SD[:1]).all():
        return "every position has the same features"
    return ""


def plane_finding(
    item: str,
    found_SD: np.ndarray,
    served_SD: np.ndarray,
    tolerance: float,
    others: Mapping[str, np.ndarray],
) -> Finding:
    """A captured plane against the served one (A3, A4, A8, A9, A17).

    Args:
      item: names the plane and the way it was served.
      found_SD: as captured for training.
      served_SD: as the drafter gets it when serving.
      tolerance: of a row's difference, relative to its norm.
      others: name -> plane, what it may have been mistaken for.
    """
    for path, plane in (("training", found_SD), ("serving", served_SD)):
        constant = constant_plane(plane)
        if constant:
            detail = f"{constant} on the {path} path"
            return Finding("features", item, DIFFERS, detail)
    gap = gap_of(found_SD, served_SD)
    if gap.relative <= tolerance:
        return Finding("features", item, OK, gap.words)
    hints = []
    for name, other in others.items():
        if other.shape == found_SD.shape and gap_of(found_SD, other).relative <= max(
            tolerance, 1e-3
        ):
            hints.append(f"it is {name}")
    for step, name in ((-1, "before"), (1, "after")):
        moved = np.roll(served_SD, -step, 0)[2:-2]
        if gap_of(found_SD[2:-2], moved).relative <= tolerance:
            hints.append(f"it is the row {name} the right one")
    if not hints and gap.cosine > 0.99:
        unscaled = gap_of(found_SD / _scale(found_SD, served_SD), served_SD)
        if unscaled.relative < 0.2 * gap.relative:
            hints.append("one is scaled, which the cosine does not see")
        elif gap.relative < 0.2:
            hints.append("one is rounded to a narrower type")
    said = f"; {', '.join(hints)}" if hints else ""
    return Finding(
        "features", item, DIFFERS, f"at position {gap.row}: {gap.words}{said}"
    )


def _scale(found_SD: np.ndarray, expected_SD: np.ndarray) -> float:
    """The one factor between two planes, or 1."""
    size = float(np.square(expected_SD, dtype=np.float64).sum())
    scale = float((found_SD.astype(np.float64) * expected_SD).sum()) / max(size, 1e-30)
    return scale or 1.0


def teacher_finding(
    logits_SV: np.ndarray, tokens_S: np.ndarray, first: int, margin: float = 1e-3
) -> Finding:
    """The stored last hidden rows through the head give the target's own tokens.

    Args:
      logits_SV: stored rows times the target's head.
      tokens_S: the text; greedy from `first` + 1 on.
      first: the row that drew the first greedy token.
      margin: rows whose best two logits are closer are left out.
    """
    item = "last hidden x head"
    rows = logits_SV[first:-1]
    if not len(rows):
        return Finding("features", item, SKIPPED, "the target chose nothing")
    best = rows.max(-1)
    chosen = np.take_along_axis(rows, tokens_S[first + 1 :, None], -1)[:, 0]
    wrong = np.nonzero(best - chosen > margin * max(1.0, float(np.abs(best).max())))[0]
    if wrong.size:
        at, token = first + int(wrong[0]), int(rows[wrong[0]].argmax())
        return Finding(
            "features",
            item,
            DIFFERS,
            f"at position {at} the stored row's best token is {token}, the "
            f"target chose {int(tokens_S[at + 1])}: it is not the last hidden "
            "after the final norm",
        )
    return Finding("features", item, OK, f"the target's choice in {len(rows)} rows")


def label_finding(runner: Runner, text: Text) -> Finding:
    """Row j of a block is taught the token that draft j stands for (A1)."""
    size, vocab = len(text.tokens_S), runner.frozen.embed_VD.shape[0]
    # Neighbours differ, whatever the text repeats.
    ramp = dataclasses.replace(
        text, tokens_S=(np.arange(size) % vocab).astype(text.tokens_S.dtype)
    )
    rows = runner.train(ramp, 1, text.length - 1)
    num_draft = runner.drafter.layout.num_draft
    for x, anchor in enumerate(rows.anchors_X):
        place = _draft_places(int(anchor), rows.labels_XM.shape[1])
        for slot, at in enumerate(place):
            if rows.valid_XM[x, slot] and rows.labels_XM[x, slot] != ramp.tokens_S[at]:
                off = int(rows.labels_XM[x, slot]) - int(ramp.tokens_S[at])
                return Finding(
                    "logits",
                    "labels",
                    DIFFERS,
                    f"slot {slot} of the block anchored at {int(anchor)} is taught the "
                    f"token at position {at + off}; its draft is verified at {at}",
                )
    if not (rows.valid_XM > 0).any():
        return Finding("logits", "labels", DIFFERS, "no row is supervised")
    return Finding("logits", "labels", OK, f"of {num_draft} slots")


def _draft_places(anchor: int, num_draft: int) -> list[int]:
    """Positions at which the target verifies the drafts of a round."""
    layout = verify_layout.chain(
        jnp.zeros((1,), jnp.int32),
        jnp.zeros((1, num_draft), jnp.int32),
        jnp.full((1,), num_draft + 1, jnp.int32),
    )
    return np.asarray(layout.positions(np.array([anchor])))[0, 1:].tolist()


def logit_findings(
    runner: Runner, text: Text, positions: Mapping[str, tuple[Text, int]]
) -> Iterator[Finding]:
    """Labels, then draft logits of training and serving at each position.

    Training gets the text with the drafts that serving chose in it, so that rows
    that depend on earlier drafts have the same prefix.

    Args:
      runner: the drafter.
      text: for the labels.
      positions: name -> (text, anchor).
    """
    if not runner.trains:
        yield Finding("logits", "training", SKIPPED, "there is nothing to train")
        return
    yield label_finding(runner, text)
    for name, (source, anchor) in positions.items():
        yield position_finding(runner, name, source, anchor)


def position_finding(runner: Runner, name: str, text: Text, anchor: int) -> Finding:
    """Training logits against serving logits of one block, slot by slot."""
    served = runner.serve(text, anchor)
    tokens_S = text.tokens_S.copy()
    tokens_S[_draft_places(anchor, len(served.tokens_M))] = served.tokens_M
    follows = dataclasses.replace(text, tokens_S=tokens_S)
    trained = runner.train(follows, anchor, anchor + 1)
    index = trained.at(anchor)
    if index is None:
        detail = f"training has no block anchored at {anchor}"
        return Finding("logits", name, DIFFERS, detail)
    slots = min(trained.logits_XMU.shape[1], len(served.logits_MU))
    gaps = slot_gaps(served.logits_MU[:slots], trained.logits_XMU[index][:slots])
    size = np.abs(served.logits_MU[np.isfinite(served.logits_MU)]).max(initial=1.0)
    allowed = runner.tolerance * float(size)
    bad = np.nonzero(~(gaps <= allowed))[0]
    if bad.size:
        every = ", ".join(f"{g:.3g}" for g in gaps)
        detail = (
            f"slot {bad[0]} differs first at position {anchor} (by slot: {every}; "
            f"allowed {allowed:.2g})"
        )
        return Finding("logits", name, DIFFERS, detail)
    if served.confidence_M is not None and trained.confidence_XM is not None:
        apart = served.confidence_M[:slots] - trained.confidence_XM[index][:slots]
        if not np.abs(apart).max() <= allowed:
            slot = int(np.argmax(~(np.abs(apart) <= allowed)))
            detail = f"the confidence of slot {slot} differs by {apart[slot]:.3g}"
            return Finding("logits", name, DIFFERS, detail)
    return Finding("logits", name, OK, f"{slots} slots, max abs {gaps.max():.1e}")


def slot_gaps(served_MU: np.ndarray, trained_MU: np.ndarray) -> np.ndarray:
    """Largest difference of each slot; columns that are no candidate are left out."""
    here = ~np.isneginf(served_MU)
    good = np.isfinite(served_MU) & np.isfinite(trained_MU)
    gap = np.full(served_MU.shape, np.inf)
    gap[good] = np.abs(served_MU[good].astype(np.float64) - trained_MU[good])
    return np.where(here, gap, 0.0).max(-1)


def weight_findings(
    tensors: Mapping[str, np.ndarray],
    leaves: Mapping[str, np.ndarray] | None,
    initial: Mapping[str, np.ndarray] | None,
    dtype: str,
) -> Iterator[Finding]:
    """What looks wrong about the weights alone (B1).

    Args:
      tensors: name -> tensor as stored, without the vocabulary map.
      leaves: path -> parameter, or None where they could not be read.
      initial: path -> what the drafter's init makes of the run's seed.
      dtype: float type that the folder says it has.
    """
    if not tensors:
        yield Finding("weights", "all", SKIPPED, "it has none")
        return
    bad = [
        name
        for name, tensor in tensors.items()
        if not np.isfinite(tensor.astype(np.float32)).all()
    ]
    yield verdict(
        "weights",
        "finite",
        f"{_some(bad)}: not finite" if bad else "",
        f"{len(tensors)} tensors",
    )
    other = [n for n, tensor in tensors.items() if str(tensor.dtype) != dtype]
    fault = ""
    if other:
        fault = f"{_some(other)} of type {tensors[other[0]].dtype}, not {dtype}"
    yield verdict("weights", "dtype", fault, dtype)
    if leaves is None or initial is None:
        yield Finding("weights", "training", SKIPPED, "the drafter could not be read")
        return
    norms = {n: np.asarray(leaf) for n, leaf in leaves.items() if "norm" in n}
    still = {n: float((leaf == 1).mean()) for n, leaf in norms.items()}
    stuck = [n for n, share in still.items() if share > STILL_ONE]
    fault = ""
    if stuck:
        fault = (
            f"{_some(stuck)}: {still[stuck[0]]:.0%} of the entries are exactly 1, so "
            "training never moved them (weights or steps too coarse?)"
        )
    if norms:
        yield verdict("weights", "norms", fault, f"{len(norms)} moved")
    else:
        yield Finding("weights", "norms", SKIPPED, "it has none")
    unmoved = [
        name
        for name, leaf in leaves.items()
        if name not in norms and _same(leaf, initial[name], dtype)
    ]
    fault = f"{_some(unmoved)}: still as initialised" if unmoved else ""
    yield verdict("weights", "initial values", fault, "none is left")


def _same(leaf, initial, dtype: str) -> bool:
    rounded = jnp.asarray(initial).astype(dtype).astype(jnp.float32)
    return bool((np.asarray(leaf, np.float32) == np.asarray(rounded)).all())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(sorted(names)[:2]) + more


def drafts_finding(
    item: str, runner: Runner, found: Drafts, expected: Drafts
) -> Finding:
    """The drafts of a state built another way against those of one piece."""
    gaps = slot_gaps(expected.logits_MU, found.logits_MU)
    size = np.abs(expected.logits_MU[np.isfinite(expected.logits_MU)]).max(initial=1.0)
    allowed = runner.tolerance * float(size)
    bad = np.nonzero(~(gaps <= allowed))[0]
    fault = ""
    if bad.size:
        fault = (
            f"slot {bad[0]} differs first, by {gaps[bad[0]]:.3g} (allowed "
            f"{allowed:.2g}), from the state built in one piece"
        )
    return verdict("draft state", item, fault, f"max abs {gaps.max():.1e}")


def state_findings(
    runner: Runner, text: Text, anchor: int, chunk: int, window: int
) -> Iterator[Finding]:
    """A state in one piece, in chunks, and after rounds of changing length.

    Args:
      runner: the drafter.
      text: rows.
      anchor: rows absorbed.
      chunk: rows of a chunk.
      window: W, rows of a round; those past its own length are junk.
    """
    expected, token = runner.serve(text, anchor), int(text.tokens_S[anchor])
    state = runner.empty()
    for start in range(0, anchor, chunk):
        count = min(chunk, anchor - start)
        state = runner.absorb(state, text, start, count, chunk, extend=False)
    found = runner.propose(state, token, anchor)
    yield drafts_finding("chunks", runner, found, expected)
    state, start, turn = runner.empty(), 0, 0
    while start < anchor:
        if start < anchor // 2:
            count, extend, width = min(chunk, anchor // 2 - start), False, chunk
        else:
            count, extend, width = 1 + turn % window, True, window
            count = min(count, anchor - start)
            turn += 1
        state = runner.absorb(state, text, start, count, width, extend=extend)
        start += count
    found = runner.propose(state, token, anchor)
    yield drafts_finding("a prefix, then rounds", runner, found, expected)


def require_rows(text_length: int, needed: int, where: str) -> None:
    """Refuses a text that the checks cannot be made on.

    Raises:
      UserError: it is too short.
    """
    if text_length < needed:
        raise UserError(
            f"{where} gives {text_length} rows, and the checks need {needed}; raise "
            "serve.max_new_tokens or use a longer prompt"
        )
