"""Features that an engine hands out while it decodes are those of a forward."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.core.features import FeatureSchema
from spec_jax.core.masks import causal
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.recorder import Record
from spec_jax.decode.request import Settings
from spec_jax.target.cache import init_cache
from spec_jax.target.model import forward
from tests.support import asking, tiny

WANTED = Settings(max_new_tokens=12, features=True)
SAMPLED = dataclasses.replace(WANTED, temperature=1.1, seed=3)


def recording_engine(dtype="float32", slots=3):
    w = tiny.world("bigram", 3)
    schema = FeatureSchema(tuple(range(w.spec.num_layers - 1)), w.spec.hidden_size)
    options = EngineOptions(
        slots=slots,
        max_context=128,
        prefill_buckets=(7, 64),
        record=Record(schema, dtype),
    )
    return Engine(w.spec, w.weights, options, tokenizer=asking.tokenizer())


def forward_rows(tokens):
    """[T, L, D] layer outputs and [T, D] last hidden rows, by one forward."""
    w = tiny.world("bigram", 3)
    row_T = jnp.arange(len(tokens))
    out = forward(
        w.spec,
        w.params,
        init_cache(w.spec, 1, 1),
        jnp.asarray([tokens], jnp.int32),
        row_T[None],
        causal(row_T[:, None], row_T[None])[None],
        jnp.zeros((1,), jnp.int32),
        tuple(range(w.spec.num_layers - 1)),
    )
    return np.asarray(out.features_BTLD[0]), np.asarray(out.hidden_BTD[0])


def check(generation, atol=2e-5):
    features, hidden = forward_rows((generation.prompt + generation.tokens)[:-1])
    np.testing.assert_allclose(generation.features, features, rtol=0, atol=atol)
    np.testing.assert_allclose(generation.hidden, hidden, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def engine():
    return recording_engine()


def test_rows_are_those_of_a_forward(engine):
    """Prompts of one and of several chunks, slots used again, both laws."""
    prompts = tiny.prompts_of(9, 23, seed=70, low=2, high=40)
    each = [SAMPLED if i % 2 else WANTED for i in range(len(prompts))]
    each[0] = dataclasses.replace(WANTED, max_new_tokens=1)
    made = engine.generate(prompts, each)
    for generation in made:
        check(generation)
    assert {g.finish_reason for g in made} >= {"length"}
    plain = asking.new_engine(penalties=False, logprobs=None)
    without = [dataclasses.replace(s, features=False, speculate=False) for s in each]
    again = plain.generate(prompts, without)
    assert [g.tokens for g in made] == [g.tokens for g in again]
    assert all(g.features is None and g.hidden is None for g in again)


def test_a_request_that_came_back_has_all_rows(engine):
    prompts = tiny.prompts_of(3, 23, seed=71, low=9, high=30)
    settings = dataclasses.replace(WANTED, max_new_tokens=24, ignore_eos=True)
    for generation in asking.interrupted(engine, prompts, [settings] * 3):
        check(generation)


def test_an_abort_hands_out_nothing_and_neighbours_keep_theirs(engine):
    prompts = tiny.prompts_of(3, 23, seed=72, low=9, high=30)
    settings = dataclasses.replace(WANTED, max_new_tokens=30, ignore_eos=True)
    handles = [engine.submit(p, settings) for p in prompts]
    done = {}
    asking.until(engine, done, lambda: asking.tokens_so_far(engine, handles[1]) >= 5)
    engine.abort(handles[1])
    done.update(engine.run())
    assert done[handles[1]].features is None
    check(done[handles[0]])
    check(done[handles[2]])
    assert asking.is_idle(engine)


def test_kept_in_the_dtype_asked_for():
    made = recording_engine("float16", slots=1).generate([[1, 2, 3]], WANTED)[0]
    assert made.features.dtype == made.hidden.dtype == np.float16
    check(made, atol=5e-3)


def test_what_does_not_record_refuses():
    with pytest.raises(UserError, match="^features=True needs an engine that records"):
        asking.engine().submit([1, 2], WANTED)
    w = tiny.world("bigram", 3)
    schema = FeatureSchema((0,), w.spec.hidden_size)
    options = EngineOptions(max_context=128, record=Record(schema))
    with pytest.raises(UserError, match=r"^EngineOptions\.record.* for plain decoding"):
        Engine(w.spec, w.weights, options, w.drafter, w.mask_id)
