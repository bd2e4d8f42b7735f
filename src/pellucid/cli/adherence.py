"""`pellucid study adherence`: whether a model of scenes draws what it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, whole_numbers

if TYPE_CHECKING:
    from pellucid.evidence.adherence.figures import Figures
    from pellucid.evidence.adherence.prompted import Adherence


def command(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="A bundle's name, or the folder of a model of scenes.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where it writes; a study that was stopped goes on.")
    ] = Path("out/adherence"),
    part: Annotated[
        str | None, typer.Option(metavar="NAME", help="unet, or dit: the transformer beside it; unet when not given.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many prompts; 1000 when not given.")
    ] = None,
    objects: Annotated[
        str | None, typer.Option(metavar="N,N", help="Numbers of objects, drawn at random; 1,2,3 when not given.")
    ] = None,
    sampler: Annotated[str | None, typer.Option(metavar="NAME", help="dpmpp_2m when not given.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="20 when not given.")] = None,
    guidance: Annotated[float | None, typer.Option(metavar="X", help="4 when not given.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images at once; 50 when not given.")] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Of the prompts, and of the first image; 0 when not given.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="float32, float16, bfloat16; float32 when not given.")
    ] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the figures as JSON.")] = False,
) -> None:
    """Ask for combinations that training never saw, read the images, and count what is right.

    Writes a table, a sheet of 100 random images and a sheet of failures.

    Example: [bold]pellucid study adherence --model scenes-128 --prompts 200[/]
    """
    from pellucid.evidence.adherence.making import Making
    from pellucid.evidence.adherence.prompted import Adherence

    given = {"sampler": sampler, "steps": steps, "guidance": guidance, "batch": batch, "seed": seed}
    making = Making(**known(given))
    asked = {
        "part": part,
        "prompts": prompts,
        "dtype": dtype,
        "objects": None if objects is None else whole_numbers("--objects", objects),
    }
    config = Adherence(model=model, making=making, **known(asked))
    found = run(config, out, device)
    if as_json:
        from pellucid.evidence.adherence import report

        output.print_json(report.plain(config, found))
    else:
        show(found, out)


def known(given: dict[str, Any]) -> dict[str, Any]:
    """What was given; the config has the defaults."""
    return {name: value for name, value in given.items() if value is not None}


def run(config: Adherence, out: Path, device: str | None) -> dict[str, Figures]:
    from pellucid.evidence.adherence import report
    from pellucid.evidence.adherence.opening import open_pipe
    from pellucid.evidence.adherence.prompted import Study
    from pellucid.pipeline import fingerprint

    pipe = open_pipe(config.model, config.part, dtype=config.dtype, device=device)
    study = Study(config, out, fingerprint.of_model(pipe.components))
    with output.progress("making and reading images", len(study.missing)) as done:
        study.run(pipe, pipe.device, done)
    return report.write(study)


def show(found: dict[str, Figures], out: Path) -> None:
    from pellucid.evidence.adherence.figures import table

    told = table(found)
    shown = output.table(*told.columns, right=told.columns[1:])
    for row in told.rows:
        shown.add_row(*(cell.replace("**", "") for cell in row), style="bold" if "**" in row[0] else None)
    output.console().print(shown)
    print(f"95 % intervals → {out}: table.md, figures.json, random.png" + sheet_of(out))


def sheet_of(out: Path) -> str:
    return ", failures.png" if (out / "failures.png").exists() else ""
