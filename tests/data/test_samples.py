"""Token samples: chunk files, loops, and the guards on a corpus."""

import dataclasses
import gzip
import json
import os

import pytest

from spec_jax.core.errors import UserError
from spec_jax.data import samples as lib
from spec_jax.data.samples import Sample


def test_looping_means_an_ngram_three_times():
    gram = list(range(8))
    assert lib.is_looping([*gram, 90, *gram, 91, *gram])
    assert not lib.is_looping([*gram, 90, *gram, 91, *gram[:7]])
    assert lib.is_looping([5] * 10) and not lib.is_looping([5] * 9)
    assert not lib.is_looping([]) and not lib.is_looping(gram)
    assert lib.is_looping([1, 2, 1, 2], n=2, times=2)


def test_only_the_answer_is_searched_for_loops():
    gram = list(range(8))
    assert not lib.make_sample([*gram, *gram, *gram], gram, "x").looping
    sample = lib.make_sample([1], [*gram, *gram, *gram], "x", 0.7)
    assert sample.looping and sample.prompt_len == 1 and sample.temperature == 0.7
    assert sample.answer == (*gram, *gram, *gram)


def test_distinct_and_longest_run():
    assert lib.distinct_ngrams([1, 2, 1, 2, 1]) == 2 / 4
    assert lib.distinct_ngrams([1]) == 1.0
    assert lib.longest_run([1, 1, 2, 2, 2, 1]) == 3
    assert lib.longest_run([]) == 0 and lib.longest_run([4]) == 1


def test_chunks_round_trip_in_index_order(tmp_path, tiny):
    folder = str(tmp_path / "samples")
    made = tiny.samples(9)
    assert lib.list_chunks(folder) == []
    for index in (2, 0, 1):
        lib.write_chunk(folder, index, made[3 * index : 3 * index + 3])
    assert lib.list_chunks(folder) == [0, 1, 2]
    assert lib.read_samples(folder, num_chunks=3) == made
    before = sorted(os.listdir(folder))
    lib.write_chunk(folder, 1, made[3:6])  # the same again: nothing changes
    assert lib.read_samples(folder) == made and sorted(os.listdir(folder)) == before
    with pytest.raises(UserError, match=r"exists with other samples"):
        lib.write_chunk(folder, 1, made[:3])
    with pytest.raises(UserError, match=r"lacks 1 of 4 chunks.*samples-00003"):
        lib.read_samples(folder, num_chunks=4)


def test_a_listing_does_not_depend_on_the_file_system(tmp_path, tiny, monkeypatch):
    folder = str(tmp_path)
    made = tiny.samples(6)
    for index in range(3):
        lib.write_chunk(folder, index, made[2 * index : 2 * index + 2])
    names = os.listdir(folder)
    for shuffled in (sorted(names), sorted(names, reverse=True), names[3:] + names[:3]):
        monkeypatch.setattr(lib.os, "listdir", lambda _, order=shuffled: order)
        assert lib.read_samples(folder) == made


@pytest.mark.parametrize("damage", ["truncate", "flip", "no checksum", "swap"])
def test_torn_chunks_are_refused_with_their_name(tmp_path, tiny, damage):
    folder = str(tmp_path)
    made = tiny.samples(4)
    first = lib.write_chunk(folder, 0, made[:2])
    second = lib.write_chunk(folder, 1, made[2:])
    with open(first, "rb") as file:
        content = file.read()
    if damage == "truncate":
        content = content[: content.index(b"\n") + 1]
    elif damage == "flip":
        content = content.replace(b'"prompt_len": ', b'"prompt_len":1', 1)
    elif damage == "no checksum":
        os.unlink(first.removesuffix(".jsonl") + ".sha256")
    if damage == "swap":
        os.replace(second, first)
    else:
        with open(first, "wb") as file:
            file.write(content)
    with pytest.raises(UserError, match=r"samples-00000.jsonl"):
        lib.read_samples(folder)


@pytest.mark.parametrize("at", [0, 1])
def test_a_crash_while_writing_lists_nothing(tmp_path, tiny, monkeypatch, at):
    calls = []
    replace = os.replace

    def crash(*args):
        calls.append(args)
        if len(calls) > at:
            raise KeyboardInterrupt
        replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            lib.write_chunk(str(tmp_path), 0, tiny.samples(2))
    assert lib.list_chunks(str(tmp_path)) == []
    lib.write_chunk(str(tmp_path), 0, tiny.samples(3, seed=1))
    assert lib.read_samples(str(tmp_path)) == tiny.samples(3, seed=1)


def test_corpus_leaves_out_and_counts(tiny):
    made = tiny.samples(300)
    made = [dataclasses.replace(s, looping=i < 4) for i, s in enumerate(made)]
    empty = Sample(tokens=(1, 2), prompt_len=2, source="empty")
    long = Sample(tokens=(1,) * 99, prompt_len=2, source="long")
    corpus = lib.select_samples([*made, empty, long], 50, looping="drop")
    assert corpus.samples == tuple(made[4:])
    few = "with less than 2 answer tokens"
    assert corpus.skipped == {few: 1, "longer than 50 tokens": 1}
    assert corpus.looping == 4
    assert str(corpus) == (
        "296 of 302 samples kept; left out: 1 longer than 50 tokens, "
        f"1 {few}, 4 looping"
    )
    kept = lib.select_samples(made, 50)
    assert kept.samples == tuple(made) and kept.looping == 0


def test_a_looping_answer_is_cut_where_it_begins_again():
    loop, opening = tuple(range(50, 60)), (1, 2, 3)
    sample = lib.make_sample((7, 8), (*opening, *loop, *loop, *loop), "x")
    corpus = lib.select_samples([sample], 50, looping="cut")
    (cut,) = corpus.samples
    assert cut.tokens == (7, 8, *opening, *loop)
    assert not cut.looping and not lib.is_looping(cut.answer) and corpus.looping == 1
    assert str(corpus) == "1 of 1 samples kept; 1 cut where they loop"
    straight = lib.make_sample((7, 8), (*opening, *loop), "x")
    assert lib.without_loop(straight) == straight


def test_a_cut_that_leaves_nothing_to_train_on_leaves_the_sample_out(tiny):
    """One token repeated: its first 8-gram comes again after one token."""
    stuck = [lib.make_sample((7, 8), [9] * 20, f"x{i}") for i in range(9)]
    made = tiny.samples(10)
    corpus = lib.select_samples([*made, *stuck], 50, looping="cut")
    kept = [lib.without_loop(s) if s.looping else s for s in made]
    assert len(lib.without_loop(stuck[0]).answer) == 1
    assert list(corpus.samples) == kept and not corpus.skipped
    assert corpus.looping == 9 + sum(s.looping for s in made)
    assert str(corpus).startswith("10 of 19 samples kept; left out: 9 looping")


def test_long_samples_of_a_file_are_a_choice_and_empty_answers_are_not(tiny):
    long = Sample(tokens=(1,) * 99, prompt_len=2, source="long")
    empty = Sample(tokens=(1, 2), prompt_len=2, source="empty")
    made = [*tiny.samples(20), long, long]
    corpus = lib.select_samples(made, 50, long_is_fault=False)
    assert str(corpus) == ("20 of 22 samples kept; left out: 2 longer than 50 tokens")
    with pytest.raises(UserError, match=r"1 of 23 .*1 with less than 2 answer"):
        lib.select_samples([*made, empty], 50, long_is_fault=False)


def test_a_file_says_which_target_answered_where_the_samples_do(tmp_path):
    path = str(tmp_path / "s.jsonl")
    made = [
        lib.make_sample((1, 2), (3, 4), "a", 0.5, "cafe"),
        lib.make_sample((1, 2), (5, 6), "b"),
    ]
    lib.write_file(path, made)
    assert lib.read_file(path, 7) == made
    assert (tmp_path / "s.jsonl").read_text().count("target_fingerprint") == 1


GOOD = {"tokens": [1, 2, 3, 4], "prompt_len": 2}


def test_a_file_may_be_packed_and_call_its_tokens_otherwise(tmp_path):
    path = tmp_path / "s.jsonl.gz"
    rows = [GOOD, {"token_ids": [5, 6], "prompt_len": 1, "source": "b"}]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    first, second = lib.read_file(str(path), 7)
    assert first.tokens == (1, 2, 3, 4) and first.prompt_len == 2
    assert first.source == "s.jsonl.gz:0"
    assert second == lib.make_sample((5,), (6,), "b")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *[
            ({"prompt_len": value}, "prompt_len=")
            for value in (-1, 0, 4, 9, True, 2.0, "2", None, [2], 10**30)
        ],
        *[
            ({"tokens": value}, "tokens must be a list of whole numbers")
            for value in ([1, 2.7, 3], [1, -2, 3], [True, 2, 3], ["1", 2], 5, "123")
        ],
        ({"tokens": [1, 2, 100, 4]}, "ids up to 100; the target has 100 tokens"),
        ({"tokens": [1, 2, 10**30]}, "the target has 100 tokens"),
        ({"temperature": "x"}, "temperature='x'"),
        ({"temperature": -1}, "temperature=-1"),
        ({"tokens": None, "token_ids": [1, 2]}, "tokens must be a list"),
        (None, "lacks token_ids"),
        ([1], "line 2 is list"),
    ],
)
def test_rows_of_another_kind_are_named(tmp_path, change, words):
    path = tmp_path / "s.jsonl"
    row = {**GOOD, **change} if isinstance(change, dict) else change
    row = {"prompt_len": 2} if change is None else row
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(row)}\n")
    with pytest.raises(UserError, match=words) as error:
        lib.read_file(str(path), 100)
    assert "\n" not in str(error.value) and "data.samples=" in str(error.value)


def test_no_line_of_a_file_is_cut(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(GOOD)[:-5])
    with pytest.raises(UserError, match="line 1 is not JSON"):
        lib.read_file(str(path), 100)


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip", "absent"])
def test_torn_files_are_refused(tmp_path, damage):
    path = tmp_path / "s.jsonl.gz"
    content = bytearray(gzip.compress(json.dumps(GOOD).encode() * 50))
    if damage == "cut":
        content = content[:-9]
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    if damage == "no gzip":
        content = b"plain"
    if damage != "absent":
        path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read") as error:
        lib.read_file(str(path), 100)
    assert "\n" not in str(error.value)


def test_more_than_one_percent_skipped_stops_with_reasons(tiny):
    long = Sample(tokens=(1,) * 99, prompt_len=2, source="long")
    made = tiny.samples(97)
    with pytest.raises(UserError, match=r"3 of 100 .*3 longer than 50 tokens.*1.0%"):
        lib.select_samples([*made, long, long, long], 50)
    lib.select_samples([*made, *made, *made, long, long], 50)


def test_supervised_share_of_none_or_all_stops():
    none = [Sample((1, 2, 3), 3, "a"), Sample((1, 2), 2, "b")]
    all_of_it = [Sample((1, 2, 3), 0, "a")]
    with pytest.raises(UserError, match=r"chat template cafe.*0% of 5 tokens"):
        lib.check_supervision(none, "cafe")
    with pytest.raises(UserError, match=r"100% of 3 tokens"):
        lib.check_supervision(all_of_it)
    with pytest.raises(UserError, match=r"no tokens left"):
        lib.select_samples([], 10)
    lib.check_supervision([*none, *all_of_it])


def test_prompt_len_must_lie_inside():
    with pytest.raises(UserError, match=r"prompt_len=4"):
        Sample((1, 2, 3), 4, "a")
