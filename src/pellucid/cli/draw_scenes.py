"""The image of the demonstration: images over their prompts, and below them the way of one of them from noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from pellucid.pipeline.sheet import Block, Face, face_for, wrap

if TYPE_CHECKING:
    from pellucid.cli.demo_scenes import DemoImage, Moment

NIGHT, LINE, STAR, DUST, RIGHT, WRONG = "#0b0f17", "#232c3b", "#eef2f8", "#8d99ad", "#4fd18b", "#ff6b6b"
COLUMNS, CELL, GAP = 4, 256, 28
SMALL, NARROW = 128, 12  # 8 small images are as wide as 4 large ones: 4·256 + 3·28 = 8·128 + 7·12
EDGE, HEAD, STRIP_HEAD, LABEL = 44, 78, 88, 34  # margins, and room for words above images
WIDTH = 2 * EDGE + COLUMNS * CELL + (COLUMNS - 1) * GAP
CAPTION, LINES, UNDER = 15, 4, 12  # a caption's letters, its most lines, and its distance from the image
TICK = 16


@dataclass(frozen=True)
class SheetText:
    """What the sheet says around its images."""

    title: str
    below: str
    followed: str


@dataclass(frozen=True)
class Sheet:
    """An image on its way, and the letters for it."""

    image: Image.Image
    face: Face

    def say(self, text: str, size: int, colour: str, at: tuple[int, int], anchor: str = "l") -> None:
        Block([text], self.face(size), colour).draw(ImageDraw.Draw(self.image), *at, anchor)

    def paste(self, image: Image.Image, side: int, at: tuple[int, int]) -> None:
        self.image.paste(image.convert("RGB").resize((side, side), Image.Resampling.LANCZOS), at)


def draw_sheet(found: Sequence[DemoImage], moments: Sequence[Moment], words: SheetText) -> Image.Image:
    """All of it, drawn."""
    face = face_for("σ" + "".join((words.title, words.below, words.followed, *(one.prompt for one in found))))
    captions = [Block(wrap(one.prompt, face(CAPTION), CELL - 24, LINES), face(CAPTION), STAR) for one in found]
    starts = range(0, len(found), COLUMNS)
    heights = [CELL + UNDER + max(caption.height for caption in captions[i : i + COLUMNS]) for i in starts]
    below = EDGE + HEAD + sum(heights) + GAP * len(heights)
    height = below + STRIP_HEAD + 2 * SMALL + LABEL + EDGE
    sheet = Sheet(Image.new("RGB", (WIDTH, height), NIGHT), face)
    draw_title(sheet, found, words)
    for i, (one, caption) in enumerate(zip(found, captions, strict=True)):
        row, column = divmod(i, COLUMNS)
        top = EDGE + HEAD + sum(heights[:row]) + GAP * row
        draw_cell(sheet, one, caption, (EDGE + column * (CELL + GAP), top))
    draw_strip(sheet, moments, words, below)
    return sheet.image


def draw_title(sheet: Sheet, found: Sequence[DemoImage], words: SheetText) -> None:
    right = sum(one.grade.right for one in found)
    sheet.say(words.title, 30, STAR, (EDGE, EDGE - 12))
    sheet.say(words.below, CAPTION, DUST, (EDGE, EDGE + 30))
    sheet.say(f"{right} of {len(found)} as asked", 20, RIGHT, (WIDTH - EDGE, EDGE - 4), "r")


def draw_cell(sheet: Sheet, one: DemoImage, caption: Block, at: tuple[int, int]) -> None:
    """An image, and under it a mark (all as asked, or not) beside its prompt."""
    x, y = at
    sheet.paste(one.image, CELL, at)
    drawn = tick_or_cross(one.grade.right)
    sheet.image.paste(drawn, (x, y + CELL + UNDER + (caption.pitch - TICK) // 2))
    caption.draw(ImageDraw.Draw(sheet.image), x + 24, y + CELL + UNDER)


def tick_or_cross(right: bool) -> Image.Image:
    """A tick or a cross, drawn four times as large for smooth edges."""
    side = 4 * TICK
    large = Image.new("RGB", (side, side), NIGHT)
    pen = ImageDraw.Draw(large)
    ways = [[(0.1, 0.55), (0.38, 0.82), (0.9, 0.2)]] if right else [[(0.2, 0.2), (0.8, 0.8)], [(0.2, 0.8), (0.8, 0.2)]]
    for way in ways:
        pen.line([(x * side, y * side) for x, y in way], RIGHT if right else WRONG, side // 7, joint="curve")
    return large.resize((TICK, TICK), Image.Resampling.LANCZOS)


def draw_strip(sheet: Sheet, moments: Sequence[Moment], words: SheetText, top: int) -> None:
    """Two lines of small images: x at falling noise, and what the network expects to come of it."""
    ImageDraw.Draw(sheet.image).line([(EDGE, top), (WIDTH - EDGE, top)], LINE, 2)
    sheet.say("From noise to the image", 22, STAR, (EDGE, top + 20))
    sheet.say(words.followed, CAPTION, DUST, (WIDTH - EDGE, top + 25), "r")
    first = top + STRIP_HEAD
    second = first + SMALL + LABEL
    for column, moment in enumerate(moments):
        x = EDGE + column * (SMALL + NARROW)
        sheet.paste(moment.x, SMALL, (x, first))
        sheet.paste(moment.x0, SMALL, (x, second))
        sheet.say(f"{'' if column else 'x at '}σ = {moment.sigma:.2f}", 14, DUST, (x, first - 24))
    sheet.say("x0, as the network expects it at each of these steps", 14, DUST, (EDGE, second - 24))
