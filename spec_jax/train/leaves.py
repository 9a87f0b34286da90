"""Leaves of a training state by path: what each is, and whether two states agree."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.core.errors import UserError


def is_key(leaf) -> bool:
    """Whether a leaf is a typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def flatten(tree) -> tuple[dict[str, Any], Any]:
    """`{leaf path: leaf}` and the tree's structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }
    if len(flat) != len(leaves):
        raise ValueError("two leaves of the state have the same path")
    return flat, structure


def describe(flat: dict[str, Any]) -> dict[str, dict]:
    """Shape and dtype of each leaf; a typed key's dtype names its generator."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        for name, leaf in flat.items()
    }


def compare(ours: dict, theirs: dict, where: pathlib.Path) -> None:
    """Refuses a missing, extra, reshaped or retyped leaf, by name.

    Args:
      ours: descriptions (`describe`) of this run's leaves.
      theirs: those of the checkpoint.
      where: its folder.

    Raises:
      UserError: naming the first leaf that differs.
    """
    missing = sorted(set(ours) - set(theirs))
    extra = sorted(set(theirs) - set(ours))
    problem = None
    if missing:
        problem = f"lacks the leaf {missing[0]!r}"
    elif extra:
        problem = f"has the leaf {extra[0]!r}, which this run does not"
    else:
        for name in sorted(ours):
            if ours[name] != theirs[name]:
                a, b = theirs[name], ours[name]
                problem = (
                    f"has {name!r} as {a['dtype']}{a['shape']}, this run expects "
                    f"{b['dtype']}{b['shape']}"
                )
                break
    if problem:
        raise UserError(
            f"checkpoint {where} {problem}; use the recipe it was made with, or "
            "another checkpoint folder"
        )


def as_stored(leaves: dict[str, dict]) -> dict[str, dict]:
    """Descriptions as Orbax holds them: a typed key becomes its uint32 words."""
    words = jax.random.key_data(jax.random.key(0)).shape
    stored = {}
    for name, leaf in leaves.items():
        if leaf["dtype"].startswith("key<"):
            leaf = {"shape": [*leaf["shape"], *words], "dtype": "uint32"}
        stored[name] = leaf
    return stored
