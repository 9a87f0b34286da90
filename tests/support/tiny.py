"""A tiny random target with two drafters, and engines over them.

The target's layers are weak beside its embedding, so a bigram table guesses its
next token often: rounds accept, cut, correct and fill. `bigram` records the
rows it is told about, so that a test can read what was committed; DFlash keeps
the real kind of draft state.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.core import masks
from spec_jax.core.block_layout import BlockLayout
from spec_jax.core.features import FeatureSchema
from spec_jax.core.proposal import Proposal, join_rows, one_hot_law
from spec_jax.core.topology import (
    CHAIN,
    CHAIN_TOPOLOGY,
    DYNAMIC_TREE,
    STATIC_TREE,
    Topology,
)
from spec_jax.decode.engine import Engine
from spec_jax.decode.forward import Weights
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.target import model
from spec_jax.target.cache import init_cache
from spec_jax.target.spec import TargetSpec
from tests.support import drafting


def spec_of(vocab=23, eos_ids=(), qk_norm=False) -> TargetSpec:
    """Two layers, width 16, two query heads on one KV head."""
    return TargetSpec(
        name="tiny",
        family="qwen3" if qk_norm else "llama",
        num_layers=2,
        hidden_size=16,
        mlp_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=vocab,
        qk_norm=qk_norm,
        max_context=512,
        eos_ids=eos_ids,
    )


def random_params(spec, seed=0, sharp=3.0):
    """Weights of O(1) activations; `sharp` is about the logits' deviation."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: model.init_params(spec, jax.random.key(0)))
    d, f = spec.hidden_size, spec.mlp_size
    scales = {
        "embed": 1.0,
        "head": sharp * d**-0.5,
        "qkv": 1.5 * d**-0.5,
        "out": 0.3 * d**-0.5,
        "gate_up": d**-0.5,
        "down": 0.4 * f**-0.5,
    }

    def fill(path, leaf):
        name = path[-1].key
        noise = rng.normal(size=leaf.shape)
        value = 1 + 0.1 * noise if "norm" in name else scales[name] * noise
        return jnp.asarray(value, jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


@functools.partial(jax.jit, static_argnums=(0, 3))
def full_forward(spec, params, tokens_BS, taps=()):
    """Everything in one causal forward from nothing: logits and the output."""
    size_b, size_s = tokens_BS.shape
    row_S = jnp.arange(size_s)
    output = model.forward(
        spec,
        params,
        init_cache(spec, size_b, size_s),
        tokens_BS,
        jnp.broadcast_to(row_S[None], tokens_BS.shape),
        masks.causal(row_S[:, None], row_S[None])[None],
        jnp.zeros((size_b,), jnp.int32),
        taps,
    )
    return model.logits(params, output.hidden_BTD), output


def padded(sequences, size, fill=0):
    """Lists of ids as one `[B, size]` array."""
    out = np.full((len(sequences), size), fill, np.int32)
    for row, sequence in zip(out, sequences, strict=True):
        row[: len(sequence)] = sequence
    return jnp.asarray(out)


def bigram(spec, num_draft):
    """Drafts from a `[V, V]` table, one row after the other; records its rows.

    Args:
      spec: the target's sizes.
      num_draft: M.
    """

    def init_state(slots, allocated):
        def empty(dtype=jnp.int32):
            return jnp.full((1, slots, allocated), -1, dtype)

        return {
            "tokens": empty(),
            "next": empty(),
            "feature": empty(jnp.float32),
            "hidden": empty(jnp.float32),
        }

    def absorb(params, frozen, state, rows):
        del params, frozen
        size_b, size_t = rows.tokens_BT.shape
        b_BT = jnp.broadcast_to(jnp.arange(size_b)[:, None], (size_b, size_t))
        at_BT = rows.start_B[:, None] + jnp.arange(size_t)[None]
        told = {
            "tokens": rows.tokens_BT,
            "next": rows.next_tokens_BT,
            "feature": rows.features_BTLD[:, :, 0, 0],
            "hidden": rows.hidden_BTD[:, :, 0],
        }
        return {
            name: state[name].at[0, b_BT, at_BT].set(value, mode="drop")
            for name, value in told.items()
        }

    def propose(params, frozen, state, anchor_B, length_B, draw, topology):
        del frozen, length_B, topology
        token_B, ids, laws, good = anchor_B, [], [], []
        for row in range(num_draft):
            logits_BV = jnp.take(params, token_B, axis=0)
            id_B1, law = draw(logits_BV[:, None], row)
            token_B = id_B1[:, 0]
            ids.append(id_B1)
            laws.append(law)
            good.append(jnp.isfinite(logits_BV.max(-1)).astype(jnp.int32))
        ids_BM = jnp.concatenate(ids, 1)
        usable_B = jnp.cumprod(jnp.stack(good, 1), 1).sum(1)
        return Proposal(ids_BM, ids_BM, join_rows(laws), usable_B), state

    return base.Drafter(
        name="bigram",
        options=None,
        layout=BlockLayout(num_draft, anchor_predicts=True),
        needs=FeatureSchema((0,), spec.hidden_size),
        topologies=("chain",),
        init=lambda key: jnp.zeros((spec.vocab_size, spec.vocab_size)),
        init_state=init_state,
        prefill=absorb,
        propose=propose,
        extend=absorb,
        train_outputs=lambda *args: None,
    )


def shapes_of(topology: Topology):
    """Parents of the draft rows: a static tree, or two that rounds choose from.

    The two are a binary heap, and a spine of `depth` nodes whose first nodes have
    a second child each.
    """
    if topology.kind == STATIC_TREE:
        return (topology.parents,)
    rest = topology.nodes - topology.depth
    heap = tuple(i // 2 for i in range(topology.nodes))
    return heap, (*range(topology.depth), *range(rest))


def ranks_of(parents):
    """Each node's rank among its siblings."""
    return tuple(parents[:i].count(parent) for i, parent in enumerate(parents))


def bigram_tree(spec, num_draft, *, twins=False):
    """`bigram` that also proposes trees of the table's likeliest tokens.

    A dynamic tree has the first of `shapes_of` after an even anchor, else the
    second.

    Args:
      spec: the target's sizes.
      num_draft: M of its chains.
      twins: later siblings name the first one's token: none is ever accepted,
        and a tree decodes what its spine does.
    """
    chain = bigram(spec, num_draft)

    def propose(params, frozen, state, anchor_B, length_B, draw, topology):
        if topology.kind == CHAIN:
            return chain.propose(
                params, frozen, state, anchor_B, length_B, draw, topology
            )
        shapes = shapes_of(topology)
        which_B = anchor_B % len(shapes)
        parents_BM = jnp.asarray(shapes)[which_B]
        rank_BM = jnp.asarray([ranks_of(s) for s in shapes])[which_B]
        rank_BM = rank_BM * (not twins)
        order_VV = jnp.argsort(-params, axis=-1)
        finite_V = jnp.isfinite(params.max(-1))
        rows_BW, good = anchor_B[:, None], []
        for i in range(parents_BM.shape[1]):
            token_B1 = jnp.take_along_axis(rows_BW, parents_BM[:, i : i + 1], 1)
            token_B = token_B1[:, 0]
            new_B = order_VV[token_B, rank_BM[:, i]].astype(jnp.int32)
            good.append(finite_V[token_B].astype(jnp.int32))
            rows_BW = jnp.concatenate([rows_BW, new_B[:, None]], 1)
        tokens_BM = rows_BW[:, 1:]
        root_B1 = jnp.full_like(anchor_B[:, None], -1)
        proposal = Proposal(
            tokens_BM,
            jnp.zeros_like(tokens_BM),
            one_hot_law(tokens_BM),
            jnp.cumprod(jnp.stack(good, 1), 1).sum(1),
            parents_BW=jnp.concatenate([root_B1, parents_BM], 1),
        )
        return proposal, state

    return dataclasses.replace(
        chain,
        name="twins" if twins else "bigram_tree",
        topologies=(CHAIN, STATIC_TREE, DYNAMIC_TREE),
        propose=propose,
    )


def dflash(spec, num_draft):
    """A one-layer DFlash drafter."""
    options = {
        "num_layers": 1,
        "num_draft": num_draft,
        "mask_id": spec.vocab_size - 1,
        "layer_ids": (0,),
    }
    return base.load("dflash", options, spec)


@dataclasses.dataclass(frozen=True)
class World:
    """A target, a drafter (or None) and their weights."""

    spec: TargetSpec
    drafter: base.Drafter | None
    weights: Weights
    mask_id: int

    @property
    def params(self) -> Any:
        return self.weights.target


@functools.cache
def world(
    kind=None,
    num_draft=3,
    *,
    vocab=23,
    eos_ids=(),
    seed=0,
    sharp=3.0,
    noise=0.5,
    apart=False,
) -> World:
    """kind: None, "bigram", "bigram_tree", "twins" or "dflash".

    `noise` blunts the bigram's table.
    """
    spec = spec_of(vocab, eos_ids)
    params = random_params(spec, seed, sharp)
    frozen = frozen_from_params(params)
    drafter, draft, mask_id = None, None, -1
    if kind in ("bigram", "bigram_tree", "twins"):
        drafter = bigram(spec, num_draft)
        if kind != "bigram":
            drafter = bigram_tree(spec, num_draft, twins=kind == "twins")
        logits, _ = full_forward(spec, params, jnp.arange(vocab)[:, None])
        rng = np.random.default_rng(seed + 1)
        draft = logits[:, 0] + noise * jnp.asarray(
            rng.normal(size=(vocab, vocab)), jnp.float32
        )
    elif kind == "dflash":
        drafter = dflash(spec, num_draft)
        draft = drafting.stir(drafter.init(jax.random.key(seed)), scale=0.3)
        mask_id = vocab - 1
    if apart:
        params = model.unstack_layers(params)
    weights = Weights(params, draft, frozen if drafter is not None else None)
    return World(spec, drafter, weights, mask_id)


def new_engine(
    world: World,
    *,
    slots=2,
    buckets=(16,),
    max_context=128,
    one_hot=False,
    topology=CHAIN_TOPOLOGY,
    plain=True,
    penalties=False,
    logprobs=None,
) -> Engine:
    """An engine of its own (compiles)."""
    return Engine(
        world.spec,
        world.weights,
        EngineOptions(
            slots=slots,
            max_context=max_context,
            prefill_buckets=buckets,
            plain=plain,
            round=RoundOptions(one_hot_draft=one_hot, topology=topology),
            penalties=penalties,
            logprobs=logprobs,
        ),
        world.drafter,
        world.mask_id,
    )


@functools.cache
def engine(
    kind=None,
    num_draft=3,
    *,
    slots=2,
    buckets=(16,),
    one_hot=False,
    topology=CHAIN_TOPOLOGY,
    plain=True,
    penalties=False,
    logprobs=None,
    **changes,
):
    """A shared engine; every test leaves it idle."""
    return new_engine(
        world(kind, num_draft, **changes),
        slots=slots,
        buckets=buckets,
        one_hot=one_hot,
        topology=topology,
        plain=plain,
        penalties=penalties,
        logprobs=logprobs,
    )


def prompts_of(count, vocab, seed=0, low=1, high=40):
    """Random prompts without the last id (DFlash's mask)."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, vocab - 1, rng.integers(low, high + 1)).tolist()
        for _ in range(count)
    ]


def greedy_faults(world: World, generations, size=128, gap=1e-4):
    """Emitted tokens that are not the argmax of a forward from nothing.

    Returns:
      [(request, index)] of wrong tokens whose plain top-two gap exceeds `gap`.
    """
    faults = []
    for first in range(0, len(generations), 16):
        group = generations[first : first + 16]
        texts = [list(g.prompt) + g.tokens for g in group]
        texts += [[0]] * (16 - len(texts))
        logits, _ = full_forward(world.spec, world.params, padded(texts, size))
        logits = np.asarray(logits)
        for row, g in enumerate(group):
            for index, token in enumerate(g.tokens):
                line = logits[row, len(g.prompt) + index - 1]
                if line.max() - line[token] > gap:
                    faults.append((first + row, index))
    return faults
