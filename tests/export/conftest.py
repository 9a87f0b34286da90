"""A tiny seeded target and a DFlash drafter for it."""

import dataclasses
import hashlib

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from spec_jax.core.features import Contract
from spec_jax.drafters import dflash
from spec_jax.export import folder, golden
from spec_jax.target import checkpoint, tokenizer
from spec_jax.target.chat import ChatTemplate
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

SPEC = TargetSpec(
    name="tiny",
    family="llama",
    num_layers=5,
    hidden_size=24,
    mlp_size=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=61,
    rope_theta=5000.0,
    eos_ids=(2,),
)

OPTIONS = dflash.Options(
    num_layers=2,
    num_draft=4,
    layer_ids=(1, 3),
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    mlp_size=36,
    mask_id=3,
    rope_theta=7000.0,
    norm_eps=1e-6,
    layer_types=("full_attention", "sliding_attention"),
    sliding_window=9,
    num_anchors=3,
)


def spread(tree, seed):
    """Seeded weights at which every part of the forward matters."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    made = []
    for leaf in leaves:
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        is_norm = leaf.ndim == 1
        made.append(1 + 0.3 * noise if is_norm else noise * 1.5 / leaf.shape[0] ** 0.5)
    return jax.tree.map(jax.numpy.asarray, treedef.unflatten(made))


@pytest.fixture(scope="session")
def target():
    words = ["<unk>", "<s>", "</s>", "<mask>", *"abcdefghijklmnopqrstuvwxyz"]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    )
    rng = np.random.default_rng(1)
    leaves = {
        path: jax.numpy.asarray(
            np.ones(shape, np.float32)
            if path.endswith("norm")
            else rng.standard_normal(shape).astype(np.float32) / 5
        )
        for path, shape in checkpoint.tree_shapes(SPEC).items()
    }
    return Target(
        spec=SPEC,
        params=checkpoint.nest(leaves),
        tokenizer=tokenizer.from_json(backend.to_str()),
        chat_template=ChatTemplate("{{ messages }}"),
        fingerprint=hashlib.sha256(b"tiny").hexdigest(),
    )


@pytest.fixture(scope="session")
def drafter():
    return dflash.make(OPTIONS, SPEC)


@pytest.fixture(scope="session")
def params(drafter):
    return spread(jax.eval_shape(drafter.init, jax.random.key(0)), 5)


@pytest.fixture(scope="session")
def contract(target, drafter):
    return Contract(
        target=SPEC.name,
        layer_ids=drafter.options.layer_ids,
        mask_id=drafter.options.mask_id,
        num_draft=drafter.options.num_draft,
        **folder.target_facts(target),
    )


@pytest.fixture(scope="session")
def probe(target, drafter):
    tokens = np.random.default_rng(2).integers(4, SPEC.vocab_size, 20)
    return golden.probe_from_target(target, tokens, drafter)


@pytest.fixture(scope="session")
def export(drafter, params, contract, probe):
    """Writes the tiny drafter to a path; keywords change what is written."""

    def write(path, **changes):
        fields = {
            "drafter": drafter,
            "params": params,
            "contract": contract,
            "draft_vocab": None,
            "target_spec": SPEC,
            "golden_probe": probe,
        } | changes
        return folder.write_folder(path, **fields)

    return write


@pytest.fixture(scope="session")
def whole(export, tmp_path_factory):
    """One exported folder with a golden round; copy it before changing it."""
    path = tmp_path_factory.mktemp("export") / "drafter"
    export(path)
    return path


@pytest.fixture
def other_target(target):
    """The target with some of its fields replaced."""

    def make(**changes):
        spec = {k: v for k, v in changes.items() if hasattr(SPEC, k)}
        rest = {k: v for k, v in changes.items() if k not in spec}
        return dataclasses.replace(
            target, spec=dataclasses.replace(target.spec, **spec), **rest
        )

    return make
