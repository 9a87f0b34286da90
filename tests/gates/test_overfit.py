"""Overfitting through the whole path: what was learned must be what is served.

Answers of the target -> capture -> store -> pipeline -> training loop ->
exported folder -> read back -> engine. A row, a position, a layer or a label
that is off by one anywhere on the way costs acceptance here, where the drafter
has seen every token that it has to draft.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments import serving, tiny_target
from spec_jax import objectives
from spec_jax.config import schema
from spec_jax.core.features import Contract, FeatureSchema
from spec_jax.data import capture, samples, tiny_corpus
from spec_jax.data.pipeline import Pipeline, PipelineOptions
from spec_jax.data.store import open_store
from spec_jax.decode.request import Settings
from spec_jax.drafters import base
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import decoding, identity
from spec_jax.export import folder as export_folder
from spec_jax.export import golden
from spec_jax.objectives.records import ObjectiveOptions
from spec_jax.target import chat
from spec_jax.train import loop
from spec_jax.train.optimiser import OptimiserOptions
from tests.support import served, tiny


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a gate learns and serves.

    Attributes:
      options: the drafter's.
      steps: of training.
      batch: conversations per step.
      lr: peak learning rate.
      seq_len: tokens a conversation may have; also the capture bucket.
      serve: shapes of the engines, and the answers' length.
    """

    options: dict
    steps: int
    batch: int
    lr: float
    seq_len: int
    serve: schema.Serve


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a gate looks at: answers in the order of the prompts."""

    params: object
    settings: Settings
    plain: list
    engine: object
    ours: list
    parity_max_abs: float
    golden_max_abs: float


def learn_and_serve(target, prompts, plan, folder, held_out=()) -> Outcome:
    """Trains a drafter on the target's greedy answers and serves the prompts.

    With held-out prompts, it is those that are served.
    """
    params = serving.serving_params(target.params)
    target = dataclasses.replace(target, params=params)
    many = plan.serve.slots
    settings = Settings(max_new_tokens=plan.serve.max_new_tokens)
    engine = serving.make_engine(target, params, plan.serve, chunks_per_tick=many)
    plain = engine.generate(prompts, settings)
    made = [
        samples.make_sample(prompt, g.tokens, f"gate/{i}")
        for i, (prompt, g) in enumerate(zip(prompts, plain, strict=True))
    ]
    if held_out:
        prompts, plain = held_out, engine.generate(held_out, settings)
    drafter = base.load("dflash", plan.options, target.spec)
    contract = Contract(
        target=target.spec.name,
        layer_ids=drafter.needs.layer_ids,
        mask_id=drafter.options.mask_id,
        num_draft=drafter.layout.num_draft,
        **export_folder.target_facts(target),
    )
    stored_under = dataclasses.replace(contract, num_draft=0)
    features = FeatureSchema(drafter.needs.layer_ids, target.spec.hidden_size)
    store = str(folder / "store")
    capture.capture(
        target, made, features, store, stored_under, buckets=(plan.seq_len,)
    )
    objective = ObjectiveOptions()
    result = loop.train(
        drafter,
        frozen_from_params(params),
        functools.partial(objectives.loss, options=objective, terms=drafter.terms),
        OptimiserOptions(lr=plan.lr, total_steps=plan.steps),
        lambda: Pipeline(
            open_store(store, stored_under), PipelineOptions(plan.batch, plan.seq_len)
        ),
        folder / "train",
        loop.LoopOptions(steps=plan.steps, log_every=100),
        recipe_hash="gate",
        contract=contract,
    )
    written = export_folder.write_folder(
        folder / "export",
        drafter,
        result.params,
        contract,
        None,
        target.spec,
        golden_probe=golden.probe_from_target(target, made[0].tokens, drafter),
    )
    exported = serving.load_drafter(written.path, target)
    engine = serving.make_engine(
        target, params, plan.serve, exported, chunks_per_tick=many, plain=False
    )
    return Outcome(
        params=params,
        settings=settings,
        plain=plain,
        engine=engine,
        ours=engine.generate(prompts, settings),
        parity_max_abs=written.parity_max_abs,
        golden_max_abs=exported.golden_max_abs,
    )


def assert_same_text(target, prompts, outcome):
    same = identity.compare(
        target.spec,
        outcome.params,
        outcome.engine,
        prompts,
        [g.tokens for g in outcome.plain],
        [g.tokens for g in outcome.ours],
        outcome.settings,
    )
    assert same.identical, same.first_difference
    assert max(outcome.parity_max_abs, outcome.golden_max_abs) <= golden.TOLERANCE


# ---- One conversation.

NUM_DRAFT = 7
SEED = 12  # of 40 tried: one of the texts that neither loop nor say "<mask>"
ONE = Plan(
    options={
        "num_layers": 1,
        "num_draft": NUM_DRAFT,
        "mask_id": served.MASK,
        "layer_ids": (0, 2),
        "num_anchors": 24,
    },
    steps=300,
    batch=1,
    lr=6e-3,
    seq_len=96,
    # 64 tokens by rounds: eight whole rounds and no remainder.
    serve=schema.Serve(
        slots=1, max_context=128, prefill_buckets=(8,), max_new_tokens=65
    ),
)


def random_target(seed):
    """Four random layers, strong enough that the text does not run in a circle."""
    spec = dataclasses.replace(
        tiny.spec_of(served.VOCAB),
        num_layers=4,
        hidden_size=32,
        mlp_size=48,
        num_heads=4,
        num_kv_heads=2,
    )
    params = tiny.random_params(spec, seed)

    def louder(path, leaf):
        return leaf * {"out": 8.0, "down": 4.0}.get(path[-1].key, 1.0)

    return dataclasses.replace(
        served.make_target(),
        spec=spec,
        params=jax.tree_util.tree_map_with_path(louder, params),
        fingerprint=f"random-{seed}",
    )


def test_one_conversation_is_served_at_the_ceiling(tmp_path):
    target = random_target(SEED)
    prompt = np.random.default_rng(SEED).integers(3, served.MASK, 19).tolist()
    outcome = learn_and_serve(target, [prompt], ONE, tmp_path)
    assert_same_text(target, [prompt], outcome)
    (plain,), (ours,) = outcome.plain, outcome.ours
    # Worth learning: no circle, and no table of what follows what.
    assert not samples.is_looping(plain.tokens)
    assert samples.distinct_ngrams(plain.tokens) > 0.7

    by_rounds = len(ours.tokens) - 1
    assert by_rounds == sum(ours.emitted) == 64
    ceiling = by_rounds / -(-by_rounds // (NUM_DRAFT + 1))
    assert ceiling == 8.0
    assert ours.accept_length >= 0.98 * ceiling, ours.accepted

    # The text was learned from the features, not from its positions alone.
    draft = decoding.with_shuffled_features(outcome.engine.weights.draft)
    outcome.engine.weights = dataclasses.replace(outcome.engine.weights, draft=draft)
    (control,) = outcome.engine.generate([prompt], outcome.settings)
    assert control.tokens == plain.tokens
    assert control.accept_length < 0.5 * ceiling, control.accepted


# ---- Sixty-four samples of a target that has learned a language.

COUNT = 64


def questions(target, count):
    """Distinct questions of the tiny language, as prompts."""
    rng = np.random.default_rng(64)
    found = {}
    while len(found) < count:
        question = tiny_corpus.make_conversation(rng)[:1]
        ids = chat.encode_chat(target.tokenizer, target.chat_template, question)
        found.setdefault(tuple(ids))
    return [list(ids) for ids in found]


def plan_for(target, steps):
    """A drafter of two layers for the tiny target."""
    return Plan(
        options={
            "num_layers": 2,
            "num_draft": NUM_DRAFT,
            "mask_id": target.tokenizer.id_of(tiny_target.MASK),
            "num_anchors": 16,
        },
        steps=steps,
        batch=8,
        lr=3e-3,
        seq_len=96,
        serve=schema.Serve(
            slots=16, max_context=128, prefill_buckets=(48,), max_new_tokens=48
        ),
    )


@pytest.mark.slow
def test_64_samples_are_served_above_three(tmp_path):
    target = tiny_target.make_tiny_target(schema.TinyTarget(), 0, None)
    plan = plan_for(target, steps=1500)
    prompts = questions(target, COUNT)
    outcome = learn_and_serve(target, prompts, plan, tmp_path)
    assert_same_text(target, prompts, outcome)
    # Loops flatter every drafter; nearly no answer is one.
    kept = [g for g in outcome.ours if not samples.is_looping(g.tokens)]
    assert len(kept) >= 0.9 * COUNT
    accept_length = decoding.accept_length(kept)
    by_position = decoding.accept_by_position(kept, NUM_DRAFT)
    assert accept_length > 3.0, by_position


# ---- Text that was never trained on.

HELD_OUT = 32


@pytest.mark.slow
def test_the_first_draft_holds_on_text_that_was_held_out(tmp_path):
    """After 1,000 steps two first drafts of five are right, or it memorises."""
    target = tiny_target.make_tiny_target(schema.TinyTarget(), 0, None)
    prompts = questions(target, 512 + HELD_OUT)
    unseen, prompts = prompts[:HELD_OUT], prompts[HELD_OUT:]
    plan = plan_for(target, steps=1000)
    outcome = learn_and_serve(target, prompts, plan, tmp_path, unseen)
    assert_same_text(target, unseen, outcome)
    kept = [g for g in outcome.ours if not samples.is_looping(g.tokens)]
    assert len(kept) >= 0.8 * HELD_OUT
    by_position = decoding.accept_by_position(kept, NUM_DRAFT)
    assert by_position[0] >= 0.4, by_position
