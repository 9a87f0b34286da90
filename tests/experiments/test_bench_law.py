"""The law's test itself: exact laws, merging, budgets, and what it must find."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.bench import law as recipe
from experiments import bench_law, law_rounds, law_worlds, planted_biases, random_target
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder
from spec_jax.decode import budget, plan
from spec_jax.evals import laws
from spec_jax.evals.laws import Setting
from tests.support import laws as oracle

BY_NAME = {subject.name: subject for subject in bench_law.SUBJECTS}
BIASES = {bias.name: bias for bias in planted_biases.BIASES}


def config(**changes) -> schema.BenchLaw:
    made = recipe.get_config()
    made.update_from_flattened_dict(
        {
            "samples": 12_000,
            "chunk": 4_000,
            "vocab": 3,
            "tokens": 3,
            "lag": 1,
            "serve.num_draft": 2,
            **changes,
        }
    )
    return loading.to_recipe(made)


@pytest.mark.parametrize("setting", bench_law.SETTINGS)
def test_token_law_is_the_oracles(setting):
    rows = np.random.default_rng(0).normal(size=(20, 6)) * 2
    values = dataclasses.astuple(setting)
    expected = [oracle.law(row, False, *values) for row in rows]
    np.testing.assert_allclose(laws.token_law(rows, setting), expected, atol=1e-12)


def test_ways_are_those_of_the_target():
    """One token after the other, each text run alone."""
    spec = random_target.spec_of(3)
    params = random_target.params_of(spec, 0)
    ways, logits = laws.continuations(spec, params, (1, 0, 2), 2)
    joint = laws.joint_law(ways, logits, Setting(0.8))
    assert joint.shape == (9,) and joint.sum() == pytest.approx(1)
    for (first, second), p in zip(ways.tolist(), joint, strict=True):
        row = laws.plain_logits(spec, params, jnp.asarray([[1, 0, 2, first]]))[0]
        each = [oracle.softmax(row[at], 0.8) for at in (2, 3)]
        assert p == pytest.approx(each[0][first] * each[1][second], rel=1e-4)
    assert laws.cell_of(ways, 3).tolist() == list(range(9))


def test_chi_square_is_uniform_under_the_law_and_small_off_it():
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.full(60, 0.5))
    found = [laws.chi_square(rng.multinomial(5000, p), p) for _ in range(400)]
    values = np.asarray([t.p for t in found])
    # 400 uniforms: one standard error of the mean is 0.014, of a tenth 0.015.
    assert abs(values.mean() - 0.5) < 0.06
    assert abs((values < 0.1).mean() - 0.1) < 0.06
    assert len({t.dof for t in found}) == 1  # cells merge by the law alone
    off = 0.9 * p + 0.1 / 60
    assert laws.chi_square(rng.multinomial(5000, off), p).p < 1e-6


def test_rare_cells_merge():
    p = np.asarray([0.5, 0.3, 0.196, 0.002, 0.001, 0.001])
    counts = np.asarray([500, 300, 196, 2, 1, 1])
    # The rest is expected four times: it joins the rarest of the others.
    assert laws.chi_square(counts, p).dof == 2
    # Twice as many samples: the three rare ones are a cell together.
    assert laws.chi_square(2 * counts, p).dof == 3
    assert laws.chi_square(10 * counts, p).dof == 5
    assert laws.chi_square(counts, p).p == pytest.approx(1)


def test_the_impossible_fails_whatever_the_rest():
    test = laws.chi_square(np.asarray([600, 399, 1]), np.asarray([0.6, 0.4, 0.0]))
    assert test.p == 0 and test.impossible == 1
    assert laws.bonferroni([0.5, test.p]) == 0
    assert laws.bonferroni([0.2, 0.004]) == pytest.approx(0.008)
    assert laws.chi_square(np.asarray([10, 0]), np.asarray([1.0, 0.0])).p == 1


def test_budgets_are_the_hosts_own():
    """`best_budget` against `budget.choose`, and what is planted before it."""
    requests, num_draft = 2, 3
    rows = tuple(range(requests, requests * (num_draft + 1) + 1))
    options = plan.PlanOptions(mode=plan.COMPACT)
    terms = budget.Terms(
        Ladder(((requests, rows),)),
        num_draft,
        options,
        law_rounds.cost_table(requests, num_draft),
    )
    rng = np.random.default_rng(2)
    random = np.cumprod(rng.random((60, requests, num_draft)), -1)
    random[::7, :, 1:] = 1e-9  # below survival_eps
    rule = jax.jit(lambda survival: law_rounds.best_budget(survival, options))

    def both(survival):
        survival = survival.astype(np.float32)
        mine = int(rule(jnp.asarray(survival)))
        assert mine == budget.choose(terms, requests, list(survival)).budget
        return mine

    made = {both(survival) for survival in random}
    assert 0 in made and len(made) > 3
    planted = law_rounds.planted_budgets(2, 14, requests * num_draft)
    assert planted[0].tolist() == [*range(7), *range(7)]
    assert sorted(set(planted[1].tolist())) == list(range(7))
    assert (planted[0] != planted[1]).all()


@pytest.fixture(scope="module")
def capped():
    """DSpark under planned windows, once as it is."""
    cfg = config()
    world = bench_law.make_world(cfg, BY_NAME["dspark"])
    program = bench_law.make_program(cfg, world, plan.CAP_ACCEPT)
    case = bench_law.run_case(cfg, world, plan.CAP_ACCEPT, program, Setting(), 5)
    return cfg, world, case


@pytest.mark.slow
def test_a_planned_case_has_the_law_and_every_class(capped):
    cfg, world, case = capped
    assert len(world.text) >= len(law_worlds.PROMPT) + 1 + cfg.history
    assert case["p"] > 1e-3 and case["dof"] > 15
    assert case["samples"] == cfg.samples and case["missing"] == ""
    assert set(case["classes"]) == {
        "rejected at 0",
        "rejected at 1",
        "cut at 0",
        "cut at 1",
        "bonus after 2",
    }
    assert sum(case["classes"].values()) == cfg.samples * cfg.tokens
    assert case["budgets"] == 2 * 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["q without the Markov correction", "q without the selector"]
)
def test_a_planted_bias_is_found_and_leaves_nothing_behind(name):
    cfg, bias = config(), BIASES[name]
    originals = [getattr(module, name) for module, name, _ in bias.patches]
    row = bench_law.measure_bias(cfg, bias, 6)
    assert row["p"] < 1e-6
    assert [getattr(module, name) for module, name, _ in bias.patches] == originals


def test_a_way_to_end_that_no_setting_showed_is_named():
    def case(mode, missing):
        return {"drafter": "x", "mode": mode, "missing": missing}

    cases = [
        case("static", "rejected at 1, bonus after 2"),
        case("static", "bonus after 2"),
        case("compact", ""),
        case("compact", "cut at 1"),
    ]
    assert bench_law.never_seen(cases) == ["x, static: bonus after 2"]
    assert bench_law.never_seen(cases[2:]) == []


def test_every_bias_names_a_case_that_is_run():
    assert len({b.name for b in planted_biases.BIASES}) == len(planted_biases.BIASES)
    for bias in planted_biases.BIASES:
        assert bias.mode in BY_NAME[bias.subject].modes


@pytest.mark.slow
def test_the_report(tmp_path):
    cfg = config(drafters=("lookup",), modes=("static",), settings=1, planted=False)
    found = bench_law.main(cfg, tmp_path)
    (case,) = found["cases"]
    assert case["drafter"] == "lookup" and case["mode"] == plan.STATIC
    assert found["worst_p"] == case["p"] > bench_law.LEVEL
    assert found["passed"] and found["num_cases"] == 1 and found["planted"] == []
    assert {"topology", "temperature", "top_k", "top_p", "min_p", "chi2"} <= set(case)


def test_a_name_that_is_no_case_is_refused():
    with pytest.raises(UserError, match="drafters='eagel' begins no case's name"):
        bench_law.chosen_subjects(config(drafters=("eagel",)))
    with pytest.raises(UserError, match=r"modes='ragged' must be one of"):
        config(modes=("ragged",))
    assert len(bench_law.chosen_subjects(config(drafters=("eagle",)))) == 4
