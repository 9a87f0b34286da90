"""A seeded DFlash drafter in the public `dflash` package and in ours."""

import dataclasses

import jax
import numpy as np
import pytest

from spec_jax.core.batch import Batch
from spec_jax.core.features import Contract
from spec_jax.drafters import dflash
from spec_jax.drafters.frozen import frozen_for
from spec_jax.export import folder, golden

pytestmark = pytest.mark.parity

ANCHORS = (1, 9, 30)

KINDS = {
    "full": {},
    "sliding and full": {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "sliding, not causal": {
        "layer_types": ["sliding_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 4,
        "is_causal": False,
    },
    "full, causal": {"is_causal": True},
}


def their_features(public, pair, text):
    with public.torch.no_grad():
        return pair.theirs(
            public.torch.tensor(text[None].astype(np.int64)),
            output_hidden_states=True,
        ).hidden_states


def their_rows(public, pair, drafter, text, anchor):
    """Hidden rows and logits of the block at `anchor`, by the public package."""
    torch = public.torch
    context = public.dflash.extract_context_feature(
        their_features(public, pair, text), drafter.target_layer_ids
    )[:, :anchor]
    block = torch.full((1, drafter.block_size), drafter.mask_token_id)
    block[0, 0] = int(text[anchor])
    with torch.no_grad():
        rows = drafter(
            target_hidden=context,
            noise_embedding=pair.theirs.get_input_embeddings()(block),
            position_ids=torch.arange(anchor + drafter.block_size)[None],
        )[:, 1:]
        logits = drafter.compute_logits(rows, pair.theirs.lm_head)
    return rows[0].numpy(), logits[0].numpy()


def our_rows(pair, exported, probe, anchor):
    """Hidden rows of the block at `anchor`, on the training path."""
    supervised = np.zeros((1, len(probe.tokens_S)), bool)
    supervised[0, anchor : anchor + 2] = True
    out = exported.drafter.train_outputs(
        exported.params,
        probe.frozen,
        Batch(
            tokens_BS=probe.tokens_S[None],
            supervised_BS=supervised,
            length_B=np.asarray([len(probe.tokens_S)], np.int32),
            features_BSLD=probe.features_SLD[None],
        ),
        jax.random.key(0),
    )
    return np.asarray(out.hidden_XMD)[0]


def compare(public, pair, theirs, exported, text):
    """Rows to 2e-4 of their RMS and logits to 2e-4 (times their RMS above one)."""
    frozen = frozen_for(pair.ours)
    hidden = their_features(public, pair, text)
    features_SLD = np.stack(
        [hidden[i + 1][0].numpy() for i in exported.drafter.needs.layer_ids], 1
    )
    probe = golden.Probe(text, features_SLD, hidden[-1][0].numpy(), ANCHORS, frozen)
    served_KMV = golden.serving_logits(exported.drafter, exported.params, probe)
    for index, anchor in enumerate(ANCHORS):
        rows, logits = their_rows(public, pair, theirs, text, anchor)
        ours = our_rows(pair, exported, probe, anchor)
        rms = np.sqrt((rows**2).mean(-1, keepdims=True))
        assert (np.abs(ours - rows) / rms).max() <= 2e-4
        assert np.abs(served_KMV[index] - logits).max() <= 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_their_folder_in_ours(kind, public, kit, pair, text, tmp_path):
    """`save_pretrained` of the public class, read and run by ours."""
    theirs = kit.make_drafter(23, **KINDS[kind])
    theirs.save_pretrained(tmp_path / "drafter")
    exported = folder.read_folder(tmp_path / "drafter", pair.ours, num_anchors=1)
    assert any("contract.json" in note for note in exported.notes)
    assert exported.drafter.layout.block_size == theirs.block_size
    compare(public, pair, theirs, exported, text)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("full", "bfloat16")]
)
def test_our_folder_in_theirs(kind, dtype, public, kit, pair, text, tmp_path):
    """Our export, opened by the public class: every tensor lands, rows agree."""
    changes = KINDS[kind]
    sliding = "sliding_window" in changes
    options = dflash.Options(
        num_layers=2,
        num_draft=5,
        layer_ids=(0, 2),
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        mlp_size=56,
        mask_id=5,
        rope_theta=3000.0,
        norm_eps=1e-6,
        layer_types=tuple(changes.get("layer_types", ())),
        sliding_window=changes["sliding_window"] if sliding else None,
        is_causal=changes.get("is_causal"),
        num_anchors=1,
    )
    drafter = dflash.make(options, pair.ours.spec)
    rng = np.random.default_rng(4)
    params = jax.tree.map(
        lambda leaf: (
            1 + 0.3 * rng.standard_normal(leaf.shape)
            if leaf.ndim == 1
            else rng.standard_normal(leaf.shape) * 1.5 / leaf.shape[0] ** 0.5
        ).astype(np.float32),
        drafter.init(jax.random.key(0)),
    )
    contract = Contract(
        target="seeded",
        layer_ids=options.layer_ids,
        mask_id=options.mask_id,
        num_draft=options.num_draft,
        **folder.target_facts(pair.ours),
    )
    probe = golden.probe_from_target(pair.ours, text, drafter)
    written = folder.write_folder(
        tmp_path / "drafter",
        drafter,
        params,
        contract,
        None,
        pair.ours.spec,
        dtype=dtype,
        golden_probe=probe,
    )
    assert written.parity_max_abs <= 1e-3
    theirs, loaded = public.dflash.DFlashDraftModel.from_pretrained(
        tmp_path / "drafter", dtype=public.torch.float32, output_loading_info=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loaded[what], (what, loaded[what])
    assert theirs.block_size == options.num_draft + 1
    assert theirs.mask_token_id == options.mask_id
    exported = folder.read_folder(tmp_path / "drafter", pair.ours, num_anchors=1)
    assert exported.notes == ()
    assert exported.drafter.options == drafter.options
    compare(public, pair, theirs.eval(), exported, text)


def test_there_and_back(public, kit, pair, tmp_path):
    """Their folder, exported by ours, holds their tensors bit for bit."""
    theirs = kit.make_drafter(29)
    theirs.save_pretrained(tmp_path / "theirs")
    exported = folder.read_folder(tmp_path / "theirs", pair.ours)
    folder.write_folder(
        tmp_path / "ours",
        exported.drafter,
        exported.params,
        dataclasses.replace(exported.contract, target="seeded"),
        exported.draft_vocab,
        pair.ours.spec,
    )
    back = public.dflash.DFlashDraftModel.from_pretrained(
        tmp_path / "ours", dtype=public.torch.float32
    )
    ours = back.state_dict()
    assert set(ours) == set(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert public.torch.equal(ours[name], tensor), name
