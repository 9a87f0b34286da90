"""A target of random weights and few tokens, and drafters for it: no training.

Its layers are weak beside its embedding, so what it says next depends mostly on
the last token: a drafter that knows as much is right often, and a random one is
right now and then. Rounds accept, reject, cut and fill.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core.vocab import DraftVocab
from spec_jax.decode.forward import Weights
from spec_jax.drafters import base
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import laws
from spec_jax.target import model
from spec_jax.target.spec import TargetSpec

# Standard deviations for activations of order one, times sqrt(fan in).
_SCALES = {"embed": 1.0, "qkv": 1.5, "out": 0.6, "gate_up": 1.0, "down": 0.6}


def spec_of(vocab: int, *, max_context: int = 512, eos_ids=()) -> TargetSpec:
    """Two layers of width 16, two query heads on one KV head."""
    return TargetSpec(
        name="random",
        family="llama",
        num_layers=2,
        hidden_size=16,
        mlp_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=vocab,
        max_context=max_context,
        eos_ids=eos_ids,
    )


def params_of(spec: TargetSpec, seed: int, sharp: float = 1.5) -> Any:
    """Random weights; `sharp` is about the logits' standard deviation."""
    rng = np.random.default_rng([seed, 1])
    shapes = jax.eval_shape(lambda: model.init_params(spec, jax.random.key(0)))
    fan_in = {"embed": 1, "down": spec.mlp_size, "out": spec.num_heads * spec.head_dim}
    scales = {**_SCALES, "head": sharp}

    def fill(path, leaf):
        name = path[-1].key
        noise = rng.normal(size=leaf.shape)
        if "norm" in name:
            return jnp.asarray(1 + 0.1 * noise, jnp.float32)
        scale = scales[name] * fan_in.get(name, spec.hidden_size) ** -0.5
        return jnp.asarray(scale * noise, jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def stirred(params: Any, seed: int, scale: float) -> Any:
    """Parameters moved off their initial values, zeros and norms included."""
    rng = np.random.default_rng([seed, 2])

    def move(leaf):
        noise = scale * rng.normal(size=leaf.shape)
        return jnp.asarray(np.asarray(leaf) + noise, jnp.float32)

    return jax.tree.map(move, params)


def weights_of(
    drafter: Drafter,
    params: Any,
    seed: int,
    *,
    scale: float = 0.3,
    draft_vocab: DraftVocab | None = None,
) -> Weights:
    """A drafter of random weights beside the target."""
    draft = jax.jit(drafter.init)(jax.random.key(seed))
    frozen = frozen_from_params(params, draft_vocab)
    return Weights(params, stirred(draft, seed, scale), frozen)


def with_sure_confidence(weights: Weights, logit: float = 3.0) -> Weights:
    """A DSpark drafter whose confidence is a yes or a no, by the token before.

    Even tokens are followed by `logit`, odd ones by `-logit`.
    """
    tree = dict(weights.draft["params"])
    codes_VE = np.asarray(tree["markov"]["markov_w1"])
    wanted_V = np.where(np.arange(len(codes_VE)) % 2 == 0, logit, -logit)
    code_E = np.linalg.lstsq(codes_VE, wanted_V, rcond=None)[0]
    rows = tree["confidence"]["proj"].shape[0] - len(code_E)
    tree["confidence"] = {
        "proj": jnp.asarray(np.concatenate([np.zeros(rows), code_E]), jnp.float32),
        "bias": jnp.zeros((), jnp.float32),
    }
    return weights.replace(draft={"params": tree})


def bigram_dspark(
    spec: TargetSpec, params: Any, num_draft: int, seed: int, noise: float
) -> tuple[Drafter, Weights]:
    """A DSpark drafter that knows the target's bigrams without being trained.

    Its Markov head, of rank V, is the table of what the target says after each
    token alone, blunted by `noise`; its rows are weak beside it. Its confidence
    is the drafts' own max q.
    """
    size_v = spec.vocab_size
    drafter = base.load(
        "dspark",
        {
            "num_layers": 1,
            "num_draft": num_draft,
            "mask_id": size_v - 1,
            "layer_ids": (0,),
            "markov_rank": size_v,
            "enable_confidence_head": False,
        },
        spec,
    )
    weights = weights_of(drafter, params, seed, scale=0.2)
    logits_V1V = laws.plain_logits(spec, params, jnp.arange(size_v)[:, None])
    rng = np.random.default_rng([seed, 3])
    table_VV = np.asarray(logits_V1V)[:, 0] + noise * rng.normal(size=(size_v, size_v))
    tree = dict(weights.draft["params"])
    tree["markov"] = {
        "markov_w1": jnp.eye(size_v, dtype=jnp.float32),
        "markov_w2": jnp.asarray(table_VV, jnp.float32),
    }
    tree = {**tree, "norm": 0.2 * tree["norm"]} if "norm" in tree else tree
    return drafter, weights.replace(draft={"params": tree})
