"""Capture: one forward of the frozen target over each sample, into a store.

For a text that was made elsewhere or before; of one that is being made, `recording`
keeps what decoding computes. The tokens are there already, so a sample is one
forward over all its rows, with nothing cached. Samples of similar length share a
batch that is padded to a bucket; buckets and batch size are static, so each bucket
is compiled once.
Batches are formed inside a shard, from its samples alone: an interrupted capture
that goes on makes the same batches, hence the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import masks
from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, FeatureSchema, check_layer_ids
from spec_jax.data.samples import Sample, check_supervision
from spec_jax.data.store import (
    CAPTURED,
    Layout,
    StoredSample,
    StoreWriter,
    check_disk,
    facts_of,
    open_store,
    plan_bytes,
)
from spec_jax.target.cache import init_cache
from spec_jax.target.loading import Target
from spec_jax.target.model import forward, is_apart, unstack_layers

BUCKETS = (64, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
SHARD_SAMPLES = 128

# Share of samples whose features may be not finite; one always may.
MAX_NOT_FINITE = 0.001


@dataclasses.dataclass(frozen=True)
class CaptureProgress:
    """How far a capture is.

    Attributes:
      tokens_done: tokens in complete batches and shards, earlier runs included.
      num_tokens: tokens of all samples.
      shards_done: complete shards.
      num_shards: all shards.
      seconds: since this run began.
      tokens_per_s: rate of this run, 0.0 before its first batch.
    """

    tokens_done: int
    num_tokens: int
    shards_done: int
    num_shards: int
    seconds: float
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class CaptureReport:
    """What a capture left behind.

    Attributes:
      num_samples: samples in the store.
      num_tokens: their tokens.
      skipped: reason -> sources of samples left out.
      num_bytes: planned bytes of the store's arrays.
      new_shards: shards this run wrote; 0 says that all was done before.
      seconds: wall time of this run.
    """

    num_samples: int
    num_tokens: int
    skipped: dict[str, list[str]]
    num_bytes: int
    new_shards: int
    seconds: float


def capture(
    target: Target,
    samples: Sequence[Sample],
    schema: FeatureSchema,
    store_path: str,
    contract: Contract,
    dtype: str = "float32",
    *,
    batch: int = 8,
    buckets: Sequence[int] = BUCKETS,
    shard_samples: int = SHARD_SAMPLES,
    progress: Callable[[CaptureProgress], None] | None = None,
) -> CaptureReport:
    """Captures features of whole samples into a store; continues one that is there.

    Args:
      target: the frozen target. Its layers are taken apart on a CPU (faster);
        pass parameters that are apart already to save that copy.
      samples: what the target ran, all of them, in order.
      schema: layer ids, width, and whether the teacher hidden is kept.
      store_path: the store's folder.
      contract: what the store is made under.
      dtype: stored features, one of `store.DTYPES`.
      batch: rows of one forward.
      buckets: padded lengths, ascending.
      shard_samples: samples per shard.
      progress: called after each batch.

    Raises:
      UserError: the contract does not describe this target; layer ids outside
        the target; token ids outside the vocabulary; samples longer than the
        largest bucket; a corpus that is all or not supervised; too little disk;
        a store that cannot be continued; features that are constant, or not
        finite in more than 0.1% of the samples.
    """
    start = time.monotonic()
    samples, buckets = tuple(samples), tuple(sorted(int(b) for b in buckets))
    _check_request(target, samples, schema, contract, batch, buckets, shard_samples)
    shards = [
        samples[first : first + shard_samples]
        for first in range(0, len(samples), shard_samples)
    ]
    layout = Layout(
        schema=schema,
        dtype=dtype,
        shard_tokens=max(sum(len(s.tokens) for s in shard) for shard in shards),
        num_shards=len(shards),
        made_from=_fingerprint(samples, batch, buckets, shard_samples),
        origin=CAPTURED,
        facts=facts_of(
            {
                "text (its sha256)": _digest(samples).hexdigest()[:12],
                "capture.batch": batch,
                "capture.shard_samples": shard_samples,
                "padded lengths": buckets,
            }
        ),
    )
    params = target.params
    if jax.default_backend() == "cpu" and not is_apart(params):
        params = unstack_layers(params)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    done = new_tokens = new_shards = 0

    def report() -> None:
        if progress is None:
            return
        seconds = time.monotonic() - start
        progress(
            CaptureProgress(
                tokens_done=done,
                num_tokens=num_tokens,
                shards_done=len(writer.written),
                num_shards=len(shards),
                seconds=seconds,
                tokens_per_s=new_tokens / seconds if seconds > 0 else 0.0,
            )
        )

    with StoreWriter(store_path, contract, layout) as writer:
        missing = [i for i in range(len(shards)) if i not in writer.written]
        missing_tokens = sum(len(s.tokens) for i in missing for s in shards[i])
        check_disk(store_path, plan_bytes(missing_tokens, schema, dtype))
        done = num_tokens - missing_tokens
        not_finite = writer.num_skipped
        report()
        for index in missing:
            shard = shards[index]
            stored: list[StoredSample | None] = [None] * len(shard)
            for rows in form_batches([len(s.tokens) for s in shard], batch):
                group = [shard[row] for row in rows]
                for row, sample in zip(
                    rows,
                    _run_batch(target, params, group, schema, dtype, batch, buckets),
                    strict=True,
                ):
                    stored[row] = sample
                count = sum(len(sample.tokens) for sample in group)
                done, new_tokens = done + count, new_tokens + count
                report()
            bad = [shard[i].source for i, one in enumerate(stored) if one is None]
            not_finite += len(bad)
            check_finite(bad, not_finite, len(samples), dtype)
            kept = [one for one in stored if one is not None]
            writer.write_shard(index, kept, {"not finite": bad})
            new_shards += 1
            report()
    store = open_store(store_path, contract)
    return CaptureReport(
        num_samples=len(store),
        num_tokens=store.num_tokens,
        skipped=store.skipped,
        num_bytes=plan_bytes(store.num_tokens, schema, dtype),
        new_shards=new_shards,
        seconds=time.monotonic() - start,
    )


def form_batches(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Rows of each batch: similar lengths together, the longest first.

    Only the last batch can be short, and it holds the shortest samples.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def _check_request(
    target: Target,
    samples: Sequence[Sample],
    schema: FeatureSchema,
    contract: Contract,
    batch: int,
    buckets: tuple[int, ...],
    shard_samples: int,
) -> None:
    spec = target.spec
    for name, value in (("batch", batch), ("shard_samples", shard_samples)):
        if value < 1:
            raise UserError(f"capture.{name}={value} must be at least 1")
    if not buckets or buckets[0] < 1:
        raise UserError(f"capture.buckets={buckets} must be lengths of 1 token or more")
    check_contract(target, schema, contract)
    check_supervision(samples)
    for sample in samples:
        if not sample.tokens:
            raise UserError(f"sample {sample.source} has no tokens; leave it out")
        low, high = min(sample.tokens), max(sample.tokens)
        if low < 0 or high >= spec.vocab_size:
            raise UserError(
                f"sample {sample.source} holds token id {low if low < 0 else high}, "
                f"outside the target's {spec.vocab_size}; make samples with this target"
            )
        if len(sample.tokens) > buckets[-1]:
            raise UserError(
                f"sample {sample.source} has {len(sample.tokens)} tokens, more than "
                f"{buckets[-1]}, the largest of capture.buckets; add a bucket or leave "
                "it out"
            )


def check_contract(target: Target, schema: FeatureSchema, contract: Contract) -> None:
    """Refuses planes that the target does not have, and another target's contract.

    Raises:
      UserError: layer ids outside the target, or a field that disagrees.
    """
    spec = target.spec
    if schema.layer_ids or not schema.teacher:  # EAGLE reads the teacher alone
        check_layer_ids(schema.layer_ids, spec.num_layers)
    facts = {
        "target_fingerprint": target.fingerprint,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "tokenizer_hash": target.tokenizer.hash,
    }
    for name, value in facts.items():
        if getattr(contract, name) != value:
            raise UserError(
                f"contract.{name} is {getattr(contract, name)!r} but the target's is "
                f"{value!r}; make the contract from the target that captures"
            )


def _fingerprint(
    samples: Sequence[Sample], batch: int, buckets: tuple[int, ...], shard_samples: int
) -> str:
    """sha256 of all that the stored bytes depend on, beside the contract."""
    first = json.dumps([batch, buckets, shard_samples])
    return _digest(samples, first).hexdigest()


def _digest(samples: Sequence[Sample], first: str = ""):
    """The sha256 of some words and then of the samples."""
    digest = hashlib.sha256(first.encode())
    for sample in samples:
        row = [sample.prompt_len, sample.source, sample.looping, sample.tokens]
        digest.update(json.dumps(row).encode() + b"\n")
    return digest


def _run_batch(
    target: Target,
    params,
    group: Sequence[Sample],
    schema: FeatureSchema,
    dtype: str,
    batch: int,
    buckets: tuple[int, ...],
) -> list[StoredSample | None]:
    """Runs one batch; None stands for a sample that is not finite in `dtype`."""
    longest = max(len(sample.tokens) for sample in group)
    size = next(bucket for bucket in buckets if bucket >= longest)
    tokens_BT = np.full((batch, size), target.spec.pad_id, np.int32)
    length_B = np.zeros(batch, np.int32)
    for row, sample in enumerate(group):
        tokens_BT[row, : len(sample.tokens)] = sample.tokens
        length_B[row] = len(sample.tokens)
    features, teacher, finite_B, low_BL, high_BL = jax.device_get(
        forward_rows(
            target.spec,
            params,
            tokens_BT,
            length_B,
            schema.layer_ids,
            schema.teacher,
            dtype,
        )
    )
    stored: list[StoredSample | None] = []
    for row, sample in enumerate(group):
        if not finite_B[row]:
            stored.append(None)
            continue
        check_varied(sample, schema, low_BL[row], high_BL[row])
        count = len(sample.tokens)
        kept = teacher[row, :count] if schema.teacher else None
        stored.append(stored_sample(sample, features[row, :count], kept))
    return stored


def stored_sample(sample: Sample, features, teacher) -> StoredSample:
    """A sample with its features `[T, L, D]` and teacher `[T, D]` (or None)."""
    return StoredSample(
        tokens=np.asarray(sample.tokens, np.int32),
        supervised=np.arange(len(sample.tokens)) >= sample.prompt_len,
        features=features,
        source=sample.source,
        prompt_len=sample.prompt_len,
        looping=sample.looping,
        teacher=teacher,
    )


def check_varied(sample: Sample, schema: FeatureSchema, low_L, high_L) -> None:
    """Refuses a plane that says nothing.

    Args:
      sample: what was run.
      schema: names of the planes.
      low_L: each plane's smallest value over the sample; high_L its largest.

    Raises:
      UserError: they are the same in a plane.
    """
    constant = np.flatnonzero(low_L == high_L)
    if constant.size:
        plane = int(constant[0])
        names = [*(f"layer {i}" for i in schema.layer_ids), "the teacher hidden"]
        raise UserError(
            f"features of {names[plane]} are all {low_L[plane]:g} in sample "
            f"{sample.source}; this target's weights or layer ids are not what the "
            "contract says"
        )


def check_finite(bad: Sequence[str], so_far: int, total: int, dtype: str) -> None:
    """Stops where too many samples have features that `dtype` cannot hold.

    Args:
      bad: sources of the newest ones.
      so_far: all of them, `bad` included.
      total: samples of the store.
      dtype: of the store.

    Raises:
      UserError: more than `MAX_NOT_FINITE` of them, and more than one.
    """
    if bad and so_far > max(1, MAX_NOT_FINITE * total):
        raise UserError(
            f"features of {so_far} of {total} samples, {', '.join(bad[:3])} among "
            f"them, are not finite in {dtype}: more than {MAX_NOT_FINITE:.1%}; store "
            "a wider dtype or check the target"
        )


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def forward_rows(spec, params, tokens_BT, length_B, layer_ids, with_teacher, dtype):
    """Features in the stored dtype, and what the checks need to know of them.

    Returns:
      features [B, T, L, D]; teacher [B, T, D] or None; finite [B]; smallest and
      largest value [B, L (+ 1)] of each plane over a sample's own tokens.
    """
    size_b, size_t = tokens_BT.shape
    row_T = jnp.arange(size_t)
    out = forward(
        spec,
        params,
        init_cache(spec, size_b, 1),  # read by nobody: the history is empty
        tokens_BT,
        jnp.broadcast_to(row_T, (size_b, size_t)),
        masks.causal(row_T[:, None], row_T[None])[None],
        jnp.zeros((size_b,), jnp.int32),
        layer_ids,
    )
    planes = [out.features_BTLD]
    if with_teacher:
        planes.append(out.hidden_BTD[:, :, None])
    stored_BTLD = jnp.concatenate(planes, 2).astype(dtype)
    real_BT11 = (row_T[None] < length_B[:, None])[..., None, None]
    wide_BTLD = stored_BTLD.astype(jnp.float32)
    finite_B = (jnp.isfinite(wide_BTLD) | ~real_BT11).all((1, 2, 3))
    low_BL = jnp.where(real_BT11, wide_BTLD, jnp.inf).min((1, 3))
    high_BL = jnp.where(real_BT11, wide_BTLD, -jnp.inf).max((1, 3))
    count = len(layer_ids)
    teacher = stored_BTLD[:, :, -1] if with_teacher else None
    return stored_BTLD[:, :, :count], teacher, finite_B, low_BL, high_BL
