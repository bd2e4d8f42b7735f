"""`pellucid doctor`: what is wrong with a model, a config, a run or its images."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import AsJson, Device, flag, model_names, option, with_flags
from pellucid.core.errors import PellucidError
from pellucid.pipeline.request import Request, flags_of

if TYPE_CHECKING:
    from pellucid.evidence.doctor.subject import RunSpec, SubjectSpec

_EXAMPLES = (
    "Example: pellucid doctor ./sd15 --steps 30",
    "  pellucid doctor scenes-128 --data scenes",
    "  pellucid doctor --config ./sd15/scheduler/scheduler_config.json --steps 10 --json",
    "  pellucid doctor ./model --strict",
    "  pellucid doctor image.png",
    "  pellucid doctor --trace run.trace --images images/",
    "  pellucid doctor model --data images/ --only target --only schedule",
)
EPILOG = "\n\n".join(_EXAMPLES)
_RUNS = ("steps", "strength", "sampler", "grid")
_WORDS = {"adapters": "an adapter"}


@with_flags({name: flags_of(Request)[name]._replace(panel="The run") for name in _RUNS})
def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model, a scheduler_config.json, a plan, or an image that stores its recipe.",
            show_default=False,
            autocompletion=model_names,
        ),
    ] = None,
    config: Annotated[str | None, option("FILE", "A scheduler's config alone.")] = None,
    trace: Annotated[str | None, option("FILE", "A recorded run.")] = None,
    images: Annotated[str | None, option("FOLDER", "Generated images.")] = None,
    data: Annotated[
        str | None, option("FOLDER", "Images of the model's kind, or scenes, for more measurements.")
    ] = None,
    lora: Annotated[list[str] | None, option("FILE", "A LoRA that should have an effect; may be repeated.")] = None,
    controlnet: Annotated[list[str] | None, option("FOLDER", "The same for a ControlNet.")] = None,
    ip_adapter: Annotated[list[str] | None, option("FILE", "The same for an IP-Adapter.")] = None,
    quick: Annotated[bool, flag("--quick", "Read the files but no weights.")] = False,
    dtype: Annotated[
        str | None,
        option("NAME", "dtype of the loaded weights (default: float32 on a CPU and the files' own on a GPU)."),
    ] = None,
    tokenizer: Annotated[str | None, option("FOLDER", "The tokenizer of a single file, which contains none.")] = None,
    only: Annotated[
        list[str] | None,
        option("CHECK", "Only this check, such as target; may be repeated; an error if it cannot run."),
    ] = None,
    strict: Annotated[bool, flag("--strict", "Exit with 1 also if target or schedule could not be checked.")] = False,
    device: Device = None,
    as_json: AsJson = False,
    **run_words: Any,
) -> None:
    """Look for what is wrong; show the numbers, the cause, and what to do.

    Target and schedule are measured on the network itself, with built-in images where no --data is given.
    Exit code 0: nothing worse than a note; 1: a warning or an error; 2: bad input.
    """
    from pellucid.evidence.doctor.checks import examine, named, report_text
    from pellucid.evidence.doctor.subject import RunSpec, SubjectSpec, open_subject

    run = RunSpec(**run_words, device=device)
    adapters = (tuple(paths or ()) for paths in (lora, controlnet, ip_adapter))
    spec = SubjectSpec(model, config, trace, images, data, quick, tokenizer, dtype, *adapters)
    _check_options(spec, run)
    checks = named(only or ())
    subject = open_subject(spec, run)
    with output.progress("looking", len(checks)) as tick:
        report = replace(examine(subject, checks, tick), strict=strict)
    if only and report.skipped:
        name, why = report.skipped[0]
        raise PellucidError(f"check {name} must be able to run here if it is selected; it cannot: {why}.", "check")
    if as_json:
        output.print_json(report.to_dict())
    else:
        output.console().print(report_text(report), soft_wrap=True)
    if report.status:
        raise typer.Exit(report.status)


def _check_options(spec: SubjectSpec, run: RunSpec) -> None:
    """Refuses options without effect, and names that do not exist."""
    from pellucid.core import grid, samplers

    if run.sampler is not None:
        samplers.resolve(run.sampler)
    if run.grid is not None:
        grid.named(run.grid)
    if spec.model is None and spec.config is None:
        named = [f"--{name}" for name in _RUNS if getattr(run, name) is not None]
        if named:
            raise PellucidError(f"{', '.join(named)} must come with MODEL or --config; got neither.", "usage")
    if spec.model is None:
        for name in ("data", "tokenizer", "dtype", "quick", "adapters"):
            if getattr(spec, name) and not (name == "data" and spec.images):
                raise PellucidError(f"{_WORDS.get(name, f'--{name}')} must come with MODEL; got it without.", "usage")
    if spec.quick and (spec.data or spec.dtype or spec.adapters):
        raise PellucidError("--quick must be left out with --data, --dtype and adapters, which need weights.", "usage")
