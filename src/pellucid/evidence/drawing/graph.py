"""The graph of a pipeline, from prompt to images: in words and tables, which the terminal and the studio share; and in
rows of cards, as an image, an HTML page, or Mermaid's text."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import COLOURS, FAINT, INK, PAPER, SLATE
from pellucid.evidence.report.page import Page, Table, Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pellucid.pipeline.inspection import Block, Flow, Graph, Node, Role, Shape

SUFFIXES = (".png", ".svg", ".pdf", ".html", ".mmd")
LOOP: tuple[Role, ...] = ("control", "network", "guidance", "sampler")  # what acts at every step
_BLUE, ORANGE, _GREEN, _RED, _PURPLE = COLOURS[:5]
ROLE_COLOURS = {
    "input": FAINT,
    "tokenizer": _BLUE,
    "text": _BLUE,
    "image": _PURPLE,
    "control": _RED,
    "condition": _BLUE,
    "network": ORANGE,
    "guidance": ORANGE,
    "sampler": ORANGE,
    "vae": _GREEN,
    "output": FAINT,
}


def draw_graph(graph: Graph, path: Path) -> None:
    """Writes what the file's suffix says: an image, a page, or text for Mermaid."""
    if path.suffix.lower() == ".html":
        page(graph).write(path)
    elif path.suffix.lower() == ".mmd":
        path.write_text(mermaid(graph), "utf-8")
    else:
        charts.save(figure_of(graph), path)


# --- Words ------------------------------------------------------------------------------------------------------------


def count(number: int) -> str:
    """859.5 M, 2.57 B, 12.4 K, 640."""
    for unit, size, digits in (("B", 10**9, 2), ("M", 10**6, 1), ("K", 10**3, 1)):
        if number >= size * (1 - 0.5 * 10 ** -(digits + 3)):
            return f"{number / size:.{digits}f} {unit}"
    return str(number)


def size(number: int) -> str:
    """Bytes in powers of ten: 1.72 GB, 246 MB."""
    for unit, scale, digits in (("GB", 10**9, 2), ("MB", 10**6, 0), ("kB", 10**3, 0)):
        if number >= scale:
            return f"{number / scale:.{digits}f} {unit}"
    return f"{number} B"


def milliseconds(value: float) -> str:
    """1.53 s, 44.1 ms, 0.21 ms."""
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def _shape(found: Shape) -> str:
    return "(" + ", ".join(str(n) for n in found) + ("," if len(found) == 1 else "") + ")"


def _shapes(found: Sequence[Shape]) -> str:
    """One shape, or how many tensors and the first and last of them."""
    if len(found) < 2:
        return _shape(found[0]) if found else ""
    ends = dict.fromkeys((_shape(found[0]), _shape(found[-1])))
    return f"{len(found)} × {' … '.join(ends)}"


def flow_text(flow: Flow) -> str:
    return f"{flow.what} {_shapes(flow.shapes)}".rstrip()


def title(graph: Graph) -> str:
    """The model's name; of a path its last part."""
    path = Path(graph.name)
    return path.name if path.is_absolute() or graph.name.startswith((".", "~")) else graph.name


def subtitle(graph: Graph) -> list[str]:
    calls = f"{graph.steps} steps" + (f", {graph.calls} calls" if graph.calls != graph.steps else "")
    pixels = f"{graph.size[0]} × {graph.size[1]} pixels"
    words = [graph.pipeline, *([graph.family] if graph.family else []), pixels, f"batch {graph.batch}", calls]
    return [*words, f"{count(graph.parameters)} parameters", f"{size(graph.memory)} in memory"]


def _classes(node: Node) -> list[str]:
    """Our class and its peer's, once where they are the same."""
    return [] if node.role == "guidance" else list(dict.fromkeys(word for word in (node.kind, node.peer) if word))


def weight(node: Node) -> list[str]:
    """Parameters, dtype and bytes; what the file has is said where it differs."""
    if not node.parameters:
        return []
    if node.half_of is not None:
        return [f"{count(node.parameters)} of {node.half_of}'s parameters"]
    words = [f"{count(node.parameters)} parameters"]
    held = node.stored
    if held is None:
        return [*words, f"{node.dtype}", f"{size(node.memory)} in memory"]
    if held.dtypes == (node.dtype,) and abs(held.size - node.memory) < 0.005 * node.memory:
        return [*words, f"{node.dtype}", size(node.memory)]
    return [
        *words,
        f"{' and '.join(held.dtypes)}, {size(held.size)} on disk",
        f"{node.dtype}, {size(node.memory)} in memory",
    ]


def _remarks(node: Node) -> list[str]:
    """What else a node's box says."""
    f = node.facts
    if node.role == "tokenizer":
        return [f"{f['entries']:,} entries", f"window {f['window']}"]
    if node.role == "condition":
        return [f["sides"]]
    if node.role == "guidance":
        scale = "scale " if f["guidance"][0].isdigit() else ""
        return [scale + f["guidance"], *dict.fromkeys(f"in {space} space" for space in f["spaces"].values())]
    if node.role == "sampler":
        words = [f"{f['schedule']} schedule", f"{f['grid']} grid", f"predicts {f['target']}", f"{f['dialect']} dialect"]
        words += ["fresh noise"] if f["noise"].startswith("fresh") else []
        return words + ([f["x0 filter"]] if f["x0 filter"] != "none" else [])
    return [f"sees {_shape(f['sees'])}"] if "sees" in f else []


def node_words(node: Node) -> list[str]:
    """All that is said of a node: class, weights, remarks, milliseconds."""
    return list(filter(None, (*_classes(node), *weight(node), *_remarks(node), _duration(node))))


def pace(graph: Graph) -> str:
    """What the loop's frame says."""
    if graph.calls == graph.steps:
        return f"× {graph.steps} steps"
    return f"× {graph.calls} calls in {graph.steps} steps"


def _duration(node: Node) -> str:
    """Milliseconds per call, and how often where it is more than once."""
    if node.milliseconds is None:
        return ""
    return milliseconds(node.milliseconds) + (f" × {node.calls}" if node.calls > 1 else "")


# --- Tables ---------------------------------------------------------------------------------------------------------

_COMPONENTS = ("component", "parameters", "share", "dtype in file", "on disk", "in memory", "as", "calls")
_ANATOMY = ("block", "class", "parameters", "share", "leaves as")
CLOCK = ("stage", "a run", "of it", "peak memory")
NUMBERS = ("parameters", "share", "on disk", "in memory", "calls", "a call", "a run", "of it", "peak memory")


def component_columns(graph: Graph) -> tuple[str, ...]:
    return _COMPONENTS if graph.times is None else (*_COMPONENTS, "a call")


def components(graph: Graph) -> list[tuple[str, ...]]:
    """A row a component, and the sums in the last one."""
    rows: list[tuple[str, ...]] = []
    for node in graph.components():
        held = node.stored
        dtypes, disk = ("–", "–") if held is None else (", ".join(held.dtypes), size(held.size))
        share = f"{100 * node.parameters / graph.parameters:.1f} %"
        cells = [node.name, count(node.parameters), share, dtypes, disk, size(node.memory), str(node.dtype)]
        cells.append(str(node.calls))
        if graph.times is not None:
            cells.append("–" if node.milliseconds is None else milliseconds(node.milliseconds))
        rows.append(tuple(cells))
    disk = size(graph.stored) if graph.stored else "–"
    return [*rows, ("all", count(graph.parameters), "", "", disk, size(graph.memory), "", "")]


@dataclass(frozen=True)
class BlockRow:
    """A block, or equal neighbours on one line: `share` is that of all of them."""

    level: int
    name: str
    kind: str
    parameters: str
    share: float
    leaves: str

    @property
    def percent(self) -> str:
        return f"{100 * self.share:.1f} %" if self.share >= 0.0005 else "< 0.1 %"


def anatomy(node: Node) -> list[BlockRow]:
    """A network's blocks: class, parameters, share, and the shape that leaves each."""
    rows = []
    for level, block, times in listed(node.blocks):
        number = count(block.parameters)
        leaves = "" if block.shape is None else _shape(block.shape)
        parameters = f"{times} × {number}" if times > 1 else number
        rows.append(BlockRow(level, block.name, block.kind, parameters, block.share * times, leaves))
    return rows


def _anatomy_cells(node: Node) -> list[tuple[str, ...]]:
    """The same as text, each level further to the right."""
    return [
        ("\u2003" * row.level + row.name, row.kind, row.parameters, row.percent, row.leaves) for row in anatomy(node)
    ]


def listed(blocks: Sequence[Block], level: int = 0, inside: str = "") -> Iterator[tuple[int, Block, int]]:
    """Blocks with their level and how often they stand in a row: equal neighbours are one line.

    Below the first level names are those within the block above.
    """
    for _, run in groupby(blocks, key=_alike):
        same = list(run)
        first, last = same[0], same[-1]
        name = first.name.removeprefix(f"{inside}.")
        if len(same) > 1:
            name = f"{name} … {last.name.rpartition('.')[2]}"
        yield level, replace(first, name=name, shape=last.shape), len(same)
        yield from listed(first.blocks, level + 1, first.name)


def _alike(block: Block) -> tuple[str, str, int, object]:
    stem = block.name.rpartition(".")[0]
    return stem, block.kind, block.parameters, block.shape


def clock(graph: Graph) -> list[tuple[str, ...]]:
    """Milliseconds by stage, and of the whole run in the last row."""
    times = graph.times
    assert times is not None
    loop_time = times.step * graph.calls
    stages = [("text", times.text, "text"), ("encode images", times.encode, "encode")]
    stages += [(f"{graph.calls} × one step of {milliseconds(times.step)}", loop_time, "denoise")]
    stages += [("decode", times.decode, "decode")]
    total = sum(value for _, value, _ in stages) or 1.0
    rows = []
    for name, value, stage in stages:
        peak = times.peaks.get(stage)
        rows.append((name, milliseconds(value), f"{100 * value / total:.1f} %", size(peak) if peak else "–"))
    return [*rows, (f"the whole run on {times.device}, measured", milliseconds(times.whole), "", "")]


def links(graph: Graph, node: Node) -> list[tuple[str, str, str, str]]:
    """What comes and goes: an arrow, the node at the other end, what flows, its dtype."""
    return [
        *(("←", flow.source, flow_text(flow), flow.dtype or "") for flow in graph.into(node.name)),
        *(("→", flow.goal, flow_text(flow), flow.dtype or "") for flow in graph.out_of(node.name)),
    ]


# --- Rows of cards --------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The nodes of a graph from top to bottom, those of a row side by side: before the loop, in it, and after it."""

    entrance: list[list[Node]]
    loop: list[list[Node]]
    exit: list[list[Node]]


def rows_of(graph: Graph) -> Rows:
    """A node stands in the row above the first that it feeds; an input of the loop alone beside what it feeds."""
    held = {node.name: node for node in graph.nodes}
    goals = {node.name: [held[flow.goal] for flow in graph.out_of(node.name)] for node in graph.nodes}
    beside = [n for n in graph.of("input") if {g.role for g in goals[n.name]} <= {"control", "sampler"}]
    before = [n for n in graph.nodes if n.role not in (*LOOP, "output") and goals[n.name] != [held["images"]]]
    before = [node for node in before if node not in beside]

    def depth(node: Node) -> int:
        return max((1 + depth(goal) for goal in goals[node.name] if goal in before), default=0)

    depths = {node.name: depth(node) for node in before}
    entrance: list[list[Node]] = []  # from the lowest row upwards, each node as near to its goals as the row allows
    for level in range(max(depths.values(), default=-1) + 1):
        row = [node for node in before if depths[node.name] == level]
        below = entrance[0] if entrance else []
        row.sort(key=lambda node: min((below.index(goal) for goal in goals[node.name] if goal in below), default=0))
        entrance.insert(0, row)
    loop: list[list[Node]] = []
    for role in LOOP:
        row = []
        for node in graph.of(role):
            row += [n for n in beside if node in goals[n.name]] + [node]
        loop += [row] if row else []
    placed = {node.name for row in (*entrance, *loop) for node in row}
    return Rows(entrance, loop, [[node] for node in graph.nodes if node.name not in placed])


def card_lines(graph: Graph, node: Node) -> list[str]:
    """What a card says below its name: class, weights, remarks, milliseconds, and what leaves it for where."""
    about = [" · ".join(part) for part in (_classes(node), weight(node), _remarks(node)) if part]
    about += [_duration(node)] if node.milliseconds is not None else []
    return about + [f"→ {flow.goal}: {flow_text(flow)}" for flow in graph.out_of(node.name)]


# --- The image ------------------------------------------------------------------------------------------------------

_WIDTH, _MARGIN, _GAP, _DOWN = 13.4, 0.5, 0.35, 0.42  # inches: 1286 pixels of a screen; between cards, and between rows
_WIDEST, _PAD, _LANE = 4.6, 0.12, 0.25  # of a card; around its text; between the loop's frame and its cards
_SIZE = 9.0  # points of the text
_CHAR, _LINE = 0.6021 * _SIZE / 72, 1.5 * _SIZE / 72  # inches of a letter of DejaVu Sans Mono, and of a line


@dataclass(frozen=True)
class Card:
    """A node in its place: inches from the sheet's upper left corner."""

    node: Node
    lines: list[str]
    left: float
    top: float
    width: float
    row: int

    @property
    def height(self) -> float:
        return _LINE * (1.1 + len(self.lines)) + 2 * _PAD

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def middle(self) -> tuple[float, float]:
        return self.left + self.width / 2, self.top + self.height / 2


@dataclass(frozen=True)
class Sheet:
    """All cards by name, the loop's frame (left, top, right, bottom), and the lowest edge."""

    cards: dict[str, Card]
    frame: tuple[float, float, float, float]
    bottom: float


def layout(graph: Graph, top: float = 0.0) -> Sheet:
    """Rows under each other, each in the middle of the sheet."""
    cards: dict[str, Card] = {}
    edges: list[float] = []
    rows = rows_of(graph)
    for part in rows:
        top += _LANE + 0.15 if part is rows.loop else 0.0
        edges.append(top)
        for row in part:
            placed = _row_of_cards(graph, row, top, len(edges) * 100 + len(cards))
            cards |= {card.node.name: card for card in placed}
            top = max(card.bottom for card in placed) + _DOWN
        top += _LANE if part is rows.loop else 0.0
    inside = [cards[node.name] for row in rows.loop for node in row]
    left, right = min(card.left for card in inside), max(card.right for card in inside)
    bottom = max(card.bottom for card in inside)
    return Sheet(cards, (left - _LANE, edges[1] - _LANE, right + 3 * _LANE, bottom + _LANE), top - _DOWN)


def _row_of_cards(graph: Graph, row: Sequence[Node], top: float, number: int) -> list[Card]:
    most = min(_WIDEST, (_WIDTH - 2 * _MARGIN - 3 * _LANE - _GAP * (len(row) - 1)) / len(row))
    letters = int((most - 2 * _PAD) / _CHAR)
    said = [[part for line in card_lines(graph, n) for part in textwrap.wrap(line, letters)] for n in row]
    longest = [max(map(len, (f"{n.name}  ", *lines))) for n, lines in zip(row, said, strict=True)]
    widths = [letters * _CHAR + 2 * _PAD + 0.05 for letters in longest]
    left = (_WIDTH - sum(widths) - _GAP * (len(row) - 1)) / 2
    cards = []
    for node, lines, width in zip(row, said, widths, strict=True):
        cards.append(Card(node, lines, left, top, width, number))
        left += width + _GAP
    return cards


def figure_of(graph: Graph) -> Figure:
    """A head, the rows of cards with arrows between them, the loop in its frame, and the notes."""
    head = [" · ".join(subtitle(graph))]
    if graph.times is not None:
        *stages, (whole, total, *_) = clock(graph)
        head.append(" · ".join([*(f"{name}: {taken}" for name, taken, *_ in stages), f"{whole}: {total}"]))
    head = [part for line in head for part in textwrap.wrap(line, int((_WIDTH - 2 * _MARGIN) / _CHAR))]
    sheet = layout(graph, _MARGIN + 0.4 + _LINE * len(head) + 0.2)
    notes = [part for note in graph.notes for part in textwrap.wrap(f"! {note}", int((_WIDTH - 2 * _MARGIN) / _CHAR))]
    height = sheet.bottom + 0.25 + _LINE * len(notes) + _MARGIN
    figure = charts.canvas(_WIDTH, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    _write(axes, _MARGIN, _MARGIN + 0.1, title(graph), INK, size=15, fontweight="bold")
    for number, line in enumerate(head):
        _write(axes, _MARGIN, _MARGIN + 0.4 + _LINE * (number + 0.5), line, SLATE)
    left, top, right, bottom = sheet.frame
    _box(axes, (left, top, right - left, bottom - top), _tint(ORANGE, 0.03), ORANGE, linestyle=(0, (5, 3)), zorder=0)
    _write(axes, left + 0.2, top, f" {pace(graph)} ", ORANGE, fontweight="bold", backgroundcolor=PAPER)
    for source, goal in dict.fromkeys((flow.source, flow.goal) for flow in graph.flows):
        _arrow(axes, sheet.cards[source], sheet.cards[goal], right)
    for card in sheet.cards.values():
        _draw_card(axes, card)
    for number, line in enumerate(notes):
        _write(axes, _MARGIN, sheet.bottom + 0.25 + _LINE * (number + 0.5), line, ORANGE)
    return figure


def _draw_card(axes: Axes, card: Card) -> None:
    colour = ROLE_COLOURS[card.node.role]
    _box(axes, (card.left, card.top, card.width, card.height), _tint(colour, 0.07), colour, zorder=3)
    y = card.top + _PAD + _LINE / 2
    _write(axes, card.left + _PAD, y, card.node.name, colour if colour != FAINT else SLATE, fontweight="bold")
    for number, line in enumerate(card.lines, 1):
        _write(axes, card.left + _PAD, y + _LINE * (number + 0.1), line, INK)


def _arrow(axes: Axes, source: Card, goal: Card, edge: float) -> None:
    """Down to a lower row, across within one, and back up along the inside of the loop's frame."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    colour = ORANGE if source.node.role in LOOP and goal.node.role in LOOP else SLATE
    if source.row == goal.row:
        points = [(source.right, source.middle[1]), (goal.left, source.middle[1])]
    elif source.top < goal.top:
        points = [(source.middle[0], source.bottom), (goal.middle[0], goal.top)]
    else:
        lane = edge - _LANE * (1 if goal.node.role == "network" else 2)
        height = goal.middle[1]
        points = [(source.right, source.middle[1]), (lane, source.middle[1]), (lane, height), (goal.right, height)]
    look: dict[str, Any] = {"arrowstyle": "-|>,head_length=5,head_width=2.6", "mutation_scale": 1.0, "zorder": 2}
    axes.add_patch(FancyArrowPatch(path=Curve(points), color=colour, linewidth=1.5, shrinkA=0, shrinkB=0, **look))


def _box(axes: Axes, place: tuple[float, float, float, float], face: str, edge: str, **look: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    look |= {"boxstyle": "round,pad=0,rounding_size=0.1", "facecolor": face, "edgecolor": edge, "linewidth": 1.4}
    axes.add_patch(FancyBboxPatch(place[:2], *place[2:], **look))


def _write(axes: Axes, x: float, y: float, words: str, colour: str, size: float = _SIZE, **look: Any) -> None:
    """Letters of one width, so that what fits is known before it is drawn."""
    words = words.replace("$", r"\$")
    axes.text(x, y, words, color=colour, fontsize=size, family="DejaVu Sans Mono", va="center", zorder=4, **look)


def _tint(colour: str, part: float) -> str:
    """A colour thinned with the paper."""
    inks, papers = (bytes.fromhex(each[1:]) for each in (colour, PAPER))
    return "#" + bytes(round(p + (c - p) * part) for c, p in zip(inks, papers, strict=True)).hex()


# --- The page -------------------------------------------------------------------------------------------------------

_STYLE = """
.graph { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; text-align: center; }
.graph .row { display: flex; flex-wrap: wrap; gap: .8rem; justify-content: center;
  align-items: flex-start; }
.graph .card { border: 1.5px solid var(--c); border-radius: 6px; padding: .4rem .7rem; text-align: left;
  background: color-mix(in srgb, var(--c) 7%, #fff); max-width: 30rem; }
.graph .card b { color: color-mix(in srgb, var(--c) 85%, #000); } .graph .card div { overflow-wrap: anywhere; }
.graph fieldset { border: 1.5px dashed var(--c); border-radius: 10px; padding: .6rem 1rem; margin: 0 auto;
  width: fit-content; max-width: 95%; }
.graph legend { color: var(--c); font-weight: bold; padding: 0 .4rem; } .graph .down { color: #51606f; }
"""


@dataclass(frozen=True)
class _Drawing:
    """The rows of cards as a part of a page."""

    graph: Graph

    def html(self) -> str:
        down = '\n<div class="down">↓</div>\n'
        entrance, loop, after = (down.join(self.row(row) for row in part) for part in rows_of(self.graph))
        heading = html.escape(pace(self.graph))
        back = '\n<div class="down">↑ back to the top of the loop</div>\n'
        frame = f'<fieldset style="--c: {ORANGE}"><legend>{heading}</legend>\n{loop}{back}</fieldset>'
        body = down.join(part for part in (entrance, frame, after) if part)
        return f'<style>{_STYLE}</style>\n<div class="graph">\n{body}\n</div>\n'

    def row(self, row: Sequence[Node]) -> str:
        return '<div class="row">' + "".join(self.card(node) for node in row) + "</div>"

    def card(self, node: Node) -> str:
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in card_lines(self.graph, node))
        return f'<div class="card" style="--c: {ROLE_COLOURS[node.role]}"><b>{html.escape(node.name)}</b>{lines}</div>'


def page(graph: Graph) -> Page:
    """A page that needs no network: the drawing, and tables of bytes, milliseconds and blocks."""
    document = Page(title(graph), " · ".join(subtitle(graph))).add(_Drawing(graph))
    document.add(Table("Components", component_columns(graph), tuple(components(graph))))
    if graph.times is not None:
        document.add(Table("Time", CLOCK, tuple(clock(graph))))
    for node in graph.components():
        if node.blocks:
            document.add(Table(f"Blocks of {node.name}", _ANATOMY, tuple(_anatomy_cells(node))))
    return document.add(*(Text(f"! {note}") for note in graph.notes))


# --- Mermaid --------------------------------------------------------------------------------------------------------


def mermaid(graph: Graph) -> str:
    """A flowchart, for a page that draws Mermaid."""
    rows = rows_of(graph)

    def stations(part: list[list[Node]], indent: str) -> list[str]:
        return [f'{indent}{_identifier(node.name)}["{said(node)}"]' for row in part for node in row]

    def said(node: Node) -> str:
        return "<br/>".join([f"<b>{node.name}</b>", *map(html.escape, node_words(node))])

    def arrow(flow: Flow) -> str:
        return f'  {_identifier(flow.source)} -->|"{html.escape(flow_text(flow))}"| {_identifier(flow.goal)}'

    flows = map(arrow, graph.flows)
    loop = [f'  subgraph loop["{pace(graph)}"]', *stations(rows.loop, "    "), "  end"]
    lines = ["flowchart TD", *stations(rows.entrance, "  "), *loop, *stations(rows.exit, "  "), *flows]
    return "\n".join(lines) + "\n"


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
