"""`pellucid study interaction`: where the best sampler changes with how a model was trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, whole_numbers
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.evidence.study.interaction import InteractionStudy
    from pellucid.evidence.study.interaction_results import Interaction


def command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A TOML file: models, samplers, steps; or give them below."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(metavar="MODEL,…", help="Folders, files, hub ids or bundles, each trained its own way."),
    ] = None,
    names: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Of the models; the names of their folders when not given.")
    ] = None,
    samplers: Annotated[str | None, typer.Option(metavar="NAME,…", help="Each NAME[:GRID][:KEY=VALUE…].")] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Step counts, and the budgets of model calls at which samplers are compared."),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="A prompt per line, or scenes:N, for models that take text.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images of each prompt; 32.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Of the first image; 0.")] = None,
    guidance: Annotated[
        str | None, typer.Option(metavar="TEXT", help="As it is: 4, 4 + apg, …; the model's own when not given.")
    ] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Images at once; 16.")] = None,
    by: Annotated[
        str | None, typer.Option(metavar="MEASURE", help="distance, latent, kid, image_text, right; distance.")
    ] = None,
    converged: Annotated[
        str | None, typer.Option(metavar="NAME", help="The sampler of the yardstick; dpmpp_3m:karras.")
    ] = None,
    converged_steps: Annotated[int | None, typer.Option(metavar="N", min=2, help="Its steps; 200.")] = None,
    path_steps: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Steps of a stochastic sampler's own yardstick; 500.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="True images for KID, such as data/cifar10:train.")
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights for KID; the cached ones when not given.")
    ] = None,
    clip: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A CLIP for the image-text score; the bundle's own.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help="float32, float16, bfloat16; float32.")] = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where it writes; out/interaction, or out/NAME of the config.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the figures as JSON.")] = False,
) -> None:
    """Ask models of different schedules and architectures for the same images by the same samplers.

    Tells the best of each model with its interval, where the best changes, whether that is sure, and what it costs
    to keep the other's sampler. A study that was stopped goes on.

    Example: [bold]pellucid study interaction --models runs/linear-0/model,runs/cosine-0/model
    --samplers ddim,dpmpp_2m:karras,unipc --steps 5,10,20[/]
    """
    given: dict[str, Any] = {"prompts": prompts, "seeds": seeds, "seed": seed, "guidance": guidance, "batch": batch}
    given |= {"by": by, "converged": converged, "converged_steps": converged_steps, "path_steps": path_steps}
    given |= {"reference": reference, "inception": None if inception is None else str(inception), "dtype": dtype}
    given |= {"clip": clip}
    lists = {"models": models, "names": names, "samplers": samplers, "steps": steps}
    asked = read(config, {**lists, **given})
    folder = out or (Path("out/interaction") if config is None else Path("out") / config.stem)
    from pellucid.evidence.study import interaction_report

    found = interaction_report.study(asked, folder, device=device, bar=output.progress)
    if as_json:
        output.print_json(interaction_report.plain(found))
    else:
        show(found, folder)


def read(config: Path | None, given: dict[str, Any]) -> InteractionStudy:
    """A file, or the words; a word beside a file would be a second answer to one question."""
    from pellucid.evidence.study.interaction import InteractionStudy

    known = {name: value for name, value in given.items() if value is not None}
    if config is not None:
        if known:
            option = "--" + next(iter(known)).replace("_", "-")
            raise PellucidError(rule(option, "left to the config", known[next(iter(known))]), "usage")
        return InteractionStudy.load(config)
    for name in ("models", "samplers", "steps"):
        if name not in known:
            raise PellucidError(f"CONFIG or --{name} must be given; got neither.", "usage")
    for name in ("models", "names", "samplers"):
        if name in known:
            known[name] = tuple(word.strip() for word in known[name].split(",") if word.strip())
    known["steps"] = whole_numbers("--steps", known["steps"])
    return InteractionStudy(**known)


def show(found: Interaction, folder: Path) -> None:
    from pellucid.evidence.study import interaction_report

    console = output.console()
    for told in interaction_report.tables(found):
        shown = output.table(*told.columns)
        for row in told.rows:
            shown.add_row(*row)
        console.print(told.title, style="bold", markup=False)
        console.print(shown)
    for sentence in [*interaction_report.sentences(found), *interaction_report.about_converged(found)]:
        console.print(sentence, markup=False)
    print(f"→ {folder}: report.html, table.md, figures.json, charts/")
