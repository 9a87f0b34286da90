"""Faults of training and serving, planted one by one, and the check that names each.

A fault is planted while one side's program is traced, so that the other side
keeps the right one: "training did this, serving does that".
"""

import copy
import dataclasses
import functools
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from configs import why as recipe
from experiments import run, serving, session, training, why
from spec_jax.config import loading
from spec_jax.core import block_layout, masks
from spec_jax.core.features import Contract
from spec_jax.core.quick import quick_jit
from spec_jax.core.vocab import DraftVocab
from spec_jax.data import capture, files
from spec_jax.drafters import base, blocks, rollouts
from spec_jax.evals import why as checks
from spec_jax.export import folder, golden, storage
from spec_jax.nn import attention, block, layers, recurrent
from spec_jax.parallel import mesh as mesh_lib
from spec_jax.train import state
from tests.support import drafting, served, tiny

SPEC = dataclasses.replace(tiny.spec_of(served.VOCAB), num_layers=4)
ROOM, NEW = 64, 24
BLOCK = {"num_layers": 1, "num_draft": 2, "layer_ids": (0, 2), "mask_id": served.MASK}
KINDS = {
    "eagle": {"num_draft": 2},
    "eagle3": {"num_draft": 3, "ttt_length": 3, "layer_ids": (0, 2)},
    "dflash": BLOCK,
    "dspark": BLOCK | {"markov_rank": 4},
    "dflash2": BLOCK | {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3},
    "lookup": {"num_draft": 2},
}
VOCAB = DraftVocab(tuple(range(1, served.VOCAB, 2)), served.VOCAB)
PROMPT = "w6 w7 w9 w8 w7"

_programs = {}


def jit(function):
    """`quick_jit`, kept by what is compiled: the tests of a kind share programs."""
    key = getattr(function, "func", function), getattr(function, "args", ())
    return _programs.setdefault(key, quick_jit(function))


@functools.cache
def make_target():
    made = served.make_target()
    return dataclasses.replace(made, spec=SPEC, params=tiny.random_params(SPEC, 0))


@functools.cache
def serving_params():
    return serving.serving_params(make_target().params)


def make_drafter(kind, vocab=None):
    options = dict(KINDS[kind])
    if vocab is not None:
        options["draft_vocab_size"] = vocab.size
    return base.load(kind, options, SPEC)


def export(
    path, kind, *, vocab=None, stirred=True, probe=False, weights=None, seed=None
):
    """A random drafter's folder, or one of given weights and their run's seed."""
    target, drafter = make_target(), make_drafter(kind, vocab)
    given = weights is not None
    weights = weights if given else drafter.init(jax.random.key(0))
    if stirred and not given:
        weights = drafting.stir(weights, scale=0.3)
    contract = Contract(
        target=SPEC.name,
        layer_ids=drafter.needs.layer_ids,
        mask_id=getattr(drafter.options, "mask_id", -1),
        num_draft=drafter.layout.num_draft,
        anchor_predicts=drafter.layout.anchor_predicts,
        **folder.target_facts(target),
    )
    if probe:
        text = np.random.default_rng(2).integers(3, served.MASK, 20)
        probe = golden.probe_from_target(target, text, drafter, vocab)
    folder.write_folder(
        path,
        drafter,
        weights,
        contract,
        vocab,
        SPEC,
        golden_probe=probe or None,
        seed=seed,
    )
    return str(path)


def config(path, **changes):
    made = recipe.get_config()
    made.update({"prompt": PROMPT, "drafter": str(path)})
    made.serve.max_context, made.serve.max_new_tokens = ROOM, NEW
    made.update(changes)
    return loading.to_recipe(made)


def examine(path, *, stop=True, target=None, **changes):
    target = target or make_target()
    findings = why.examine(
        config(path, **changes), target, serving_params(), stop=stop, jit=jit
    )
    return list(findings)


def first(findings):
    found = checks.first_difference(findings)
    assert found is not None, "nothing differs"
    return found


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    return functools.cache(
        lambda kind: export(tmp_path_factory.mktemp("why") / kind, kind)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    found: why.Folder
    paths: why.Paths
    runner: checks.Runner
    text: checks.Text

    def logits(self, runner):
        """Visibility, then logits: the drafter's own checks in order."""
        layout = runner.drafter.layout
        positions = why._positions(
            self.paths, self.text, layout.num_draft, layout.window
        )
        yield from checks.visibility_findings(runner, self.text)
        yield from checks.logit_findings(runner, self.text, positions)

    def with_training(self):
        """A runner whose training is traced again, now."""
        runner = copy.copy(self.runner)
        runner._train = quick_jit(
            functools.partial(checks.runner.train_rows, runner.drafter)
        )
        return runner

    def with_serving(self):
        """A runner whose serving is traced again, now."""
        runner = copy.copy(self.runner)
        runner._prefill = quick_jit(lambda *a: runner.drafter.prefill(*a))
        runner._propose = quick_jit(
            functools.partial(checks.runner.proposal, runner.drafter)
        )
        return runner


@functools.cache
def make_paths():
    target = make_target()
    prompt = why.generate.encode_prompt(config("x"), target)
    return why.Paths(target, serving_params(), prompt, NEW, 16, ROOM)


@pytest.fixture(scope="session")
def case_of(folder_of):
    @functools.cache
    def of(kind):
        target, paths = make_target(), make_paths()
        found = why.read(folder_of(kind), target)
        drafter = why.probed(found.exported.drafter, target)
        frozen = serving.frozen_from_params(serving_params(), None)
        runner = checks.Runner(drafter, found.exported.params, frozen, ROOM, jit)
        text = paths.one_by_one.text(drafter.needs.layer_ids).padded(ROOM)
        case = Case(found, paths, runner, text)
        # Every right program is traced before any fault is planted.
        planes = why.feature_findings(paths, found, drafter.needs.layer_ids)
        states = checks.state_findings(runner, text, 30, 16, drafter.layout.window)
        for findings in (case.logits(runner), planes, states):
            assert checks.first_difference(findings) is None
        return case

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_without_fault_agrees(kind, folder_of, monkeypatch):
    if kind in ("eagle3", "dflash", "dflash2"):  # rounds are those of their kin
        monkeypatch.setattr(why, "round_findings", lambda *args: ())
    findings = examine(folder_of(kind), stop=False)
    assert checks.first_difference(findings) is None
    assert checks.sentence(findings).startswith("training and serving agree")
    seen = list(dict.fromkeys(f.check for f in findings))
    assert seen == [c for c in checks.CHECKS if c in seen] and len(seen) >= 7
    skipped = {f.check for f in findings if f.status == checks.SKIPPED}
    assert "features" not in skipped and "draft state" not in skipped
    if kind != "lookup":
        assert any("beyond the text" in f.item for f in findings)


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "dflash2"])
def test_a_drafter_of_some_tokens_agrees(kind, tmp_path, monkeypatch):
    if kind != "dspark":  # one kind's rounds
        monkeypatch.setattr(why, "round_findings", lambda *args: ())
    findings = examine(export(tmp_path / "d", kind, vocab=VOCAB), stop=False)
    assert checks.first_difference(findings) is None
    of = {(f.check, f.item): f.status for f in findings}
    assert of["contract", "vocabulary map d2t/t2d"] == checks.OK
    assert of["logits", "labels"] == of["logits", "position 3"] == checks.OK


# --- contract and template


def edit(path, to, *, contract=None, config=None, tensors=None):
    """A copy of a folder with some of its content changed, whole again."""
    shutil.copytree(path, to)
    for name, changes in (("contract.json", contract), ("config.json", config)):
        if changes:
            content = json.loads((to / name).read_text())
            for key, value in changes.items():
                *parts, last = key.split("/")
                node = content
                for part in parts:
                    node = node[part]
                node[last] = value
            (to / name).write_text(json.dumps(content))
    if tensors:
        weights = safetensors.numpy.load_file(to / storage.WEIGHTS)
        weights |= {name: change(weights[name]) for name, change in tensors.items()}
        safetensors.numpy.save_file(weights, to / storage.WEIGHTS)
    manifest = json.loads((to / storage.MANIFEST).read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = files.sha256_of(str(to / name))
    (to / storage.MANIFEST).write_text(json.dumps(manifest))
    return str(to)


IDS = {"target_layer_ids": [1, 3], "dflash_config/target_layer_ids": [1, 3]}
CONTRACT = {
    "other weights": ("dflash", {"contract": {"target_fingerprint": "x"}}),
    "tokenizer": ("dflash", {"contract": {"tokenizer_hash": "x"}}),
    "template": ("dflash", {"contract": {"template_hash": "x"}}),
    "C2 thinking": ("dflash", {"contract": {"thinking": True}}),
    "A3 layer inputs": ("dflash", {"contract": {"capture_point": "layer_input"}}),
    "A8 teacher point": ("eagle3", {"contract": {"teacher_point": "pre_final_norm"}}),
    "A3 ids of the contract": ("dflash", {"contract": {"layer_ids": [1, 2]}}),
    "A3 ids of the configuration": (
        "dflash",
        {
            "config": {
                "target_layer_ids": [1, 2],
                "dflash_config/target_layer_ids": [1, 2],
            }
        },
    ),
    "A5 fill-in served anchor-first": (
        "dflash",
        {"contract": {"anchor_predicts": True}},
    ),
    "A5 the reverse": ("dspark", {"config": {"sample_from_anchor": False}}),
    "mask token": ("dflash", {"contract": {"mask_id": 5}}),
    "block length": ("dspark", {"contract": {"num_draft": 4}}),
    "A17 feature type": ("dflash", {"contract": {"feature_dtype": "int8"}}),
    "A2 partial rotation": (
        "dflash",
        {"config": {"rope_parameters/partial_rotary_factor": 0.25}},
    ),
    "A2 two bases": ("dflash", {"config": {"rope_theta": 1e6}}),
}
CONTRACT_ITEMS = {
    "other weights": "target_fingerprint",
    "tokenizer": "tokenizer_hash",
    "template": "template_hash",
    "C2 thinking": "thinking",
    "A3 layer inputs": "capture_point",
    "A8 teacher point": "teacher_point",
    "A3 ids of the contract": "layer_ids",
    "A3 ids of the configuration": "layer_ids",
    "A5 fill-in served anchor-first": "anchor_predicts",
    "A5 the reverse": "row convention",
    "mask token": "mask_id",
    "block length": "num_draft",
    "A17 feature type": "feature_dtype",
    "A2 partial rotation": "rope keys",
    "A2 two bases": "rope keys",
}


@pytest.mark.parametrize("fault", CONTRACT)
def test_what_a_contract_says_is_compared(fault, folder_of, tmp_path):
    kind, changes = CONTRACT[fault]
    path = edit(folder_of(kind), tmp_path / "d", **changes)
    found = first(examine(path))
    assert (found.check, found.item) == ("contract", CONTRACT_ITEMS[fault])


def test_a_map_of_target_ids_is_no_map_of_offsets(tmp_path):
    path = export(tmp_path / "whole", "eagle3", vocab=VOCAB)
    assert first_or_none(path) is None
    path = edit(path, tmp_path / "d", tensors={"d2t": lambda d: d + np.arange(len(d))})
    found = first(examine(path))
    assert found.item == "vocabulary map d2t/t2d" and "offsets" in found.detail


def first_or_none(path):
    """The first difference of the contract alone."""
    target = make_target()
    findings = why.contract_findings(config(path), target, why.read(path, target))
    return checks.first_difference(findings)


def test_a_setting_that_no_drafter_has_is_named(folder_of, tmp_path):
    path = edit(folder_of("dflash"), tmp_path / "d", config={"hidden_act": "gelu"})
    found = first(examine(path))
    assert (found.check, found.item) == ("contract", "configuration")
    assert "hidden_act" in found.detail or "gelu" in found.detail


def test_a_contract_that_serving_refuses_is_named(folder_of, tmp_path):
    """Though nothing that is compared one by one differs."""
    path = edit(folder_of("dflash"), tmp_path / "d", contract={"another_field": 1})
    found = first(examine(path))
    assert (found.check, found.item) == ("contract", "configuration")
    assert "another_field" in found.detail


def test_a_prompt_without_its_template_is_another_prompt(folder_of):
    found = first(examine(folder_of("dflash"), raw=True))
    assert (found.check, found.item) == ("template", "special tokens")


def test_thinking_changes_the_prompt(folder_of, tmp_path):
    """The switch is served as the folder's contract says it was not."""
    source = served.TEMPLATE + "{% if enable_thinking %} w6{% endif %}"
    template = dataclasses.replace(make_target().chat_template, source=source)
    target = dataclasses.replace(make_target(), chat_template=template)
    path = edit(
        folder_of("dflash"), tmp_path / "d", contract={"template_hash": template.hash}
    )
    findings = why.examine(
        config(path, thinking=True), target, serving_params(), jit=jit
    )
    wanted = {("contract", "thinking"), ("template", "token ids")}
    early = []
    for f in findings:
        if f.check not in ("contract", "template"):
            break
        early.append(f)
    assert {(f.check, f.item) for f in early if f.status == "differs"} == wanted


# --- visibility and logits


def labels_off(monkeypatch):
    right = block_layout.label_positions
    monkeypatch.setattr(block_layout, "label_positions", lambda *a: right(*a) + 1)


def anchor_visible(monkeypatch):
    monkeypatch.setattr(masks, "before_anchor", lambda key, anchor: key <= anchor)


def by_block_index(monkeypatch):
    right = block.attend_blocks

    def wrong(q, k, v, ck, cv, anchors_BN, *rest):
        later_BN = jnp.concatenate([anchors_BN[:, 1:], anchors_BN[:, -1:]], 1)
        return right(q, k, v, ck, cv, later_BN, *rest)

    monkeypatch.setattr(block, "attend_blocks", wrong)


def causal_block(monkeypatch):
    right = block.block_visible
    monkeypatch.setattr(
        block,
        "block_visible",
        lambda rows, kind: right(rows, dataclasses.replace(kind, is_causal=True)),
    )


def mask_added(monkeypatch):
    """The mask as 0 and 1, added to the scores."""

    def wrong(q, k, v, ck, cv, anchors_BN, positions, kind):
        size_q, size_s = k.shape[2], ck.shape[1]
        seen_BNS = masks.before_anchor(jnp.arange(size_s), anchors_BN[..., None])
        past = jnp.einsum("bnqgpc,bsgc->bngpqs", q, ck)
        past = past + seen_BNS[:, :, None, None, None].astype(q.dtype)
        own = jnp.einsum("bnqgpc,bnkgc->bngpqk", q, k)
        own = own + block.block_visible(size_q, kind).astype(q.dtype)
        mass = jax.nn.softmax(jnp.concatenate([past, own], -1) * q.shape[-1] ** -0.5)
        out = jnp.einsum("bngpqs,bsgc->bnqgpc", mass[..., :size_s], cv)
        return out + jnp.einsum("bngpqk,bnkgc->bnqgpc", mass[..., size_s:], v)

    monkeypatch.setattr(block, "attend_blocks", wrong)


def mask_dropped(monkeypatch):
    """Every row of the cache is seen, whatever the length."""

    def wrong(q, k, v, seen, ck, cv, layer, history_B, **rest):
        everything_B = jnp.full_like(history_B, ck.shape[3])
        return attention.attend(q, k, v, seen, ck, cv, layer, everything_B, **rest)

    monkeypatch.setattr(block, "attention", types.SimpleNamespace(attend=wrong))


def previous_off(monkeypatch):
    right = blocks.before_labels

    def wrong(backbone, batch, anchors_BN, values_BSX):
        if values_BSX.ndim == 2:
            values_BSX = jnp.roll(values_BSX, 1, 1)
        return right(backbone, batch, anchors_BN, values_BSX)

    monkeypatch.setattr(blocks, "before_labels", wrong)


def slot_0_not_supervised(monkeypatch):
    right = blocks.train_rows

    def wrong(*args):
        rows = right(*args)
        return rows.replace(supervised_XM=rows.supervised_XM.at[:, 0].set(False))

    monkeypatch.setattr(blocks, "train_rows", wrong)


def teacher_off(monkeypatch):
    """The tokens are right, the target's rows are those after them."""
    right = blocks.before_labels

    def wrong(backbone, batch, anchors_BN, values_BSX):
        if values_BSX.ndim == 3:
            values_BSX = jnp.roll(values_BSX, -1, 1)
        return right(backbone, batch, anchors_BN, values_BSX)

    monkeypatch.setattr(blocks, "before_labels", wrong)


def teacher_positions_off(monkeypatch):
    right = block_layout.teacher_positions
    monkeypatch.setattr(block_layout, "teacher_positions", lambda *a: right(*a) + 1)


def embedding_unscaled(module, name):
    """The multiplier of the embedding, sqrt(D), is left out."""

    def plant(monkeypatch):
        right = getattr(module, name)
        scale = SPEC.hidden_size**0.5
        monkeypatch.setattr(module, name, lambda *args: right(*args) / scale)

    return plant


def fill_in(monkeypatch):
    """DSpark's rows as DFlash's: the anchor and M masks, which predict."""
    rows = property(lambda layout: layout.num_draft + 1)
    monkeypatch.setattr(block_layout.BlockLayout, "num_query", rows)


def masked_rows(monkeypatch):
    """The blocks that were not sampled see nothing at all."""
    right = block.attend_blocks

    def wrong(q, k, v, ck, cv, anchors_BN, *rest):
        out = right(q, k, v, ck, cv, anchors_BN, *rest)
        seen_BN = (anchors_BN > 0).reshape(*anchors_BN.shape, 1, 1, 1, 1)
        return jnp.where(seen_BN, out, jnp.nan)

    monkeypatch.setattr(block, "attend_blocks", wrong)


def index_over_the_batch(monkeypatch):
    """Positions count on through the padded rows of a batch."""
    right = block_layout.query_positions

    def wrong(layout, anchors_BN):
        row_B = jnp.arange(anchors_BN.shape[0])[:, None, None]
        return right(layout, anchors_BN) + ROOM * row_B

    monkeypatch.setattr(block_layout, "query_positions", wrong)


def last_row_of_padding(monkeypatch):
    monkeypatch.setattr(
        block_layout, "last_rows", lambda length: jnp.full_like(length, ROOM - 1)
    )


def interleaved(monkeypatch):
    """Channels turn in neighbouring pairs."""

    def wrong(x, cos, sin):
        cos, sin = cos[..., None, :], sin[..., None, :]
        even, odd = x[..., ::2], x[..., 1::2]
        pairs = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        return pairs.reshape(x.shape)

    monkeypatch.setattr(layers, "rotate", wrong)


def coarse_frequencies(positions, channels, theta, right):
    exponents = jnp.arange(0, channels, 2, dtype=jnp.float32) / channels
    frequencies = (1.0 / theta**exponents).astype(jnp.bfloat16).astype(jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def no_keys_between_depths(monkeypatch):
    right = recurrent.attend_rollouts

    def wrong(q, prefix_k, prefix_v, own_k, own_v, starts):
        own_k, own_v = own_k[:, :, -1:], own_v[:, :, -1:]
        return right(q, prefix_k, prefix_v, own_k, own_v, starts)

    monkeypatch.setattr(recurrent, "attend_rollouts", wrong)


def unshifted_pairs(monkeypatch):
    monkeypatch.setattr(block_layout, "following_tokens", lambda tokens, _: tokens)


def padding_seen(monkeypatch):
    monkeypatch.setattr(
        masks, "committed", lambda row, length: jnp.ones_like(row == length)
    )


def tables(change):
    """Other rotary tables: `change(positions, channels, theta, right)`."""

    def plant(monkeypatch):
        right = layers.rotary_tables
        monkeypatch.setattr(
            layers, "rotary_tables", lambda p, c, t: change(p, c, t, right)
        )

    return plant


def partial_tables(positions, channels, theta, right):
    cos, sin = right(positions, channels, theta)
    rotated = jnp.arange(cos.shape[-1]) < cos.shape[-1] // 2
    return jnp.where(rotated, cos, 1.0), jnp.where(rotated, sin, 0.0)


def moved_queries(monkeypatch):
    right = block_layout.query_positions
    monkeypatch.setattr(block_layout, "query_positions", lambda *a: right(*a) + 1)


def anchor_first(monkeypatch):
    monkeypatch.setattr(
        block_layout,
        "predicting_rows",
        lambda layout, rows: rows[..., : layout.num_draft, :],
    )


LEAK = ("visibility", "training, features from the anchor on")
LABELS, TEACHER = ("logits", "labels"), ("logits", "teacher rows")
EARLY = ("logits", "position 3")
SHORT = ("logits", "a short row in the batch")
# fault -> kind, side whose program has it, plant, (check, item), word of the detail
PLANTED = {
    "A1 labels one slot off": (
        "dflash",
        "training",
        labels_off,
        LABELS,
        "slot 0",
    ),
    "A1 context up to the anchor": ("dflash", "training", anchor_visible, LEAK, "slot"),
    "A1 visibility by block index": ("dflash", "training", by_block_index, LEAK, ""),
    "A1 causal mask in the block": ("dflash", "training", causal_block, EARLY, ""),
    "A2 partial rotation": ("dflash", "serving", tables(partial_tables), EARLY, ""),
    "A2 another base": (
        "dflash",
        "serving",
        tables(lambda p, c, t, right: right(p, c, t * 50)),
        EARLY,
        "",
    ),
    "A3 teacher row off, blocks": (
        "dspark",
        "training",
        teacher_off,
        TEACHER,
        "slot 0",
    ),
    "A3 teacher row off, rollouts": (
        "eagle3",
        "training",
        teacher_positions_off,
        TEACHER,
        "slot 0",
    ),
    "A5 fill-in rows": ("dspark", "serving", fill_in, EARLY, "slot 0"),
    "A5 anchor-first rows": ("dflash", "serving", anchor_first, EARLY, "slot 0"),
    "A7 previous token shifted, Markov": (
        "dspark",
        "training",
        previous_off,
        EARLY,
        "slot 0",
    ),
    "A7 previous token shifted, selector": (
        "dflash2",
        "training",
        previous_off,
        EARLY,
        "slot 0",
    ),
    "A7 slot 0 never supervised": (
        "dflash",
        "training",
        slot_0_not_supervised,
        LABELS,
        "slot 0 is never supervised",
    ),
    "A9 embedding not scaled, blocks": (
        "dflash",
        "training",
        embedding_unscaled(blocks, "embed_blocks"),
        EARLY,
        "slot 0",
    ),
    "A9 embedding not scaled, rollouts": (
        "eagle",
        "training",
        embedding_unscaled(rollouts, "embed"),
        EARLY,
        "slot 0",
    ),
    "A12 interleaved rotation": ("dflash", "serving", interleaved, EARLY, ""),
    "A12 bfloat16 frequencies": (
        "dflash",
        "serving",
        tables(coarse_frequencies),
        ("logits", "position 15"),  # it grows with the position
        "",
    ),
    "A12 positions clamped": (
        "dflash",
        "serving",
        tables(lambda p, c, t, right: right(jnp.minimum(p, 40), c, t)),
        ("logits", f"position {ROOM - 4}, beyond the text"),
        "",
    ),
    "A12 positions shifted": ("dflash", "serving", moved_queries, EARLY, ""),
    "A13 pairs not shifted": ("eagle3", "training", unshifted_pairs, EARLY, "slot 0"),
    "A14 no keys between depths": (
        "eagle3",
        "training",
        no_keys_between_depths,
        EARLY,
        "slot 2",
    ),
    "A15 mask added as 0 and 1": ("dflash", "training", mask_added, LEAK, ""),
    "A15 mask dropped": (
        "dflash",
        "serving",
        mask_dropped,
        ("visibility", "serving, features from the anchor on"),
        "",
    ),
    "A15 index over the batch": (
        "dflash",
        "training",
        index_over_the_batch,
        SHORT,
        "slot 0",
    ),
    "A15 last row of the padding": (
        "eagle3",
        "serving",
        last_row_of_padding,
        EARLY,
        "slot 0",
    ),
    "A16 masked rows": ("dflash", "training", masked_rows, SHORT, "not finite"),
    "A16 padding seen": (
        "eagle3",
        "training",
        padding_seen,
        ("visibility", "training, padding"),
        "NaN",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault, case_of, monkeypatch):
    kind, side, plant, expected, word = PLANTED[fault]
    case = case_of(kind)
    runner = case.with_training() if side == "training" else case.with_serving()
    plant(monkeypatch)
    found = first(checks.until_first(case.logits(runner)))
    assert (found.check, found.item) == expected
    assert word in found.detail


def test_a_dead_plane_is_named(case_of):
    case = case_of("dflash")
    params = jax.tree.map(lambda leaf: leaf, case.runner.params)
    size_d = SPEC.hidden_size
    params["params"]["fc"] = params["params"]["fc"].at[size_d:].set(0.0)
    runner = copy.copy(case.runner)
    runner.params = params
    found = first(checks.until_first(case.logits(runner)))
    assert found.check == "visibility" and "layer 2" in found.item


def test_rows_written_one_too_far_are_a_state_of_their_own(case_of):
    case = case_of("dflash")
    runner, right = copy.copy(case.runner), case.runner._extend

    def late(params, frozen, state, rows):
        return right(params, frozen, state, rows.replace(start_B=rows.start_B + 1))

    runner._extend = late
    findings = checks.state_findings(runner, case.text, 30, 16, 3)
    found = first(findings)
    assert (found.check, found.item) == ("draft state", "a prefix, then rounds")


# --- features


def features(**change):
    """Changes what `capture` computes: `features`, `teacher` and the extremes."""

    def plant(monkeypatch, paths):
        right = capture.forward_rows

        def wrong(*args):
            made = list(right(*args))
            for index, name in enumerate(("features", "teacher", "", "low", "high")):
                if name in change:
                    made[index] = change[name](made[index], paths)
            return tuple(made)

        monkeypatch.setattr(capture, "forward_rows", wrong)

    return plant


def rounded(dtype):
    return features(features=lambda f, paths: f.astype(dtype).astype(jnp.float32))


def eighth_bits(f, paths):
    """int8, one scale for each row of a plane."""
    scale = jnp.abs(f).max(-1, keepdims=True) / 127
    return jnp.round(f / scale) * scale


def with_plane(rows):
    """Plane 0 from what serving recorded."""

    def change(f, paths):
        values = jnp.asarray(rows(paths))
        return f.at[0, : len(values), 0].set(values)

    return features(features=change)


def without_norm(teacher, paths):
    scale = make_target().params["params"]["final_norm"]
    return teacher / scale * 1.7


# fault -> plant, (item, word of the detail)
FEATURES = {
    "A3 off by one layer": (
        with_plane(lambda p: p.chunks.plane(1)),
        ("layer 0, chunks", "it is the output of layer 1"),
    ),
    "A3 input of the layer": (
        with_plane(
            lambda p: make_target().params["params"]["embed"][p.chunks.tokens_S]
        ),
        ("layer 0, chunks", "it is the embedding"),
    ),
    "A3 off by one token": (
        features(features=lambda f, p: jnp.roll(f, 1, 1)),
        ("layer 0, chunks", "it is the row before"),
    ),
    "A3 teacher row off by one": (
        features(teacher=lambda t, p: jnp.roll(t, 1, 1)),
        ("last hidden, chunks", "it is the row before"),
    ),
    "A4 zeros": (
        features(features=lambda f, p: f.at[:, :, 1].set(0.0)),
        ("layer 2, chunks", "all entries are 0"),
    ),
    "A4 zeros, seen by capture": (
        features(
            features=lambda f, p: f.at[:, :, 1].set(0.0),
            low=lambda x, p: x.at[:, 1].set(0.0),
            high=lambda x, p: x.at[:, 1].set(0.0),
        ),
        ("capture", "layer 2 are all 0"),
    ),
    "A4 one row throughout": (
        features(features=lambda f, p: jnp.broadcast_to(f[:, :1], f.shape)),
        ("layer 0, chunks", "same features"),
    ),
    "A8 before the final norm": (
        features(teacher=without_norm),
        ("last hidden, chunks", "norm ratio"),
    ),
    "A9 scaled": (
        features(features=lambda f, p: f * 4.0),
        ("layer 0, chunks", "cosine does not see"),
    ),
    "A11 one layer only": (
        features(features=lambda f, p: f.at[:, 4:8, 1].add(0.1)),
        ("layer 2, chunks", "position"),
    ),
    "A17 bfloat16": (rounded(jnp.bfloat16), ("layer 0, chunks", "rounded")),
    "A17 int8": (features(features=eighth_bits), ("layer 0, chunks", "rounded")),
    "A17 float8": (rounded(jnp.float8_e4m3fn), ("layer 0, chunks", "rounded")),
}


@pytest.mark.parametrize("fault", FEATURES)
def test_a_wrong_plane_is_named(fault, case_of, monkeypatch):
    plant, (item, word) = FEATURES[fault]
    case, paths = case_of("dflash"), make_paths()
    assert paths.chunks is not None
    plant(monkeypatch, paths)
    findings = why.feature_findings(paths, case.found, (0, 2))
    found = first(checks.until_first(findings))
    assert (found.check, found.item) == ("features", item)
    assert word in found.detail


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda r: {"next_tokens_S": np.roll(r.next_tokens_S, 1)}, "follows"),
        (lambda r: {"tokens_S": np.roll(r.tokens_S, 1)}, "told token"),
    ],
)
def test_rows_told_wrongly_are_named(change, word, case_of):
    right = make_paths()
    paths = copy.copy(right)
    paths.__dict__["chunks"] = dataclasses.replace(right.chunks, **change(right.chunks))
    findings = why.feature_findings(paths, case_of("dflash").found, (0, 2))
    found = first(checks.until_first(findings))
    assert found.item == "rows told, chunks" and word in found.detail


# --- weights, and whole runs


def test_weights_as_initialised_are_named(tmp_path):
    path = export(tmp_path / "d", "dflash", stirred=False)
    found = first(examine(path))
    assert (found.check, found.item) == ("weights", "norms")
    assert "exactly 1" in found.detail


@pytest.fixture(scope="module")
def head_unmoved():
    """EAGLE-3 as a run of seed 5 starts it, then all but its head moved."""
    mesh = mesh_lib.make_mesh()
    start = state.init_state(make_drafter("eagle3"), optax.sgd(0.1), 5, mesh).params
    moved = drafting.stir(start, scale=0.3)
    moved["params"]["head"] = np.asarray(start["params"]["head"])
    return moved


def test_a_weight_that_training_never_moved_is_named(head_unmoved, tmp_path):
    path = export(tmp_path / "d", "eagle3", weights=head_unmoved, seed=5)
    findings = examine(path)
    assert checks.sentence(findings) == (
        "first difference: weights, initial values: head: still as initialised"
    )


@pytest.mark.parametrize(
    "seed, status, word",
    [
        (5, "differs", "head"),
        (0, "ok", "none is left"),
        (None, "not applicable", "seed"),
    ],
)
def test_first_weights_are_those_of_the_folders_own_seed(
    seed, status, word, head_unmoved, tmp_path
):
    path = export(tmp_path / "d", "eagle3", weights=head_unmoved, seed=seed)
    found = why.read(path, make_target())
    assert folder.seed_in(found.config) == seed
    findings = why.weight_findings(found, found.exported.drafter)
    of = {f.item: f for f in findings}
    assert of["norms"].status == checks.OK
    assert of["initial values"].status == status
    assert word in of["initial values"].detail


def test_a_run_exports_its_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "write_folder", lambda *args, **given: given)
    monkeypatch.setattr(golden, "probe_from_target", lambda *args: None)
    made = types.SimpleNamespace(train=[types.SimpleNamespace(tokens=[1])])
    prepared = types.SimpleNamespace(made=made, target=make_target(), vocab=None)
    cfg = types.SimpleNamespace(seed=5, export=types.SimpleNamespace(dtype="float32"))
    given = training.export(prepared, cfg, None, {}, None, tmp_path)
    assert given["seed"] == 5


def test_weights_that_are_not_finite_are_named(folder_of, tmp_path):
    def spoil(tensor):
        tensor = tensor.copy()
        tensor.flat[0] = np.nan
        return tensor

    path = edit(folder_of("dflash"), tmp_path / "d", tensors={"fc.weight": spoil})
    found = first(examine(path))
    assert (found.check, found.item) == ("weights", "finite")
    assert "fc.weight" in found.detail


def test_a_rotary_base_changed_after_export_is_in_the_golden_round(tmp_path):
    path = export(tmp_path / "whole", "dflash", probe=True)
    theta = {"rope_theta": 77.0, "rope_parameters/rope_theta": 77.0}
    path = edit(path, tmp_path / "d", config=theta)
    found = why.read(path, make_target())
    frozen = serving.frozen_from_params(serving_params(), None)
    finding = why.golden_finding(found, frozen)
    assert finding.status == "differs" and "golden round differs" in finding.detail


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command line over the tiny target: code and report of a folder."""
    monkeypatch.setattr(
        serving,
        "load_serving_target",
        lambda section: (make_target(), serving_params()),
    )
    monkeypatch.setattr(session, "prepare_jax", lambda precision: None)
    monkeypatch.setattr(why, "examine", functools.partial(why.examine, jit=jit))

    def call(path, *words):
        code = run.main(
            [
                "configs/why.py",
                f"--config.drafter={path}",
                f"--config.prompt={PROMPT}",
                f"--config.serve.max_context={ROOM}",
                f"--config.serve.max_new_tokens={NEW}",
                f"--workdir={tmp_path / 'work'}",
                *words,
            ]
        )
        report = tmp_path / "work" / "report.json"
        return code, json.loads(report.read_text()) if report.exists() else None

    return call


def test_the_command_agrees_and_reports(command, folder_of, capsys):
    code, report = command(folder_of("dspark"))
    assert code == 0 and report["metrics"]["agrees"] is True
    rows = report["metrics"]["checks"]
    assert {row.split(":")[0] for row in rows} == set(checks.CHECKS)
    assert "training and serving agree" in capsys.readouterr().out


def test_the_command_names_the_first_difference(command, folder_of, tmp_path, capsys):
    path = edit(
        folder_of("dspark"), tmp_path / "d", contract={"template_hash": "another"}
    )
    code, report = command(path)
    said = capsys.readouterr().out.rstrip().split("\n")[-1]
    assert code == 1
    assert said.startswith("first difference: contract, template_hash: is 'another'")
    assert report["metrics"]["first_difference"] == said
    later = report["metrics"]["checks"]["logits: position 3"]
    assert later["result"] == "ok"  # the rest is looked at all the same


@pytest.mark.parametrize(
    "path, words, said",
    [
        ("/nowhere/at/all", (), "is not there"),
        (None, ("--config.serve.max_new_tokens=4",), "the checks need"),
        (None, ("--config.prompt=w6 <end>",), "special token"),
        (None, ("--config.thinking=True",), "no thinking switch"),
        ("", (), "drafter='' is empty"),
    ],
)
def test_wrong_input_is_one_sentence(command, folder_of, path, words, said, capsys):
    path = folder_of("dspark") if path is None else path
    assert command(path, *words) == (2, None)
    assert said in capsys.readouterr().err
