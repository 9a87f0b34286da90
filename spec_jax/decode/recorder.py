"""A recorder keeps what the target computes while it decodes plainly.

It has a drafter's shape, so that prefill and commit tell it every row that the
target has run, and it proposes nothing. Features for training then cost nothing
beyond the forwards that made the text.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.features import FeatureSchema
from spec_jax.drafters.base import Drafter


@dataclasses.dataclass(frozen=True)
class Record:
    """What an engine keeps of each row.

    Attributes:
      schema: layer outputs and their width; the last hidden row is kept too.
      dtype: they are kept, and handed out, in it.
    """

    schema: FeatureSchema
    dtype: str = "float32"


def make_recorder(record: Record) -> Drafter:
    """A drafter that proposes nothing and keeps every row it is told.

    Its state has tokens, and the token told to come after each, `[1, B, A]` (-1
    where none was told), features `[1, B, A, L, D]` and hidden `[1, B, A, D]`.
    """
    schema = record.schema

    def init_state(slots, allocated):
        lead = (1, slots, allocated)
        return {
            "tokens": jnp.full(lead, -1, jnp.int32),
            "next": jnp.full(lead, -1, jnp.int32),
            "features": jnp.zeros(
                (*lead, schema.num_layers, schema.width), record.dtype
            ),
            "hidden": jnp.zeros((*lead, schema.width), record.dtype),
        }

    def absorb(params, frozen, state, rows):
        del params, frozen
        size_b, size_t = rows.tokens_BT.shape
        row_1T = jnp.arange(size_t)[None]
        # Rows that do not count are dropped: a slot that has just ended keeps its own.
        nowhere = state["tokens"].shape[2]
        at_BT = jnp.where(
            row_1T < rows.length_B[:, None], rows.start_B[:, None] + row_1T, nowhere
        )
        slot_B1 = jnp.arange(size_b)[:, None]
        told = {
            "tokens": rows.tokens_BT,
            "next": rows.next_tokens_BT,
            "features": rows.features_BTLD,
            "hidden": rows.hidden_BTD,
        }
        return {
            name: state[name]
            .at[0, slot_B1, at_BT]
            .set(value.astype(state[name].dtype), mode="drop")
            for name, value in told.items()
        }

    return Drafter(
        name="recorder",
        options=None,
        layout=BlockLayout(1),
        needs=schema,
        topologies=(),
        init=lambda key: {},
        init_state=init_state,
        prefill=absorb,
        propose=lambda *args: None,
        extend=absorb,
        train_outputs=lambda *args: None,
        terms=(),
    )


def rows_of(state, slot):
    """One slot's recorded rows, `[A, ...]` each; rows past its length are old."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x[0], slot, 0, keepdims=False), state
    )
