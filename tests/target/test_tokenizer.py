"""Token ids, decoding, streaming and refusal of special tokens."""

import json
import random

import pytest

from spec_jax.core.errors import UserError
from spec_jax.target import tokenizer

# Ids that the public C++ implementation gives for the real vocabulary.
GOLDEN_IDS = {
    "Hello, world!": [19556, 28, 905, 17],
    "½ ² Ⅷ ٣ 100%": [
        *(16738, 216, 19133, 216, 173, 223, 117, 216, 164, 113, 216, 33, 32, 32, 21)
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "In 2024 there were 1,234.5 items.": [
        *(788, 216, 34, 32, 34, 36, 665, 592, 216, 33, 28, 34, 35, 36, 30, 37),
        *(3723, 30),
    ],
}

TEXTS = [
    "",
    " leading and trailing  ",
    "tabs\tand\r\nlines\n\n\n",
    "Crème brûlée, naïve façade; Ελληνικά; русский; 日本語; 한국어; עברית",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 👍🏽 and math ∀x∈ℝ: ⌈x⌉",
    "def f(x):\n    return {'a': [x] * 3}  # 12345",
]

# Bytes of valid UTF-8 that no token of the real vocabulary holds: dropped.
LOST_BYTES = (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2)


def byte_level(extra=(), special=("<s>", "</s>")):
    """Metadata of a small byte-level vocabulary, as a GGUF file carries it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    symbols = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]
    merges = ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3", "123 4"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = [*special, *symbols, *words, *extra]
    types = [3] * len(special) + [1] * (len(symbols) + len(words)) + [4] * len(extra)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def stream(text_tokenizer, pieces, **options):
    decoder = tokenizer.StreamDecoder(text_tokenizer, **options)
    return [decoder.push(piece) for piece in pieces] + [decoder.flush()]


def random_text(rng, length):
    def character():
        while True:
            code = rng.choice(
                [
                    rng.randrange(32, 127),
                    rng.randrange(0xA0, 0x800),
                    rng.randrange(0x800, 0xD800),
                    rng.randrange(0x1F300, 0x1FAFF),
                ]
            )
            if not set(chr(code).encode()) & set(LOST_BYTES):
                return chr(code)

    return "".join(character() for _ in range(length))


@pytest.mark.parametrize("text", GOLDEN_IDS)
def test_golden_ids(smollm2, text):
    assert smollm2.tokenizer.encode(text) == GOLDEN_IDS[text]
    assert smollm2.tokenizer.decode(GOLDEN_IDS[text]) == text


def test_facts_of_the_real_tokenizer(smollm2):
    text = smollm2.tokenizer
    assert text.vocab_size == 49152
    assert text.special_ids == frozenset(range(17))
    assert (text.bos, text.eos) == (1, 2)
    assert text.id_of("<empty_output>") == 16
    assert text.token_of(2) == "<|im_end|>"


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smollm2, text):
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


def test_bytes_without_a_token_are_dropped(smollm2):
    """As the public C++ implementation does; round trips must exclude them."""
    text = smollm2.tokenizer
    for byte in LOST_BYTES[:6]:
        assert text.decode(text.encode(f"a{chr(byte)}b")) == "ab"


def test_skip_special(smollm2):
    ids = smollm2.tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert smollm2.tokenizer.decode(ids, skip_special=True) == "user\nhi"


def test_untrusted_text_with_a_special_token_is_refused(smollm2):
    text = smollm2.tokenizer
    assert text.encode_untrusted("im_end is fine, | too") == text.encode(
        "im_end is fine, | too"
    )
    for token, token_id in text.special_tokens:
        assert text.encode(f"a {token}").count(token_id) == 1
        with pytest.raises(UserError, match=r"question contains .*at character 2"):
            text.encode_untrusted(f"a {token}", field="question")


def test_unknown_token_or_id_is_refused(smollm2):
    with pytest.raises(UserError, match="'<nope>'"):
        smollm2.tokenizer.id_of("<nope>")
    with pytest.raises(UserError, match="49152"):
        smollm2.tokenizer.token_of(49152)


def test_stream_pieces_add_up_and_never_cut_a_character(smollm2):
    text = smollm2.tokenizer
    rng = random.Random(0)
    for _ in range(40):
        ids = text.encode(random_text(rng, 30))
        pieces, at = [], 0
        while at < len(ids):
            step = rng.randrange(0, 4)
            pieces.append(ids[at : at + step])
            at += step
        out = stream(text, pieces)
        assert "".join(out) == text.decode(ids)
        assert not any("\ufffd" in piece for piece in out)


def test_stream_holds_back_the_bytes_of_one_character(smollm2):
    ids = smollm2.tokenizer.encode("a𝄞b")
    assert len(ids) > 3  # the clef is spread over several tokens
    out = stream(smollm2.tokenizer, [[i] for i in ids])
    assert out[0] == "a" and out[1] == "" and "𝄞" in "".join(out)


def test_stream_gives_invalid_bytes_as_decode_does(smollm2):
    """Any ids may be sampled: the sum is still what `decode` says."""
    text = smollm2.tokenizer
    rng = random.Random(1)
    high = [i for i in range(17, 300) if "\ufffd" in text.decode([i])]
    assert len(high) > 50
    for _ in range(60):
        ids = [rng.choice([*high, 40, 41]) for _ in range(20)]
        out = stream(text, [[i] for i in ids])
        assert "".join(out) == text.decode(ids)
        assert len(out[-1]) <= 7  # so little is ever held


def test_stream_of_byte_tokens_after_a_prefix_space(prefix_space_tokenizer):
    text = prefix_space_tokenizer
    for sentence in ("hi sane 日本 rain", "  h", "é 𝄞𝄞𝄞𝄞 h"):
        ids = text.encode(sentence)
        out = stream(text, [[i] for i in ids])
        assert "".join(out) == text.decode(ids) == sentence
        assert not any("\ufffd" in piece for piece in out)
        assert "".join(stream(text, [ids[:7], ids[7:]])) == sentence


def test_stream_may_skip_specials(smollm2):
    ids = smollm2.tokenizer.encode("hé<|im_end|>\n")
    out = stream(smollm2.tokenizer, [[i] for i in ids], skip_special=True)
    assert "".join(out) == "hé\n"


def test_json_round_trip_keeps_ids_and_hash(smollm2):
    text = smollm2.tokenizer
    again = tokenizer.from_json(text.json_text, bos=text.bos, eos=text.eos)
    assert again == text and again.hash == text.hash
    assert again.encode(TEXTS[3]) == text.encode(TEXTS[3])


def test_hash_says_which_tokenizer():
    metadata = byte_level()
    one = tokenizer.from_gguf(metadata.get)
    pretty = json.dumps(json.loads(one.json_text), indent=3)
    assert tokenizer.from_json(pretty).hash == one.hash
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][::-1]
    assert tokenizer.from_gguf(metadata.get).hash != one.hash


@pytest.mark.parametrize(
    "split, expected",
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_word_splits_differ_in_digits(split, expected):
    metadata = byte_level() | {"tokenizer.ggml.pre": split}
    text = tokenizer.from_gguf(metadata.get)
    digits = [text.token_of(i) for i in text.encode("1234")]
    assert digits == expected
    assert text.decode(text.encode("hell w, 1234\n\n x")) == "hell w, 1234\n\n x"
    assert text.encode("hell") == [text.id_of("hell")]


def test_user_defined_tokens_are_whole_but_ordinary():
    text = tokenizer.from_gguf(byte_level(extra=("<think>",)).get)
    assert text.encode_untrusted("<think>") == [text.id_of("<think>")]
    assert text.special_ids == frozenset({0, 1})
    assert text.decode(text.encode("<s>a<think>"), skip_special=True) == "a<think>"


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"tokenizer.ggml.pre": "chatglm"}, "tokenizer.ggml.pre is 'chatglm'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
    ],
)
def test_unknown_kinds_are_refused(change, sentence):
    with pytest.raises(UserError, match=sentence):
        tokenizer.from_gguf((byte_level() | change).get)


def test_damaged_vocabularies_are_refused():
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = metadata["tokenizer.ggml.merges"]
    for change, sentence in (
        ({"tokenizer.ggml.tokens": [*tokens[:-1], tokens[-2]]}, "of them different"),
        ({"tokenizer.ggml.tokens": None}, "has 0 entries"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 types"),
        ({"tokenizer.ggml.merges": [*merges, "q q"]}, "merges do not fit"),
    ):
        with pytest.raises(UserError, match=sentence):
            tokenizer.from_gguf((metadata | change).get)


def test_folder(tmp_path):
    text = tokenizer.from_gguf(byte_level().get)
    with pytest.raises(UserError, match="has no tokenizer.json"):
        tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text.json_text)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    assert tokenizer.from_folder(tmp_path) == text
    (tmp_path / "tokenizer.json").write_text(text.json_text[:100])
    with pytest.raises(UserError, match="cannot be read"):
        tokenizer.from_folder(tmp_path)
