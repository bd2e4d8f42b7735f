"""`pellucid study samplers`: which sampler and how many steps, for one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, model_names, whole_numbers
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.study.samplers import SamplerStudy
    from pellucid.evidence.study.samplers_figures import Figures


def command(
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
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Of the first image; 0.")] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where it writes; a study that was stopped goes on.")
    ] = Path("out/samplers"),
    guidance: Annotated[
        str | None, typer.Option(metavar="TEXT", help="As it is: 4, 4 + apg, …; the model's own when not given.")
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="WxH", help="Pixels, as 768x512; the model's own.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images at once; 16.")] = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="MEASURE", help="What decides: distance, latent, kid, image_text, right; distance."),
    ] = None,
    converged: Annotated[
        str | None, typer.Option(metavar="NAME", help="The sampler of the yardstick; dpmpp_3m:exponential.")
    ] = None,
    converged_steps: Annotated[int | None, typer.Option(metavar="N", min=2, help="Its steps; 200.")] = None,
    path_steps: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Steps of a stochastic sampler's own yardstick; 500.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Times that each cell is timed; 5.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Images for KID and FID in place of the converged ones."),
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights for KID and FID; the cached ones when not given.")
    ] = None,
    clip: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A CLIP for the image-text score; the bundle's own.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help="float32, float16, bfloat16; float32.")] = None,
    device: Device = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Make only this share of the images: 0/4 is the first of four.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Make images in so many processes here.")
    ] = None,
    ray: Annotated[int | None, typer.Option(metavar="N", min=1, help="The same as tasks of a Ray cluster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the figures as JSON.")] = False,
) -> None:
    """Compare samplers and step counts: time, model calls, quality, the Pareto front, its knee, and what to use.

    Writes report.html with charts to hover and images by cell, PNG charts, table.md and results.json.

    Example: [bold]pellucid study samplers --model scenes-128 --samplers ddim,dpmpp_2m:karras --steps 5,10,20
    --prompts scenes:64[/]
    """
    from pellucid.cli import sample_words
    from pellucid.evidence.study import samplers_run
    from pellucid.evidence.study.prompts import read_prompts

    given: dict[str, Any] = {"size": None if size is None else sample_words.size("--size", size)}
    given |= {"seeds": seeds, "seed": seed, "guidance": guidance, "batch": batch, "by": by, "converged": converged}
    given |= {"converged_steps": converged_steps, "path_steps": path_steps, "rounds": rounds, "dtype": dtype}
    config = samplers_run.SamplerStudy(
        model=model,
        samplers=tuple(word.strip() for word in samplers.split(",") if word.strip()),
        steps=whole_numbers("--steps", steps),
        prompts=read_prompts(prompts),
        **{name: value for name, value in given.items() if value is not None},
    )
    judges = {"inception": inception, "clip": clip, "reference": reference}
    if shard is not None:
        one_share(config, out, shard, judges, device, processes or ray, as_json)
        return
    found = samplers_run.study(
        config, out, judges=judges, device=device, processes=processes or 1, ray=ray or 0, bar=output.progress
    )
    if as_json:
        from pellucid.evidence.study import samplers_report

        output.print_json(samplers_report.plain(found))
    else:
        show(found, out)


def one_share(
    config: SamplerStudy,
    out: Path,
    text: str,
    judges: dict[str, Any],
    device: str | None,
    other: int | None,
    as_json: bool,
) -> None:
    """The images of one share; the report is the whole study's."""
    from pellucid.evidence.study import samplers_run
    from pellucid.evidence.study.records import shard_of
    from pellucid.evidence.study.samplers_figures import Judges

    if other:
        raise PellucidError(rule("--shard", "given without --processes and --ray", text), "shard")
    index, count = shard_of(text)
    study = samplers_run.open_study(config, out, shard=(index, count), device=device)
    with output.progress("making and scoring images", study.todo()) as done:
        study.run(Judges.open(study, **judges).scorers, done)
    batches = len(config.firsts((index, count)))
    if as_json:
        output.print_json({"shard": index, "of": count, "batches": batches, "folder": str(out)})
    else:
        print(f"shard {index} of {count}: {batches} batches → {out}. When all are done, run the same without --shard.")


def show(found: Figures, out: Path) -> None:
    """The deciding measure with its interval, of the others the estimates; all of it is in the files."""
    from pellucid.evidence.study.page_chart import short
    from pellucid.evidence.study.samplers_report import seconds_of
    from pellucid.evidence.study.samplers_verdict import interval

    others = [column for column in found.columns.values() if column is not found.main]
    titles = (found.main.measure.title, *(column.measure.title for column in others))
    columns = ("sampler", "steps", "calls", "seconds", *titles)
    shown = output.table(*columns, "", right=columns[1:])
    taken = None if found.verdict.knee is None else found.verdict.knee.cell
    for i, cell in enumerate(found.cells):
        figures = [short(float(column.values[i]) * column.measure.scale, 3) for column in others]
        row = (cell.setup.label, str(cell.steps), str(cell.nfe), seconds_of(found, i), interval(found.main, i))
        shown.add_row(*row, *figures, found.verdict.place(i), style="bold" if i == taken else None)
    screen = output.console()
    screen.print(shown)
    said = (found.verdict.comparison, found.verdict.sentence, found.verdict.words)
    for words in (*said, *found.doubts()):
        if words:
            screen.print(words, soft_wrap=True, markup=False)
    print(f"→ {out}: report.html, charts/, table.md, results.json")
