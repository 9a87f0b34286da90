"""A tiny target with words, a chat template and an exported DFlash drafter."""

import jax
import tokenizers
from tokenizers import models, pre_tokenizers

from spec_jax.core.features import Contract
from spec_jax.export import folder
from spec_jax.target import tokenizer
from spec_jax.target.chat import ChatTemplate
from spec_jax.target.loading import Target
from tests.support import drafting, tiny

VOCAB = 23  # of `tiny.spec_of`
PAD, START, END, MASK = 0, 1, 2, VOCAB - 1
WORDS = (
    "<pad>",
    "<start>",
    "<end>",
    "user",
    "assistant",
    "system",
    *(f"w{i}" for i in range(6, VOCAB - 1)),
    "<mask>",
)
TEMPLATE = (
    "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <end>{% endfor %}"
    "{% if add_generation_prompt %}<start> assistant{% endif %}"
)


def make_tokenizer() -> tokenizer.Tokenizer:
    """One token per word; the marks are special, the mask is a word."""
    vocab = {word: i for i, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<start>", "<end>"])
    return tokenizer.from_json(backend.to_str(), eos=END)


def make_target(seed=0, **changes) -> Target:
    """Random weights; `changes` go to the spec (`eos_ids=...`)."""
    spec = tiny.spec_of(VOCAB, **changes)
    return Target(
        spec=spec,
        params=tiny.random_params(spec, seed),
        tokenizer=make_tokenizer(),
        chat_template=ChatTemplate(TEMPLATE, eos_token="<end>"),
        fingerprint=f"tiny-{seed}",
    )


def export_drafter(path, target: Target, num_draft=3, seed=0) -> str:
    """A random DFlash drafter for `target`, as a folder."""
    drafter = tiny.dflash(target.spec, num_draft)
    params = drafting.stir(drafter.init(jax.random.key(seed)), scale=0.3)
    contract = Contract(
        target=target.spec.name,
        layer_ids=drafter.needs.layer_ids,
        mask_id=drafter.options.mask_id,
        num_draft=num_draft,
        **folder.target_facts(target),
    )
    return folder.write_folder(path, drafter, params, contract, None, target.spec).path
