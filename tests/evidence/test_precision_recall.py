"""Precision and recall: what must be 1, what must be 0, and the definition written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid import PellucidError
from pellucid.evidence.metrics.precision_recall import precision_recall, radii


def cloud(count: int, width: int = 3, seed: int = 0, shift: float = 0.0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + shift


def written_out(x: Tensor, y: Tensor, k: int) -> float:
    """The share of x within a ball around a point of y, as large as to its k-th neighbour."""
    inside = 0
    for point in x.double():
        for i, centre in enumerate(y.double()):
            others = sorted(float((centre - o).norm()) for j, o in enumerate(y.double()) if j != i)
            if float((point - centre).norm()) <= others[k - 1]:
                inside += 1
                break
    return inside / len(x)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("block", [4, 512])
def test_the_definition(k: int, block: int) -> None:
    x, y = cloud(25), cloud(31, seed=1, shift=0.8)
    found = precision_recall(x, y, k, block)
    assert found.precision == pytest.approx(written_out(x, y, k))
    assert found.recall == pytest.approx(written_out(y, x, k))
    assert 0 < found.precision < 1
    assert found.inside.double().mean() == found.precision
    assert found.reached.double().mean() == found.recall


def test_a_set_is_like_itself_and_unlike_what_is_far() -> None:
    x = cloud(40)
    same, far = precision_recall(x, x), precision_recall(x, x + 100)
    assert (same.precision, same.recall) == (1, 1)
    assert (far.precision, far.recall) == (0, 0)


def test_one_mode_of_two_is_precise_and_reaches_half() -> None:
    both = torch.cat([cloud(200, seed=1), cloud(200, seed=2, shift=50.0)])
    found = precision_recall(cloud(200), both)
    assert found.precision > 0.9
    assert 0.4 < found.recall <= 0.5


def test_copies_have_balls_of_no_size_and_are_still_inside() -> None:
    """Ten times the same point: distances are rounding, which must not decide."""
    point = cloud(1, width=64, seed=3) * 7
    copies = point.repeat(10, 1)
    assert radii(copies, 3).tolist() == [0.0] * 10
    found = precision_recall(copies, copies)
    assert (found.precision, found.recall) == (1, 1)
    assert precision_recall(copies + 1e-3, copies).precision == 0


def test_bad_input_is_one_line() -> None:
    for make, code in (
        (lambda: precision_recall(cloud(5), cloud(5, 2)), "features"),
        (lambda: precision_recall(cloud(5), cloud(3)), "neighbours"),
        (lambda: precision_recall(cloud(5), cloud(5), 0), "neighbours"),
    ):
        with pytest.raises(PellucidError) as error:
            make()
        assert error.value.code == code
