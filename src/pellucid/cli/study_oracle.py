"""`pellucid study oracle`: every sampler on every grid where the truth is known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.cli import output
from pellucid.cli.adherence import known
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.study.oracle import OracleStudy, Study

ALL = "all"


def command(
    samplers: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Samplers, such as ddim,unipc:order=3, or all.")
    ] = ALL,
    grids: Annotated[str, typer.Option(metavar="NAME,NAME", help="Time grids, or all.")] = ALL,
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
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where it writes; a study that was stopped goes on.")
    ] = Path("out/oracle"),
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure the error and the order of samplers on exact denoisers of Gaussian mixtures: minutes on a CPU.

    Writes tables, charts of error against model calls, and report.html.

    Example: [bold]pellucid study oracle --samplers ddim,heun,dpmpp_2m,unipc --grids karras,trailing --nfe 5,10,20[/]
    """
    from pellucid.evidence.study import charts
    from pellucid.evidence.study.oracle import Study

    charts.require()
    config = read(samplers, grids, schedules, nfe, points, seed)
    study = Study(config, out)
    figures = run(study)
    if as_json:
        output.print_json(figures)
    else:
        show(study)


def read(
    samplers: str, grids: str, schedules: str | None, nfe: str | None, points: int | None, seed: int | None
) -> OracleStudy:
    """The words of the command line as a config, by the names that the engine has for them."""
    from pellucid.core import grid as laid
    from pellucid.core import schedule as curves
    from pellucid.evidence.study.oracle import OracleStudy
    from pellucid.evidence.study.oracle_asked import asked

    given = {
        "samplers": None if samplers == ALL else tuple(asked(word).text for word in words(samplers)),
        "grids": None if grids == ALL else tuple(laid.named(word).name for word in words(grids)),
        "schedules": None if schedules is None else tuple(curves.make(word).name for word in words(schedules)),
        "nfe": None if nfe is None else whole(nfe),
        "points": points,
        "seed": seed,
    }
    return OracleStudy(**known(given))


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def whole(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise PellucidError(rule("--nfe", "whole numbers with commas between them", text), "usage") from None


def run(study: Study) -> dict[str, object]:
    """On one thread: points in a few dimensions gain nothing from more."""
    import torch

    from pellucid.evidence.study import oracle_report

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with output.progress("samplers × grids × schedules", len(study.missing())) as done:
            study.run(done)
        return oracle_report.write(study)
    finally:
        torch.set_num_threads(threads)


def show(study: Study) -> None:
    from pellucid.evidence.study import oracle_tables
    from pellucid.evidence.study.oracle_results import Results

    found = Results.of(study.records.rows)
    console = output.console()
    for told in [*(oracle_tables.best(found, mixture) for mixture in found.mixtures), oracle_tables.everywhere(found)]:
        shown = output.table(*told.columns, right=told.columns[1:] if told.columns[0] != "NFE" else ())
        for row in told.rows:
            shown.add_row(*row)
        console.print(told.title, style="bold", markup=False)
        console.print(shown)
    for sentence in oracle_tables.sentences(found):
        console.print(sentence, markup=False)
    print(f"→ {study.folder}: report.html, table.md, figures.json, charts/")
