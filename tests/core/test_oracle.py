"""The oracle: its posterior mean is the integral that defines it, and sampling with it gives back the mixture."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from pellucid import Level, PellucidError, compile_plan, oracle, run
from pellucid.core.batch import BatchLevel
from pellucid.core.schedule import in_frame

ONE_D = oracle.Mixture(
    torch.tensor([[-1.0], [0.3], [2.0]], dtype=torch.float64),
    torch.tensor([0.2, 0.5, 0.1], dtype=torch.float64),
    torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64),
)


PARTS = list(zip(ONE_D.weights.tolist(), ONE_D.means[:, 0].tolist(), ONE_D.spreads.tolist(), strict=True))


def normal(x: float, mean: float, spread: float) -> float:
    return math.exp(-0.5 * ((x - mean) / spread) ** 2) / spread / math.sqrt(2 * math.pi)


def density(x0: float) -> float:
    return sum(w * normal(x0, m, s) for w, m, s in PARTS)


def by_integration(x: float, level: Level) -> float:
    """E[x0 | x] = ∫ x0·p(x0)·N(x; alpha·x0, sigma²) dx0 / ∫ p(x0)·N(x; alpha·x0, sigma²) dx0."""
    knots = sorted({-1.0, 0.3, 2.0, float(np.clip(x / max(level.alpha, 1e-9), -6, 7))})

    def likelihood(x0: float) -> float:
        return density(x0) * normal(x, level.alpha * x0, level.sigma)

    def part(function) -> float:
        edges = [-7.0, *knots, 8.0]
        return sum(
            integrate.quad(function, a, b, epsabs=0, epsrel=1e-11, limit=400)[0] for a, b in itertools.pairwise(edges)
        )

    return part(lambda x0: x0 * likelihood(x0)) / part(likelihood)


@pytest.mark.parametrize("frame", ["vp", "ve", "flow"])
@pytest.mark.parametrize("ratio", [0.05, 0.5, 3.0, 40.0])
@pytest.mark.parametrize("place", [-1.5, 0.0, 0.9])
def test_the_posterior_mean_is_its_integral(frame: str, ratio: float, place: float) -> None:
    level = in_frame(ratio, frame)
    x = level.alpha * place + 0.4 * level.sigma
    found = ONE_D(torch.tensor([[x]], dtype=torch.float64), level)
    assert found.item() == pytest.approx(by_integration(x, level), rel=1e-8, abs=1e-9)


@given(lam=st.floats(-4, 4), x=st.floats(-3, 3))
@settings(max_examples=50, deadline=None)
def test_all_frames_give_one_answer(lam: float, x: float) -> None:
    answers = []
    for frame in ("vp", "ve", "flow"):
        level = in_frame(math.exp(-lam), frame)
        answers.append(ONE_D(torch.tensor([[x * level.alpha]], dtype=torch.float64), level).item())
    assert answers == pytest.approx([answers[0]] * 3, rel=1e-9, abs=1e-9)


def test_the_two_ends() -> None:
    x = torch.tensor([[0.7]], dtype=torch.float64)
    assert ONE_D(x, Level(1.0, 0.0)).item() == pytest.approx(0.7)  # a clean x is x0
    mean = float((ONE_D.weights * ONE_D.means[:, 0]).sum())
    assert ONE_D(x, Level(0.0, 1.0)).item() == pytest.approx(mean)  # pure noise says nothing


def test_a_single_gaussian_is_the_wiener_filter() -> None:
    single = oracle.Mixture(torch.full((1, 3), 2.0), torch.tensor([0.5]), torch.tensor([1.0]))
    level = in_frame(0.8, "vp")
    x = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
    a, s = level.alpha, level.sigma
    wanted = 2.0 + a * 0.25 / (a * a * 0.25 + s * s) * (x - a * 2.0)
    assert torch.allclose(single(x, level), wanted, rtol=1e-12)


def test_each_image_has_its_own_level_in_a_mixed_batch() -> None:
    levels = [in_frame(0.3, "vp"), in_frame(4.0, "ve"), Level(0.0, 1.0)]
    x = torch.tensor([[0.2], [3.0], [-1.0]], dtype=torch.float64)
    batched = BatchLevel(
        *(torch.tensor([[getattr(v, k)] for v in levels], dtype=torch.float64) for k in ("alpha", "sigma"))
    )
    alone = torch.cat([ONE_D(x[i : i + 1], levels[i]) for i in range(3)])
    assert torch.allclose(ONE_D(x, batched), alone, rtol=1e-13)


def test_any_shape_of_d_numbers_and_the_dtype_are_kept() -> None:
    smooth = oracle.smooth(dim=12)
    x = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    level = in_frame(1.0, "vp")
    assert smooth(x, level).shape == x.shape
    assert smooth(x, level).dtype == torch.float32
    flat = smooth(x.reshape(5, 12), level)
    assert torch.equal(smooth(x, level).reshape(5, 12), flat)


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(0), torch.cov(x.T)


def true_moments(mixture: oracle.Mixture) -> tuple[torch.Tensor, torch.Tensor]:
    w, m, s = mixture.weights, mixture.means, mixture.spreads
    mean = (w[:, None] * m).sum(0)
    spread = (w * s**2).sum() * torch.eye(m.shape[1], dtype=torch.float64)
    gap = m - mean
    return mean, spread + (w[:, None, None] * gap[:, :, None] * gap[:, None, :]).sum(0)


def test_true_draws_have_the_true_moments() -> None:
    mixture = oracle.smooth()
    mean, cov = moments(mixture.sample(200_000, torch.Generator().manual_seed(0)))
    wanted = true_moments(mixture)
    assert torch.allclose(mean, wanted[0], atol=5 * 1.1 / math.sqrt(200_000))
    assert torch.allclose(cov, wanted[1], atol=5 * 2 * 1.3 / math.sqrt(200_000))


class Drawn:
    """torch's own normal numbers, all images at once; each address is drawn once."""

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, int], torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(2)

    def step(self, draws, span, like: torch.Tensor, images) -> torch.Tensor:
        for d in draws:
            fresh = torch.randn(like.shape, generator=self.generator, dtype=like.dtype)
            self.drawn.setdefault((d.interval, d.visit), fresh)
        return sum(self.drawn[d.interval, d.visit] * d.weight for d in draws)


@pytest.mark.parametrize(
    ("sampler", "schedule", "target"),
    [
        ("dpmpp_2m", "vp_linear", "eps"),
        ("heun", "edm", "edm"),
        ("flow_heun", "flow", "flow"),
        ("dpmpp_2m_sde", "vp_linear", "eps"),
        ("dpmpp_sde", "edm", "edm"),
        ("sa_solver", "vp_linear", "eps"),
    ],
)
def test_sampling_gives_back_the_moments(sampler: str, schedule: str, target: str) -> None:
    """From pure noise at the schedule's top to the data, with 60 steps: the mean and covariance of the mixture."""
    mixture, count = oracle.smooth(dim=2), 3000
    plan = compile_plan(sampler, schedule=schedule, target=target, steps=60)
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = run(plan, mixture, noise * plan.initial_scale, noise=Drawn())
    mean, cov = moments(x)
    wanted_mean, wanted_cov = true_moments(mixture)
    # sampling error: the deviations of a mean and of a variance of `count` draws (√ of 1.3, the largest variance,
    # over count), five times, and 0.02 for the error of 60 steps
    assert torch.allclose(mean, wanted_mean, atol=5 * math.sqrt(1.3 / count) + 0.02)
    assert torch.allclose(cov, wanted_cov, atol=5 * 1.3 * math.sqrt(2 / count) + 0.02)


def test_the_ring_is_eight_points_on_a_circle() -> None:
    ring = oracle.ring()
    assert ring.means.norm(dim=1).tolist() == pytest.approx([1.5] * 8)
    x = run(compile_plan("dpmpp_2m", steps=40), ring, shape=(2,), seeds=list(range(200)), dtype=torch.float64)
    gap = torch.cdist(x, ring.means).min(1).values
    assert gap.max() < 6 * 0.12  # every sample lands on one of them
    which = torch.cdist(x, ring.means).argmin(1)
    assert len(set(which.tolist())) == 8


def test_distance_is_relative() -> None:
    a = torch.tensor([3.0, 4.0])
    assert oracle.distance(a * 1.1, a) == pytest.approx(0.1)


def test_start_of_is_the_same_data_at_the_plans_level() -> None:
    plan = compile_plan("euler", steps=3)
    other = compile_plan("ddim", steps=5)
    x, y = (oracle.start_of(p, oracle.smooth(), 4) for p in (plan, other))
    assert torch.allclose(x / plan.start.alpha, y / other.start.alpha, rtol=1e-12)


@pytest.mark.parametrize(
    ("means", "spreads", "weights"),
    [(torch.zeros(3), torch.ones(3), torch.ones(3)), (torch.zeros(3, 2), torch.ones(2), torch.ones(3))],
)
def test_bad_shapes_are_refused(means: torch.Tensor, spreads: torch.Tensor, weights: torch.Tensor) -> None:
    with pytest.raises(PellucidError) as refused:
        oracle.Mixture(means, spreads, weights)
    assert refused.value.code == "oracle"
