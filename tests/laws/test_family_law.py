"""The sampled law of running rounds, for every drafter of the family.

The experiment of the law (`experiments.bench_law`) with few samples: rounds of
thousands of requests go on from the state that an engine left after a history, and
the joint law of their next tokens is compared with the target's exact one.
`tests/experiments/test_bench_law.py` finds the two classic mistakes by the same
test of twice the samples, with p-values below 1e-20.
"""

import pytest

from configs.bench import law as recipe
from experiments import law_cases, law_rounds, law_worlds
from spec_jax.config import loading, schema
from spec_jax.decode import plan
from spec_jax.evals.laws import Setting

SUBJECTS = {subject.name: subject for subject in law_worlds.SUBJECTS}
# Each a law q of its own: corrected, sparse, of a reduced vocabulary, one-hot.
QUICK = ("dspark", "dflash2", "eagle3", "lookup")
SLOW = ("dflash", "eagle", "eagle, static tree", "eagle3, dynamic tree")
# The target's law is peaked: warm enough, filters leave 27, 8 and 13 ways to go on.
SETTINGS = (Setting(), Setting(temperature=1.4, top_k=2), Setting(1.5, top_p=0.95))
# p-values of 24 tests with fixed seeds; chance alone fails one in 400 choices.
LEVEL = 1e-4


def config() -> schema.BenchLaw:
    """27 ways to go on from three tokens; two drafts a chain."""
    made = recipe.get_config()
    made.update_from_flattened_dict(
        {
            "samples": 6_000,
            "chunk": 2_000,
            "vocab": 3,
            "tokens": 3,
            "serve.num_draft": 2,
        }
    )
    return loading.to_recipe(made)


def test_every_drafter_is_there():
    named = {SUBJECTS[name].drafter for name in (*QUICK, *SLOW)}
    assert named == {subject.drafter for subject in law_worlds.SUBJECTS}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, plan.STATIC) for name in QUICK),
        # Its plan follows what its own drafts say: they are not drawn.
        ("lookup", plan.COMPACT),
        *(pytest.param(name, plan.STATIC, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_rounds_have_the_targets_joint_law(name, mode):
    cfg, subject = config(), SUBJECTS[name]
    world = law_worlds.make_world(cfg, subject)
    program = law_rounds.make_program(cfg, world, mode)
    cases = []
    for index, setting in enumerate(SETTINGS):
        seed = 100_000 * (index + 1)
        case = law_cases.run_case(cfg, world, mode, program, setting, seed)
        assert case["samples"] == cfg.samples
        assert case["impossible"] == 0, setting
        assert case["dof"] > 3, setting
        assert case["p"] > LEVEL, setting
        cases.append(case)
    # Every way to end was among them.
    assert law_cases.never_seen(cases) == []
