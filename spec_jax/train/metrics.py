"""Metrics as sums and counts, and the file that keeps them.

A metric is a pair (sum, count), scalars or rows per position. Pairs are added
over steps and divided once, when a record is written.
"""

from __future__ import annotations

import json
import os
import pathlib

import jax
import numpy as np


def start_copy(metrics) -> None:
    """Starts the copy to the host, so that reading later does not wait."""
    for leaf in jax.tree.leaves(metrics):
        leaf.copy_to_host_async()


def to_host(metrics) -> dict[str, list]:
    """{name: [sum, count]} in plain floats (lists per position)."""
    return {
        name: [np.asarray(part, np.float64).tolist() for part in pair]
        for name, pair in metrics.items()
    }


def add(total: dict[str, list], new: dict[str, list]) -> dict[str, list]:
    """Adds two host records; a name missing on one side counts nothing there."""
    added = dict(total)
    for name, pair in new.items():
        if name in added:
            pair = [
                (np.asarray(a) + np.asarray(b)).tolist()
                for a, b in zip(added[name], pair, strict=True)
            ]
        added[name] = pair
    return added


def means(total: dict[str, list]) -> dict[str, float | list]:
    """sum / count of each metric; 0 where nothing was counted."""
    result = {}
    for name, (sums, counts) in total.items():
        sums, counts = np.broadcast_arrays(np.asarray(sums), np.asarray(counts))
        mean = np.divide(sums, counts, out=np.zeros(sums.shape), where=counts != 0)
        result[name] = mean.tolist()
    return result


class MetricsFile:
    """A file of JSON lines that survives a kill and holds each step once."""

    def __init__(self, path, *, step: int):
        """Opens the file and drops records after `step` and a torn last line.

        Args:
          path: the file; made when missing.
          step: the step the run goes on from; its records will come again.
        """
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self.path.exists():
            text = self.path.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if record["step"] <= step:
                    kept.append(line)
        draft = self.path.with_name(self.path.name + ".new")
        draft.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(draft, self.path)

    def append(self, record: dict) -> None:
        """Adds one record (it has a `step`)."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_records(path) -> list[dict]:
    """The records of a metrics file; a torn last line is left out."""
    records = []
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def progress_line(record: dict) -> str:
    """One line for a person, from a record of `train.loop.train`."""
    if record["kind"] == "eval":
        return (
            f"step {record['step']}: {record['metric_name']} "
            f"{record['metric']:.3f}{' (best so far)' if record['best'] else ''}"
        )
    minutes, seconds = divmod(round(record["eta_s"]), 60)
    parts = [f"step {record['step']}/{record['steps']}"]
    if record["loss"] is not None:
        parts.append(f"loss {record['loss']:.4f}")
    accuracy = record["metrics"].get("acc", record["metrics"].get("accuracy"))
    if isinstance(accuracy, float):
        parts.append(f"acc {accuracy:.3f}")
    parts.append(f"{record['slots_per_s']:,.0f} slots/s")
    parts.append(f"ETA {minutes}:{seconds:02d}")
    return "  ".join(parts)
