"""Accepted lengths, round by round: the public package's loop and our engine."""

import numpy as np
import pytest

from spec_jax.decode.engine import Engine
from spec_jax.decode.forward import Weights
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.request import Settings
from spec_jax.drafters.frozen import frozen_for
from spec_jax.export import folder
from spec_jax.target.loading import load_target

pytestmark = pytest.mark.parity

PROMPT_LENGTHS = (3, 8, 17, 30)
NEW_TOKENS = 48

# Drafter configuration, slots and prefill buckets: one request at a time, and
# prompts filled in chunks while another request decodes.
KINDS = {
    "full, one slot": ({}, 1, (32,)),
    "sliding and full, chunks": (
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
        2,
        (16,),
    ),
}


def opposite_heads(public, model):
    """Makes two tokens win, each in half of the hidden space.

    So an untrained drafter is right about half of the time, and accepted lengths
    vary from none to the whole block.
    """
    with public.torch.no_grad():
        head = model.lm_head.weight
        head[40] = 40 * head[40]
        head[41] = -head[40]
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind, public, kit, tmp_path, monkeypatch):
    """Equal rounds and equal tokens, up to the last block.

    Near the cap the public loop shrinks its last block; rounds from there on are
    not compared.
    """
    torch = public.torch
    changes, slots, buckets = KINDS[kind]
    monkeypatch.setattr(public.dflash, "_cuda_time", lambda: 0.0)
    their_target = opposite_heads(public, kit.make_target("llama", 7))
    kit.save_target(their_target, tmp_path / "target")
    theirs = kit.make_drafter(31, **changes)
    theirs.save_pretrained(tmp_path / "drafter")

    target = load_target(str(tmp_path / "target"), cache_dir=str(tmp_path / "cache"))
    exported = folder.read_folder(tmp_path / "drafter", target)
    engine = Engine(
        target.spec,
        Weights(target.params, exported.params, frozen_for(target)),
        EngineOptions(slots=slots, max_context=128, prefill_buckets=buckets),
        exported.drafter,
        exported.contract.mask_id,
    )
    rng = np.random.default_rng(3)
    prompts = [rng.integers(4, 40, size).tolist() for size in PROMPT_LENGTHS]
    settings = Settings(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    block_size = theirs.block_size
    seen = []
    for prompt, ours in zip(prompts, engine.generate(prompts, settings), strict=True):
        stats = public.dflash.dflash_generate(
            theirs,
            target=their_target,
            input_ids=torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            stop_token_ids=None,
            return_stats=True,
        )
        # A whole block fits while its rows stay inside the output.
        starts = np.cumsum([0, *stats.acceptance_lengths])[:-1]
        whole = int((starts + block_size <= NEW_TOKENS).sum())
        assert whole >= 5
        expected = stats.acceptance_lengths[:whole]
        assert ours.emitted[:whole] == expected
        emitted = 1 + sum(expected)
        tokens = stats.output_ids[0, len(prompt) :].tolist()
        assert ours.tokens[:emitted] == tokens[:emitted]
        seen += expected
    # Rejections at once, whole blocks, and lengths between.
    assert {1, block_size} < set(seen)
