"""The graph of a pipeline in rows of cards, from prompt to images: as an image, an HTML page, or Mermaid's text."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pellucid.evidence.drawing import graph_tables as tables
from pellucid.evidence.drawing.graph_tables import ROLE_COLOURS
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import FAINT, INK, PAPER, SLATE
from pellucid.evidence.report.page import Page, Table, Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pellucid.pipeline.inspection import Flow, Graph, Node, Role

SUFFIXES = (".png", ".svg", ".pdf", ".html", ".mmd")
LOOP: tuple[Role, ...] = ("control", "network", "guidance", "sampler")  # what acts at every step
ORANGE = ROLE_COLOURS["sampler"]


def draw_graph(graph: Graph, path: Path) -> None:
    """Writes what the file's suffix says: an image, a page, or text for Mermaid."""
    if path.suffix.lower() == ".html":
        page(graph).write(path)
    elif path.suffix.lower() == ".mmd":
        path.write_text(mermaid(graph), "utf-8")
    else:
        charts.save(figure_of(graph), path)


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
    about = [" · ".join(part) for part in (tables.classes(node), tables.weight(node), tables.remarks(node)) if part]
    about += [tables.duration(node)] if node.milliseconds is not None else []
    return about + [f"→ {flow.goal}: {tables.flow_text(flow)}" for flow in graph.out_of(node.name)]


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
    head = [" · ".join(tables.subtitle(graph))]
    if graph.times is not None:
        *stages, (whole, total, *_) = tables.clock(graph)
        head.append(" · ".join([*(f"{name}: {taken}" for name, taken, *_ in stages), f"{whole}: {total}"]))
    head = [part for line in head for part in textwrap.wrap(line, int((_WIDTH - 2 * _MARGIN) / _CHAR))]
    sheet = layout(graph, _MARGIN + 0.4 + _LINE * len(head) + 0.2)
    notes = [part for note in graph.notes for part in textwrap.wrap(f"! {note}", int((_WIDTH - 2 * _MARGIN) / _CHAR))]
    height = sheet.bottom + 0.25 + _LINE * len(notes) + _MARGIN
    figure = charts.canvas(_WIDTH, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    _write(axes, _MARGIN, _MARGIN + 0.1, tables.title(graph), INK, size=15, fontweight="bold")
    for number, line in enumerate(head):
        _write(axes, _MARGIN, _MARGIN + 0.4 + _LINE * (number + 0.5), line, SLATE)
    left, top, right, bottom = sheet.frame
    _box(axes, (left, top, right - left, bottom - top), _tint(ORANGE, 0.03), ORANGE, linestyle=(0, (5, 3)), zorder=0)
    _write(axes, left + 0.2, top, f" {tables.pace(graph)} ", ORANGE, fontweight="bold", backgroundcolor=PAPER)
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
        pace = html.escape(tables.pace(self.graph))
        back = '\n<div class="down">↑ back to the top of the loop</div>\n'
        frame = f'<fieldset style="--c: {ORANGE}"><legend>{pace}</legend>\n{loop}{back}</fieldset>'
        body = down.join(part for part in (entrance, frame, after) if part)
        return f'<style>{_STYLE}</style>\n<div class="graph">\n{body}\n</div>\n'

    def row(self, row: Sequence[Node]) -> str:
        return '<div class="row">' + "".join(self.card(node) for node in row) + "</div>"

    def card(self, node: Node) -> str:
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in card_lines(self.graph, node))
        return f'<div class="card" style="--c: {ROLE_COLOURS[node.role]}"><b>{html.escape(node.name)}</b>{lines}</div>'


def page(graph: Graph) -> Page:
    """A page that needs no network: the drawing, and tables of bytes, milliseconds and blocks."""
    made = Page(tables.title(graph), " · ".join(tables.subtitle(graph))).add(_Drawing(graph))
    made.add(Table("Components", tables.component_columns(graph), tuple(tables.components(graph))))
    if graph.times is not None:
        made.add(Table("Time", tables.CLOCK, tuple(tables.clock(graph))))
    for node in graph.components():
        if node.blocks:
            made.add(Table(f"Blocks of {node.name}", tables.ANATOMY, tuple(tables.anatomy_cells(node))))
    return made.add(*(Text(f"! {note}") for note in graph.notes))


# --- Mermaid --------------------------------------------------------------------------------------------------------


def mermaid(graph: Graph) -> str:
    """A flowchart, for a page that draws Mermaid."""
    rows = rows_of(graph)

    def stations(part: list[list[Node]], indent: str) -> list[str]:
        return [f'{indent}{_identifier(node.name)}["{said(node)}"]' for row in part for node in row]

    def said(node: Node) -> str:
        lines = [*tables.classes(node), *tables.weight(node), *tables.remarks(node), tables.duration(node)]
        return "<br/>".join([f"<b>{node.name}</b>", *(html.escape(line) for line in lines if line)])

    def arrow(flow: Flow) -> str:
        return f'  {_identifier(flow.source)} -->|"{html.escape(tables.flow_text(flow))}"| {_identifier(flow.goal)}'

    flows = map(arrow, graph.flows)
    loop = [f'  subgraph loop["{tables.pace(graph)}"]', *stations(rows.loop, "    "), "  end"]
    lines = ["flowchart TD", *stations(rows.entrance, "  "), *loop, *stations(rows.exit, "  "), *flows]
    return "\n".join(lines) + "\n"


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
