"""`pellucid trace` at work: reads traces, calls the room of evidence, and prints traces and comparisons."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.table import Table

from pellucid.cli import output
from pellucid.cli.output import Destination, short
from pellucid.cli.sample import read_options
from pellucid.core.errors import PellucidError, rule
from pellucid.core.wording import counted
from pellucid.evidence.trace import diff, filmstrip, reading
from pellucid.evidence.trace import diff as comparing
from pellucid.evidence.trace import replay as replaying
from pellucid.evidence.trace import timeline as timelines
from pellucid.evidence.trace.diff import Comparison
from pellucid.evidence.trace.header import Header
from pellucid.evidence.trace.reading import Step, Trace
from pellucid.evidence.trace.replay import Replay
from pellucid.evidence.trace.timeline import finite
from pellucid.interop import source
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint
from pellucid.pipeline.repeat import RecipeSource, model_of
from pellucid.pipeline.request import Request, flags_of

# --- Traces as text -------------------------------------------------------------------------------------------------

GROWTH = 12  # steps of a comparison that are shown


def print_line(text: str, **style: Any) -> None:
    output.console().print(text, soft_wrap=True, markup=False, **style)


# --- one trace -------------------------------------------------------------------------------------------------


def show_trace(trace: Trace, index: int | None) -> None:
    for line in trace_lines(trace):
        print_line(line)
    several = trace.header.images > 1
    if several:
        print_line(
            f"image {index}" if index is not None else f"means of {trace.header.images} images; --index N shows one"
        )
    output.console().print(step_table(trace, index))
    for note in trace.header.notes:
        print_line(f"note: {note}")


def trace_lines(trace: Trace) -> list[str]:
    """What ran, in a few lines."""
    header = trace.header
    names = ", ".join(dict.fromkeys(f"{p.name} ({p.grid.get('name', '?')}), {p.nfe} calls" for p in header.plans))
    size = " × ".join(map(str, header.shape))
    how = "with tensors" if header.kept else "numbers only"
    lines = [
        f"{trace.path.name}: {state_of(trace)} · {counted(header.images, 'image')} of {size}, {header.dtype} · {how}",
        f"{names} · {noise_of(header)}",
    ]
    if header.recipes:
        first = header.recipes[0]
        guidance = Guidance.from_dict(first["guidance"]).text() if first.get("guidance") else "none"
        lines.append(f"{first['model']} · {first['prompt']!r} · guidance {guidance}")
    where = f"{header.machine.get('device')} ({header.machine.get('name')})"
    where += f", {counted(header.machine.get('threads', 1), 'thread')}"
    lines.append(f"{where} · " + ", ".join(f"{name} {value}" for name, value in header.versions.items()))
    took = [f"{stage.name} {stage.seconds:.2f} s" for stage in header.stages]
    if took or header.seconds is not None:
        lines.append(" · ".join(took or [f"run {header.seconds:.2f} s"]))
    return lines


def state_of(trace: Trace) -> str:
    header = trace.header
    if trace.whole:
        return counted(header.steps, "step")
    why = header.ended or ("killed, or still running" if header.state == "recording" else "cut")
    return f"{len(trace.steps)} of {header.steps} steps, {why}"


def noise_of(header: Header) -> str:
    seeds = header.noise.get("seeds") or []
    words = ", ".join(map(str, seeds[:4])) + (", …" if len(seeds) > 4 else "")
    return f"noise {header.noise.get('kind')}" + (f", seed {words}" if seeds else "")


def step_table(trace: Trace, index: int | None) -> Table:
    """One row a step: sizes as root mean squares, so that images of any size read alike."""
    heads = (
        "step",
        "σ/α",
        "time",
        "x",
        "x0",
        "eps",
        "x0−cond",
        "cosine",
        "saturated",
        "error",
        "model",
        "other",
        "MB",
    )
    made = output.table(*heads, right=heads)
    root = math.sqrt(trace.header.numbers)
    for step in trace.steps:
        if index is not None and index not in step.images:
            continue
        pick = picker(step, index)
        seconds = step.device_seconds or step.seconds
        model = seconds.get("model", math.nan)
        ended = {mark.work for mark in step.marks} <= set(step.seconds)  # not so of the last step of a cut trace
        other = sum(value for work, value in seconds.items() if work != "model") if ended else math.nan
        row = step.rows[0 if index is None else step.of(index)]
        made.add_row(
            str(step.index),
            short(row.level.ratio),
            output.time_text(row.time, 5),
            *(number(pick(step.norms[name]) / root) for name in ("x", "x0", "eps", "delta")),
            number(pick(step.cosine), 4),
            number(100 * pick(step.saturation), 3, " %"),
            number(pick(step.local_error), 2),
            number(1e3 * model, 3, " ms"),
            number(1e3 * other, 3, " ms"),
            "" if step.memory is None else f"{step.memory / 1e6:.0f}",
        )
    return made


def picker(step: Step, index: int | None) -> Callable[[Any], float]:
    """One image's number, or the mean of those that have one."""
    if index is not None:
        return lambda values: float(values[step.of(index)])

    def mean(values: Any) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nothing but NaN
            return float(np.nanmean(values))

    return mean


def number(value: float, digits: int = 3, unit: str = "") -> str:
    return "–" if math.isnan(value) else f"{short(value, digits)}{unit}"


def trace_dict(trace: Trace) -> dict[str, Any]:
    """The whole trace but its tensors, as JSON has it."""
    header = {f.name: getattr(trace.header, f.name) for f in fields(trace.header)}
    header |= {"stages": [asdict(stage) for stage in trace.header.stages]}
    return finite(
        {"file": str(trace.path), "whole": trace.whole, "header": header, "steps": list(map(step_dict, trace.steps))}
    )


def step_dict(step: Step) -> dict[str, Any]:
    return finite(
        {
            "index": step.index,
            "images": list(step.images),
            "alpha": [level.alpha for level in step.levels],
            "sigma": [level.sigma for level in step.levels],
            "lam": [level.lam for level in step.levels],
            "time": list(step.times),
            "norms": {name: values.tolist() for name, values in step.norms.items()},
            "cosine": step.cosine.tolist(),
            "saturation": step.saturation.tolist(),
            "local_error": step.local_error.tolist(),
            "digests": {
                name: [f"{value & (2**64 - 1):016x}" for value in values.tolist()]
                for name, values in step.digests.items()
            },
            "seconds": step.seconds,
            "device_seconds": step.device_seconds,
            "memory": step.memory,
            "peak": step.peak,
        }
    )


# --- two traces ------------------------------------------------------------------------------------------------


def show_comparison(found: Comparison, files: tuple[Path, Path], steps: int) -> None:
    print_line(f"A {files[0]}\nB {files[1]}")
    show_first_difference(found)
    rest = [told for told in found.told if told not in found.why]
    if rest:
        print_line("The headers also differ in" if found.why else "The headers differ in", style="bold")
        for told in rest:
            print_line(f"  {told.text()}")
    if found.first is not None and any(not math.isnan(one.x0) and one.x0 > 0 for one in found.apart):
        print_line("Distance by step, as a part of B's norm", style="bold")
        output.console().print(distance_table(found))
    for note in found.notes:
        print_line(f"note: {note}")


def show_first_difference(found: Comparison) -> None:
    print_line(diff.headline(found), style="bold")
    for line in diff.details(found):
        print_line(f"  {line}")


def distance_table(found: Comparison) -> Table:
    made = output.table("step", "x", "x0", right=("step", "x", "x0"))
    places = range(len(found.apart))
    if len(found.apart) > GROWTH:
        places = sorted({round(k * (len(found.apart) - 1) / (GROWTH - 1)) for k in range(GROWTH)})
    for k in places:
        one = found.apart[k]
        made.add_row(str(one.step), number(one.x), number(one.x0))
    return made


def comparison_dict(found: Comparison) -> dict[str, Any]:
    return finite(
        {
            "same": found.same,
            "steps": found.steps,
            "first": None if found.first is None else asdict(found.first),
            "why": [asdict(told) for told in found.why],
            "images": [asdict(one) for one in found.images],
            "headers": [asdict(told) for told in found.told],
            "apart": [asdict(one) for one in found.apart],
            "notes": list(found.notes),
        }
    )


def show_replay(trace: Trace, found: Replay) -> None:
    ways = {
        "model": "run again with its model",
        "predictions": "run again from the predictions that it holds, without a model: its plan, noise and updates",
    }
    print_line(f"{trace.path.name}: {ways.get(found.way, 'run again')}")
    if found.same:
        steps, images = counted(found.comparison.steps, "step"), counted(trace.header.images, "image")
        print_line(f"the same, bit by bit, in {steps} of {images}", style="bold")
        return
    show_first_difference(found.comparison)


# --- The commands ---------------------------------------------------------------------------------------------------


def plot_goal(plot: Path | None, overwrite: bool, *, decoded: bool, linear: bool) -> Destination | None:
    """Where `--plot` draws; refuses what goes with it alone, or not together."""
    if plot is None and (decoded or linear):
        raise PellucidError("--model and --linear must come with --plot, which draws images; got them alone.", "usage")
    if decoded and linear:
        raise PellucidError("--linear must be left out with --model, which decodes; got both.", "usage")
    output.check_overwrite(overwrite, "--plot", plot is not None)
    return None if plot is None else output.destination(plot, "--plot", (".png",), overwrite=overwrite)


def show(
    file: Path,
    index: int | None,
    plot: Destination | None,
    model: str | None,
    linear: bool,
    partial: bool,
    as_json: bool,
) -> None:
    trace = reading.read(file, partial=partial)
    if index is not None and not 0 <= index < trace.header.images:
        must = f"from 0 to {trace.header.images - 1}"
        raise PellucidError(rule("--index", must, index), "trace-image")
    if as_json:
        output.print_json(trace_dict(trace))
    else:
        show_trace(trace, index)
    if plot is not None:
        draw_filmstrip(trace, plot, index or 0, model, linear)
        output.wrote(plot, as_json)


def draw_filmstrip(trace: Trace, plot: Destination, index: int, model: str | None, linear: bool) -> None:
    vae, note = (None, "") if linear or not trace.has_images else vae_of(trace, model)
    if not trace.has_images:
        note = "only the curves are drawn: the trace holds no tensors (--trace-tensors keeps them)"
    if note:
        print(f"note: {note}", file=sys.stderr)
    with output.progress("drawing", 1) as done:
        plot.write(lambda part: filmstrip.draw(trace, part, image=index, vae=vae))
        done()


def vae_of(trace: Trace, model: str | None) -> tuple[Any, str]:
    """The VAE that decodes a trace, and what is to be said of it."""
    recipe = trace.header.recipe
    if len(trace.header.shape) != 3 or trace.header.shape[0] in (1, 3) or (recipe is None and model is None):
        return None, ""
    try:
        name = model or model_of(RecipeSource(trace.path, recipe))  # type: ignore[arg-type]
    except PellucidError:
        return None, f"latents are mapped to colours: {recipe.model} is not here to decode them (--model)"  # type: ignore
    root, dtype = source.locate(name), recipe.dtype or None if recipe is not None else None
    if (root / "vae").is_dir():  # the rest of the model is not needed
        vae = source.load_component(root / "vae", dtype=dtype)
    else:
        vae = source.read_components(name, dtype=dtype).vae
    if vae is None:
        return None, f"latents are mapped to colours: {name} has no VAE"
    known = (recipe.model_hash or "").partition(":")[2].split("-") if recipe is not None else []
    other = len(known) == len(fingerprint.PARTS) and fingerprint.short_hash(fingerprint.of_network(vae)) != known[1]
    return vae.float().eval(), "decoded with another VAE than the run had" if other else ""


def compare(first: Path, second: Path, tolerance: float, partial: bool, as_json: bool) -> None:
    if not 0 <= tolerance < 1:
        raise PellucidError(rule("--tolerance", "from 0 to below 1", tolerance), "usage")
    a, b = (reading.read(path, partial=partial) for path in (first, second))
    found = comparing.compare(a, b, tolerance)
    if as_json:
        output.print_json(comparison_dict(found))
    else:
        show_comparison(found, (first, second), a.header.steps)
    if not found.same:
        raise typer.Exit(1)


def timeline(file: Path, out: Path | None, overwrite: bool, partial: bool, as_json: bool) -> None:
    goal = None
    if as_json and out is not None:
        raise PellucidError(rule("--out", "given without --json, which prints the timeline", str(out)), "usage")
    output.check_overwrite(overwrite, "a file, which --json does not write", not as_json)
    if not as_json:
        goal = output.destination(out or file.with_suffix(".json"), "--out", (".json",), overwrite=overwrite)
    trace = reading.read(file, partial=partial)
    document = timelines.timeline(trace)
    if goal is None:
        output.print_json(document)
        return
    goal.write(lambda part: timelines.write(trace, part))
    print(f"wrote {goal}: {len(document['traceEvents'])} events; open it in https://ui.perfetto.dev")


# --- replay ----------------------------------------------------------------------------------------------------


def replay(file: Path, given: dict[str, Any], as_json: bool) -> None:
    trace = reading.read(file)
    if not trace.whole:
        ended = f"{len(trace.steps)} of {trace.header.steps} steps ({trace.header.ended})"
        raise PellucidError(rule("trace", "of a run that came to its end", ended), "trace-broken")
    threads = trace.header.machine.get("threads")
    if trace.header.machine.get("device") == "cpu" and isinstance(threads, int) and threads > 0:
        torch.set_num_threads(threads)  # sums are cut by threads: other cuts round otherwise
    found = with_model(trace, given) if trace.header.recipes else without_model(trace, given)
    if as_json:
        output.print_json({"way": found.way, **comparison_dict(found.comparison)})
    else:
        show_replay(trace, found)
    if not found.same:
        raise typer.Exit(1)


def without_model(trace: Trace, given: dict[str, Any]) -> Replay:
    """A trace of a bare denoiser, which no file holds: its predictions stand for it."""
    extra = [name for name, value in given.items() if value and name != "device"]
    if extra:
        flags = flags_of(Request)
        flag = flags[extra[0]].names[0] if extra[0] in flags else f"--{extra[0]}"
        raise PellucidError(f"{flag} must be left out: the trace is of a bare denoiser, without a recipe.", "usage")
    return replaying.replay(trace, device=given["device"] or "cpu")


def with_model(trace: Trace, given: dict[str, Any]) -> Replay:
    options = read_options({**given, "device": given["device"] or trace.header.machine.get("device")})
    with output.progress("running again", trace.header.steps) as done:
        return replaying.replay_recipe(trace, options, (lambda _: done(),))
