"""Cost tables: planted costs come back, and errors are what they are called."""

import numpy as np
import pytest

from spec_jax.core.calibration import CostTable, Source, cost_from_json
from spec_jax.core.errors import UserError
from spec_jax.evals import cost_tables
from spec_jax.evals.cost_tables import Sample

ALPHA = {1: 0.0, 2: 0.003, 4: 0.003, 8: 0.011}
THETA = {1: 0.0, 2: 0.001, 4: 0.001, 8: 0.006, 16: 0.013, 64: 0.090}
BIAS = 0.020


def planted(noise=0.0, seed=0):
    """Every shape whose rows are between R and 8 R."""
    rng = np.random.default_rng(seed)
    return [
        Sample(r, t, (BIAS + a + b) * (1 + noise * rng.uniform(-1, 1)))
        for r, a in ALPHA.items()
        for t, b in THETA.items()
        if r <= t <= 8 * r
    ]


def test_a_planted_additive_cost_comes_back():
    cost = cost_tables.fit_additive(planted())
    assert cost.bs_probes == tuple(ALPHA) and cost.m_probes == tuple(THETA)
    for sample in planted():
        assert cost.seconds(sample.requests, sample.rows) == pytest.approx(
            sample.seconds, rel=1e-6
        )
    assert cost_tables.relative_errors(cost, planted())[0] < 1e-6
    assert cost.alpha_seconds == pytest.approx(list(ALPHA.values()), abs=1e-8)
    assert cost.theta_seconds == pytest.approx(list(THETA.values()), abs=1e-8)
    assert cost.bias_seconds == pytest.approx(BIAS)
    # Linear between probes.
    middle = (cost.seconds(8, 16) + cost.seconds(8, 64)) / 2
    assert cost.seconds(8, 40) == pytest.approx(middle)


def test_noise_never_makes_a_bigger_round_cheaper():
    samples = planted(noise=0.15, seed=1)
    cost = cost_tables.fit_additive(samples)
    assert (np.diff(cost.alpha_seconds) >= 0).all()
    assert (np.diff(cost.theta_seconds) >= 0).all()
    largest, median = cost_tables.relative_errors(cost, samples)
    assert 0 < median < largest < 0.2
    # A falling pair is flattened, not followed.
    falling = [Sample(1, 1, 0.020), Sample(1, 2, 0.010)]
    flat = cost_tables.fit_additive(falling)
    assert flat.theta_seconds == (0.0, 0.0)


def test_the_fit_is_to_relative_errors():
    # Two measurements that no additive form meets: the small one counts as much.
    samples = [Sample(1, 1, 1.0), Sample(1, 4, 100.0), Sample(2, 4, 80.0)]
    cost = cost_tables.fit_additive(samples)
    assert cost.seconds(1, 1) == pytest.approx(1.0, rel=1e-6)
    # 100 and 80 share a value x with (x/100 - 1) / 100 + (x/80 - 1) / 80 = 0.
    x = (1 / 100 + 1 / 80) / (1 / 100**2 + 1 / 80**2)
    assert cost.seconds(1, 4) == pytest.approx(x, rel=1e-6)


def test_the_flat_form_is_a_median_for_each_number_of_rows():
    samples = [Sample(1, 4, 0.010), Sample(2, 4, 0.040), Sample(4, 4, 0.020)]
    cost = cost_tables.fit_flat([*samples, Sample(4, 16, 0.050)])
    assert cost.sample_batch_tokens == (4, 16) and cost.max_batch_tokens == 16
    assert cost.sample_steps_per_sec == pytest.approx((50.0, 20.0))
    assert cost.seconds(1, 15) == pytest.approx(0.020)
    table = cost_tables.predicted_over_measured(cost, samples)
    assert table == {
        "1": {"4": pytest.approx(2.0)},
        "2": {"4": pytest.approx(0.5)},
        "4": {"4": pytest.approx(1.0)},
    }
    assert cost_tables.relative_errors(cost, samples) == (
        pytest.approx(1.0),
        pytest.approx(0.5),
    )


@pytest.mark.parametrize("fit", [cost_tables.fit_flat, cost_tables.fit_additive])
def test_what_was_fitted_survives_json(fit):
    table = CostTable(fit(planted()), (1, 8), (0.01, 0.02), Source(device="cpu"))
    assert cost_from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "no round was measured"),
        ([Sample(1, 2, 0.0)], "must be positive"),
        ([Sample(1, 2, float("nan"))], "must be positive"),
        ([Sample(1, 2, 0.1), Sample(1, 2, 0.2)], "measured twice"),
    ],
)
def test_wrong_samples_are_refused(samples, words):
    for fit in (cost_tables.fit_flat, cost_tables.fit_additive):
        with pytest.raises(UserError, match=words):
            fit(samples)
