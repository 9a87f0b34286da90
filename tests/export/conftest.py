"""A tiny seeded target, and a drafter of every kind for it."""

import dataclasses
import functools
import hashlib
import importlib

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from spec_jax.core.features import Contract
from spec_jax.core.vocab import DraftVocab
from spec_jax.drafters import base, dflash
from spec_jax.export import folder, golden, shared
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

HEADS = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 10,
    "mlp_size": 36,
    "rope_theta": 7000.0,
    "norm_eps": 1e-6,
}
BLOCK = {
    "num_layers": 2,
    "num_draft": 4,
    "layer_ids": (1, 3),
    "mask_id": 3,
    "layer_types": ("full_attention", "sliding_attention"),
    "sliding_window": 9,
    "num_anchors": 3,
    **HEADS,
}
OPTIONS = dflash.Options(**BLOCK)
EAGLE = {"num_draft": 4, "num_starts": 3, **HEADS}
EAGLE3 = EAGLE | {"layer_ids": (0, 1, 3), "ttt_length": 3}
DSPARK = BLOCK | {"markov_rank": 6}
DFLASH2 = BLOCK | {
    "conv_kernel_size": 2,
    "conv_group_size": 6,
    "selector_rank": 6,
    "selector_top_k": 5,
}

# kind -> drafter and options.
KINDS = {
    "eagle": ("eagle", EAGLE),
    "eagle without bias": ("eagle", EAGLE | {"bias": False}),
    "eagle3": ("eagle3", EAGLE3),
    "eagle3, five normed layers": (
        "eagle3",
        EAGLE3 | {"layer_ids": (0, 1, 2, 3), "fc_norm": True},
    ),
    "dflash": ("dflash", BLOCK),
    "dspark": ("dspark", DSPARK),
    "dspark, gated": ("dspark", DSPARK | {"markov_head_type": "gated"}),
    "dspark, rnn": ("dspark", DSPARK | {"markov_head_type": "rnn"}),
    "dspark, narrow confidence": (
        "dspark",
        DSPARK | {"confidence_with_markov": False},
    ),
    "dspark, no confidence": ("dspark", DSPARK | {"enable_confidence_head": False}),
    "dflash2": ("dflash2", DFLASH2),
    "dflash2, scaled": (
        "dflash2",
        DFLASH2 | {"output_multiplier": 0.5, "conv_kernel_size": 3},
    ),
    "dflash2, capped": ("dflash2", DFLASH2 | {"final_logit_softcapping": 3.0}),
    "lookup": ("lookup", {"num_draft": 4}),
}
VOCAB = DraftVocab(tuple(range(2, 61, 4)), SPEC.vocab_size)
TEXT = np.random.default_rng(2).integers(4, SPEC.vocab_size, 20)


def spread(tree, seed):
    """Seeded weights at which every part of the forward matters."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    made = []
    for leaf in leaves:
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        is_norm = leaf.ndim == 1
        width = leaf.shape[0] if leaf.ndim else 1
        made.append(1 + 0.3 * noise if is_norm else noise * 1.5 / width**0.5)
    return jax.tree.map(jax.numpy.asarray, treedef.unflatten(made))


def read(path, target, **options):
    """As `folder.read_folder`, with the tests' anchors: programs are shared."""
    return folder.read_folder(path, target, **{"num_anchors": 3} | options)


@dataclasses.dataclass(frozen=True)
class Made:
    """A drafter of one kind and what its export needs."""

    drafter: object
    params: dict
    contract: Contract
    vocab: DraftVocab | None
    probe: golden.Probe | None

    def write(self, path, **changes):
        """Writes it to a path; keywords change what is written."""
        fields = {
            "drafter": self.drafter,
            "params": self.params,
            "contract": self.contract,
            "draft_vocab": self.vocab,
            "target_spec": SPEC,
            "golden_probe": self.probe,
        } | changes
        return folder.write_folder(path, **fields)


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
def make(target):
    """(kind of `KINDS`, vocabulary) -> `Made`."""

    @functools.cache
    def of(kind, vocab=None):
        name, options = KINDS[kind]
        if vocab is not None and name not in ("eagle", "dflash", "lookup"):
            options = options | {"draft_vocab_size": vocab.size}
        options_type = importlib.import_module(f"spec_jax.drafters.{name}").Options
        # The loader's own record: programs compiled for it serve both sides.
        resolved = base.load(name, options_type(**options), SPEC).options
        drafter = shared.make_drafter(name, resolved, SPEC)
        contract = Contract(
            target=SPEC.name,
            layer_ids=drafter.needs.layer_ids,
            mask_id=getattr(drafter.options, "mask_id", -1),
            num_draft=drafter.layout.num_draft,
            anchor_predicts=drafter.layout.anchor_predicts,
            **folder.target_facts(target),
        )
        params = spread(jax.eval_shape(drafter.init, jax.random.key(0)), 5)
        probe = golden.probe_from_target(target, TEXT, drafter, vocab)
        return Made(drafter, params, contract, vocab, probe)

    return of


@pytest.fixture(scope="session")
def drafter(make):
    return make("dflash").drafter


@pytest.fixture(scope="session")
def params(make):
    return make("dflash").params


@pytest.fixture(scope="session")
def contract(make):
    return make("dflash").contract


@pytest.fixture(scope="session")
def probe(make):
    return make("dflash").probe


@pytest.fixture(scope="session")
def export(make):
    """Writes the tiny DFlash drafter to a path; keywords change what is written."""
    return make("dflash").write


@pytest.fixture(scope="session")
def whole_of(make, tmp_path_factory):
    """kind -> an exported folder with a golden round; copy it before changing it."""

    @functools.cache
    def of(kind, vocab=None):
        path = tmp_path_factory.mktemp("export") / "drafter"
        make(kind, vocab).write(path)
        return path

    return of


@pytest.fixture(scope="session")
def whole(whole_of):
    """The DFlash drafter's folder."""
    return whole_of("dflash")


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
