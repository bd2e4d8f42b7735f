"""The chart of useful ranges: a row for each rule, a point for each scale, and a bar where the scale is useful."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.evidence.study import charts
from pellucid.evidence.study.guidance_useful import Judged, Line

WIDTH, LEFT, RIGHT, TOP, ROW, FOOT = 760, 130, 24, 14, 34, 44
GRID, BAR = "#e3e8ee", "#bfe3c8"
GREEN, ORANGE, RED = "#188a3b", "#e8710a", "#c5221f"
STATES = (
    ("useful", GREEN),
    ("looks out of tolerance", ORANGE),
    ("not adherent enough", charts.PAPER),
    ("both", RED),
)


def state(one: Judged) -> tuple[str, str]:
    """What a cell is, and its colour."""
    if one.useful:
        return STATES[0]
    return STATES[1] if one.adherent else STATES[3] if one.faults else STATES[2]


def told(one: Judged) -> str:
    return ": ".join(filter(None, (state(one)[0], ", ".join(one.faults))))


@dataclass(frozen=True)
class RangeChart:
    """For a page, and as a PNG. `chosen` is ringed."""

    lines: Sequence[Line]
    scales: Sequence[float]
    chosen: Judged | None = None
    title: str = "Useful range of the scale"

    def x(self, scale: float) -> float:
        low, high = self.scales[0], self.scales[-1]
        return LEFT + (WIDTH - LEFT - RIGHT) * ((scale - low) / (high - low) if high > low else 0.5)

    def y(self, row: int) -> float:
        return TOP + ROW * (row + 0.5)

    # SVG

    def html(self) -> str:
        foot = TOP + ROW * len(self.lines)
        parts = [
            f'<path d="M{self.x(v):.1f} {TOP}V{foot}" stroke="{GRID}"/>'
            f'<text x="{self.x(v):.1f}" y="{foot + 16}" text-anchor="middle">{v:g}</text>'
            for v in self.scales
        ]
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="name" x="{middle:.0f}" y="{foot + 36}" text-anchor="middle">guidance scale</text>')
        parts += [self.row(number, line) for number, line in enumerate(self.lines)]
        svg = f'<svg viewBox="0 0 {WIDTH} {foot + FOOT}" role="group" aria-label="{self.title}">{"".join(parts)}</svg>'
        names = "".join(
            f'<span><i style="background:{colour};border:1px solid {charts.SLATE}"></i>{name}</span>'
            for name, colour in STATES
        )
        inside = f'<h3>{self.title}</h3>{svg}<div class="tip"></div><div class="legend">{names}</div>'
        return f'<figure class="chart">{inside}</figure>\n'

    def row(self, number: int, line: Line) -> str:
        y = self.y(number)
        name = f'<text class="name" x="{LEFT - 24}" y="{y + 4:.1f}" text-anchor="end">{html.escape(line.rule)}</text>'
        parts = [name, f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>']
        if line.range:
            first, last = (self.x(line.range[at].scale) for at in (0, -1))
            look = f'stroke="{BAR}" stroke-width="14" stroke-linecap="round"'
            parts.append(f'<path d="M{first:.1f} {y:.1f}H{last + 0.1:.1f}" {look}/>')
        return f"<g>{''.join([*parts, *(self.point(one, y) for one in line.cells)])}</g>"

    def point(self, one: Judged, y: float) -> str:
        x, (_, colour) = self.x(one.scale), state(one)
        words = html.escape(f"{one.rule}, scale {one.scale:g}\n{told(one)}\n{one.cell.guidance}", quote=True)
        cell = html.escape(one.cell.guidance, quote=True)
        place = f'cx="{x:.1f}" cy="{y:.1f}"'
        ring = ""
        if one == self.chosen:
            ring = f'<circle {place} r="10.5" fill="none" stroke="{charts.INK}" stroke-width="1.8"/>'
        return (
            f'{ring}<circle {place} r="5" fill="{colour}" stroke="{charts.SLATE}" tabindex="0" role="img" '
            f'aria-label="{words.replace(chr(10), ", ")}" data-tip="{words}" data-cell="{cell}"/>'
        )

    # PNG

    def png(self, path: Path) -> Path:
        figure = charts.canvas(8.4, 1.5 + 0.42 * len(self.lines))
        axes = figure.add_subplot()
        for number, line in enumerate(self.lines):
            self.paint(axes, number, line)
        charts.quiet(axes, self.title, "guidance scale")
        axes.set_xticks(list(self.scales), [f"{v:g}" for v in self.scales])
        axes.set_yticks(range(len(self.lines)), [line.rule for line in self.lines])
        axes.set_ylim(len(self.lines) - 0.5, -0.5)
        for name, colour in STATES:
            axes.plot([], [], "o", color=colour, markeredgecolor=charts.SLATE, label=name)
        charts.legend(figure, axes)
        return charts.save(figure, path)

    def paint(self, axes: Any, number: int, line: Line) -> None:
        if line.range:
            ends = [line.range[0].scale, line.range[-1].scale]
            axes.plot(ends, [number] * 2, "-", color=BAR, linewidth=11, solid_capstyle="round")
        for one in line.cells:
            look = {"color": state(one)[1], "markeredgecolor": charts.SLATE, "markersize": 7}
            axes.plot([one.scale], [number], "o", **look)
            if one == self.chosen:
                axes.plot([one.scale], [number], "o", markersize=14, markerfacecolor="none", color=charts.INK)
