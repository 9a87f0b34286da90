"""Training batches from a feature store: seeded order, exact resume.

The order is a grain `MapDataset` over sample indices (shuffle reseeded each
epoch, repeat, batch), the state is one global number: batches delivered. grain
takes a state that was saved over another dataset or seed and goes on in another
order; here the state says what it was saved over, and is refused.

Every process walks the same global order and reads only its own rows of each
batch, so a run may resume on another number of processes.

Threads read ahead; there are no worker processes. Whoever adds them must spawn,
not fork: a process that forks after tensorstore was imported aborts.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from spec_jax.core.batch import Batch
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.data.samples import MAX_SKIPPED, MIN_ANSWER, check_skipped
from spec_jax.data.store import FeatureStore

# What a recipe calls an option; the others stand in none.
_SAID = {"batch_size": "train.batch", "seq_len": "train.seq_len"}


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """How batches are made.

    Attributes:
      batch_size: B, rows of a global batch.
      seq_len: S, tokens every row is padded to; longer samples are dropped.
      seed: of the order.
      shuffle: off keeps the store's order (evaluation).
      num_epochs: passes over the data; None goes on forever.
      keep_looping: whether samples with looping answers are used.
      min_supervised: samples with fewer supervised tokens are dropped (two make
        one anchor and its label).
      max_dropped: largest share that may be dropped as too long or unsupervised.
      num_threads: reader threads.
      prefetch: batches read ahead.
    """

    batch_size: int
    seq_len: int
    seed: int = 0
    shuffle: bool = True
    num_epochs: int | None = None
    keep_looping: bool = True
    min_supervised: int = MIN_ANSWER
    max_dropped: float = MAX_SKIPPED
    num_threads: int = 2
    prefetch: int = 4

    def __post_init__(self):
        for name in ("batch_size", "seq_len", "num_threads", "prefetch"):
            if getattr(self, name) < 1:
                said = _SAID.get(name, name)
                raise UserError(f"{said}={getattr(self, name)} must be at least 1")
        if self.num_epochs is not None and self.num_epochs < 1:
            raise UserError(f"num_epochs={self.num_epochs} must be at least 1, or None")


class Pipeline(Iterator[Batch]):
    """An iterator of batches whose state can be saved and set.

    Each batch is made of freshly allocated arrays that nobody writes again: on a
    CPU, JAX may alias a numpy array that it is given.

    Attributes:
      store: what is read.
      options: see `PipelineOptions`.
      kept: sample indices in use, ascending.
      dropped: reason -> number of samples left out ("looping" included).
      step: global batches delivered so far.
    """

    def __init__(
        self,
        store: FeatureStore,
        options: PipelineOptions,
        *,
        needs: FeatureSchema | None = None,
        indices: Sequence[int] | None = None,
        process: int = 0,
        num_processes: int = 1,
    ):
        """Chooses the samples and their order; reads nothing yet.

        Args:
          store: an opened store.
          options: how batches are made.
          needs: the planes a drafter conditions on (default: all that are there).
          indices: samples to choose from (default: all).
          process: this process, in [0, num_processes).
          num_processes: processes that share a global batch.

        Raises:
          UserError: too many samples are dropped or none is left; the batch is
            larger than an epoch allows, or not divisible by the processes.
        """
        self.store, self.options = store, options
        self.needs = needs or store.layout.schema
        _check_planes(store, self.needs)
        self.kept, self.dropped = _select(store, options, indices)
        if options.batch_size % num_processes or not 0 <= process < num_processes:
            raise UserError(
                f"train.batch={options.batch_size} must be a multiple of the "
                f"{num_processes} processes, and process {process} one of them"
            )
        share = options.batch_size // num_processes
        self._rows = slice(process * share, (process + 1) * share)
        self._order = grain.MapDataset.source(self.kept)
        if options.shuffle:
            self._order = self._order.shuffle(seed=options.seed)
        self._order = self._order.repeat(options.num_epochs).batch(
            options.batch_size, drop_remainder=True
        )
        if len(self._order) == 0:
            raise UserError(
                f"train.batch={options.batch_size} is more than the "
                f"{len(self.kept) * (options.num_epochs or 1)} samples to be read; use "
                "a smaller batch or more samples"
            )
        self.step = 0
        self._iterator = self._start()

    def __len__(self) -> int:
        """Global batches from beginning to end."""
        return len(self._order)

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self.step += 1
        return batch

    def ids_at(self, step: int) -> np.ndarray:
        """Store indices [B] of a global batch (0 is the first)."""
        return np.asarray(self._order[step], np.int64)

    def hash_at(self, step: int) -> str:
        """sha256 of a global batch's sample ids: equal orders have equal hashes."""
        return hashlib.sha256(self.ids_at(step).astype("<i8").tobytes()).hexdigest()

    def get_state(self) -> dict[str, Any]:
        """JSON-able state after the batches delivered so far."""
        return {"step": self.step, **self._identity()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was saved.

        Raises:
          UserError: it was saved over other data, or with another order.
        """
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise UserError(
                    f"data state cannot be resumed: its {name} is {state.get(name)!r}, "
                    f"this pipeline's is {ours!r}; resume with the same store and data "
                    "options, or start a new run"
                )
        step = state.get("step")
        if not isinstance(step, int) or not 0 <= step <= len(self):
            raise UserError(
                f"data state has step {step!r}, not one in [0, {len(self)}]; the "
                "checkpoint is damaged, use another one"
            )
        self.close()
        self.step = step
        self._iterator = self._start()
        self._iterator.set_state({**self._iterator.get_state(), "next_index": step})

    def close(self) -> None:
        """Stops the reader threads."""
        self._iterator.close()

    def _start(self) -> grain.DatasetIterator:
        read = grain.ReadOptions(
            num_threads=self.options.num_threads,
            prefetch_buffer_size=self.options.prefetch,
        )
        return iter(self._order.map(self._read_batch).to_iter_dataset(read))

    def _identity(self) -> dict[str, Any]:
        """What a saved step number means nothing without."""
        content = json.dumps([self.store.digest, self.kept]).encode()
        return {
            "num_samples": len(self.kept),
            "samples_sha256": hashlib.sha256(content).hexdigest(),
            "seed": self.options.seed,
            "shuffle": self.options.shuffle,
            "batch_size": self.options.batch_size,
            "seq_len": self.options.seq_len,
            "num_epochs": self.options.num_epochs,
        }

    def _read_batch(self, ids_B: np.ndarray) -> Batch:
        ids = [int(index) for index in ids_B[self._rows]]
        return read_batch(self.store, ids, self.options.seq_len, self.needs)


def _check_planes(store: FeatureStore, needs: FeatureSchema) -> None:
    """Refuses a store that lacks what a drafter conditions on."""
    held = store.layout.schema
    absent = [i for i in needs.layer_ids if i not in held.layer_ids]
    if absent or (needs.teacher and not held.teacher):
        what = f"layer {absent[0]}" if absent else "the teacher's last hidden state"
        fix = "capture.layer_ids" if absent else "capture.teacher=True"
        raise UserError(
            f"feature store {store.path!r} lacks {what}, which the drafter needs; "
            f"capture again with {fix}"
        )


def read_batch(
    store: FeatureStore,
    ids: Sequence[int],
    seq_len: int,
    needs: FeatureSchema | None = None,
) -> Batch:
    """Reads samples into one padded batch of fresh arrays.

    Padding rows have token 0, no supervision and zero features. `needs` chooses
    among the store's planes; None takes them all.

    Raises:
      UserError: a sample is longer than `seq_len`, or cannot be read.
    """
    held = store.layout.schema
    needs = needs or held
    planes = [held.layer_ids.index(i) for i in needs.layer_ids]
    if planes == list(range(held.num_layers)):
        planes = slice(None)  # a view, not a copy
    size = (len(ids), seq_len)
    tokens_BS = np.zeros(size, np.int32)
    supervised_BS = np.zeros(size, bool)
    length_B = np.zeros(len(ids), np.int32)
    features_BSLD = teacher_BSD = None
    for row, index in enumerate(ids):
        sample = store.read_sample(index)
        count = len(sample["tokens"])
        if count > seq_len:
            raise UserError(
                f"sample {index} ({store.samples[index].source}) has {count} tokens, "
                f"more than train.seq_len={seq_len}; raise it or leave the sample out"
            )
        dtype = sample["features"].dtype
        if features_BSLD is None:
            shape = (*size, needs.num_layers, held.width)
            features_BSLD = np.zeros(shape, dtype)
        tokens_BS[row, :count] = sample["tokens"]
        supervised_BS[row, :count] = sample["supervised"]
        length_B[row] = count
        features_BSLD[row, :count] = sample["features"][:, planes]
        if needs.teacher:
            if teacher_BSD is None:
                teacher_BSD = np.zeros((*size, held.width), dtype)
            teacher_BSD[row, :count] = sample["teacher"]
    return Batch(tokens_BS, supervised_BS, length_B, features_BSLD, teacher_BSD)


def _select(
    store: FeatureStore, options: PipelineOptions, indices: Sequence[int] | None
) -> tuple[list[int], dict[str, int]]:
    """Indices in use, and how many were left out and why."""
    if store.contract.truncation != "drop":
        raise UserError(
            f"contract.truncation={store.contract.truncation!r} is not known to the "
            "pipeline; capture with 'drop'"
        )
    chosen = range(len(store)) if indices is None else sorted({int(i) for i in indices})
    if len(chosen) and not 0 <= chosen[0] <= chosen[-1] < len(store):
        raise UserError(
            f"indices lie in [{chosen[0]}, {chosen[-1]}], outside the store's "
            f"{len(store)} samples; choose among them"
        )
    too_long = f"longer than train.seq_len={options.seq_len}"
    too_few = f"fewer than {options.min_supervised} supervised tokens"
    kept, faults, looping = [], collections.Counter(), 0
    for index in chosen:
        info = store.samples[index]
        if info.length > options.seq_len:
            faults[too_long] += 1
        elif info.num_supervised < options.min_supervised:
            faults[too_few] += 1
        elif info.looping and not options.keep_looping:
            looping += 1
        else:
            kept.append(index)
    check_skipped(faults, len(chosen), options.max_dropped, "data pipeline")
    if not kept:
        raise UserError(
            f"data pipeline: none of {len(chosen)} samples is left ({looping} looping, "
            f"{sum(faults.values())} too long or unsupervised); capture more or keep "
            "looping ones"
        )
    return kept, {**faults, **({"looping": looping} if looping else {})}
