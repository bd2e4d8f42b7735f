"""The picture of a pipeline: cards from left to right, what flows on the arrows, the denoising loop in its frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.cli import draw
from pellucid.cli import inspect_words as words
from pellucid.cli.draw import FAINT, INK
from pellucid.cli.draw_cards import SLATE, Card, Line, Placed, Sheet
from pellucid.cli.inspect_words import ROLE_COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pellucid.pipeline.inspection import Flow, Graph, Node

MARGIN = 0.45
GAP = 0.3  # between an arrow's label and the cards at its ends, both together
LANE = 0.32  # between two lanes
BEND = 0.55  # where arrows into the loop climb, behind their labels
DOWN = 0.78  # between the rows of the loop, where labels stand
ORANGE = ROLE_COLOURS["sampler"]
MINOR = 0.003  # blocks with a smaller share of the parameters have no bar
COLUMNS = ("given", "words", "encoders", "joins")


def picture(graph: Graph, path: Path) -> None:
    draw.save(figure_of(graph), path)


def figure_of(graph: Graph) -> Figure:
    """Places everything about the loop, then draws it on a sheet that is just large enough."""
    plan = Layout(graph)
    plan.arrange()
    width, height = plan.extent()
    figure = draw.canvas(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    left, bottom = plan.corner
    axes.set(xlim=(left, left + width), ylim=(bottom, bottom + height))
    Drawing(graph, plan, Sheet(axes)).draw()
    return figure


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
    return (
        [" · ".join(parts)] if len(parts) == 2 and "disk" not in parts[0] else [p.replace(", ", " · ") for p in parts]
    )


def remarks(node: Node, graph: Graph) -> list[str]:
    found = words.remarks(node)
    if node.role == "control":
        return ["reads " + ", ".join(flow.what for flow in graph.into(node.name) if flow.what != "pixels")]
    if node.role == "condition":
        return [found[0].replace(" with the", "\nwith the") if "and" in found[0] else found[0]][0].split("\n")
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
    timeline: float | None = None

    def arrange(self) -> None:
        self.loop()
        self.entrance()
        self.exit()

    def put(self, node: Node, x: float, y: float, wide: float | None = None, tall: float | None = None) -> Placed:
        self.places[node.name] = placed = Placed(card_of(node, self.graph), x, y, wide, tall)
        return placed

    def one(self, role: str) -> Node | None:
        found = self.graph.of(role)  # type: ignore[arg-type]
        return found[0] if found else None

    # the loop

    def loop(self) -> None:
        """The denoiser above, guidance and the sampler below it, ControlNets on top."""
        graph = self.graph
        network, sampler, guidance = self.one("network"), self.one("sampler"), self.one("guidance")
        assert network is not None
        assert sampler is not None
        controls = [card_of(node, graph) for node in graph.of("control")]
        below = [card_of(node, graph) for node in (guidance, sampler) if node is not None]
        between = 0.0
        if guidance is not None:
            between = max(line.width for line in told(graph.between(guidance.name, sampler.name), stacked=True)) + GAP
        low = sum(card.width for card in below) + between
        high = sum(card.width for card in controls) + LANE * max(len(controls) - 1, 0)
        sides = [told(graph.out_of(network.name)), told(graph.between(sampler.name, network.name))]
        wide = max(low, high, card_of(network, graph).width, sum(max(li.width for li in s) for s in sides) + 1.2)
        top = self.put(network, 0.0, 0.0, wide)
        tall = max(card.height for card in below)
        y = top.bottom - DOWN - tall / 2
        if guidance is not None:
            self.put(guidance, -wide / 2 + below[0].width / 2, y, tall=tall)
            self.put(sampler, wide / 2 - below[1].width / 2, y, tall=tall)
        else:
            self.put(sampler, 0.0, y, wide)
        x = -high / 2
        for node, card in zip(graph.of("control"), controls, strict=True):
            self.put(node, x + card.width / 2, top.top + DOWN + card.height / 2)
            x += card.width + LANE
        held = list(self.places.values())
        pad = 0.32
        self.frame = (
            min(p.left for p in held) - pad,
            min(p.bottom for p in held) - pad,
            max(p.right for p in held) + pad,
            max(p.top for p in held) + pad + 0.05,
        )
        for node in graph.nodes:
            goals = [flow.goal for flow in graph.out_of(node.name)]
            if node.role == "input" and goals and goals[0] in self.places and graph.node(goals[0]).role == "control":
                self.put(node, self.places[goals[0]].x, self.frame[3] + 0.75)
        start = next(node for node in graph.nodes if node.name == "noise")
        self.put(start, self.places[sampler.name].x, self.frame[1] - 0.7)

    # what comes before

    def entrance(self) -> None:
        """Lanes of cards, one below the other, in columns that end at the loop."""
        lanes = lanes_of(self.graph)
        if not lanes:
            return
        joined = [lane for lane in lanes if lane.joins]
        apart = [lane for lane in lanes if not lane.joins]
        heights = {id(lane): lane.height(self.graph) for lane in lanes}
        span = sum(heights[id(lane)] for lane in joined) + LANE * max(len(joined) - 1, 0)
        y = span / 2
        middles = {}
        for lane in (*joined, *apart):
            middles[id(lane)] = y - heights[id(lane)] / 2
            y -= heights[id(lane)] + LANE
        right = self.frame[0] - (BEND - 0.32 if apart else 0.0)
        for column in reversed(COLUMNS):
            nodes = [(lane.cards[column], middles[id(lane)], None) for lane in lanes if column in lane.cards]
            if column == "joins":
                nodes += [(node, 0.0, span) for node in self.graph.of("condition")]
            nodes = [each for each in nodes if each[0].name not in self.places]
            if not nodes:
                continue
            right -= self.reach([node for node, _, _ in nodes])
            wide = max(card_of(node, self.graph).width for node, _, _ in nodes)
            for node, y, tall in nodes:
                own = card_of(node, self.graph)
                x = right - (own.width if own.pill and column != "given" else wide) / 2
                self.put(node, x, y, None if own.pill else wide, tall)
            right -= wide
        self.level("prompt")

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
        sampler = self.one("sampler")
        assert sampler is not None
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
        return 0.24 * len(self.graph.notes) + (0.95 if self.graph.times is not None else 0.0)

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
        left, bottom, right, top = self.box
        least = Line(" · ".join(words.subtitle(self.graph)), 9.5).width
        return max(right - left, least) + 2 * MARGIN, top - bottom + 2 * MARGIN + self.header + self.footer


def short_name(name: str) -> str:
    """down_blocks.0 → ↓0, up_blocks.3 → ↑3, mid_block → mid."""
    head, _, number = name.partition(".")
    sign = {"down_blocks": "↓", "up_blocks": "↑"}.get(head)
    return f"{sign}{number}" if sign else "mid" if head == "mid_block" else name


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
    held = {node.name: node for node in graph.nodes}
    found = []
    for node in graph.nodes:
        goals = [held[flow.goal].role for flow in graph.out_of(node.name)]
        if node.role in ("condition", "control", "network", "sampler", "guidance") or not goals:
            continue
        if not {"condition", "network"} & set(goals):
            continue
        chain = [node]
        while sources := [flow.source for flow in graph.into(chain[0].name)]:
            chain.insert(0, held[sources[0]])
        joins = "condition" in goals
        columns = COLUMNS[:3] if joins else COLUMNS[1:] if len(chain) > 2 else COLUMNS[1:3]
        found.append(Lane(dict(zip(columns[-len(chain) :], chain, strict=True)), joins))
    return sorted(found, key=lambda lane: (not lane.joins, -len(lane.cards)))


# --- drawing -----------------------------------------------------------------------------------------------------


@dataclass
class Drawing:
    graph: Graph
    plan: Layout
    sheet: Sheet

    def draw(self) -> None:
        pace = Line(f"⟲  {words.pace(self.graph)}", 11, ORANGE, bold=True)
        self.sheet.frame(*self.plan.frame, ORANGE, pace)
        for placed in self.plan.places.values():
            self.sheet.card(placed)
        self.silhouette()
        self.cycle()
        self.ways_in()
        self.ways_out()
        self.header()
        self.footer()

    def place(self, name: str) -> Placed:
        return self.plan.places[name]

    def cycle(self) -> None:
        """Denoiser → guidance → sampler → denoiser, ControlNets above."""
        graph, sheet = self.graph, self.sheet
        [network], [sampler] = graph.of("network"), graph.of("sampler")
        top, low = self.place(network.name), self.place(sampler.name)
        first = graph.of("guidance")[0] if graph.of("guidance") else sampler
        goal = self.place(first.name)
        x = goal.x if first is not sampler else top.left + top.width * 0.25
        sheet.link((x, top.bottom), (x, goal.top), ORANGE, 2.2)
        middle = (top.bottom + max(goal.top, low.top)) / 2
        sheet.label(told(graph.between(network.name, first.name)), x, middle, side="right")
        if first is not sampler:
            sheet.link((goal.right, goal.y), (low.left, low.y), ORANGE, 2.2)
            self.about(graph.between(first.name, sampler.name), (goal.right, goal.y), (low.left, low.y))
        x = low.x if first is not sampler else top.left + top.width * 0.75
        sheet.link((x, low.top), (x, top.bottom), ORANGE, 2.2)
        side = "left" if first is not sampler else "right"
        sheet.label(told(graph.between(sampler.name, network.name)), x, middle, side=side)
        for node in graph.of("control"):
            placed = self.place(node.name)
            sheet.link((placed.x, placed.bottom), (placed.x, top.top))
            sheet.label(told(graph.out_of(node.name)), placed.x, (placed.bottom + top.top) / 2, side="right")

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
                if abs(start.x - end.x) < 0.01 and start.y != end.y:
                    down = start.y > end.y
                    ends = (start.bottom, end.top) if down else (start.top, end.bottom)
                    sheet.link((start.x, ends[0]), (start.x, ends[1]))
                    edge = self.plan.frame[3] if down else self.plan.frame[1]
                    sheet.label(told([flow]), start.x, (ends[0] + edge) / 2, side="right")

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

    def enters(self, start: Placed, end: Placed) -> bool:
        """Whether a link crosses the loop's frame."""
        return start.right < self.plan.frame[0] < end.left

    def before(self, source: str, goal: str) -> bool:
        """Whether a link runs from left to right outside of the loop."""
        places = self.plan.places
        if source not in places or goal not in places or self.graph.node(goal).role == "control":
            return False
        inside = ("network", "guidance", "sampler", "control")
        return self.graph.node(source).role not in inside and places[source].right < places[goal].left

    def about(self, flows: Sequence[Flow], start: tuple[float, float], end: tuple[float, float]) -> None:
        """The label of a link from left to right: around a straight one, on the free side of a bent one."""
        flows = [flow for flow in flows if flow.shapes]
        if not flows:
            return
        (x0, y0), (x1, y1) = start, end
        x, straight = (x0 + x1) / 2, abs(y1 - y0) < 0.02
        if straight and len(flows) == 1:
            first, *rest = told(flows, stacked=True)
            self.sheet.label([first], x, y0, side="above")
            self.sheet.label(rest, x, y0, side="below")
            return
        lines = told(flows, stacked=len(flows) == 1)
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
        blocks = [block for block in network.blocks if block.share >= MINOR]
        free = placed.width - placed.card.width
        if free < 1.0 or len(blocks) < 3:
            return
        names = [short_name(block.name) for block in blocks]
        names = names if max(len(name) for name in names) <= 4 and len(names) <= 12 else []
        width = min(free - 0.2, 0.3 * len(blocks) if names else 2.4)
        box = (placed.right - 0.2 - width, placed.bottom + 0.42, placed.right - 0.2, placed.top - 0.22)
        self.sheet.columns([block.parameters for block in blocks], names, box, placed.card.colour)

    def header(self) -> None:
        left, bottom = self.plan.corner
        top = bottom + self.plan.extent()[1]
        self.sheet.text(left + MARGIN, top - 0.48, words.title(self.graph), 17, INK, bold=True)
        self.sheet.text(left + MARGIN, top - 0.82, " · ".join(words.subtitle(self.graph)), 9.5, SLATE)

    def footer(self) -> None:
        left, bottom = self.plan.corner
        y = bottom + 0.28 + 0.24 * (len(self.graph.notes) - 1)
        for note in self.graph.notes:
            self.sheet.text(left + MARGIN, y, f"⚠  {note}", 8.5, ROLE_COLOURS["sampler"])
            y -= 0.24
