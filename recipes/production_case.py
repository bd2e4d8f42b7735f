"""The production case: a fine-tuned model as its people deployed it, and every remedy alone and together.

    pellucid train configs/products_linear.toml --out runs/products_linear
    pellucid train configs/products_cosine.toml --out runs/products_cosine
    python recipes/production_case.py --prompts 500 --device cuda        → docs/results/production_case/

The model went on from scenes-128 with the schedule `linear`; it is deployed under the scheduler config of its base
(cosine), with Euler on the leading grid, 20 steps and guidance 12. An arm that is done is not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.progress import track

from pellucid import scenes
from pellucid.cli import trouble
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence import sheets
from pellucid.evidence.adherence.samples import open_pipe
from pellucid.evidence.adherence.sheets import Card, contact_sheet
from pellucid.evidence.doctor import subject as doctor
from pellucid.evidence.doctor.checks import examine
from pellucid.evidence.doctor.subject import SubjectSpec, open_subject
from pellucid.evidence.report import charts
from pellucid.evidence.report.page import Table
from pellucid.evidence.statistics import Estimate
from pellucid.evidence.study import guidance
from pellucid.evidence.study.guidance_report import FigureKind, GuidanceCell, cell_of_rows
from pellucid.evidence.trace import Recorder
from pellucid.interop.atomic_files import put
from pellucid.interop.source import BUNDLES
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.recipe import Recipe, write_png

ROOT = Path(__file__).parents[1]
SCHEDULER = Path("scheduler/scheduler_config.json")
OBJECTS, STYLE, SEED = (2,), ("soft",), 77
SHOWN, KEPT = 8, 32  # images of an arm on the sheet, and in its folder for the doctor
DEPLOYED = {"sampler": "euler", "grid": "leading", "steps": 20, "guidance": "12"}
KARRAS = {"sampler": "dpmpp_2m", "grid": "karras"}
TRAILING = {"sampler": "dpmpp_2m", "grid": "trailing"}
CAP, RESCALED, THRESHOLD = ({"guidance": words} for words in ("7", "7 + rescale", "7 + mimic scale=4"))
DEPLOYED_MODEL, MATCHED, RETRAINED = "deployed", "matched", "retrained"


@dataclass(frozen=True)
class Arm:
    """One set-up: which of the three models, and what differs from what was deployed."""

    name: str
    model: str
    changes: dict[str, Any]

    @property
    def asked(self) -> dict[str, Any]:
        return {**DEPLOYED, **self.changes}


ARMS = (
    Arm("as deployed", DEPLOYED_MODEL, {}),
    Arm("1 its own schedule", MATCHED, {}),
    Arm("2 trained again, cosine", RETRAINED, {}),
    Arm("3 DPM++ 2M Karras", DEPLOYED_MODEL, KARRAS),
    Arm("4a cap at 7", DEPLOYED_MODEL, CAP),
    Arm("4b cap at 7, rescale", DEPLOYED_MODEL, RESCALED),
    Arm("4c cap at 7, threshold", DEPLOYED_MODEL, THRESHOLD),
    Arm("trailing grid", DEPLOYED_MODEL, {"grid": "trailing"}),
    Arm("1 + 3", MATCHED, KARRAS),
    Arm("1 + 4b", MATCHED, RESCALED),
    Arm("1 + 3 + 4b", MATCHED, KARRAS | RESCALED),
    Arm("2 + 3 + 4b", RETRAINED, KARRAS | RESCALED),
    Arm("1 + 4b, DPM++ 2M trailing", MATCHED, TRAILING | RESCALED),
    Arm("2 + 4b, DPM++ 2M trailing", RETRAINED, TRAILING | RESCALED),
    Arm("1, DPM++ 2M trailing, guidance 4", MATCHED, TRAILING | {"guidance": "4"}),
)
FIGURES = {
    "right": FigureKind("all right", True),
    "bled": FigureKind("colours bled", True),
    "saturation": FigureKind("clipped values", True),
    "sharpness": FigureKind("sharpness of true", False),
    "colourfulness": FigureKind("colourfulness of true", False),
}


def models(linear: Path, cosine: Path, folder: Path) -> dict[str, Path]:
    """The three as folders; the deployed one has the weights of the first and the scheduler config of its base."""
    for name, given in (("--linear", linear), ("--cosine", cosine)):
        if not given.is_dir():
            raise PellucidError(
                rule(name, "the folder of a model, as `pellucid train` leaves it", str(given)), "not-found"
            )
    place = folder / "deployed_model"
    if not place.exists():
        shutil.copytree(linear, place)
        shutil.copyfile(BUNDLES / "scenes-128" / SCHEDULER, place / SCHEDULER)
    return {DEPLOYED_MODEL: place, MATCHED: linear, RETRAINED: cosine}


@dataclass(frozen=True)
class Asked:
    """Prompts of two things, whose combinations were not in training; what each asks for, and the true scenes."""

    texts: list[str]
    queries: list[Any]
    truth: Any

    @staticmethod
    def of(count: int) -> Asked:
        pairs = scenes.prompts(count, OBJECTS, SEED, split="held_out")
        drawn = scenes.sample(torch.arange(count), SEED, "held_out", STYLE, OBJECTS)
        return Asked([text for text, _ in pairs], [query for _, query in pairs], drawn)


def place_of(folder: Path, name: str) -> Path:
    return folder / "arms" / name.replace(" ", "_").replace(",", "").replace("+", "and")


def make(arm: Arm, pipe: Any, asked: Asked, batch: int, folder: Path, device: str) -> dict[str, list[Any]]:
    """The figures of an arm's images, which are kept beside them."""
    place = place_of(folder, arm.name)
    wanted = {"asked": arm.asked, "model": arm.model, "count": len(asked.texts)}
    with contextlib.suppress(OSError, ValueError):
        held = json.loads((place / "figures.json").read_text("utf-8"))
        if held["wanted"] == wanted:
            return held["figures"]
    place.mkdir(parents=True, exist_ok=True)
    made: list[Image.Image] = []
    recipes: list[Recipe] = []
    for first in track(range(0, len(asked.texts), batch), arm.name, transient=True):
        texts = asked.texts[first : first + batch]
        found = pipe(texts, seed=[SEED + first + i for i in range(len(texts))], **arm.asked)
        made += found.images
        recipes += found.recipes
    figures = guidance.joined_rows(
        [
            guidance.measure_images(
                made[i : i + batch], asked.texts[i : i + batch], asked.queries[i : i + batch], None, 1, device
            )
            for i in range(0, len(made), batch)
        ]
    )
    for i, (image, recipe) in enumerate(zip(made[:KEPT], recipes, strict=False)):
        write_png(image, place / f"{i:03d}.png", recipe)  # its prompt says what the doctor compares with
    put(place / "figures.json", json.dumps({"wanted": wanted, "figures": figures}) + "\n")
    return figures


# --- what is shown -------------------------------------------------------------------------------------------------


def shown(found: Estimate, name: str, true: Mapping[str, float]) -> Estimate:
    """Looks are told as a share of those of true images."""
    scale = 1 / true[name] if name in true and name != "saturation" else 1.0
    return found.times(scale)


def table(cells: Mapping[str, GuidanceCell], true: Mapping[str, float], count: int) -> Table:
    rows = []
    for arm in ARMS:
        figures = cells[arm.name].figures
        rows.append((arm.name, *(kind.words(shown(figures[name], name, true)) for name, kind in FIGURES.items())))
    note = (
        f"{count} prompts of two things, the same noise in every row; brackets are 95 % intervals. Of true images "
        f"{100 * true['saturation']:.1f} % of values are clipped."
    )
    return Table(
        "Every remedy, alone and together", ("", *(kind.title for kind in FIGURES.values())), tuple(rows), note
    )


def draw(cells: Mapping[str, GuidanceCell], true: Mapping[str, float], path: Path) -> None:
    """A panel a figure, a row an arm; the bar is the interval, the line what was deployed."""
    figure = charts.canvas(12.5, 5.2)
    panels = figure.subplots(1, len(FIGURES), sharey=True)
    names = [arm.name for arm in ARMS]
    for axes, (name, kind) in zip(panels, FIGURES.items(), strict=True):
        scale = 100 if kind.percent else 1
        for y, arm in enumerate(ARMS):
            found = shown(cells[arm.name].figures[name], name, true)
            low, high = found.ends or (found.value, found.value)
            colour = charts.COLOURS[{DEPLOYED_MODEL: 3, MATCHED: 0, RETRAINED: 2}[arm.model]]
            axes.plot([low * scale, high * scale], [y, y], color=colour, linewidth=2.2, alpha=0.5)
            axes.plot(found.value * scale, y, "o", color=colour, markersize=5)
        first = shown(cells[names[0]].figures[name], name, true).value * scale
        axes.axvline(first, color=charts.FAINT, linewidth=1, linestyle="--")
        charts.quiet(axes, kind.title, "%" if kind.percent else "", "")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    foot = (
        "red: the deployed model; blue: under its own schedule; green: trained again with cosine; dashed: as deployed"
    )
    figure.text(0.5, 0.01, foot, fontsize=9, color=charts.SLATE, ha="center")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    charts.save(figure, path)


def sheet(folder: Path, asked: Asked, cells: Mapping[str, GuidanceCell], path: Path) -> None:
    """Some prompts in rows, arms in columns."""
    columns = ("as deployed", "1 its own schedule", "3 DPM++ 2M Karras", "4b cap at 7, rescale", "1 + 3 + 4b")
    columns += ("1 + 4b, DPM++ 2M trailing", "2 + 4b, DPM++ 2M trailing")
    cards = []
    for i in range(SHOWN):
        for name in columns:
            right = cells[name].by_prompt["right"][i] == 1
            caption = asked.texts[i] if name == columns[0] else ""
            with Image.open(place_of(folder, name) / f"{i:03d}.png") as image:
                cards.append(Card(image.convert("RGB"), caption, name, bool(right)))
    sheets.save_png(contact_sheet(cards, "Before and after: one prompt per row", len(columns)), path)


def diagnose(pipe: Pipeline, model: Path, folder: Path, asked: Asked) -> str:
    """What the doctor says of the deployed model, of one of its runs, and of its images."""
    trace = folder / "deployed.trace"
    with Recorder(trace, overwrite=True) as recorder:
        pipe(asked.texts[0], seed=SEED, observers=[recorder], **DEPLOYED)
    how = doctor.RunSpec(**{name: DEPLOYED[name] for name in ("sampler", "grid", "steps")}, device=str(pipe.device))
    subjects = {
        "the model": open_subject(SubjectSpec(model=str(model), data="scenes"), how),
        "a run": open_subject(SubjectSpec(trace=str(trace))),
        "its images": open_subject(SubjectSpec(images=str(place_of(folder, ARMS[0].name)))),
    }
    said = "\n".join(f"# {name}\n\n{examine(subject).text()}\n" for name, subject in subjects.items())
    return said.replace(str(folder), "out")


def run(asked: argparse.Namespace) -> None:
    if asked.prompts < SHOWN or asked.batch < 1:
        raise PellucidError(
            rule("--prompts, --batch", f"at least {SHOWN}, and at least 1", (asked.prompts, asked.batch)), "usage"
        )
    prompts = Asked.of(asked.prompts)
    found = models(asked.linear, asked.cosine, asked.work)
    figures: dict[str, dict[str, list[Any]]] = {}
    true: dict[str, float] = {}
    for model in (DEPLOYED_MODEL, MATCHED, RETRAINED):
        pipe = open_pipe(found[model], device=asked.device)
        for arm in (arm for arm in ARMS if arm.model == model):
            figures[arm.name] = make(arm, pipe, prompts, asked.batch, asked.work, asked.device)
            print(f"{arm.name}: {sum(figures[arm.name]['right'])} of {asked.prompts} right", flush=True)
        if model == DEPLOYED_MODEL:
            said = diagnose(pipe, found[model], asked.work, prompts)
            row = guidance.looks_of_scenes(prompts.truth, (128, 128), pipe)
            true = {name: math.fsum(values) / len(values) for name, values in row.items()}
    cells = {name: cell_of_rows(name, [row], 1) for name, row in figures.items()}
    asked.out.mkdir(parents=True, exist_ok=True)
    put(asked.out / "table.md", table(cells, true, asked.prompts).markdown())
    draw(cells, true, asked.out / "arms.png")
    sheet(asked.work, prompts, cells, asked.out / "before_after.png")
    put(asked.out / "doctor.txt", said)
    print((asked.out / "table.md").read_text())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The production case, measured.")
    parser.add_argument("--linear", type=Path, default=ROOT / "runs/products_linear/model")
    parser.add_argument("--cosine", type=Path, default=ROOT / "runs/products_cosine/model")
    parser.add_argument("--prompts", type=int, default=500, help=f"{SHOWN} or more")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=ROOT / "out/production_case", help="images and figures of arms")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/production_case")
    try:
        run(parser.parse_args(words))
    except PellucidError as error:
        return trouble(error.code, str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
