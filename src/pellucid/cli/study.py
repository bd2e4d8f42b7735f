"""`pellucid study`: the same question asked of many set-ups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output, study_scenes
from pellucid.cli.options import Device, Out, group, model_names, whole_numbers
from pellucid.cli.run_study import (
    AsJson,
    Batch,
    Clip,
    ConvergedSteps,
    DType,
    FirstSeed,
    Folder,
    GuidanceText,
    PathSteps,
    Processes,
    Ray,
    Shard,
    comma_words,
    given_only,
    print_tables,
    run,
)
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.study.interaction import Interaction, InteractionStudyConfig
    from pellucid.evidence.study.oracle import OracleStudyConfig
    from pellucid.evidence.study.oracle_results import OracleResults
    from pellucid.evidence.study.samplers_verdict import SamplerFigures


# --- Samplers -------------------------------------------------------------------------------------------------------


def _study_samplers(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A folder, a single file, a hub id (owner/name) or a bundle.",
            autocompletion=model_names,
        ),
    ],
    samplers: Annotated[
        str, typer.Option(metavar="NAME,…", help="Each NAME[:GRID][:KEY=VALUE…], or a plan file (.json).")
    ],
    steps: Annotated[str, typer.Option(metavar="N,…", help="Step counts, such as 5,10,20.")],
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A prompt (or a class) a line; scenes:N for N held-out scenes."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images of each prompt; 1.")] = None,
    seed: FirstSeed = None,
    out: Folder = Path("out/samplers"),
    guidance: GuidanceText = None,
    size: Annotated[str | None, typer.Option(metavar="WxH", help="Pixels, as 768x512; the model's own.")] = None,
    batch: Batch = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="MEASURE", help="What decides: distance, latent, kid, image_text, right; distance."),
    ] = None,
    converged: Annotated[
        str | None, typer.Option(metavar="NAME", help="The sampler of the yardstick; dpmpp_3m:exponential.")
    ] = None,
    converged_steps: ConvergedSteps = None,
    path_steps: PathSteps = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Times that each cell is timed; 5.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Images for KID and FID in place of the converged ones."),
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights for KID and FID; the cached ones when not given.")
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

    given: dict[str, Any] = {"size": None if size is None else read_size("--size", size)}
    given |= {"seeds": seeds, "seed": seed, "guidance": guidance, "batch": batch, "by": by, "converged": converged}
    given |= {"converged_steps": converged_steps, "path_steps": path_steps, "rounds": rounds, "dtype": dtype}
    chosen = tuple(filter(None, comma_words(samplers)))
    counts = whole_numbers("--steps", steps)
    config = SamplerStudyConfig(model, chosen, counts, read_prompts(prompts), **given_only(given))
    judges = {"inception": inception, "clip": clip, "reference": reference}
    how = {"shard": shard, "processes": processes, "ray": ray, "show": _show_samplers, "as_json": as_json}
    run(SamplerStudy, config, out, figures="results.json", device=device, **judges, **how)


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
    screen = output.console()
    screen.print(shown)
    said = (found.verdict.comparison, found.verdict.sentence, found.verdict.words)
    for words in (*said, *found.doubts()):
        if words:
            screen.print(words, soft_wrap=True, markup=False)
    print(f"→ {out}: report.html, charts/, table.md, results.json")


# --- Samplers by model ----------------------------------------------------------------------------------------------


def study_interaction(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A TOML file: models, samplers, steps; or give them below."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(metavar="MODEL,…", help="Folders, files, hub ids or bundles, each trained its own way."),
    ] = None,
    names: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Of the models; the names of their folders when not given.")
    ] = None,
    samplers: Annotated[str | None, typer.Option(metavar="NAME,…", help="Each NAME[:GRID][:KEY=VALUE…].")] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Step counts, and the budgets of model calls at which samplers are compared."),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="A prompt per line, or scenes:N, for models that take text.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images of each prompt; 32.")] = None,
    seed: FirstSeed = None,
    guidance: GuidanceText = None,
    batch: Batch = None,
    by: Annotated[
        str | None, typer.Option(metavar="MEASURE", help="distance, latent, kid, image_text, right; distance.")
    ] = None,
    converged: Annotated[
        str | None, typer.Option(metavar="NAME", help="The sampler of the yardstick; dpmpp_3m:karras.")
    ] = None,
    converged_steps: ConvergedSteps = None,
    path_steps: PathSteps = None,
    reference: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="True images for KID, such as data/cifar10:train.")
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights for KID; the cached ones when not given.")
    ] = None,
    clip: Clip = None,
    dtype: DType = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where it writes; out/interaction, or out/NAME of the config.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask models of different schedules and architectures for the same images by the same samplers.

    Tells the best of each model with its interval, where the best changes, whether that is sure, and what it costs
    to keep the other's sampler. A study that was stopped goes on.

    Example: [bold]pellucid study interaction --models runs/linear-0/model,runs/cosine-0/model
    --samplers ddim,dpmpp_2m:karras,unipc --steps 5,10,20[/]
    """
    given: dict[str, Any] = {"prompts": prompts, "seeds": seeds, "seed": seed, "guidance": guidance, "batch": batch}
    given |= {"by": by, "converged": converged, "converged_steps": converged_steps, "path_steps": path_steps}
    given |= {"reference": reference, "inception": None if inception is None else str(inception), "dtype": dtype}
    given |= {"clip": clip}
    lists = {"models": models, "names": names, "samplers": samplers, "steps": steps}
    asked = _read_interaction(config, {**lists, **given})
    folder = out or (Path("out/interaction") if config is None else Path("out") / config.stem)
    from pellucid.evidence.study.interaction import InteractionStudy

    run(InteractionStudy, asked, folder, device=device, show=_show_interaction, as_json=as_json)


def _read_interaction(config: Path | None, given: dict[str, Any]) -> InteractionStudyConfig:
    """A file, or the words; a word beside a file would be a second answer to one question."""
    from pellucid.evidence.study.interaction import InteractionStudyConfig

    known = given_only(given)
    if config is not None:
        if known:
            option = "--" + next(iter(known)).replace("_", "-")
            raise PellucidError(rule(option, "left to the config", known[next(iter(known))]), "usage")
        return InteractionStudyConfig.load(config)
    for name in ("models", "samplers", "steps"):
        if name not in known:
            raise PellucidError(f"CONFIG or --{name} must be given; got neither.", "usage")
    for name in ("models", "names", "samplers"):
        if name in known:
            known[name] = tuple(filter(None, comma_words(known[name])))
    known["steps"] = whole_numbers("--steps", known["steps"])
    return InteractionStudyConfig(**known)


def _show_interaction(found: Interaction, folder: Path) -> None:
    from pellucid.evidence.study import interaction_report

    sentences = [*interaction_report.sentences(found), *interaction_report.about_converged(found)]
    print_tables(interaction_report.tables(found), sentences, lambda table: ())
    print(f"→ {folder}: report.html, table.md, figures.json, charts/")


# --- The exact denoiser ---------------------------------------------------------------------------------------------

_ALL = "all"


def _study_oracle(
    samplers: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Samplers, such as ddim,unipc:order=3, or all.")
    ] = _ALL,
    grids: Annotated[str, typer.Option(metavar="NAME,NAME", help="Time grids, or all.")] = _ALL,
    schedules: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="linear,cosine,edm,flow when not given.")
    ] = None,
    nfe: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Budgets of model calls: each takes the steps that fit; 5,8,10,14,20,30,50 if not given.",
        ),
    ] = None,
    points: Annotated[int | None, typer.Option(metavar="N", help="Points of a run; 1024 when not given.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Of the points; 0 when not given.")] = None,
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

    from pellucid.evidence.study.oracle import OracleStudy

    config = _read_oracle(samplers, grids, schedules, nfe, points, seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # points in a few dimensions gain nothing from more
    try:
        how = {"shard": shard, "processes": processes, "ray": ray}
        run(OracleStudy, config, out, show=_show_oracle, as_json=as_json, **how)
    finally:
        torch.set_num_threads(threads)


def _read_oracle(
    samplers: str, grids: str, schedules: str | None, nfe: str | None, points: int | None, seed: int | None
) -> OracleStudyConfig:
    """The words of the command line as a config, by the names that the engine has for them."""
    from pellucid.core import grid as laid
    from pellucid.core import schedule as curves
    from pellucid.evidence.study.oracle import OracleStudyConfig
    from pellucid.evidence.study.setups import setup_without_grid

    given = {
        "samplers": None
        if samplers == _ALL
        else tuple(setup_without_grid(word).text for word in comma_words(samplers)),
        "grids": None if grids == _ALL else tuple(laid.named(word).name for word in comma_words(grids)),
        "schedules": None if schedules is None else tuple(curves.make(word).name for word in comma_words(schedules)),
        "nfe": None if nfe is None else _budgets(nfe),
        "points": points,
        "seed": seed,
    }
    return OracleStudyConfig(**given_only(given))


def _budgets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in comma_words(text))
    except ValueError:
        raise PellucidError(rule("--nfe", "whole numbers with commas between them", text), "usage") from None


def _show_oracle(found: OracleResults, out: Path) -> None:
    from pellucid.evidence.study import oracle_report

    bests = [oracle_report.best_table(found, mixture) for mixture in found.mixtures]
    tables = [*bests, oracle_report.one_choice_table(found)]
    sentences = oracle_report.sentences_of(found)
    print_tables(tables, sentences, lambda table: table.columns[1:] if table.columns[0] != "NFE" else ())
    print(f"→ {out}: report.html, table.md, figures.json, charts/")


# --- Schedules, and the group ---------------------------------------------------------------------------------------

app = group("Compare set-ups, with evidence.")


@app.command("schedules")
def study_schedules(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file: the run, the schedules, the points.")],
    out: Out = None,
    device: Device = None,
    shard: Shard = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the table as JSON.")] = False,
) -> None:
    """Train one network under several noise schedules, score it on the way, and draw the report.

    A study that was stopped goes on where it was. Processes that share it (--shard) write into one folder.

    Example: [bold]pellucid study schedules configs/cifar10_schedules_smoke.toml[/]
    """
    from pellucid.evidence.study.kernel import no_bar
    from pellucid.evidence.study.schedules import ScheduleStudy, ScheduleStudyConfig

    run(
        ScheduleStudy,
        ScheduleStudyConfig.load(config),
        out or Path("out") / config.stem,
        show=lambda found, folder: print(folder / "report.html"),
        as_json=as_json,
        figures="table.json",
        shard=shard,
        device=device,
        say=lambda text: print(text, file=sys.stderr),
        bar=no_bar,
    )


app.command("adherence")(study_scenes.study_adherence)
app.command("guidance")(study_scenes.study_guidance)
app.command("oracle")(_study_oracle)
app.command("samplers")(_study_samplers)
app.command("interaction")(study_interaction)
