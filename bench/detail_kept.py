"""What DDIM's grids keep of images as fine as those of CIFAR-10: `python bench/detail_kept.py --data data/cifar10`.

Images are taken apart by a cosine transform, whose coefficients are treated as Gaussian and on their own. What a plan
makes of each is then exact (core.plan.kept), with a perfect network. Draws docs/results/schedules/detail.png.

    python bench/detail_kept.py --model assets/cifar10-small-linear --model assets/cifar10-small-cosine …

measures the same of networks instead, on images that they make, and draws the first of them: grids.png there.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch

import pellucid
from pellucid import compile_plan
from pellucid.core.plan import kept
from pellucid.evidence.report import charts
from pellucid.evidence.report.page import Table
from pellucid.train.cifar10 import CIFAR10

SCHEDULES = ("linear", "cosine", "sqrt_alpha_bar")
GRIDS = ("trailing", "leading", "linspace", "karras", "exponential", "beta")
STEPS = 50
IMAGES = 10_000
MADE, SHOWN = 128, 12
ASKED = ("beta", "trailing")  # grids that networks are asked on
CHARTS = Path(__file__).parents[1] / "docs/results/schedules"


def spectrum(images: torch.Tensor) -> torch.Tensor:
    """The standard deviation of every coefficient, (3 · 32 · 32,), of images (N, 3, 32, 32) in bytes as [−1, 1]."""
    pixels = images.double().div(127.5).sub(1)
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


def made(model: str, grid: str) -> torch.Tensor:
    """(N, 3, H, W) uint8 of the first seeds."""
    images = pellucid.load(model)(sampler="ddim", grid=grid, steps=STEPS, n=MADE, seed=list(range(MADE))).images
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)


def measured(model: str, grid: str, images: torch.Tensor, sizes: torch.Tensor) -> tuple[str, ...]:
    """Variance of a network's images over that of the data: all, and the smallest quarter of the coefficients."""
    finest, found = sizes <= sizes.quantile(0.25), spectrum(images).square()
    ratios = (found[part].sum() / sizes[part].square().sum() for part in (slice(None), finest))
    return Path(model).name, grid, *(f"{100 * float(ratio):.0f} %" for ratio in ratios)


def draw_rows(rows: dict[str, torch.Tensor], path: Path) -> Path:
    """A row a name, with its images (N, 3, H, W) side by side."""
    width = max(len(images) for images in rows.values())
    figure = charts.canvas(0.75 * width + 2.6, 0.75 * len(rows))
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for panel, (name, images) in zip(panels, rows.items(), strict=True):
        panel.imshow(torch.cat(tuple(images.cpu().permute(0, 2, 3, 1)), 1), interpolation="nearest")
        panel.axis("off")
        panel.text(-6, images.shape[-2] / 2, name, ha="right", va="center", fontsize=9)
    figure.subplots_adjust(left=2.3 / (0.75 * width + 2.6), right=0.995, bottom=0.005, top=0.995, hspace=0.03)
    return charts.save(figure, path)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--model", action="append", default=[], help="a network to measure; may be repeated")
    parser.add_argument("--charts", type=Path, default=CHARTS)
    asked = parser.parse_args()
    sizes = spectrum(CIFAR10.read(asked.data).images[:IMAGES])
    if asked.model:
        found = {(model, grid): made(model, grid) for model in asked.model for grid in ASKED}
        rows = tuple(measured(*names, images, sizes) for names, images in found.items())
        columns: tuple[str, ...] = ("model", "grid", "variance", "of the finest quarter")
        print(Table(f"What {STEPS} calls of DDIM make of networks", columns, rows).markdown())
        shown = {
            f"{Path(model).name.removeprefix('cifar10-small-')}\n{grid}": images[:SHOWN]
            for (model, grid), images in found.items()
        }
        draw_rows(shown, asked.charts / "grids.png")
        return
    rows = tuple(row(schedule, grid, sizes) for schedule in SCHEDULES for grid in GRIDS)
    columns = ("schedule", "grid", "variance kept", "of the finest quarter", "error ÷ size")
    print(Table(f"What {STEPS} calls of DDIM keep", columns, rows).markdown())
    draw(sizes, asked.charts / "detail.png")


if __name__ == "__main__":
    main()
