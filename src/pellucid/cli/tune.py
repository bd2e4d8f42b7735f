"""`pellucid tune`: a plan of few steps, tuned by gradient descent against the converged images of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, Overwrite, model_names, whole_numbers
from pellucid.core.errors import PellucidError

if TYPE_CHECKING:
    from pellucid.evidence.tune.tuning import TuningConfig, TuningResult

EXAMPLES = (
    "pellucid tune --model scenes-128 --prompts scenes --guidance 4 --steps 5 --held-out 1000 --sweep 5,7",
    "pellucid tune --model runs/cifar/model --steps 8 --what both --start unipc-3:karras --start deis-3:quadratic",
    "pellucid sample scenes-128 'a red star' --plan plan.json --guidance 4",
)
EPILOG = "\n\n".join(("More:", *EXAMPLES))
UNRESOLVED = 3.0  # errors below so many times the teacher's own say little


def command(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A bundle's name, a folder, a file or a hub id.",
            autocompletion=model_names,
        ),
    ],
    steps: Annotated[int, typer.Option(metavar="N", help="Model calls of the plan.")] = 8,
    what: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="grid, weights, told, both (grid and weights) or all; all when not given."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A prompt per line, or the word scenes; for models that take text."),
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(metavar="N", help="Pairs of seed and prompt to tune on; 512 when not given.")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(metavar="N", help="Pairs that only the evidence sees; 512 when not given.")
    ] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SAMPLER:GRID",
            help="Begin here, such as unipc-3:karras; may be repeated; the best few if not given.",
        ),
    ] = None,
    guidance: Annotated[
        str | None, typer.Option(metavar="SCALE", help="As of `pellucid sample`; the model's own when not given.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of the descent at most; 400 when not given.")
    ] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Pairs of one step; 64 when not given.")] = None,
    at_once: Annotated[
        int | None, typer.Option(metavar="N", help="Pairs in memory at a time; 64 when not given.")
    ] = None,
    teacher: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of the converged images; 200 when not given.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Measure all that is untuned too, at so many calls, on the held-out pairs."),
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep what --sweep measures; one that was stopped goes on.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The first seed; 0 when not given.")] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="What the network works in.")] = "float32",
    compiled: Annotated[bool, typer.Option("--compile", metavar="", help="Compile the network: for a GPU.")] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the plan goes.")] = Path("plan.json"),
    overwrite: Overwrite = False,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the evidence as JSON.")] = False,
) -> None:
    """Tune the levels, the weights and the told times of a plan, so that few steps end where many do.

    The marginal law holds by construction. Held-out seeds and prompts stop the tuning and are its evidence, which is
    in the plan; a plan that is not better than its start is not written in its place.

    Example: [bold]pellucid tune --model scenes-128 --prompts scenes --steps 8 --out plan.json[/]
    """
    goal = output.destination(out, "--out", (".json",), overwrite=overwrite)
    if records and not sweep:
        raise PellucidError("--records must be given with --sweep; got it alone.", "usage")
    given: dict[str, Any] = {
        "steps": steps, "pairs": pairs, "held_out": held_out, "teacher": teacher, "prompts": prompts, "seed": seed,
        "sweep": None if sweep is None else whole_numbers("--sweep", sweep),
    }  # fmt: skip
    how = {"what": what, "iterations": iterations, "batch": batch, "at_once": at_once, "seed": seed}
    asked = read_options(given, how, start or [])
    from pellucid.pipeline.policy import Policy

    loading = {"dtype": dtype, "device": device, "policy": Policy(compile=compiled)}

    def keep(tuned: TuningResult) -> None:
        goal.write(tuned.plan.to_json() + "\n")

    tuned = run_tuning(model, asked, None if guidance is None else parse_guidance(guidance), loading, records, keep)
    if as_json:
        output.print_json({"plan": str(out), **tuned.evidence})
    else:
        show(tuned, out)


def read_options(given: dict[str, Any], how: dict[str, Any], starts: list[str]) -> TuningConfig:
    """The words as what they mean; refused here, before a model is read."""
    from pellucid.evidence.tune.descent import Descent
    from pellucid.evidence.tune.table import Start
    from pellucid.evidence.tune.tuning import TuningConfig

    descent = Descent(**{name: value for name, value in how.items() if value is not None})
    known = {name: value for name, value in given.items() if value is not None}
    return TuningConfig(descent=descent, starts=tuple(dict.fromkeys(map(Start.parse, starts))), **known)


def parse_guidance(guidance: str) -> Any:
    from pellucid.models.guidance import Guidance

    return Guidance.parse(guidance)


def run_tuning(
    model: str,
    asked: TuningConfig,
    guidance: Any,
    loading: dict[str, Any],
    records: Path | None,
    keep: Callable[[TuningResult], object],
) -> TuningResult:
    from pellucid.evidence.tune.model import model_of
    from pellucid.evidence.tune.tuning import tune
    from pellucid.pipeline.load import load

    return tune(model_of(load(model, **loading), guidance), asked, output.progress, records, keep)


def show(tuned: TuningResult, out: Path) -> None:
    """What was kept and how it stands, on pairs that nobody had seen."""
    told, console = tuned.evidence, output.console()
    header = f"{told['model']} · {told['steps']} calls · {told['what']} · guidance {told['guidance']}"
    console.print(header, markup=False)
    columns = ("plan", "calls", "mean error", "95 % interval", "median", "90 %", "kept")
    table = output.table(*columns, right=columns[1:6])
    held = told["held_out"]
    names = {"tuned": f"tuned from {told['start']}", "start": told["start"], "best_start": told["best_start"]}
    for key, name in names.items():
        if key == "best_start" and told["start"] == told["best_start"]:
            continue
        kept = "✓" if told["kept"].replace(" ", "_") == key else ""
        table.add_row(name, str(told["steps"]), *figure_cells(held[key]), kept)
    for row in told.get("untuned", ()):
        table.add_row(row["name"], str(row["nfe"]), *figure_cells(row), "")
    console.print(table)
    doubt = told["teacher"]["doubt"]
    words = f"{held['tuned']['pairs']} held-out pairs against {told['teacher']['steps']} steps of the teacher"
    print(f"{words}, itself off by at most {doubt:.2g}; law kept to {tuned.plan.deviation:.1g}")
    if UNRESOLVED * doubt > held[told["kept"].replace(" ", "_")]["mean"]:
        print("Doubtful: errors are not much larger than what the teacher itself is off by. Give more --teacher.")
    output.wrote(out)


def figure_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return (
        output.short(row["mean"]),
        f"{output.short(row['low'])} to {output.short(row['high'])}",
        output.short(row["median"]),
        output.short(row["p90"]),
    )
