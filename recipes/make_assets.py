"""Keeps models of the schedule studies for later ones, in float16:

    python recipes/make_assets.py out/cifar10_schedules --best --most 16 --out assets
    python recipes/make_assets.py out/cifar10_schedules_small --most 2 --name cifar10-small --out assets

Models are those of the first seed. `--best` keeps the schedule with the least FID alone; otherwise each is kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import pellucid
from pellucid.cli import trouble
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.study.schedules import RUNS, ScheduleResults


def main() -> int:
    words = argparse.ArgumentParser(description="Keep models of a schedule study.")
    words.add_argument("study", type=Path, help="the folder of a study that is done")
    words.add_argument("--out", type=Path, required=True, help="a folder for the models")
    words.add_argument("--name", default="cifar10", help="what their names begin with")
    words.add_argument("--best", action="store_true", help="only the schedule with the least FID")
    words.add_argument("--most", type=float, default=16, help="megabytes that a model may have")
    asked = words.parse_args()
    try:
        found = ScheduleResults.read(asked.study)
        for schedule in chosen(found, asked.best):
            size = keep(found, schedule, asked.out / f"{asked.name}-{schedule}", asked.most)
            print(f"{size / 1e6:6.2f} MB → {asked.out / f'{asked.name}-{schedule}'}")
    except PellucidError as error:
        return trouble(error.code, str(error))
    return 0


def chosen(found: ScheduleResults, best: bool) -> tuple[str, ...]:
    """The schedules to keep, of a study in which every one has come to its end."""
    seed, last = found.study.seeds[0], found.study.points[-1]
    fids = {name: found.at(name, last)[seed]["fid"] for name in found.study.schedules if seed in found.at(name, last)}
    if missing := [name for name in found.study.schedules if name not in fids]:
        raise PellucidError(rule("study", "done", f"without the last score of {', '.join(missing)}"), "study-folder")
    return (min(fids, key=lambda name: fids[name]),) if best else found.study.schedules


def keep(found: ScheduleResults, schedule: str, goal: Path, most: float) -> int:
    """Writes a run's model (the running mean of its weights) in float16; its bytes."""
    model = pellucid.load(found.folder / RUNS / f"{schedule}-{found.study.seeds[0]}" / "model", device="cpu")
    size = 2 * sum(weight.numel() for weight in model.components.network.parameters())
    if size > most * 1e6:
        raise PellucidError(
            rule(f"model of {schedule}", f"at most {most:g} MB in float16", f"{size / 1e6:.2f} MB"), "asset-size"
        )
    goal.parent.mkdir(parents=True, exist_ok=True)
    model.save(goal, dtype=torch.float16, overwrite=True)
    return sum(path.stat().st_size for path in goal.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
