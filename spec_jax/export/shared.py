"""What writing and reading a drafter folder share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core.features import (
    CAPTURE_POINT,
    TEACHER_POINT,
    Contract,
    require_same,
)
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.export import names
from spec_jax.export.kinds.base import Form
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"

# What a contract says about the target itself.
TARGET_FACTS = (
    "target_fingerprint",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "tokenizer_hash",
    "template_hash",
    "capture_point",
    "teacher_point",
)

# One record per options: its compiled golden round is then kept too.
make_drafter = functools.lru_cache(maxsize=32)(base.load)


def target_facts(target: Target) -> dict[str, Any]:
    """The fields of a contract (`TARGET_FACTS`) that a target determines."""
    template = target.chat_template
    return {
        "target_fingerprint": target.fingerprint,
        "vocab_size": target.spec.vocab_size,
        "hidden_size": target.spec.hidden_size,
        "num_layers": target.spec.num_layers,
        "tokenizer_hash": target.tokenizer.hash,
        "template_hash": "" if template is None else template.hash,
        "capture_point": CAPTURE_POINT,
        "teacher_point": TEACHER_POINT,
    }


@functools.lru_cache(maxsize=32)
def plan_of(drafter: Drafter, form: Form) -> names.Plan:
    """Which tensors a drafter's leaves become; nothing is allocated."""
    shapes = names.flatten(jax.eval_shape(drafter.init, jax.random.key(0)))
    return names.plan(form.pieces(shapes), shapes)


def layout_fields(drafter: Drafter) -> dict[str, Any]:
    """What a contract says about the drafter itself."""
    return {
        "layer_ids": tuple(drafter.needs.layer_ids),
        "mask_id": getattr(drafter.options, "mask_id", -1),
        "num_draft": drafter.layout.num_draft,
        "anchor_predicts": drafter.layout.anchor_predicts,
    }


def check_contract(
    contract: Contract, drafter: Drafter, target_spec: TargetSpec, what: str
) -> None:
    """Refuses a contract that does not describe this drafter and these sizes."""
    expected = dataclasses.replace(
        contract,
        vocab_size=target_spec.vocab_size,
        hidden_size=target_spec.hidden_size,
        num_layers=target_spec.num_layers,
        **layout_fields(drafter),
    )
    require_same(expected, contract, what)


def untrained(weights: Mapping[str, np.ndarray]) -> list[str]:
    """A sentence on tensors that still look as an initialiser made them."""
    found = names.untrained(weights)
    if not found:
        return []
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return [
        f"tensor {', '.join(found[:3])}{more} holds one number throughout, as before "
        "training"
    ]


def to_jax(tree: dict[str, Any]) -> dict[str, Any]:
    # Copies: a host buffer handed over must never be reused.
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), tree)
