"""Checkpoints of a run: the only Orbax calls of the trainer.

    <folder>/step_00000300.0/        attempt 0 of step 300
        state/                       Orbax: one flat {leaf path: array}
        meta.json                    step, recipe, iterator, metrics, leaves, files
        COMMIT                       sha256 of meta.json, written last

A step exists when its `COMMIT` matches its `meta.json`; nothing relies on
rename being atomic. Files are listed with size and checksum, leaves with shape
and dtype, and both are compared before anything is restored, because Orbax
casts a differing dtype without a word and a flipped bit is returned as data
(training notes, G1, H1-H6). Writing happens behind training: a failed write is
raised at the next `check`, and a step that failed is never listed. Saving a
step again writes a new attempt and removes the old one only afterwards.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, contract_from_json, require_same
from spec_jax.train import leaves

FORMAT = 1
META, COMMIT, STATE = "meta.json", "COMMIT", "state"
_MARK_LENGTH = hashlib.sha256().digest_size * 2
_NAME = re.compile(r"step_(\d{8})\.(\d+)$")


class SaveFailed(UserError):
    """A background save did not finish; its step is not listed."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One committed step.

    Attributes:
      step: batches consumed.
      attempt: how often this step was saved before.
      path: its folder.
      metric: validation metric (served accept length), or None.
    """

    step: int
    attempt: int
    path: pathlib.Path
    metric: float | None


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` returns.

    Attributes:
      state: the state, bit for bit.
      iterator: the data iterator's state, as given to `save`.
      extra: the trainer's own values, as given to `save`.
      entry: where it came from.
    """

    state: Any
    iterator: Any
    extra: dict
    entry: Entry


def _encode_iterator(state: Any) -> Any:
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    return {"json": state}


def _decode_iterator(field: dict) -> Any:
    return base64.b64decode(field["bytes"]) if "bytes" in field else field["json"]


def _checksums(folder: pathlib.Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file under `folder`, by relative path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            crc, size = 0, 0
            with path.open("rb") as file:
                while piece := file.read(1 << 22):
                    crc, size = zlib.crc32(piece, crc), size + len(piece)
            found[path.relative_to(folder).as_posix()] = [size, crc]
    return found


def _write_durably(path: pathlib.Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read_meta(path: pathlib.Path) -> dict | None:
    """The step's record if the step was committed, else None.

    Raises:
      UserError: the step was committed and its record changed afterwards.
    """
    try:
        mark = (path / COMMIT).read_text(encoding="ascii", errors="replace")
        text = (path / META).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(mark) < _MARK_LENGTH:
        return None  # killed while writing the mark
    if hashlib.sha256(text).hexdigest() != mark:
        raise _damaged(path, META)
    return json.loads(text)


def _damaged(path: pathlib.Path, name: str) -> UserError:
    return UserError(
        f"checkpoint {path} is damaged: {name} is not the file that was written; "
        "delete that folder to go on from the step before"
    )


def list_steps(folder) -> list[Entry]:
    """Committed steps, ascending; of several attempts the newest."""
    folder = pathlib.Path(folder)
    found: dict[int, Entry] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _NAME.match(path.name)
        meta = _read_meta(path) if match else None
        if meta is not None:
            entry = Entry(int(match[1]), int(match[2]), path, meta["metric"])
            known = found.get(entry.step)
            if known is None or known.attempt < entry.attempt:
                found[entry.step] = entry
    return [found[step] for step in sorted(found)]


def best_of(entries: list[Entry]) -> Entry | None:
    """The entry with the highest metric, the earlier of equals."""
    judged = [entry for entry in entries if entry.metric is not None]
    return max(judged, key=lambda entry: (entry.metric, -entry.step), default=None)


class Checkpoints:
    """A folder of steps: saved behind training, restored bit for bit.

    Process 0 commits and removes; every process takes part in a save.
    """

    def __init__(
        self,
        folder,
        *,
        recipe_hash: str,
        contract: Contract | None = None,
        keep_last: int = 1,
    ):
        """Opens a folder for writing; unfinished saves in it are removed.

        Args:
          folder: made when missing.
          recipe_hash: hash of the recipe; another one's folder is refused.
          contract: what features and weights are made under, or None.
          keep_last: newest steps kept beside the best one.

        Raises:
          UserError: the folder belongs to another recipe or contract.
        """
        self.folder = pathlib.Path(folder).absolute()
        self.recipe_hash = recipe_hash
        self.contract = contract
        self.keep_last = max(keep_last, 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._primary = jax.process_index() == 0
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._running: tuple[int, concurrent.futures.Future] | None = None
        for entry in list_steps(self.folder):
            self._require_ours(entry)
        if self._primary:
            for path in self.folder.iterdir():
                if _NAME.match(path.name) and _read_meta(path) is None:
                    shutil.rmtree(path)

    def _require_ours(self, entry: Entry) -> dict:
        meta = _read_meta(entry.path)
        if meta["format"] != FORMAT:
            raise UserError(
                f"checkpoint {entry.path} has format {meta['format']}, this version "
                f"reads {FORMAT}; use another checkpoint folder"
            )
        if meta["recipe_hash"] != self.recipe_hash:
            raise UserError(
                f"checkpoint {entry.path} was made by recipe {meta['recipe_hash']}, "
                f"not {self.recipe_hash}; run that recipe, or use another checkpoint "
                "folder"
            )
        if (meta["contract"] is None) != (self.contract is None):
            raise UserError(
                f"checkpoint {entry.path}: contract is {meta['contract']!r} but this "
                f"run has {self.contract!r}; use another checkpoint folder"
            )
        if self.contract is not None:
            theirs = contract_from_json(meta["contract"], str(entry.path / META))
            require_same(self.contract, theirs, f"checkpoint {entry.path}")
        return meta

    def entries(self) -> list[Entry]:
        """Committed steps, ascending."""
        return list_steps(self.folder)

    def best(self) -> Entry | None:
        """The step with the highest metric; without any metric, the last."""
        entries = self.entries()
        return best_of(entries) or (entries[-1] if entries else None)

    def last(self) -> Entry | None:
        """The newest step."""
        entries = self.entries()
        return entries[-1] if entries else None

    def check(self) -> None:
        """Raises what a background save met, without waiting for it.

        Raises:
          SaveFailed: the save of a step did not finish.
        """
        if self._running is not None and self._running[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits until no save is running.

        Raises:
          SaveFailed: the save of a step did not finish.
        """
        if self._running is None:
            return
        step, future = self._running
        self._running = None
        try:
            future.result()
        except Exception as error:
            raise SaveFailed(
                f"checkpoint of step {step} in {self.folder} could not be written "
                f"({type(error).__name__}: {error}); free or repair that disk and run "
                "the same command again"
            ) from error

    def settle(self) -> None:
        """Waits until every process sees the same steps.

        Raises:
          SaveFailed: the save of a step did not finish.
        """
        self.wait()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints")

    def save(
        self,
        state,
        step: int,
        *,
        iterator: Any = None,
        metric: float | None = None,
        extra: dict | None = None,
    ) -> None:
        """Starts writing a step; returns once the values are safe to donate.

        A save that is still running is waited for, never skipped. A step that
        is already there is written again.

        Args:
          state: a tree of arrays; typed keys are allowed.
          step: its number.
          iterator: the data iterator's state: bytes, or JSON-able.
          metric: validation metric, higher is better, or None.
          extra: JSON-able values of the trainer.

        Raises:
          SaveFailed: this or the running save failed.
        """
        self.wait()
        path = self.folder / f"step_{step:08d}.{self._next_attempt(step)}"
        flat, _ = leaves.flatten(state)
        meta = {
            "format": FORMAT,
            "step": step,
            "recipe_hash": self.recipe_hash,
            "contract": None if self.contract is None else self.contract.to_json(),
            "iterator": _encode_iterator(iterator),
            "metric": None if metric is None else float(metric),
            "extra": extra or {},
            "leaves": leaves.describe(flat),
        }
        json.dumps(meta)  # refuse here, not in the background
        raw = {
            name: jax.random.key_data(leaf) if leaves.is_key(leaf) else leaf
            for name, leaf in flat.items()
        }
        try:
            if self._primary:
                path.mkdir()
            writing = ocp.save_async(path / STATE, raw)
        except Exception as error:
            raise SaveFailed(
                f"checkpoint of step {step} in {self.folder} could not be started "
                f"({type(error).__name__}: {error}); free or repair that disk and run "
                "the same command again"
            ) from error
        future = self._worker.submit(self._finish, path, meta, writing)
        self._running = (step, future)

    def _next_attempt(self, step: int) -> int:
        """A number no folder of this step has; the same on every process."""
        attempts = [
            int(match[2])
            for path in self.folder.iterdir()
            if (match := _NAME.match(path.name)) and int(match[1]) == step
        ]
        attempt = max(attempts, default=-1) + 1
        if jax.process_count() == 1:
            return attempt
        return int(multihost_utils.broadcast_one_to_all(np.int32(attempt)))

    def _finish(self, path: pathlib.Path, meta: dict, writing) -> None:
        """Waits for Orbax, then commits the step and drops the ones not kept."""
        writing.result()
        if not self._primary:
            return
        written = _orbax_leaves(path / STATE)
        if written != leaves.as_stored(meta["leaves"]):
            raise RuntimeError(f"{path} does not hold the leaves that were saved")
        meta = {**meta, "files": _checksums(path / STATE)}
        text = json.dumps(meta, sort_keys=True)
        _write_durably(path / META, text)
        _write_durably(path / COMMIT, hashlib.sha256(text.encode()).hexdigest())
        self._prune()

    def _prune(self) -> None:
        entries = self.entries()
        kept = entries[-self.keep_last :]
        if (best := best_of(entries)) is not None:
            kept = [*kept, best]
        paths = {entry.path for entry in kept}
        for path in self.folder.iterdir():
            if _NAME.match(path.name) and path not in paths:
                (path / COMMIT).unlink(missing_ok=True)
                shutil.rmtree(path)

    def restore(self, template, entry: Entry | None = None) -> Restored | None:
        """Reads a step into the structure and shardings of `template`.

        Args:
          template: a state, or shapes with shardings; only described, not read.
          entry: which step; the newest by default.

        Returns:
          The step, or None when the folder holds none.

        Raises:
          UserError: the step belongs to another run, or is damaged.
        """
        self.settle()
        entry = entry or self.last()
        if entry is None:
            return None
        if _read_meta(entry.path) is None:
            raise UserError(
                f"checkpoint {entry.path} was never finished; choose a listed step"
            )
        meta = self._require_ours(entry)
        flat, structure = leaves.flatten(template)
        leaves.compare(leaves.describe(flat), meta["leaves"], entry.path)
        found = _checksums(entry.path / STATE)
        for name in sorted(set(found) | set(meta["files"])):
            if found.get(name) != meta["files"].get(name):
                raise _damaged(entry.path, f"{STATE}/{name}")
        shapes = {
            name: jax.ShapeDtypeStruct(
                raw["shape"], raw["dtype"], sharding=flat[name].sharding
            )
            for name, raw in leaves.as_stored(leaves.describe(flat)).items()
        }
        raw = ocp.load(entry.path / STATE, shapes)
        values = [
            jax.random.wrap_key_data(raw[name]) if leaves.is_key(leaf) else raw[name]
            for name, leaf in flat.items()
        ]
        return Restored(
            state=jax.tree_util.tree_unflatten(structure, values),
            iterator=_decode_iterator(meta["iterator"]),
            extra=meta["extra"],
            entry=entry,
        )

    def close(self) -> None:
        """Waits for the running save and ends the background thread."""
        try:
            self.wait()
        finally:
            self._worker.shutdown(wait=True)


def _orbax_leaves(path: pathlib.Path) -> dict[str, dict]:
    """What Orbax says it has written."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(np.dtype(leaf.dtype))}
        for name, leaf in ocp.metadata(path).metadata.items()
    }
