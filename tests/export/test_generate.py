"""A folder of every kind streams: `--config.drafter=<folder>`, exactly as written."""

import jax
import pytest

from configs import generate as recipe
from experiments import generate, serving, session
from spec_jax.config import loading
from spec_jax.core.features import Contract
from spec_jax.drafters import base
from spec_jax.export import folder
from tests.support import drafting, served

BLOCK = {"num_layers": 1, "num_draft": 2, "layer_ids": (0,), "mask_id": served.MASK}
KINDS = {
    "eagle": {"num_draft": 2},
    "eagle3": {"num_draft": 2, "layer_ids": (0,)},
    "dspark": BLOCK | {"markov_rank": 4},
    "dflash2": BLOCK | {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3},
    "lookup": {"num_draft": 2},
}


# Compiling an engine takes seconds: one kind always, the others in `make test-all`.
SOME = [
    name if name == "eagle3" else pytest.param(name, marks=pytest.mark.slow)
    for name in KINDS
]


@pytest.mark.parametrize("name", SOME)
def test_generate_with_a_folder_of_every_kind(name, tmp_path, monkeypatch, capsys):
    """The command's own way: the text is the one that plain decoding gives."""
    target = served.make_target()
    params = serving.serving_params(target.params)
    monkeypatch.setattr(
        serving, "load_serving_target", lambda section: (target, params)
    )
    monkeypatch.setattr(session, "prepare_jax", lambda precision: None)
    drafter = base.load(name, dict(KINDS[name]), target.spec)
    contract = Contract(
        target=target.spec.name,
        layer_ids=drafter.needs.layer_ids,
        mask_id=getattr(drafter.options, "mask_id", -1),
        num_draft=drafter.layout.num_draft,
        anchor_predicts=drafter.layout.anchor_predicts,
        **folder.target_facts(target),
    )
    weights = drafting.stir(drafter.init(jax.random.key(0)), scale=0.3)
    path = tmp_path / name
    folder.write_folder(path, drafter, weights, contract, None, target.spec)

    def text_of(drafter):
        made = recipe.get_config()
        made.update({"prompt": "w6 w7 w6 w7", "drafter": drafter})
        made.serve.max_context = 64
        made.serve.prefill_buckets = (16,)
        made.serve.max_new_tokens = 10
        made.serve.slots = 1
        generate.main(loading.to_recipe(made), tmp_path)
        return capsys.readouterr().out.split("\n[")

    with_drafter, summary = text_of(str(path))
    assert with_drafter == text_of("")[0]
    assert "accept length" in summary
