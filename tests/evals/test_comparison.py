"""When greedy texts count as identical, and under which names a report says so."""

import contextlib
import types

import pytest

from spec_jax.decode.request import Settings
from spec_jax.evals import comparison
from spec_jax.evals.identity import Identity


@pytest.mark.parametrize(
    ("identical", "with_ties", "prompts", "holds"),
    [
        (True, 0, 40, True),
        (True, 1, 1, True),  # one always may
        (True, 2, 40, False),
        (True, 2, 200, True),
        (True, 3, 200, False),
        (False, 0, 40, False),
    ],
)
def test_near_ties_on_few_prompts_keep_the_claim(
    monkeypatch, identical, with_ties, prompts, holds
):
    verdict = Identity(identical, 7, with_ties, "" if identical else "prompt 0: ...")
    run = types.SimpleNamespace(generation=types.SimpleNamespace(tokens=[1]))
    decoded = [run] * prompts
    monkeypatch.setattr(
        comparison.decoding, "decode_pairs", lambda *args: (decoded, decoded)
    )
    monkeypatch.setattr(
        comparison.decoding, "summary", lambda *args: {"prompts": len(args[0])}
    )
    monkeypatch.setattr(comparison.identity, "compare", lambda *args: verdict)
    monkeypatch.setattr(
        comparison.compiles,
        "counting",
        lambda: contextlib.nullcontext(types.SimpleNamespace(compiles=0)),
    )
    engine = types.SimpleNamespace(
        window=4, spec=None, weights=types.SimpleNamespace(target=None)
    )
    asked = [[1]] * prompts
    found, _, _ = comparison.measure(engine, engine, asked, Settings())
    assert found == {
        "prompts": prompts,
        "compiles_after_warmup": 0,
        "greedy_identical": holds,
        "near_ties": 7,
        "near_tie_share": with_ties / prompts,
        "first_tie": verdict.first_tie,
        "first_difference": verdict.first_difference,
    }
    sampled, _, _ = comparison.measure(engine, engine, asked, Settings(temperature=1.0))
    assert "greedy_identical" not in sampled
