"""Weights: what training never moved, and what cannot be served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from spec_jax.evals.why.findings import SKIPPED, Finding, verdict

# Share of a norm's entries that may still be exactly 1.
STILL_ONE = 0.5
# First weights that two devices make of one seed, relative.
SAME = 1e-5


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
      initial: path -> what training started from, or None where that is unknown.
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
    if leaves is None:
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
    item = "initial values"
    if initial is None:
        detail = "the folder does not say its run's seed, so they are not known"
        yield Finding("weights", item, SKIPPED, detail)
        return
    unmoved = [
        name
        for name, leaf in leaves.items()
        if name not in norms and _same(leaf, initial[name], dtype)
    ]
    fault = f"{_some(unmoved)}: still as initialised" if unmoved else ""
    yield verdict("weights", item, fault, "none is left")


def _same(leaf, initial, dtype: str) -> bool:
    """Equal but for what storing as `dtype`, or another device's init, rounds."""
    found, first = np.asarray(leaf, np.float32), np.asarray(initial, np.float32)
    close = SAME + float(jnp.finfo(dtype).eps) / 2
    return bool((np.abs(found - first) <= close * np.abs(first)).all())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(sorted(names)[:2]) + more
