"""What the detectors of target and schedule say of models that were truly trained differently.

    python recipes/detectors.py                          → a table, as in docs/doctor_models.md

Every run that is there is asked twice: under its own config, and under one that is wrong in both. The truth is what
its run was trained with. The kept models of bundles and assets/ are always there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pellucid.cli import trouble
from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError, rule
from pellucid.core.schedule import Schedule
from pellucid.evidence.doctor.hypotheses import detect
from pellucid.evidence.doctor.probe import Probe, probe_of
from pellucid.evidence.doctor.subject import RunSpec, SubjectSpec, open_subject
from pellucid.evidence.report.page import Table

ROOT = Path(__file__).parents[1]
LATENTS, PIXELS = "scenes", "data/cifar10:test"
RUNS = {
    "runs/scenes_text_unet_layout": LATENTS,
    "runs/scenes_text_dit_longer": LATENTS,
    "runs/products_linear": LATENTS,
    "runs/products_cosine": LATENTS,
    "runs/detector_flow": LATENTS,
    **{f"data/studies/small_eps/runs/{name}-0": PIXELS for name in ("linear", "cosine", "sqrt_alpha_bar")},
}
SMALL = {f"assets/cifar10-small-{name}": ("v", name) for name in ("linear", "cosine", "sqrt_alpha_bar")}
KEPT = {
    "src/pellucid/bundles/scenes-128": ("v", "cosine"),
    "src/pellucid/bundles/scenes-128/dit": ("eps", "scaled_linear"),
    "assets/cifar10-cosine": ("v", "cosine"),
    **SMALL,
}
RUNS |= {name: LATENTS if "scenes" in name else PIXELS for name in KEPT}
HEAD = ("run", "space", "trained for", "config", "target", "confidence", "schedule", "confidence", "pictures")


def truth_of(run: Path) -> tuple[str, str]:
    """The target and the schedule of a run's config; of a kept model as its own page says."""
    if (name := run.relative_to(ROOT).as_posix()) in KEPT:
        return KEPT[name]
    objective: dict[str, Any] = json.loads((run / "config.json").read_text("utf-8"))["config"]["task"]["objective"]
    return objective["target"], objective["schedule"]["name"]


def wrong(probe: Probe) -> Probe:
    """The same network under a config that is wrong in target and schedule."""
    told: Schedule = schedules.make("cosine" if "linear" in probe.schedule.name else "linear")
    return replace(probe, target="eps" if probe.target != "eps" else "v", schedule=told)


def rows(runs: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for name in runs:
        run, data = ROOT / name, RUNS[name]
        target, schedule = truth_of(run)
        place = run if name in KEPT else run / "model"
        given = SubjectSpec(model=str(place), data=data if data == LATENTS else str(ROOT / data))
        probe = probe_of(open_subject(given, RunSpec()))
        for config, asked in (("its own", probe), ("wrong", wrong(probe))):
            found = detect(asked)
            right = found.target.name == target, found.schedule.name == schedule
            answers = [
                (answer.name if sure else f"{answer.name} (WRONG)", f"{answer.confidence:.4f}")
                for answer, sure in zip(found, right, strict=True)
            ]
            space = "latents" if data == LATENTS else "pixels"
            count = str(found.target.scores.images)
            print(*answers[0], *answers[1], name, config, file=sys.stderr, flush=True)  # a minute each: it goes on
            yield name, space, f"{target}, {schedule}", config, *answers[0], *answers[1], count


def main() -> int:
    words = argparse.ArgumentParser(description="The detectors on models that were trained differently.")
    words.add_argument("runs", nargs="*", help="some of the runs; all that are here when not given")
    asked = words.parse_args()
    here = [name for name in RUNS if name in KEPT or (ROOT / name / "model").is_dir()]
    unknown = sorted(set(asked.runs) - set(here))
    try:
        if unknown or not here:
            raise PellucidError(rule("runs", f"finished ones among {', '.join(RUNS)}", ", ".join(unknown)), "not-found")
        print(Table("Detected", HEAD, tuple(rows(asked.runs or here)), "").markdown())
    except PellucidError as error:
        return trouble(error.code, str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
