"""A pipeline's graph in a terminal: boxes, arrows with what flows, the denoising loop; then tables of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from pellucid.cli import output
from pellucid.evidence.drawing import graph_tables as tables
from pellucid.evidence.drawing.graph_tables import ROLE_COLOURS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pellucid.pipeline.inspection import Flow, Graph, Node

WIDTH = 98  # columns of the drawing
RAIL = 25  # columns beside the loop's boxes for what goes back
BAR = 16

Lines = list[Text]


def show(graph: Graph, screen: Console, depth: int) -> None:
    """The whole of it."""
    screen.print(Text(tables.title(graph), style="bold"))
    about = tables.subtitle(graph)
    for part in (about[:-4], about[-4:]):  # what it is; what it is drawn for and what it weighs
        screen.print(Text(" · ".join(part), style="dim"))
    screen.print()
    for line in drawing(graph):
        screen.print(line, soft_wrap=True)
    screen.print()
    screen.print(components(graph))
    if depth:
        for node in graph.components():
            screen.print(anatomy(node))
    if graph.times is not None:
        screen.print(clock(graph))
    for note in graph.notes:
        screen.print(Text(f"! {note}", style="yellow"))


# --- boxes -------------------------------------------------------------------------------------------------------


def box(title: str, content: Iterable[str], width: int, colour: str, corner: str = "") -> Lines:
    """A box of so many columns; `corner` stands at the right of its title."""
    inner = width - 4
    right = f" {corner} ─╮" if corner else "╮"
    line = "─" * (width - 4 - len(title) - len(right))
    top = Text.assemble(("╭─ ", colour), (title, f"bold {colour}"), (f" {line}", colour), (right, colour))
    body = [Text.assemble(("│ ", colour), line.ljust(inner), (" │", colour)) for line in content]
    return [top, *body, Text("╰" + "─" * (width - 2) + "╯", colour)]


def fitted(line: Text, width: int) -> Text:
    line = line.copy()
    line.align("left", width)
    return line


def wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Parts joined by dots into lines of at most `width`; a part that is too long itself is broken at blanks."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(joined) <= width:
            lines[-1] = joined
            continue
        pieces = [""]
        for word in part.split(" "):
            longer = f"{pieces[-1]} {word}".strip()
            pieces = [*pieces[:-1], longer] if len(longer) <= width else [*pieces, word]
        lines += [piece for piece in pieces if piece]
    return [line for line in lines if line]


def card(node: Node, width: int, more: Sequence[str] = ()) -> Lines:
    """A node as a box: its class, its weights, what else is to be said."""
    inner = width - 4
    content = [*wrapped(tables.classes(node), inner), *wrapped(tables.weight(node), inner)]
    content += [*wrapped(tables.remarks(node), inner), *more]
    return box(node.name, content, width, ROLE_COLOURS[node.role], tables.duration(node))


def pill(name: str, width: int) -> Lines:
    text = f"( {name} )"
    return [Text(text.center(width), "bold")]


def arrow(labels: Sequence[str], width: int, head: bool = True) -> Lines:
    """A line down from the middle, what flows beside it."""
    middle = width // 2
    lines = [Text(" " * middle + "│ " + label[: width - middle - 2]) for label in labels or [""]]
    if any(middle + 2 + len(label) > width for label in labels):  # no room at the right: the line moves to the left
        lines = [Text("  │ " + label) for label in labels]
        middle = 2
    lines += [Text(" " * middle + "▼")] if head else []
    return [fitted(line, width) for line in lines]


def beside(columns: Sequence[Lines], gap: int = 2) -> Lines:
    """Columns side by side, their last lines level."""
    height = max(len(column) for column in columns)
    widths = [column[0].cell_len for column in columns]
    padded = [[Text(" " * w)] * (height - len(c)) + list(c) for c, w in zip(columns, widths, strict=True)]
    return [Text(" " * gap).join(row) for row in zip(*padded, strict=True)]


def indent(lines: Lines, by: int) -> Lines:
    return [Text(" " * by) + line for line in lines]


def centred(lines: Lines, width: int) -> Lines:
    return indent(lines, max((width - lines[0].cell_len) // 2, 0))


# --- the drawing -------------------------------------------------------------------------------------------------


def drawing(graph: Graph) -> Lines:
    """From what is given, at the top, to images."""
    lines = entrance(graph)
    lines += loop(graph)
    sampler = graph.of("sampler")[0].name
    for node in graph.of("vae"):
        if node.half_of is None:
            lines += arrow([tables.flow_text(flow) for flow in graph.between(sampler, node.name)], WIDTH)
            lines += centred(card(node, 60), WIDTH)
            sampler = node.name
    lines += arrow([tables.flow_text(flow) for flow in graph.into("images")], WIDTH)
    return lines + pill("images", WIDTH)


def entrance(graph: Graph) -> Lines:
    """What comes before the loop, side by side."""
    chains = graph.branches()
    if not chains:
        return []
    joined = [chain for chain in chains if graph.between(chain[-1].name, "conditions")]
    apart = [chain for chain in chains if chain not in joined]
    width = min(46, (WIDTH - 2 * (len(chains) - 1)) // len(chains))
    right = [column(graph, chain, width) for chain in apart]
    left: list[Lines] = []
    if joined:
        made = beside([column(graph, chain, width) for chain in joined])
        span = made[0].cell_len
        for node in graph.of("condition"):
            made += centred(card(node, min(span, 46)), span)
            flows = [
                tables.flow_text(flow) for flow in graph.out_of(node.name) if graph.node(flow.goal).role == "network"
            ]
            made += arrow(flows, span)
        left = [[fitted(line, span) for line in made]]
    height = max(len(made) for made in (*left, *right))
    right = [longer(made, height) for made in right]
    return centred(beside([*left, *right]), WIDTH)


def longer(lines: Lines, height: int) -> Lines:
    """A column whose arrow reaches further down; one that ends in a box is filled up."""
    more = [rail_of(lines[-1])] * (height - len(lines))
    return [*lines[:-1], *more, lines[-1]] if "▼" in lines[-1].plain else [*lines, *more]


def rail_of(head: Text) -> Text:
    """The arrow's line, one longer; nothing below a box."""
    return Text("".join("│" if sign == "▼" else " " for sign in head.plain))


def column(graph: Graph, chain: Sequence[Node], width: int) -> Lines:
    lines: Lines = []
    for number, node in enumerate(chain):
        lines += pill(node.name, width) if node.role == "input" else card(node, width)
        goal = chain[number + 1].name if number + 1 < len(chain) else None
        flows = [flow for flow in graph.out_of(node.name) if goal is None or flow.goal == goal]
        labels = [label for flow in flows for label in wrapped_flow(flow, width - width // 2 - 3)]
        lines += arrow(labels, width) if flows else []
    return lines


def wrapped_flow(flow: Flow, width: int) -> list[str]:
    """What flows on one line, or its name and its shapes on two."""
    whole = tables.flow_text(flow)
    if len(whole) <= width or not flow.shapes:
        return [whole]
    shapes = tables.shapes(flow.shapes)
    head, dots, tail = shapes.partition(" … ")
    return [flow.what, shapes] if len(shapes) <= width or not dots else [flow.what, head, f"… {tail}"]


def loop(graph: Graph) -> Lines:
    """The denoiser, guidance and the sampler, with what goes back on a rail at the right."""
    inner = WIDTH - 4
    wide = inner - RAIL
    network, sampler = graph.of("network")[0], graph.of("sampler")[0]
    lines = controls(graph, wide)
    called = len(lines) + 1
    lines += card(network, wide)
    for goal in (*graph.of("guidance"), sampler):
        source = network if goal.role == "guidance" or not graph.of("guidance") else graph.of("guidance")[0]
        lines += arrow([tables.flow_text(flow) for flow in graph.between(source.name, goal.name)], wide)
        if goal is sampler:
            first = [f"◂ {tables.flow_text(flow)}" for flow in graph.into(sampler.name) if flow.source == "noise"]
            turn = len(lines) + 1
            lines += card(sampler, wide, first)
        else:
            lines += card(goal, wide)
    back = [tables.flow_text(flow) for flow in graph.between(sampler.name, network.name)]
    lines = railed(lines, wide, (called, turn), back)
    return framed(lines, tables.pace(graph))


def controls(graph: Graph, width: int) -> Lines:
    """ControlNets above the denoiser, two a row."""
    nodes, lines = graph.of("control"), []
    for number in range(0, len(nodes), 2):
        row = nodes[number : number + 2]
        wide = (width - 2 * (len(row) - 1)) // len(row)
        lines += beside([control(graph, node, wide) for node in row])
    return lines


def control(graph: Graph, node: Node, width: int) -> Lines:
    names = {flow: flow.source if flow.what == "pixels" else flow.what for flow in graph.into(node.name)}
    given = [entering(name, tables.shapes(flow.shapes), width - 4) for flow, name in names.items()]
    labels = [label for flow in graph.out_of(node.name) for label in wrapped_flow(flow, width - width // 2 - 3)]
    return [*card(node, width, [line for lines in given for line in lines]), *arrow(labels, width)]


def entering(name: str, shapes: str, width: int) -> list[str]:
    whole = f"◂ {name} {shapes}"
    return [whole] if len(whole) <= width else [f"◂ {name}", f"  {shapes}"]


def railed(lines: Lines, width: int, ends: tuple[int, int], labels: Sequence[str]) -> Lines:
    """A line from the sampler back up to the denoiser, what it carries beside it."""
    first, last = ends
    middle = (first + last) // 2 - len(labels) // 2
    out = []
    for number, line in enumerate(lines):
        rail = {first: "◀──╮", last: "───╯"}.get(number, "   │" if first < number < last else "    ")
        label = labels[number - middle] if middle <= number < middle + len(labels) else ""
        out.append(fitted(line, width) + Text(f" {rail} ", ROLE_COLOURS["sampler"]) + Text(label.ljust(RAIL - 6)))
    return out


def framed(lines: Lines, title: str) -> Lines:
    """The loop's frame."""
    colour = ROLE_COLOURS["sampler"]
    head = Text.assemble(
        ("┏━ ", colour), (title, f"bold {colour}"), (" " + "━" * (WIDTH - len(title) - 5) + "┓", colour)
    )
    body = [Text("┃ ", colour) + line + Text(" ┃", colour) for line in lines]
    return [head, *body, Text("┗" + "━" * (WIDTH - 2) + "┛", colour)]


# --- the tables --------------------------------------------------------------------------------------------------


def components(graph: Graph) -> Table:
    columns = tables.component_columns(graph)
    made = output.table(*columns, right=tables.NUMBERS)
    *rows, sums = tables.components(graph)
    for cells in rows:
        made.add_row(*cells)
    made.add_section()
    made.add_row(*sums)
    return made


def anatomy(node: Node) -> Table:
    """A network's blocks: class, parameters, share, and the shape that leaves each."""
    made = output.table(f"{node.name}", "class", "parameters", "share", "", "leaves as", right=("parameters", "share"))
    for row in tables.anatomy(node):
        shown = Text("█" * round(BAR * row.share) or "▏", ROLE_COLOURS[node.role])
        made.add_row("  " * row.level + row.name, row.kind, row.parameters, row.percent, shown, row.leaves)
    return made


def clock(graph: Graph) -> Table:
    """Milliseconds by stage."""
    made = output.table(*tables.CLOCK, right=tables.NUMBERS)
    *rows, whole = tables.clock(graph)
    for cells in rows:
        made.add_row(*cells)
    made.add_section()
    made.add_row(*whole)
    return made


def show_one(graph: Graph, node: Node, screen: Console) -> None:
    """One component: what it is, what comes and goes, and its blocks."""
    for line in card(node, 72):
        screen.print(line)
    for key, value in node.facts.items():
        screen.print(f"{key.replace('_', ' ')}: {value}", markup=False)
    for mark, other, what, dtype in tables.links(graph, node):
        screen.print(f"{mark} {other}: {what} {dtype}".rstrip(), markup=False, soft_wrap=True)
    if node.blocks:
        screen.print(anatomy(node))
