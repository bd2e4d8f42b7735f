"""`pellucid inspect`: a model's pipeline as a graph, without loading its weights; with `--time`, in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import model_names
from pellucid.cli.sample import OUTPUT, option, typed
from pellucid.core.errors import PellucidError, rule
from pellucid.pipeline.request import read_size

if TYPE_CHECKING:
    from pellucid.pipeline.inspection import Graph

Overwrite = typed(OUTPUT["overwrite"])

ASKED, LOAD, OUT = "What to inspect it for", "Loading", "Output"
DEPTHS = (1, 2)  # levels of blocks that are shown: of every component, and of one alone


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a single file, a hub id (owner/name) or a bundle.",
            autocompletion=model_names,
        ),
    ],
    size: Annotated[str | None, option(ASKED, "--size", metavar="WxH", help="Pixels, as 768x512 or 512.")] = None,
    batch: Annotated[int, option(ASKED, "--batch", metavar="N", help="Images at once; 1 when not given.")] = 1,
    steps: Annotated[int | None, option(ASKED, "--steps", metavar="N", help="Steps; 30 when not given.")] = None,
    guidance: Annotated[
        str | None,
        option(ASKED, "--guidance", metavar="TEXT", help="7, off, 5 + apg, … Capped at 7 and rescaled."),
    ] = None,
    controlnet: Annotated[
        list[str] | None, option(ASKED, "--controlnet", metavar="NET", help="A ControlNet to add; may be repeated.")
    ] = None,
    ip_adapter: Annotated[
        list[str] | None, option(ASKED, "--ip-adapter", metavar="FILE", help="An IP-Adapter to add; may be repeated.")
    ] = None,
    component: Annotated[
        str | None, option(OUT, "--component", metavar="NAME", help="Only this component, as unet or vae, in detail.")
    ] = None,
    depth: Annotated[
        int | None, option(OUT, "--depth", metavar="N", help="Levels of blocks; 0 for none. 1, or 2 with --component.")
    ] = None,
    time: Annotated[
        bool, option(OUT, "--time", help="Load the weights, run, and show milliseconds by stage and component.")
    ] = False,
    plot: Annotated[
        Path | None, option(OUT, "--plot", metavar="FILE", help="Draw the graph into this image (.png, .svg, .pdf).")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, option(OUT, "--json", help="Print the graph as JSON.")] = False,
    vae: Annotated[str | None, option(LOAD, "--vae", metavar="FOLDER", help="Another autoencoder.")] = None,
    image_encoder: Annotated[
        str | None, option(LOAD, "--image-encoder", metavar="FOLDER", help="The encoder that an IP-Adapter needs.")
    ] = None,
    tokenizer: Annotated[
        Path | None, option(LOAD, "--tokenizer", metavar="FOLDER", help="For single files, which hold none.")
    ] = None,
    target: Annotated[
        str | None, option(LOAD, "--target", metavar="NAME", help="What the network predicts, against its files.")
    ] = None,
    variant: Annotated[str | None, option(LOAD, "--variant", metavar="NAME", help="Which files, such as fp16.")] = None,
    revision: Annotated[str | None, option(LOAD, "--revision", metavar="NAME", help="A revision on the hub.")] = None,
    dtype: Annotated[
        str | None, option(LOAD, "--dtype", metavar="NAME", help="In memory; the files' own when not given.")
    ] = None,
    device: Annotated[
        str | None, option(LOAD, "--device", metavar="NAME", help="Where --time runs: cpu, cuda, …")
    ] = None,
) -> None:
    """Draw a model's pipeline as a graph: its components and their weights, what flows between them and its shape.

    No weights are loaded: sizes come from the files' headers, shapes from a run without data. --time loads and runs.

    Example: [bold]pellucid inspect ./sd15 --size 768x512 --plot sd15.png[/]
    """
    output.check_overwrite(overwrite, "--plot", plot is not None)
    if plot is not None:
        from pellucid.cli import draw

        if component is not None:
            raise PellucidError(rule("--plot", "given without --component", str(plot), "It draws the whole."), "usage")
        goal = draw.destination(plot, overwrite)
    if device is not None and not time:
        raise PellucidError(rule("--device", "given with --time, since nothing runs without it", device), "usage")
    if depth is not None and not 0 <= depth <= 8:
        raise PellucidError(rule("--depth", "from 0 to 8", depth), "usage")
    levels = DEPTHS[component is not None] if depth is None else depth
    from pellucid.models.guidance import Guidance
    from pellucid.pipeline.inspection import GraphOptions

    asked = GraphOptions(
        size=None if size is None else read_size("--size", size),
        batch=batch,
        steps=steps,
        guidance=None if guidance is None else Guidance.parse(guidance),
        depth=levels,
        controlnets=tuple(controlnet or ()),
        ip_adapters=tuple(ip_adapter or ()),
    )
    loading = {
        "vae": vae,
        "image_encoder": image_encoder,
        "tokenizer": tokenizer,
        "target": target,
        "variant": variant,
        "revision": revision,
        "dtype": dtype,
    }
    graph = read_graph(model, asked, loading)
    node = None if component is None else graph.node(component)
    if time:
        graph = add_times(graph, model, asked, {**loading, "device": device})
        node = None if node is None else graph.node(node.name)
    show_graph(graph, node, as_json, levels)
    if plot is not None:
        from pellucid.evidence.drawing import graph as drawing

        goal.write(partial(drawing.draw_graph, graph))
        output.wrote(goal, as_json)


def read_graph(model: str, asked: Any, loading: dict[str, Any]) -> Graph:
    with output.progress(f"reading {model}", 2) as done:
        from pellucid.pipeline import inspection_graph

        done()
        graph = inspection_graph.inspect(model, asked, **loading)
        done()
    return graph


def add_times(graph: Graph, model: str, asked: Any, loading: dict[str, Any]) -> Graph:
    from pellucid.pipeline import inspection_graph

    with ExitStack() as bars:

        def watch(rows: int) -> Callable[[], None]:
            return bars.enter_context(output.progress(f"timing {model}", rows))

        return inspection_graph.with_times(graph, model, asked, watch, **loading)


def show_graph(graph: Graph, node: Any, as_json: bool, depth: int) -> None:
    if as_json:
        whole = graph.to_dict()
        if node is not None:
            [whole] = [one for one in whole["nodes"] if one["name"] == node.name]
            whole["flows"] = [vars(flow) for flow in (*graph.into(node.name), *graph.out_of(node.name))]
        output.print_json(whole)
        return
    from pellucid.cli import inspect_text

    screen = output.console()
    if node is not None:
        inspect_text.show_one(graph, node, screen)
    else:
        inspect_text.show(graph, screen, depth)
