"""`pellucid trace`: a recorded run, shown, compared with another, run again, or laid out in time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import Overwrite, flag, group, option, with_flags
from pellucid.cli.sample import read_options
from pellucid.core.errors import PellucidError, rule
from pellucid.pipeline.request import Request, flags_of

app = group("Show, compare and replay recorded runs (pellucid sample … --trace FILE).")

File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace.", show_default=False)]
AsJson = Annotated[bool, flag("--json", "Print the result as JSON.")]
Partial = Annotated[bool, flag("--partial", "Read the complete part of a trace that was cut off.")]
Model = Annotated[str | None, option("MODEL", "The model (default: the recipe's, if it is on this machine).")]
Device = Annotated[str | None, option("NAME", "cpu, cuda, …")]
# What a recipe does not hold: images and adapters
_INPUTS = {n: flags_of(Request)[n] for n in ("image", "mask", "loras", "controls", "image_prompts", "weak")}


@app.command("show")
def show(
    file: File,
    index: Annotated[int | None, option("N", "One image of a batch, from 0 (default: the mean of all).")] = None,
    plot: Annotated[Path | None, option("PNG", "Draw x, x0 and guidance by step, over the curves.")] = None,
    model: Model = None,
    overwrite: Overwrite = False,
    linear: Annotated[bool, flag("--linear", "Do not decode latents; map them to colours.")] = False,
    partial: Partial = False,
    as_json: AsJson = False,
) -> None:
    """Every step of a run: level, sizes, guidance, saturation, local error, time and memory.

    Example: [bold]pellucid trace show run.safetensors --plot run.png[/]
    """
    from pellucid.cli import trace_text
    from pellucid.evidence import trace as traces
    from pellucid.evidence.trace import filmstrip, previews

    if plot is None and (model is not None or linear):
        raise PellucidError("--model and --linear must come with --plot, which draws images; got them alone.", "usage")
    if model is not None and linear:
        raise PellucidError("--linear must be left out with --model, which decodes; got both.", "usage")
    output.check_overwrite(overwrite, "--plot", plot is not None)
    goal = None if plot is None else output.destination(plot, "--plot", (".png",), overwrite=overwrite)
    trace = traces.read(file, partial=partial)
    if index is not None and not 0 <= index < trace.header.images:
        raise PellucidError(rule("--index", f"from 0 to {trace.header.images - 1}", index), "trace-image")
    if as_json:
        output.print_json(trace_text.trace_dict(trace))
    else:
        trace_text.show_trace(trace, index)
    if goal is None:
        return
    vae, note = (None, "") if linear or not trace.has_images else previews.vae_of(trace, model)
    if not trace.has_images:
        note = "only the curves are drawn: the trace holds no tensors (--trace-tensors keeps them)"
    if note:
        print(f"note: {note}", file=sys.stderr)
    with output.progress("drawing", 1) as done:
        goal.write(lambda part: filmstrip.draw(trace, part, image=index or 0, vae=vae))
        done()
    output.wrote(goal, as_json)


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A trace.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.", show_default=False)],
    tolerance: Annotated[float, option("T", "Differences up to this fraction of a tensor's norm count as none.")] = 0.0,
    partial: Partial = False,
    as_json: AsJson = False,
) -> None:
    """The first step at which two runs diverge, and by what: plan, level, noise, model, guidance. Exit 1 if they do.

    Example: [bold]pellucid trace diff cpu.safetensors gpu.safetensors --tolerance 1e-3[/]
    """
    from pellucid.cli import trace_text
    from pellucid.evidence import trace as traces
    from pellucid.evidence.trace.diff import compare

    if not 0 <= tolerance < 1:
        raise PellucidError(rule("--tolerance", "from 0 to below 1", tolerance), "usage")
    a, b = (traces.read(path, partial=partial) for path in (first, second))
    found = compare(a, b, tolerance)
    if as_json:
        output.print_json(trace_text.comparison_dict(found))
    else:
        trace_text.show_comparison(found, (first, second), a.header.steps)
    if not found.same:
        raise typer.Exit(1)


# --- replay ----------------------------------------------------------------------------------------------------


@app.command("replay")
@with_flags(_INPUTS)
def replay(
    ctx: typer.Context,
    file: File,
    model: Model = None,
    device: Device = None,
    as_json: AsJson = False,
    **inputs: Any,
) -> None:
    """Run it again and compare every step bit by bit. Exit 1 if it differs, with the step and the cause.

    A trace of a bare denoiser has no recipe and is replayed from its recorded predictions. The images and adapters
    of the first run must be passed again.

    Example: [bold]pellucid trace replay run.safetensors[/]
    """
    import torch

    from pellucid.cli import trace_text
    from pellucid.evidence import trace as traces
    from pellucid.evidence.trace import replay as replays

    trace = traces.read(file)
    if not trace.whole:
        ended = f"{len(trace.steps)} of {trace.header.steps} steps ({trace.header.ended})"
        raise PellucidError(rule("trace", "of a run that finished", ended), "trace-broken")
    machine, threads = trace.header.machine.get("device"), trace.header.machine.get("threads")
    if machine == "cpu" and isinstance(threads, int) and threads > 0:
        torch.set_num_threads(threads)  # sums are split by threads: other parts round otherwise
    if trace.header.recipes:
        options = read_options({**ctx.params, "device": device or machine})
        with output.progress("running again", trace.header.steps) as done:
            found = replays.replay_recipe(trace, options, (lambda _: done(),))
    else:  # of a bare denoiser, which no file holds: its predictions replace it
        unused = [flag.names[0] for name, flag in _INPUTS.items() if inputs[name]] + ["--model"] * bool(model)
        if unused:
            must = "must be left out: the trace is of a bare denoiser, without a recipe."
            raise PellucidError(f"{unused[0]} {must}", "usage")
        found = replays.replay(trace, device=device or "cpu")
    if as_json:
        output.print_json({"way": found.way, **trace_text.comparison_dict(found.comparison)})
    else:
        trace_text.show_replay(trace, found)
    if not found.same:
        raise typer.Exit(1)


# --- timeline ------------------------------------------------------------------------------------------------------


@app.command("timeline")
def timeline(
    file: File,
    out: Annotated[Path | None, option("JSON", "Output file (default: FILE with .json).")] = None,
    overwrite: Overwrite = False,
    partial: Partial = False,
    as_json: AsJson = False,
) -> None:
    """Write the run as a timeline that ui.perfetto.dev and chrome://tracing open: stages, steps, loop and memory.

    Example: [bold]pellucid trace timeline run.safetensors --out run.json[/]
    """
    from pellucid.evidence import trace as traces
    from pellucid.evidence.trace import timeline as timelines

    if as_json and out is not None:
        raise PellucidError(rule("--out", "given without --json, which prints the timeline", str(out)), "usage")
    output.check_overwrite(overwrite, "a file, which --json does not write", not as_json)
    path = out or file.with_suffix(".json")
    goal = None if as_json else output.destination(path, "--out", (".json",), overwrite=overwrite)
    trace = traces.read(file, partial=partial)
    document = timelines.timeline(trace)
    if goal is None:
        output.print_json(document)
        return
    goal.write(lambda part: timelines.write(trace, part))
    print(f"wrote {goal}: {len(document['traceEvents'])} events; open it in https://ui.perfetto.dev")
