"""The numbers of many times at once are those of one time after another."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid import schedules
from pellucid.train.draws import Draws
from pellucid.train.objective import WEIGHTINGS, Objective, Times, Weighting

CASES = [(name, target) for name in schedules.names() for target in schedules.make(name).carries]


@pytest.mark.parametrize(("name", "target"), CASES)
def test_rows_are_row(name: str, target: str) -> None:
    """To 1e-12 of each number, at the ends too, for every weighting."""
    schedule = schedules.make(name)
    low, high = schedule.span
    inside = low + (high - low) * np.random.default_rng(0).random(20)
    ends = [low] if target == "score" else [low, high]  # a score says nothing about x0 in pure noise
    times = np.array([*ends, *inside])
    for kind in WEIGHTINGS:
        objective = Objective(schedule, target, Times("logit_normal"), Weighting(kind, gamma=3.0, bias=0.5))
        wanted = np.array([objective.row(float(time)) for time in times])
        np.testing.assert_allclose(objective.rows(times), wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("target", ["v", "x0"])
def test_pure_noise_is_left_to_row(target: str) -> None:
    schedule = schedules.make("linear", zero_snr=True)
    times = np.array([998.5, 999.0, 999.0, 0.0])
    objective = Objective(schedule, target, Times("logit_normal"), Weighting("min_snr"))
    wanted = np.array([objective.row(float(time)) for time in times])
    np.testing.assert_allclose(objective.rows(times), wanted, rtol=1e-12, atol=0)
    assert wanted[1, 1] == 0.0


@pytest.mark.parametrize(
    ("name", "times"), [("linear", Times()), ("linear", Times("edm")), ("flow", Times("logit_normal", stratified=True))]
)
def test_parts_take_their_share_to_the_bit(name: str, times: Times) -> None:
    objective = Objective(schedules.make(name), "x0", times, Weighting("snr"))
    whole = objective.numbers(Draws(0, 3, 12))
    assert whole.shape == (9, 12)
    for part in range(4):
        assert objective.numbers(Draws(0, 3, 12, part, 4)).equal(whole[:, 3 * part : 3 * part + 3])
