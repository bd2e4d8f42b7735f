"""`pellucid sample` at work: options → jobs → runs → files; one image after the other, or the cells of a sheet."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import typer
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pellucid.cli import output
from pellucid.cli.options import CANCELLED
from pellucid.cli.sample import MAX_IMAGES, read_options
from pellucid.core.batch import StepSeen
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import seed_list
from pellucid.core.samplers import REGISTRY, resolve
from pellucid.core.samplers.registry import value_of
from pellucid.evidence.trace.recorder import Recorder
from pellucid.models.guidance import Guidance
from pellucid.pipeline.encoders.text import chunks_of
from pellucid.pipeline.parameters import ForeignRecipe
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import RunPlan, make_plan
from pellucid.pipeline.recipe import Recipe, write_png
from pellucid.pipeline.repeat import (
    RecipeSource,
    RunOptions,
    check_same,
    compare_pixels,
    complete,
    open_source,
    surprises,
    understood_text,
)
from pellucid.pipeline.request import Request, random_seed
from pellucid.pipeline.result import Result
from pellucid.pipeline.sheet import Axis, axes_of, cell_fields, cells, draw_sheet, shared_settings

_STEM = "out"
_IMAGES = (".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg", ".pdf")  # not written; no folders' names


def sample(words: dict[str, Any]) -> None:
    """Everything, from the words of the command line to the words at its end."""
    report = _SampleReport()
    try:
        with _step_bar(quiet=words["as_json"]) as bar:
            _work_on(words, report, bar)
    except KeyboardInterrupt:
        files = len(report.files)
        typer.echo(f"cancelled: {files} file{'' if files == 1 else 's'} written", err=True)
        raise typer.Exit(CANCELLED) from None
    if words["as_json"]:
        output.print_json(report.to_dict())
    else:
        _show_report(report)


def _work_on(words: dict[str, Any], report: _SampleReport, bar: StepBar) -> None:
    options, origin = read_options(words), None
    named, batch = options.model is not None, words["batch"] or 1
    if batch < 1:
        raise PellucidError(rule("--batch", "at least 1", batch), "usage")
    if words["from_file"] is not None:
        origin = open_source(words["from_file"])
        _agree(origin, options, bar.progress)
        options, changed = complete(origin, options)
        report.set_source(origin, changed)
    axes = words["grid_of"] or (origin.axes if origin is not None else None)
    if words["keep_cells"] and axes is None:
        raise PellucidError("--keep-cells must come with --grid-of; got it alone.", "usage")
    if words["label"] and words["prompt"] is not None and len(options.fields["prompt"]) > 1:
        raise PellucidError("--label must come with one prompt at most; got several.", "usage")
    jobs = _jobs_of(options.fields)
    if axes is not None and len(jobs) > 1:
        raise PellucidError(rule("--grid-of", "for one image per cell", f"{len(jobs)} images"), "usage")
    paths = _output_paths(words["out"], words["overwrite"], len(jobs) > 1)
    traces = _TraceFiles.of(words)
    fields = {**options.fields, **options.adapters()}
    # What is wrong whatever the model is refused before it is loaded.
    sheet = None if axes is None else _Sheet.of(axes, jobs[0], fields, paths, words["keep_cells"])
    single = batch == 1 or len(jobs) == 1
    runs = [([job], _request_of([job], fields)) for job in (jobs if single else jobs[:1])] if sheet is None else []
    if traces is not None:
        traces.expect(math.ceil(len(jobs) / batch) if sheet is None else len(sheet.requests))
    began = time.perf_counter()
    pipe = options.load()
    report.model, report.load_seconds = pipe.components.name, time.perf_counter() - began
    report.said = [text for text in pipe.components.notes if "slow" in text]  # before it takes long
    for text in report.said if not words["as_json"] else ():
        bar.progress.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
    work = _SampleRun(pipe, options.load_weak(), paths, report, bar, origin, named, traces)
    if sheet is not None:
        _make_sheet(work, sheet)
        return
    if not single:
        groups = _batches(pipe, jobs, batch, fields.get("weighting", False))
        runs = [(group, _request_of(group, fields)) for group in groups]
    _make_images(work, runs, len(jobs))


# --- Jobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ImageJob:
    """One image: its words, its seed, and its number where there are several prompts."""

    prompt: str | None
    label: int | str | None
    seed: int
    number: int | None = None


def _jobs_of(fields: Mapping[str, Any]) -> list[_ImageJob]:
    """One per image: n of each prompt, or of each label, with the seeds that were given or consecutive ones."""

    def listed(name: str) -> list[Any]:
        held = fields.get(name)
        return held or [None] if isinstance(held, list) or held is None else [held]

    things = [(prompt, label) for prompt in listed("prompt") for label in listed("label")]
    seed = fields.get("seed")
    listed_seeds = seed if isinstance(seed, list) else None
    n = fields.get("n") or (max(len(listed_seeds) // len(things), 1) if listed_seeds else 1)
    images = len(things) * n
    if images > MAX_IMAGES:
        raise PellucidError(rule("images", f"at most {MAX_IMAGES}", images), "usage")
    if listed_seeds is not None and len(listed_seeds) != images:
        raise PellucidError(rule("--seed", f"one seed, or {images}: one per image", len(listed_seeds)), "seed")
    seeds = seed_list(random_seed() if seed is None else seed, images)
    several = len(things) > 1
    return [_ImageJob(*things[i // n], seed, i + 1 if several else None) for i, seed in enumerate(seeds)]


def _request_of(jobs: Sequence[_ImageJob], fields: Mapping[str, Any]) -> Request:
    """The request of one run."""
    own: dict[str, Any] = {"seed": [job.seed for job in jobs], "n": 1}
    if fields.get("options") and fields.get("sampler") is not None:  # as the sampler's own types
        entry, _ = resolve(fields["sampler"])
        own["options"] = {key: value_of(entry, key, value) for key, value in fields["options"].items()}
    for name in ("prompt", "label"):
        held = [getattr(job, name) for job in jobs]
        own[name] = None if all(one is None for one in held) else held if len(held) > 1 else held[0]
    if own["prompt"] is None and own["label"] is None:
        own["n"] = len(jobs)  # no words, so that only their number says how many there are
    return Request(**{**fields, **own})


def _batches(pipe: Pipeline, jobs: Sequence[_ImageJob], most: int, weighting: bool) -> Iterator[list[_ImageJob]]:
    """Jobs in runs of at most `most`. Prompts of different lengths would pad each other: they run apart."""

    def windows(job: _ImageJob) -> int:
        tokenizers = pipe.components.tokenizers if job.prompt else ()
        return max((len(chunks_of(t, job.prompt or "", weighting=weighting)) for t in tokenizers), default=1)

    held: list[_ImageJob] = []
    for job in jobs:
        if held and (len(held) == most or windows(held[0]) != windows(job)):
            yield held
            held = []
        held.append(job)
    if held:
        yield held


# --- Runs -----------------------------------------------------------------------------------------------------------


@dataclass
class _SampleRun:
    """The model, where images go, and what is said of them. `named`: the model is not the recipe's own choice."""

    pipe: Pipeline
    weak: Pipeline | None
    paths: OutputPaths
    report: _SampleReport
    bar: StepBar
    origin: RecipeSource | None = None
    named: bool = True
    traces: _TraceFiles | None = None

    def plan(self, requests: Sequence[Request], images: int) -> list[tuple[Request, RunPlan]]:
        """The requests with their plans: all are made before the first is run, so that the bar knows the steps."""
        if self.weak is not None:
            requests = [replace(request, weak=self.weak) for request in requests]
        plans = [_plan_of(self.pipe, request) for request in requests]
        if self.origin is not None and self.origin.exact is not None:
            self.report.note_changes(check_same(self.origin.exact, self.pipe, requests[0], self.named))
        self.bar.begin(images, sum(plan.plan.nfe for plan in plans))
        return list(zip(requests, plans, strict=True))

    def run(self, request: Request, plan: RunPlan) -> Result:
        self.bar.run(plan.plan.nfe)
        with nullcontext() if self.traces is None else self.traces.recorder() as recorder:
            observers = (self.bar,) if recorder is None else (recorder, self.bar)
            result = self.pipe.run(request, plan, observers)
        self.report.add(result)
        if recorder is not None:
            self.report.traces.append(recorder.path)
        return result

    def compare_pixels(self, image: Image.Image, recipe: Recipe) -> None:
        """With `--from`: reports whether the image is the same."""
        if self.origin is not None and self.origin.exact is not None and self.report.source is not None:
            self.report.source["pixels"] = compare_pixels(self.origin.path, self.origin.exact, image, recipe)


def _plan_of(pipe: Pipeline, request: Request) -> RunPlan:
    """The plan of a request. An option of the right type and a wrong size is the user's error, not a crash."""
    try:
        return make_plan(pipe.components, request)
    except PellucidError:
        raise
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:
        options = ", ".join(f"{key}={value}" for key, value in request.options.items())
        message = f"option must be one that {request.sampler} can use; got {options}: {error}."
        raise PellucidError(message, "option") from None


def _make_images(work: _SampleRun, runs: Sequence[tuple[Sequence[_ImageJob], Request]], images: int) -> None:
    """Every image, written as soon as it is made."""
    if work.traces is not None:
        work.traces.expect(len(runs))
    planned = work.plan([request for _, request in runs], images)
    for (jobs, _), (request, plan) in zip(runs, planned, strict=True):
        result = work.run(request, plan)
        for job, image, recipe in zip(jobs, result.images, result.recipes, strict=True):
            work.report.files.append(work.paths.keep(image, recipe, job.number, work.report.files))
            if images == 1:
                work.compare_pixels(image, recipe)
        work.bar.done += len(jobs)


def _agree(origin: RecipeSource, options: RunOptions, progress: Progress) -> None:
    """Asks before a recipe of another order of size than its image is run, or refuses where nobody can answer.

    Nobody sees in an image what its recipe asks for. What is said on the command line is agreed to.
    """
    for question, refusal in surprises(origin, options):
        if not on_terminal():
            raise PellucidError(refusal, "recipe-size")
        progress.stop()
        if not typer.confirm(question, err=True):
            raise typer.Abort
        progress.start()


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


# --- Sheets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sheet:
    """The axes and the text that they were read from, the cells' settings and requests, and where all of it goes."""

    text: str
    axes: tuple[Axis, ...]
    settings: list[dict[str, Any]]
    requests: list[Request]
    file: Path
    folder: Path | None

    @staticmethod
    def of(text: str, job: _ImageJob, fields: Mapping[str, Any], paths: OutputPaths, keep: bool) -> _Sheet:
        """Refuses, before any work, what could not be run or written."""
        axes = axes_of(text, fields.get("sampler"))
        every = cells(axes)
        requests = [_cell_request(job, fields, settings) for settings in every]
        file = paths.file or next(path for path in _numbered(paths.folder, "sheet") if not os.path.lexists(path))
        folder = file.with_name(f"{file.stem}-cells") if keep else None
        if folder is not None and os.path.lexists(folder) and not (paths.overwrite and folder.is_dir()):
            raise output.exists_error("--keep-cells", folder)
        return _Sheet(text, axes, every, requests, file, folder)


def _cell_request(job: _ImageJob, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> Request:
    """The request of one cell: that of the sheet, with the cell's own settings."""
    held = cell_fields(fields, settings)
    own = {name: held[name] for name in ("prompt", "label", "seed") if name in settings}
    return _request_of([replace(job, **own)], held)


def _make_sheet(work: _SampleRun, sheet: _Sheet) -> None:
    """Every cell, then the sheet."""
    work.bar.unit = "cell"
    planned = work.plan(sheet.requests, len(sheet.requests))
    if sheet.folder is not None:
        sheet.folder.mkdir(exist_ok=work.paths.overwrite)
    images = []
    for number, (settings, (request, plan)) in enumerate(zip(sheet.settings, planned, strict=True), 1):
        result = work.run(request, plan)
        images.append(result.images[0])
        if sheet.folder is not None:
            path = sheet.folder / _cell_name(number, settings)
            work.paths.write(path, result.images[0], result.recipe)
            work.report.files.append(path)
        work.bar.done += 1
    first = work.report.recipes[0]
    title = None if any(axis.name == "prompt" for axis in sheet.axes) else first.prompt
    drawn = draw_sheet(images, sheet.axes, title=title, footer=shared_settings(work.report.recipes))
    work.paths.write(sheet.file, drawn, first, sheet.text)
    if work.origin is not None and work.origin.axes == sheet.text:
        work.compare_pixels(drawn, first)
    work.report.files.insert(0, sheet.file)
    kept = None if sheet.folder is None else str(sheet.folder)
    work.report.sheet = {"file": str(sheet.file), "axes": sheet.text, "cells": kept}


def _cell_name(number: int, settings: dict[str, Any]) -> str:
    """A file name that says what the cell is: `03-guidance=5-steps=20.png`."""
    words = "-".join(f"{key}={value}" for key, value in reversed(settings.items()))
    return f"{number:02d}-{re.sub(r'[^A-Za-z0-9=.,+-]+', '_', words)[:100]}.png"


# --- Files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputPaths:
    """Where images go: one file, or a folder and the stem of their names."""

    folder: Path
    stem: str = _STEM
    file: Path | None = None
    overwrite: bool = False

    def path(self, seed: int, number: int | None = None, used: Collection[Path] = ()) -> Path:
        """The file of an image; `number` where there are several prompts. A taken name gets a number behind it."""
        if self.file is not None:
            return self.free(self.file)
        stem = self.stem if number is None else f"{self.stem}-{number:04d}"
        paths = _numbered(self.folder, f"{stem}-{seed}")
        return next(p for p in paths if p not in used and (self.overwrite or not os.path.lexists(p)))

    def free(self, path: Path) -> Path:
        return output.destination(path, "--out", overwrite=self.overwrite).path

    def keep(self, image: Image.Image, recipe: Recipe, number: int | None, used: Collection[Path]) -> Path:
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

    def write(self, path: Path, image: Image.Image, recipe: Recipe, axes: str | None = None) -> None:
        """Writes an image, or a sheet, with its recipe."""
        held = io.BytesIO()
        write_png(image, held, recipe, axes)
        output.Destination(path, "--out", self.overwrite).write(lambda part: part.write_bytes(held.getvalue()))


def _output_paths(out: Path | None, overwrite: bool, several: bool) -> OutputPaths:
    """Refuses, before any work, what could not be written. A folder is made where its parent exists."""
    if out is None:
        output.writable(Path(), "--out")
        return OutputPaths(Path(), overwrite=overwrite)
    if out.suffix.lower() == ".png" and not out.is_dir():
        paths = OutputPaths(out.parent, out.stem, None if several else out, overwrite)
        if several:
            output.writable(out.parent, "--out")
        else:
            paths.free(out)
        return paths
    if out.suffix.lower() in _IMAGES and not out.is_dir():
        raise PellucidError(rule("--out", "a file that ends in .png, or a folder", str(out)), "file-type")
    if not out.is_dir():
        if os.path.lexists(out) or not out.parent.is_dir():
            raise PellucidError(rule("--out", "a folder, or a new one in a folder that exists", str(out)), "file")
        output.writable(out.parent, "--out")
        out.mkdir()
    output.writable(out, "--out")
    return OutputPaths(out, overwrite=overwrite)


def _numbered(folder: Path, stem: str) -> Iterator[Path]:
    """sheet.png, sheet-2.png, …"""
    return (folder / f"{stem}{'' if i == 1 else f'-{i}'}.png" for i in count(1))


@dataclass
class _TraceFiles:
    """The traces of `--trace`: one file for one run, numbered files for several."""

    path: Path
    tensors: bool = False
    overwrite: bool = False
    runs: int = 1
    written: list[Path] = field(default_factory=list)

    @staticmethod
    def of(words: dict[str, Any]) -> _TraceFiles | None:
        """As the options say; refuses, before any work, what could not be written."""
        if words["trace"] is None:
            if words["trace_tensors"]:
                raise PellucidError("--trace-tensors must come with --trace FILE; got it alone.", "usage")
            return None
        return _TraceFiles(words["trace"], words["trace_tensors"], words["overwrite"])

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
        with Recorder(path, self.tensors, overwrite=self.overwrite) as recorder:
            yield recorder
        self.written.append(path)


# --- A bar while it works -------------------------------------------------------------------------------------------


@dataclass
class StepBar:
    """The steps of all runs on one bar, and the stage at work; without a terminal it shows nothing."""

    progress: Progress
    task: TaskID
    unit: str = "image"  # or cell, of a sheet
    total: int = 1
    done: int = 0
    left: int = 0  # steps of this run

    def say(self, stage: str) -> None:
        at = f"{self.unit} {min(self.done + 1, self.total)}/{self.total} · " if self.total > 1 else ""
        self.progress.update(self.task, description=f"{at}{stage}")

    def begin(self, units: int, steps: int) -> None:
        """After loading: how many images or cells, and the steps of all runs together."""
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
def _step_bar(quiet: bool) -> Iterator[StepBar]:
    """The bar on a terminal's stderr; it disappears when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        yield StepBar(progress, progress.add_task("load", total=None))


# --- Words at the end -----------------------------------------------------------------------------------------------


@dataclass
class _SampleReport:
    """What was made, as it is made."""

    model: str = ""
    load_seconds: float = 0.0
    files: list[Path] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    calls: int = 0
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    plain: Counter[str] = field(default_factory=Counter)  # steps that were not captured, by why
    notes: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # notes that were shown before the run
    receipt: str | None = None
    sheet: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    traces: list[Path] = field(default_factory=list)

    def set_source(self, origin: RecipeSource, changed: list[str]) -> None:
        """What `--from` says at the end."""
        recipe = origin.recipe
        foreign = recipe if isinstance(recipe, ForeignRecipe) else None
        self.source = {
            "file": str(origin.path),
            "kind": origin.kind,
            "understood": {} if foreign is None else understood_text(foreign),
            "unread": {} if foreign is None else foreign.unread,
            "changed": changed,
            "pixels": "",
        }
        self.note(*(() if foreign is None else foreign.notes))

    def note_changes(self, changed: list[str]) -> None:
        if self.source is not None:
            self.source["changed"] += changed

    def note(self, *texts: str) -> None:
        self.notes += [text for text in dict.fromkeys(texts) if text not in self.notes]

    def add(self, result: Result) -> None:
        """Counts what a run took."""
        self.recipes += result.recipes
        self.calls += result.plan.nfe
        self.receipt = None if result.receipt is None else str(result.receipt)
        self.note(*result.notes)
        self.plain.update(result.plain)
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
            "plain": dict(self.plain),
            "notes": self.notes,
            "receipt": self.receipt,
            "sheet": self.sheet,
            "from": self.source,
            "traces": [str(path) for path in self.traces],
            "recipes": [recipe.to_dict() for recipe in self.recipes],
        }


def _show_report(report: _SampleReport) -> None:
    """Files with their seeds, what each stage took, and what to mind."""
    say = output.say
    if report.source is not None:
        _show_source(report.source)
    if report.sheet is not None:
        say(f"wrote {report.sheet['file']}: {report.sheet['axes']}", style="bold")
        if report.sheet["cells"]:
            say(f"cells in {report.sheet['cells']}")
    else:
        for path, recipe in zip(report.files, report.recipes, strict=True):
            say(f"wrote {path}: {_settings_text(recipe)}", style="bold")
    took = {"load": report.load_seconds, **{name: stage["seconds"] for name, stage in report.stages.items()}}
    calls = f"{report.calls} model call" + ("" if report.calls == 1 else "s")
    plain = [f"{count} not captured ({why})" for why, count in report.plain.items() if why != "device"]
    say(" · ".join([*(f"{name} {seconds:.2f} s" for name, seconds in took.items()), calls, *plain]), style="dim")
    for path in report.traces:
        say(f"traced {path}: pellucid trace show {path}")
    if report.receipt is not None:
        say(report.receipt)
    for text in report.notes:
        if text in report.said:
            continue
        say(f"note: {text}")


def _settings_text(recipe: Recipe) -> str:
    """The settings of an image in a line."""
    title = REGISTRY[recipe.sampler].title if recipe.sampler in REGISTRY else recipe.sampler
    grid = recipe.grid.get("name", "")
    size = f"{recipe.size[0]}×{recipe.size[1]}" if recipe.size else ""
    guided = Guidance.parse(recipe.guidance).text() if recipe.guidance else ""
    parts = [f"seed {recipe.seed}", size, f"{title} ({grid}), {recipe.steps} steps", f"guidance {guided}"]
    return " · ".join(part for part in parts if part)


def _show_source(source: dict[str, Any]) -> None:
    """What `--from` read, what it did not, what was said otherwise, and how the pixels compare."""
    output.say(f"from {source['file']}: {source['kind']}")
    for name, words in (("understood", source["understood"]), ("not understood", source["unread"])):
        if words:
            output.say(f"{name}: " + ", ".join(f"{key} {value}".strip() for key, value in words.items()))
    if source["changed"]:
        output.say("changed: " + "; ".join(source["changed"]))
    if source["pixels"]:
        output.say(source["pixels"])
