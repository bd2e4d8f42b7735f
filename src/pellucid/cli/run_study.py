"""What the commands of `pellucid study` share: options, the run with its shares, and what is printed at its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.report.page import Table
    from pellucid.evidence.study.kernel import Study

AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print the figures as JSON.")]
Batch = Annotated[int | None, typer.Option(metavar="N", min=1, help="Images at once; 16.")]
Clip = Annotated[str | None, typer.Option(metavar="FOLDER", help="A CLIP for the image-text score; the bundle's own.")]
ConvergedSteps = Annotated[int | None, typer.Option(metavar="N", min=2, help="Its steps; 200.")]
DType = Annotated[str | None, typer.Option(metavar="NAME", help="float32, float16, bfloat16; float32.")]
FirstSeed = Annotated[int | None, typer.Option(metavar="N", min=0, help="Of the first image; 0.")]
Folder = Annotated[Path, typer.Option(metavar="FOLDER", help="Where it writes; a study that was stopped goes on.")]
GuidanceText = Annotated[
    str | None, typer.Option(metavar="TEXT", help="As it is: 4, 4 + apg, …; the model's own when not given.")
]
PathSteps = Annotated[
    int | None, typer.Option(metavar="N", min=2, help="Steps of a stochastic sampler's own yardstick; 500.")
]
Processes = Annotated[int | None, typer.Option(metavar="N", min=1, help="Work in so many processes here.")]
Ray = Annotated[int | None, typer.Option(metavar="N", min=1, help="The same as tasks of a Ray cluster.")]
Shard = Annotated[
    str | None, typer.Option(metavar="I/N", help="Make only this share of the work: 0/4 is the first of four.")
]


def given_only(given: dict[str, Any]) -> dict[str, Any]:
    """What was given; the config has the defaults."""
    return {name: value for name, value in given.items() if value is not None}


def comma_words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def run(
    kind: type[Study[Any, Any]],
    config: Any,
    out: Path,
    *,
    show: Callable[[Any, Path], object],
    as_json: bool,
    figures: str = "figures.json",
    shard: str | None = None,
    processes: int | None = None,
    ray: int | None = None,
    bar: Any = output.progress,
    **given: Any,
) -> None:
    """The whole study, or one share of it. --json prints the file of `figures` that the report wrote."""
    from pellucid.evidence.study.kernel import run_study

    if shard is not None:
        if processes or ray:
            raise PellucidError(rule("--shard", "given without --processes and --ray", shard), "shard")
        _run_share(kind, config, out, shard, as_json, bar, given)
        return
    found = run_study(kind, config, out, processes=processes or 1, ray=ray or 0, bar=bar, **given)
    if as_json:
        output.print_json(json.loads((out / figures).read_text("utf-8")))
    else:
        show(found, out)


def _run_share(
    kind: type[Study[Any, Any]], config: Any, out: Path, text: str, as_json: bool, bar: Any, given: dict[str, Any]
) -> None:
    """The cells of one share; the report is the whole study's."""
    from pellucid.evidence.study.kernel import shard_of

    index, count = shard_of(text)
    study = kind.open(config, out, (index, count), **given)
    study.run(bar)
    parts = len({study.part(cell) for cell in study.shares(count)[index]})
    if as_json:
        output.print_json({"shard": index, "of": count, kind.parts: parts, "folder": str(out)})
    else:
        told = f"{parts} {kind.parts} → {out}. When all are done, run the same without --shard."
        print(f"shard {index} of {count}: {told}")


def print_tables(tables: Iterable[Table], sentences: Iterable[str], right: Callable[[Table], tuple[str, ...]]) -> None:
    """Tables under their titles, whose columns named by `right` hold numbers, and what they say."""
    console = output.console()
    for one in tables:
        shown = output.table(*one.columns, right=right(one))
        for row in one.rows:
            shown.add_row(*row)
        console.print(one.title, style="bold", markup=False)
        console.print(shown)
    for sentence in sentences:
        console.print(sentence, markup=False)
