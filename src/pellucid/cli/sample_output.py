"""`pellucid sample --trace`: a recorder for each run, and where its file goes."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli import output
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.trace.recorder import Recorder

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.progress import Progress

    from pellucid.core.loop import StepSeen
    from pellucid.pipeline.pipeline import Result
    from pellucid.pipeline.recipe import Recipe


# --- Traces ---------------------------------------------------------------------------------------------------------


@dataclass
class TraceFiles:
    """The traces of a call of `pellucid sample`: one file for one run, numbered files for several."""

    path: Path
    tensors: bool = False
    overwrite: bool = False
    runs: int = 1
    written: list[Path] = field(default_factory=list)

    @staticmethod
    def of(params: dict[str, Any]) -> TraceFiles | None:
        """As asked; refuses, before any work, what could not be written."""
        if params["trace"] is None:
            if params["trace_tensors"]:
                raise PellucidError("--trace-tensors must come with --trace FILE; got it alone.", "usage")
            return None
        return TraceFiles(params["trace"], params["trace_tensors"], params["overwrite"])

    def expect(self, runs: int) -> None:
        """So many runs will come: none of their files may be in the way."""
        self.runs = runs
        for number in range(1, runs + 1):
            output.destination(self.name(number), "--trace", overwrite=self.overwrite)

    def name(self, number: int) -> Path:
        return self.path if self.runs == 1 else self.path.with_stem(f"{self.path.stem}-{number:03d}")

    @contextmanager
    def recorder(self) -> Iterator[Recorder]:
        """The recorder of the next run."""
        path = self.name(len(self.written) + 1)
        with Recorder(path, self.tensors, overwrite=self.overwrite) as made:
            yield made
        self.written.append(path)


# --- Files, bar and report ------------------------------------------------------------------------------------------

STEM = "out"
IMAGES = (".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg", ".pdf")  # not written; no folders' names


# --- names -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputPaths:
    """Where images go: one file, or a folder and the stem of their names."""

    folder: Path
    stem: str = STEM
    file: Path | None = None
    overwrite: bool = False

    def path(self, seed: int, number: int | None = None, used: Collection[Path] = ()) -> Path:
        """The file of an image; `number` where there are several prompts. A taken name gets a number behind it."""
        if self.file is not None:
            return self.free(self.file)
        stem = self.stem if number is None else f"{self.stem}-{number:04d}"
        names = (f"{stem}-{seed}{'' if i == 1 else f'-{i}'}.png" for i in count(1))
        paths = (self.folder / name for name in names)
        return next(p for p in paths if p not in used and (self.overwrite or not os.path.lexists(p)))

    def free(self, path: Path) -> Path:
        return output.destination(path, "--out", overwrite=self.overwrite).path

    def keep(self, image: Image, recipe: Recipe, number: int | None, used: Collection[Path]) -> Path:
        """Writes an image under a name that is free; where another process takes the name meanwhile, under the next."""
        while True:
            path = self.path(recipe.seed, number, used)
            try:
                self.write(path, image, recipe)
            except PellucidError as error:
                if self.file is not None or error.code != "file-exists":
                    raise
            else:
                return path

    def write(self, path: Path, image: Image, recipe: Recipe, axes: str | None = None) -> None:
        """Writes an image, or a sheet, with its recipe."""
        from pellucid.pipeline.recipe import write_png

        held = io.BytesIO()
        write_png(image, held, recipe, axes)
        output.Destination(path, "--out", self.overwrite).write(lambda part: part.write_bytes(held.getvalue()))


def output_paths(out: Path | None, overwrite: bool, several: bool) -> OutputPaths:
    """Refuses, before any work, what could not be written. A folder is made where its parent exists."""
    if out is None:
        output.writable(Path(), "--out")
        return OutputPaths(Path(), overwrite=overwrite)
    if out.suffix.lower() == ".png" and not out.is_dir():
        goal = OutputPaths(out.parent, out.stem, None if several else out, overwrite)
        if several:
            output.writable(out.parent, "--out")
        else:
            goal.free(out)
        return goal
    if out.suffix.lower() in IMAGES and not out.is_dir():
        raise PellucidError(rule("--out", "a file that ends in .png, or a folder", str(out)), "file-type")
    if not out.is_dir():
        if os.path.lexists(out) or not out.parent.is_dir():
            raise PellucidError(rule("--out", "a folder, or a new one in a folder that exists", str(out)), "file")
        output.writable(out.parent, "--out")
        out.mkdir()
    output.writable(out, "--out")
    return OutputPaths(out, overwrite=overwrite)


def cell_name(number: int, settings: dict[str, Any]) -> str:
    """A file name that says what the cell is: `03-guidance=5-steps=20.png`."""
    words = "-".join(f"{key}={value}" for key, value in reversed(settings.items()))
    return f"{number:02d}-{re.sub(r'[^A-Za-z0-9=.,+-]+', '_', words)[:100]}.png"


# --- a bar while it works --------------------------------------------------------------------------------------


@dataclass
class StepBar:
    """The steps of all runs on one bar, and the stage at work; without a terminal it shows nothing."""

    progress: Progress
    task: Any
    unit: str = "image"  # or cell, of a sheet
    total: int = 1
    done: int = 0
    left: int = 0  # steps of this run

    def say(self, stage: str) -> None:
        at = f"{self.unit} {min(self.done + 1, self.total)}/{self.total} · " if self.total > 1 else ""
        self.progress.update(self.task, description=f"{at}{stage}")

    def begin(self, units: int, steps: int) -> None:
        """After loading: so many images or cells, and steps of all runs together."""
        self.total = units
        self.progress.reset(self.task, total=steps)
        self.say("encode")

    def run(self, steps: int) -> None:
        self.left = steps
        self.say("encode")

    def __call__(self, seen: StepSeen) -> None:
        """An observer: one step is done."""
        self.left -= 1
        self.progress.advance(self.task)
        self.say("denoise" if self.left else "decode")


@contextmanager
def step_bar(quiet: bool) -> Iterator[StepBar]:
    """The bar on a terminal's stderr; it disappears when the work is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        yield StepBar(progress, progress.add_task("load", total=None))


# --- words at the end ------------------------------------------------------------------------------------------


@dataclass
class SampleReport:
    """What was made, as it is made."""

    model: str = ""
    load_seconds: float = 0.0
    files: list[Path] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    calls: int = 0
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    receipt: str | None = None
    sheet: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    traces: list[Path] = field(default_factory=list)

    def note(self, *texts: str) -> None:
        self.notes += [text for text in dict.fromkeys(texts) if text not in self.notes]

    def add(self, result: Result) -> None:
        """Counts what a run took."""
        self.recipes += result.recipes
        self.calls += result.plan.nfe
        self.receipt = None if result.receipt is None else str(result.receipt)
        self.note(*result.notes)
        for stage in result.stages:
            known = self.stages.setdefault(stage.name, {"name": stage.name, "seconds": 0.0, "peak": None})
            known["seconds"] += stage.seconds
            known["peak"] = max((p for p in (known["peak"], stage.peak) if p is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "files": [str(path) for path in self.files],
            "seeds": [recipe.seed for recipe in self.recipes],
            "load_seconds": self.load_seconds,
            "stages": list(self.stages.values()),
            "calls": self.calls,
            "notes": self.notes,
            "receipt": self.receipt,
            "sheet": self.sheet,
            "from": self.source,
            "traces": [str(path) for path in self.traces],
            "recipes": [recipe.to_dict() for recipe in self.recipes],
        }


def show_report(report: SampleReport) -> None:
    """Files with their seeds, what each stage took, and what to mind."""
    screen = output.console()

    def say(text: str, **style: Any) -> None:
        screen.print(text, soft_wrap=True, markup=False, **style)

    for line in source_lines(report.source):
        say(line)
    if report.sheet is not None:
        say(f"wrote {report.sheet['file']}: {report.sheet['axes']}", style="bold")
        if report.sheet["cells"]:
            say(f"cells in {report.sheet['cells']}")
    else:
        for path, recipe in zip(report.files, report.recipes, strict=True):
            say(f"wrote {path}: {settings_text(recipe)}", style="bold")
    took = {"load": report.load_seconds, **{name: stage["seconds"] for name, stage in report.stages.items()}}
    say(
        " · ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items()) + f" · {call_count(report.calls)}",
        style="dim",
    )
    for path in report.traces:
        say(f"traced {path}: pellucid trace show {path}")
    if report.receipt is not None:
        say(report.receipt)
    for text in report.notes:
        say(f"note: {text}")


def call_count(count: int) -> str:
    return f"{count} model call" + ("" if count == 1 else "s")


def settings_text(recipe: Recipe) -> str:
    """The settings of an image in a line."""
    from pellucid.core.samplers import REGISTRY
    from pellucid.models.guidance import Guidance

    title = REGISTRY[recipe.sampler].title if recipe.sampler in REGISTRY else recipe.sampler
    grid = recipe.grid.get("name", "")
    size = f"{recipe.size[0]}×{recipe.size[1]}" if recipe.size else ""
    guided = Guidance.parse(recipe.guidance).text() if recipe.guidance else ""
    parts = [f"seed {recipe.seed}", size, f"{title} ({grid}), {recipe.steps} steps", f"guidance {guided}"]
    return " · ".join(part for part in parts if part)


def source_lines(source: dict[str, Any] | None) -> list[str]:
    """What `--from` read, what it did not, what was said otherwise, and how the pixels compare."""
    if source is None:
        return []
    lines = [f"from {source['file']}: {source['kind']}"]
    for name, words in (("understood", source["understood"]), ("not understood", source["unread"])):
        if words:
            lines.append(f"{name}: " + ", ".join(f"{key} {value}".strip() for key, value in words.items()))
    if source["changed"]:
        lines.append("changed: " + "; ".join(source["changed"]))
    if source["pixels"]:
        lines.append(source["pixels"])
    return lines
