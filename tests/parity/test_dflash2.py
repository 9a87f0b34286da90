"""A seeded DFlash 2 drafter in the public `dflash` package and in ours."""

import numpy as np
import pytest

from spec_jax.export import folder, golden

pytestmark = pytest.mark.parity

ANCHORS = (1, 9, 30)
TEMPERATURE = 0.7
INSIDE = {
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": 12,
    "selector_top_k": 6,
}
KINDS = {
    "full": ({}, {}),
    "sliding, both ways, three taps": (
        {
            "layer_types": ["sliding_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 5,
            "is_causal": False,
        },
        {"conv_kernel_size": 3},
    ),
    "scaled and capped": (
        {},
        {"output_multiplier": 0.5, "final_logit_softcapping": 4.0},
    ),
}


def their_walk(public, kit, pair, drafter, text, anchor, monkeypatch):
    """Tokens, candidates and q of the greedy walk, by the public package."""
    torch = public.torch
    # A walk that samples returns q; drawing the likeliest makes it the greedy one.
    monkeypatch.setattr(public.dflash, "_sample_probs", lambda p: p.argmax(-1))
    states = kit.their_states(pair, text)
    context = public.dflash.extract_context_feature(states, drafter.target_layer_ids)
    block = torch.full((1, drafter.block_size), drafter.mask_token_id)
    block[0, 0] = int(text[anchor])
    with torch.no_grad():
        rows = drafter(
            target_hidden=context[:, :anchor],
            noise_embedding=pair.theirs.get_input_embeddings()(block),
            position_ids=torch.arange(anchor + drafter.block_size)[None],
        )[:, 1:]
        logits = drafter.compute_logits(rows, pair.theirs.lm_head)
        tokens, candidates, q = drafter.propose(
            rows, block[:, 0], pair.theirs.lm_head, TEMPERATURE
        )
    return [x[0].numpy() for x in (tokens, candidates, q, logits)]


def compare(public, kit, pair, theirs, exported, text, monkeypatch):
    """The same lattice, the same walk, q to 2e-4 and its logits to 2e-4."""
    probe = kit.make_probe(pair, exported.drafter.needs, text, ANCHORS)
    made = golden.serve(exported.drafter, exported.params, probe)
    for index, anchor in enumerate(ANCHORS):
        tokens, candidates, q, _ = their_walk(
            public, kit, pair, theirs, text, anchor, monkeypatch
        )
        assert made.tokens_KM[index].tolist() == tokens.tolist()
        for row, logits_V in enumerate(made.logits_KMU[index]):
            ours = np.flatnonzero(np.isfinite(logits_V))
            assert ours.tolist() == sorted(candidates[row].tolist())
            scores = logits_V[candidates[row]]
            # q fixes the scores up to a number for the whole row.
            log_q = np.log(np.maximum(q[row], 1e-30)) * TEMPERATURE
            sure = q[row] > 1e-6
            moved = (scores - scores.max() - (log_q - log_q.max()))[sure]
            assert np.abs(moved).max() <= 2e-4
            ours_q = np.exp((scores - scores.max()) / TEMPERATURE)
            assert np.abs(ours_q / ours_q.sum() - q[row]).max() <= 2e-4


def compare_unary(public, kit, pair, theirs, exported, text, monkeypatch):
    """Unary logits of all tokens, with the selector off, to 2e-4."""
    import dataclasses

    from spec_jax.drafters import dflash2

    options = dataclasses.replace(exported.drafter.options, use_selector=False)
    plain = dflash2.make(options, pair.ours.spec)
    probe = kit.make_probe(pair, plain.needs, text, ANCHORS)
    served_KMV = golden.serving_logits(plain, exported.params, probe)
    for index, anchor in enumerate(ANCHORS):
        logits = their_walk(public, kit, pair, theirs, text, anchor, monkeypatch)[3]
        assert np.abs(served_KMV[index] - logits).max() <= 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_their_folder_in_ours(kind, public, kit, pair, text, tmp_path, monkeypatch):
    """`save_pretrained` of the public class, read and run by ours."""
    changes, inside = KINDS[kind]
    theirs = kit.make_drafter(
        41, public.dflash.DFlash2DraftModel, {**INSIDE, **inside}, **changes
    )
    theirs.save_pretrained(tmp_path / "drafter")
    exported = folder.read_folder(tmp_path / "drafter", pair.ours, num_anchors=1)
    assert exported.drafter.name == "dflash2"
    compare(public, kit, pair, theirs, exported, text, monkeypatch)
    compare_unary(public, kit, pair, theirs, exported, text, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_our_folder_in_theirs(kind, public, kit, pair, text, tmp_path, monkeypatch):
    """Our export, opened by the public class: every tensor lands, walks agree."""
    changes, inside = KINDS[kind]
    options = {
        "num_layers": 2,
        "num_draft": 5,
        "layer_ids": (0, 2),
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 10,
        "mlp_size": 56,
        "mask_id": 5,
        "rope_theta": 3000.0,
        "norm_eps": 1e-6,
        "layer_types": tuple(changes.get("layer_types", ())),
        "sliding_window": changes.get("sliding_window"),
        "is_causal": changes.get("is_causal"),
        "num_anchors": 1,
        **INSIDE,
        **inside,
    }
    path = tmp_path / "drafter"
    drafter = kit.make_export(pair, "dflash2", options, text, path)
    theirs, loaded = public.dflash.DFlash2DraftModel.from_pretrained(
        path, dtype=public.torch.float32, output_loading_info=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loaded[what], (what, loaded[what])
    exported = folder.read_folder(path, pair.ours, num_anchors=1)
    assert exported.drafter.options == drafter.options
    compare(public, kit, pair, theirs.eval(), exported, text, monkeypatch)
    compare_unary(public, kit, pair, theirs.eval(), exported, text, monkeypatch)
