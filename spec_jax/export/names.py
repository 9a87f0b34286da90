"""Leaves of our trees and tensors of public checkpoints, piece by piece.

Our weights are `[in, out]` and fused per GEMM; public ones are `[out, in]`, one
per projection. A `Piece` says which public tensors one leaf becomes and how, both
ways; a kind of drafter is a list of pieces. Names, shapes and transforms in both
directions follow from that list, so that they cannot disagree.

    linear    [I, O]               name.weight [O, I]
    table     [..]                 name        [..], as it is
    heads     [I, G, H/G + 2, C]   {q,k,v}_proj.weight: [H*C, I], [G*C, I], [G*C, I]
    gate_up   [I, 2, F]            {gate,up}_proj.weight, each [F, I]

Query head h of a public tensor is head (h // (H/G), h % (H/G)) here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core.errors import UserError

D2T = "d2t"
T2D = "t2d"
# Inside `params`, the parts of a leaf's path are joined by this.
_JOIN = "/"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One leaf of the tree and the public tensors it becomes.

    Attributes:
      path: of the leaf, "layers_0/qkv".
      names: public tensors, in the order of `split`.
      split: leaf -> tuple of tensors (works on numpy and on traced arrays).
      fuse: tensors -> leaf, its inverse.
    """

    path: str
    names: tuple[str, ...]
    split: Callable[[Any], tuple[Any, ...]]
    fuse: Callable[..., Any]


def table(path: str, name: str) -> Piece:
    """A leaf that is stored as it is: a norm, an embedding, a bias."""
    return Piece(path, (name,), lambda leaf: (leaf,), lambda tensor: tensor)


def linear(path: str, name: str) -> Piece:
    """A projection `[I, O]`; public `[O, I]`."""
    return Piece(path, (name,), lambda leaf: (leaf.T,), lambda tensor: tensor.T)


def heads(path: str, prefix: str, shape: Sequence[int]) -> Piece:
    """Fused queries, keys and values of shape `[I, G, H/G + 2, C]`."""
    size_in, groups, fused, channels = shape
    group = fused - 2

    def split(leaf):
        leaf = leaf.transpose(1, 2, 3, 0)
        parts = leaf[:, :group], leaf[:, group], leaf[:, group + 1]
        return tuple(part.reshape(-1, size_in) for part in parts)

    def fuse(q, k, v):
        def one(weight, per_group):
            whole = weight.reshape(groups, per_group, channels, size_in)
            return whole.transpose(3, 0, 1, 2)

        return np.concatenate([one(q, group), one(k, 1), one(v, 1)], 2)

    names = tuple(f"{prefix}{part}_proj.weight" for part in "qkv")
    return Piece(path, names, split, fuse)


def gate_up(path: str, prefix: str) -> Piece:
    """Fused gate and up projections `[I, 2, F]`."""

    def split(leaf):
        return leaf[:, 0].T, leaf[:, 1].T

    def fuse(gate, up):
        return np.stack([gate.T, up.T], 1)

    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return Piece(path, names, split, fuse)


def layer_pieces(
    layer: Mapping[str, Any], path: str, prefix: str, norms: Mapping[str, str]
) -> list[Piece]:
    """Pieces of a decoder layer, for the leaves it has.

    Args:
      layer: name -> leaf or shape.
      path: of the layer in the tree, "layers_0/".
      prefix: of its public tensors, "layers.0.".
      norms: our name of each norm -> its public name.
    """
    found = []
    for name, leaf in layer.items():
        at = path + name
        if name == "qkv":
            found.append(heads(at, f"{prefix}self_attn.", leaf.shape))
        elif name == "out":
            found.append(linear(at, f"{prefix}self_attn.o_proj.weight"))
        elif name == "gate_up":
            found.append(gate_up(at, f"{prefix}mlp."))
        elif name == "down":
            found.append(linear(at, f"{prefix}mlp.down_proj.weight"))
        elif name in ("q_norm", "k_norm"):
            found.append(table(at, f"{prefix}self_attn.{name}.weight"))
        elif name in norms:
            found.append(table(at, f"{prefix}{norms[name]}.weight"))
    return found


def flatten(tree: Any) -> dict[str, Any]:
    """Path -> leaf of the tree inside `{"params": tree}`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree.get("params", {}))[0]
    return {_JOIN.join(str(key.key) for key in path): leaf for path, leaf in leaves}


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `flatten`; without leaves, the tree of a drafter that has none."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split(_JOIN)
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return {"params": tree} if tree else {}


@dataclasses.dataclass(frozen=True)
class Plan:
    """All pieces of one drafter.

    Attributes:
      pieces: one per leaf.
      tensors: public name -> shape.
    """

    pieces: tuple[Piece, ...]
    tensors: Mapping[str, tuple[int, ...]]


def plan(pieces: Iterable[Piece], shapes: Mapping[str, Any]) -> Plan:
    """Names and shapes of the tensors; no array is made.

    Args:
      pieces: of a drafter.
      shapes: path -> leaf or shape of it (`jax.ShapeDtypeStruct`).
    """
    pieces, tensors = tuple(pieces), {}
    for piece in pieces:
        leaf = jax.ShapeDtypeStruct(shapes[piece.path].shape, jnp.float32)
        parts = jax.eval_shape(piece.split, leaf)
        for name, part in zip(piece.names, parts, strict=True):
            tensors[name] = tuple(part.shape)
    return Plan(pieces, tensors)


def to_public(
    plan: Plan, params: Mapping[str, Any], what: str
) -> dict[str, np.ndarray]:
    """Splits and transposes a tree into public tensors.

    Args:
      plan: of this drafter.
      params: `{"params": tree}` of arrays; dtypes are kept.
      what: the kind, in errors.

    Returns:
      Public name -> C-contiguous array.

    Raises:
      UserError: a leaf without a public name, a piece without a leaf, another shape,
        or a number that is not finite.
    """
    leaves = flatten(params)
    expected = {piece.path for piece in plan.pieces}
    for path in sorted(set(leaves) - expected):
        raise UserError(
            f"drafter parameter {path} has no public {what} name; leave it out of an "
            "exported drafter"
        )
    for path in sorted(expected - set(leaves)):
        raise UserError(
            f"drafter parameter {path} is missing from the weights to export; export "
            "the tree that this drafter's init makes"
        )
    weights = {}
    for piece in plan.pieces:
        leaf = np.asarray(leaves[piece.path])
        if not np.isfinite(leaf).all():
            raise UserError(
                f"drafter parameter {piece.path} is not finite; keep an earlier "
                "checkpoint"
            )
        for name, part in zip(piece.names, piece.split(leaf), strict=True):
            weights[name] = np.ascontiguousarray(part)
    check_tensors(plan.tensors, weights, "the drafter's parameters")
    return weights


def from_public(
    plan: Plan, weights: Mapping[str, np.ndarray], where: str = "the weights"
) -> dict[str, Any]:
    """Inverse of `to_public`: fuses public tensors into a tree.

    Args:
      plan: of the drafter that the configuration describes.
      weights: plain public name -> array, without the vocabulary map.
      where: names the folder or file in errors.

    Returns:
      `{"params": tree}` of numpy arrays in the dtype they came in.

    Raises:
      UserError: a tensor is missing, surplus, misshaped or not finite.
    """
    check_tensors(plan.tensors, weights, where)
    leaves = {}
    for piece in plan.pieces:
        leaf = piece.fuse(*(weights[name] for name in piece.names))
        leaves[piece.path] = np.ascontiguousarray(leaf)
    return unflatten(leaves)


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, np.ndarray],
    where: str,
) -> None:
    """Refuses a set of weights that is not exactly the expected one.

    Raises:
      UserError: a tensor is missing, surplus, misshaped or not finite; it is named.
    """
    for verb, fix, some in (
        ("lacks", "export the drafter again", set(expected) - set(weights)),
        (
            "has unknown",
            "config.json describes no drafter with it",
            set(weights) - set(expected),
        ),
    ):
        if some:
            first = sorted(some)
            more = f" and {len(first) - 3} more" if len(first) > 3 else ""
            raise UserError(
                f"{where} {verb} tensor {', '.join(first[:3])}{more}; {fix}"
            )
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise UserError(
                f"{where}: tensor {name} has shape {tuple(weights[name].shape)} where "
                f"the configuration gives {shape}; weights and config.json are not of "
                "one drafter"
            )
        if not np.isfinite(weights[name]).all():
            raise UserError(
                f"{where}: tensor {name} is not finite; these weights cannot be "
                "served, so copy or export them again"
            )


def untrained(weights: Mapping[str, np.ndarray]) -> list[str]:
    """Names of tensors that hold one number: what an initialiser leaves."""
    return sorted(
        name
        for name, w in weights.items()
        if w.size > 1 and (w.flat[0] == w).all() and name not in (D2T, T2D)
    )


def strip_prefix(names: Iterable[str]) -> dict[str, str]:
    """Plain name -> stored name; a `model.` before every weight is optional.

    The vocabulary map and the head never have the prefix.
    """
    names = list(names)
    bare = [n for n in names if n in (D2T, T2D) or n.startswith("lm_head.")]
    weights = [name for name in names if name not in bare]
    prefix = "model." if all(name.startswith("model.") for name in weights) else ""
    return {n if n in bare else n[len(prefix) :]: n for n in names}
