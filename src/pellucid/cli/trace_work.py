"""`pellucid trace` at work: reads traces, calls the room of evidence, prints."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import typer

from pellucid.cli import output, sample, sample_output, sample_repeat, sample_run, trace_text
from pellucid.cli.output import Destination
from pellucid.cli.sample_repeat import Source
from pellucid.cli.sample_words import Asked
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.trace import diff as comparing
from pellucid.evidence.trace import filmstrip, reading
from pellucid.evidence.trace import replay as replaying
from pellucid.evidence.trace import timeline as timelines
from pellucid.evidence.trace.reading import Trace
from pellucid.evidence.trace.replay import Replay
from pellucid.interop import source
from pellucid.pipeline import fingerprint, repeat
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.repeat import Needs


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
        output.print_json(trace_text.to_dict(trace))
    else:
        trace_text.show(trace, index)
    if plot is not None:
        draw(trace, plot, index or 0, model, linear)
        output.wrote(plot, as_json)


def draw(trace: Trace, plot: Destination, index: int, model: str | None, linear: bool) -> None:
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
        name = model or sample_repeat.local_model(Source(trace.path, recipe, Needs({}, ())))  # type: ignore[arg-type]
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
    other = len(known) == len(fingerprint.PARTS) and fingerprint.short(fingerprint.of_network(vae)) != known[1]
    return vae.float().eval(), "decoded with another VAE than the run had" if other else ""


def diff(first: Path, second: Path, tolerance: float, partial: bool, as_json: bool) -> None:
    if not 0 <= tolerance < 1:
        raise PellucidError(rule("--tolerance", "from 0 to below 1", tolerance), "usage")
    a, b = (reading.read(path, partial=partial) for path in (first, second))
    found = comparing.compare(a, b, tolerance)
    if as_json:
        output.print_json(trace_text.comparison_dict(found))
    else:
        trace_text.show_comparison(found, (first, second), a.header.steps)
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
        output.print_json({"way": found.way, **trace_text.comparison_dict(found.comparison)})
    else:
        trace_text.show_replay(trace, found)
    if not found.same:
        raise typer.Exit(1)


def without_model(trace: Trace, given: dict[str, Any]) -> Replay:
    """A trace of a bare denoiser, which no file holds: its predictions stand for it."""
    extra = [name for name, value in given.items() if value and name != "device"]
    if extra:
        flag = f"--{extra[0].replace('_', '-')}"
        raise PellucidError(f"{flag} must be left out: the trace is of a bare denoiser, without a recipe.", "usage")
    return replaying.replay(trace, device=given["device"] or "cpu")


def with_model(trace: Trace, given: dict[str, Any]) -> Replay:
    asked = asked_of(trace, {**given, "device": given["device"] or trace.header.machine.get("device")})
    pipe = sample_run.timed_load(asked, sample_output.Report())
    weak = sample_run.weak_of(asked)
    fields = {**images_of(asked), **sample_run.adapters_of(asked), **({} if weak is None else {"weak": weak})}
    with output.progress("running again", trace.header.steps) as done:
        return replaying.replay_with(trace, pipe, {**fields, "observers": (lambda _: done(),)})


def asked_of(trace: Trace, given: dict[str, Any]) -> Asked:
    """The recipe's words, completed as `pellucid sample --from` completes them."""
    recipe: Recipe = replaying.recipes_of(trace)[0]
    flags = dict.fromkeys(("weighting", "vae_slicing", "channels_last", "compile"), False)
    words = dict.fromkeys(inspect.signature(sample.command).parameters) | flags | given
    known = recipe if recipe.noise in repeat.NOISES else Recipe.from_dict({**recipe.to_dict(), "noise": "philox"})
    origin = Source(trace.path, known, repeat.needs_of(known))
    return sample_repeat.completed(origin, Asked.of(words))[0]


def images_of(asked: Asked) -> dict[str, Any]:
    return {name: asked.fields[name] for name in ("image", "mask") if name in asked.fields}
