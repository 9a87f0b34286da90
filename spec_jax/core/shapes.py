"""Axis letters, checked where they are written.

Local names in numeric code end in their axes (`logits_BMV`, `accept_BM`).
`bind` reads those letters and refuses arrays that disagree, at trace time.

    B requests  S sequence  N anchors per sequence  M drafts  Q draft query rows
    W verify window  T rows of a bucket  V / U target / draft vocabulary
    D / F model / MLP width  H G C query heads, KV heads, head channels
    L captured layers  K candidates  J TTT depth  A allocated cache  E low rank
"""

from __future__ import annotations


def bind(**arrays) -> dict[str, int]:
    """Returns the size of every letter; raises ValueError where two disagree.

    Args:
      **arrays: arrays named `<anything>_<letters>`, one letter per axis.

    Raises:
      ValueError: naming the array, its shape and the letter that disagrees.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, array in arrays.items():
        letters = name.rsplit("_", 1)[-1]
        shape = tuple(array.shape)
        if len(letters) != len(shape):
            raise ValueError(
                f"{name} has shape {shape}: {len(shape)} axes for letters {letters!r}"
            )
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{name} has shape {shape}: axis {letter} is {size}, "
                    f"but {owner[letter]} has {letter} = {sizes[letter]}"
                )
            owner.setdefault(letter, name)
    return sizes
