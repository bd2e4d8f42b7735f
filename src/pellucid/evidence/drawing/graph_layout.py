"""Where the cards of a pipeline's image stand: the loop in the middle, lanes of cards before it, the exit after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pellucid.evidence.drawing import graph_words as words
from pellucid.evidence.drawing.cards import Card, Line, Placed
from pellucid.evidence.drawing.graph_words import ROLE_COLOURS
from pellucid.evidence.study.charts import FAINT, INK, SLATE

if TYPE_CHECKING:
    from pellucid.pipeline.inspection import Flow, Graph, Node

MARGIN = 0.45
GAP = 0.3  # between an arrow's label and the cards at its ends, both together
LANE = 0.32  # between two lanes
BEND = 0.55  # where arrows into the loop climb, behind their labels
INSIDE = 0.32  # between the loop's frame and its cards
DOWN = 0.78  # between the rows of the loop, where labels stand
EDGE = 0.16  # where the loop's arrows stand without guidance, as parts of the denoiser's width
LEGEND = Line("foot of a card: its share of all parameters; bars in the denoiser: by block", 8, FAINT)
APART = 0.3  # between the words of a run's stages
SHORTEST = 0.5  # milliseconds of a stage that is worth a word
COLUMNS = ("given", "words", "encoders", "joins")


# --- cards -------------------------------------------------------------------------------------------------------


def card_of(node: Node, graph: Graph) -> Card:
    """A node's name, classes, weights and remarks."""
    colour = ROLE_COLOURS[node.role]
    if node.role in ("input", "output"):
        return Card((Line(node.name, 9.5, INK, bold=True),), colour, pill=True)
    lines = [Line(node.name, 11.5, INK, bold=True)]
    if node.role == "sampler":
        lines += [Line(node.kind, 12, colour, bold=True, after=node.peer)]
    else:
        lines += [Line(word, *look) for word, look in zip(words.classes(node), ((8.5, INK), (8, FAINT)), strict=False)]
    if node.parameters:
        whose = f"of {node.half_of}'s parameters" if node.half_of else "parameters"
        lines.append(Line(words.count(node.parameters), 13, colour, bold=True, after=whose))
        lines += [Line(text, 8.5, SLATE) for text in stored(node)]
    lines += [Line(text, 8.5, SLATE) for text in remarks(node, graph)]
    share = node.parameters / graph.parameters if node.parameters and not node.half_of else None
    return Card(tuple(lines), colour, words.took(node), share)


def stored(node: Node) -> list[str]:
    """dtype and bytes on one line, or the file's and memory's on two."""
    parts = words.weight(node)[1:]
    if any("disk" in part for part in parts):
        return [part.replace(", ", " · ") for part in parts]
    return [" · ".join(parts)] if parts else []


def remarks(node: Node, graph: Graph) -> list[str]:
    found = words.remarks(node)
    if node.role == "control":
        return ["reads " + ", ".join(flow.what for flow in graph.into(node.name) if flow.what != "pixels")]
    if node.role == "condition":
        return found[0].replace("and with", "and\nwith").split("\n")
    return [" · ".join(found[i : i + 2]) for i in range(0, len(found), 2)] if node.role == "sampler" else found


def told(flows: Sequence[Flow], *, stacked: bool = False) -> list[Line]:
    """What flows: its name and shape on one line each, or on two."""
    lines = []
    for flow in flows:
        shapes = words.shapes(flow.shapes)
        long = stacked or len(shapes) > 24
        lines.append(Line(flow.what, 8.5, INK, after="" if long else shapes))
        if long and shapes:
            head, dots, tail = shapes.partition(" … ")
            lines += [Line(head, 8.5, SLATE)] + ([Line(f"… {tail}", 8.5, SLATE)] if dots else [])
    return lines


# --- layout ------------------------------------------------------------------------------------------------------


@dataclass
class Layout:
    """Where every card stands. The denoiser is at (0, 0); what is before it stands in columns at its left."""

    graph: Graph
    places: dict[str, Placed] = field(default_factory=dict)
    frame: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def arrange(self) -> None:
        self.loop()
        self.entrance()
        self.exit()

    def put(self, node: Node, x: float, y: float, wide: float | None = None, tall: float | None = None) -> Placed:
        self.places[node.name] = placed = Placed(card_of(node, self.graph), x, y, wide, tall)
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
        labels = sum(max(line.width for line in told(each)) for each in flows) + 0.5
        if len(below) == 1:
            return max(below[0].width, labels / (1 - 2 * EDGE))
        passed = [flow for flow in graph.into(sampler.name) if graph.node(flow.source).role == "guidance"]
        between = max(line.width for line in told(passed, stacked=True)) + GAP
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
            self.places[name] = Placed(old.card, old.x, sum(goal.y for goal in goals) / len(goals))

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
            x += max((line.width for line in told(flows, stacked=True)), default=0.0) + GAP
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
        title = Line(words.title(self.graph), 17, bold=True).width + 0.5 + LEGEND.width
        clock = sum(line.width + APART for line, _ in clock_of(self.graph))
        return max(right - left, Line(" · ".join(words.subtitle(self.graph)), 9.5).width, title, clock)

    @property
    def notes(self) -> list[Line]:
        """The graph's notes, broken to the breadth."""
        lines: list[Line] = []
        for note in self.graph.notes:
            held = "⚠ "
            for word in note.split():
                longer = f"{held} {word}"
                if Line(longer).width > self.breadth:
                    lines.append(Line(held, 8.5, ROLE_COLOURS["sampler"]))
                    longer = f"     {word}"
                held = longer
            lines.append(Line(held, 8.5, ROLE_COLOURS["sampler"]))
        return lines


def clock_of(graph: Graph) -> list[tuple[Line, float]]:
    """The stages of a run: what each is called and took, and its milliseconds; the whole comes last, with none."""
    times = graph.times
    if times is None:
        return []
    each = f"{graph.calls} × {words.milliseconds(times.step)}"
    stages = [("text", times.text, "text", ""), ("encode", times.encode, "image", "")]
    stages += [("denoise", times.step * graph.calls, "sampler", each), ("decode", times.decode, "vae", "")]
    lines = [
        (Line(name, 8.5, ROLE_COLOURS[role], bold=True, after=each or words.milliseconds(value)), value)
        for name, value, role, each in stages
        if value >= SHORTEST or name == "denoise"
    ]
    whole = f"{words.milliseconds(times.whole)} on {times.device}"
    return [*lines, (Line("whole run", 8.5, INK, bold=True, after=whole), 0.0)]


def labels_of(graph: Graph, flow: Flow) -> list[Line]:
    """The lines of a flow's label: a single flow between two cards stands on two, several on one each."""
    return told([flow], stacked=len(graph.between(flow.source, flow.goal)) == 1)


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
                2 * sum(line.height for line in told(graph.between(flow.source, flow.goal), stacked=True))
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
