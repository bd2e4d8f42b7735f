"""Cards and the links between them, in inches: what a diagram is drawn with. Text is measured before it is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pellucid.evidence.study.charts import INK, PAPER, SLATE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
class Line:
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

    lines: tuple[Line, ...]
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
class Placed:
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

    def card(self, placed: Placed) -> None:
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

    def bar(self, placed: Placed, share: float) -> None:
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

    def line(self, line: Line, x: float, y: float) -> None:
        """A line that begins at x, its middle at y."""
        self.text(x, y, line.text, line.size, line.colour, bold=line.bold)
        after = x + text_width(line.text, line.size, line.bold) + line.gap
        self.text(after, y, line.after, 8.5, SLATE)

    def label(self, lines: Sequence[Line], x: float, y: float, *, side: str) -> None:
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
        self, left: float, bottom: float, right: float, top: float, colour: str, title: Line, *, below: bool = False
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
