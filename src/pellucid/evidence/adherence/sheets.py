"""Many images in one file: tiles that can be cut out again, and contact sheets with captions and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.atomic_files import put
from pellucid.pipeline import images
from pellucid.pipeline.sheet import Block, clean, face_for, wrap

# --- Tiles ----------------------------------------------------------------------------------------------------------

_COLUMNS = 10


def save_png(image: Image.Image, path: Path) -> Path:
    """A PNG that is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, image.save)
    return path


def write_tiles(images: Sequence[Image.Image], path: Path) -> Path:
    width, height = images[0].size
    columns = min(_COLUMNS, len(images))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(images) / columns) * height), "white")
    for i, image in enumerate(images):
        sheet.paste(image, (i % columns * width, i // columns * height))
    return save_png(sheet, path)


def read_tiles(path: Path, count: int) -> list[Image.Image]:
    """The first `count` images of a file that `write` wrote with that many."""
    sheet = images.read(path, "images of a batch").convert("RGB")
    columns = min(_COLUMNS, count)
    rows = math.ceil(count / columns)
    if sheet.width % columns or sheet.height % rows:
        got = f"{sheet.width}×{sheet.height}"
        raise PellucidError(rule(path.name, f"{columns} × {rows} images of one size", got), "tiles")
    width, height = sheet.width // columns, sheet.height // rows
    corners = ((i % columns * width, i // columns * height) for i in range(count))
    return [sheet.crop((x, y, x + width, y + height)) for x, y in corners]


# --- Contact sheets -------------------------------------------------------------------------------------------------

_INK, _SLATE, _GREEN, _RED, _PAPER, _LINE = "#1c2530", "#51606f", "#188a3b", "#c5221f", "#ffffff", "#c9d1da"
_IMAGE = 144  # pixels of an image's side on the sheet
_CELL = 184  # of a cell, words included
_LETTERS, _CAPTION_LINES, _VERDICT_LINES = 12, 7, 4
_GAP, _MARGIN = 12, 20


@dataclass(frozen=True)
class Card:
    """One image with the words under it; `right` None is neither right nor wrong."""

    image: Image.Image
    caption: str
    verdict: str
    right: bool | None


def contact_sheet(cards: Sequence[Card], title: str, columns: int = 10) -> Image.Image:
    """Cards in rows, each row as high as its longest words."""
    said = "".join(clean(text) for card in cards for text in (card.caption, card.verdict)) + clean(title)
    face = face_for(said)
    font, large = face(_LETTERS), face(_LETTERS + 6)
    columns = min(columns, max(1, len(cards)))
    width = 2 * _MARGIN + columns * (_CELL + _GAP) - _GAP
    head = Block(wrap(title, large, width - 2 * _MARGIN, 3), large, _INK)
    laid = [_lay(card, font) for card in cards]
    rows = [laid[i : i + columns] for i in range(0, len(laid), columns)]
    heights = [_IMAGE + 6 + max(sum(block.height for block in words) for _, words in row) for row in rows]
    height = _MARGIN + head.height + _GAP + sum(h + _GAP for h in heights) + _MARGIN - _GAP
    sheet = Image.new("RGB", (width, height), _PAPER)
    head.draw(ImageDraw.Draw(sheet), _MARGIN, _MARGIN)
    y = _MARGIN + head.height + _GAP
    for row, tall in zip(rows, heights, strict=True):
        for i, (card, words) in enumerate(row):
            _draw_card(sheet, card, words, (_MARGIN + i * (_CELL + _GAP), y))
        y += tall + _GAP
    return sheet


def _lay(card: Card, font: Any) -> tuple[Card, list[Block]]:
    colour = _SLATE if card.right is None else _GREEN if card.right else _RED
    return card, [
        Block(wrap(card.caption, font, _CELL, _CAPTION_LINES), font, _INK),
        Block(wrap(card.verdict, font, _CELL, _VERDICT_LINES), font, colour),
    ]


def _draw_card(sheet: Image.Image, card: Card, words: Sequence[Block], corner: tuple[int, int]) -> None:
    x, y = corner
    on = ImageDraw.Draw(sheet)
    scale = _IMAGE / max(card.image.size)
    size = (max(1, math.floor(card.image.width * scale)), max(1, math.floor(card.image.height * scale)))
    rule_of = Image.Resampling.LANCZOS if scale < 4 else Image.Resampling.NEAREST
    sheet.paste(card.image.convert("RGB").resize(size, rule_of), (x, y))
    edge = _LINE if card.right is not False else _RED
    on.rectangle((x - 1, y - 1, x + size[0], y + size[1]), outline=edge, width=1 if card.right is not False else 2)
    y += _IMAGE + 6
    for block in words:
        block.draw(on, x, y)
        y += block.height
