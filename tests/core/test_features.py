"""The contract's file form: every field is said, and none is made up."""

import dataclasses
import json

import pytest

from spec_jax.core.errors import UserError
from spec_jax.core.features import Contract, contract_from_json

CONTRACT = Contract("t", "f", 17, 8, 4, (0, 1), "tok", "tmpl", mask_id=3, num_draft=5)
FIELDS = [f.name for f in dataclasses.fields(Contract)]


def test_a_contract_comes_back():
    assert contract_from_json(CONTRACT.to_json(), "x") == CONTRACT


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_refused(name):
    fields = json.loads(CONTRACT.to_json())
    del fields[name]
    with pytest.raises(UserError, match=f"^x lacks .* field {name}; make .* again"):
        contract_from_json(json.dumps(fields), "x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "x is not a readable contract"),
        ("[]", "x is not a readable contract .no json object."),
        ('{"layer_ids": 3}', "x is not a readable contract"),
        (CONTRACT.to_json()[:-2] + ',\n "dtype": "f4"}', "x has dtype='f4', which is"),
    ],
)
def test_what_is_no_contract_is_refused(text, says):
    with pytest.raises(UserError, match=f"^{says}"):
        contract_from_json(text, "x")
