"""A folder that only this package reads says so, when it is written and inside."""

import json

import pytest

from spec_jax.export import storage
from spec_jax.export.kinds import dspark

from .conftest import VOCAB, read


def said_in(path, name=storage.CONFIG):
    return json.loads((path / name).read_text()).get("spec_jax", {}).get("note")


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("dspark", "markov_head.markov_w2.weight"),
        ("dflash2", "candidate_selector.successor_codebook"),
    ],
)
def test_tables_of_a_reduced_vocabulary_are_said(kind, table, make, target, tmp_path):
    made = make(kind, VOCAB)
    written = made.write(tmp_path / "few", golden_probe=None)
    (note,) = [n for n in written.notes if "may be drafted" in n]
    for words in (table, "has 15 rows", "all 61 of the target's", "draft_vocab=0"):
        assert words in note
    assert ("speculators" in note) == (kind == "dspark")
    assert said_in(tmp_path / "few") == note
    if kind == "dspark":
        assert said_in(tmp_path / "few", dspark.TRAINER_CONFIG) == note
    got = read(tmp_path / "few", target, run_golden=False)
    assert got.draft_vocab == VOCAB
    assert not any("may be drafted" in n for n in got.notes)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "dflash2"])
def test_what_the_public_readers_read_is_not_said(kind, make, tmp_path):
    """The whole vocabulary; and a head of its own, or none, with its map."""
    vocab = VOCAB if kind in ("eagle3", "dflash") else None
    written = make(kind, vocab).write(tmp_path / "out", golden_probe=None)
    assert not any("may be drafted" in n for n in written.notes)
    assert said_in(tmp_path / "out") is None
