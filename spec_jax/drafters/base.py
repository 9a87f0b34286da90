"""A drafter is a record of pure functions (design, section 5).

`DraftState` is opaque to everyone else. `Proposal` is not: the planner sees
only its confidence, the verifier only tokens and q. The target's embedding and
head come in as `Frozen`: gradients flow through them, never into them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct

from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema


@struct.dataclass
class Frozen:
    """What a drafter borrows from the target.

    Attributes:
      embed_VD: token embedding, target ids.
      head_DU: LM head columns the drafter may propose.
      target_ids_U: None for the full vocabulary, else the id of each column.
      full_head_DV: the whole LM head where the vocabulary is reduced: objectives
        may ask for the mass it lost. No drafter reads it.
      num_ids: ids that may be drafted lie below it, where the vocabulary is padded
        beyond the tokenizer (`decode.forward.target_logits`); 0: all. An engine
        sets it; training reads rows, not served logits, and leaves it.
    """

    embed_VD: jnp.ndarray  # [V, D]
    head_DU: jnp.ndarray  # [D, U]
    target_ids_U: jnp.ndarray | None = None  # [U]
    full_head_DV: jnp.ndarray | None = None  # [D, V]
    num_ids: int = struct.field(pytree_node=False, default=0)


@struct.dataclass
class Rows:
    """Rows the target has run, in order, for `prefill` and `extend`.

    Attributes:
      tokens_BT: the rows' input tokens.
      next_tokens_BT: the token after each row (EAGLE's pairing); a chunk's edge
        row carries the next known token.
      features_BTLD: the rows' captured features.
      hidden_BTD: the rows' last hidden state after the target's final norm.
      start_B: absolute position of row 0.
      length_B: rows that count (a prefix); the rest is padding.
    """

    tokens_BT: jnp.ndarray  # [B, T]
    next_tokens_BT: jnp.ndarray  # [B, T]
    features_BTLD: jnp.ndarray  # [B, T, L, D]
    hidden_BTD: jnp.ndarray  # [B, T, D]
    start_B: jnp.ndarray  # [B]
    length_B: jnp.ndarray  # [B]


@struct.dataclass
class Selector:
    """DFlash 2's candidate scores, factored (article 6.3).

    The score of candidate c after the true predecessor is
    `unary(c) + <query, successor_UE[c]>`.

    Attributes:
      query_XME: predecessor code times projected hidden row.
      successor_UE: codes of the draft vocabulary's tokens.
      size_k: K, candidates kept of each row.
      detached_query_XME: the query made from hidden rows without gradient, for
        objectives that train the selector alone, or None.
      drafts: drafts are chosen by these scores; False: it is trained, and drafts
        follow the unary logits.
    """

    query_XME: jnp.ndarray  # [X, M, E]
    successor_UE: jnp.ndarray  # [U, E]
    size_k: int = struct.field(pytree_node=False)
    detached_query_XME: jnp.ndarray | None = None  # [X, M, E]
    drafts: bool = struct.field(pytree_node=False, default=True)


@struct.dataclass
class TrainOutputs:
    """What objectives read; rows X are blocks or starts, M predictions each.

    A row's logits are `hidden @ head + correction @ correction_head`; the second
    term is there for drafters that correct their logits by a low-rank head.

    Attributes:
      hidden_XMD: post-norm draft hidden rows, float32.
      labels_XM: target ids the rows should predict.
      valid_XM: 1.0 where the row is supervised, else 0.0.
      anchors_BN: sampled anchor positions (X = B * N).
      head_DU: the drafter's own trained head; None: the frozen one, without
        gradient.
      correction_XME: low-rank correction of each row, or None.
      correction_EU: its head.
      teacher_XMD: the target's post-norm hidden row that predicts each label
        (position: the label's minus one), or None where no term needs it.
      feature_XMD: predicted features (EAGLE), or None.
      feature_target_XMD: the features they should be.
      confidence_XM: log-odds that the row is accepted, or None.
      selector: DFlash 2's candidate selector, or None.
    """

    hidden_XMD: jnp.ndarray  # [X, M, D]
    labels_XM: jnp.ndarray  # [X, M]
    valid_XM: jnp.ndarray  # [X, M]
    anchors_BN: jnp.ndarray  # [B, N]
    head_DU: jnp.ndarray | None = None  # [D, U]
    correction_XME: jnp.ndarray | None = None  # [X, M, E]
    correction_EU: jnp.ndarray | None = None  # [E, U]
    teacher_XMD: jnp.ndarray | None = None  # [X, M, D]
    feature_XMD: jnp.ndarray | None = None  # [X, M, D]
    feature_target_XMD: jnp.ndarray | None = None  # [X, M, D]
    confidence_XM: jnp.ndarray | None = None  # [X, M]
    selector: Selector | None = None


# draw(logits_BTU, first_row, target_ids=None) -> (draft_ids_BT, TokenLaw): samples
# each row under the request's transform and returns the law it drew from, over the
# logits' own columns; `target_ids` are those of the law: None, each column's [U],
# or each row's candidates' [B, T, K]. Bound by `decode.propose`; `first_row` keeps
# random streams apart when rows are drawn one at a time (autoregressive drafters).
Draw = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """One drafting algorithm, bound to its options and target sizes.

    Attributes:
      name: the module's name; of a module elsewhere its dotted path, `__name__`.
      options: frozen, hashable options.
      layout: block rows.
      needs: features it conditions on.
      topologies: kinds of `core.topology` it can propose.
      terms: its objective, pairs (term of `objectives.records.TERMS`, weight).
      init: key -> params.
      init_state: (slots, allocated) -> state; every array has the slots on axis 1.
      prefill: (params, frozen, state, Rows) -> state; a chunk of a prompt.
      propose: (params, frozen, state, anchor_B, length_B, draw, topology)
        -> (Proposal, state).
      extend: (params, frozen, state, Rows) -> state; absorbs the rows
        a verify ran. Rows past `length_B` may be written but must stay
        invisible: visibility follows the committed length.
      train_outputs: (params, frozen, Batch, key) -> TrainOutputs.
      optional_part: name of a boolean option; False leaves a part of the weights,
        which is trained all the same, out of drafting. "": there is none. Where it is
        True, a training serves both on held-out prompts and exports the better one.
    """

    name: str
    options: Any
    layout: BlockLayout
    needs: FeatureSchema
    topologies: tuple[str, ...]
    init: Callable
    init_state: Callable
    prefill: Callable
    propose: Callable
    extend: Callable
    train_outputs: Callable
    terms: tuple[tuple[str, float], ...] = (("ce", 1.0),)
    optional_part: str = ""


def load(name: str, options: dict | Any, target_spec) -> Drafter:
    """Makes the drafter of `spec_jax.drafters.<name>`, or of a dotted path.

    Args:
      name: a module here ("dflash") or a dotted module path elsewhere.
      options: that module's `Options`, or a dict of its fields.
      target_spec: sizes of the target.

    Raises:
      UserError: no such drafter, or an unknown option.
    """
    path = name if "." in name else f"spec_jax.drafters.{name}"
    try:
        module = importlib.import_module(path)
        options_type, make = module.Options, module.make
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"drafter.name={name!r} is not a drafter: {path} must be importable and "
            "define Options and make(options, target_spec)"
        ) from error
    if isinstance(options, dict):
        known = {f.name for f in dataclasses.fields(options_type)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise UserError(
                f"drafter.options has unknown field {unknown[0]!r} for {name!r}; "
                f"known fields: {', '.join(sorted(known))}"
            )
        options = options_type(**options)
    return make(options, target_spec)
