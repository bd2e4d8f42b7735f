"""What the commands of `pellucid study` share: options, the run with its shares, and what is printed at its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pellucid.cli import output
from pellucid.cli.options import flag, given_only, option
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.report.page import Table
    from pellucid.evidence.study.kernel import Study

AsJson = Annotated[bool, flag("--json", "Print the figures as JSON.")]
Folder = Annotated[Path, option("FOLDER", "Where it writes; a study that was stopped goes on.")]
Processes = Annotated[int | None, option("N", "Work in so many processes here.", min=1)]
Ray = Annotated[int | None, option("N", "The same as tasks of a Ray cluster.", min=1)]
Shard = Annotated[str | None, option("I/N", "Make only this share of the work: 0/4 is the first of four.")]


def fields_given(kind: type[Any], words: dict[str, Any]) -> dict[str, Any]:
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
    **given: Any,
) -> None:
    """The whole study, or one share of it, as the `words` of the command line say. --json prints the file of
    `figures` that the report wrote."""
    from pellucid.evidence.study.kernel import run_study, shard_of

    folder, shard, processes, ray = out or words["out"], *map(words.get, ("shard", "processes", "ray"))
    if "device" in words:
        given["device"] = words["device"]
    if shard is None:
        found = run_study(kind, config, folder, processes=processes or 1, ray=ray or 0, bar=bar, **given)
        if words["as_json"]:
            output.print_json(json.loads((folder / figures).read_text("utf-8")))
        else:
            show(found, folder)
        return
    if processes or ray:
        raise PellucidError(rule("--shard", "given without --processes and --ray", shard), "shard")
    index, count = shard_of(shard)
    study = kind.open(config, folder, (index, count), **given)
    study.run(bar)  # of this share's cells alone; the report is the whole study's
    parts = len({study.part(cell) for cell in study.shares(count)[index]})
    if words["as_json"]:
        output.print_json({"shard": index, "of": count, kind.parts: parts, "folder": str(folder)})
    else:
        told = f"{parts} {kind.parts} → {folder}. When all are done, run the same without --shard."
        print(f"shard {index} of {count}: {told}")


def print_tables(tables: Iterable[Table], sentences: Iterable[str], right: Callable[[Table], tuple[str, ...]]) -> None:
    """Tables under their titles, whose columns named by `right` hold numbers, and what they say."""
    console = output.console()
    for one in tables:
        console.print(one.title, style="bold", markup=False)
        console.print(output.table(*one.columns, right=right(one), rows=one.rows))
    for sentence in sentences:
        console.print(sentence, markup=False)
