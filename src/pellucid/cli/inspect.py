"""`pellucid inspect`: a model's pipeline as a graph, without loading its weights; with `--time`, in milliseconds."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.align import Align
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.cli import output
from pellucid.cli.options import Model, Overwrite, flag, option, with_flags
from pellucid.cli.sample import LOADING
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.drawing import graph as drawing
from pellucid.pipeline.request import Request, flags_of, read_size

if TYPE_CHECKING:
    from pellucid.pipeline.inspection import Graph, Node

_RUN, _LOAD, _OUT = "The run that is inspected", "Loading", "Output"
_LOADED = ("vae", "image_encoder", "tokenizer", "target", "variant", "revision")
_DEPTHS = (1, 2)  # levels of blocks that are shown: of every component, and of one alone
WIDTH = 98  # columns of the drawing
_BAR = 16


@with_flags(
    {name: flags_of(Request)[name]._replace(panel=_RUN) for name in ("width", "steps", "guidance")}
    | {name: LOADING[name] for name in _LOADED}
)
def command(
    model: Model,
    batch: Annotated[int, option("N", "Images at once.", panel=_RUN)] = 1,
    controlnet: Annotated[list[str] | None, option("NET", "A ControlNet to add; may be repeated.", panel=_RUN)] = None,
    ip_adapter: Annotated[
        list[str] | None, option("FILE", "An IP-Adapter to add; may be repeated.", panel=_RUN)
    ] = None,
    component: Annotated[
        str | None, option("NAME", "Only this component, as unet or vae, in detail.", panel=_OUT)
    ] = None,
    depth: Annotated[
        int | None, option("N", "Levels of blocks, 0 for none (default: 1, or 2 with --component).", panel=_OUT)
    ] = None,
    time: Annotated[
        bool, flag("--time", "Load the weights, run, and show milliseconds by stage and component.", panel=_OUT)
    ] = False,
    plot: Annotated[
        Path | None, option("FILE", "Draw the graph: .png, .svg, .pdf, .html, or .mmd for Mermaid.", panel=_OUT)
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, flag("--json", "Print the graph as JSON.", panel=_OUT)] = False,
    dtype: Annotated[str | None, option("NAME", "dtype in memory (default: the files' own).", panel=_LOAD)] = None,
    device: Annotated[str | None, option("NAME", "Where --time runs: cpu, cuda, …", panel=_LOAD)] = None,
    **words: Any,
) -> None:
    """Draw a model's pipeline as a graph: its components and their weights, what flows between them and its shape.

    No weights are loaded: sizes come from the files' headers, shapes from a run without data. --time loads and runs.

    Example: [bold]pellucid inspect ./sd15 --size 768x512 --plot sd15.html[/]
    """
    if plot is not None and component is not None:
        raise PellucidError(
            rule("--plot", "given without --component", str(plot), "It draws the whole model."), "usage"
        )
    goal = output.plot_destination(plot, drawing.SUFFIXES, overwrite=overwrite)
    if device is not None and not time:
        raise PellucidError(rule("--device", "given with --time, since nothing runs without it", device), "usage")
    if depth is not None and not 0 <= depth <= 8:
        raise PellucidError(rule("--depth", "from 0 to 8", depth), "usage")
    levels = _DEPTHS[component is not None] if depth is None else depth
    from pellucid.models.guidance import Guidance
    from pellucid.pipeline.inspection import GraphOptions

    options = GraphOptions(
        size=None if words["width"] is None else read_size("--size", words["width"]),
        batch=batch,
        steps=words["steps"],
        guidance=None if words["guidance"] is None else Guidance.parse(words["guidance"]),
        depth=levels,
        controlnets=tuple(controlnet or ()),
        ip_adapters=tuple(ip_adapter or ()),
    )
    loading = {"dtype": dtype, **{name: words[name] for name in _LOADED}}
    with output.progress(f"reading {model}", 2) as done:
        from pellucid.pipeline import inspection_graph

        done()
        graph = inspection_graph.inspect(model, options, **loading)
        done()
    node = None if component is None else graph.node(component)
    if time:
        with ExitStack() as bars:

            def watch(rows: int) -> Callable[[], None]:
                return bars.enter_context(output.progress(f"timing {model}", rows))

            graph = inspection_graph.with_times(graph, model, options, watch, device=device, **loading)
        node = None if node is None else graph.node(node.name)
    if as_json:
        output.print_json(graph.to_dict() if node is None else _component_dict(graph, node))
    elif node is not None:
        _show_component(graph, node)
    else:
        _show(graph, levels)
    if goal is not None:
        goal.write(partial(drawing.draw_graph, graph))
        output.wrote(goal, as_json)


def _component_dict(graph: Graph, node: Node) -> dict[str, Any]:
    [entry] = [one for one in graph.to_dict()["nodes"] if one["name"] == node.name]
    return {**entry, "flows": [vars(flow) for flow in (*graph.into(node.name), *graph.out_of(node.name))]}


# --- In a terminal ---------------------------------------------------------------------------------------------


def _show(graph: Graph, depth: int) -> None:
    """The rows of cards, then tables of the components, their blocks and the milliseconds."""
    screen = output.console()
    screen.print(Text(drawing.title(graph), style="bold"))
    about = drawing.subtitle(graph)
    for part in (about[:-4], about[-4:]):  # what it is; what it is drawn for and what it weighs
        screen.print(Text(" · ".join(part), style="dim"))
    screen.print(rows_of_cards(graph), width=WIDTH)
    columns, right = drawing.component_columns(graph), drawing.NUMBERS
    screen.print(output.table(*columns, right=right, rows=drawing.components(graph), sums=True))
    if depth:
        for node in graph.components():
            screen.print(_blocks_table(node))
    if graph.times is not None:
        screen.print(output.table(*drawing.CLOCK, right=right, rows=drawing.clock(graph), sums=True))
    for note in graph.notes:
        screen.print(Text(f"! {note}", style="yellow"))


def _show_component(graph: Graph, node: Node) -> None:
    """One component: what it is, what comes and goes, and its blocks."""
    screen = output.console()
    screen.print(_card(node, [line for line in drawing.card_lines(graph, node) if not line.startswith("→")], WIDTH))
    for key, value in node.facts.items():
        screen.print(f"{key.replace('_', ' ')}: {value}", markup=False)
    for mark, other, what, dtype in drawing.links(graph, node):
        screen.print(f"{mark} {other}: {what} {dtype}".rstrip(), markup=False, soft_wrap=True)
    if node.blocks:
        screen.print(_blocks_table(node))


def rows_of_cards(graph: Graph) -> Group:
    """From what is given, at the top, to images; the loop in a frame."""
    entrance, loop, after = drawing.rows_of(graph)
    sampler = graph.of("sampler")[0].name
    back = ", ".join(dict.fromkeys(f.goal for f in graph.out_of(sampler) if graph.node(f.goal).role in drawing.LOOP))
    frame = Panel(
        Group(*_with_arrows([_row_of_cards(graph, row, WIDTH - 4) for row in loop])),
        title=f"[bold]{drawing.pace(graph)}[/]",
        subtitle=f"↑ back to {back}",
        title_align="left",
        box=box.HEAVY,
        border_style=drawing.ORANGE,
        width=WIDTH,
    )
    first = [_row_of_cards(graph, row, WIDTH) for row in entrance]
    last = [_row_of_cards(graph, row, WIDTH) for row in after]
    return Group(*_with_arrows([*first, frame, *last]))


def _with_arrows(parts: list[Any]) -> list[Any]:
    down = Align.center(Text("▼"))
    return [one for part in parts for one in (part, down)][:-1]


def _row_of_cards(graph: Graph, row: list[Node], width: int) -> Align:
    said = [drawing.card_lines(graph, node) for node in row]
    fits = sum(_card(node, lines, width).width or 0 for node, lines in zip(row, said, strict=True)) <= width - len(row)
    most = width if fits else width // len(row) - 1
    grid = Table.grid(padding=(0, 1))
    grid.add_row(*(_card(node, lines, most) for node, lines in zip(row, said, strict=True)))
    return Align.center(grid)


def _card(node: Node, texts: list[str], most: int) -> Panel:
    """A box with the node's name on its edge, as wide as what it says."""
    lines = [part for line in texts for part in textwrap.wrap(line, most - 4)]
    width = min(most, max(len(node.name) + 6, *(len(line) + 4 for line in lines), 0))
    return Panel(
        Text("\n".join(lines)), title=Text(node.name, "bold"), title_align="left",
        border_style=drawing.ROLE_COLOURS[node.role], width=width,
    )  # fmt: skip


def _blocks_table(node: Node) -> Table:
    """A network's blocks: class, parameters, share, and the shape that leaves each."""
    rows = []
    for row in drawing.anatomy(node):
        shown = Text("█" * round(_BAR * row.share) or "▏", drawing.ROLE_COLOURS[node.role])
        rows.append(("  " * row.level + row.name, row.kind, row.parameters, row.percent, shown, row.leaves))
    columns = (node.name, "class", "parameters", "share", "", "leaves as")
    return output.table(*columns, right=("parameters", "share"), rows=rows)
