"""Contract: what a folder says against its own configuration and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.evals.why.findings import DIFFERS, OK, SKIPPED, Finding


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
