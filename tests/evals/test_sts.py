"""Sequential temperatures: planted ones come back, position after position."""

import numpy as np
import pytest

from spec_jax.core.calibration import Source, sts_from_json
from spec_jax.core.errors import UserError
from spec_jax.evals import sts
from spec_jax.evals.ece import ece_by_position


def rounds(temperatures, num_rounds, seed=0, spread=2.0):
    """Raw logits of rounds whose drafts are accepted by logit / temperature."""
    rng = np.random.default_rng(seed)
    num_draft = len(temperatures)
    # Kept within what a grid temperature can express: no saturated rows.
    true_NM = rng.normal(0.8, spread, size=(num_rounds, num_draft))
    chance_NM = 1 / (1 + np.exp(-true_NM))
    hits_NM = np.cumprod(rng.random((num_rounds, num_draft)) < chance_NM, axis=1)
    return true_NM * np.asarray(temperatures), hits_NM.astype(float)


def test_planted_temperatures_come_back():
    planted = sts.GRID[[27, 14, 20, 30]]  # about 2.2, 0.5, 1, 3.2
    logits_NM, hits_NM = rounds(planted, 60_000)
    found = sts.fit(logits_NM, hits_NM, dataset="planted")
    # Within two steps of the grid, 12% each.
    steps = np.log(np.array(found.temperatures) / planted) / np.log(sts.GRID[1] / 0.1)
    assert np.abs(steps).max() <= 2.01, found.temperatures
    assert max(found.ece_after) < 0.01 and found.num_samples == 60_000
    assert all(b >= a for b, a in zip(found.ece_before, found.ece_after, strict=True))
    assert found.ece_before[0] > 0.05 and found.dataset == "planted"


def test_reported_errors_are_of_rounds_that_were_not_fitted():
    logits_NM, hits_NM = rounds([3.0, 0.5], 120, seed=5)
    found = sts.fit(logits_NM, hits_NM)
    # By hand: each half's survival under the temperatures of the other one.
    unseen_NM = np.zeros_like(logits_NM)
    for mine, others in ((0, 1), (1, 0)):
        fitted = sts.fit(logits_NM[others::2], hits_NM[others::2]).temperatures
        unseen_NM[mine::2] = sts.survival(logits_NM[mine::2], fitted)
    assert (sts.held_out_survival(logits_NM, hits_NM) == unseen_NM).all()
    assert found.ece_after == tuple(ece_by_position(unseen_NM, hits_NM))
    # On the very rounds that were fitted the error looks smaller.
    seen = ece_by_position(sts.survival(logits_NM, found.temperatures), hits_NM)
    assert np.mean(found.ece_after) > np.mean(seen)


def test_each_position_is_fitted_on_survival_with_the_earlier_ones_fixed():
    logits_NM, hits_NM = rounds([4.0, 1.0, 0.4], 400, seed=3)
    found = sts.fit(logits_NM, hits_NM)
    # An oracle that knows nothing of the order of the grid.
    fixed = []
    for j in range(3):
        errors = {}
        for t in np.logspace(-1, 1, 41):
            survival_N = np.ones(400)
            for k, each in enumerate([*fixed, t]):
                survival_N = survival_N / (1 + np.exp(-logits_NM[:, k] / each))
            errors[t] = ece_by_position(survival_N[:, None], hits_NM[:, j : j + 1])[0]
        fixed.append(found.temperatures[j])
        chosen = min(errors, key=lambda t: abs(t - found.temperatures[j]))
        assert errors[chosen] == pytest.approx(min(errors.values()))


def test_a_position_that_cannot_be_improved_keeps_one():
    # Saturated log-odds: every temperature gives the same survival.
    found = sts.fit(np.full((50, 2), 1e6), np.ones((50, 2)))
    assert found.temperatures == (1.0, 1.0)
    assert found.ece_before == found.ece_after == (0.0, 0.0)


def test_the_grid_and_the_mask():
    assert len(sts.GRID) == 41 and sts.GRID[20] == 1.0
    assert sts.GRID[[0, -1]] == pytest.approx([0.1, 10.0])
    mask = sts.prefix_mask([0, 2, 3], 3)
    assert mask.tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_the_record_carries_its_source_through_json():
    logits_NM, hits_NM = rounds([1.0, 2.0], 300)
    source = Source(model="m", drafter="d", device="cpu", sampling="greedy")
    found = sts.fit(logits_NM, hits_NM, dataset="greedy, own prompts", source=source)
    again = sts_from_json(found.to_json())
    assert again == found
    again.check(2, model="m", drafter="d", device="cpu", sampling="greedy")
    with pytest.raises(UserError, match="2 temperatures"):
        again.check(3)
    with pytest.raises(UserError, match="measured for model 'm'"):
        again.check(2, model="other")


@pytest.mark.parametrize(
    ("logits", "mask", "words"),
    [
        (np.zeros((0, 3)), np.zeros((0, 3)), "at least two rounds"),
        (np.zeros((1, 3)), np.zeros((1, 3)), "at least two rounds"),
        (np.zeros((2, 0)), np.zeros((2, 0)), "one draft"),
        (np.zeros((2, 3)), np.zeros((2, 2)), "must both be"),
        ([[np.nan, 0.0]] * 2, [[0.0, 0.0]] * 2, "not finite"),
        ([[0.0, 0.0]] * 2, [[0.0, 1.0]] * 2, "ones and then zeros"),
        ([[0.0, 0.0]] * 2, [[0.5, 0.0]] * 2, "ones and then zeros"),
    ],
)
def test_wrong_rounds_are_refused(logits, mask, words):
    with pytest.raises(UserError, match=words):
        sts.fit(logits, mask)
