"""What a chain and trees of several sizes cost to verify, and where it is told."""

import types

import pytest

from configs.bench import tree as tree_recipe
from experiments import bench_decode, bench_round, bench_tree, serving
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from tests.support import served


def config(**changes) -> schema.BenchTree:
    made = tree_recipe.get_config()
    made.update_from_flattened_dict(
        {"drafter": "some", "bench.context": 40, "serve.max_context": 160, **changes}
    )
    return loading.to_recipe(made)


def exported(num_draft=5):
    layout = types.SimpleNamespace(num_draft=num_draft)
    needs = types.SimpleNamespace(layer_ids=(0,))
    drafter = types.SimpleNamespace(layout=layout, needs=needs)
    return types.SimpleNamespace(drafter=drafter, weights_sha256="", notes=())


def fake_times(asked):
    def verify_times(timed, target, params, widths, taps):
        asked.append((timed, widths, taps))
        return {1: 10.0} | {w: 10.0 + w for w in widths}

    return verify_times


def test_a_verify_is_as_wide_as_what_is_verified(monkeypatch):
    asked = []
    monkeypatch.setattr(bench_round, "verify_times", fake_times(asked))
    found = bench_tree.verify_costs(config(), None, None, exported())
    ((timed, widths, taps),) = asked
    assert widths == (6, 9, 17, 33) and taps == (0,)
    assert timed.serve.slots == 1 and timed.bench.context == 40
    assert found == {
        name: {"verify_ms": 10.0 + w, "verify_over_plain": 1 + w / 10}
        for name, w in (("chain", 6), ("8", 9), ("16", 17), ("32", 33))
    }
    wide = config(**{"bench.context": 140})
    with pytest.raises(UserError, match=r"serve\.max_context=160 must be at least"):
        bench_tree.verify_costs(wide, None, None, exported())


def test_every_topology_tells_its_verify(monkeypatch, tmp_path):
    made = exported()
    engine = types.SimpleNamespace(room=150, window=9)
    run = types.SimpleNamespace(
        seconds=2.0, generation=types.SimpleNamespace(emitted=[1, 1])
    )
    for module, name, value in (
        (bench_round, "verify_times", fake_times([])),
        (bench_decode, "prompt_sets", lambda bench: ({"x": []}, [])),
        (serving, "load_serving_target", lambda section: (None, None)),
        (serving, "load_drafter", lambda *args, **options: made),
        (serving, "make_engine", lambda *args, **options: engine),
        (
            bench_tree.comparison,
            "measure",
            lambda *args: ({"accept_by_position": []}, [run], [run]),
        ),
    ):
        monkeypatch.setattr(module, name, value)
    found = bench_tree.main(config(nodes=(8,)), tmp_path)
    assert set(found["x"]) == {"chain", "8"}
    assert found["x"]["8"]["verify_ms"] == 19.0
    assert found["x"]["chain"]["verify_over_plain"] == 1.6


def test_verifies_are_timed_without_a_drafter():
    target = served.make_target()
    timed = schema.BenchRound(
        serve=schema.Serve(slots=1, max_context=64, max_new_tokens=8, temperature=1.0),
        bench=schema.Bench(warmup=0, repeats=1, widths=(1, 3), context=20),
    )
    params = serving.serving_params(target.params)
    ms = bench_round.verify_times(timed, target, params, (3,), (0,))
    assert set(ms) == {1, 3} and min(ms.values()) > 0
