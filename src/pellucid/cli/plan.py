"""`pellucid plan`: a sampler as a table that a person can read, save, draw and compare."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import Overwrite, grid_names, sampler_names
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.core.plan import Plan


def command(
    ctx: typer.Context,
    sampler: Annotated[
        str,
        typer.Argument(
            metavar="SAMPLER",
            help="A sampler by any of its names, or a plan file (.json).",
            autocompletion=sampler_names,
        ),
    ],
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Noise schedule; scaled_linear when not given.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the network predicts; the schedule's usual one when not given."),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Where the model is called: karras, trailing, …", autocompletion=grid_names),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps; 20 when not given.")] = None,
    dialect: Annotated[
        str | None,
        typer.Option("--as", metavar="DIALECT", help="exact, or the way of diffusers, k-diffusion or comfyui."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the sampler as key=value; may be repeated."),
    ] = None,
    final: Annotated[
        str | None, typer.Option(metavar="END", help="Where the last step ends: zero or sigma_min.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print the plan, or the comparison, as JSON.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the plan into this image (.png, .svg, .pdf).")
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff", metavar="WORDS", help="Compare with another plan, in these same words; the rest is inherited."
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the plan into this JSON file.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Show a sampler as its table: one row is one model call, then linear updates.

    Example: [bold]pellucid plan dpmpp_2m --grid karras --steps 10 --diff "--as diffusers"[/]
    """
    from pellucid.cli import plan_words

    refuse_both(as_json, plot, diff)
    output.check_overwrite(overwrite, "--save or --plot", save is not None or plot is not None)
    goal = None if save is None else output.destination(save, "--save", (".json",), overwrite=overwrite)
    if plot is not None:
        from pellucid.cli import draw

        drawn = draw.destination(plot, overwrite)
    words = plan_words.PlanWords.of(ctx.params)
    made = plan_words.plan_of(words)
    if diff is not None:
        from pellucid.cli import plan_diff_text

        other = plan_words.inherit(plan_words.parse_words(diff, ctx.command), words, made)
        plan_diff_text.show(made, plan_words.plan_of(other), as_json)
    elif as_json:
        print(made.to_json())
    elif plot is not None:
        from pellucid.evidence.drawing import plan as drawing

        drawn.write(partial(drawing.draw_plan, made))
        output.wrote(drawn)
    else:
        show(made)
    if goal is not None:
        goal.write(made.to_json() + "\n")
        output.wrote(goal, as_json)


def refuse_both(as_json: bool, plot: Path | None, diff: str | None) -> None:
    if plot is not None and (as_json or diff is not None):
        other = "--json" if as_json else "--diff"
        raise PellucidError(
            rule("--plot", f"given without {other}", str(plot), "Run the command twice, once for each."), "usage"
        )


def show(made: Plan) -> None:
    from pellucid.cli import plan_text

    screen = output.console()
    for line in (*plan_text.header(made), "", *plan_text.rows(made), "", *plan_text.legend(made)):
        screen.print(line, soft_wrap=True)
