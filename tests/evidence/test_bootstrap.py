"""Intervals hold what they claim to hold, about as often as they claim it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid import PellucidError
from pellucid.evidence.metrics.fid import Statistics, fid, fid_draws, fid_interval, weighted
from pellucid.evidence.metrics.kid import kid_draws, kid_interval
from pellucid.evidence.statistics import draws, mean_interval, percentiles, reflected


def cloud(count: int, width: int, seed: int, shift: float = 0.0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + shift


def test_a_resample_draws_as_many_as_there_are() -> None:
    rows = draws(50, 230, seed=1)
    assert rows.shape == (230, 50)
    assert (rows.sum(1) == 50).all()
    assert torch.equal(rows, draws(50, 230, seed=1))
    assert not torch.equal(rows, draws(50, 230, seed=2))
    assert float((rows > 0).double().mean()) == pytest.approx(1 - (1 - 1 / 50) ** 50, abs=0.01)


def test_weights_stand_for_copies() -> None:
    x = cloud(20, 4, 0)
    row = draws(20, 2, seed=3)[0]
    found, expected = weighted(x, row), Statistics.of(x.repeat_interleave(row, 0))
    assert torch.allclose(found.mean, expected.mean, atol=1e-12)
    assert torch.allclose(found.covariance, expected.covariance, atol=1e-12)
    assert found.count == 20


def test_bounds_are_percentiles() -> None:
    values = torch.arange(1001).double()
    found = percentiles(values, 500.0, 0.9)
    assert (found.low, found.high, found.count) == (pytest.approx(50), pytest.approx(950), 1001)


def test_reflection_moves_the_bias_away_and_turns_the_tails() -> None:
    """Values that lie 10 too high on average, with a long tail upwards: the interval's long side is below."""
    values = torch.tensor([9.0, 9.5, 10.0, 11.5]).double() + 5
    found = reflected(values, 5.0, 0.5)
    assert found.bias == pytest.approx(10)
    spread = percentiles(values, 15.0, 0.5)
    assert (found.low, found.high) == (pytest.approx(5 - (spread.high - 15)), pytest.approx(5 - (spread.low - 15)))
    assert found.low < 5 < found.high


def covered(intervals: list[tuple[float, float]], truth: float) -> float:
    return sum(low <= truth <= high for low, high in intervals) / len(intervals)


# 300 intervals of 95 %: the count that holds the truth has a deviation of 1.3 %; the bootstrap itself is short by a few
# percent at these counts of images.
RUNS, LOWEST, HIGHEST = 300, 0.89, 0.985


def test_coverage_of_a_mean() -> None:
    found = [mean_interval(cloud(60, 1, seed)[:, 0] + 3, 400, seed) for seed in range(RUNS)]
    assert LOWEST < covered([(f.low, f.high) for f in found], 3.0) < HIGHEST


def test_coverage_of_kid_when_both_sets_are_drawn() -> None:
    """N(0, 1) and N(1, 1) in one dimension: MMD² = 3 + 3 + 16."""
    found = [kid_interval(cloud(80, 1, 2 * i), cloud(80, 1, 2 * i + 1, 1.0), 200, i, over="both") for i in range(RUNS)]
    assert LOWEST - 0.03 < covered([(f.low, f.high) for f in found], 22.0) < HIGHEST


def test_coverage_of_fid_at_its_count() -> None:
    """The truth of the interval is the mean of FID over many sets of this count; FID of infinitely many is 0.25."""
    width, count, resamples = 3, 100, 60
    reference = Statistics(torch.zeros(width).double(), torch.eye(width).double(), 10**6)
    sets = [cloud(count, width, seed, shift=0.5 / width**0.5) for seed in range(600)]
    truth = sum(fid(reference, Statistics.of(x)) for x in sets) / len(sets)
    assert truth > 0.25 + 0.02  # biased upwards
    found = [fid_interval(x, reference, resamples, seed) for seed, x in enumerate(sets[: RUNS // 2])]
    assert LOWEST - 0.03 < covered([(f.low, f.high) for f in found], truth) < HIGHEST
    biases = torch.tensor([f.bias for f in found])
    assert float(biases.mean()) == pytest.approx(truth - 0.25, rel=0.25)  # so that estimate − bias is about 0.25


def test_plain_percentiles_of_fid_would_miss_the_estimate() -> None:
    x, width = cloud(40, 16, 0), 16
    reference = Statistics(torch.zeros(width).double(), torch.eye(width).double(), 10**6)
    values = fid_draws(x, reference, 40)
    assert float(values.min()) > fid(reference, Statistics.of(x))
    found = fid_interval(x, reference, 40)
    assert found.low < fid(reference, Statistics.of(x)) < found.high


def test_resampling_kid_adds_no_bias() -> None:
    x, y = cloud(50, 4, 0), cloud(60, 4, 1, 0.5)
    from pellucid.evidence.metrics.kid import kid_exact

    values = kid_draws(x, y, 4000)
    assert float(values.mean()) == pytest.approx(kid_exact(x, y), abs=4 * float(values.std()) / 4000**0.5)


def test_progress_and_seeds() -> None:
    x, reference = cloud(20, 3, 0), Statistics.of(cloud(50, 3, 1))
    told: list[int] = []
    values = fid_draws(x, reference, 7, seed=1, progress=lambda: told.append(1))
    assert len(told) == len(values) == 7
    assert torch.equal(values, fid_draws(x, reference, 7, seed=1))


def test_bad_input_is_one_line() -> None:
    x = cloud(5, 2, 0)
    for make, code in (
        (lambda: draws(5, 1), "resamples"),
        (lambda: kid_draws(x, x, 5, over="all"), "resamples"),
        (lambda: mean_interval(x[:, 0], 10, level=1.0), "level"),
    ):
        with pytest.raises(PellucidError) as error:
            make()
        assert error.value.code == code
