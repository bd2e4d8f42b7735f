"""`pellucid memory`: the peak of each stage and its owner, before and after; and what each saving costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pellucid.cli import output
from pellucid.cli.options import (
    AsJson,
    Device,
    Dtype,
    Model,
    Overwrite,
    Plot,
    Size,
    flag,
    given_only,
    option,
    with_flags,
)
from pellucid.core.errors import PellucidError, rule
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.request import Lora, flags_of, read_size

if TYPE_CHECKING:
    from pellucid.evidence.drawing.memory import StageReport, StrategyReport
    from pellucid.pipeline.pipeline import Pipeline


@with_flags(flags_of(Policy))
def command(
    model: Model,
    size: Size = None,
    batch: Annotated[int, option("N", "Images at once.", min=1)] = 1,
    steps: Annotated[int, option("N", "Steps of the measured run.", min=1)] = 2,
    controlnet: Annotated[list[str] | None, option("MODEL", "With this ControlNet; may be repeated.")] = None,
    lora: Annotated[list[str] | None, option("FILE", "With this LoRA; may be repeated.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    compare: Annotated[bool, flag("--compare", "Run each strategy and adapter: peak, time, image difference.")] = False,
    predict: Annotated[
        bool, flag("--predict", "Only predict, even for a device that this machine does not have.")
    ] = False,
    as_json: AsJson = False,
    plot: Plot = None,
    overwrite: Overwrite = False,
    **policy_words: Any,
) -> None:
    """Predict each stage's peak memory and its owner, run and measure it, and compare what each saving costs.

    Example: [bold]pellucid memory stable-diffusion-v1-5 --size 512x512 --batch 2 --compare[/]
    """
    if predict and compare:
        raise PellucidError("--predict must be given without --compare, which runs; got both.", "usage")
    goal = output.plot_destination(plot, overwrite=overwrite)
    from pellucid.evidence.drawing.memory import headline
    from pellucid.pipeline.inspection_graph import sketch
    from pellucid.pipeline.load import load, widen

    pixels = None if size is None else read_size("--size", size)
    policy = Policy(**given_only(**policy_words))
    with output.progress("loading", 1):
        pipe = sketch(model, dtype=dtype) if predict else load(model, dtype=dtype, device=device, policy=policy)
    elsewhere = {"policy": policy, "device": _device_named(device)} if predict else {}
    if predict and dtype is None and elsewhere["device"].type == "cpu":
        widen(pipe.components)
    loras = tuple(Lora(path) for path in lora or ())
    settings = {"size": pixels, "batch": batch, "steps": steps, "controlnets": controlnet or (), "loras": loras}
    report = _compare_strategies(pipe, settings) if compare else _by_stage(pipe, settings, elsewhere)
    if as_json:
        output.print_json(report.to_dict())
    else:
        numbers = [name for name in report.columns[1:] if name and name not in ("owner of the peak", "to")]
        screen = output.console()
        screen.print(headline(report.about), style="bold")
        screen.print(output.table(*report.columns, right=numbers, rows=report.rows()))
        for line in report.notes():
            output.say(line)
    if goal is not None:
        goal.write(report.draw)
        output.wrote(goal, as_json)


def _device_named(name: str | None) -> Any:
    import torch

    try:
        return torch.device(name or "cuda")
    except RuntimeError:
        raise PellucidError(rule("--device", "cuda or cpu", name), "device") from None


def _by_stage(pipe: Pipeline, settings: dict[str, Any], elsewhere: dict[str, Any]) -> StageReport:
    """Stage by stage: predicted, and measured unless the prediction is for `elsewhere`: a policy and a device."""
    from pellucid.evidence.drawing.memory import StageReport, describe_run
    from pellucid.pipeline import compare, memory

    request = memory.request_for(pipe, **settings)
    with output.progress("memory", 2) as done:
        forecast = memory.predict(pipe, request, **elsewhere)
        done()
        found = None if elsewhere else compare.measure(pipe, request)
        done()
    return StageReport(
        describe_run(pipe, request, forecast.policy, elsewhere.get("device", pipe.device)), forecast, found
    )


def _compare_strategies(pipe: Pipeline, settings: dict[str, Any]) -> StrategyReport:
    from pellucid.evidence.drawing.memory import StrategyReport, describe_run
    from pellucid.pipeline import compare, memory

    dressed = memory.request_for(pipe, **settings)
    bare = memory.request_for(pipe, **{**settings, "controlnets": (), "loras": ()})
    found, left_out = compare.strategies(pipe, bare, dressed)
    with output.progress("comparing", len(found)) as done:
        rows = compare.compare(pipe, found, done)
    return StrategyReport(describe_run(pipe, bare, pipe.policy, pipe.device), rows, left_out)
