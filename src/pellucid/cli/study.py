"""`pellucid study`: the same question asked of many set-ups."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, Out, comma_words, flag, group, model_names, numbers, option
from pellucid.cli.run_study import AsJson, Folder, Processes, Ray, Shard, fields_given, print_tables, run
from pellucid.cli.study_scenes import study_adherence, study_guidance
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.study.interaction import Interaction, InteractionStudyConfig
    from pellucid.evidence.study.oracle import OracleResults
    from pellucid.evidence.study.samplers_verdict import SamplerFigures

Batch = Annotated[int | None, option("N", "Images at once; 16.", min=1)]
Clip = Annotated[str | None, option("FOLDER", "A CLIP for the image-text score; the bundle's own.")]
ConvergedSteps = Annotated[int | None, option("N", "Its steps; 200.", min=2)]
DType = Annotated[str | None, option("NAME", "float32, float16, bfloat16; float32.")]
FirstSeed = Annotated[int | None, option("N", "Of the first image; 0.", min=0)]
GuidanceText = Annotated[str | None, option("TEXT", "As it is: 4, 4 + apg, …; the model's own when not given.")]
PathSteps = Annotated[int | None, option("N", "Steps of a stochastic sampler's own yardstick; 500.", min=2)]

app = group("Compare set-ups, with evidence.")


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
    """Train one network under several noise schedules, score it on the way, and draw the report.

    A study that was stopped goes on where it was. Processes that share it (--shard) write into one folder.

    Example: [bold]pellucid study schedules configs/cifar10_schedules_smoke.toml[/]
    """
    from pellucid.evidence.study.kernel import no_bar
    from pellucid.evidence.study.schedules import ScheduleStudy, ScheduleStudyConfig

    asked, folder = ScheduleStudyConfig.load(config), out or Path("out") / config.stem
    how = {"figures": "table.json", "say": partial(print, file=sys.stderr), "bar": no_bar}
    run(ScheduleStudy, asked, ctx.params, lambda found, at: print(at / "report.html"), out=folder, **how)


app.command("adherence")(study_adherence)
app.command("guidance")(study_guidance)


# --- The exact denoiser ---------------------------------------------------------------------------------------------


@app.command("oracle")
def study_oracle(
    ctx: typer.Context,
    samplers: Annotated[str, option("NAME,NAME", "Samplers, such as ddim,unipc:order=3, or all.")] = "all",
    grids: Annotated[str, option("NAME,NAME", "Time grids, or all.")] = "all",
    schedules: Annotated[str | None, option("NAME,NAME", "linear,cosine,edm,flow when not given.")] = None,
    nfe: Annotated[
        str | None,
        option("N,N", "Budgets of model calls: each takes the steps that fit; 5,8,10,14,20,30,50 if not given."),
    ] = None,
    points: Annotated[int | None, option("N", "Points of a run; 1024 when not given.")] = None,
    seed: Annotated[int | None, option("N", "Of the points; 0 when not given.", min=0)] = None,
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
    import torch

    from pellucid.core import grid, schedule
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
    config = OracleStudyConfig(**fields_given(OracleStudyConfig, {**ctx.params, **read}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # points in a few dimensions gain nothing from more
    try:
        run(OracleStudy, config, ctx.params, _show_oracle)
    finally:
        torch.set_num_threads(threads)


def _show_oracle(found: OracleResults, out: Path) -> None:
    from pellucid.evidence.study import oracle_report

    bests = [oracle_report.best_table(found, mixture) for mixture in found.mixtures]
    tables = [*bests, oracle_report.one_choice_table(found)]
    sentences = oracle_report.sentences_of(found)
    print_tables(tables, sentences, lambda table: table.columns[1:] if table.columns[0] != "NFE" else ())
    print(f"→ {out}: report.html, table.md, figures.json, charts/")


# --- Samplers -------------------------------------------------------------------------------------------------------


@app.command("samplers")
def study_samplers(
    ctx: typer.Context,
    model: Annotated[
        str, option("MODEL", "A folder, a single file, a hub id (owner/name) or a bundle.", autocompletion=model_names)
    ],
    samplers: Annotated[str, option("NAME,…", "Each NAME[:GRID][:KEY=VALUE…], or a plan file (.json).")],
    steps: Annotated[str, option("N,…", "Step counts, such as 5,10,20.")],
    prompts: Annotated[
        str | None, option("FILE", "A prompt (or a class) a line; scenes:N for N held-out scenes.")
    ] = None,
    seeds: Annotated[int | None, option("N", "Images of each prompt; 1.", min=1)] = None,
    seed: FirstSeed = None,
    out: Folder = Path("out/samplers"),
    guidance: GuidanceText = None,
    size: Annotated[str | None, option("WxH", "Pixels, as 768x512; the model's own.")] = None,
    batch: Batch = None,
    by: Annotated[
        str | None, option("MEASURE", "What decides: distance, latent, kid, image_text, right; distance.")
    ] = None,
    converged: Annotated[str | None, option("NAME", "The sampler of the yardstick; dpmpp_3m:exponential.")] = None,
    converged_steps: ConvergedSteps = None,
    path_steps: PathSteps = None,
    rounds: Annotated[int | None, option("N", "Times that each cell is timed; 5.", min=1)] = None,
    reference: Annotated[str | None, option("FOLDER", "Images for KID and FID in place of the converged ones.")] = None,
    inception: Annotated[
        Path | None, option("FILE", "Weights for KID and FID; the cached ones when not given.")
    ] = None,
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
    config = SamplerStudyConfig(**fields_given(SamplerStudyConfig, {**ctx.params, **read}))
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
    names: Annotated[str | None, option("NAME,…", "Of the models; the names of their folders when not given.")] = None,
    samplers: Annotated[str | None, option("NAME,…", "Each NAME[:GRID][:KEY=VALUE…].")] = None,
    steps: Annotated[
        str | None, option("N,…", "Step counts, and the budgets of model calls at which samplers are compared.")
    ] = None,
    prompts: Annotated[str | None, option("FILE", "A prompt per line, or scenes:N, for models that take text.")] = None,
    seeds: Annotated[int | None, option("N", "Images of each prompt; 32.", min=1)] = None,
    seed: FirstSeed = None,
    guidance: GuidanceText = None,
    batch: Batch = None,
    by: Annotated[str | None, option("MEASURE", "distance, latent, kid, image_text, right; distance.")] = None,
    converged: Annotated[str | None, option("NAME", "The sampler of the yardstick; dpmpp_3m:karras.")] = None,
    converged_steps: ConvergedSteps = None,
    path_steps: PathSteps = None,
    reference: Annotated[str | None, option("FOLDER", "True images for KID, such as data/cifar10:train.")] = None,
    inception: Annotated[Path | None, option("FILE", "Weights for KID; the cached ones when not given.")] = None,
    clip: Clip = None,
    dtype: DType = None,
    device: Device = None,
    out: Annotated[
        Path | None, option("FOLDER", "Where it writes; out/interaction, or out/NAME of the config.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask models of different schedules and architectures for the same images by the same samplers.

    Tells the best of each model with its interval, where the best changes, whether that is sure, and what it costs
    to keep the other's sampler. A study that was stopped goes on.

    Example: [bold]pellucid study interaction --models runs/linear-0/model,runs/cosine-0/model
    --samplers ddim,dpmpp_2m:karras,unipc --steps 5,10,20[/]
    """
    from pellucid.evidence.study.interaction import InteractionStudy

    folder = out or (Path("out/interaction") if config is None else Path("out") / config.stem)
    run(InteractionStudy, _read_interaction(config, ctx.params), ctx.params, _show_interaction, out=folder)


def _read_interaction(config: Path | None, words: dict[str, Any]) -> InteractionStudyConfig:
    """A file, or the words; a word beside a file would be a second answer to one question."""
    from pellucid.evidence.study.interaction import InteractionStudyConfig

    known = fields_given(InteractionStudyConfig, words)
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


def _show_interaction(found: Interaction, folder: Path) -> None:
    from pellucid.evidence.study import interaction_report

    sentences = [*interaction_report.sentences(found), *interaction_report.about_converged(found)]
    print_tables(interaction_report.tables(found), sentences, lambda table: ())
    print(f"→ {folder}: report.html, table.md, figures.json, charts/")
