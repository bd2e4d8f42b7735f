"""X/Y sheets: `steps=10,20,50 x guidance=3,5,7` → axes → cells → one labelled image."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.samplers import resolve
from pellucid.models.guidance import Guidance
from pellucid.pipeline import request
from pellucid.pipeline.images import Size, flatten
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.repeat import override

# --- Letters on images ----------------------------------------------------------------------------------------------

Face = Callable[[int], Any]  # a size in pixels → a font of PIL's
# Pillow carries one face, which has plain Latin only; for other scripts a face of the system is borrowed.
_BORROWED = (
    "DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf",
    "Arial Unicode.ttf", "NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "msyh.ttc", "PingFang.ttc",
)  # fmt: skip


@lru_cache(maxsize=1)
def faces() -> tuple[Face, ...]:
    """Pillow's own face, then those that this machine has."""
    files: list[str | Path] = list(_BORROWED)
    plotting = find_spec("matplotlib")
    if plotting is not None and plotting.origin:
        files.append(Path(plotting.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf")
    return (ImageFont.load_default, *(partial(ImageFont.truetype, file) for file in files if _readable(file)))


def _readable(file: str | Path) -> bool:
    try:
        ImageFont.truetype(file, 16)
    except OSError:
        return False
    return True


def face_for(text: str) -> Face:
    """The face that lacks the fewest of the text's characters; Pillow's own where it lacks none."""
    letters = {c for c in text if not c.isspace()}
    return min(faces(), key=lambda face: _lacking(face, letters))


def _lacking(face: Face, letters: set[str]) -> int:
    font = face(16)
    box = font.getmask("\uffff")
    absent = (box.size, bytes(box))
    return sum((mask.size, bytes(mask)) == absent for mask in map(font.getmask, letters))


def clean(text: str) -> str:
    """One line of printable characters."""
    return "".join(c for c in " ".join(text[:4000].split()) if c.isprintable())


def wrap(text: str, font: Any, width: float, most: int) -> list[str]:
    """Lines no wider than `width`, at most `most`; what is left out shows as an ellipsis."""
    lines: list[str] = []
    rest = clean(text)
    while rest and len(lines) < most:
        line = _fitting(rest, font, width)
        rest = rest[len(line) :].lstrip()
        lines.append(line.rstrip())
    if rest:
        last = lines[-1]
        while last and font.getlength(last + "…") > width:
            last = last[:-1]
        lines[-1] = last.rstrip(" ,.;:") + "…"
    return lines


def _fitting(text: str, font: Any, width: float) -> str:
    """The longest beginning of the text that fits, cut between words where one of them ends within it."""
    low, high = 1, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if font.getlength(text[:middle]) <= width else (low, middle - 1)
    blank = text.rfind(" ", 0, low + 1)
    return text[:low] if low == len(text) or blank <= 0 else text[:blank]


@dataclass(frozen=True)
class Block:
    """Lines of text in one size and colour."""

    lines: list[str]
    font: Any
    colour: str

    @property
    def pitch(self) -> int:
        return round(float(self.font.size) * 1.32)

    @property
    def height(self) -> int:
        return self.pitch * len(self.lines)

    @property
    def width(self) -> int:
        return math.ceil(max((self.font.getlength(line) for line in self.lines), default=0.0))

    def draw(self, on: ImageDraw.ImageDraw, x: float, y: float, anchor: str = "l") -> None:
        """The lines downward from y; x is their left end, their middle or their right end."""
        for i, line in enumerate(self.lines):
            on.text((x, y + self.pitch * (i + 0.5)), line, fill=self.colour, font=self.font, anchor=f"{anchor}m")


def upward(block: Block, paper: str) -> Image.Image:
    """The text turned to read from below."""
    flat = Image.new("RGB", (block.width + 2, block.height), paper)
    block.draw(ImageDraw.Draw(flat), 1, 0)
    return flat.transpose(Image.Transpose.ROTATE_90)


# --- X/Y sheets: `steps=10,20,50 x guidance=3,5,7` → axes → cells → one labelled image ------------------------------

MAX_CELLS = 100
_MAX_TEXT = 20_000  # characters of a request
SHEET_PIXELS = 48 * 2**20  # of the cells together; larger images are scaled down, so that any program opens the sheet
MIN_CELL = 128  # smaller images are enlarged, each pixel to a square
_INK, _FAINT, _LINE, _PAPER = "#1c2530", "#66727f", "#c9d1da", "#ffffff"
_EXAMPLE = "Example: steps=10,20,50 x guidance=3,5,7."

_NAME = re.compile(r"\s*([A-Za-z][\w.-]*)\s*=\s*")
_JOIN = re.compile(r"(?:\s+[xX]\s+|\s*×\s*)(?=[A-Za-z][\w.-]*\s*=)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'', re.DOTALL)
_RANGE = re.compile(r"(-?[\d.]*\d)\.\.(-?[\d.]*\d)(?:/([\d.]*\d))?")


@dataclass(frozen=True)
class Axis:
    """One setting and the values that it takes along a side of the sheet."""

    name: str
    values: tuple[Any, ...]

    def labels(self) -> list[str]:
        return [_value_label(value) for value in self.values]


def _value_label(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return (" ".join(str(value).split()) if value is not None else "") or "(none)"


# --- a request → axes ------------------------------------------------------------------------------------------


def parse_axes(text: str, allowed: Mapping[str, type]) -> tuple[Axis, ...]:
    """Reads one or two axes; the first runs to the right, the second down. `allowed` gives each name's type.

    Values are separated by commas, and quoted where they hold one; numbers may be ranges: `1..4`, `10..50/10`.
    """
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise PellucidError(rule("grid-of", f"text of at most {_MAX_TEXT} characters", type(text).__name__), "grid-of")
    axes: list[Axis] = []
    at = 0
    while at < len(text.rstrip()) or not axes:
        found = _NAME.match(text, at)
        if found is None:
            raise PellucidError(rule("axis", "a name, =, and values", text[at : at + 40], _EXAMPLE), "grid-of")
        name = _axis_name(found[1], allowed)
        words, at = _read_words(text, found.end(), name)
        values = [value for word, is_quoted in words for value in _read_value(name, word, is_quoted, allowed[name])]
        axes.append(_check_axis(Axis(name, tuple(values)), axes))
    return tuple(axes)


def _axis_name(name: str, allowed: Mapping[str, type]) -> str:
    key = name.replace("-", "_")
    for candidate in (name, key):
        if candidate in allowed:
            return candidate
    raise PellucidError(rule("axis", "a setting that can vary", name, nearest(name, allowed)), "grid-axis")


def _read_words(text: str, at: int, name: str) -> tuple[list[tuple[str, bool]], int]:
    """The comma-separated words of one axis, whether each was quoted, and where the next axis begins."""
    words: list[tuple[str, bool]] = []
    while True:
        while text[at : at + 1].isspace():
            at += 1
        if text[at : at + 1] in ("'", '"'):
            found = _QUOTED.match(text, at)
            if found is None:
                raise PellucidError(rule(f"text of {name}", "closed by its quote", text[at : at + 40]), "grid-quote")
            words.append((re.sub(r"\\(.)", r"\1", found[1] or found[2] or "", flags=re.DOTALL), True))
            at = found.end()
        else:
            join, comma = _JOIN.search(text, at), text.find(",", at)
            ends = [len(text), *([join.start()] if join else []), *([comma] if comma >= 0 else [])]
            words.append((text[at : min(ends)].strip(), False))
            at = min(ends)
        if words[-1] == ("", False):
            raise PellucidError(rule(f"values of {name}", "separated by one comma", text[at : at + 40]), "grid-of")
        join = _JOIN.match(text, at)
        tail = text[at:].lstrip()
        if join or not tail:
            return words, join.end() if join else len(text)
        if tail[0] != ",":
            raise PellucidError(rule(f"values of {name}", "separated by commas", tail[:40], _EXAMPLE), "grid-of")
        at = text.index(",", at) + 1


def _read_value(name: str, word: str, is_quoted: bool, kind: type) -> list[Any]:
    """A word as the axis' type: one value, or the values of a range."""
    if kind is str:
        return [word]
    span = _RANGE.fullmatch(word)
    if span and not is_quoted:
        return _read_range(name, span, kind)
    try:
        value = kind(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        must = "whole numbers" if kind is int else "numbers"
        raise PellucidError(rule(f"values of {name}", f"{must} or a range such as 10..50/10", word[:40]), "grid-value")
    return [value]


def _read_range(name: str, span: re.Match[str], kind: type) -> list[Any]:
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


def _check_axis(axis: Axis, before: Sequence[Axis]) -> Axis:
    """Refuses what makes no sheet: a third axis, one axis twice, one value twice, too many cells."""
    if len(before) == 2:
        advice = f"Make one sheet for each value of {axis.name}."
        raise PellucidError(rule("axes", "one or two", 3, advice), "grid-axes")
    if axis.name in (other.name for other in before):
        raise PellucidError(rule("axes", "two different settings", f"{axis.name} twice"), "grid-axes")
    twice = next((v for i, v in enumerate(axis.values) if v in axis.values[:i]), None)
    if twice is not None:
        raise PellucidError(
            rule(f"values of {axis.name}", "all different", f"{_value_label(twice)[:60]} twice"), "grid-value"
        )
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
class _Labels:
    """The words around the cells: both names, and a block a column and a row."""

    name_x: Block
    tops: list[Block]
    name_y: Block | None
    sides: list[Block]


@dataclass(frozen=True)
class _Frame:
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
        return _gap_of(self.em)

    @property
    def right(self) -> int:
        return self.left + self.columns * (self.cell[0] + self.gap) - self.gap

    @property
    def bottom(self) -> int:
        return self.top + self.rows * (self.cell[1] + self.gap) - self.gap

    def corner(self, column: int, row: int) -> Size:
        return self.left + column * (self.cell[0] + self.gap), self.top + row * (self.cell[1] + self.gap)


def _gap_of(em: int) -> int:
    return max(4, round(em * 0.4))


def _margin_of(em: int) -> int:
    return round(em * 1.4)


def draw_sheet(
    images: Sequence[Image.Image], axes: Sequence[Axis], title: str | None = None, footer: str | None = None
) -> Image.Image:
    """One image of all cells, row by row, with both axes' names and values; the footer says what they share."""
    across, down = _check_axes(axes, len(images))
    columns, rows = len(across.values), 1 if down is None else len(down.values)
    cell, fitted = _fit_cells(images, columns, rows)
    em = _letter_size(cell, columns, rows)
    said = [title or "", footer or "", *(text for axis in axes for text in (axis.name, *axis.labels()))]
    face = face_for("".join(clean(text) for text in said))
    plain, large, small = (face(round(em * part)) for part in (1.0, 1.3, 0.9))
    labels = _label_axes(across, down, cell, em, (plain, small))

    left, width = _lay_across(labels, cell, columns, em)
    margin = _margin_of(em)
    head = Block(wrap(title or "", large, width - 2 * margin, 3), large, _INK)
    foot = Block(wrap(footer or "", small, width - 2 * margin, 8), small, _FAINT)
    top = margin + (head.height + round(em * 0.8) if head.lines else 0)
    top += labels.name_x.pitch + em // 2 + max(block.height for block in labels.tops) + em // 3
    height = top + rows * (cell[1] + _gap_of(em)) - _gap_of(em) + (em + foot.height if foot.lines else 0) + margin
    frame = _Frame((width, height), cell, columns, rows, em, left, top)

    sheet = Image.new("RGB", frame.size, _PAPER)
    on = ImageDraw.Draw(sheet)
    head.draw(on, margin, margin)
    foot.draw(on, margin, frame.bottom + em)
    _draw_tops(on, frame, labels)
    _draw_sides(sheet, frame, labels)
    for i, image in enumerate(fitted):
        x, y = frame.corner(i % columns, i // columns)
        sheet.paste(image, (x + (cell[0] - image.width) // 2, y + (cell[1] - image.height) // 2))
    return sheet


def _label_axes(across: Axis, down: Axis | None, cell: Size, em: int, fonts: tuple[Any, Any]) -> _Labels:
    """Values wrapped to their column or row, what does not fit cut with an ellipsis."""
    plain, small = fonts
    wide, most = max(em * 11, round(cell[0] * 0.75)), max(1, int(cell[1] / (em * 1.32)))
    return _Labels(
        Block(wrap(across.name, small, len(across.values) * cell[0], 1), small, _FAINT),
        [Block(wrap(text, plain, cell[0], 4), plain, _INK) for text in across.labels()],
        None if down is None else Block(wrap(down.name, small, len(down.values) * cell[1], 1), small, _FAINT),
        [] if down is None else [Block(wrap(text, plain, wide, most), plain, _INK) for text in down.labels()],
    )


def _lay_across(labels: _Labels, cell: Size, columns: int, em: int) -> tuple[int, int]:
    """(where the first column begins, the sheet's width); a narrow grid stands in the middle of its words."""
    left = _margin_of(em)
    if labels.name_y is not None:
        left += labels.name_y.pitch + em // 6 + em // 2 + max(block.width for block in labels.sides) + em // 2
    grid = columns * (cell[0] + _gap_of(em)) - _gap_of(em)
    width = max(left + grid + _margin_of(em), em * 26)
    return left + (width - left - grid - _margin_of(em)) // 2, width


def _draw_tops(on: ImageDraw.ImageDraw, frame: _Frame, labels: _Labels) -> None:
    """The name of the first axis over a line, and its values over the columns."""
    floor = frame.top - frame.em // 3
    line = floor - max(block.height for block in labels.tops) - frame.em // 4
    labels.name_x.draw(on, (frame.left + frame.right) / 2, line - frame.em // 4 - labels.name_x.height, "m")
    on.line([(frame.left, line), (frame.right - 1, line)], _LINE, max(1, frame.em // 14))
    for i, block in enumerate(labels.tops):
        block.draw(on, frame.corner(i, 0)[0] + frame.cell[0] / 2, floor - block.height, "m")


def _draw_sides(sheet: Image.Image, frame: _Frame, labels: _Labels) -> None:
    """The name of the second axis, upward, beside a line, and its values beside the rows."""
    if labels.name_y is None:
        return
    on = ImageDraw.Draw(sheet)
    wall = frame.left - frame.em // 2
    line = wall - max(block.width for block in labels.sides) - frame.em // 2
    turned = upward(labels.name_y, _PAPER)
    sheet.paste(turned, (line - frame.em // 6 - turned.width, (frame.top + frame.bottom - turned.height) // 2))
    on.line([(line, frame.top), (line, frame.bottom - 1)], _LINE, max(1, frame.em // 14))
    for i, block in enumerate(labels.sides):
        block.draw(on, wall, frame.corner(0, i)[1] + (frame.cell[1] - block.height) / 2, "r")


def _check_axes(axes: Sequence[Axis], count: int) -> tuple[Axis, Axis | None]:
    if not 1 <= len(axes) <= 2 or not all(axis.values for axis in axes):
        raise PellucidError(rule("axes", "one or two, each with a value", len(axes)), "grid-axes")
    wanted = math.prod(len(axis.values) for axis in axes)
    if count != wanted:
        raise PellucidError(rule("images", f"{wanted}, one per cell", count), "grid-cells")
    return axes[0], axes[1] if len(axes) == 2 else None


def _fit_cells(images: Sequence[Image.Image], columns: int, rows: int) -> tuple[Size, list[Image.Image]]:
    """The size of a cell and the images for it: tiny ones enlarged by a whole factor, huge ones reduced."""
    width, height = max(i.width for i in images), max(i.height for i in images)
    times = math.ceil(MIN_CELL / max(width, height))
    shrink = min(1.0, math.sqrt(SHEET_PIXELS / (width * height * columns * rows * times**2)))
    if times == 1 and shrink == 1.0:
        return (width, height), [flatten(i) for i in images]
    rule_of = Image.Resampling.NEAREST if times > 1 else Image.Resampling.LANCZOS
    scale = times * shrink

    def sized(size: Size) -> Size:
        return max(1, int(size[0] * scale)), max(1, int(size[1] * scale))

    return sized((width, height)), [flatten(i).resize(sized(i.size), rule_of) for i in images]


def _letter_size(cell: Size, columns: int, rows: int) -> int:
    """Pixels of a letter: by the cell, and larger on a large sheet, which is looked at from farther away."""
    side = math.sqrt(cell[0] * cell[1])
    whole = max(columns * cell[0], rows * cell[1])
    return round(max(14.0, side * 0.05, min(whole / 90, side * 0.12)))


# --- Cells ----------------------------------------------------------------------------------------------------------

# What a cell may change, and as what it is read.
AXES: dict[str, type] = {
    "steps": int,
    "guidance": float,
    "sampler": str,
    "grid": str,
    "dialect": str,
    "seed": int,
    "strength": float,
    "clip_skip": int,
    "prompt": str,
    "negative": str,
    "label": str,
    "size": str,
    "noise": str,
    "lora": float,
    "control": float,
    "image_prompt": float,
    "denoising_start": float,
    "denoising_end": float,
}
_SCALES = {"lora": "loras", "control": "controls", "image_prompt": "image_prompts"}


def axes_of(text: str, sampler: str | None, names: Mapping[str, type] = AXES) -> tuple[Axis, ...]:
    """The axes of a sheet: the settings `names`, and numeric options of the sampler. Guidance may be words too."""
    own = {} if sampler is None else resolve(sampler)[0].options()
    numeric = {name: type(value) for name, value in own.items() if type(value) in (int, float)}
    try:
        return parse_axes(text, {**numeric, **names})
    except PellucidError as error:
        if error.code != "grid-value" or "guidance" not in text:
            raise
    axes = parse_axes(text, {**numeric, **names, "guidance": str})
    return tuple(_guidance_axis(axis) if axis.name == "guidance" else axis for axis in axes)


def _guidance_axis(axis: Axis) -> Axis:
    """Guidance in words, labelled with what is run: `guarded 9` is `7 + rescale`."""
    meant = [Guidance.parse(value).text() for value in axis.values]
    for at, text in enumerate(meant):
        if text in meant[:at]:
            first = axis.values[meant.index(text)]
            got = f"{first} and {axis.values[at]}, which are both {text}"
            raise PellucidError(rule("values of guidance", "all different", got), "grid-value")
    return replace(axis, values=tuple(meant))


def cell_fields(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the request of one cell: those of the sheet, with the cell's own settings."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "label":
            changes["label"] = request.read_label(value)
        elif name == "guidance":
            changes["guidance"] = Guidance.parse(value)
        elif name == "size":
            changes["width"], changes["height"] = request.read_size("size", value)
        elif name in _SCALES:
            changes[_SCALES[name]] = _scaled_adapters(fields, name, value)
        elif name in AXES:
            changes["negative_prompt" if name == "negative" else name] = value
        else:
            changes["options"] = {**changes.get("options", {}), name: value}
    return override(fields, changes)


def _scaled_adapters(fields: Mapping[str, Any], name: str, scale: float) -> list[Any]:
    """The adapters of the run at another scale."""
    held = fields.get(_SCALES[name])
    if not held:
        flag = f"--{name.replace('_', '-')}"
        raise PellucidError(f"axis {name} must come with {flag}, whose scale it is; got none.", "grid-axis")
    return [replace(one, scale=scale) for one in held]


def shared_settings(recipes: Sequence[Recipe]) -> str:
    """What all cells share, in a line."""
    lines = [
        (
            Path(recipe.model).name,
            f"seed {recipe.seed}",
            f"{recipe.size[0]}×{recipe.size[1]}" if recipe.size else "",
            str(recipe.sampler),
            str(recipe.grid.get("name", "")),
            f"{recipe.steps} steps",
            f"guidance {Guidance.parse(recipe.guidance).text()}" if "scale" in recipe.guidance else "",
        )
        for recipe in recipes
    ]
    shared = [texts[0] for texts in zip(*lines, strict=True) if len(set(texts)) == 1]
    return " · ".join(text for text in shared if text)
