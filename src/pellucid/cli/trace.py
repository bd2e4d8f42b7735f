"""`pellucid trace`: a recorded run, shown, compared with another, run again, or laid out in time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli.options import Overwrite, group
from pellucid.cli.sample import request_option

app = group("Recorded runs (pellucid sample … --trace FILE): show, compare, run again, lay out in time.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
Partial = Annotated[bool, typer.Option("--partial", help="Read what is whole of a trace that was cut or killed.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The model; the recipe's when it is here, if not given.")
]
Image, Mask, Weak = (request_option(name) for name in ("image", "mask", "weak"))
LoraFiles, ControlWords, ImagePromptWords = (request_option(name) for name in ("loras", "controls", "image_prompts"))
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, …")]


@app.command("show")
def show(
    file: File,
    index: Annotated[
        int | None, typer.Option("--index", metavar="N", help="One image of a batch, from 0; means when not given.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", help="Draw x, x0 and guidance by step, over the curves.")
    ] = None,
    model: Model = None,
    overwrite: Overwrite = False,
    linear: Annotated[bool, typer.Option("--linear", help="Do not decode latents; map them to colours.")] = False,
    partial: Partial = False,
    as_json: AsJson = False,
) -> None:
    """Every step of a run: level, sizes, guidance, saturation, local error, time and memory.

    Example: [bold]pellucid trace show run.safetensors --plot run.png[/]
    """
    from pellucid.cli import trace_work

    goal = trace_work.plot_goal(plot, overwrite, decoded=model is not None, linear=linear)
    trace_work.show(file, index, goal, model, linear, partial, as_json)


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A trace.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.", show_default=False)],
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", metavar="T", help="Tensors as near as this part of their norm are the same."),
    ] = 0.0,
    partial: Partial = False,
    as_json: AsJson = False,
) -> None:
    """The first step at which two runs diverge, and by what: plan, level, noise, model, guidance. Exit 1 if they do.

    Example: [bold]pellucid trace diff cpu.safetensors gpu.safetensors --tolerance 1e-3[/]
    """
    from pellucid.cli import trace_work

    trace_work.compare(first, second, tolerance, partial, as_json)


@app.command("replay")
def replay(
    file: File,
    model: Model = None,
    device: Device = None,
    image: Image = None,
    mask: Mask = None,
    loras: LoraFiles = None,
    controls: ControlWords = None,
    image_prompts: ImagePromptWords = None,
    weak: Weak = None,
    as_json: AsJson = False,
) -> None:
    """Run it again and compare every step, bit by bit. Exit 1 where it is not the same, with the step and the cause.

    A trace without a recipe, of a bare denoiser, is run from the predictions that it holds. Images and adapters of
    the first run have to be given again.

    Example: [bold]pellucid trace replay run.safetensors[/]
    """
    from pellucid.cli import trace_work

    given = {"image": image, "mask": mask, "loras": loras, "controls": controls, "image_prompts": image_prompts}
    trace_work.replay(file, {**given, "weak": weak, "model": model, "device": device}, as_json)


@app.command("timeline")
def timeline(
    file: File,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="JSON", help="Where to; FILE with .json when not given.")
    ] = None,
    overwrite: Overwrite = False,
    partial: Partial = False,
    as_json: AsJson = False,
) -> None:
    """Write the run as a timeline that ui.perfetto.dev and chrome://tracing open: stages, steps, loop and memory.

    Example: [bold]pellucid trace timeline run.safetensors --out run.json[/]
    """
    from pellucid.cli import trace_work

    trace_work.timeline(file, out, overwrite, partial, as_json)
