"""Which prompts are on which side, and which samples are used again."""

import collections
import dataclasses
import json
import pathlib

import pytest

from experiments import synthesis, synthesis_prompts
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import provenance
from spec_jax.data import samples as sample_files
from spec_jax.decode.request import Generation
from tests.support import served

DATA = schema.Data(
    num_synth_prompts=6, max_new_tokens=6, max_tokens=16, held_out=2, greedy_share=1.0
)
# Sixteen words that a prompt may consist of.
WORDS = [f"w{i}" for i in range(6, served.VOCAB - 1)]


class Echo:
    """Answers a prompt with four tokens of its own, and the end."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        return self

    def generate(self, prompts, settings):
        self.calls += 1
        return [
            Generation(
                list(p),
                [6 + (self.calls + n + k) % 16 for k in range(4)] + [served.END],
                "stop",
            )
            for n, p in enumerate(prompts)
        ]


@pytest.fixture(scope="module")
def target():
    return served.make_target()


def named(path, *texts):
    path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    return str(path)


def make(target, data, folder, engine=None, said=None, seed=0):
    say = (lambda text: None) if said is None else said.append
    return synthesis.synthesise(
        target, engine or Echo(), data, seed, folder, served.MASK, say, 4
    )


def prompts_of(samples):
    return [s.tokens[: s.prompt_len] for s in samples]


def test_each_named_file_is_held_out_and_made_up_prompts_are_not(target, tmp_path):
    files = [
        named(tmp_path / "many.jsonl", *WORDS[:9]),
        named(tmp_path / "few.jsonl", *WORDS[9:12]),
    ]
    data = dataclasses.replace(DATA, prompts=",".join(files), num_synth_prompts=5)
    found = make(target, data, tmp_path / "s")
    assert list(found.held_out_sets) == [*found.held_out_sets[:2]] * 2
    assert set(found.held_out_sets) == {"many", "few"}
    assert collections.Counter(s.source.split(":")[0] for s in found.train) == (
        {"many.jsonl": 7, "few.jsonl": 1} | {f"synth/{i}": 1 for i in range(5)}
    )
    only = dataclasses.replace(data, train_on_prompts=False)
    found = make(target, only, tmp_path / "only")
    assert set(found.held_out_sets) == {"many", "few"} and len(found.train) == 5
    # Of the prompts that are used, held-out ones included.
    some = dataclasses.replace(data, max_file_prompts=5, num_synth_prompts=0)
    found = make(target, some, tmp_path / "some")
    assert len(found.held_out) == 4 and len(found.train) == 1
    own = dataclasses.replace(data, prompts="")
    found = make(target, own, tmp_path / "own")
    assert found.held_out_sets == ("synth", "synth") and len(found.train) == 3


def test_files_of_one_name_are_not_one_set(target, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first = named(tmp_path / "a" / "test.jsonl", *WORDS[:6])
    second = named(tmp_path / "b" / "test.jsonl", *WORDS[6:12])
    data = dataclasses.replace(DATA, prompts=f"{first}, {second}", num_synth_prompts=0)
    with pytest.raises(UserError, match=r"data\.prompts=.* are both the set 'test'"):
        make(target, data, tmp_path / "s")
    own = named(tmp_path / "builtin.jsonl", *WORDS[:6])
    data = dataclasses.replace(data, prompts=f"builtin,{own}")
    with pytest.raises(UserError, match=r"names 'builtin' and .* the set 'builtin'"):
        synthesis_prompts.read_prompts(data)


def test_the_built_in_list_is_a_set_of_its_own_name(tmp_path):
    own = named(tmp_path / "prompts.jsonl", *WORDS[:3])
    data = dataclasses.replace(DATA, prompts=f"builtin,{own}")
    found = synthesis_prompts.read_prompts(data)
    sets = collections.Counter(synthesis_prompts.set_of(p.source) for p in found)
    assert sets["prompts"] == 3 and set(sets) == {"builtin", "prompts"}
    assert found[0].source == "builtin:1"


def test_a_repeated_prompt_is_one_prompt(target, tmp_path):
    files = [
        named(tmp_path / "a.jsonl", "w6", "w7", "w6", " w8", "w9", "w10"),
        named(tmp_path / "b.jsonl", "w8", "w11", "w7", "w12", "w13"),
    ]
    data = dataclasses.replace(DATA, prompts=",".join(files), num_synth_prompts=0)
    said = []
    for seed in range(5):
        found = make(target, data, tmp_path / str(seed), said=said, seed=seed)
        every = [*prompts_of(found.train), *found.held_out]
        assert len(every) == len(set(every)) == 8
    assert said.count("3 prompts left out: repeated") == 5


def test_prompts_are_rendered_only_as_far_as_they_are_wanted():
    prompts = [
        synthesis_prompts.prompt_files.user_prompt(str(i), f"a:{i}") for i in range(99)
    ]
    rendered = []

    def render(prompt):
        rendered.append(prompt)
        return [len(rendered)]

    found = synthesis_prompts.split(prompts, render, 3, 4, set())
    assert len(found.held_out) == 3 and len(found.rest) == 4 and len(rendered) == 7


def test_answers_to_one_prompt_stay_on_one_side(target, tmp_path):
    rows = [
        sample_files.make_sample([1, 6 + p], [7, 8, 9 + a, 2], f"f:{p}")
        for p in range(8)
        for a in range(3)
    ]
    path = str(tmp_path / "s.jsonl")
    sample_files.write_file(path, rows)
    data = dataclasses.replace(DATA, samples=path)
    found = make(target, data, tmp_path)
    assert len(found.held_out) == 2 and len(found.train) == 18
    assert not set(found.held_out) & set(prompts_of(found.train))
    with pytest.raises(UserError, match=r"data\.held_out=8 .* of 8 prompts"):
        make(target, dataclasses.replace(data, held_out=8), tmp_path)


def test_rows_that_are_left_out_are_counted_aloud(target, tmp_path):
    rows = [
        sample_files.make_sample([1, 6 + i], [7, 8, 2], f"f:{i}") for i in range(10)
    ]
    # Their prompts are too long to be held out.
    long = sample_files.make_sample([1] + 10 * [6], [7, 8, 9, 10, 11, 2], "long")
    path = str(tmp_path / "s.jsonl")
    sample_files.write_file(path, [*rows, long])
    data = dataclasses.replace(DATA, samples=path, held_out=1)
    said = []
    make(target, data, tmp_path, said=said)
    (line,) = said
    assert "left out: 1 longer than 16 tokens" in line
    empty = sample_files.make_sample([1] + 10 * [7], [2], "empty")
    sample_files.write_file(path, [*rows, long, empty])
    with pytest.raises(UserError, match=r"1 with less than 2 answer tokens\), more"):
        make(target, data, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"greedy_share": 0.5}, r"data\.greedy_share=1\.0 .* 0\.5"),
        ({"answer_temperature": 0.3}, r"data\.answer_temperature=0\.7"),
        ({"answer_top_p": 0.5}, r"data\.answer_top_p=0\.9"),
        ({"max_new_tokens": 5}, r"data\.max_new_tokens=6"),
        ({"synth_temperature": 0.5}, r"data\.synth_temperature=1\.0"),
        ({"synth_openings": ()}, r"data\.synth_openings=\['w6', 'w7'\]"),
        ({"seed": 3}, r"seed=0 .* 3"),
        ({"target": 1}, r"target fingerprint='tiny-0'"),
    ],
)
def test_samples_that_another_recipe_made_are_refused(target, tmp_path, change, words):
    data = dataclasses.replace(DATA, synth_openings=("w6", "w7"))
    folder = tmp_path / "s"
    made = make(target, data, folder)
    idle = Echo()
    assert make(target, data, folder, idle).train == made.train and not idle.calls
    change = dict(change)
    seed, other = change.pop("seed", 0), change.pop("target", None)
    if other:
        target = served.make_target(other)
    with pytest.raises(UserError, match=words):
        make(target, dataclasses.replace(data, **change), folder, idle, seed=seed)
    assert not idle.calls


def test_turns_of_openings_that_are_gone_are_a_sentence(target, tmp_path):
    """In a folder of before, without a record."""
    data = dataclasses.replace(DATA, synth_openings=("w6", "w7"))
    folder = tmp_path / "s"
    make(target, data, folder)
    (folder / "turns" / provenance.NAME).unlink()
    said = []
    make(target, data, folder, said=said)
    assert any("does not say what made it" in line for line in said)
    with pytest.raises(UserError, match=r"the 2\. of data\.synth_openings, which are"):
        make(target, dataclasses.replace(data, synth_openings=()), folder)


def test_answers_of_another_target_are_not_trained_on(target, tmp_path):
    prompts = named(tmp_path / "a.jsonl", *WORDS)
    data = dataclasses.replace(DATA, prompts=prompts, num_synth_prompts=0)
    path = str(tmp_path / "s.jsonl")
    sample_files.write_file(path, make(target, data, tmp_path / "s").train)
    data = dataclasses.replace(DATA, samples=path)
    assert len(make(target, data, tmp_path).train) == 12
    other = served.make_target(1)
    with pytest.raises(UserError, match=r"holds answers of target tiny-0, this is"):
        make(other, data, tmp_path)
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    for row in rows:
        del row["target_fingerprint"]
    pathlib.Path(path).write_text("\n".join(map(json.dumps, rows)))
    assert len(make(other, data, tmp_path).train) == 12
