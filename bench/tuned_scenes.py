"""Tuned plans of scenes-128 beside all that is untuned: `python bench/tuned_scenes.py`, a minute of two cores.

Draws what the plans of the bundle hold as evidence, and makes the same six images with them and with others:
docs/results/tune_scenes/errors.png and pictures.png. With `--study`, the folder of a sampler study of scenes with the
plan of 8 calls and DDIM in it, also colours.png: what DDIM gets right at 8 calls and the tuned plan does not.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

import torch

import pellucid
from pellucid import scenes
from pellucid.core.plan import Plan
from pellucid.evidence.adherence import sheets
from pellucid.evidence.report import charts
from pellucid.evidence.study.kernel import Records
from pellucid.evidence.study.samplers import IMAGES, SamplerBatch
from pellucid.evidence.study.setups import folder_of
from pellucid.pipeline.prepare import read_plan

MODEL, SEED = "scenes-128", 5000
GUIDANCE = pellucid.guarded(4.0)  # as `pellucid tune --guidance "guarded 4"` takes it
PLANS = (5, 8)
COUNT = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/tune_scenes"))
    parser.add_argument("--study", type=Path)
    given = parser.parse_args()
    plans = {calls: read_plan(f"{MODEL}/plans/{calls}.json") for calls in PLANS}
    given.out.mkdir(parents=True, exist_ok=True)
    print(draw_errors({calls: plan.evidence for calls, plan in plans.items()}, given.out / "errors.png"))
    print(draw_images(plans, given.out / "pictures.png"))
    if given.study is not None:
        print(draw_misses(given.study, given.out / "colours.png"))


def draw_errors(told: dict[int, dict[str, Any]], path: Path) -> Path:
    """Mean errors over the calls, with intervals: the best untuned, the usual plan, the tuned ones."""
    figure = charts.canvas(7, 3.6)
    axes = figure.subplots()
    untuned = sorted((row for one in told.values() for row in one["untuned"]), key=lambda row: row["calls"])
    for colour, which, words in ((0, "best", "best untuned"), (1, "usual", "DPM++ 2M Karras")):
        rows = [row for row in untuned if row["which"] == which]
        axes.errorbar(*spread(rows), color=charts.COLOURS[colour], marker="o", ms=4, label=words)
    best = [row for row in untuned if row["which"] == "best"]
    for row in best:
        words, side = row["name"].replace(":", "\n"), "right" if row is best[-1] else "center"
        axes.annotate(words, (row["calls"], row["mean"]), (4, 7), textcoords="offset points", fontsize=7, ha=side)
    tuned = [{"calls": calls, **one["held_out"]["tuned"]} for calls, one in told.items()]
    axes.errorbar(*spread(tuned), color=charts.COLOURS[2], marker="*", ms=12, ls="", label="tuned")
    for one in tuned:
        axes.axhline(one["mean"], color=charts.COLOURS[2], lw=0.8, ls=":")
    charts.quiet(axes, "scenes-128: distance from the converged latents", "model calls", "mean error")
    axes.set(yscale="log", xticks=sorted({row["calls"] for row in untuned} | set(told)), yticks=[0.1, 0.2, 0.5, 1, 2])
    axes.get_yaxis().set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return charts.save(figure, path)


def spread(rows: list[dict[str, Any]]) -> tuple[list[int], list[float], list[list[float]]]:
    """Calls, means, and how far their intervals reach below and above."""
    sides = [[row["mean"] - row["low"] for row in rows], [row["high"] - row["mean"] for row in rows]]
    return [row["calls"] for row in rows], [row["mean"] for row in rows], sides


def draw_images(plans: dict[int, Plan], path: Path) -> Path:
    """A row a plan, a column a prompt that training has never seen; the first prompts and seeds, not chosen ones."""
    pipe = pellucid.load(MODEL)
    prompts = [caption for caption, _ in scenes.prompts(COUNT, seed=SEED, split="held_out")]
    ways: dict[str, dict[str, Any]] = {
        "tuned, 5 calls": {"plan": plans[5]},
        "DPM++ 2M, ays, 5 calls": {"sampler": "dpmpp_2m", "grid": "ays", "steps": 5},
        "tuned, 8 calls": {"plan": plans[8]},
        "DPM++ 2M, ays, 8 calls": {"sampler": "dpmpp_2m", "grid": "ays", "steps": 8},
        "iPNDM-2, ays_svd, 14 calls": {"sampler": "ipndm", "grid": "ays_svd", "steps": 14, "options": {"order": 2}},
        "DPM++ 3M, 200 calls": {"sampler": "dpmpp_3m", "grid": "exponential", "steps": 200},
    }
    figure = charts.canvas(1.5 * COUNT + 1.9, 1.5 * len(ways) + 0.6)
    grid = figure.subplots(len(ways), COUNT)
    for row, (words, how) in zip(grid, ways.items(), strict=True):
        made = pipe(prompt=prompts, seed=list(range(SEED, SEED + COUNT)), guidance=GUIDANCE, **how).images
        for axes, image in zip(row, made, strict=True):
            axes.imshow(image)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(words.replace(", ", "\n"), rotation=0, ha="right", va="center", fontsize=9)
    for axes, prompt in zip(grid[0], prompts, strict=True):
        axes.set_title(textwrap.fill(prompt, 26), fontsize=6.5)
    figure.tight_layout()
    return charts.save(figure, path)


def draw_misses(study: Path, path: Path, across: int = 7) -> Path:
    """The images that only DDIM gets right, in bands of three rows: the tuned plan's, DDIM's, the converged ones."""
    scenes_read = [row for row in Records.shared(study, SamplerBatch._fields).rows if row["what"] == "scenes"]
    cells = list(dict.fromkeys(row["cell"] for row in scenes_read))
    tuned = next(cell for cell in cells if "#" in cell and cell.endswith("× 8"))
    chosen = [tuned, "ddim × 8", next(cell for cell in cells if cell.startswith("converged"))]
    held = {(row["cell"], row["first"]): row["right"] for row in scenes_read}
    misses = [
        (first, k)
        for (cell, first), right in held.items()
        if cell == chosen[0]
        for k, mine in enumerate(right)
        if not mine and held[chosen[1], first][k]
    ]
    bands = -(-len(misses) // across)
    figure = charts.canvas(1.3 * across + 1, 1.35 * 3 * bands)
    grid = figure.subplots(3 * bands, across, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for number, (first, k) in enumerate(misses):
        for row, (cell, words) in enumerate(zip(chosen, ("tuned, 8", "DDIM, 8", "100 calls"), strict=True)):
            axes = grid[3 * (number // across) + row, number % across]
            sheet = study / IMAGES / folder_of(cell) / f"{first:06d}.png"
            axes.imshow(sheets.read_tiles(sheet, len(held[cell, first]))[k])
            if number % across == 0:
                axes.text(-0.1, 0.5, words, transform=axes.transAxes, ha="right", va="center", fontsize=9)
    figure.subplots_adjust(left=0.1, right=0.99, bottom=0.01, top=0.99, wspace=0.04, hspace=0.04)
    return charts.save(figure, path)


if __name__ == "__main__":
    with torch.no_grad():
        main()
