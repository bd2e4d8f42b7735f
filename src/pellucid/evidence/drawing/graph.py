"""The image of a pipeline: cards from left to right, what flows on the arrows, the denoising loop in its frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.evidence.drawing import graph_words as words
from pellucid.evidence.drawing.cards import Line, Placed, Point, Sheet
from pellucid.evidence.drawing.graph_layout import APART, BEND, EDGE, LEGEND, MARGIN, Layout, clock_of, told
from pellucid.evidence.drawing.graph_words import ROLE_COLOURS
from pellucid.evidence.study import charts
from pellucid.evidence.study.charts import FAINT, INK, SLATE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pellucid.pipeline.inspection import Flow, Graph

ORANGE = ROLE_COLOURS["sampler"]
BAR = 0.16  # height of the bar of a run's stages


def image(graph: Graph, path: Path) -> None:
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
        pace = Line(f"⟲  {words.pace(self.graph)}", 11, ORANGE, bold=True)
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

    def place(self, name: str) -> Placed:
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
        sheet.label(told(graph.between(network.name, first.name)), x, middle, side="right")
        if first is not sampler:
            sheet.link((goal.right, goal.y), (low.left, low.y), ORANGE, 2.2)
            self.about(graph.between(first.name, sampler.name), (goal.right, goal.y), (low.left, low.y))
        x = low.x if first is not sampler else top.right - top.width * EDGE
        sheet.link((x, low.top), (x, top.bottom), ORANGE, 2.2)
        sheet.label(told(graph.between(sampler.name, network.name)), x, middle, side="left")
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
                if self.graph.node(flow.goal).role in ("control", "sampler"):
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
        self.sheet.text(left + MARGIN, top - 0.48, words.title(self.graph), 17, INK, bold=True)
        self.sheet.text(left + MARGIN, top - 0.82, " · ".join(words.subtitle(self.graph)), 9.5, SLATE)
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
