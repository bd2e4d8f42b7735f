"""`pellucid memory`: the peak of each stage and its owner, before and after; and what each saving costs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, Overwrite, model_names
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.pipeline.pipeline import Pipeline
    from pellucid.pipeline.policy import Policy


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a checkpoint file, a bundle or a hub id.", autocompletion=model_names
        ),
    ],
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Pixels, as 768x512 or 512; the model's own when not given.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Images at once.")] = 1,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of the measured run.")] = 2,
    controlnet: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="With this ControlNet; may be repeated.")
    ] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="FILE", help="With this LoRA; may be repeated.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="float32, bfloat16 or float16; as `pellucid sample` when not given."),
    ] = None,
    device: Device = None,
    attention: Annotated[str, typer.Option(metavar="NAME", help="auto, flash, efficient, cudnn or math.")] = "auto",
    vae_slicing: Annotated[bool, typer.Option("--vae-slicing", metavar="", help="Decode one image at a time.")] = False,
    vae_tile: Annotated[
        int | None, typer.Option(metavar="N", help="Decode in tiles of N × N latents; the whole when not given.")
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", metavar="", help="Convolutions with the channels innermost.")
    ] = False,
    offload: Annotated[
        str, typer.Option(metavar="HOW", help="none, component or block: what waits on the CPU.")
    ] = "none",
    compiled: Annotated[bool, typer.Option("--compile", metavar="", help="Compile the denoising network.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", metavar="", help="Run each strategy and adapter: peak, time, image difference.")
    ] = False,
    predict: Annotated[
        bool, typer.Option("--predict", metavar="", help="Only predict; the device need not be here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the figures as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the stages, or the strategies, into this file.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict the peak of each stage and who owns it, then run and measure it; compare what each saving costs.

    Example: [bold]pellucid memory stable-diffusion-v1-5 --size 512x512 --batch 2 --compare[/]
    """
    if predict and compare:
        raise PellucidError("--predict must be given without --compare, which runs; got both.", "usage")
    output.check_overwrite(overwrite, "--plot", plot is not None)
    goal = None
    if plot is not None:
        from pellucid.cli import draw

        goal = draw.destination(plot, overwrite)
    from pellucid.pipeline.inspection_graph import sketch
    from pellucid.pipeline.load import load, widen
    from pellucid.pipeline.policy import Policy
    from pellucid.pipeline.request import read_size

    wanted = None if size is None else read_size("--size", size)
    policy = Policy(attention, vae_slicing, vae_tile, channels_last, offload, compiled)  # type: ignore[arg-type]
    with output.progress("loading", 1):
        pipe = sketch(model, dtype=dtype) if predict else load(model, dtype=dtype, device=device, policy=policy)
    where = PredictFor(policy, device) if predict else None
    if where is not None and dtype is None and where.device.type == "cpu":
        widen(pipe.components)
    asked = {"size": wanted, "batch": batch, "steps": steps, "controlnets": controlnet or (), "loras": loras(lora)}
    if compare:
        show_by_strategy(pipe, asked, as_json, goal)
    else:
        show_by_stage(pipe, asked, where, as_json, goal)


class PredictFor:
    """What to predict for, when it is not what was loaded."""

    def __init__(self, policy: Policy, device: str | None) -> None:
        import torch

        try:
            self.device = torch.device(device or "cuda")
        except RuntimeError:
            raise PellucidError(rule("--device", "cuda or cpu", device), "device") from None
        self.policy = policy


def loras(paths: list[str] | None) -> tuple[Any, ...]:
    from pellucid.pipeline.request import Lora

    return tuple(Lora(path) for path in paths or ())


def show_by_stage(
    pipe: Pipeline, asked: dict[str, Any], where: PredictFor | None, as_json: bool, goal: output.Destination | None
) -> None:
    """Stage by stage: predicted, and measured where it runs."""
    from pellucid.cli import memory_text
    from pellucid.evidence.drawing.memory import describe_run
    from pellucid.pipeline import compare, memory

    request = memory.request_for(pipe, **asked)
    with output.progress("memory", 2) as seen:
        other: dict[str, Any] = {} if where is None else {"policy": where.policy, "device": where.device}
        forecast = memory.predict(pipe, request, **other)
        seen()
        found = compare.measure(pipe, request) if where is None else None
        seen()
    about = describe_run(pipe, request, forecast.policy, pipe.device if where is None else where.device)
    if as_json:
        output.print_json(memory_text.stages_json(about, forecast, found))
    else:
        memory_text.show_stages(about, forecast, found)
    if goal is not None:
        from pellucid.evidence.drawing import memory as drawing

        goal.write(partial(drawing.draw_stages, about, forecast, found))
        output.wrote(goal, as_json)


def show_by_strategy(pipe: Pipeline, asked: dict[str, Any], as_json: bool, goal: output.Destination | None) -> None:
    """Strategy by strategy."""
    from pellucid.cli import memory_text
    from pellucid.evidence.drawing.memory import describe_run
    from pellucid.pipeline import compare, memory

    dressed = memory.request_for(pipe, **asked)
    bare = memory.request_for(pipe, **{**asked, "controlnets": (), "loras": ()})
    found, left_out = compare.strategies(pipe, bare, dressed)
    with output.progress("comparing", len(found)) as seen:
        rows = compare.compare(pipe, found, seen)
    about = describe_run(pipe, bare, pipe.policy, pipe.device)
    if as_json:
        output.print_json(memory_text.rows_json(about, rows, left_out))
    else:
        memory_text.show_rows(about, rows, left_out)
    if goal is not None:
        from pellucid.evidence.drawing import memory as drawing

        goal.write(partial(drawing.draw_strategies, about, rows))
        output.wrote(goal, as_json)
