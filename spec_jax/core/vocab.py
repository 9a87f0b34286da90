"""Draft ids are not target ids: the map between them, and its two file forms.

`target_ids` lists the kept target ids, ascending. Files store *offsets*
(`d2t[i] = target_ids[i] - i`) and a mask (`t2d[v]`, kept or not); the invariant
is `nonzero(t2d) == arange(U) + d2t` (drafter contracts, section 3.2).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from spec_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class DraftVocab:
    """The target ids a drafter can propose, ascending; U of them."""

    target_ids: tuple[int, ...]
    vocab_size: int

    def __post_init__(self):
        ids = np.asarray(self.target_ids)
        if ids.size == 0 or np.any(np.diff(ids) <= 0):
            raise UserError("draft vocabulary: target_ids must be ascending and unique")
        if ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise UserError(
                f"draft vocabulary: id {int(ids[-1])} lies outside the target's "
                f"{self.vocab_size} tokens; rebuild the map for this target"
            )

    @property
    def size(self) -> int:
        return len(self.target_ids)

    def offsets(self) -> np.ndarray:
        """`d2t`, int64 [U]."""
        return np.asarray(self.target_ids, np.int64) - np.arange(self.size)

    def kept(self) -> np.ndarray:
        """`t2d`, bool [V]."""
        mask = np.zeros(self.vocab_size, bool)
        mask[np.asarray(self.target_ids)] = True
        return mask

    def to_draft(self) -> np.ndarray:
        """int32 [V]: draft id of each target id, -1 where it is not kept."""
        table = np.full(self.vocab_size, -1, np.int32)
        table[np.asarray(self.target_ids)] = np.arange(self.size)
        return table


def full_vocab(vocab_size: int) -> DraftVocab:
    """The identity map."""
    return DraftVocab(tuple(range(vocab_size)), vocab_size)


def from_offsets(d2t, t2d) -> DraftVocab:
    """Reads the file form; refuses a d2t that disagrees with its t2d."""
    ids = np.asarray(d2t, np.int64) + np.arange(len(d2t))
    if not np.array_equal(np.nonzero(np.asarray(t2d))[0], ids):
        raise UserError(
            "d2t and t2d disagree: arange(len(d2t)) + d2t must list exactly the ids "
            "where t2d is true; export the drafter again with one map"
        )
    return DraftVocab(tuple(int(i) for i in ids), len(t2d))


def from_counts(counts_V, size: int) -> DraftVocab:
    """The `size` most counted ids (ties: the lower id), sorted ascending.

    Raises:
      UserError: when fewer than `size` ids were ever counted; padding the map
        with unseen ids would hide that.
    """
    counts = np.asarray(counts_V)
    seen = int((counts > 0).sum())
    if size > seen:
        raise UserError(
            f"drafter.draft_vocab={size} is more than the {seen} distinct tokens in "
            "the training data; ask for at most that many, or 0 for the full vocabulary"
        )
    order = np.argsort(-counts, kind="stable")[:size]
    return DraftVocab(tuple(int(i) for i in np.sort(order)), len(counts))
