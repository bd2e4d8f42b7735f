"""`pellucid study`: the same question asked of many set-ups."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import (
    MODEL_HELP,
    Device,
    Out,
    Size,
    comma_words,
    flag,
    given_only,
    group,
    model_names,
    numbers,
    option,
)
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.adherence.study import AdherenceFigures
    from pellucid.evidence.report.page import Table
    from pellucid.evidence.study.guidance_report import GuidanceReport
    from pellucid.evidence.study.interaction import InteractionResults, InteractionStudyConfig
    from pellucid.evidence.study.kernel import Study
    from pellucid.evidence.study.oracle import OracleResults
    from pellucid.evidence.study.samplers_verdict import SamplerFigures

AsJson = Annotated[bool, flag("--json", "Print the figures as JSON.")]
Batch = Annotated[int | None, option("N", "Images at once (default: 16).", min=1)]
By = Annotated[
    str | None, option("MEASURE", "What decides: distance, latent, kid, image_text, right (default: distance).")
]
Clip = Annotated[str | None, option("FOLDER", "A CLIP for the image-text score (default: the bundle's own).")]
ConvergedSteps = Annotated[int | None, option("N", "Their steps (default: 200).", min=2)]
DType = Annotated[str | None, option("NAME", "float32, float16, bfloat16 or fp8 (default: float32).")]
FirstSeed = Annotated[int | None, option("N", "Seed of the first image (default: 0).", min=0)]
Folder = Annotated[Path, option("FOLDER", "Output folder; an interrupted study in it continues.")]
GuidanceText = Annotated[str | None, option("TEXT", "4, 4 + apg, … (default: the model's own).")]
Inception = Annotated[Path | None, option("FILE", "Inception's weights, for KID and FID (default: the cached ones).")]
Part = Annotated[str | None, option("NAME", "unet, or dit: the transformer next to it (default: unet).")]
PathSteps = Annotated[
    int | None, option("N", "Steps of a stochastic sampler's own converged images (default: 500).", min=2)
]
Processes = Annotated[int | None, option("N", "Run in this many processes on this machine.", min=1)]
Ray = Annotated[int | None, option("N", "Run as this many tasks on a Ray cluster.", min=1)]
Sampler = Annotated[str | None, option("NAME", "The sampler (default: dpmpp_2m).")]
Shard = Annotated[str | None, option("I/N", "Do only this share of the work: 0/4 is the first of four.")]
Steps = Annotated[int | None, option("N", "Its steps (default: 20).", min=1)]

app = group("Compare set-ups, with evidence.")


# --- What the commands share ----------------------------------------------------------------------------------------


def _fields_given(kind: type[Any], words: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that the command line sets."""
    return given_only(**{field.name: words.get(field.name) for field in fields(kind)})


def run(
    kind: type[Study[Any, Any]],
    config: Any,
    words: dict[str, Any],
    show: Callable[[Any, Path], object],
    *,
    out: Path | None = None,
    figures: str = "figures.json",
    bar: Any = output.progress,
    **resources: Any,
) -> None:
    """The whole study, or one share of it, as the `words` of the command line say. --json prints the file of
    `figures` that the report wrote."""
    from pellucid.evidence.study.kernel import run_study, shard_of

    folder, shard, processes, ray = out or words["out"], *map(words.get, ("shard", "processes", "ray"))
    if "device" in words:
        resources["device"] = words["device"]
    if shard is None:
        found = run_study(kind, config, folder, processes=processes or 1, ray=ray or 0, bar=bar, **resources)
        if words["as_json"]:
            output.print_json(json.loads((folder / figures).read_text("utf-8")))
        else:
            show(found, folder)
        return
    if processes or ray:
        raise PellucidError(rule("--shard", "given without --processes and --ray", shard), "shard")
    index, count = shard_of(shard)
    study = kind.open(config, folder, (index, count), **resources)
    study.run(bar)  # of this share's cells alone; the report is the whole study's
    parts = len({study.part(cell) for cell in study.shares(count)[index]})
    if words["as_json"]:
        output.print_json({"shard": index, "of": count, kind.parts: parts, "folder": str(folder)})
    else:
        then = "When all are done, run the same without --shard."
        print(f"shard {index} of {count}: {parts} {kind.parts} → {folder}. {then}")


def _print_tables(tables: Iterable[Table], sentences: Iterable[str], right: Callable[[Table], tuple[str, ...]]) -> None:
    """Tables under their titles, whose columns named by `right` hold numbers, and what they say."""
    console = output.console()
    for one in tables:
        console.print(one.title, style="bold", markup=False)
        console.print(output.table(*one.columns, right=right(one), rows=one.rows))
    for sentence in sentences:
        console.print(sentence, markup=False)


# --- Schedules ------------------------------------------------------------------------------------------------------


@app.command("schedules")
def study_schedules(
    ctx: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file: the run, the schedules, the points.")],
    out: Out = None,
    device: Device = None,
    shard: Shard = None,
    as_json: Annotated[bool, flag("--json", "Print the table as JSON.")] = False,
) -> None:
    """Train one network under several noise schedules, score it along the way, and write a report.

    An interrupted study continues where it stopped. Processes that share it (--shard) write to one folder.

    Example: [bold]pellucid study schedules configs/cifar10_schedules_smoke.toml[/]
    """
    from pellucid.evidence.study.kernel import no_bar
    from pellucid.evidence.study.schedules import ScheduleStudy, ScheduleStudyConfig

    study_config, folder = ScheduleStudyConfig.load(config), out or Path("out") / config.stem
    how = {"figures": "table.json", "say": partial(print, file=sys.stderr), "bar": no_bar}
    run(ScheduleStudy, study_config, ctx.params, lambda found, at: print(at / "report.html"), out=folder, **how)


# --- Adherence ------------------------------------------------------------------------------------------------------


@app.command("adherence")
def study_adherence(
    ctx: typer.Context,
    model: Annotated[str, option("MODEL", "A bundle's name, or the folder of a model of scenes.")],
    out: Folder = Path("out/adherence"),
    part: Part = None,
    prompts: Annotated[int | None, option("N", "How many prompts (default: 1000).", min=1)] = None,
    objects: Annotated[str | None, option("N,N", "Numbers of objects, drawn at random (default: 1,2,3).")] = None,
    sampler: Sampler = None,
    steps: Steps = None,
    guidance: Annotated[float | None, option("X", "The guidance scale (default: 4).")] = None,
    batch: Annotated[int | None, option("N", "Images at once (default: 50).", min=1)] = None,
    seed: Annotated[int | None, option("N", "Seed of the prompts, and of the first image (default: 0).", min=0)] = None,
    dtype: DType = None,
    device: Device = None,
    shard: Shard = None,
    processes: Processes = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Generate combinations unseen in training and count how many images match their prompts.

    Writes a table, a sheet of 100 random images and a sheet of failures.

    Example: [bold]pellucid study adherence --model scenes-128 --prompts 200[/]
    """
    from pellucid.evidence.adherence.samples import ImageSettings
    from pellucid.evidence.adherence.study import AdherenceConfig, AdherenceStudy

    making = ImageSettings(**_fields_given(ImageSettings, ctx.params))
    read = {"making": making, "objects": None if objects is None else numbers("--objects", objects)}
    config = AdherenceConfig(**_fields_given(AdherenceConfig, {**ctx.params, **read}))
    run(AdherenceStudy, config, ctx.params, _show_adherence)


def _show_adherence(found: dict[str, AdherenceFigures], out: Path) -> None:
    from pellucid.evidence.adherence.study import adherence_table

    table = adherence_table(found)
    shown = output.table(*table.columns, right=table.columns[1:])
    for row in table.rows:
        shown.add_row(*(cell.replace("**", "") for cell in row), style="bold" if "**" in row[0] else None)
    output.console().print(shown)
    failures = ", failures.png" if (out / "failures.png").exists() else ""
    print(f"95 % intervals → {out}: table.md, figures.json, random.png{failures}")


# --- Guidance -------------------------------------------------------------------------------------------------------


@app.command("guidance")
def study_guidance(
    ctx: typer.Context,
    model: Annotated[str, option("MODEL", "What `pellucid sample` takes: a bundle, a folder, …")],
    scales: Annotated[str | None, option("X,X", "Guidance scales (default: 1,2,4,7,10,15).")] = None,
    rules: Annotated[
        str | None,
        option(
            "NAME,NAME",
            "Rules, such as apg or 'rescale phi=0.5' (default: plain, rescale, dynamic, interval, apg, cfg_zero).",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        option("FILE", "One prompt per line; or scenes:N, captions whose truth is known (default: scenes:64)."),
    ] = None,
    seeds: Annotated[int | None, option("N", "Images per prompt (default:  4).", min=1)] = None,
    out: Folder = Path("out/guidance"),
    clip: Annotated[
        str | None, option("FOLDER", "A CLIP that scores prompts of a file (default: the bundle's own).")
    ] = None,
    reference: Annotated[
        str | None, option("FOLDER", "Reference images (default: those of the scenes, otherwise unguided ones).")
    ] = None,
    tolerance: Annotated[
        float | None,
        option("X", "How far saturation and sharpness may differ from the reference's, as a fraction (default: 0.1)."),
    ] = None,
    sampler: Sampler = None,
    steps: Steps = None,
    batch: Annotated[int | None, option("N", "Images at once (default: 32).", min=1)] = None,
    seed: Annotated[int | None, option("N", "Seed of the scenes, and of the first image (default: 0).", min=0)] = None,
    part: Part = None,
    dtype: DType = None,
    device: Device = None,
    shard: Shard = None,
    processes: Processes = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Run one model at every guidance scale with every rule, and find the useful settings.

    Adherence, colour bleeding, saturation, sharpness and diversity, with intervals; report.html and charts.

    Example: [bold]pellucid study guidance --model scenes-128 --scales 1,2,4,7,10 --rules plain,rescale,apg[/]
    """
    from pellucid.evidence.study.guidance import GuidanceStudy, GuidanceStudyConfig, with_own_clip

    read = {
        "scales": None if scales is None else numbers("--scales", scales, float),
        "rules": None if rules is None else tuple(" ".join(name.split()) for name in rules.split(",")),
    }
    config = GuidanceStudyConfig(**_fields_given(GuidanceStudyConfig, {**ctx.params, **read}))
    run(GuidanceStudy, with_own_clip(config), ctx.params, _show_guidance)


def _show_guidance(report: GuidanceReport, out: Path) -> None:
    from pellucid.evidence.study.guidance_report import definition, doubts, headline, range_table

    console = output.console()
    console.print(headline(report), markup=False)
    table = range_table(report)
    console.print(output.table(*table.columns, right=table.columns[1:4], rows=table.rows))
    console.print(definition(report), markup=False)
    console.print(report.advice.words, markup=False, style="bold")
    for words in doubts(report.found):
        console.print(words, markup=False)
    print(f"→ {out}: report.html, table.md, figures.json, charts/")


# --- The exact denoiser ---------------------------------------------------------------------------------------------


@app.command("oracle")
def study_oracle(
    ctx: typer.Context,
    samplers: Annotated[str, option("NAME,NAME", "Samplers, such as ddim,unipc:order=3, or all.")] = "all",
    grids: Annotated[str, option("NAME,NAME", "Time grids, or all.")] = "all",
    schedules: Annotated[str | None, option("NAME,NAME", "Noise schedules (default: linear,cosine,edm,flow).")] = None,
    nfe: Annotated[
        str | None,
        option("N,N", "Budgets of model calls; each run takes as many steps as fit (default:  5,8,10,14,20,30,50)."),
    ] = None,
    points: Annotated[int | None, option("N", "Points per run (default: 1024).")] = None,
    seed: Annotated[int | None, option("N", "Seed of the points (default: 0).", min=0)] = None,
    out: Folder = Path("out/oracle"),
    shard: Shard = None,
    processes: Processes = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Measure the error and the order of samplers on exact denoisers of Gaussian mixtures: minutes on a CPU.

    Writes tables, charts of error against model calls, and report.html.

    Example: [bold]pellucid study oracle --samplers ddim,heun,dpmpp_2m,unipc --grids karras,trailing --nfe 5,10,20[/]
    """
    from pellucid.core import grid, schedule
    from pellucid.evidence.study.kernel import one_thread
    from pellucid.evidence.study.oracle import OracleStudy, OracleStudyConfig
    from pellucid.evidence.study.setups import setup_without_grid

    def listed(text: str, read: Callable[[str], str]) -> tuple[str, ...] | None:
        return None if text == "all" else tuple(map(read, comma_words(text)))

    read = {
        "samplers": listed(samplers, lambda word: setup_without_grid(word).text),
        "grids": listed(grids, lambda word: grid.named(word).name),
        "schedules": None if schedules is None else tuple(schedule.make(word).name for word in comma_words(schedules)),
        "nfe": None if nfe is None else numbers("--nfe", nfe),
    }
    config = OracleStudyConfig(**_fields_given(OracleStudyConfig, {**ctx.params, **read}))
    with one_thread():  # points in a few dimensions gain nothing from more
        run(OracleStudy, config, ctx.params, _show_oracle)


def _show_oracle(found: OracleResults, out: Path) -> None:
    from pellucid.evidence.study import oracle_report

    bests = [oracle_report.best_table(found, mixture) for mixture in found.mixtures]
    tables = [*bests, oracle_report.one_choice_table(found)]
    sentences = oracle_report.sentences_of(found)
    _print_tables(tables, sentences, lambda table: table.columns[1:] if table.columns[0] != "NFE" else ())
    print(f"→ {out}: report.html, table.md, figures.json, charts/")


# --- Samplers -------------------------------------------------------------------------------------------------------


@app.command("samplers")
def study_samplers(
    ctx: typer.Context,
    model: Annotated[str, option("MODEL", MODEL_HELP, autocompletion=model_names)],
    samplers: Annotated[str, option("NAME,…", "Each NAME[:GRID][:KEY=VALUE…], or a plan file (.json).")],
    steps: Annotated[str, option("N,…", "Step counts, such as 5,10,20.")],
    prompts: Annotated[
        str | None, option("FILE", "One prompt (or class) per line; scenes:N for N held-out scenes.")
    ] = None,
    seeds: Annotated[int | None, option("N", "Images per prompt (default:  1).", min=1)] = None,
    seed: FirstSeed = None,
    out: Folder = Path("out/samplers"),
    guidance: GuidanceText = None,
    size: Size = None,
    batch: Batch = None,
    by: By = None,
    converged: Annotated[
        str | None, option("NAME", "Sampler of the converged images (default: dpmpp_3m:exponential).")
    ] = None,
    converged_steps: ConvergedSteps = None,
    path_steps: PathSteps = None,
    rounds: Annotated[int | None, option("N", "How often each cell is timed (default: 5).", min=1)] = None,
    reference: Annotated[str | None, option("FOLDER", "Images for KID and FID in place of the converged ones.")] = None,
    inception: Inception = None,
    clip: Clip = None,
    dtype: DType = None,
    device: Device = None,
    shard: Shard = None,
    processes: Processes = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Compare samplers and step counts: time, model calls, quality, the Pareto front, its knee, and what to use.

    Writes report.html with charts to hover and images by cell, PNG charts, table.md and results.json.

    Example: [bold]pellucid study samplers --model scenes-128 --samplers ddim,dpmpp_2m:karras --steps 5,10,20
    --prompts scenes:64[/]
    """
    from pellucid.evidence.study.samplers import SamplerStudy, SamplerStudyConfig
    from pellucid.evidence.study.subject import read_prompts
    from pellucid.pipeline.request import read_size

    read = {
        "size": None if size is None else read_size("--size", size),
        "samplers": tuple(filter(None, comma_words(samplers))),
        "steps": numbers("--steps", steps),
        "prompts": read_prompts(prompts),
    }
    config = SamplerStudyConfig(**_fields_given(SamplerStudyConfig, {**ctx.params, **read}))
    judges = {"inception": inception, "clip": clip, "reference": reference}
    run(SamplerStudy, config, ctx.params, _show_samplers, figures="results.json", **judges)


def _show_samplers(found: SamplerFigures, out: Path) -> None:
    """The deciding measure with its interval, of the others the estimates; all of it is in the files."""
    from pellucid.evidence.report.charts import number_text
    from pellucid.evidence.study.samplers_report import seconds_of
    from pellucid.evidence.study.samplers_verdict import with_interval

    others = [column for column in found.columns.values() if column is not found.main]
    titles = (found.main.measure.title, *(column.measure.title for column in others))
    columns = ("sampler", "steps", "calls", "seconds", *titles)
    shown = output.table(*columns, "", right=columns[1:])
    taken = None if found.verdict.knee is None else found.verdict.knee.cell
    for i, cell in enumerate(found.cells):
        figures = [number_text(float(column.values[i]) * column.measure.scale, 3) for column in others]
        row = (cell.setup.label, str(cell.steps), str(cell.nfe), seconds_of(found, i), with_interval(found.main, i))
        shown.add_row(*row, *figures, found.verdict.place(i), style="bold" if i == taken else None)
    output.console().print(shown)
    said = (found.verdict.comparison, found.verdict.sentence, found.verdict.words)
    for words in (*said, *found.doubts()):
        if words:
            output.say(words)
    print(f"→ {out}: report.html, charts/, table.md, results.json")


# --- Samplers by model ----------------------------------------------------------------------------------------------


@app.command("interaction")
def study_interaction(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A TOML file: models, samplers, steps; or give them below."),
    ] = None,
    models: Annotated[
        str | None, option("MODEL,…", "Folders, files, hub ids or bundles, each trained its own way.")
    ] = None,
    names: Annotated[str | None, option("NAME,…", "Names for the models (default: their folders' names).")] = None,
    samplers: Annotated[str | None, option("NAME,…", "Each NAME[:GRID][:KEY=VALUE…].")] = None,
    steps: Annotated[
        str | None, option("N,…", "Step counts, and the budgets of model calls at which samplers are compared.")
    ] = None,
    prompts: Annotated[
        str | None, option("FILE", "One prompt per line, or scenes:N, for models that take text.")
    ] = None,
    seeds: Annotated[int | None, option("N", "Images per prompt (default:  32).", min=1)] = None,
    seed: FirstSeed = None,
    guidance: GuidanceText = None,
    batch: Batch = None,
    by: By = None,
    converged: Annotated[
        str | None, option("NAME", "Sampler of the converged images (default: dpmpp_3m:karras).")
    ] = None,
    converged_steps: ConvergedSteps = None,
    path_steps: PathSteps = None,
    reference: Annotated[str | None, option("FOLDER", "Real images for KID, such as data/cifar10:train.")] = None,
    inception: Inception = None,
    clip: Clip = None,
    dtype: DType = None,
    device: Device = None,
    out: Annotated[
        Path | None, option("FOLDER", "Output folder (default: out/interaction, or out/NAME of the config).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the same samplers on models with different schedules and architectures.

    Reports each model's best sampler with its interval, where the best one changes, how certain that is, and what it
    costs to keep another model's sampler. An interrupted study continues.

    Example: [bold]pellucid study interaction --models runs/linear-0/model,runs/cosine-0/model
    --samplers ddim,dpmpp_2m:karras,unipc --steps 5,10,20[/]
    """
    from pellucid.evidence.study.interaction import InteractionStudy

    folder = out or (Path("out/interaction") if config is None else Path("out") / config.stem)
    run(InteractionStudy, _read_interaction(config, ctx.params), ctx.params, _show_interaction, out=folder)


def _read_interaction(config: Path | None, words: dict[str, Any]) -> InteractionStudyConfig:
    """A file, or the words; a word beside a file would be a second answer to one question."""
    from pellucid.evidence.study.interaction import InteractionStudyConfig

    known = _fields_given(InteractionStudyConfig, words)
    if config is not None:
        for name, value in known.items():
            raise PellucidError(rule(f"--{name.replace('_', '-')}", "left to the config", value), "usage")
        return InteractionStudyConfig.load(config)
    for name in ("models", "samplers", "steps"):
        if name not in known:
            raise PellucidError(f"CONFIG or --{name} must be given; got neither.", "usage")
    for name in ("models", "names", "samplers"):
        if name in known:
            known[name] = tuple(filter(None, comma_words(known[name])))
    known["steps"] = numbers("--steps", known["steps"])
    if "inception" in known:
        known["inception"] = str(known["inception"])
    return InteractionStudyConfig(**known)


def _show_interaction(found: InteractionResults, folder: Path) -> None:
    from pellucid.evidence.study import interaction_report

    sentences = [*interaction_report.sentences(found), *interaction_report.about_converged(found)]
    _print_tables(interaction_report.tables(found), sentences, lambda table: ())
    print(f"→ {folder}: report.html, table.md, figures.json, charts/")
