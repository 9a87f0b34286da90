"""The real target: perplexity, generation, and what would break them silently."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.target import chat, checkpoint, model
from spec_jax.target.cache import init_cache

PASSAGE = (
    "The lighthouse keeper's daughter had counted ships since she was four. On calm "
    "evenings she sat on the iron stair, wrapped in her mother's coat, and wrote the "
    "name of every vessel in a school notebook. Most of them carried coal or timber, "
    "a few carried people, and one, which came each spring, carried nothing but bees. "
    "The captain of that ship said that the hives belonged to a monastery on the "
    "northern coast, where the monks made candles for the whole country. She never "
    "learned whether this was true. Years later, when she had become a teacher in the "
    "city, she still opened her window in April and listened for a sound like distant "
    "rain. Her pupils thought that she was praying. In a way, she told them, she was: "
    "to remember something exactly is also a kind of prayer, and it costs nothing."
)

# Of 168 tokens. The public torch implementation, given the same float32 weights
# under their Hugging Face names, has 40.7517.
PASSAGE_PERPLEXITY = 40.752


@functools.partial(jax.jit, static_argnums=0)
def mean_nll(spec, params, ids_T):
    size_t = ids_T.shape[0]
    out = model.forward(
        spec,
        params,
        init_cache(spec, 1, size_t),
        ids_T[None],
        jnp.arange(size_t)[None],
        jnp.tril(jnp.ones((1, size_t, size_t), bool)),
        jnp.zeros((1,), jnp.int32),
    )
    logp_TV = jax.nn.log_softmax(model.logits(params, out.hidden_BTD[0, :-1]))
    return -jnp.mean(jnp.take_along_axis(logp_TV, ids_T[1:, None], axis=1))


def perplexity(target, params=None):
    ids_T = jnp.asarray(target.tokenizer.encode(PASSAGE))
    params = target.params if params is None else params
    return float(jnp.exp(mean_nll(target.spec, params, ids_T)))


def interleave(x_xC):
    """Rotary halves -> interleaved pairs: the rows as the GGUF file has them."""
    *rest, c = x_xC.shape
    return x_xC.reshape(*rest, 2, c // 2).swapaxes(-1, -2).reshape(x_xC.shape)


def deinterleave(x_xC):
    """Interleaved pairs -> rotary halves. Interleaved rotation of some rows is
    rotation by halves of their `deinterleave`."""
    *rest, c = x_xC.shape
    return x_xC.reshape(*rest, c // 2, 2).swapaxes(-1, -2).reshape(x_xC.shape)


def with_heads(params, reorder, first, last):
    """`params` with the channels of rows first..last of each KV group reordered."""
    layers = params["params"]["layers"]
    rows = reorder(layers["qkv"][:, :, :, first:last])
    qkv = layers["qkv"].at[:, :, :, first:last].set(rows)
    return {"params": params["params"] | {"layers": layers | {"qkv": qkv}}}


def test_sizes(smollm2):
    spec = smollm2.spec
    assert (spec.num_layers, spec.hidden_size, spec.mlp_size) == (30, 576, 1536)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab_size, spec.max_context) == (49152, 8192)
    assert (spec.rope_theta, spec.norm_eps) == (100000.0, 1e-5)
    assert spec.tied and not spec.qk_norm and spec.family == "llama"
    assert spec.eos_ids == (2, 0)
    assert smollm2.fingerprint == (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )


def test_parameters_are_complete_and_tied(smollm2):
    leaves = checkpoint.flatten(smollm2.params)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    assert shapes == checkpoint.tree_shapes(smollm2.spec)
    assert all(leaf.dtype == jnp.float32 for leaf in leaves.values())
    count = sum(leaf.size for leaf in leaves.values()) - leaves["head"].size
    assert count == 134_515_008
    assert bool(jnp.all(leaves["head"] == leaves["embed"].T))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves.values())


def test_perplexity(smollm2):
    assert perplexity(smollm2) == pytest.approx(PASSAGE_PERPLEXITY, rel=1e-4)


@pytest.mark.parametrize(
    "reorder, first, last",
    [
        pytest.param(interleave, 0, 4, id="raw rows, rotated by halves"),
        pytest.param(deinterleave, 0, 4, id="un-permuted rows, rotated in pairs"),
        pytest.param(interleave, 0, 3, id="queries left raw"),
        pytest.param(interleave, 3, 4, id="keys left raw"),
    ],
)
def test_wrong_pairings_of_rows_and_rotation_are_seen(smollm2, reorder, first, last):
    """Each gives plausible text; only the number tells."""
    wrong = perplexity(smollm2, with_heads(smollm2.params, reorder, first, last))
    assert wrong > 2 * PASSAGE_PERPLEXITY


def test_raw_rows_rotated_in_pairs_is_the_same_model(smollm2):
    """The reordering used above is the one of the file: undone, nothing changed."""
    raw = with_heads(smollm2.params, interleave, 0, 4)
    again = with_heads(raw, deinterleave, 0, 4)
    before, after = (
        np.asarray(p["params"]["layers"]["qkv"]) for p in (smollm2.params, again)
    )
    np.testing.assert_array_equal(before, after)


def test_greedy_answer(smollm2):
    """Prefill, then one token at a time from the cache."""
    spec, params = smollm2.spec, smollm2.params
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = chat.encode_chat(smollm2.tokenizer, smollm2.chat_template, messages)

    @jax.jit
    def step(params, cache, tokens_BT, history_B):
        size_t = tokens_BT.shape[1]
        out = model.forward(
            spec,
            params,
            cache,
            tokens_BT,
            history_B[:, None] + jnp.arange(size_t),
            jnp.tril(jnp.ones((1, size_t, size_t), bool)),
            history_B,
        )
        return out.cache, jnp.argmax(model.logits(params, out.hidden_BTD[:, -1]), -1)

    cache = init_cache(spec, 1, 64)
    tokens = prompt
    answer = []
    history = 0
    while len(answer) < 12 and (not answer or answer[-1] not in spec.eos_ids):
        cache, next_B = step(
            params, cache, jnp.asarray([tokens]), jnp.asarray([history])
        )
        history += len(tokens)
        tokens = [int(next_B[0])]
        answer += tokens
    assert answer == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert smollm2.tokenizer.decode(answer) == (
        "The capital of France is Paris.<|im_end|>"
    )
