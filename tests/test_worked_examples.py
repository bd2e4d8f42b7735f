"""What you write to add a sampler, a network, a metric or a check: each a complete example that runs.

CONTRIBUTING.md says where each belongs. A study is added in tests/evidence/test_study_kernel.py in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import pellucid
from pellucid.core.grid import Path
from pellucid.core.plan import ANCHOR, P0, X, row
from pellucid.core.samplers import registry
from pellucid.core.samplers.registry import Draft, sampler
from pellucid.core.samplers.steps import first_order
from pellucid.evidence.doctor import checks
from pellucid.evidence.doctor.checks import Finding, check, examine
from pellucid.evidence.doctor.subject import Subject
from pellucid.evidence.qualities import each
from pellucid.evidence.statistics import mean_interval
from pellucid.evidence.study.oracle_orders import Case, measure
from pellucid.interop import components
from pellucid.interop.components import Kind, build, read_config
from pellucid.models import config


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples leave no trace in the registries."""
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
    monkeypatch.setattr(registry, "NAMES", dict(registry.NAMES))
    monkeypatch.setattr(components, "KINDS", dict(components.KINDS))
    monkeypatch.setattr(checks, "CHECKS", {})


# --- a sampler: one function in core/samplers/FAMILY.py -------------------------------------------------------------


def test_a_sampler() -> None:
    """A midpoint rule in λ: DDIM to the middle of each step, whose prediction then carries the whole step."""

    @sampler(
        name="ddim_midpoint",
        title="DDIM midpoint",
        family="runge-kutta",
        order=2,
        deterministic=True,
        suits="an example",
        paper="Lu et al. 2022, DPM-Solver, alg. 1, on x0",
        calls=2,
    )
    def ddim_midpoint(path: Path) -> Draft:
        rows = []
        for leg in path.legs:
            step = row(leg.time, leg.start, first_order(leg.start, leg.end))
            if leg.end.sigma > 0:
                middle = path.between(leg.start, leg.end, 0.5)
                step = row(leg.time, leg.start, first_order(leg.start, middle), X)
                rows.append(step)
                step = row(path.time_at(middle.ratio), middle, first_order(leg.start, leg.end, ANCHOR, P0))
            rows.append(step)
        return Draft(rows)

    plan = pellucid.compile_plan("ddim midpoint", schedule="cosine", target="v", steps=6)  # the marginal law is checked
    assert plan.nfe == 11  # two calls per step; the last step, to the data, is a single one
    assert measure(Case("ddim_midpoint", 2)).order == pytest.approx(2, abs=0.3)  # the order law


# --- a network: models/NAME.py, and its class in interop/components.py -----------------------------------------------


@dataclass(frozen=True)
class PixelMLPConfig:
    """The keys of its config.json; those that only one value supports are FIXED."""

    in_channels: int = 3
    hidden_size: int = 32
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"act_fn": ("silu",)}


class PixelMLP(nn.Module):
    """Each pixel on its own: enough for an example."""

    def __init__(self, c: PixelMLPConfig) -> None:
        super().__init__()
        self.config = c
        self.proj_in = nn.Linear(c.in_channels + 1, c.hidden_size)
        self.proj_out = nn.Linear(c.hidden_size, c.in_channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        times = (time / 1000).reshape(-1, 1, 1, 1).to(x).expand(len(x), *x.shape[2:], 1)
        hidden = self.proj_in(torch.cat([x.movedim(1, -1), times], -1))  # (B, H, W, hidden)
        return self.proj_out(nn.functional.silu(hidden)).movedim(-1, 1)


def test_a_network() -> None:
    """A class that diffusers' config.json names is read strictly, filled with weights and sampled."""
    components.KINDS["PixelMLPModel"] = Kind(lambda raw: config.read(PixelMLPConfig, raw), PixelMLP)
    settings = read_config("PixelMLPModel", {"hidden_size": 8}, "unet")
    weights = PixelMLP(settings).state_dict()
    network = build("PixelMLPModel", settings, weights, name="unet")
    plan = pellucid.compile_plan("ddim", schedule="linear", target="eps", steps=4)
    start = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * plan.initial_scale
    with torch.no_grad():
        denoise = pellucid.denoiser(network, schedule="linear", target="eps", x0_filter=pellucid.Clip(1.0))
        x = pellucid.run(plan, denoise, start)
    assert x.shape == start.shape
    assert x.isfinite().all()
    with pytest.raises(pellucid.PellucidError, match="hidden_sizes"):
        read_config("PixelMLPModel", {"hidden_sizes": 8}, "unet")


# --- a metric: a function of pixels in evidence/qualities.py, of features in evidence/metrics ------------------------


def contrast(pixels: Tensor) -> Tensor:
    """(N,) float64: the standard deviation of the grey values of each image."""
    return each(pixels, lambda x: x.mean(1).flatten(1).std(1, correction=0))


def test_a_metric() -> None:
    """What it keeps still is its law; bytes and floats agree; an interval over images comes with it."""
    pixels = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    values = contrast(pixels)
    torch.testing.assert_close(contrast(pixels.flip(3)), values)  # a mirror image has the same contrast
    torch.testing.assert_close(contrast(pixels / 2), values / 2)
    torch.testing.assert_close(contrast((pixels * 255).round().byte()), values, atol=1e-3, rtol=0)
    found = mean_interval(values)
    assert found.value == pytest.approx(float(values.mean()))
    assert found.low < found.value < found.high


# --- a check: a function in evidence/doctor/THEME.py -----------------------------------------------------------------


def test_a_check() -> None:
    """Its parameters are what it needs; without them it is skipped, and the report says why."""

    @check("few training times")
    def few_training_times(subject: Subject, scheduler: Mapping[str, Any]) -> Iterator[Finding]:
        count = scheduler.get("num_train_timesteps", 1000)
        if count < 100:
            yield Finding(
                code="few-training-times",
                severity="warning",
                title=f"The schedule has {count} times",
                evidence=(("num_train_timesteps", count),),
                cause="Between times that far apart a network has to guess.",
                fix="Train with 1000, or sample with fewer steps than there are times.",
            )

    mine = [checks.CHECKS["few training times"]]
    found = examine(Subject("a model", scheduler={"num_train_timesteps": 20}), mine)
    assert [finding.code for finding in found.findings] == ["few-training-times"]
    assert not examine(Subject("a model", scheduler={"num_train_timesteps": 1000}), mine).findings
    assert examine(Subject("a model"), mine).skipped[0][0] == "few training times"
