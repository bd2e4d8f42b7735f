"""`pellucid schedules`: noise schedules as tables, arrays and curves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import AsJson, Overwrite, Plot, flag
from pellucid.core.wording import short

if TYPE_CHECKING:
    from pellucid.core.schedule import Schedule


def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAMES", help="Schedules to show (default: all).")
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
    zero_snr: Annotated[bool, flag("--zero-snr", "Rescale to zero terminal SNR (discrete schedules only).")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Show noise schedules: how β, ᾱ, SNR, λ and σ run over training time.

    Example: [bold]pellucid schedules scaled_linear cosine flow --plot schedules.png[/]
    """
    goal = output.plot_destination(plot, overwrite=overwrite)
    found = _choose(names or [], zero_snr)
    if goal is not None:
        from pellucid.evidence.drawing.plan import draw_schedules

        goal.write(partial(draw_schedules, found))
    if as_json:
        output.print_json({name: curve.table() for name, curve in found.items()}, indent=None)
    else:
        _show(found, names or [], zero_snr)
    if goal is not None:
        output.wrote(goal, as_json)


def _choose(names: list[str], zero_snr: bool) -> dict[str, Schedule]:
    """The schedules by their own names. Without names, all; with `zero_snr`, all that can take the transform."""
    from pellucid.core import schedule as known

    curves = [known.make(name) for name in names or known.names()]
    if zero_snr:
        if not names:
            curves = [curve for curve in curves if isinstance(curve, known.DiscreteVP)]
        curves = [known.make(curve, zero_snr=True) for curve in curves]
    return {curve.name: curve for curve in curves}


def _show(found: dict[str, Schedule], names: list[str], zero_snr: bool) -> None:
    columns = ("name", "frame", "times", "β first → last", "ᾱ last", "SNR first → last", "λ", "σ", "targets")
    rows = [(f"[bold]{name}[/]", *_facts(curve)) for name, curve in found.items()]
    screen = output.console()
    screen.print("Noise schedules", style="bold")
    screen.print(output.table(*columns, right=("times",), rows=rows))
    screen.print(
        "times: training times as they are passed to the network. SNR = (alpha/σ)², λ = log(alpha/σ) = ½·log SNR."
    )
    screen.print("σ is σ/alpha, or the flow's own σ. Continuous schedules: β between 1000 times.")
    if zero_snr and not names:
        screen.print("--zero-snr: continuous schedules are left out; flow and vp_cosine end at zero SNR anyway.")


def _facts(curve: Schedule) -> tuple[str, ...]:
    """The cells of a schedule: frame, times, β, ᾱ, SNR, λ, σ, targets."""
    columns = curve.table()
    ends = {name: (short(float(c[0])), short(float(c[-1]))) for name, c in columns.items()}
    low, high = ends["time"]
    return (
        curve.frame,
        str(curve.num_train) if curve.num_train is not None else f"{low} … {high}",
        " → ".join(ends["beta"]),
        ends["alpha_bar"][1],
        " → ".join(ends["snr"]),
        f"{ends['lam'][1]} … {ends['lam'][0]}",
        " … ".join(ends["sigma"]),
        ", ".join(curve.carries),
    )
