"""Noise: Philox is the published generator; the numbers are normal, independent, and belong to the image alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pellucid import Brownian, PellucidError, Philox, compile_plan
from pellucid.core import noise
from pellucid.core.noise import PATH, first_noise, gaussian, gaussians, philox
from pellucid.core.plan import Draw, Span

WIDE = torch.empty(0, dtype=torch.float64)
COUNT = 40_000
# Five standard errors: a false alarm in 1.7 million draws of the seed, and the seeds here are fixed.
FIVE = 5.0


def one(seed: int, interval: int, visit: int = 0, count: int = COUNT) -> torch.Tensor:
    return gaussian(seed, (count,), (interval, visit, PATH), WIDE)


# --- the generator ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        # Random123, examples/kat_vectors, philox4x32 with 10 rounds (Salmon et al. 2011)
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, wanted: str) -> None:
    words = tuple(torch.tensor([int(word, 16)]) for word in counter.split())
    found = philox(words, tuple(int(word, 16) for word in key.split()))
    assert [f"{int(word):08x}" for word in found] == wanted.split()


def test_philox_is_one_to_one() -> None:
    counters = torch.arange(10_000)
    zero = torch.zeros_like(counters)
    words = torch.stack(philox((counters, zero, zero, zero), (1, 2)), dim=1)
    assert len({tuple(row) for row in words.tolist()}) == 10_000


@given(key=st.integers(0, 2**64 - 1), counter=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_words_are_32_bits(key: int, counter: int) -> None:
    words = philox(tuple(torch.tensor([counter]) for _ in range(4)), (key & 0xFFFFFFFF, key >> 32))
    assert all(0 <= int(word) < 2**32 for word in words)


# --- the numbers are normal ------------------------------------------------------------------------------------


def test_moments_are_those_of_a_normal() -> None:
    z = one(seed=3, interval=7, count=400_000)
    n = len(z)
    assert abs(float(z.mean())) < FIVE / math.sqrt(n)
    assert abs(float(z.var()) - 1) < FIVE * math.sqrt(2 / n)
    assert abs(float((z**3).mean())) < FIVE * math.sqrt(15 / n)
    assert abs(float((z**4).mean()) - 3) < FIVE * math.sqrt(96 / n)


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 5])
def test_the_distribution_is_normal(seed: int) -> None:
    assert stats.kstest(one(seed, 0).numpy(), "norm").pvalue > 1e-6  # as improbable as five standard errors


def test_tails_reach_and_stay_finite() -> None:
    z = gaussian(11, (1_000_000,), (0, 0, PATH), WIDE)
    assert torch.isfinite(z).all()
    assert 4.2 < float(z.abs().max()) < 6.7  # 32-bit uniforms end at √(−2·ln 2⁻³³) = 6.76


def test_float32_numbers_are_the_float64_ones_rounded() -> None:
    narrow = gaussian(5, (1001,), (2, 0, PATH), torch.empty(0))
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, gaussian(5, (1001,), (2, 0, PATH), WIDE).float())


@given(shape=st.lists(st.integers(1, 5), min_size=0, max_size=4), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_a_shape_is_filled_from_its_start(shape: list[int], seed: int) -> None:
    z = gaussian(seed, shape, (1, 0, PATH), WIDE)
    assert z.shape == tuple(shape)
    longer = gaussian(seed, (math.prod(shape) + 7,), (1, 0, PATH), WIDE)
    assert torch.equal(z.reshape(-1), longer[: z.numel()])


# --- and independent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, 0, 0), (1, 0, 0)),  # seeds
        ((0, 0, 0), (2**32, 0, 0)),  # seeds that differ in the high word alone
        ((0, 0, 0), (0, 1, 0)),  # intervals
        ((0, 0, 0), (0, 0, 1)),  # visits
        ((0, 1, 0), (0, 0, 1)),
        ((1, 0, 0), (0, 1, 0)),
    ],
)
def test_addresses_are_independent(a: tuple, b: tuple) -> None:
    x, y = one(*a), one(*b)
    assert abs(float((x * y).mean())) < FIVE / math.sqrt(COUNT)
    assert abs(float((x**2 * y**2).mean()) - 1) < FIVE * math.sqrt(8 / COUNT)


def test_neighbours_are_independent() -> None:
    z = one(9, 4)
    for lag in (1, 2, 3, 4, 8, 64):
        assert abs(float((z[lag:] * z[:-lag]).mean())) < FIVE / math.sqrt(COUNT)


def test_the_first_noise_is_no_step_noise() -> None:
    source = Philox(3)
    first = source.first((COUNT,), WIDE, [0])[0]
    step = source.step((Draw(0, 0, 1.0),), Span(2.0, 1.0), torch.empty(1, COUNT, dtype=torch.float64), [0])[0]
    assert abs(float((first * step).mean())) < FIVE / math.sqrt(COUNT)


# --- one stream an image ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_same_seed_at_any_batch_and_place(batch: int) -> None:
    alone = Philox(7).first((4, 5), WIDE, [0])[0]
    draws, span = (Draw(2, 0, 0.6), Draw(3, 1, 0.8)), Span(3.0, 1.0)
    alone_step = Philox(7).step(draws, span, torch.empty(1, 4, 5), [0])[0]
    for place in {0, batch // 2, batch - 1}:
        seeds = [100 + i for i in range(batch)]
        seeds[place] = 7
        source = Philox(seeds)
        assert torch.equal(source.first((4, 5), WIDE, range(batch))[place], alone)
        assert torch.equal(source.step(draws, span, torch.empty(batch, 4, 5), range(batch))[place], alone_step)


def test_any_order_of_asking() -> None:
    seeds, draws = [5, 6, 7], (Draw(0, 0, 1.0),)
    like = torch.empty(3, 4)
    whole = Philox(seeds).step(draws, Span(2.0, 1.0), like, [0, 1, 2])
    for order in itertools.permutations(range(3)):
        assert torch.equal(Philox(seeds).step(draws, Span(2.0, 1.0), like, order), whole[list(order)])


def test_asking_twice_gives_the_same() -> None:
    source = Philox(1)
    like = torch.empty(1, 8)
    first = source.step((Draw(4, 0, 1.0),), Span(2.0, 1.0), like, [0])
    source.step((Draw(9, 0, 1.0),), Span(1.0, 0.5), like, [0])
    assert torch.equal(source.step((Draw(4, 0, 1.0),), Span(2.0, 1.0), like, [0]), first)


def test_a_draw_of_several_intervals_is_their_weighted_sum() -> None:
    like = torch.empty(1, 16, dtype=torch.float64)
    z = Philox(3).step((Draw(0, 0, 0.6), Draw(1, 0, 0.8)), Span(3.0, 1.0), like, [0])[0]
    assert torch.allclose(z, 0.6 * one(3, 0, count=16) + 0.8 * one(3, 1, count=16), atol=1e-15)


def test_first_noise_has_the_plans_scale() -> None:
    plan = compile_plan("euler", steps=3)
    x = first_noise(plan, [1, 2], (COUNT,), WIDE)
    assert x.shape == (2, COUNT)
    assert float(x.std()) == pytest.approx(plan.initial_scale, rel=FIVE / math.sqrt(4 * COUNT))


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4, 4)])
@pytest.mark.parametrize("like", [WIDE, torch.empty(())])
def test_several_images_at_once_draw_what_each_draws_alone(shape: tuple[int, ...], like: torch.Tensor) -> None:
    seeds, addresses = [0, 7, 2**32 + 1, 2**64 - 1], [(3, 1, 2), (0, 0, 2), (2**22, 5, 1)]
    together = gaussians(seeds, shape, addresses, like)
    alone = [torch.stack([gaussian(seed, shape, where, like) for seed in seeds]) for where in addresses]
    assert torch.equal(together, torch.stack(alone))


def test_numbers_drawn_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    where = [(k, 0, 2) for k in range(7)]
    together = gaussians([1, 2, 3], (5,), where, WIDE)
    monkeypatch.setattr(noise, "AT_ONCE", 40)  # two addresses at a time
    assert torch.equal(gaussians([1, 2, 3], (5,), where, WIDE), together)


# --- a Brownian path -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["snr", "sigma"])
@given(cuts=st.lists(st.floats(-4, 4), min_size=2, max_size=6, unique=True), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_increments_add_up_over_any_cuts(clock: str, cuts: list[float], seed: int) -> None:
    """The path is one path: its increment over a span is the sum of those over the parts, whatever the grid."""
    knots = sorted((math.exp(c) for c in cuts), reverse=True)
    if any(b / a > 0.999 for a, b in itertools.pairwise(knots)):
        return
    source, like = Brownian(seed, clock), torch.empty(1, 5, dtype=torch.float64)

    def length(a: float, b: float) -> float:
        return abs(1 / b**2 - 1 / a**2) if clock == "snr" else abs(a - b)

    def increment(a: float, b: float) -> torch.Tensor:
        return source.step((Draw(0, 0, 1.0),), Span(a, b), like, [0])[0] * math.sqrt(length(a, b))

    whole = increment(knots[0], knots[-1])
    parts = sum(increment(a, b) for a, b in itertools.pairwise(knots))
    assert torch.allclose(whole, parts, rtol=1e-9, atol=1e-9 * math.sqrt(length(knots[0], knots[-1])))


@pytest.mark.parametrize("clock", ["snr", "sigma"])
@pytest.mark.parametrize("span", [(14.0, 0.03), (5.0, 4.0), (0.1, 0.09), (1e150, 3.0)])  # the last from pure noise
def test_an_increment_has_variance_one(clock: str, span: tuple) -> None:
    z = Brownian(2, clock).step((Draw(0, 0, 1.0),), Span(*span), torch.empty(1, COUNT, dtype=torch.float64), [0])
    assert abs(float(z.mean())) < FIVE / math.sqrt(COUNT)
    assert abs(float(z.var()) - 1) < FIVE * math.sqrt(2 / COUNT)


def test_increments_over_disjoint_spans_are_independent() -> None:
    source, like = Brownian(2), torch.empty(1, COUNT, dtype=torch.float64)
    a = source.step((Draw(0, 0, 1.0),), Span(5.0, 2.0), like, [0])[0]
    b = source.step((Draw(1, 0, 1.0),), Span(2.0, 1.0), like, [0])[0]
    assert abs(float((a * b).mean())) < FIVE / math.sqrt(COUNT)


def test_the_path_does_not_depend_on_what_else_was_asked() -> None:
    like = torch.empty(1, 64, dtype=torch.float64)
    fresh = Brownian(2).step((Draw(0, 0, 1.0),), Span(2.0, 1.0), like, [0])
    used = Brownian(2)
    for k in range(30):  # more than the cache holds
        used.step((Draw(k, 0, 1.0),), Span(50.0 / (k + 1), 50.0 / (k + 2)), like, [0])
    assert torch.equal(used.step((Draw(7, 0, 1.0),), Span(2.0, 1.0), like, [0]), fresh)


def test_another_visit_is_another_path() -> None:
    source, like = Brownian(2), torch.empty(1, COUNT, dtype=torch.float64)
    a = source.step((Draw(0, 0, 1.0),), Span(2.0, 1.0), like, [0])[0]
    b = source.step((Draw(0, 1, 1.0),), Span(2.0, 1.0), like, [0])[0]
    assert abs(float((a * b).mean())) < FIVE / math.sqrt(COUNT)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_one_path_an_image(batch: int) -> None:
    alone = Brownian(7).step((Draw(0, 0, 1.0),), Span(2.0, 1.0), torch.empty(1, 6, dtype=torch.float64), [0])[0]
    source = Brownian([*range(100, 99 + batch), 7])
    like = torch.empty(batch, 6, dtype=torch.float64)
    assert torch.equal(source.step((Draw(0, 0, 1.0),), Span(2.0, 1.0), like, range(batch))[batch - 1], alone)
    assert torch.equal(source.first((6,), WIDE, [batch - 1]), Philox(7).first((6,), WIDE, [0]))


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1", None, True])
@pytest.mark.parametrize("source", [Philox, Brownian])
def test_bad_seeds_are_refused(source: type, seed: object) -> None:
    with pytest.raises(PellucidError, match="seed must be") as refused:
        source([seed])
    assert refused.value.code == "seed"


def test_the_largest_seed_works() -> None:
    assert torch.isfinite(Philox(2**64 - 1).first((4,), WIDE, [0])).all()
