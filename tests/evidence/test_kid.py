"""KID: the formula written out, no bias, subsets, resamples in one pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid import PellucidError
from pellucid.evidence.metrics.kid import kid, kid_exact, kid_paired, kid_resampled


def cloud(count: int, width: int = 6, seed: int = 0, shift: float = 0.0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + shift


def written_out(x: Tensor, y: Tensor) -> float:
    """Sums over pairs, one by one (Gretton et al. 2012, equation 3)."""

    def k(a: Tensor, b: Tensor) -> float:
        return float((a.double() @ b.double() / len(a) + 1) ** 3)

    n, m = len(x), len(y)
    xx = sum(k(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    yy = sum(k(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return xx + yy - 2 * sum(k(a, b) for a in x for b in y) / (n * m)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_the_formula_whatever_the_block(block: int) -> None:
    x, y = cloud(11), cloud(7, seed=1, shift=0.4)
    assert kid_exact(x, y, block) == pytest.approx(written_out(x, y), rel=1e-10)


def test_order_does_not_matter() -> None:
    x, y = cloud(30), cloud(20, seed=1)
    assert kid_exact(x.flip(0), y) == pytest.approx(kid_exact(x, y), rel=1e-9)
    assert kid_exact(y, x) == pytest.approx(kid_exact(x, y), rel=1e-9)


def test_no_bias_at_small_counts() -> None:
    """One dimension, (xy + 1)³: MMD² = 3 Δm₁² + 3 Δm₂² + Δm₃², of N(0, 1) and N(μ, 1). Ten images per side."""
    for shift in (0.0, 0.5):
        values = torch.tensor(
            [kid_exact(cloud(10, 1, seed=2 * i), cloud(10, 1, seed=2 * i + 1, shift=shift)) for i in range(3000)]
        ).double()
        truth = 3 * shift**2 + 3 * shift**4 + (shift**3 + 3 * shift) ** 2
        error = float(values.std() / len(values) ** 0.5)
        assert abs(float(values.mean()) - truth) < 4 * error
        assert error < 0.3  # with the diagonal in it the mean would be 2 · (28 − 4) / 10 = 4.8 too high


def test_subsets_scatter_around_the_whole() -> None:
    x, y = cloud(400), cloud(300, seed=1, shift=0.3)
    found = kid(x, y, subsets=200, size=50, seed=3)
    assert found.value == pytest.approx(kid_exact(x, y), abs=4 * found.std / 200**0.5)
    assert found == kid(x, y, subsets=200, size=50, seed=3)
    assert found != kid(x, y, subsets=200, size=50, seed=4)
    whole = kid(x, y, subsets=3, size=1000)  # no more images than there are: the larger set is still cut to 300
    assert whole.size == 300
    assert kid(y, y + 0.1, subsets=2).std == pytest.approx(0, abs=1e-12)  # subsets that are all there is


def test_resamples_in_one_pass_are_resamples_one_by_one() -> None:
    """Pairs of an image with itself are left out, also where it was drawn twice."""
    x, y = cloud(9), cloud(8, seed=1, shift=0.2)
    generator = torch.Generator().manual_seed(5)
    picks = [torch.randint(9, (9,), generator=generator) for _ in range(4)]
    rows = torch.stack([torch.bincount(pick, minlength=9) for pick in picks])
    found = kid_resampled(x, y, rows, torch.ones(4, 8), block=4)
    for value, pick in zip(found.tolist(), picks, strict=True):

        def k(a: Tensor, b: Tensor) -> Tensor:
            return (a.double() @ b.double().T / 6 + 1) ** 3

        different = pick[:, None] != pick
        xx = k(x[pick], x[pick])[different].mean()
        yy = k(y, y)[~torch.eye(8, dtype=torch.bool)].mean()
        assert value == pytest.approx(float(xx + yy - 2 * k(x[pick], y).mean()), rel=1e-10)
    plain = kid_resampled(x, y, torch.ones(1, 9), torch.ones(1, 8))
    assert float(plain[0]) == pytest.approx(kid_exact(x, y), rel=1e-10)


def test_bad_input_is_one_line() -> None:
    for make, code in (
        (lambda: kid_exact(cloud(5), cloud(5, 3)), "features"),
        (lambda: kid_exact(cloud(1), cloud(5)), "pictures-few"),
        (lambda: kid(cloud(5), cloud(5), subsets=0), "kid-subsets"),
        (lambda: kid(cloud(5), cloud(5), size=1), "kid-subsets"),
    ):
        with pytest.raises(PellucidError) as error:
            make()
        assert error.value.code == code


# Pairs: image n of both sides from one prompt and one noise


def paired_written_out(x: Tensor, y: Tensor) -> float:
    """Gretton et al. 2012, lemma 6, pair by pair."""

    def k(a: Tensor, b: Tensor) -> float:
        return float((a.double() @ b.double() / len(a) + 1) ** 3)

    n = len(x)
    terms = [
        k(x[i], x[j]) + k(y[i], y[j]) - k(x[i], y[j]) - k(x[j], y[i]) for i in range(n) for j in range(n) if i != j
    ]
    return sum(terms) / (n * (n - 1))


@pytest.mark.parametrize("block", [1, 4, 64])
def test_pairs_by_the_formula(block: int) -> None:
    x = cloud(9)
    y = x + 0.3 * cloud(9, seed=1, shift=0.2)
    assert float(kid_paired(x, y, torch.ones(1, 9), block)[0]) == pytest.approx(paired_written_out(x, y), rel=1e-9)


def test_equal_pairs_are_at_zero_where_the_plain_estimate_is_below() -> None:
    x = cloud(20)
    assert float(kid_paired(x, x, torch.ones(1, 20))[0]) == pytest.approx(0.0, abs=1e-12)
    assert kid_exact(x, x) < -0.01


def test_weighted_pairs_are_pairs_drawn_so_often() -> None:
    """A resample with repetition, with pairs of an image and itself left out."""
    x = cloud(8)
    y = x + 0.5 * cloud(8, seed=1)
    counts = torch.tensor([2, 0, 1, 3, 0, 1, 1, 0])
    picks = torch.arange(8).repeat_interleave(counts)

    def k(a: Tensor, b: Tensor) -> float:
        return float((a.double() @ b.double() / len(a) + 1) ** 3)

    pairs = [(i, j) for i in picks for j in picks if i != j]
    wanted = sum(k(x[i], x[j]) + k(y[i], y[j]) - 2 * k(x[i], y[j]) for i, j in pairs) / len(pairs)
    assert float(kid_paired(x, y, counts[None])[0]) == pytest.approx(wanted, rel=1e-9)


def test_pairs_have_no_bias() -> None:
    """y = x + shift: as far apart as two independent sets of these distributions are."""
    shift = 0.5
    values = []
    for i in range(2000):
        x = cloud(10, 1, seed=i)
        values.append(float(kid_paired(x, x + shift, torch.ones(1, 10))[0]))
    found = torch.tensor(values).double()
    truth = 3 * shift**2 + 3 * shift**4 + (shift**3 + 3 * shift) ** 2
    assert abs(float(found.mean()) - truth) < 4 * float(found.std() / len(values) ** 0.5)


def test_pairs_need_as_many_of_each() -> None:
    with pytest.raises(PellucidError, match="pairs must be equally many on each side"):
        kid_paired(cloud(3), cloud(4), torch.ones(1, 3))
