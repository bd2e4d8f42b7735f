"""`pellucid sample` at work: words → jobs → runs → files; one image after the other, or the cells of a sheet."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from pellucid.cli import output, sample_output, sample_repeat, sample_sheet, sample_words
from pellucid.cli.sample_output import SampleReport, StepBar, TraceFiles
from pellucid.cli.sample_repeat import RecipeSource
from pellucid.cli.sample_words import AdapterWords, SampleWords
from pellucid.cli.sample_work import ImageJob, SampleRun, request_of
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import seed_list
from pellucid.pipeline.encoders import text
from pellucid.pipeline.load import load
from pellucid.pipeline.parameters import ForeignRecipe
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request

CANCELLED = 130


def sample(params: dict[str, Any]) -> None:
    """Everything, from the words of the command line to the words at its end."""
    report = SampleReport()
    try:
        with sample_output.step_bar(quiet=params["as_json"]) as bar:
            work_on(params, report, bar)
    except KeyboardInterrupt:
        count = len(report.files)
        typer.echo(f"cancelled: {count} file{'' if count == 1 else 's'} written", err=True)
        raise typer.Exit(CANCELLED) from None
    if params["as_json"]:
        output.print_json(report.to_dict())
    else:
        sample_output.show_report(report)


def work_on(params: dict[str, Any], report: SampleReport, bar: StepBar) -> None:
    asked, origin = SampleWords.of(params), None
    named = asked.model is not None
    if params["from_file"] is not None:
        origin = sample_repeat.open_source(params["from_file"])
        sample_repeat.agree(origin, asked, bar.progress)
        asked, changed = sample_repeat.complete(origin, asked)
        report.source = source_facts(origin, changed)
        report.note(*getattr(origin.recipe, "notes", ()))
    axes = params["grid_of"] or (origin.axes if origin is not None else None)
    check_usage(params, asked, origin, axes)
    jobs = jobs_of(asked)
    if axes is not None and len(jobs) > 1:
        raise PellucidError(rule("--grid-of", "for one image a cell", f"{len(jobs)} images"), "usage")
    goal = sample_output.output_paths(params["out"], params["overwrite"], len(jobs) > 1)
    traces = TraceFiles.of(params)
    fields = {**asked.fields, **adapters_of(asked)}
    # What is wrong whatever the model is refused before it is loaded.
    cells = None if axes is None else sample_sheet.cells_of(axes, jobs[0], fields)
    if cells is None:
        request_of(jobs[:1], fields)
    else:
        places = sample_sheet.sheet_places(goal, params["keep_cells"])
    if traces is not None:
        traces.expect(math.ceil(len(jobs) / asked.batch) if cells is None else len(cells.requests))
    pipe = timed_load(asked, report)
    work = SampleRun(asked, goal, report, bar, pipe, origin, named, weak_of(asked), traces)
    if cells is None:
        make_images(work, jobs, fields)
    else:
        sample_sheet.make_sheet(work, cells, *places)


def source_facts(origin: RecipeSource, changed: list[str]) -> dict[str, Any]:
    """What `--from` says at the end."""
    found = origin.recipe
    foreign = isinstance(found, ForeignRecipe)
    return {
        "file": str(origin.path),
        "kind": origin.kind,
        "understood": sample_repeat.understood(found) if foreign else {},
        "unread": found.unread if foreign else {},
        "changed": changed,
        "pixels": "",
    }


def check_usage(params: dict[str, Any], asked: SampleWords, origin: RecipeSource | None, axes: str | None) -> None:
    """Words that only make sense with others."""
    if params["keep_cells"] and axes is None:
        raise PellucidError("--keep-cells must come with --grid-of; got it alone.", "usage")
    if params["label"] and params["prompt"] is not None and len(asked.prompts or ()) > 1:
        raise PellucidError("--label must come with one prompt at most; got several.", "usage")


# --- jobs ------------------------------------------------------------------------------------------------------


def jobs_of(asked: SampleWords) -> list[ImageJob]:
    """One an image: n of each prompt, or of each label, with the seeds that were given or consecutive ones."""
    prompts: Sequence[str | None] = asked.prompts or [None]
    labels: Sequence[int | str | None] = asked.labels or [None]
    things = [(prompt, label) for prompt in prompts for label in labels]
    given = asked.seeds if isinstance(asked.seeds, list) else None
    n = asked.n or (max(len(given) // len(things), 1) if given else 1)
    count = len(things) * n
    if count > sample_words.MAX_IMAGES:
        raise PellucidError(rule("images", f"at most {sample_words.MAX_IMAGES}", count), "usage")
    if given is not None and len(given) != count:
        raise PellucidError(rule("--seed", f"one seed, or {count}: one per image", len(given)), "seed")
    seeds = seed_list(Request().seeds()[0] if asked.seeds is None else asked.seeds, count)
    several = len(things) > 1
    return [ImageJob(*things[i // n], seed, i + 1 if several else None) for i, seed in enumerate(seeds)]


def batches(work: SampleRun, jobs: list[ImageJob]) -> Iterator[list[ImageJob]]:
    """Jobs in runs of at most `--batch`. Prompts of other lengths would fill each other up: they run apart."""
    held: list[ImageJob] = []
    for job in jobs:
        if held and (len(held) == work.asked.batch or windows_of(work, held[0]) != windows_of(work, job)):
            yield held
            held = []
        held.append(job)
    if held:
        yield held


def windows_of(work: SampleRun, job: ImageJob) -> int:
    """Windows of the text encoder that a prompt fills."""
    tokenizers = work.pipe.components.tokenizers if job.prompt and work.asked.batch > 1 else ()
    weighting = work.asked.fields.get("weighting", False)
    return max((len(text.chunks_of(t, job.prompt or "", weighting=weighting)) for t in tokenizers), default=1)


# --- loading ---------------------------------------------------------------------------------------------------


def timed_load(asked: SampleWords, report: SampleReport) -> Pipeline:
    began = time.perf_counter()
    assert asked.model is not None
    pipe = load(asked.model, **asked.loading, policy=Policy(**asked.policy))
    report.model, report.load_seconds = pipe.components.name, time.perf_counter() - began
    return pipe


def adapters_of(asked: SampleWords) -> dict[str, Any]:
    """The adapters of every run. The pipeline reads each file once."""

    def scale(adapter: AdapterWords) -> Any:
        return 1.0 if adapter.scale is None else adapter.scale

    found: dict[str, Any] = {}
    if asked.loras:
        found["loras"] = [Lora(one.path, scale(one)) for one in asked.loras]
    if asked.controls:
        spans = [one.span or (0.0, 1.0) for one in asked.controls]
        found["controls"] = [
            Control(one.path, one.image, scale(one), *span, one.guess)
            for one, span in zip(asked.controls, spans, strict=True)
        ]
    if asked.image_prompts:
        found["image_prompts"] = [ImagePrompt(one.path, one.image, scale(one)) for one in asked.image_prompts]
    return found


def weak_of(asked: SampleWords) -> Pipeline | None:
    if asked.weak is None:
        return None
    return load(asked.weak, **{name: asked.loading[name] for name in ("dtype", "device") if name in asked.loading})


# --- images ----------------------------------------------------------------------------------------------------


def make_images(work: SampleRun, jobs: list[ImageJob], fields: dict[str, Any]) -> None:
    """Every image, written as soon as it is made."""
    runs = list(batches(work, jobs))
    requests = [request_of(run, fields) for run in runs]
    work.check_recipe(requests[0])
    if work.traces is not None:
        work.traces.expect(len(runs))
    work.bar.begin(len(jobs), sum(work.steps(request) for request in requests))
    for run, request in zip(runs, requests, strict=True):
        result = work.run(request)
        for job, image, recipe in zip(run, result.images, result.recipes, strict=True):
            work.report.files.append(work.goal.keep(image, recipe, job.number, work.report.files))
            if len(jobs) == 1:
                work.compare_pixels(image, recipe)
        work.bar.done += len(run)
