"""`pellucid samplers`: the registry as a table, and one sampler in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import AsJson, sampler_names

if TYPE_CHECKING:
    from pellucid.core.samplers import Sampler


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help='A sampler by any of its names, such as "DPM++ 2M Karras" or "Euler a".',
            autocompletion=sampler_names,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the samplers, or show one: its options and defaults, its other names, its paper.

    Example: [bold]pellucid samplers "DPM++ 2M Karras"[/]
    """
    from pellucid.core.samplers import REGISTRY, resolve

    if name is not None:
        entry, grid = resolve(name)
        if as_json:
            output.print_json({**_facts(entry), "grid": grid})
        else:
            _detail(entry, name, grid)
    elif as_json:
        output.print_json([_facts(entry) for entry in REGISTRY.values()])
    else:
        _overview(list(REGISTRY.values()))


def _facts(entry: Sampler) -> dict[str, Any]:
    """What is known of a sampler, for machines."""
    fields = ("name", "title", "family", "order", "deterministic", "calls", "suits", "paper", "aliases")
    return {**{field: getattr(entry, field) for field in fields}, "options": entry.options()}


def _overview(entries: list[Sampler]) -> None:
    columns = ("name", "title", "family", "order", "noise", "calls", "suits", "paper")
    rows = []
    for entry in entries:
        noise = "none" if entry.deterministic else "fresh"
        about = (entry.title, entry.family, str(entry.order), noise, str(entry.calls), entry.suits, entry.paper)
        rows.append((f"[bold]{entry.name}[/]", *about))
    screen = output.console()
    screen.print("Samplers", style="bold")
    screen.print(output.table(*columns, right=("order", "calls"), rows=rows))
    screen.print("noise none: deterministic after the first noise. calls: model calls per step.")


def _detail(entry: Sampler, word: str, grid: str | None) -> None:
    from rich.markup import escape

    noise = "deterministic" if entry.deterministic else "stochastic: fresh noise at the steps"
    calls = f"{entry.calls} model {'call' if entry.calls == 1 else 'calls'} per step"
    rows = [
        ("family", entry.family),
        ("order", f"{entry.order}, {calls}, {noise}"),
        ("suits", entry.suits),
        ("paper", entry.paper),
        ("also known as", ", ".join(entry.aliases) or "–"),
        ("options", escape("\n".join(f"{name} = {value!r}" for name, value in entry.options().items())) or "none"),
    ]
    if grid is not None:
        rows.append(("grid", escape(f"{grid}, as the name {word!r} asks")))
    table = output.table("", "", rows=rows)
    table.show_header = False
    screen = output.console()
    screen.print(f"{entry.title} ({entry.name})", style="bold")
    screen.print(table)
    grid_words = f" --grid {grid}" if grid else ""
    screen.print(f"See its table: [bold]pellucid plan {entry.name}{grid_words}[/]")
