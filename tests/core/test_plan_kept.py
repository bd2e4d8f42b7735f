"""How much of Gaussian data a plan keeps: against formulas, against runs, and at the limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pellucid import compile_plan
from pellucid.core.loop import run
from pellucid.core.noise import Philox
from pellucid.core.oracle import Mixture
from pellucid.core.plan import kept
from pellucid.core.schedule import make

SCALES = (1.0, 0.3, 0.1)


def test_one_call_is_a_wiener_filter_of_noise() -> None:
    plan = compile_plan("ddim", schedule="linear", target="v", grid="trailing", steps=1)
    level = make("linear").level(999)
    wanted = [plan.initial_scale * level.alpha * s / (level.alpha**2 * s**2 + level.sigma**2) for s in SCALES]
    assert kept(plan, SCALES).tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("sampler", ["ddim", "heun", "dpmpp_2m", "unipc", "euler_a", "dpmpp_sde", "euler_cfg_pp"])
def test_many_calls_keep_everything(sampler: str) -> None:
    plan = compile_plan(sampler, schedule="edm", target="edm", grid="karras", steps=1000)
    assert kept(plan, SCALES).tolist() == pytest.approx([1.0] * 3, abs=0.03)


@pytest.mark.parametrize(
    ("sampler", "schedule"),
    [
        *[
            (name, schedule)
            for name in ("ddim", "euler_a", "dpmpp_2s_a", "sa_solver")
            for schedule in ("cosine", "flow")
        ],
        ("edm_stochastic", "edm"),
        ("restart", "edm"),
    ],
)
def test_runs_keep_as_much(sampler: str, schedule: str) -> None:
    """20,000 draws have the standard deviation that is told, to their own chance of 0.5 %."""
    plan = compile_plan(sampler, schedule=schedule, steps=8)
    one = torch.ones(1, dtype=torch.float64)
    laws = [Mixture(torch.zeros(1, 1, dtype=torch.float64), one * scale, one) for scale in SCALES]

    def by_number(x: Tensor, level: Any, time: Any) -> Tensor:
        return torch.stack([law(x[..., k].reshape(-1, 1), level).reshape(x.shape[:2]) for k, law in enumerate(laws)], 2)

    seeds = list(range(200))
    x = Philox(seeds).first((100, len(SCALES)), one, seeds) * plan.initial_scale
    made = run(plan, by_number, x, seeds=seeds) / plan.end.alpha
    assert (made.std((0, 1)) / torch.tensor(SCALES)).tolist() == pytest.approx(kept(plan, SCALES).tolist(), rel=0.02)


def test_an_end_far_from_the_data_loses_what_is_small() -> None:
    found = {
        grid: kept(compile_plan("ddim", schedule="sqrt_alpha_bar", target="v", grid=grid, steps=50), SCALES)
        for grid in ("trailing", "linspace")
    }
    assert (found["trailing"] < found["linspace"]).all()
    assert math.isclose(float(found["trailing"][2]), 0.247, abs_tol=0.001)


def test_heun_on_a_grid_from_pure_noise_blows_up() -> None:
    plan = compile_plan("heun", schedule="cosine", target="v", grid="trailing", steps=20)
    assert kept(plan, [1.0])[0] > 5


def test_a_run_that_starts_from_a_image_keeps_it() -> None:
    plan = compile_plan("ddim", schedule="linear", between=(300, None), steps=200)
    assert plan.start.alpha > 0.6
    assert kept(plan, SCALES[:2]).tolist() == pytest.approx([1.0, 1.0], abs=0.03)
