"""`pellucid samplers`: the registry as a table, and one sampler in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import sampler_names

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
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the same as JSON.")] = False,
) -> None:
    """List the samplers, or show one: its options and defaults, its other names, its paper.

    Example: [bold]pellucid samplers "DPM++ 2M Karras"[/]
    """
    from pellucid.core.samplers import REGISTRY, resolve

    if name is not None:
        entry, grid = resolve(name)
        if as_json:
            output.print_json({**facts(entry), "grid": grid})
        else:
            detail(entry, name, grid)
    elif as_json:
        output.print_json([facts(entry) for entry in REGISTRY.values()])
    else:
        overview(list(REGISTRY.values()))


def facts(entry: Sampler) -> dict[str, Any]:
    """What is known of a sampler, for machines."""
    fields = ("name", "title", "family", "order", "deterministic", "calls", "suits", "paper", "aliases")
    return {**{field: getattr(entry, field) for field in fields}, "options": entry.options()}


def overview(entries: list[Sampler]) -> None:
    columns = ("name", "title", "family", "order", "noise", "calls", "suits", "paper")
    made = output.table(*columns, right=("order", "calls"))
    for entry in entries:
        noise = "none" if entry.deterministic else "fresh"
        calls = str(entry.calls)
        made.add_row(
            f"[bold]{entry.name}[/]",
            entry.title,
            entry.family,
            str(entry.order),
            noise,
            calls,
            entry.suits,
            entry.paper,
        )
    screen = output.console()
    screen.print("Samplers", style="bold")
    screen.print(made)
    screen.print("noise none: deterministic after the first noise. calls: model calls per step.")


def detail(entry: Sampler, asked: str, grid: str | None) -> None:
    from rich.markup import escape

    made = output.table("", "")
    made.show_header = False
    noise = "deterministic" if entry.deterministic else "stochastic: fresh noise at the steps"
    made.add_row("family", entry.family)
    made.add_row(
        "order", f"{entry.order}, {entry.calls} model {'call' if entry.calls == 1 else 'calls'} a step, {noise}"
    )
    made.add_row("suits", entry.suits)
    made.add_row("paper", entry.paper)
    made.add_row("also known as", ", ".join(entry.aliases) or "–")
    options = [f"{option} = {value!r}" for option, value in entry.options().items()]
    made.add_row("options", escape("\n".join(options)) or "none")
    if grid is not None:
        made.add_row("grid", escape(f"{grid}, as the name {asked!r} asks"))
    screen = output.console()
    screen.print(f"{entry.title} ({entry.name})", style="bold")
    screen.print(made)
    grid_words = f" --grid {grid}" if grid else ""
    screen.print(f"See its table: [bold]pellucid plan {entry.name}{grid_words}[/]")
