"""One self-contained page for every report: tables, charts that can be hovered, images by cell.

    Page("Samplers", "4 samplers, 7 step counts").add(table, chart, images).write(folder / "report.html")

Nothing is fetched from anywhere; without a script the charts are there and all images are shown.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from PIL import Image

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.study.page_chart import Axis, Chart, Mark, Series
from pellucid.evidence.study.page_style import SCRIPT, STYLE
from pellucid.evidence.study.table import Table
from pellucid.interop.atomic_files import put

__all__ = ["Axis", "Cell", "Chart", "Code", "Images", "Mark", "Page", "Series", "Table", "Text"]

SIDE = 128  # pixels of an image's longer side on the page, at most
MOST = 16  # images of a cell
BUDGET = 16 * 2**20  # bytes of all images of one block, about; more make each smaller
QUALITY = 88


class Part(Protocol):
    """What a page is made of."""

    def html(self) -> str: ...


@dataclass(frozen=True)
class Text:
    """A paragraph, with a headline where it has one."""

    words: str
    title: str = ""
    kind: str = ""  # a class of the style sheet: "note" is small and grey

    def html(self) -> str:
        head = f"<h2>{html.escape(self.title)}</h2>\n" if self.title else ""
        kind = f" class={html.escape(self.kind, quote=True)}" if self.kind else ""
        return f"{head}<p{kind}>{html.escape(self.words)}</p>\n"


@dataclass(frozen=True)
class Code:
    """Text to copy as it is; folded away where `folded` names it."""

    words: str
    folded: str = ""

    def html(self) -> str:
        inside = f"<pre>{html.escape(self.words)}</pre>"
        return f"<details><summary>{html.escape(self.folded)}</summary>{inside}</details>\n" if self.folded else inside


@dataclass(frozen=True)
class Cell:
    """The images of one cell; `key` is what a point of a chart names in `href`."""

    key: str
    images: Sequence[Image.Image]
    note: str = ""


@dataclass(frozen=True)
class Images:
    """Images by cell: two cells at a time, chosen by buttons or by a click on a chart. `first` are shown at once."""

    title: str
    cells: Sequence[Cell]
    note: str = ""
    first: Sequence[str] = ()
    side: int = SIDE
    columns: int = 4

    def __post_init__(self) -> None:
        keys = [cell.key for cell in self.cells]
        if len(set(keys)) != len(keys) or any(not cell.images for cell in self.cells):
            raise PellucidError(rule("cells of images", "of different keys, none empty", keys), "pictures")

    def html(self) -> str:
        side = self.fitting_side()
        shown = [key for key in self.first if key in {cell.key for cell in self.cells}]
        shown = shown or [cell.key for cell in self.cells[:1]]
        buttons, figures = [], []
        for cell in self.cells:
            key = html.escape(cell.key, quote=True)
            words = html.escape(": ".join(filter(None, (cell.key, cell.note))), quote=True)
            data = base64.b64encode(encoded(sheet(cell.images, side, self.columns))).decode()
            image = f'<img loading="lazy" alt="{words}" src="data:image/jpeg;base64,{data}">'
            buttons.append(f'<button type="button" aria-pressed="false" data-cell="{key}">{key}</button>')
            figures.append(f'<figure data-cell="{key}">{image}<figcaption>{words}</figcaption></figure>')
        note = f"<p class=note>{html.escape(self.note)}</p>" if self.note else ""
        head = f"<h2>{html.escape(self.title)}</h2>\n{note}"
        first = html.escape("\n".join(shown), quote=True)
        chosen = f'<div class="cells">{"".join(buttons)}</div>\n<div class="shown">{"".join(figures)}</div>'
        return f'{head}\n<div class="pictures" data-first="{first}">{chosen}</div>\n'

    def fitting_side(self) -> int:
        """The side at which all cells together keep the budget: a JPEG of an image's area is weighed in one cell."""
        if not self.cells:
            return self.side
        largest = max(self.cells, key=lambda cell: len(cell.images))
        total = len(self.cells) * len(encoded(sheet(largest.images, self.side, self.columns))) * 4 / 3
        return self.side if total <= BUDGET else max(24, math.floor(self.side * math.sqrt(BUDGET / total)))


def sheet(images: Sequence[Image.Image], side: int, columns: int) -> Image.Image:
    """Thumbnails in rows with a thin gap; small images are enlarged in whole steps, so that pixels stay pixels."""
    chosen = [thumb(one.convert("RGB"), side) for one in images[:MOST]]
    width, height = chosen[0].size
    columns = min(columns, len(chosen))
    gap, rows = 2, math.ceil(len(chosen) / columns)
    whole = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), "white")
    for i, one in enumerate(chosen):
        whole.paste(one, (i % columns * (width + gap), i // columns * (height + gap)))
    return whole


def thumb(image: Image.Image, side: int) -> Image.Image:
    longest = max(image.size)
    if longest <= side:
        times = side // longest
        return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    scale = side / longest
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, subsampling=0)  # optimize=True fails on noise
    return buffer.getvalue()


@dataclass
class Page:
    """A title, a sentence under it, and parts in order. Charts that follow each other stand side by side."""

    title: str
    lead: str = ""
    parts: list[Part] = field(default_factory=list)

    def add(self, *parts: Part) -> Page:
        self.parts += parts
        return self

    def html(self) -> str:
        lead = f"<p class=note>{html.escape(self.lead)}</p>\n" if self.lead else ""
        title = html.escape(self.title)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            f"<h1>{title}</h1>\n{lead}{self.body()}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
        )

    def body(self) -> str:
        made, together = [], False
        for part in self.parts:
            chart = isinstance(part, Chart)
            if chart != together:
                made.append('<div class="charts">\n' if chart else "</div>\n")
            together = chart
            made.append(part.html())
        return "".join(made) + ("</div>" if together else "")

    def write(self, path: Path) -> Path:
        """A file that is whole or absent."""
        put(path, self.html())
        return path
