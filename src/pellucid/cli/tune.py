"""`pellucid tune`: a plan of few steps, tuned by gradient descent against the converged images of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pellucid.cli import output
from pellucid.cli.options import AsJson, Device, Overwrite, flag, given_only, model_names, numbers, option
from pellucid.core.errors import PellucidError
from pellucid.core.wording import short

if TYPE_CHECKING:
    from pellucid.evidence.tune.tuning import TuningResult

_EXAMPLES = (
    "pellucid tune --model scenes-128 --prompts scenes --guidance 4 --steps 5 --held-out 1000 --sweep 5,7",
    "pellucid tune --model runs/cifar/model --steps 8 --what both --start unipc-3:karras --start deis-3:quadratic",
    "pellucid sample scenes-128 'a red star' --plan plan.json --guidance 4",
)
EPILOG = "\n\n".join(("More:", *_EXAMPLES))
_UNRESOLVED = 3.0  # times the teacher's own error: smaller errors say little


def command(
    model: Annotated[
        str, option("MODEL", "A bundle's name, a folder, a file or a hub id.", autocompletion=model_names)
    ],
    steps: Annotated[int, option("N", "Model calls of the plan.")] = 8,
    what: Annotated[
        str | None, option("NAME", "grid, weights, told, both (grid and weights) or all (default: all).")
    ] = None,
    prompts: Annotated[
        str | None, option("FILE", "A prompt per line, or the word scenes; for models that take text.")
    ] = None,
    pairs: Annotated[int | None, option("N", "Pairs of seed and prompt to tune on (default: 512).")] = None,
    held_out: Annotated[int | None, option("N", "Held-out pairs for the evidence (default: 512).")] = None,
    start: Annotated[
        list[str] | None,
        option("SAMPLER:GRID", "Start from this, such as unipc-3:karras; may be repeated (default: the best few)."),
    ] = None,
    guidance: Annotated[str | None, option("SCALE", "As in `pellucid sample` (default: the model's own).")] = None,
    iterations: Annotated[int | None, option("N", "Gradient steps at most (default: 400).")] = None,
    batch: Annotated[int | None, option("N", "Pairs per gradient step (default: 64).")] = None,
    at_once: Annotated[int | None, option("N", "Pairs in memory at a time (default: 64).")] = None,
    teacher: Annotated[int | None, option("N", "Steps of the converged images (default: 200).")] = None,
    sweep: Annotated[
        str | None, option("N,N", "Also measure the untuned samplers at these numbers of calls, on the held-out pairs.")
    ] = None,
    records: Annotated[
        Path | None, option("FOLDER", "Keep what --sweep measures; an interrupted sweep continues.")
    ] = None,
    seed: Annotated[int | None, option("N", "The first seed (default: 0).")] = None,
    dtype: Annotated[str, option("NAME", "dtype of the network.")] = "float32",
    compiled: Annotated[bool, flag("--compile", "Compile the network, for a GPU.")] = False,
    out: Annotated[Path, option("FILE", "The plan file.")] = Path("plan.json"),
    overwrite: Overwrite = False,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Tune the levels, the weights and the times of a plan, so that a few steps come close to the result of many.

    The marginal law holds by construction. Held-out seeds and prompts decide when to stop, and their measurements are
    stored in the plan. If the tuned plan is not better than its start, the start is kept.

    Example: [bold]pellucid tune --model scenes-128 --prompts scenes --steps 8 --out plan.json[/]
    """
    goal = output.destination(out, "--out", (".json",), overwrite=overwrite)
    if records and not sweep:
        raise PellucidError("--records must be given with --sweep; got it alone.", "usage")
    from pellucid.evidence.tune.descent import Descent
    from pellucid.evidence.tune.model import model_of
    from pellucid.evidence.tune.table import Start
    from pellucid.evidence.tune.tuning import TuningConfig, tune
    from pellucid.models.guidance import Guidance
    from pellucid.pipeline.load import load
    from pellucid.pipeline.policy import Policy

    descent = Descent(**given_only(what=what, iterations=iterations, batch=batch, at_once=at_once, seed=seed))
    starts = tuple(dict.fromkeys(map(Start.parse, start or [])))
    calls = None if sweep is None else numbers("--sweep", sweep)
    sizes = given_only(pairs=pairs, held_out=held_out, teacher=teacher, prompts=prompts, seed=seed, sweep=calls)
    config = TuningConfig(steps=steps, descent=descent, starts=starts, **sizes)
    scale = None if guidance is None else Guidance.parse(guidance)
    pipe = load(model, dtype=dtype, device=device, policy=Policy(compile=compiled))

    def keep(tuned: TuningResult) -> None:
        goal.write(tuned.plan.to_json() + "\n")

    tuned = tune(model_of(pipe, scale), config, output.progress, records, keep)
    if as_json:
        output.print_json({"plan": str(out), **tuned.evidence})
    else:
        show(tuned, out)


def show(tuned: TuningResult, out: Path) -> None:
    """The plan that was kept and the others, on pairs that were not used before."""
    evidence, console = tuned.evidence, output.console()
    header = f"{evidence['model']} · {evidence['steps']} calls · {evidence['what']} · guidance {evidence['guidance']}"
    console.print(header, markup=False)
    columns = ("plan", "calls", "mean error", "95 % interval", "median", "90 %", "kept")
    table = output.table(*columns, right=columns[1:6])
    held = evidence["held_out"]
    start, best = evidence["start"], evidence["best_start"]
    names = {"tuned": f"tuned from {start}", "start": start, "best_start": best}
    for key, name in names.items():
        if key == "best_start" and start == best:
            continue
        kept = "✓" if evidence["kept"].replace(" ", "_") == key else ""
        table.add_row(name, str(evidence["steps"]), *_figure_cells(held[key]), kept)
    for row in evidence.get("untuned", ()):
        table.add_row(row["name"], str(row["nfe"]), *_figure_cells(row), "")
    console.print(table)
    doubt = evidence["teacher"]["doubt"]
    words = f"{held['tuned']['pairs']} held-out pairs against {evidence['teacher']['steps']} steps of the teacher"
    print(f"{words}, whose own error is at most {doubt:.2g}; law kept to {tuned.plan.deviation:.1g}")
    if _UNRESOLVED * doubt > held[evidence["kept"].replace(" ", "_")]["mean"]:
        print("Doubtful: the errors are not much larger than the teacher's own. Give more --teacher steps.")
    output.wrote(out)


def _figure_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return (
        short(row["mean"]),
        f"{short(row['low'])} to {short(row['high'])}",
        short(row["median"]),
        short(row["p90"]),
    )
