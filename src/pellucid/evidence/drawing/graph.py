"""The image of a pipeline: cards from left to right, what flows on the arrows, the denoising loop in its frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.evidence.drawing import graph_tables
from pellucid.evidence.drawing.graph_tables import ROLE_COLOURS
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import FAINT, INK, PAPER, SLATE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pellucid.pipeline.inspection import Flow, Graph, Node


# --- Cards ----------------------------------------------------------------------------------------------------------

PAD = 0.16  # between a card's edge and its text
LEADING = 1.45  # a line's height, in sizes of its text
POINTS = 72.0
Point = tuple[float, float]


@cache
def text_width(text: str, size: float, bold: bool) -> float:
    """Inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    face = FontProperties(weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size, prop=face).get_extents().width) / POINTS


@dataclass(frozen=True)
class TextLine:
    """A line of text; `after` follows it in grey."""

    text: str
    size: float = 8.5
    colour: str = INK
    bold: bool = False
    after: str = ""

    @property
    def gap(self) -> float:
        return 0.45 * self.size / POINTS if self.after else 0.0

    @property
    def width(self) -> float:
        return text_width(self.text, self.size, self.bold) + self.gap + text_width(self.after, 8.5, False)

    @property
    def height(self) -> float:
        return LEADING * self.size / POINTS


@dataclass(frozen=True)
class Card:
    """A node before it has a place. `share` draws a bar along its foot; a pill is round and small."""

    lines: tuple[TextLine, ...]
    colour: str
    corner: str = ""
    share: float | None = None
    pill: bool = False
    least: float = 0.0  # inches of width

    @property
    def width(self) -> float:
        first = self.lines[0].width + (text_width(self.corner, 8.5, True) + 0.25 if self.corner else 0.0)
        return max(self.least, first, *(line.width for line in self.lines)) + 2 * PAD

    @property
    def height(self) -> float:
        text = sum(line.height for line in self.lines)
        return text + (0.12 if self.pill else 2 * PAD * 0.8) + (0.1 if self.share is not None else 0.0)


@dataclass(frozen=True)
class PlacedCard:
    """A card with its centre; `wide` and `tall` overrule its own size."""

    card: Card
    x: float
    y: float
    wide: float | None = None
    tall: float | None = None

    @property
    def width(self) -> float:
        return self.card.width if self.wide is None else self.wide

    @property
    def height(self) -> float:
        return self.card.height if self.tall is None else self.tall

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        return self.x + self.width / 2

    @property
    def top(self) -> float:
        return self.y + self.height / 2

    @property
    def bottom(self) -> float:
        return self.y - self.height / 2


@dataclass
class Sheet:
    """An axes whose unit is the inch, y upwards."""

    axes: Axes

    # cards

    def card(self, placed: PlacedCard) -> None:
        from matplotlib.patches import FancyBboxPatch

        card = placed.card
        radius = card.height / 2 if card.pill else 0.12
        style: Any = f"round,pad=0,rounding_size={radius}"
        face = PAPER if card.pill else tint(card.colour, 0.09)
        look = {"facecolor": face, "edgecolor": card.colour, "linewidth": 1.2 if card.pill else 1.6, "zorder": 3}
        corner = (placed.left, placed.bottom)
        self.axes.add_patch(FancyBboxPatch(corner, placed.width, placed.height, boxstyle=style, **look))
        top = placed.y + card.height / 2 - (0.06 if card.pill else PAD * 0.8)
        y = top
        for line in card.lines:
            self.line(line, placed.x - line.width / 2 if card.pill else placed.left + PAD, y - line.height / 2)
            y -= line.height
        if card.corner:
            place = (placed.right - PAD, top - card.lines[0].height / 2)
            self.text(*place, card.corner, 8.5, card.colour, bold=True, ha="right")
        if card.share is not None:
            self.bar(placed, card.share)

    def bar(self, placed: PlacedCard, share: float) -> None:
        """A share of the whole, along the foot of a card."""
        left, y, span = placed.left + PAD, placed.bottom + 0.12, placed.width - 2 * PAD
        look: dict[str, Any] = {"linewidth": 3.0, "solid_capstyle": "round", "zorder": 4}
        self.axes.plot([left, left + span], [y, y], color=tint(placed.card.colour, 0.22), **look)
        self.axes.plot([left, left + span * max(share, 0.004)], [y, y], color=placed.card.colour, **look)

    # text

    def text(
        self, x: float, y: float, words: str, size: float, colour: str, *, bold: bool = False, ha: Any = "left"
    ) -> None:
        if words:
            weight = "bold" if bold else "normal"
            look: dict[str, Any] = {"fontsize": size, "color": colour, "fontweight": weight, "zorder": 5}
            self.axes.text(x, y, words, ha=ha, va="center_baseline", **look)

    def line(self, line: TextLine, x: float, y: float) -> None:
        """A line that begins at x, its middle at y."""
        self.text(x, y, line.text, line.size, line.colour, bold=line.bold)
        after = x + text_width(line.text, line.size, line.bold) + line.gap
        self.text(after, y, line.after, 8.5, SLATE)

    def label(self, lines: Sequence[TextLine], x: float, y: float, *, side: str) -> None:
        """Lines about a point: above or below it and centred, or at its left or right and centred on it."""
        height = sum(line.height for line in lines)
        top = {"above": y + height + 0.05, "below": y - 0.05}.get(side, y + height / 2)
        for line in lines:
            start = {"left": x - line.width - 0.1, "right": x + 0.1}.get(side, x - line.width / 2)
            self.line(line, start, top - line.height / 2)
            top -= line.height

    # links

    def link(
        self, start: Point, end: Point, colour: str = SLATE, width: float = 1.5, *, bend: float | None = None
    ) -> None:
        """An arrow. One that climbs leaves and arrives level, and bends over its last `bend` inches, or all its way."""
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path as Curve

        (x0, y0), (x1, y1) = start, end
        points = [start, end]
        codes = [Curve.MOVETO, Curve.LINETO]
        if abs(y1 - y0) > 0.01 and abs(x1 - x0) > 0.01:
            turn = x0 if bend is None else max(x0, x1 - bend)
            middle = (turn + x1) / 2
            points = [start, (turn, y0), (middle, y0), (middle, y1), end]
            codes = [Curve.MOVETO, Curve.LINETO, *[Curve.CURVE4] * 3]
        look: dict[str, Any] = {"arrowstyle": "-|>,head_length=5,head_width=2.6", "mutation_scale": 1.0}
        look |= {"color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0, "zorder": 2, "joinstyle": "miter"}
        self.axes.add_patch(FancyArrowPatch(path=Curve(points, codes), **look))

    def columns(
        self, heights: Sequence[float], names: Sequence[str], box: tuple[float, float, float, float], colour: str
    ) -> None:
        """Small bars side by side in a box (left, bottom, right, top), the highest as high as it; names below."""
        left, bottom, right, top = box
        pitch = (right - left) / len(heights)
        for number, height in enumerate(heights):
            x = left + (number + 0.5) * pitch
            y = bottom + (top - bottom) * height / max(heights)
            half = 0.36 * pitch
            self.axes.fill_between([x - half, x + half], bottom, y, color=tint(colour, 0.55), lw=0, zorder=4)
            if names:
                self.text(x, bottom - 0.08, names[number], 6.5, SLATE, ha="center")

    def strip(self, x: float, y: float, width: float, height: float, colour: str, pieces: int) -> None:
        """A piece of a bar, cut into equal parts where they are wide enough to be seen."""
        count = pieces if width / pieces > 0.04 else 1
        gap = 0.012 if count > 1 else 0.0
        for number in range(count):
            left = x + width * number / count
            right = left + width / count - gap
            self.axes.fill_between([left, right], y, y + height, color=tint(colour, 0.75), lw=0, zorder=3)

    def frame(
        self, left: float, bottom: float, right: float, top: float, colour: str, title: TextLine, *, below: bool = False
    ) -> None:
        """A loop's frame, its title on the upper edge, or on the lower one."""
        from matplotlib.patches import FancyBboxPatch

        style: Any = "round,pad=0,rounding_size=0.2"
        look: dict[str, Any] = {"facecolor": tint(colour, 0.03), "edgecolor": colour, "linewidth": 1.6, "zorder": 1}
        look["linestyle"] = (0, (5, 3))
        self.axes.add_patch(FancyBboxPatch((left, bottom), right - left, top - bottom, boxstyle=style, **look))
        x, y = left + 0.3, bottom if below else top
        self.axes.plot([x - 0.1, x + title.width + 0.1], [y, y], color=PAPER, linewidth=5, zorder=2)
        self.line(title, x, y)


def tint(colour: str, part: float) -> str:
    """A colour thinned with the paper."""
    inks = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    papers = [int(PAPER[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (c - p) * part):02x}" for c, p in zip(inks, papers, strict=True))


# --- Layout ---------------------------------------------------------------------------------------------------------

MARGIN = 0.45
GAP = 0.3  # between an arrow's label and the cards at its ends, both together
LANE = 0.32  # between two lanes
BEND = 0.55  # where arrows into the loop climb, behind their labels
INSIDE = 0.32  # between the loop's frame and its cards
DOWN = 0.78  # between the rows of the loop, where labels stand
EDGE = 0.16  # where the loop's arrows stand without guidance, as parts of the denoiser's width
LEGEND = TextLine("foot of a card: its share of all parameters; bars in the denoiser: by block", 8, FAINT)
APART = 0.3  # between the words of a run's stages
SHORTEST = 0.5  # milliseconds of a stage that is worth a word
COLUMNS = ("given", "words", "encoders", "joins")


# --- cards -------------------------------------------------------------------------------------------------------


def card_of(node: Node, graph: Graph) -> Card:
    """A node's name, classes, weights and remarks."""
    colour = ROLE_COLOURS[node.role]
    if node.role in ("input", "output"):
        return Card((TextLine(node.name, 9.5, INK, bold=True),), colour, pill=True)
    lines = [TextLine(node.name, 11.5, INK, bold=True)]
    if node.role == "sampler":
        lines += [TextLine(node.kind, 12, colour, bold=True, after=node.peer)]
    else:
        lines += [
            TextLine(word, *look)
            for word, look in zip(graph_tables.classes(node), ((8.5, INK), (8, FAINT)), strict=False)
        ]
    if node.parameters:
        whose = f"of {node.half_of}'s parameters" if node.half_of else "parameters"
        lines.append(TextLine(graph_tables.count(node.parameters), 13, colour, bold=True, after=whose))
        lines += [TextLine(text, 8.5, SLATE) for text in stored(node)]
    lines += [TextLine(text, 8.5, SLATE) for text in remarks(node, graph)]
    share = node.parameters / graph.parameters if node.parameters and not node.half_of else None
    return Card(tuple(lines), colour, graph_tables.duration(node), share)


def stored(node: Node) -> list[str]:
    """dtype and bytes on one line, or the file's and memory's on two."""
    parts = graph_tables.weight(node)[1:]
    if any("disk" in part for part in parts):
        return [part.replace(", ", " · ") for part in parts]
    return [" · ".join(parts)] if parts else []


def remarks(node: Node, graph: Graph) -> list[str]:
    found = graph_tables.remarks(node)
    if node.role == "control":
        return ["reads " + ", ".join(flow.what for flow in graph.into(node.name) if flow.what != "pixels")]
    if node.role == "condition":
        return found[0].replace("and with", "and\nwith").split("\n")
    return [" · ".join(found[i : i + 2]) for i in range(0, len(found), 2)] if node.role == "sampler" else found


def flow_lines(flows: Sequence[Flow], *, stacked: bool = False) -> list[TextLine]:
    """What flows: its name and shape on one line each, or on two."""
    lines = []
    for flow in flows:
        shapes = graph_tables.shapes(flow.shapes)
        long = stacked or len(shapes) > 24
        lines.append(TextLine(flow.what, 8.5, INK, after="" if long else shapes))
        if long and shapes:
            head, dots, tail = shapes.partition(" … ")
            lines += [TextLine(head, 8.5, SLATE)] + ([TextLine(f"… {tail}", 8.5, SLATE)] if dots else [])
    return lines


# --- layout ------------------------------------------------------------------------------------------------------


@dataclass
class Layout:
    """Where every card stands. The denoiser is at (0, 0); what is before it stands in columns at its left."""

    graph: Graph
    places: dict[str, PlacedCard] = field(default_factory=dict)
    frame: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def arrange(self) -> None:
        self.loop()
        self.entrance()
        self.exit()

    def put(self, node: Node, x: float, y: float, wide: float | None = None, tall: float | None = None) -> PlacedCard:
        self.places[node.name] = placed = PlacedCard(card_of(node, self.graph), x, y, wide, tall)
        return placed

    # the loop

    def loop(self) -> None:
        """The denoiser above, guidance and the sampler below it, ControlNets on top; outside, images and noise."""
        graph = self.graph
        [network], [sampler] = graph.of("network"), graph.of("sampler")
        below = [card_of(node, graph) for node in (*graph.of("guidance"), sampler)]
        controls = [card_of(node, graph) for node in graph.of("control")]
        row = sum(card.width for card in controls) + LANE * max(len(controls) - 1, 0)
        wide = max(row, card_of(network, graph).width, self.cycle_width(network, sampler, below))
        top = self.put(network, 0.0, 0.0, wide)
        tall = max(card.height for card in below)
        y = top.bottom - DOWN - tall / 2
        for node in graph.of("guidance"):
            self.put(node, top.left + below[0].width / 2, y, tall=tall)
        if len(below) > 1:
            self.put(sampler, top.right - below[1].width / 2, y, tall=tall)
        else:
            self.put(sampler, 0.0, y, wide)
        x, tall = -row / 2, max((card.height for card in controls), default=0.0)
        for node, card in zip(graph.of("control"), controls, strict=True):
            self.put(node, x + card.width / 2, top.top + DOWN + tall / 2, tall=tall)
            x += card.width + LANE
        self.frame = self.around()
        for node in graph.of("input"):
            goals = [graph.node(flow.goal) for flow in graph.out_of(node.name)]
            if goals and goals[0].role == "control":
                self.put(node, self.places[goals[0].name].x, self.frame[3] + 0.75)
            elif goals and goals[0].role == "sampler":
                self.put(node, self.places[sampler.name].x, self.frame[1] - 0.7)

    def cycle_width(self, network: Node, sampler: Node, below: Sequence[Card]) -> float:
        """The width that the cards below the denoiser need, and the labels between their arrows."""
        graph = self.graph
        flows = (graph.out_of(network.name), graph.between(sampler.name, network.name))
        labels = sum(max(line.width for line in flow_lines(each)) for each in flows) + 0.5
        if len(below) == 1:
            return max(below[0].width, labels / (1 - 2 * EDGE))
        passed = [flow for flow in graph.into(sampler.name) if graph.node(flow.source).role == "guidance"]
        between = max(line.width for line in flow_lines(passed, stacked=True)) + GAP
        return max(sum(card.width for card in below) + between, (below[0].width + below[1].width) / 2 + labels)

    def around(self) -> tuple[float, float, float, float]:
        """A frame about all that has a place: left, bottom, right, top."""
        held = self.places.values()
        left, right = min(p.left for p in held), max(p.right for p in held)
        bottom, top = min(p.bottom for p in held), max(p.top for p in held)
        return left - INSIDE, bottom - INSIDE, right + INSIDE, top + INSIDE + 0.05

    # what comes before

    def entrance(self) -> None:
        """Lanes of cards, one below the other, in columns that end at the loop."""
        lanes = lanes_of(self.graph)
        if not lanes:
            return
        joined = [lane for lane in lanes if lane.joins]
        apart = [lane for lane in lanes if not lane.joins]
        span = sum(lane.height(self.graph) for lane in joined) + LANE * max(len(joined) - 1, 0)
        y, middles = span / 2, []
        for lane in (*joined, *apart):
            height = lane.height(self.graph)
            middles.append((lane, y - height / 2))
            y -= height + LANE
        right = self.frame[0] - (BEND - INSIDE if apart else 0.0)
        for name in reversed(COLUMNS):
            nodes: list[tuple[Node, float, float | None]]
            nodes = [(lane.cards[name], middle, None) for lane, middle in middles if name in lane.cards]
            nodes += [(node, 0.0, span) for node in self.graph.of("condition") if name == "joins"]
            right = self.column(nodes, right, centred=name == COLUMNS[0]) if nodes else right
        self.level("prompt")

    def column(self, nodes: Sequence[tuple[Node, float, float | None]], right: float, *, centred: bool) -> float:
        """Cards of one width above each other, at the left of what they lead to; their left edge."""
        right -= self.reach([node for node, _, _ in nodes])
        wide = max(card_of(node, self.graph).width for node, _, _ in nodes)
        for node, y, tall in nodes:
            own = card_of(node, self.graph)
            x = right - (own.width if own.pill and not centred else wide) / 2
            self.put(node, x, y, None if own.pill else wide, tall)
        return right - wide

    def level(self, name: str) -> None:
        """One prompt for several tokenizers stands in the middle of them."""
        if name in self.places:
            goals = [self.places[flow.goal] for flow in self.graph.out_of(name)]
            old = self.places[name]
            self.places[name] = PlacedCard(old.card, old.x, sum(goal.y for goal in goals) / len(goals))

    def reach(self, nodes: Sequence[Node]) -> float:
        """The space at the right of a column: the widest label of what leaves it."""
        flows = [flow for node in nodes for flow in self.graph.out_of(node.name)]
        lines = [line.width for flow in flows if flow.shapes for line in labels_of(self.graph, flow)]
        return max(lines, default=0.25) + GAP

    # what comes after

    def exit(self) -> None:
        [sampler] = self.graph.of("sampler")
        source, x, y = sampler.name, self.frame[2], self.places[sampler.name].y
        ends = [node for node in self.graph.of("vae") if node.half_of is None] + self.graph.of("output")
        for node in ends:
            flows = self.graph.between(source, node.name)
            x += max((line.width for line in flow_lines(flows, stacked=True)), default=0.0) + GAP
            card = card_of(node, self.graph)
            self.put(node, x + card.width / 2, y)
            x += card.width
            source = node.name

    # the sheet

    @property
    def header(self) -> float:
        return 1.0

    @property
    def footer(self) -> float:
        return 0.24 * len(self.notes) + (0.95 if self.graph.times is not None else 0.0)

    @property
    def box(self) -> tuple[float, float, float, float]:
        held = self.places.values()
        left, right = min(p.left for p in held), max(p.right for p in held)
        bottom, top = min(p.bottom for p in held), max(p.top for p in held)
        return min(left, self.frame[0]), min(bottom, self.frame[1]), max(right, self.frame[2]), max(top, self.frame[3])

    @property
    def corner(self) -> tuple[float, float]:
        left, bottom, _, _ = self.box
        return left - MARGIN, bottom - MARGIN - self.footer

    def extent(self) -> tuple[float, float]:
        _, bottom, _, top = self.box
        return self.breadth + 2 * MARGIN, top - bottom + 2 * MARGIN + self.header + self.footer

    @property
    def breadth(self) -> float:
        """Inches between the margins: the cards', or the header's where that is wider."""
        left, _, right, _ = self.box
        title = TextLine(graph_tables.title(self.graph), 17, bold=True).width + 0.5 + LEGEND.width
        clock = sum(line.width + APART for line, _ in clock_of(self.graph))
        return max(right - left, TextLine(" · ".join(graph_tables.subtitle(self.graph)), 9.5).width, title, clock)

    @property
    def notes(self) -> list[TextLine]:
        """The graph's notes, broken to the breadth."""
        lines: list[TextLine] = []
        for note in self.graph.notes:
            held = "⚠ "
            for word in note.split():
                longer = f"{held} {word}"
                if TextLine(longer).width > self.breadth:
                    lines.append(TextLine(held, 8.5, ROLE_COLOURS["sampler"]))
                    longer = f"     {word}"
                held = longer
            lines.append(TextLine(held, 8.5, ROLE_COLOURS["sampler"]))
        return lines


def clock_of(graph: Graph) -> list[tuple[TextLine, float]]:
    """The stages of a run: what each is called and took, and its milliseconds; the whole comes last, with none."""
    times = graph.times
    if times is None:
        return []
    each = f"{graph.calls} × {graph_tables.milliseconds(times.step)}"
    stages = [("text", times.text, "text", ""), ("encode", times.encode, "image", "")]
    stages += [("denoise", times.step * graph.calls, "sampler", each), ("decode", times.decode, "vae", "")]
    lines = [
        (TextLine(name, 8.5, ROLE_COLOURS[role], bold=True, after=each or graph_tables.milliseconds(value)), value)
        for name, value, role, each in stages
        if value >= SHORTEST or name == "denoise"
    ]
    whole = f"{graph_tables.milliseconds(times.whole)} on {times.device}"
    return [*lines, (TextLine("whole run", 8.5, INK, bold=True, after=whole), 0.0)]


def labels_of(graph: Graph, flow: Flow) -> list[TextLine]:
    """The lines of a flow's label: a single flow between two cards stands on two, several on one each."""
    return flow_lines([flow], stacked=len(graph.between(flow.source, flow.goal)) == 1)


@dataclass(frozen=True)
class Lane:
    """A chain of cards by column; `joins` where it ends at the conditions."""

    cards: dict[str, Node]
    joins: bool

    def height(self, graph: Graph) -> float:
        """The tallest card, and room for the labels of what leaves it."""
        heights = [card_of(node, graph).height for node in self.cards.values()]
        ends = [flow for node in self.cards.values() for flow in graph.out_of(node.name) if flow.shapes]
        label = max(
            (
                2 * sum(line.height for line in flow_lines(graph.between(flow.source, flow.goal), stacked=True))
                for flow in ends
            ),
            default=0.0,
        )
        return max(*heights, min(label, 0.9))


def lanes_of(graph: Graph) -> list[Lane]:
    """Texts first, then what else joins the conditions, then what goes to the denoiser itself."""
    found = []
    for chain in graph.branches():
        joins = any(graph.node(flow.goal).role == "condition" for flow in graph.out_of(chain[-1].name))
        columns = COLUMNS[:3] if joins else COLUMNS[1:] if len(chain) > 2 else COLUMNS[1:3]
        found.append(Lane(dict(zip(columns[-len(chain) :], chain, strict=True)), joins))
    return sorted(found, key=lambda lane: (not lane.joins, -len(lane.cards)))


# --- Drawing --------------------------------------------------------------------------------------------------------

ORANGE = ROLE_COLOURS["sampler"]
BAR = 0.16  # height of the bar of a run's stages


def draw_graph(graph: Graph, path: Path) -> None:
    charts.save(figure_of(graph), path)


def figure_of(graph: Graph) -> Figure:
    """Places everything about the loop, then draws it on a sheet that is just large enough."""
    plan = Layout(graph)
    plan.arrange()
    width, height = plan.extent()
    figure = charts.canvas(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    left, bottom = plan.corner
    axes.set(xlim=(left, left + width), ylim=(bottom, bottom + height))
    Drawing(graph, plan, Sheet(axes)).draw()
    return figure


@dataclass
class Drawing:
    graph: Graph
    plan: Layout
    sheet: Sheet

    def draw(self) -> None:
        pace = TextLine(f"⟲  {graph_tables.pace(self.graph)}", 11, ORANGE, bold=True)
        below = bool(self.graph.of("control"))  # their images come from above
        self.sheet.frame(*self.plan.frame, ORANGE, pace, below=below)
        for placed in self.plan.places.values():
            self.sheet.card(placed)
        self.silhouette()
        self.cycle()
        self.ways_in()
        self.ways_out()
        self.header()
        self.footer()

    def place(self, name: str) -> PlacedCard:
        return self.plan.places[name]

    def cycle(self) -> None:
        """Denoiser → guidance → sampler → denoiser, ControlNets above."""
        graph, sheet = self.graph, self.sheet
        [network], [sampler] = graph.of("network"), graph.of("sampler")
        top, low = self.place(network.name), self.place(sampler.name)
        first = graph.of("guidance")[0] if graph.of("guidance") else sampler
        goal = self.place(first.name)
        x = goal.x if first is not sampler else top.left + top.width * EDGE
        sheet.link((x, top.bottom), (x, goal.top), ORANGE, 2.2)
        middle = (top.bottom + max(goal.top, low.top)) / 2
        sheet.label(flow_lines(graph.between(network.name, first.name)), x, middle, side="right")
        if first is not sampler:
            sheet.link((goal.right, goal.y), (low.left, low.y), ORANGE, 2.2)
            self.about(graph.between(first.name, sampler.name), (goal.right, goal.y), (low.left, low.y))
        x = low.x if first is not sampler else top.right - top.width * EDGE
        sheet.link((x, low.top), (x, top.bottom), ORANGE, 2.2)
        sheet.label(flow_lines(graph.between(sampler.name, network.name)), x, middle, side="left")
        for node in graph.of("control"):
            placed = self.place(node.name)
            sheet.link((placed.x, placed.bottom), (placed.x, top.top))
            sheet.label(flow_lines(graph.out_of(node.name)), placed.x, (placed.bottom + top.top) / 2, side="right")

    def ways_in(self) -> None:
        """Every link from the left, and those from above and below."""
        graph, sheet = self.graph, self.sheet
        for goal in graph.nodes:
            sources = list(dict.fromkeys(f.source for f in graph.into(goal.name) if self.before(f.source, goal.name)))
            for name, y in self.doors(goal.name, sources):
                start, end = self.place(name), self.place(goal.name)
                inside = self.enters(start, end)
                sheet.link((start.right, start.y), (end.left, y), bend=BEND if inside else None)
                right = end.left
                if inside:
                    right = self.plan.frame[0] if abs(y - start.y) < 0.02 else end.left - BEND
                self.about(graph.between(name, goal.name), (start.right, start.y), (right, y))
        for node in graph.of("input"):
            for flow in graph.out_of(node.name):
                start, end = self.place(node.name), self.place(flow.goal)
                if self.graph.node(flow.goal).role in ("control", "sampler"):
                    down = start.y > end.y
                    ends = (start.bottom, end.top) if down else (start.top, end.bottom)
                    sheet.link((start.x, ends[0]), (start.x, ends[1]))
                    edge = self.plan.frame[3] if down else self.plan.frame[1]
                    sheet.label(flow_lines([flow]), start.x, (ends[0] + edge) / 2, side="right")

    def doors(self, goal: str, sources: Sequence[str]) -> list[tuple[str, float]]:
        """Where the link of each source arrives: straight where it can, the others spread over the lower part."""
        if not sources:
            return []
        end = self.place(goal)
        level = [name for name in sources if end.bottom + 0.08 < self.place(name).y < end.top - 0.08]
        lowest = min((self.place(name).y for name in level), default=end.top)
        below = [name for name in sources if name not in level]
        if not level and len(below) == 1:
            return [(below[0], end.y)]
        step = (lowest - end.bottom) / (len(below) + 1)
        return [(name, self.place(name).y) for name in level] + [
            (name, lowest - step * (number + 1)) for number, name in enumerate(below)
        ]

    def enters(self, start: PlacedCard, end: PlacedCard) -> bool:
        """Whether a link crosses the loop's frame."""
        return start.right < self.plan.frame[0] < end.left

    def before(self, source: str, goal: str) -> bool:
        """Whether a link runs from left to right outside of the loop."""
        places = self.plan.places
        end = self.graph.node(goal)
        later = end.role in ("control", "output") or (end.role == "vae" and end.half_of is None)
        if source not in places or goal not in places or later:
            return False
        inside = ("network", "guidance", "sampler", "control")
        return self.graph.node(source).role not in inside and places[source].right < places[goal].left

    def about(self, flows: Sequence[Flow], start: Point, end: Point) -> None:
        """The label of a link from left to right: around a straight one, on the free side of a bent one."""
        flows = [flow for flow in flows if flow.shapes]
        if not flows:
            return
        (x0, y0), (x1, y1) = start, end
        x, straight = (x0 + x1) / 2, abs(y1 - y0) < 0.02
        if straight and len(flows) == 1:
            first, *rest = flow_lines(flows, stacked=True)
            self.sheet.label([first], x, y0, side="above")
            self.sheet.label(rest, x, y0, side="below")
            return
        lines = flow_lines(flows, stacked=len(flows) == 1)
        self.sheet.label(lines, x, y0, side="below" if y1 > y0 + 0.02 else "above")

    def ways_out(self) -> None:
        graph = self.graph
        for node in (*graph.of("vae"), *graph.of("output")):
            for source in dict.fromkeys(flow.source for flow in graph.into(node.name)):
                start, end = self.place(source), self.place(node.name)
                if graph.node(source).role not in ("sampler", "vae") or node.half_of is not None:
                    continue
                self.sheet.link((start.right, start.y), (end.left, end.y))
                left = max(start.right, self.plan.frame[2] if start.right < self.plan.frame[2] else start.right)
                self.about(graph.between(source, node.name), (left, start.y), (end.left, end.y))

    def silhouette(self) -> None:
        """The denoiser's blocks as bars in the free part of its card: where its parameters are."""
        [network] = self.graph.of("network")
        placed = self.place(network.name)
        blocks = [block for block in network.blocks if block.name[-1].isdigit() or block.name == "mid_block"]
        free = placed.width - placed.card.width
        if free < 1.0 or len(blocks) < 3:
            return
        names = [short_name(block.name) for block in blocks]
        width = min(free - 0.2, 0.3 * len(blocks), 2.4)
        readable = max(len(name) for name in names) <= 4 and width / len(blocks) > 0.17
        box = (
            placed.right - 0.2 - width,
            placed.bottom + 0.42,
            placed.right - 0.2,
            placed.top - (0.42 if placed.card.corner else 0.22),
        )
        heights = [block.parameters for block in blocks]
        self.sheet.columns(heights, names if readable else [], box, placed.card.colour)

    def header(self) -> None:
        left, bottom = self.plan.corner
        width, height = self.plan.extent()
        top = bottom + height
        self.sheet.text(left + MARGIN, top - 0.48, graph_tables.title(self.graph), 17, INK, bold=True)
        self.sheet.text(left + MARGIN, top - 0.82, " · ".join(graph_tables.subtitle(self.graph)), 9.5, SLATE)
        self.sheet.text(left + width - MARGIN, top - 0.45, LEGEND.text, LEGEND.size, FAINT, ha="right")

    def footer(self) -> None:
        left, bottom = self.plan.corner
        notes = self.plan.notes
        y = bottom + 0.28 + 0.24 * (len(notes) - 1)
        if self.graph.times is not None:
            self.clock(left + MARGIN, y + 0.35)
        for note in notes:
            self.sheet.line(note, left + MARGIN, y)
            y -= 0.24

    def clock(self, left: float, y: float) -> None:
        """The stages of a run on one bar, and what each took."""
        stages = clock_of(self.graph)
        span = self.plan.extent()[0] - 2 * MARGIN
        total = sum(value for _, value in stages)
        x, at = left, left
        for line, value in stages:
            width = span * value / total
            pieces = self.graph.calls if line.text == "denoise" else 1
            self.sheet.strip(x, y + 0.3, width, BAR, line.colour, pieces)
            self.sheet.line(line, at, y + 0.12)
            x, at = x + width, at + line.width + APART


def short_name(name: str) -> str:
    """down_blocks.0 → ↓0, up_blocks.3 → ↑3, mid_block → mid."""
    head, _, number = name.partition(".")
    sign = {"down_blocks": "↓", "up_blocks": "↑"}.get(head)
    return f"{sign}{number}" if sign else "mid" if head == "mid_block" else name
