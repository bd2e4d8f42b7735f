"""X/Y sheets: `steps=10,20,50 x guidance=3,5,7` → axes → cells → one labelled image."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any

from PIL import Image, ImageDraw

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.pipeline.images import Size, flatten
from pellucid.pipeline.lettering import Block, clean, face_for, upward, wrap

MAX_CELLS = 100
MAX_TEXT = 20_000  # characters of a request
MAX_PIXELS = 48 * 2**20  # of the cells together; larger images are scaled down, so that any program opens the sheet
MIN_CELL = 128  # smaller images are enlarged, each pixel to a square
INK, FAINT, LINE, PAPER = "#1c2530", "#66727f", "#c9d1da", "#ffffff"
EXAMPLE = "Example: steps=10,20,50 x guidance=3,5,7."

NAME = re.compile(r"\s*([A-Za-z][\w.-]*)\s*=\s*")
JOIN = re.compile(r"(?:\s+[xX]\s+|\s*×\s*)(?=[A-Za-z][\w.-]*\s*=)")
QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'', re.DOTALL)
RANGE = re.compile(r"(-?[\d.]*\d)\.\.(-?[\d.]*\d)(?:/([\d.]*\d))?")


@dataclass(frozen=True)
class Axis:
    """One setting and the values that it takes along a side of the sheet."""

    name: str
    values: tuple[Any, ...]

    def labels(self) -> list[str]:
        return [label(value) for value in self.values]


def label(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return (" ".join(str(value).split()) if value is not None else "") or "(none)"


# --- a request → axes ------------------------------------------------------------------------------------------


def parse_axes(text: str, allowed: Mapping[str, type]) -> tuple[Axis, ...]:
    """Reads one or two axes; the first runs to the right, the second down. `allowed` gives each name's type.

    Values are separated by commas, and quoted where they hold one; numbers may be ranges: `1..4`, `10..50/10`.
    """
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise PellucidError(rule("grid-of", f"text of at most {MAX_TEXT} characters", type(text).__name__), "grid-of")
    axes: list[Axis] = []
    at = 0
    while at < len(text.rstrip()) or not axes:
        found = NAME.match(text, at)
        if found is None:
            raise PellucidError(rule("axis", "a name, =, and values", text[at : at + 40], EXAMPLE), "grid-of")
        name = known(found[1], allowed)
        words, at = read_words(text, found.end(), name)
        values = [value for word, is_quoted in words for value in read_value(name, word, is_quoted, allowed[name])]
        axes.append(checked(Axis(name, tuple(values)), axes))
    return tuple(axes)


def known(name: str, allowed: Mapping[str, type]) -> str:
    key = name.replace("-", "_")
    for candidate in (name, key):
        if candidate in allowed:
            return candidate
    raise PellucidError(rule("axis", "a setting that can vary", name, nearest(name, allowed)), "grid-axis")


def read_words(text: str, at: int, name: str) -> tuple[list[tuple[str, bool]], int]:
    """The comma-separated words of one axis, whether each was quoted, and where the next axis begins."""
    words: list[tuple[str, bool]] = []
    while True:
        while text[at : at + 1].isspace():
            at += 1
        if text[at : at + 1] in ("'", '"'):
            found = QUOTED.match(text, at)
            if found is None:
                raise PellucidError(rule(f"text of {name}", "closed by its quote", text[at : at + 40]), "grid-quote")
            words.append((re.sub(r"\\(.)", r"\1", found[1] or found[2] or "", flags=re.DOTALL), True))
            at = found.end()
        else:
            join, comma = JOIN.search(text, at), text.find(",", at)
            ends = [len(text), *([join.start()] if join else []), *([comma] if comma >= 0 else [])]
            words.append((text[at : min(ends)].strip(), False))
            at = min(ends)
        if words[-1] == ("", False):
            raise PellucidError(rule(f"values of {name}", "separated by one comma", text[at : at + 40]), "grid-of")
        join = JOIN.match(text, at)
        tail = text[at:].lstrip()
        if join or not tail:
            return words, join.end() if join else len(text)
        if tail[0] != ",":
            raise PellucidError(rule(f"values of {name}", "separated by commas", tail[:40], EXAMPLE), "grid-of")
        at = text.index(",", at) + 1


def read_value(name: str, word: str, is_quoted: bool, kind: type) -> list[Any]:
    """A word as the axis' type: one value, or the values of a range."""
    if kind is str:
        return [word]
    span = RANGE.fullmatch(word)
    if span and not is_quoted:
        return read_range(name, span, kind)
    try:
        value = kind(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        must = "whole numbers" if kind is int else "numbers"
        raise PellucidError(rule(f"values of {name}", f"{must} or a range such as 10..50/10", word[:40]), "grid-value")
    return [value]


def read_range(name: str, span: re.Match[str], kind: type) -> list[Any]:
    """`first..last/step`, both ends included where the step meets them; it may run down."""
    try:
        first, last, step = (Decimal(part) for part in (span[1], span[2], span[3] or "1"))
    except ArithmeticError:
        first, last, step = Decimal(0), Decimal(0), Decimal(0)
    if step <= 0 or abs(last - first) >= MAX_CELLS * step:
        must = f"first..last/step with at most {MAX_CELLS} values"
        raise PellucidError(rule(f"range of {name}", must, span[0][:60]), "grid-range")
    if kind is int and any(part % 1 for part in (first, step)):
        raise PellucidError(rule(f"range of {name}", "of whole numbers", span[0][:60]), "grid-value")
    count = int(abs(last - first) // step) + 1
    return [kind(first + i * (step if last >= first else -step)) for i in range(count)]


def checked(axis: Axis, before: Sequence[Axis]) -> Axis:
    """Refuses what makes no sheet: a third axis, one axis twice, one value twice, too many cells."""
    if len(before) == 2:
        advice = f"Make one sheet for each value of {axis.name}."
        raise PellucidError(rule("axes", "one or two", 3, advice), "grid-axes")
    if axis.name in (other.name for other in before):
        raise PellucidError(rule("axes", "two different settings", f"{axis.name} twice"), "grid-axes")
    twice = next((v for i, v in enumerate(axis.values) if v in axis.values[:i]), None)
    if twice is not None:
        raise PellucidError(rule(f"values of {axis.name}", "all different", f"{label(twice)[:60]} twice"), "grid-value")
    count = math.prod(len(a.values) for a in (*before, axis))
    if count > MAX_CELLS:
        raise PellucidError(rule("cells", f"at most {MAX_CELLS}", count, "Leave out some values."), "grid-cells")
    return axis


def cells(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """The settings of each cell, row by row: the order in which `draw_sheet` takes the images."""
    names = [axis.name for axis in reversed(axes)]
    return [dict(zip(names, values, strict=True)) for values in product(*(a.values for a in reversed(axes)))]


# --- the image -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """The words around the cells: both names, and a block a column and a row."""

    name_x: Block
    tops: list[Block]
    name_y: Block | None
    sides: list[Block]


@dataclass(frozen=True)
class Frame:
    """Where things lie, in pixels: the first cell at (left, top), `em` a letter's height."""

    size: Size
    cell: Size
    columns: int
    rows: int
    em: int
    left: int
    top: int

    @property
    def gap(self) -> int:
        return gap_of(self.em)

    @property
    def right(self) -> int:
        return self.left + self.columns * (self.cell[0] + self.gap) - self.gap

    @property
    def bottom(self) -> int:
        return self.top + self.rows * (self.cell[1] + self.gap) - self.gap

    def corner(self, column: int, row: int) -> Size:
        return self.left + column * (self.cell[0] + self.gap), self.top + row * (self.cell[1] + self.gap)


def gap_of(em: int) -> int:
    return max(4, round(em * 0.4))


def margin_of(em: int) -> int:
    return round(em * 1.4)


def draw_sheet(
    images: Sequence[Image.Image], axes: Sequence[Axis], title: str | None = None, footer: str | None = None
) -> Image.Image:
    """One image of all cells, row by row, with both axes' names and values; the footer tells what they share."""
    across, down = check_axes(axes, len(images))
    columns, rows = len(across.values), 1 if down is None else len(down.values)
    cell, fitted = fit(images, columns, rows)
    em = letter_size(cell, columns, rows)
    said = [title or "", footer or "", *(text for axis in axes for text in (axis.name, *axis.labels()))]
    face = face_for("".join(clean(text) for text in said))
    plain, large, small = (face(round(em * part)) for part in (1.0, 1.3, 0.9))
    labels = label_axes(across, down, cell, em, (plain, small))

    left, width = lay_across(labels, cell, columns, em)
    margin = margin_of(em)
    head = Block(wrap(title or "", large, width - 2 * margin, 3), large, INK)
    foot = Block(wrap(footer or "", small, width - 2 * margin, 8), small, FAINT)
    top = margin + (head.height + round(em * 0.8) if head.lines else 0)
    top += labels.name_x.pitch + em // 2 + max(block.height for block in labels.tops) + em // 3
    height = top + rows * (cell[1] + gap_of(em)) - gap_of(em) + (em + foot.height if foot.lines else 0) + margin
    frame = Frame((width, height), cell, columns, rows, em, left, top)

    sheet = Image.new("RGB", frame.size, PAPER)
    on = ImageDraw.Draw(sheet)
    head.draw(on, margin, margin)
    foot.draw(on, margin, frame.bottom + em)
    draw_tops(on, frame, labels)
    draw_sides(sheet, frame, labels)
    for i, image in enumerate(fitted):
        x, y = frame.corner(i % columns, i // columns)
        sheet.paste(image, (x + (cell[0] - image.width) // 2, y + (cell[1] - image.height) // 2))
    return sheet


def label_axes(across: Axis, down: Axis | None, cell: Size, em: int, fonts: tuple[Any, Any]) -> Labels:
    """Values wrapped to their column or row, what does not fit cut with an ellipsis."""
    plain, small = fonts
    wide, most = max(em * 11, round(cell[0] * 0.75)), max(1, int(cell[1] / (em * 1.32)))
    return Labels(
        Block(wrap(across.name, small, len(across.values) * cell[0], 1), small, FAINT),
        [Block(wrap(text, plain, cell[0], 4), plain, INK) for text in across.labels()],
        None if down is None else Block(wrap(down.name, small, len(down.values) * cell[1], 1), small, FAINT),
        [] if down is None else [Block(wrap(text, plain, wide, most), plain, INK) for text in down.labels()],
    )


def lay_across(labels: Labels, cell: Size, columns: int, em: int) -> tuple[int, int]:
    """(where the first column begins, the sheet's width); a narrow grid stands in the middle of its words."""
    left = margin_of(em)
    if labels.name_y is not None:
        left += labels.name_y.pitch + em // 6 + em // 2 + max(block.width for block in labels.sides) + em // 2
    grid = columns * (cell[0] + gap_of(em)) - gap_of(em)
    width = max(left + grid + margin_of(em), em * 26)
    return left + (width - left - grid - margin_of(em)) // 2, width


def draw_tops(on: ImageDraw.ImageDraw, frame: Frame, labels: Labels) -> None:
    """The name of the first axis over a line, and its values over the columns."""
    floor = frame.top - frame.em // 3
    line = floor - max(block.height for block in labels.tops) - frame.em // 4
    labels.name_x.draw(on, (frame.left + frame.right) / 2, line - frame.em // 4 - labels.name_x.height, "m")
    on.line([(frame.left, line), (frame.right - 1, line)], LINE, max(1, frame.em // 14))
    for i, block in enumerate(labels.tops):
        block.draw(on, frame.corner(i, 0)[0] + frame.cell[0] / 2, floor - block.height, "m")


def draw_sides(sheet: Image.Image, frame: Frame, labels: Labels) -> None:
    """The name of the second axis, upward, beside a line, and its values beside the rows."""
    if labels.name_y is None:
        return
    on = ImageDraw.Draw(sheet)
    wall = frame.left - frame.em // 2
    line = wall - max(block.width for block in labels.sides) - frame.em // 2
    turned = upward(labels.name_y, PAPER)
    sheet.paste(turned, (line - frame.em // 6 - turned.width, (frame.top + frame.bottom - turned.height) // 2))
    on.line([(line, frame.top), (line, frame.bottom - 1)], LINE, max(1, frame.em // 14))
    for i, block in enumerate(labels.sides):
        block.draw(on, wall, frame.corner(0, i)[1] + (frame.cell[1] - block.height) / 2, "r")


def check_axes(axes: Sequence[Axis], count: int) -> tuple[Axis, Axis | None]:
    if not 1 <= len(axes) <= 2 or not all(axis.values for axis in axes):
        raise PellucidError(rule("axes", "one or two, each with a value", len(axes)), "grid-axes")
    wanted = math.prod(len(axis.values) for axis in axes)
    if count != wanted:
        raise PellucidError(rule("images", f"{wanted}, one per cell", count), "grid-cells")
    return axes[0], axes[1] if len(axes) == 2 else None


def fit(images: Sequence[Image.Image], columns: int, rows: int) -> tuple[Size, list[Image.Image]]:
    """The size of a cell and the images for it: tiny ones enlarged by a whole factor, huge ones reduced."""
    width, height = max(i.width for i in images), max(i.height for i in images)
    times = math.ceil(MIN_CELL / max(width, height))
    shrink = min(1.0, math.sqrt(MAX_PIXELS / (width * height * columns * rows * times**2)))
    if times == 1 and shrink == 1.0:
        return (width, height), [flatten(i) for i in images]
    rule_of = Image.Resampling.NEAREST if times > 1 else Image.Resampling.LANCZOS
    scale = times * shrink

    def sized(size: Size) -> Size:
        return max(1, int(size[0] * scale)), max(1, int(size[1] * scale))

    return sized((width, height)), [flatten(i).resize(sized(i.size), rule_of) for i in images]


def letter_size(cell: Size, columns: int, rows: int) -> int:
    """Pixels of a letter: by the cell, and larger on a large sheet, which is looked at from farther away."""
    side = math.sqrt(cell[0] * cell[1])
    whole = max(columns * cell[0], rows * cell[1])
    return round(max(14.0, side * 0.05, min(whole / 90, side * 0.12)))
