"""Each wrong value is one sentence that names the field, the value and the fix."""

import dataclasses

import pytest

from spec_jax.config import schema
from spec_jax.core.errors import UserError


@pytest.mark.parametrize("cls", [schema.Pipeline, schema.BenchRound, schema.BenchPeers])
def test_defaults_are_valid_hashable_and_equal(cls):
    assert hash(cls()) == hash(cls())
    assert cls() == cls()
    assert schema.SCHEMAS[cls().task] is cls


def test_tasks_name_their_schema():
    for task, cls in schema.SCHEMAS.items():
        fields = {f.name: f for f in dataclasses.fields(cls)}
        assert fields["task"].default == task


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda: schema.Serve(temperature=-0.5), "serve.temperature", "-0.5"),
        (lambda: schema.Serve(temperature=float("nan")), "serve.temperature", "nan"),
        (lambda: schema.Serve(top_p=0.0), "serve.top_p", "0.0"),
        (lambda: schema.Serve(top_p=1.01), "serve.top_p", "1.01"),
        (lambda: schema.Serve(min_p=2.0), "serve.min_p", "2.0"),
        (lambda: schema.Serve(top_k=-1), "serve.top_k", "-1"),
        (lambda: schema.Serve(num_draft=-1), "serve.num_draft", "-1"),
        (lambda: schema.Serve(slots=0), "serve.slots", "0"),
        (lambda: schema.Serve(max_new_tokens=512), "serve.max_new_tokens", "512"),
        (lambda: schema.Serve(prefill_buckets=(64, 32)), "serve.prefill_buckets", "32"),
        (lambda: schema.Serve(prefill_buckets=(600,)), "serve.prefill_buckets", "600"),
        (lambda: schema.Data(answer_temperature=-1.0), "data.answer_temperature", "-1"),
        (lambda: schema.Data(synth_top_p=0.0), "data.synth_top_p", "0.0"),
        (lambda: schema.Data(greedy_share=1.5), "data.greedy_share", "1.5"),
        (lambda: schema.Data(max_tokens=128), "data.max_tokens", "128"),
        (lambda: schema.Data(num_synth_prompts=0), "data.num_synth_prompts", "0"),
        (lambda: schema.Capture(dtype="int8"), "capture.dtype", "int8"),
        (lambda: schema.Capture(shard_samples=0), "capture.shard_samples", "0"),
        (lambda: schema.Drafter(draft_vocab=-1), "drafter.draft_vocab", "-1"),
        (lambda: schema.Train(steps=0), "train.steps", "0"),
        (lambda: schema.Train(lr=float("nan")), "train.lr", "nan"),
        (lambda: schema.Train(schedule="linear"), "train.schedule", "linear"),
        (lambda: schema.Train(warmup_fraction=-0.1), "train.warmup_fraction", "-0.1"),
        (lambda: schema.Target(source=""), "target.source", "''"),
        (lambda: schema.Target(dtype="int4"), "target.dtype", "int4"),
        (lambda: schema.TinyTarget(num_kv_heads=3), "target.tiny.num_heads", "4"),
        (lambda: schema.Export(dtype="float16"), "export.dtype", "float16"),
        (lambda: schema.Bench(widths=(2, 4)), "bench.widths", "(2, 4)"),
        (lambda: schema.Bench(prompt_sets=(("a", 3),)), "bench.prompt_sets.a", "3"),
        (lambda: schema.Generate(prompt="  "), "prompt", "'  '"),
        (lambda: schema.BenchDecode(), "drafter", "''"),
        (lambda: schema.Pipeline(seed=-1), "seed", "-1"),
        (lambda: schema.Pipeline(max_load=0.0), "max_load", "0.0"),
        (
            lambda: schema.Pipeline(train=schema.Train(seq_len=319)),
            "train.seq_len",
            "319",
        ),
        (
            lambda: schema.Pipeline(serve=schema.Serve(max_context=200)),
            "serve.max_context",
            "200",
        ),
        (
            lambda: schema.Pipeline(train=schema.Train(eval_prompts=17)),
            "train.eval_prompts",
            "17",
        ),
        (
            lambda: schema.BenchRound(bench=schema.Bench(context=500)),
            "serve.max_context",
            "512",
        ),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(make, field, value):
    with pytest.raises(UserError) as caught:
        make()
    words = str(caught.value)
    assert words.startswith(f"{field}=") and value in words and "\n" not in words
    assert any(w in words for w in ("must", "is empty", "leaves")), words


STATIC = {"topology": "static_tree"}
DYNAMIC = {"topology": "dynamic_tree"}


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("temperature", 1.0, {}),
        ("top_k", 5, {}),
        ("top_p", 0.9, {}),
        ("min_p", 0.1, {}),
        ("slots", 8, {}),
        ("tree_depth", 3, {}),
        ("tree_top_k", 2, {}),
        ("tree_nodes", 8, {}),
        ("tree_parents", (0, 0), {}),
        ("tree_top_k", 2, STATIC),
        ("tree_nodes", 8, STATIC),
        ("tree_depth", 3, STATIC | {"tree_parents": (0, 0)}),
        ("tree_parents", (0, 0), DYNAMIC),
    ],
)
@pytest.mark.parametrize("recipe", [schema.Pipeline, schema.Synthesise])
def test_what_no_training_recipe_reads_of_serve_is_refused(
    recipe, field, value, others
):
    recipe(serve=schema.Serve(**others))
    serve = schema.Serve(**others, **{field: value})
    with pytest.raises(UserError) as caught:
        recipe(serve=serve)
    words = str(caught.value)
    assert words.startswith(f"serve.{field}={value!r} is not read")
    assert words.endswith("leave it out")


def test_what_a_training_recipe_reads_of_serve_is_taken():
    for serve in (
        schema.Serve(slots=1),
        schema.Serve(topology="static_tree", tree_depth=3),
        schema.Serve(topology="static_tree", tree_parents=(0, 0)),
        schema.Serve(topology="dynamic_tree", tree_depth=3, tree_top_k=2, tree_nodes=8),
    ):
        assert schema.Pipeline(serve=serve).serve == serve


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("answer_temperature", 0.3),
        ("answer_top_p", 0.5),
        ("synth_temperature", 0.3),
        ("synth_top_p", 0.5),
        ("max_file_prompts", 9),
    ],
)
def test_what_makes_texts_is_refused_beside_samples(field, value):
    schema.Data(**{field: value})
    schema.Data(samples="s.jsonl", **{field: getattr(schema.Data, field)})
    with pytest.raises(UserError) as caught:
        schema.Data(samples="s.jsonl", **{field: value})
    words = str(caught.value)
    assert words.startswith(f"data.{field}={value!r} makes texts, and data.samples=")
    assert words.endswith("leave it out")


def test_prefill_buckets_are_derived_where_none_are_named():
    serve = schema.Serve(max_context=700, max_new_tokens=100)
    assert serve.prefill_ladder == (32, 64, 128, 256)
    assert dataclasses.replace(serve, prefill_buckets=(64,)).prefill_ladder == (64,)
    odd = schema.Serve(max_context=100, max_new_tokens=8)
    assert odd.prefill_ladder == (32, 64, 100)
    small = schema.Serve(max_context=24, max_new_tokens=8)
    assert small.prefill_ladder == (24,)
