"""What made a folder: recorded first, compared afterwards."""

import json

import pytest

from spec_jax.core.errors import UserError
from spec_jax.data import provenance

FACTS = {"seed": 0, "data.greedy_share": 0.5, "data.synth_openings": ("a", "b")}


def test_the_first_value_that_differs_is_named(tmp_path):
    folder = str(tmp_path)
    provenance.claim(folder, FACTS, started=False)
    provenance.claim(folder, FACTS, started=True)  # tuples come back as lists
    other = {**FACTS, "data.greedy_share": 1.0, "data.synth_openings": ()}
    with pytest.raises(UserError, match=r"data\.greedy_share=0\.5 .* has 1\.0; set"):
        provenance.claim(folder, other, started=True)
    with pytest.raises(UserError, match=r"data\.system=None"):
        provenance.claim(folder, {**FACTS, "data.system": "x"}, started=False)
    assert json.loads((tmp_path / provenance.NAME).read_text())["seed"] == 0


def test_samples_without_a_record_are_reused_aloud(tmp_path):
    said = []
    provenance.claim(str(tmp_path), FACTS, started=True, say=said.append)
    assert len(said) == 1 and not (tmp_path / provenance.NAME).exists()


def test_a_torn_record_is_a_sentence(tmp_path):
    (tmp_path / provenance.NAME).write_text('{"seed"')
    with pytest.raises(UserError, match=r"made_by\.json cannot be read"):
        provenance.claim(str(tmp_path), FACTS, started=True)
