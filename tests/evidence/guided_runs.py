"""Runs of an exact guided denoiser, recorded as any run is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.core.batch import Prediction
from pellucid.core.compile import compile_plan
from pellucid.core.grid import Grid
from pellucid.core.loop import run
from pellucid.core.oracle import Mixture
from pellucid.core.plan import Plan
from pellucid.evidence import trace
from pellucid.evidence.doctor.subject import Subject

SHAPE = (4, 8, 8)


def part(mean: float, spread: float) -> Mixture:
    return Mixture(torch.tensor([[mean]]).double(), torch.tensor([spread]).double(), torch.ones(1).double())


def each(mixture: Mixture, x: Tensor, level: Any) -> Tensor:
    """The posterior mean, every number for itself."""
    return mixture(x.reshape(-1, 1), level).reshape(x.shape)


@dataclass(frozen=True)
class Guided:
    """Numbers of standard deviation 1, guided to those about 0.2; `prompt` off makes cond what uncond is."""

    scale: float = 3.0
    prompt: bool = True
    breaks_below: float = -1.0  # sigma / alpha

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        uncond = each(part(0.0, 1.0), x, level)
        cond = each(part(0.2, 1.0), x, level) if self.prompt else uncond
        x0 = uncond + self.scale * (cond - uncond)
        if level.ratio < self.breaks_below:
            x0 = x0 * torch.nan
        return Prediction(x0, uncond, {"cond": cond, "uncond": uncond})


def plan(final: str = "zero", sampler: str = "ddim") -> Plan:
    return compile_plan(sampler, schedule="scaled_linear", grid=Grid("trailing", final=final), steps=12)  # type: ignore[arg-type]


def recorded(folder: Path, denoiser: Guided, table: Plan | None = None, x: Tensor | None = None) -> Subject:
    """The trace of a run of two images."""
    with trace.Recorder(folder / "run.trace") as recorder:
        shape = None if x is not None else SHAPE
        run(table or plan(), denoiser, x, shape=shape, seeds=[1, 2], observers=[recorder])
    return Subject("run", trace=trace.read(folder / "run.trace"))


def cut() -> Plan:
    """A plan that ends at sigma / alpha 0.3."""
    grid = Grid("karras", sigma_min=0.3, final="sigma_min")
    return compile_plan("ddim", schedule="scaled_linear", grid=grid, steps=9)
