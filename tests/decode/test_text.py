"""Text of a growing answer: whole characters, cut where a stop string ends."""

import dataclasses
import itertools
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from spec_jax.core.errors import UserError
from spec_jax.decode.request import Settings
from spec_jax.decode.text import TextStream, first_stop
from spec_jax.target import tokenizer as tok
from tests.support import asking, tiny

STOPS = [("ab",), ("abc", "b"), ("a b", "cab"), ("é",), ("\U0001f600b", "q", "xyzx")]


def one_by_one(text, stops):
    """Where a text ends, found one character at a time."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE with merges that cut characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["naïve café — 東京 \U0001f600\U0001f680 the cat sat"] * 40
    backend.train_from_iterator(corpus, trainer)
    return tok.from_json(backend.to_str())


def random_texts(count):
    rng = random.Random(0)
    alphabet = "ab c é—東京\U0001f600\U0001f680🏽\n"
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 30))) for _ in range(count)]


def test_pieces_add_up_to_the_decoded_text(trained):
    """Encoded texts, and ids at random, which are mostly no UTF-8."""
    rng = random.Random(1)
    cases = [trained.encode(text) for text in random_texts(100)]
    cases += [[rng.randrange(330) for _ in range(20)] for _ in range(100)]
    held = 0
    for ids in cases:
        stream = TextStream(trained)
        pieces = [stream.push(i) for i in ids]
        held += sum(not p for p in pieces)
        assert "".join([*pieces, stream.finish()]) == stream.text
        assert stream.text == trained.decode(ids, skip_special=True)
    assert held > 100  # characters really were cut


def test_no_piece_holds_half_a_character(trained):
    for text in random_texts(60):
        stream = TextStream(trained)
        for token_id in trained.encode(text):
            assert "\ufffd" not in stream.push(token_id)
            assert text.startswith(stream.text)


@pytest.mark.parametrize("stops", STOPS)
def test_stop_does_not_depend_on_the_cut_into_tokens(stops):
    """Against one character at a time; what is out never has to come back."""
    tokenizer = asking.tokenizer()
    rng = random.Random(2)
    matched = 0
    for _ in range(200):
        ids = [rng.choice([0, 1, 6, 7, 7, 8, 14, 14, 16, 17, 20]) for _ in range(12)]
        whole, stop = one_by_one(tokenizer.decode(ids, skip_special=True), stops)
        stream = TextStream(tokenizer, stops)
        used = 0
        for token_id in ids:
            stream.push(token_id)
            used += 1
            assert whole.startswith(stream.text)
            if stream.matched:
                break
        stream.finish()
        # Text that ends in half a character is only whole at the end.
        assert (stream.text, stream.matched) == (whole, stop)
        if stop:
            matched += 1
            first = next(
                n
                for n in range(1, 13)
                if first_stop(tokenizer.decode(ids[:n], skip_special=True), stops)
            )
            assert used == first
            with pytest.raises(ValueError, match="drop it"):
                stream.push(6)
    assert matched > 5 or "\U0001f600b" in stops


def text_of(ids):
    return asking.tokenizer().decode(ids, skip_special=True)


def test_ends_inside_an_accepted_run():
    """All orders of stop id, stop string and cap: the earliest wins (c30, c32)."""
    engine = asking.engine()
    prompts = tiny.prompts_of(30, 23, seed=9)
    base = dataclasses.replace(
        asking.GREEDY, max_new_tokens=20, logprobs=True, top_logprobs=2
    )
    made = engine.generate(prompts, base)
    whole = max(made, key=lambda g: max(g.emitted[:5]))
    prompt = whole.prompt
    assert max(whole.emitted[:5]) == engine.window and whole.finish_reason == "length"
    assert whole.text == text_of(whole.tokens)
    spelled = [asking.tokenizer().decode([t]) for t in whole.tokens]
    usable = [i for i, s in enumerate(spelled) if s and "\ufffd" not in s]
    cases = []
    for at in usable[:10]:
        # A string of one token, and one over the edge of two.
        stops = [spelled[at]]
        if at + 1 in usable:
            stops.append(spelled[at] + spelled[at + 1])
        for stop, cap in itertools.product(stops, (1, 4, 9, 20)):
            cases.append(dataclasses.replace(base, stop=(stop,), max_new_tokens=cap))
            for stop_id in {whole.tokens[at], whole.tokens[max(at - 1, 0)]}:
                cases.append(dataclasses.replace(cases[-1], stop_ids=(stop_id,)))
    cases += [asking.off(s) for s in cases[::5]]
    made = engine.generate([prompt] * len(cases), cases)
    reasons = set()
    for settings, generation in zip(cases, made, strict=True):
        size, reason, by = len(whole.tokens), "length", None
        for n in range(1, len(whole.tokens) + 1):
            by_id = whole.tokens[n - 1] in settings.stop_ids
            found = first_stop(text_of(whole.tokens[: n - by_id]), settings.stop)
            if by_id or found:
                size, reason = n, "stop"
                by = whole.tokens[n - 1] if not found else found[1]
                break
            if n == settings.max_new_tokens:
                size = n
                break
        assert generation.tokens == whole.tokens[:size], settings
        assert generation.finish_reason == reason, settings
        assert generation.stopped_by == by, settings
        text = text_of(generation.tokens[: -1 if isinstance(by, int) else None])
        found = first_stop(text, settings.stop)
        assert generation.text == (text[: found[0]] if found else text)
        # Ids, log-probabilities and usage are trimmed together.
        assert len(generation.logprobs) == len(generation.top_logprobs) == size
        assert sum(generation.emitted) + 1 == size
        reasons.add((reason, type(by)))
    assert len(reasons) == 3
    assert asking.is_idle(engine)


def test_late_stop_frees_the_slot_and_leaves_neighbours_alone():
    """The stop is found while the next round runs; its tokens are dropped."""
    engine = asking.engine()
    prompts = tiny.prompts_of(3, 23, seed=12)
    each = [asking.GREEDY, asking.SAMPLED, asking.GREEDY]
    alone = engine.generate(prompts, each)
    spelled = [asking.tokenizer().decode([t]) for t in alone[0].tokens]
    at = next(i for i, s in enumerate(spelled) if i > 2 and s and "\ufffd" not in s)
    stopping = dataclasses.replace(each[0], stop=(spelled[at],))
    streamed = {}

    def on_tokens(handle, new, from_prefill):
        streamed.setdefault(handle, []).extend(new)

    handles = [
        engine.submit(p, s) for p, s in zip(prompts, [stopping, *each[1:]], strict=True)
    ]
    done = engine.run(on_tokens)
    stopped = done[handles[0]]
    assert stopped.finish_reason == "stop" and stopped.stopped_by == spelled[at]
    assert len(stopped.tokens) <= at + 1
    assert stopped.tokens == alone[0].tokens[: len(stopped.tokens)]
    assert [done[h].tokens for h in handles[1:]] == [g.tokens for g in alone[1:]]
    assert streamed == {h: done[h].tokens for h in handles}
    assert asking.is_idle(engine)


def test_stop_strings_need_a_tokenizer():
    engine = tiny.engine("bigram", 3, slots=3, buckets=(7, 64))
    with pytest.raises(UserError, match="stop=.*tokenizer"):
        engine.submit([1], Settings(8, stop=("x",)))
    for bad in ("", "\ufffd"):
        with pytest.raises(UserError, match="stop="):
            Settings(stop=(bad,))
    with pytest.raises(UserError, match="at most 16"):
        Settings(stop=tuple("abcdefghijklmnopq"))
    assert Settings(stop="ab").stop == ("ab",)
