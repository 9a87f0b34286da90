"""The tiny target: what it learns from, that it learns, and how it is kept."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import tiny_target
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import samples, tiny_corpus
from spec_jax.target import chat, model
from spec_jax.target.cache import init_cache

# Small enough for a test; 25 steps get below the token frequencies.
SMALL = schema.TinyTarget(
    num_layers=2,
    hidden_size=32,
    mlp_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    train_steps=25,
    batch=8,
    lr=1e-2,
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("targets"))
    return folder, tiny_target.make_tiny_target(SMALL, 3, folder)


def leaves_of(target):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(target.params)]


def test_corpus_is_one_sequence_that_decodes_to_itself():
    tokenizer, template = tiny_corpus.make_tokenizer(), tiny_corpus.make_template()
    assert 100 <= tokenizer.vocab_size <= 200
    mask, unknown = (
        tokenizer.id_of(t) for t in (tiny_corpus.MASK, tiny_corpus.UNKNOWN)
    )
    spelled = {tokenizer.id_of(chr(c)) for c in range(ord("a"), ord("z") + 1)}
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(300):
        messages = tiny_corpus.make_conversation(rng)
        ids, supervised = chat.encode_with_mask(tokenizer, template, messages)
        text = template.render(messages, add_generation_prompt=False)
        assert tokenizer.decode(ids) + "\n" == text
        # A word missing from the vocabulary would be spelled in letters.
        outside = {mask, unknown, *spelled} - {tokenizer.id_of("a")}
        assert not outside & set(ids), text
        assert len(ids) + 2 <= SMALL.seq_len, text
        answers.append(ids[supervised.index(1) :])
        assert not samples.is_looping(answers[-1])
    assert np.mean([len(answer) for answer in answers]) > 24
    assert len(set(map(tuple, answers))) > 250


def test_any_ascii_text_survives_and_other_text_becomes_unknown():
    tokenizer = tiny_corpus.make_tokenizer()
    text = "Why does 17 + 4 = 21?\nfoxes {run} ~ `fast`"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.id_of(tiny_corpus.UNKNOWN) in tokenizer.encode("é")


def test_rows_are_padded_behind_the_text():
    tokenizer, template = tiny_corpus.make_tokenizer(), tiny_corpus.make_template()
    ids, real = tiny_corpus.make_rows(
        tokenizer, template, np.random.default_rng(1), 4, 64
    )
    end = tokenizer.id_of(tiny_corpus.END_OF_TEXT)
    for row, shown in zip(ids, real, strict=True):
        count = int(shown.sum())
        assert shown[:count].all() and row[count - 1] == end
        assert (row[count:] == end).all() and end not in row[: count - 1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_training_logits_are_the_served_ones(family):
    spec = tiny_target.make_spec(dataclasses.replace(SMALL, family=family))
    params = model.init_params(spec, jax.random.key(0))
    # Larger than the initial weights, so that every part of a layer counts.
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 11), 0, spec.vocab_size)
    served = model.forward(
        spec,
        params,
        init_cache(spec, 2, 16),
        tokens_BT,
        jnp.broadcast_to(jnp.arange(11), (2, 11)),
        jnp.tril(jnp.ones((1, 11, 11), bool)),
        jnp.zeros(2, jnp.int32),
    )
    want = model.logits(params, served.hidden_BTD)
    got = tiny_target.training_logits(spec, params, tokens_BT)
    assert float(jnp.abs(want).max()) > 1
    np.testing.assert_allclose(got, want, atol=2e-4, rtol=1e-4)


def test_same_seed_same_target_and_read_back_bit_for_bit(kept, monkeypatch):
    folder, first = kept
    again = tiny_target.make_tiny_target(SMALL, 3, None)
    assert again.fingerprint == first.fingerprint
    monkeypatch.setattr(tiny_target, "_train", None)  # may not be called
    read = tiny_target.make_tiny_target(SMALL, 3, folder)
    assert read.spec == first.spec == tiny_target.make_spec(SMALL)
    assert read.fingerprint == first.fingerprint
    assert read.tokenizer.hash == first.tokenizer.hash
    assert read.chat_template == tiny_corpus.make_template()
    for a, b, c in zip(*map(leaves_of, (first, read, again)), strict=True):
        assert (a == b).all() and (a == c).all()


def test_torn_copy_is_made_again(kept):
    folder, first = kept
    (name,) = [n for n in os.listdir(folder) if n.startswith("tiny-")]
    path = os.path.join(folder, name, "model.safetensors")
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\x80\x3f")
    made = tiny_target.make_tiny_target(SMALL, 3, folder)
    assert made.fingerprint == first.fingerprint
    assert os.listdir(folder) == [name]


def test_untrained_target_depends_on_the_seed_and_has_its_ids():
    options = dataclasses.replace(SMALL, train_steps=0)
    one, two = (tiny_target.make_tiny_target(options, seed, None) for seed in (0, 1))
    assert one.fingerprint != two.fingerprint
    assert one.tokenizer.eos in one.spec.eos_ids
    assert one.tokenizer.id_of(tiny_target.MASK) < one.spec.vocab_size
    assert chat.end_of_turn(one.tokenizer, one.chat_template) == one.tokenizer.eos


@pytest.mark.parametrize("last", [1.1, float("nan")])
def test_target_that_did_not_learn_is_refused(last):
    counts_V = np.array([1, 1, 0])  # ln 2 = 0.69 nats
    tiny_target.check_learned([2.0] + [0.5] * 20, counts_V)
    with pytest.raises(UserError, match="train_steps=21"):
        tiny_target.check_learned([2.0] + [last] * 20, counts_V)


def test_training_that_diverges_keeps_nothing(tmp_path):
    options = dataclasses.replace(SMALL, train_steps=1)
    with pytest.raises(UserError, match=r"target\.tiny did not learn"):
        tiny_target.make_tiny_target(options, 0, str(tmp_path))
    assert os.listdir(tmp_path) == []
