"""What DDIM's grids keep of pictures as fine as those of CIFAR-10: `python bench/detail_kept.py --data data/cifar10`.

Pictures are taken apart by a cosine transform, whose coefficients are treated as Gaussian and on their own. What a plan
makes of each is then exact (core.plan.kept), with a perfect network. Draws docs/results/schedules/detail.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch

from pellucid import compile_plan
from pellucid.core.plan import kept
from pellucid.evidence.study import charts
from pellucid.evidence.study.table import Table
from pellucid.train.cifar10 import CIFAR10

SCHEDULES = ("linear", "cosine", "sqrt_alpha_bar")
GRIDS = ("trailing", "leading", "linspace", "karras", "exponential", "beta")
STEPS = 50
PICTURES = 10_000
CHART = Path(__file__).parents[1] / "docs/results/schedules/detail.png"


def spectrum(data: Path) -> torch.Tensor:
    """The standard deviation of every coefficient, (3 · 32 · 32,), of pixels in [−1, 1]."""
    pixels = CIFAR10.read(data).images[:PICTURES].double().div(127.5).sub(1)
    side = pixels.shape[-1]
    k, n = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    basis = torch.cos(math.pi / side * (n + 0.5) * k).double() * math.sqrt(2 / side)
    basis[0] /= math.sqrt(2)
    return (basis @ pixels @ basis.T).std(0).flatten()


def row(schedule: str, grid: str, sizes: torch.Tensor) -> tuple[str, ...]:
    plan = compile_plan("ddim", schedule=schedule, target="v", grid=grid, steps=STEPS)
    parts = torch.from_numpy(kept(plan, sizes.tolist()))
    finest = sizes <= sizes.quantile(0.25)
    whole = float((parts * sizes).square().sum() / sizes.square().sum())
    off = float(((parts - 1) * sizes).norm() / sizes.norm())
    return schedule, grid, f"{100 * whole:.1f} %", f"{100 * float(parts[finest].square().mean()):.1f} %", f"{off:.3f}"


def draw(sizes: torch.Tensor, path: Path) -> None:
    at = np.geomspace(0.01, 10, 61)
    figure = charts.canvas(13, 4.4)
    panels = figure.subplots(1, len(SCHEDULES), sharey=True)
    for panel, schedule in zip(panels, SCHEDULES, strict=True):
        share, edges = np.histogram(np.log(sizes.numpy()), bins=40, density=True)
        panel.fill_between(np.exp((edges[1:] + edges[:-1]) / 2), share / share.max(), color="#e9edf2", linewidth=0)
        drawn = [grid for grid in GRIDS if grid != "leading"]  # it lies on linspace
        for grid, colour in zip(drawn, charts.COLOURS, strict=False):
            plan = compile_plan("ddim", schedule=schedule, target="v", grid=grid, steps=STEPS)
            panel.plot(at, kept(plan, at.tolist()), color=colour, linewidth=1.8, label=grid)
        charts.quiet(panel, schedule, "standard deviation of a coefficient", "")
        panel.set_xscale("log")
        panel.set_ylim(0, 1.05)
    panels[0].set_ylabel("kept by 50 calls of DDIM", fontsize=9, color=charts.INK)
    note = "1 is right · grey: how many of CIFAR-10's coefficients are of that size"
    charts.legend(figure, panels[0], note)
    charts.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--chart", type=Path, default=CHART)
    asked = parser.parse_args()
    sizes = spectrum(asked.data)
    rows = tuple(row(schedule, grid, sizes) for schedule in SCHEDULES for grid in GRIDS)
    columns = ("schedule", "grid", "variance kept", "of the finest quarter", "error ÷ size")
    print(Table(f"What {STEPS} calls of DDIM keep", columns, rows).markdown())
    draw(sizes, asked.chart)
    print(asked.chart)


if __name__ == "__main__":
    main()
