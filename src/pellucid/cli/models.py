"""`pellucid models`: what can be loaded on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import AsJson


def command(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]…", help="Folders to search too, four levels deep.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models on this machine: those that come with Pellucid, the hub's cache, and those in folders.

    Example: [bold]pellucid models ~/models[/]
    """
    from pellucid.interop.local_models import models

    found = models(folders or [])
    if as_json:
        output.print_json([asdict(model) for model in found])
        return
    from rich.markup import escape

    rows = []
    for model in found:
        size = f"{model.bytes / 1e6:,.1f}"
        target, schedule = model.target or "–", model.schedule or "–"
        rows.append((f"[bold]{escape(model.name)}[/]", model.kind, target, schedule, size, model.where))
        rows += [(f"[dim]  {escape(model.name)}/{part}[/]",) for part in model.parts]
    columns = ("name", "kind", "predicts", "schedule", "MB", "from")
    screen = output.console()
    screen.print(output.table(*columns, right=("MB",), rows=rows))
    screen.print('A name is what every command takes as its model: [bold]pellucid sample NAME "a red star"[/]')
