"""Random numbers by address: parts of a whole, the same again, and nothing shared between neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid import PellucidError
from pellucid.train.draws import Draws, mixed

COUNT = 4096


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


@given(
    share=st.integers(1, 5),
    parts=st.integers(1, 6),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 10**12),
    kind=st.sampled_from(["normal", "uniform"]),
)
def test_parts_together_are_the_whole(share: int, parts: int, seed: int, step: int, kind: str) -> None:
    """Whoever draws them: ranks, micro-steps of one rank, or both."""
    batch = share * parts
    whole = getattr(Draws(seed, step, batch), kind)("noise", (2, 3))
    drawn = [getattr(Draws(seed, step, batch, part, parts), kind)("noise", (2, 3)) for part in range(parts)]
    assert [len(part) for part in drawn] == [share] * parts
    assert torch.equal(torch.cat(drawn), whole)


def test_ranks_and_accumulation_are_alike() -> None:
    """Two ranks of three micro-steps draw what three ranks of two do: only their parts' numbers count."""
    whole = torch.arange(12)
    for world, accumulate in ((2, 3), (3, 2), (6, 1), (1, 6)):
        parts = [
            Draws(7, 1, 12, rank * accumulate + micro, world * accumulate).mine(whole)
            for rank in range(world)
            for micro in range(accumulate)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_a_draw_is_not_consumed() -> None:
    draws = Draws(3, 5, 8)
    first = draws.normal("noise", (4,))
    draws.uniform("flip")
    assert torch.equal(draws.normal("noise", (4,)), first)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 0, "noise"), (0, 0, "offset")),
        ((0, 0, "noise"), (0, 1, "noise")),
        ((0, 0, "noise"), (1, 0, "noise")),
        ((0, 1, "noise"), (1, 0, "noise")),
        ((5, 41, "times"), (5, 42, "times")),
        ((2**32, 0, "noise"), (0, 0, "noise")),
        ((0, 2**32, "noise"), (0, 0, "noise")),
    ],
    ids=str,
)
def test_neighbours_share_nothing(one: tuple[int, int, str], other: tuple[int, int, str]) -> None:
    """A correlation of n pairs that have none is normal with a deviation of 1/√n; five of those is one in a million."""
    drawn = [Draws(seed, step, COUNT).normal(name, (4,)) for seed, step, name in (one, other)]
    assert abs(correlation(*drawn)) < 5 / math.sqrt(4 * COUNT)


def test_a_seed_spreads_over_all_its_bits() -> None:
    """One more step, or one more seed, changes half of the bits of what it is mixed to."""
    for base in ((0, 0), (1, 7), (2**62, 10**9)):
        for near in ((base[0] + 1, base[1]), (base[0], base[1] + 1)):
            changed = (mixed(*base) ^ mixed(*near)).bit_count()
            assert 12 <= changed <= 51  # 63 fair coins: 5 deviations about 31.5


def test_a_mix_depends_on_the_order() -> None:
    assert len({mixed(1, 2), mixed(2, 1), mixed(1), mixed(2), mixed(1, 2, 0), mixed(0, 1, 2)}) == 6
    assert all(0 <= mixed(-1, number) < 2**63 for number in range(100))  # what a generator takes


def test_distributions() -> None:
    normal, uniform = Draws(0, 0, COUNT).normal("a", (8,)), Draws(0, 0, COUNT).uniform("a", (8,))
    count = normal.numel()
    assert abs(float(normal.mean())) < 5 / math.sqrt(count)
    assert float(normal.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / count))
    assert 0 <= float(uniform.min()) < float(uniform.max()) < 1
    assert float(uniform.mean()) == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / count))
    assert (normal.dtype, uniform.dtype) == (torch.float32, torch.float32)


def test_the_same_on_every_machine() -> None:
    """Frozen: torch 2.13 on a CPU. Another value is another run of everything that was trained so far."""
    assert mixed(0) == 0x6220A8397B1DCDAF  # the first number of splitmix64 from state 0, without its top bit
    assert mixed(1, 2, 3) == 5797055558538453683
    uniform, normal = Draws(1, 2, 4).uniform("dropout"), Draws(1, 2, 2).normal("noise", (2,)).flatten()
    assert uniform.tolist() == pytest.approx([0.03996027, 0.23629647, 0.69116753, 0.79638416], abs=1e-7)
    assert normal.tolist() == pytest.approx([-0.20142104, 0.09088422, 0.307789, 1.34152329], abs=1e-6)


@pytest.mark.parametrize(
    "bad", [{"batch": 0}, {"batch": 5, "parts": 2}, {"batch": 4, "part": 2, "parts": 2}, {"batch": 4, "part": -1}]
)
def test_parts_that_do_not_divide_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(PellucidError, match="multiple of its") as error:
        Draws(0, 0, **bad)
    assert error.value.code == "batch-parts"
