"""What a drafter borrows from the target: embedding, head columns, ids."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.core.errors import UserError
from spec_jax.core.vocab import DraftVocab
from spec_jax.drafters.base import Frozen
from spec_jax.target.loading import Target


def in_columns(logits, ids, frozen: Frozen) -> np.ndarray:
    """Candidates' logits in the head columns they are of; -inf elsewhere.

    Args:
      logits: `[..., C]`, of C candidates.
      ids: `[..., C]`, their target ids.
      frozen: the borrowed head, U columns.

    Returns:
      `[..., U]` float32.
    """
    columns = ids
    if frozen.target_ids_U is not None:  # kept ids ascend
        columns = np.searchsorted(np.asarray(frozen.target_ids_U), ids)
    shape = (*logits.shape[:-1], frozen.head_DU.shape[1])
    full = np.full(shape, -np.inf, np.float32)
    np.put_along_axis(full, columns, logits, -1)
    return full


def frozen_for(target: Target, draft_vocab: DraftVocab | None = None) -> Frozen:
    """The target's embedding and the head columns a drafter may propose.

    Args:
      target: the loaded target; its arrays are shared, not copied, except the kept
        head columns of a reduced vocabulary.
      draft_vocab: the kept ids, or None for the full vocabulary.

    Raises:
      UserError: the map was made for another vocabulary.
    """
    return frozen_from_params(target.params, draft_vocab)


def frozen_from_params(
    params: dict[str, Any], draft_vocab: DraftVocab | None = None
) -> Frozen:
    """As `frozen_for`, from a target's parameter tree (see `TargetSpec`).

    Raises:
      UserError: the map was made for another vocabulary.
    """
    embed_VD, head_DV = params["params"]["embed"], params["params"]["head"]
    if draft_vocab is None:
        return Frozen(embed_VD, head_DV)
    if draft_vocab.vocab_size != head_DV.shape[1]:
        raise UserError(
            f"draft vocabulary was made for {draft_vocab.vocab_size} target tokens but "
            f"this target has {head_DV.shape[1]}; rebuild the map for this target"
        )
    if draft_vocab.size == draft_vocab.vocab_size:
        return Frozen(embed_VD, head_DV)
    ids_U = jnp.asarray(np.asarray(draft_vocab.target_ids, np.int32))
    return Frozen(embed_VD, jnp.take(head_DV, ids_U, axis=1), ids_U, head_DV)
