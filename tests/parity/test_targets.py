"""Targets written by `transformers`, read and run by ours."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.target import model
from spec_jax.target.cache import init_cache
from spec_jax.target.loading import load_target

pytestmark = pytest.mark.parity

CASES = {
    "llama, untied, one file": ("llama", {}, {}),
    "llama, tied, shards": (
        "llama",
        {"tie_word_embeddings": True},
        {"max_shard_size": "150KB"},
    ),
    "qwen3, untied, shards": ("qwen3", {}, {"max_shard_size": "150KB"}),
    "qwen3, tied, one file": ("qwen3", {"tie_word_embeddings": True}, {}),
}
TAPS = (1, 3)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_features(case, public, kit, text, tmp_path):
    """Logits to 1e-4, features to 2e-4 of their row's RMS; over a cache too."""
    family, changes, saved = CASES[case]
    theirs = kit.make_target(family, 3, **changes)
    folder = kit.save_target(theirs, tmp_path / "target", **saved)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(saved)
    with public.torch.no_grad():
        out = theirs(
            public.torch.tensor(text[None].astype(np.int64)), output_hidden_states=True
        )
    target = load_target(str(folder), cache_dir=str(tmp_path / "cache"))
    size, split = len(text), 23
    cache = init_cache(target.spec, 1, size)
    logits, features = [], []
    for start, stop in ((0, split), (split, size)):
        rows = stop - start
        ours = model.forward(
            target.spec,
            target.params,
            cache,
            jnp.asarray(text[None, start:stop]),
            jnp.arange(start, stop)[None],
            jnp.tril(jnp.ones((1, rows, rows), bool)),
            jnp.full((1,), start, jnp.int32),
            TAPS,
        )
        cache = ours.cache
        logits.append(model.logits(target.params, ours.hidden_BTD)[0])
        features.append(ours.features_BTLD[0])
    np.testing.assert_allclose(
        np.concatenate(logits), out.logits[0].numpy(), rtol=0, atol=1e-4
    )
    features_SLD = np.concatenate(features)
    for plane, layer_id in enumerate(TAPS):
        expected_SD = out.hidden_states[layer_id + 1][0].numpy()
        rms_S1 = np.sqrt((expected_SD**2).mean(-1, keepdims=True))
        difference = np.abs(features_SLD[:, plane] - expected_SD) / rms_S1
        assert difference.max() <= 2e-4
