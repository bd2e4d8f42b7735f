"""The Fréchet distance: closed forms, scipy's root of a matrix, sets that are merged, saved and compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pellucid import PellucidError
from pellucid.evidence.metrics.fid import FEW, Statistics, fid, note_on
from pellucid.evidence.metrics.fid import RESAMPLES as FID_RESAMPLES
from pellucid.evidence.metrics.inception import features, load_inception
from pellucid.train.cifar10 import CIFAR10


def cloud(count: int, width: int = 12, seed: int = 0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(99))
    return torch.randn(count, width, generator=generator) @ mix + shift


def test_statistics_are_numpys() -> None:
    x = cloud(50)
    found = Statistics.of(x)
    assert found.count == 50
    assert np.allclose(found.mean, x.double().mean(0), rtol=0, atol=1e-12)
    assert np.allclose(found.covariance, np.cov(x.double().numpy(), rowvar=False), rtol=0, atol=1e-12)


@given(cuts=st.lists(st.integers(1, 39), max_size=5, unique=True))
def test_merged_parts_are_the_whole(cuts: list[int]) -> None:
    x = cloud(40, shift=100.0)  # far from 0: sums of squares would lose digits, merged scatters do not
    whole = Statistics.of(x)
    parts = Statistics.streamed(torch.tensor_split(x, sorted(cuts)))
    assert parts.count == whole.count
    assert torch.allclose(parts.mean, whole.mean, rtol=1e-13, atol=0)
    assert torch.allclose(parts.covariance, whole.covariance, rtol=0, atol=1e-10)


def test_distance_from_itself_is_zero_and_order_does_not_matter() -> None:
    x, y = cloud(60), cloud(80, seed=1, shift=0.5)
    assert fid(x, x) == pytest.approx(0, abs=1e-9)
    assert fid(x, x.flip(0)) == pytest.approx(0, abs=1e-9)
    assert fid(x, y) == pytest.approx(fid(y, x), rel=1e-10)
    assert fid(x, y) > 1


def test_closed_form_of_gaussians_that_commute() -> None:
    """Σ (√a − √b)² + |m − n|² where both covariances are diagonal."""
    a, b = torch.tensor([4.0, 1.0, 0.0]).double(), torch.tensor([1.0, 9.0, 0.25]).double()
    m, n = torch.tensor([0.0, 1.0, 2.0]).double(), torch.tensor([3.0, 1.0, 0.0]).double()
    found = fid(Statistics(m, a.diag(), 100), Statistics(n, b.diag(), 100))
    assert found == pytest.approx(float((a.sqrt() - b.sqrt()).square().sum() + (m - n).square().sum()), rel=1e-12)


@pytest.mark.parametrize("counts", [(60, 90), (8, 90)], ids=["full rank", "rank 7"])
def test_as_scipy_has_it(counts: tuple[int, int]) -> None:
    x, y = cloud(counts[0]), cloud(counts[1], seed=1, shift=0.3) * 1.5
    a, b = (np.cov(z.double().numpy(), rowvar=False) for z in (x, y))
    apart = float((x.double().mean(0) - y.double().mean(0)).square().sum())
    root = scipy.linalg.sqrtm(a @ b)
    expected = apart + np.trace(a) + np.trace(b) - 2 * np.trace(np.real(root))
    # of a product without full rank sqrtm itself is good to the root of float64's precision
    assert fid(x, y) == pytest.approx(expected, rel=1e-10 if counts[0] > 12 else 1e-6)


def from_features(x: Tensor, y: Tensor) -> float:
    """tr √(C₁C₂) is the sum of the singular values of X₁X₂ᵀ / √((n − 1)(m − 1)), X centred: no covariance is made."""
    a, b = ((z.double() - z.double().mean(0)) / (len(z) - 1) ** 0.5 for z in (x, y))
    apart = (x.double().mean(0) - y.double().mean(0)).square().sum()
    return float(apart + a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(a @ b.T).sum())


def test_fewer_images_than_features() -> None:
    x, y = cloud(20, 100), cloud(30, 100, seed=1, shift=0.2)
    assert fid(x, y) == pytest.approx(from_features(x, y), rel=1e-6)  # the root of float64's rounding, at 70 zeros


def test_statistics_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    made = Statistics.of(cloud(30))
    marked = Statistics(made.mean, made.covariance, made.count, "abc")
    marked.save(path)
    back = Statistics.load(path)
    assert torch.equal(back.mean, made.mean)
    assert torch.equal(back.covariance, made.covariance)
    assert (back.count, back.network) == (30, "abc")
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_what_is_no_statistics_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    good = Statistics.of(cloud(30))
    path = tmp_path / "s.safetensors"
    mark = {"format": "pellucid-statistics-1", "count": "30"}
    for tensors, words in (
        ({"mean": good.mean, "covariance": good.covariance}, {}),
        ({"mean": good.mean}, mark),
        ({"mean": good.mean, "covariance": good.covariance[:3]}, mark),
        ({"mean": good.mean * torch.nan, "covariance": good.covariance}, mark),
        ({"mean": good.mean, "covariance": good.covariance}, {**mark, "count": "many"}),
        ({"mean": good.mean, "covariance": good.covariance}, {**mark, "count": "0"}),
    ):
        save_file(tensors, path, words)
        with pytest.raises(PellucidError) as error:
            Statistics.load(path)
        assert error.value.code == "statistics"
    good.save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PellucidError) as error:
        Statistics.load(path)
    assert error.value.code == "weights-corrupt"
    path.write_text(json.dumps({"mean": 1}))
    with pytest.raises(PellucidError):
        Statistics.load(path)


def test_bad_input_is_one_line() -> None:
    good = Statistics.of(cloud(30))
    for make, code in (
        (lambda: Statistics.of(torch.zeros(0, 3)), "features"),
        (lambda: Statistics.of(torch.zeros(3)), "features"),
        (lambda: Statistics.streamed([]), "pictures-empty"),
        (lambda: good.merge(Statistics.of(torch.zeros(5, 3))), "features"),
        (lambda: fid(good, Statistics.of(torch.zeros(5, 3))), "features"),
        (lambda: fid(cloud(1), cloud(9)), "pictures-few"),
        (
            lambda: fid(
                Statistics(good.mean, good.covariance, 30, "aaaa"), Statistics(good.mean, good.covariance, 30, "bbbb")
            ),
            "features",
        ),
    ):
        with pytest.raises(PellucidError) as error:
            make()
        assert error.value.code == code


def test_few_images_are_said_to_be_few() -> None:
    assert note_on(FEW) is None
    words = note_on(FEW - 1)
    assert words is not None
    assert "9,999" in words
    assert "KID" in words
    assert FID_RESAMPLES >= 20  # else a 95 % interval would be the extremes


@pytest.mark.slow
def test_true_weights_on_cifar10(true_weights: Path, cifar: Path) -> None:
    """100 training against 100 test images, measured once with the network whose features are pytorch-fid's."""
    network = load_inception(true_weights)
    x, y = (features(CIFAR10.read(cifar, split).images[:100], network, 50) for split in ("train", "test"))
    assert fid(x, y) == pytest.approx(from_features(x, y), rel=1e-6)
    assert fid(x, y) == pytest.approx(171.9578, abs=1e-3)
