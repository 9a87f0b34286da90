"""EAGLE: the predicted feature and token, against loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.drafters import base, eagle
from tests.support import drafting, oracles
from tests.support.feedback import SMALL, rollout, wide

KEY = jax.random.key(0)
SIZE_S = 10
LENGTHS = (SIZE_S, 7)


@functools.cache
def build(bias=True, feature_noise=0.0):
    options = {"num_starts": 6, "bias": bias, "feature_noise": feature_noise}
    drafter = base.load("eagle", options, SMALL)
    params = drafting.stir(drafter.init(KEY), scale=0.4)
    batch = drafting.make_batch(drafter, LENGTHS, SIZE_S, spec=SMALL)
    return drafter, params, drafting.make_frozen(spec=SMALL), batch


@functools.cache
def train(bias=True, feature_noise=0.0):
    return drafting.quick_jit(build(bias, feature_noise)[0].train_outputs)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_are_the_formulas(bias):
    _, params, frozen, batch = build(bias)
    out = train(bias)(params, frozen, batch, KEY)
    w, embed = wide(params["params"]), np.asarray(frozen.embed_VD, np.float64)
    assert ("fc_bias" in w) == bias

    def fuse(e, f):
        x = np.concatenate([e, f]) @ w["fc"] + w.get("fc_bias", 0.0)
        return x, x

    seen = 0
    for b in range(2):
        for n in range(6):
            x = 6 * b + n
            anchor, row = int(out.anchors_BN[b, n]), out.hidden_XMD[x, 0]
            if not out.valid_XM[x, 0]:
                continue
            seen += 1
            want = rollout(
                w["layer"],
                fuse,
                embed,
                np.asarray(batch.teacher_BSD[b], np.float64),
                batch.tokens_BS[b],
                anchor - 1,
                1,
                SMALL,
            )[0]
            np.testing.assert_allclose(row, want, atol=1e-4, rtol=1e-4)
            # Row t = anchor - 1 predicts feature t + 1, whose head names t + 2.
            np.testing.assert_array_equal(
                out.feature_target_XMD[x, 0], batch.teacher_BSD[b, anchor]
            )
            assert out.labels_XM[x, 0] == batch.tokens_BS[b, anchor + 1]
    # Anchors and their next are supervised (the prompt has two tokens).
    assert seen == sum(
        min(6, len(oracles.anchor_candidates(batch.supervised_BS[b], LENGTHS[b])))
        for b in range(2)
    )
    np.testing.assert_array_equal(out.feature_XMD, out.hidden_XMD)
    np.testing.assert_array_equal(out.teacher_XMD, out.feature_target_XMD)
    assert out.head_DU is None


def test_text_without_a_prompt_starts_at_its_first_row():
    _, params, frozen, batch = build()
    batch = batch.replace(supervised_BS=np.ones_like(batch.supervised_BS))
    for seed in range(5):
        out = train()(params, frozen, batch, jax.random.key(seed))
        valid_BN = np.asarray(out.valid_XM).reshape(2, -1) > 0
        assert (np.asarray(out.anchors_BN)[valid_BN] >= 1).all()


def test_noise_is_on_the_inputs_and_shrinks_with_the_length():
    length_B = np.array([64, 16], np.int32)
    clean_BSD = np.zeros((2, 64, 8), np.float32)
    noise = np.asarray(eagle.add_noise(KEY, clean_BSD, length_B, 0.2))
    for b, length in enumerate(length_B):
        width = 0.2 * 512 / length
        assert np.abs(noise[b]).max() <= width / 2
        # 512 draws of a uniform law: its deviation is known to 4 %, 4 sigma.
        np.testing.assert_allclose(noise[b].std(), width / 12**0.5, rtol=0.1)
        assert abs(noise[b].mean()) < 0.1 * width
    shorter = eagle.add_noise(KEY, clean_BSD[:, :20], length_B, 0.2)
    np.testing.assert_array_equal(shorter, noise[:, :20])
    _, params, frozen, batch = build()
    noisy = train(True, 0.2)(params, frozen, batch, KEY)
    clean = train()(params, frozen, batch, KEY)
    np.testing.assert_array_equal(noisy.feature_target_XMD, clean.feature_target_XMD)
    assert (noisy.feature_XMD != clean.feature_XMD).any()


def test_it_needs_the_last_hidden_rows_and_no_layer():
    drafter, params, frozen, batch = build()
    assert drafter.needs.layer_ids == () and drafter.needs.teacher
    assert batch.features_BSLD.shape[2] == 0
    state = drafter.init_state(2, 16)
    rows = drafting.rows_of(batch, [0, 0], [5, 3], 6)
    after = jax.eval_shape(drafter.prefill, params, frozen, state, rows)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    with pytest.raises(UserError, match="feature_noise=-1"):
        base.load("eagle", {"feature_noise": -1.0}, SMALL)
