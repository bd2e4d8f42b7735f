"""Tuned plans of scenes-128 beside all that is untuned: `python bench/tuned_scenes.py`, a minute of two cores.

Draws what the plans of the bundle hold as evidence, and makes the same six pictures with them and with others:
docs/results/tune_scenes/errors.png and pictures.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import pellucid
from pellucid import scenes
from pellucid.core.plan import Plan
from pellucid.evidence.study import charts
from pellucid.pipeline.planning import read_plan

MODEL, SEED = "scenes-128", 5000
GUIDANCE = pellucid.guarded(4.0)  # as `pellucid tune --guidance 4` takes it
PLANS = (5, 8)
COUNT = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/tune_scenes"))
    given = parser.parse_args()
    plans = {calls: read_plan(f"{MODEL}/plans/{calls}.json") for calls in PLANS}
    given.out.mkdir(parents=True, exist_ok=True)
    print(draw_errors({calls: plan.evidence for calls, plan in plans.items()}, given.out / "errors.png"))
    print(draw_pictures(plans, given.out / "pictures.png"))


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


def draw_pictures(plans: dict[int, Plan], path: Path) -> Path:
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
        axes.set_title(wrapped(prompt), fontsize=6.5)
    figure.tight_layout()
    return charts.save(figure, path)


def wrapped(prompt: str, width: int = 26) -> str:
    lines = [""]
    for word in prompt.split():
        lines += [""] if len(lines[-1]) + len(word) > width else []
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    with torch.no_grad():
        main()
