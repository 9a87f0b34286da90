"""A drafter's part that may be left out is exported if it helps, and this is told.

A DFlash 2 whose block always drafts the target's commonest token, beside a selector
that knows what the target says after each token: planted as it is, or reversed.
"""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    clock,
    optional_part,
    pipeline,
    preparing,
    serving,
    synthesis,
    training,
)
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import samples
from tests.support import served, tiny

HELD = ((1, 3, 7), (1, 3, 9, 12), (1, 3, 15))
BLOCK = {"num_layers": 1, "num_draft": 3, "layer_ids": (0,), "mask_id": served.MASK}
SELECTOR = {"selector_rank": served.VOCAB, "selector_top_k": served.VOCAB}


def recipe(name="dflash2", **options):
    extra = SELECTOR if name == "dflash2" else {}
    options = {**BLOCK, **extra, **options}
    return schema.Pipeline(
        drafter=schema.Drafter(name, tuple(options.items())),
        data=schema.Data(max_new_tokens=16, max_tokens=48),
        train=schema.Train(seq_len=48, eval_prompts=3, eval_new_tokens=16),
        serve=schema.Serve(max_context=64, max_new_tokens=16, prefill_buckets=(16,)),
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    target = served.make_target()
    text = samples.make_sample([1, 3, 6], [9, 10, 11, 12, 13, 9, 8, 7, 6, 2], "a")
    made = synthesis.Synthesis((text,), HELD, ("a",) * len(HELD), 0.0, 10, 0)
    folder = tmp_path_factory.mktemp("data")
    return preparing.Prepared(
        target, serving.serving_params(target.params), made, None, 1.0, folder
    )


def planted(target, params, sign):
    """Weights whose selector adds `sign` times the target's own bigram."""
    tree = jax.tree.map(np.array, params["params"])
    lent = target.params["params"]
    for name in ("out", "down"):  # the block leaves its mask row as it is
        tree["layers_0"][name] *= 0
    row_D = np.array(lent["embed"][served.MASK])
    row_D /= np.sqrt((row_D**2).mean())
    bigram_VV, _ = tiny.full_forward(
        target.spec, target.params, jnp.arange(served.VOCAB)[:, None]
    )
    bigram_VV = np.asarray(bigram_VV[:, 0])
    common = np.bincount(bigram_VV.argmax(-1)).argmax()
    wanted_D = np.asarray(lent["head"][:, common])
    tree["norm"] = wanted_D / row_D
    spread_D = wanted_D / (wanted_D**2).sum()
    tree["selector"] = {
        "hidden_projection": np.repeat(spread_D[:, None], served.VOCAB, 1),
        "predecessor_codebook": np.eye(served.VOCAB, dtype=np.float32),
        "successor_codebook": 9 * sign * bigram_VV.T,
    }
    return {"params": jax.tree.map(jnp.asarray, tree)}


@pytest.fixture
def make(prepared, monkeypatch, tmp_path):
    """`make(recipe, sign)`: a drafter whose training is done, and its folder's."""
    said = []
    monkeypatch.setattr(training, "say", said.append)
    monkeypatch.setattr(preparing, "capture", lambda *args: None)

    def run(cfg, sign=1):
        def trained(cfg, prepared, drafter, *rest):
            params = drafter.init(jax.random.key(0))
            if drafter.name == "dflash2":
                params = planted(prepared.target, params, sign)
            return types.SimpleNamespace(params=params)

        monkeypatch.setattr(training, "train", trained)
        seconds = clock.Clock(tmp_path / clock.NAME)
        made = training.make_drafter(cfg, prepared, tmp_path, seconds)
        read = serving.load_drafter(str(tmp_path / "export"), prepared.target)
        return made, read.drafter.options, said

    return run


def test_a_selector_that_helps_is_exported(make):
    made, options, said = make(recipe())
    assert options.use_selector and made.drafter.options.use_selector
    assert made.choice.lift > 0.3 and made.choice.without > 1
    assert made.choice.words in said
    assert "drafter.options.use_selector=False (lift +" in made.choice.words
    assert made.choice.words.endswith("exported with True")
    assert made.choice.metrics()["exported"] is True


def test_a_selector_that_does_harm_is_left_out_aloud_and_again(make, tmp_path):
    """The second call finds training and export done, as a resumed run does."""
    made, options, said = make(recipe(), sign=-1)
    assert not options.use_selector and not made.drafter.options.use_selector
    assert made.choice.lift < 0
    assert made.choice.words in said
    assert made.choice.words.endswith("exported with False")
    # The folder's golden round and parity are those of the one that is served.
    assert made.parity_max_abs < 1e-3
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["spec_jax"]["use_selector"] is False
    found = made.choice.metrics()
    assert found["option"] == "use_selector" and found["exported"] is False
    assert found["lift"] == found["accept_length"] - found["accept_length_without"]
    again, options, _ = make(recipe(), sign=-1)
    assert not options.use_selector and again.choice.metrics() == found


@pytest.mark.parametrize("cfg", [recipe(use_selector=False), recipe("dflash")])
def test_a_drafter_without_a_choice_is_not_served_for_one(make, monkeypatch, cfg):
    """DFlash has none, and a recipe that leaves the selector out has made it."""
    monkeypatch.setattr(training, "validation", None)
    made, options, _ = make(cfg)
    assert made.choice is None
    assert getattr(options, "use_selector", False) is False


def test_a_part_that_cannot_be_left_out_is_refused_before_training(prepared):
    cfg, target = recipe(), prepared.target
    drafter = serving.new_drafter(cfg, target)
    training.check_early(cfg, target, drafter)
    for part, words in (
        ("nope", "optional_part='nope' must be a boolean .* it is None"),
        ("num_layers", "optional_part='num_layers' must be a boolean .* it is 1"),
        ("qk_norm", "drafter.options.qk_norm changes the weights"),
    ):
        odd = dataclasses.replace(drafter, optional_part=part)
        with pytest.raises(UserError, match=words):
            training.check_early(cfg, target, odd)


def test_a_part_that_adds_nothing_is_left_out(prepared):
    drafter, spec = serving.new_drafter(recipe(), prepared.target), prepared.target.spec
    asked = []

    def same(one):
        asked.append(one.options.use_selector)
        return 1.5

    choice = optional_part.choose(drafter, spec, same)
    assert asked == [True, False] and choice.lift == 0
    without = dataclasses.replace(drafter.options, use_selector=False)
    assert choice.drafter.options == without
    # Left out, it is nobody's choice any more, and can still be put in.
    assert optional_part.choose(choice.drafter, spec, same) is None
    assert optional_part.other_of(choice.drafter, spec).options == drafter.options


def test_a_report_has_the_choice_where_there_was_one(prepared, monkeypatch, tmp_path):
    cfg, target = recipe(), prepared.target
    drafter = serving.new_drafter(cfg, target)
    choice = optional_part.choose(drafter, target.spec, lambda one: 1.5)
    made = training.Made(choice.drafter, {}, None, 0.0, choice)
    for module, name, value in (
        (serving, "load_serving_target", lambda *args: (target, prepared.params)),
        (preparing, "prepare", lambda *args: prepared),
        (pipeline, "evaluate", lambda *args: ({"accept_length": 1.5}, {})),
        (pipeline, "cost_split", lambda *args: ({}, {})),
    ):
        monkeypatch.setattr(module, name, value)
    for kept in (made, dataclasses.replace(made, choice=None)):
        monkeypatch.setattr(training, "make_drafter", lambda *args, kept=kept: kept)
        found = pipeline.main(cfg, tmp_path)
        assert found.get("optional_part") == (kept.choice and choice.metrics())
