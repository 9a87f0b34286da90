"""One prompt and its greedy answer, run every way there is.

Serving runs it row by row and in chunks, with a drafter that keeps what it is told;
training runs it through capture, a store and a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema
from spec_jax.core.quick import quick_jit
from spec_jax.data import capture, samples, store
from spec_jax.data.pipeline import read_batch
from spec_jax.decode import prefill, programs
from spec_jax.decode.forward import Weights
from spec_jax.decode.jobs import Job
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.prefill import Chunk
from spec_jax.decode.recorder import Record, make_recorder
from spec_jax.decode.request import Generation, Settings
from spec_jax.decode.state import DecodeState
from spec_jax.drafters.base import Drafter
from spec_jax.evals.why import Text
from spec_jax.export import folder as export_folder
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

# The loops here end by themselves.
_JOB = Job(
    handle=0,
    generation=Generation(prompt=[]),
    settings=Settings(max_new_tokens=1 << 20, ignore_eos=True),
    text=None,
    speculating=True,
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

    def start_state(self, drafter: Drafter) -> DecodeState:
        """One slot, and nothing in it."""
        options = EngineOptions(max_context=self.room)
        dtype = self.params["params"]["embed"].dtype
        return programs.fresh_state(self.target.spec, drafter, options, dtype)

    @functools.cached_property
    def one_by_one(self) -> Recorded:
        """Decoded row by row: the prompt, then what the target answers."""
        spec = self.target.spec
        recorder, run = _recording(spec, self.layer_ids)
        state = self.start_state(recorder)
        weights = Weights(target=self.params, draft={}, frozen=())
        tokens = list(self.prompt)
        for row in range(len(self.prompt) + self.new):
            known = row + 1 < len(self.prompt)
            following = tokens[row + 1] if known else 0
            piece = piece_of(spec, [tokens[row]], following, row, 1, not known)
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
        state = self.start_state(recorder)
        weights = Weights(target=self.params, draft={}, frozen=())
        for piece in pieces(self.target.spec, tokens, self.chunk):
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


@functools.lru_cache(maxsize=8)
def _recording(spec, layer_ids: tuple[int, ...]):
    recorder = make_recorder(Record(FeatureSchema(layer_ids, spec.hidden_size)))
    run = functools.partial(prefill.prefill_step, spec, recorder, layer_ids)
    return recorder, quick_jit(run)


def piece_of(spec: TargetSpec, tokens, following: int, start: int, size: int, last):
    """A piece of the one request here, in slot 0; `last` draws a token."""
    return programs.make_chunk(
        spec, EngineOptions(), tokens, following, start, 0, size, _JOB, last
    )


def pieces(spec: TargetSpec, tokens, size: int) -> Iterator[Chunk]:
    """Chunks of a prompt; the last one draws the first token."""
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        end = start + len(part)
        last = end == len(tokens)
        following = 0 if last else tokens[end]
        yield piece_of(spec, part, following, start, size, last)


def _recorded(state: DecodeState, layer_ids, count: int) -> Recorded:
    told = jax.device_get(state.draft)
    return Recorded(
        layer_ids,
        told["tokens"][0, 0, :count],
        told["next"][0, 0, :count],
        told["features"][0, 0, :count],
        told["hidden"][0, 0, :count],
    )
