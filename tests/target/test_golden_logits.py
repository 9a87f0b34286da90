"""The forward gives the logits that the public library gave for the same files."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.target import model
from spec_jax.target.cache import init_cache
from spec_jax.target.safetensors_loader import load_safetensors_folder

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def run(spec, params, ids_BT):
    size_b, size_t = ids_BT.shape
    out = model.forward(
        spec,
        params,
        init_cache(spec, size_b, size_t + 4),
        jnp.asarray(ids_BT),
        jnp.broadcast_to(jnp.arange(size_t), ids_BT.shape),
        jnp.tril(jnp.ones((1, size_t, size_t), bool)),
        jnp.zeros((size_b,), jnp.int32),
    )
    return np.asarray(model.logits(params, out.hidden_BTD))


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3"])
def test_logits_agree_with_the_stored_ones(name):
    loaded = load_safetensors_folder(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected_logits.npz")
    params = jax.tree.map(jnp.asarray, loaded.params)
    logits_BTV = run(loaded.spec, params, expected["ids"])
    assert np.abs(expected["logits"]).max() > 1.0
    np.testing.assert_allclose(logits_BTV, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3"])
def test_the_goldens_notice_a_wrong_rotary_base(name):
    """The stored rows are long enough that positions matter."""
    import dataclasses

    loaded = load_safetensors_folder(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected_logits.npz")
    wrong = dataclasses.replace(loaded.spec, rope_theta=loaded.spec.rope_theta * 1.5)
    params = jax.tree.map(jnp.asarray, loaded.params)
    logits_BTV = run(wrong, params, expected["ids"])
    assert np.abs(logits_BTV - expected["logits"]).max() > 1e-2
