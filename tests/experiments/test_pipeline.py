"""Synthesis and the checks that come before any work; no model is run."""

import dataclasses
import json

import jax
import pytest

from experiments import (
    bench_family,
    bench_round,
    pipeline,
    pipeline_inspect,
    preparing,
    serving,
    synthesis,
    synthesis_prompts,
    training,
)
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.core.vocab import DraftVocab
from spec_jax.decode.request import Generation
from tests.support import served, tiny

DATA = schema.Data(
    num_synth_prompts=0,
    max_new_tokens=6,
    max_tokens=16,
    held_out=1,
    greedy_share=1.0,
    prompts="set by the test",
)


class Echo:
    """An engine that answers with the prompt's last word and the end token."""

    def __init__(self, finish="stop", limit=None):
        self.finish, self.limit, self.calls = finish, limit, 0

    def __call__(self):
        return self

    def generate(self, prompts, settings):
        self.calls += 1
        if self.limit is not None and self.calls > self.limit:
            raise KeyboardInterrupt
        return [
            Generation(list(p), [6 + sum(p) % 9, served.END], self.finish)
            for p in prompts
        ]


@pytest.fixture(scope="module")
def target():
    return served.make_target()


def write_prompts(path, words):
    path.write_text("".join(json.dumps({"prompt": w}) + "\n" for w in words))
    return dataclasses.replace(DATA, prompts=str(path))


def make(target, data, folder, engine, **options):
    return synthesis.synthesise(target, engine, data, 0, folder, served.MASK, **options)


def test_samples_are_the_targets_own_answers(target, tmp_path):
    data = write_prompts(tmp_path / "p.jsonl", [f"w{i}" for i in range(6, 14)])
    found = make(target, data, tmp_path / "s", Echo())
    assert len(found.train) == 7 and len(found.held_out) == 1
    for sample in found.train:
        prompt = sample.tokens[: sample.prompt_len]
        assert sample.answer == (6 + sum(prompt) % 9, served.END)
        assert prompt not in found.held_out
        # Rendered through the template, the assistant's turn opened.
        assert target.tokenizer.decode(prompt[-2:]).split()[-1] == "assistant"


def test_a_killed_synthesis_goes_on_and_a_finished_one_runs_nothing(target, tmp_path):
    data = write_prompts(tmp_path / "p.jsonl", [f"w{i}" for i in range(6, 15)])
    whole = make(target, data, tmp_path / "whole", Echo(), group_size=3)
    with pytest.raises(KeyboardInterrupt):
        make(target, data, tmp_path / "cut", Echo(limit=1), group_size=3)
    again = Echo()
    resumed = make(target, data, tmp_path / "cut", again, group_size=3)
    assert resumed.train == whole.train and resumed.held_out == whole.held_out
    assert again.calls == 2  # of three groups, the first was there
    idle = Echo()
    same = make(target, data, tmp_path / "cut", idle, group_size=3)
    assert same.train == whole.train and idle.calls == 0


def test_answers_to_other_prompts_are_refused(target, tmp_path):
    """The prompt file changed under an unfinished run."""
    path = tmp_path / "p.jsonl"
    data = write_prompts(path, ["w6", "w7", "w8"])
    make(target, data, tmp_path / "s", Echo())
    write_prompts(path, ["w9", "w10", "w11"])
    with pytest.raises(UserError, match="answers other prompts"):
        make(target, data, tmp_path / "s", Echo())


def test_prompts_that_cannot_be_served_are_left_out_aloud(target, tmp_path):
    data = write_prompts(tmp_path / "p.jsonl", ["w6", "w7 " * 20, "w8", "<mask> w9"])
    said = []
    found = synthesis.synthesise(
        target, Echo(), data, 0, tmp_path / "s", served.MASK, said.append
    )
    assert len(found.train) + len(found.held_out) == 2
    assert any(line.startswith("2 prompts left out") for line in said)


def test_turns_that_never_end_are_refused(target, tmp_path):
    data = dataclasses.replace(DATA, prompts="", num_synth_prompts=4)
    with pytest.raises(UserError, match=r"data\.synth_max_tokens=64: none of"):
        make(target, data, tmp_path / "s", Echo(finish="length"))


def test_the_users_turn_is_begun_with_its_opening(target):
    prefix = synthesis_prompts.user_turn_prefix(target, opening="w7")
    assert target.tokenizer.decode(prefix).split() == ["<start>", "user", "w7"]


@pytest.mark.parametrize(
    "change, field",
    [
        ({"objective": (("kind", "hinge"),)}, "objective.kind='hinge'"),
        ({"objective": (("ce", 0.0),)}, "objective switches every loss term off"),
        ({"mesh": (("tensor", 3),)}, "mesh"),
        ({"serve": schema.Serve(max_context=64, max_new_tokens=48, num_draft=9)}, "9"),
        (
            {
                "serve": schema.Serve(max_context=64, max_new_tokens=8),
                "train": schema.Train(eval_new_tokens=60, seq_len=64),
            },
            "train.eval_new_tokens=60",
        ),
    ],
)
def test_what_cannot_end_well_is_refused_before_any_work(target, change, field):
    base = schema.Pipeline(
        data=schema.Data(max_new_tokens=16, max_tokens=48),
        train=schema.Train(eval_new_tokens=8, seq_len=64),
        serve=schema.Serve(max_context=64, max_new_tokens=8),
    )
    drafter = tiny.dflash(target.spec, 3)
    training.check_early(base, target, drafter)
    with pytest.raises(UserError) as caught:
        training.check_early(dataclasses.replace(base, **change), target, drafter)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "change", "sentence"),
    [
        ("dflash", {"qk_norm": False}, {}, r"drafter\.options\.qk_norm is False"),
        (
            "dflash",
            {},
            {"topology": "static_tree"},
            r"serve\.topology='static_tree' .* drafter\.name='dflash' .* 'chain'",
        ),
        (
            "eagle",
            {},
            {"topology": "dynamic_tree", "num_draft": 2, "max_context": 256},
            r"serve\.num_draft=2 .*'dynamic_tree': set serve\.tree_nodes",
        ),
    ],
)
def test_what_export_or_serving_would_refuse_is_refused_before_any_work(
    target, name, options, change, sentence
):
    mask = {} if name == "eagle" else {"layer_ids": (0,), "mask_id": served.MASK}
    cfg = schema.Pipeline(
        drafter=schema.Drafter(name, tuple({**mask, **options}.items())),
        data=schema.Data(max_new_tokens=16, max_tokens=48),
        train=schema.Train(eval_new_tokens=8, seq_len=64),
        serve=schema.Serve(**{"max_context": 64, "max_new_tokens": 8} | change),
    )
    with pytest.raises(UserError, match=sentence):
        training.check_early(cfg, target, serving.new_drafter(cfg, target))
    good = dataclasses.replace(
        cfg,
        drafter=schema.Drafter(name, tuple(mask.items())),
        serve=dataclasses.replace(cfg.serve, topology="chain"),
    )
    training.check_early(good, target, serving.new_drafter(good, target))


def test_drafts_that_a_tree_ignores_are_refused_by_its_engine(target):
    cfg = schema.Pipeline(drafter=schema.Drafter("eagle"))
    drafter = serving.new_drafter(cfg, target)
    serve = schema.Serve(topology="dynamic_tree", num_draft=2)
    frozen = serving.frozen_from_params(target.params, None)
    with pytest.raises(UserError, match=r"serve\.num_draft=2 is for .*'chain'"):
        serving.make_engine(target, target.params, serve, (drafter, {}, frozen))


def test_a_batch_that_the_devices_do_not_share_is_refused_before_any_work(
    target, monkeypatch
):
    """By eight of them, and only where something is trained."""
    mesh = jax.sharding.AbstractMesh((2, 4, 2), training.mesh_lib.AXES)
    monkeypatch.setattr(training, "make_mesh", lambda cfg: mesh)
    cfg = schema.Pipeline(
        data=schema.Data(max_new_tokens=16, max_tokens=48),
        train=schema.Train(eval_new_tokens=8, seq_len=64, batch=12, accumulation=2),
        serve=schema.Serve(max_context=64, max_new_tokens=8),
    )
    drafter = tiny.dflash(target.spec, 3)
    with pytest.raises(UserError, match=r"train\.batch=12 must be a multiple of 8"):
        training.check_early(cfg, target, drafter)
    right = dataclasses.replace(cfg.train, batch=16)
    training.check_early(dataclasses.replace(cfg, train=right), target, drafter)
    lookup = dataclasses.replace(cfg, drafter=schema.Drafter("lookup"))
    training.check_batch(cfg.train, mesh, serving.new_drafter(lookup, target))


FAMILY = """
from configs import common

def get_config(name):
    config = common.base("pipeline", name)
    config.drafter.options.update({options})
    config.objective.{term} = 0.5
    return config
"""


@pytest.mark.parametrize(
    ("drafter", "options", "term", "fix"),
    [
        ("dflash", {}, "selector", "a drafter with a candidate selector"),
        ("dflash", {}, "l1", "a drafter that asks for the teacher"),
        ("dflash2", {}, "smooth_l1", "a drafter that predicts features"),
        (
            "dspark",
            {"enable_confidence_head": False},
            "confidence",
            "a drafter with a confidence head",
        ),
        ("lookup", {}, "ce", "drafter.name='lookup' has no parameters"),
    ],
)
def test_a_term_that_nothing_feeds_is_refused_before_any_forward(
    target, monkeypatch, tmp_path, drafter, options, term, fix
):
    """By a drafter's own recipe and by the family's; without it both go on."""

    class WorkBegan(Exception):
        pass

    def prepare(*args):
        raise WorkBegan

    monkeypatch.setattr(preparing, "prepare", prepare)
    monkeypatch.setattr(
        serving, "load_serving_target", lambda section: (target, target.params)
    )
    if drafter != "lookup":
        options = {**options, "layer_ids": (0,), "mask_id": served.MASK}
    path = tmp_path / "recipe.py"
    path.write_text(FAMILY.format(options=options, term=term))
    family = schema.BenchFamily(
        drafters=(drafter,),
        recipe=str(path),
        data=schema.Data(max_new_tokens=16, max_tokens=48),
        serve=schema.Serve(max_context=256, max_new_tokens=8),
        validation_prompts=2,
    )
    own = bench_family.recipe_of(family, drafter)
    sentence = rf"objective\.{term}=0\.5 .*{fix}"
    with pytest.raises(UserError, match=sentence):
        pipeline.main(own, tmp_path)
    with pytest.raises(UserError, match=sentence):
        bench_family.main(family, tmp_path)
    with pytest.raises(WorkBegan):
        pipeline.main(dataclasses.replace(own, objective=()), tmp_path)


def test_draft_vocabulary_is_what_answers_contain(target, monkeypatch):
    said = []
    monkeypatch.setattr(preparing, "say", said.append)
    samples = [
        synthesis.sample_files.make_sample([1, 2], [5, 5, 7], "a"),
        synthesis.sample_files.make_sample([1, 3], [5, 7, 9], "b"),
    ]
    vocab, coverage = preparing.choose_vocab(2, samples, 12)
    assert vocab.target_ids == (5, 7) and coverage == pytest.approx(5 / 6)
    assert preparing.choose_vocab(0, samples, 12) == (None, 1.0)
    assert not said
    vocab = preparing.choose_vocab(99, samples, 12)[0]
    assert vocab.target_ids == (5, 7, 9)
    (line,) = said
    assert line.startswith("drafter.draft_vocab=99: the answers hold 3 distinct tokens")
    prepared = preparing.Prepared(target, {}, None, vocab, 1.0, None)
    assert prepared.vocab_size == 3
    assert dataclasses.replace(prepared, vocab=None).vocab_size == served.VOCAB


def test_samples_of_a_file_are_trained_on_and_other_prompts_validate(target, tmp_path):
    data = write_prompts(tmp_path / "a.jsonl", [f"w{i}" for i in range(6, 12)])
    made = make(target, data, tmp_path / "s", Echo())
    file = str(tmp_path / "samples.jsonl")
    synthesis.sample_files.write_file(file, made.train)
    assert synthesis.sample_files.read_file(file, target.spec.vocab_size) == list(
        made.train
    )
    write_prompts(tmp_path / "b.jsonl", ["w12", "w13", "w14"])
    both = f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}"
    data = dataclasses.replace(data, samples=file, prompts=both, held_out=2)
    idle = Echo()
    found = make(target, data, tmp_path / "other", idle)
    assert idle.calls == 0 and found.train == made.train
    # One prompt of the first file was held out when the samples were made.
    assert sorted(found.held_out_sets) == ["a", "b", "b"]
    assert set(found.held_out_sets[:2]) == {"a", "b"}  # in turn
    answered = {s.tokens[: s.prompt_len] for s in found.train}
    assert not answered & set(found.held_out)
    alone = dataclasses.replace(data, prompts="")
    found = make(target, alone, tmp_path / "other", idle)
    assert len(found.train) == 3 and len(found.held_out) == 2
    line = int(made.train[0].source.split(":")[1])
    write_prompts(tmp_path / "b.jsonl", [f"w{5 + line}"])  # answered above
    data = dataclasses.replace(data, prompts=str(tmp_path / "b.jsonl"))
    with pytest.raises(UserError, match="leaves no prompt for validation"):
        make(target, data, tmp_path / "other", idle)


def test_the_store_keeps_what_the_recipe_names_and_the_drafter_needs(target):
    drafter = tiny.dflash(target.spec, 3)
    cfg = schema.Pipeline()
    assert preparing.capture_schema(cfg, drafter).layer_ids == (0,)
    wide = dataclasses.replace(
        cfg, capture=schema.Capture(layer_ids=(0, 1), teacher=True)
    )
    kept = preparing.capture_schema(wide, drafter)
    assert kept.layer_ids == (0, 1) and kept.teacher
    narrow = dataclasses.replace(cfg, capture=schema.Capture(layer_ids=(1,)))
    with pytest.raises(UserError, match=r"capture\.layer_ids=\(1,\) lacks layer 0"):
        preparing.capture_schema(narrow, drafter)


@pytest.mark.parametrize("new_tokens", [16, 512])
def test_the_engine_that_answers_has_the_lengths_of_data(new_tokens):
    """The drafter's engine may be longer: what it is asked for is not refused."""
    serve = schema.Serve(
        max_context=1024, max_new_tokens=new_tokens, prefill_buckets=(64, 512)
    )
    made = preparing.offline(serve, schema.Data(max_new_tokens=128, max_tokens=320))
    assert (made.max_context, made.max_new_tokens) == (384, 128)
    assert made.prefill_buckets == (64,) and made.prefill_ladder == (64,)


def test_costs_are_those_of_the_tokens_that_may_be_proposed(target, monkeypatch):
    """Answers hold fewer tokens than the recipe asks for: a head is as wide."""
    cfg = schema.Pipeline(
        drafter=schema.Drafter(
            name="dspark",
            draft_vocab=16,
            options=(
                ("num_layers", 1),
                ("num_draft", 3),
                ("layer_ids", (0,)),
                ("mask_id", served.MASK),
            ),
        ),
        serve=schema.Serve(max_context=96, max_new_tokens=8),
        data=schema.Data(max_new_tokens=16, max_tokens=48),
        train=schema.Train(seq_len=64),
    )

    def measure(timed, target, params, drafter, *, standard):
        kept = timed.drafter.draft_vocab
        weights = bench_round.random_weights(timed, target, params, drafter, kept)
        assert weights.frozen.head_DU.shape[1] == drafter.options.draft_vocab_size
        return {
            "plain_step_ms": 1.0,
            "draft_ms": 1.0,
            "extend_ms": 0.4,
            "round_ms": 4.0,
            "overhead_fraction": 0.25,
            "verify_ms": {"4": 2.0},
        }

    monkeypatch.setattr(bench_round, "measure", measure)
    for vocab in (DraftVocab((6, 7, 8, 9, 10), served.VOCAB), None):
        size = vocab.size if vocab else 0
        drafter = serving.new_drafter(cfg, target, draft_vocab_size=size)
        prepared = preparing.Prepared(target, target.params, None, vocab, 1.0, None)
        costs, split = pipeline.cost_split(cfg, prepared, drafter, 2.0)
        assert costs["verify_ms"] == 2.0 and costs["extend_ms"] == 0.4
        assert split["speculative"] == pytest.approx(
            {"draft": 0.5, "verify": 1.0, "draft state": 0.2, "accept, commit": 0.3}
        )


def test_a_small_batch_is_shown_with_labels_and_weights(
    target, tmp_path, monkeypatch, capsys
):
    make_sample = synthesis.sample_files.make_sample
    rows = [make_sample([1, 3, 6 + i], [9, 10, 11, 12, 2], f"s:{i}") for i in range(5)]
    file = str(tmp_path / "samples.jsonl")
    synthesis.sample_files.write_file(file, rows)
    monkeypatch.setattr(
        serving, "load_serving_target", lambda section: (target, target.params)
    )
    cfg = schema.Pipeline(
        drafter=schema.Drafter(
            options=(
                ("num_layers", 1),
                ("num_draft", 2),
                ("num_anchors", 2),
                ("layer_ids", (0,)),
                ("mask_id", served.MASK),
            ),
        ),
        objective=(("decay_gamma", 1.0),),
        data=dataclasses.replace(DATA, samples=file, prompts="", held_out=1),
        train=schema.Train(seq_len=64, eval_prompts=1),
    )
    monkeypatch.setenv("COLUMNS", "160")
    pipeline.inspect(cfg, tmp_path / "not made")
    shown = capsys.readouterr().out
    assert shown.count("features of layers (0,)") == pipeline_inspect.SHOWN
    assert shown.count("'w12'") == pipeline_inspect.SHOWN
    assert shown.count("anchor:") == pipeline_inspect.SHOWN
    assert "draft 1:" in shown and "1.000" in shown
    assert not (tmp_path / "not made").exists()


def test_a_batch_is_shown_without_making_every_prompt():
    data = schema.Data(num_synth_prompts=5000)
    few = pipeline_inspect.few_of(data)
    assert few.num_synth_prompts == pipeline_inspect.MADE + 1 and few.held_out == 1
    named = dataclasses.replace(data, prompts="a.jsonl,b.jsonl")
    few = pipeline_inspect.few_of(named)
    assert few.num_synth_prompts == 0
    assert few.max_file_prompts == pipeline_inspect.MADE + 2
