"""Letters on images: a face that has them, lines that fit, blocks of text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

Face = Callable[[int], Any]  # a size in pixels → a font of PIL's
# Pillow carries one face, which has plain Latin only; for other scripts a face of the system is borrowed.
BORROWED = (
    "DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf",
    "Arial Unicode.ttf", "NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "msyh.ttc", "PingFang.ttc",
)  # fmt: skip


@lru_cache(maxsize=1)
def faces() -> tuple[Face, ...]:
    """Pillow's own face, then those that this machine has."""
    files: list[str | Path] = list(BORROWED)
    plotting = find_spec("matplotlib")
    if plotting is not None and plotting.origin:
        files.append(Path(plotting.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf")
    return (ImageFont.load_default, *(partial(ImageFont.truetype, file) for file in files if readable(file)))


def readable(file: str | Path) -> bool:
    try:
        ImageFont.truetype(file, 16)
    except OSError:
        return False
    return True


def face_for(text: str) -> Face:
    """The face that lacks the fewest of the text's characters; Pillow's own where it lacks none."""
    letters = {c for c in text if not c.isspace()}
    return min(faces(), key=lambda face: lacking(face, letters))


def lacking(face: Face, letters: set[str]) -> int:
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
        line = fitting(rest, font, width)
        rest = rest[len(line) :].lstrip()
        lines.append(line.rstrip())
    if rest:
        last = lines[-1]
        while last and font.getlength(last + "…") > width:
            last = last[:-1]
        lines[-1] = last.rstrip(" ,.;:") + "…"
    return lines


def fitting(text: str, font: Any, width: float) -> str:
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
