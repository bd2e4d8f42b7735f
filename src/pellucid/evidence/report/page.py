"""One self-contained page for every report: tables, charts, images by cell.

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
from pellucid.evidence.report.charts import Chart, Drawing
from pellucid.interop.atomic_files import put

# --- Tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Cells of text under columns; `note` says how to read them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")

    def html(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "\n".join(line(row, "td") for row in self.rows)
        note = f"<p class=note>{html.escape(self.note)}</p>" if self.note else ""
        title = html.escape(self.title)
        return f"<h2>{title}</h2>\n<table>\n{line(self.columns, 'th')}\n{body}\n</table>\n{note}"


# --- Style and script -----------------------------------------------------------------------------------------------

CHART_STYLE = """
.chart { position: relative; min-width: 0; }
.chart svg { width: 100%; height: auto; overflow: visible; display: block; }
.chart svg * { stroke-linejoin: round; stroke-linecap: butt; }
.chart circle { fill: transparent; cursor: default; } .chart circle[data-cell] { cursor: pointer; }
.chart circle:focus { outline: none; } .chart circle:focus, .chart circle.near { stroke: #1c2530; stroke-width: 1.8; }
.chart [data-entry] { cursor: pointer; } .chart [data-entry].off { opacity: .35; text-decoration: line-through; }
.chart .off[data-series] { display: none; }
.tip { position: absolute; pointer-events: none; background: #1c2530; color: #fff; font-size: .8rem; z-index: 3;
  padding: .35rem .55rem; border-radius: 4px; white-space: pre-wrap; max-width: 95%; line-height: 1.35;
  visibility: hidden; }
"""
_STYLE = (
    CHART_STYLE
    + """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2530; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } p { overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: .2rem 0; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e3e8ee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.note, figcaption { color: #51606f; font-size: .88rem; }
pre { background: #f5f7f9; padding: 1rem; overflow-x: auto; font-size: .85rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 0 1.5rem; }
.cells { display: flex; flex-wrap: wrap; gap: .35rem; margin: .5rem 0; }
.cells button { font: inherit; font-size: .82rem; padding: .1rem .5rem; border: 1px solid #c9d1da; border-radius: 3px;
  background: #fff; cursor: pointer; }
.cells button[aria-pressed=true] { background: #1c2530; color: #fff; }
.shown { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.shown figure { flex: 1 1 min(420px, 100%); margin: 0; } .scripted .shown figure[hidden] { display: none; }
.shown img { image-rendering: auto; width: 100%; }
"""
)

# Makes one chart answer; a click, or Enter, on a point shows the images of its cell, where the page has them.
CHART_SCRIPT = """
function enliven(chart) {
  const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip");
  if (!svg) return;
  const points = [...svg.querySelectorAll("circle[data-tip]")];
  let near = null;
  function point(to) {
    if (near) near.classList.remove("near");
    near = to;
    tip.style.visibility = to ? "visible" : "hidden";
    if (!to) { tip.textContent = ""; tip.style.left = 0; return; }
    to.classList.add("near");
    tip.style.left = 0;
    tip.textContent = to.dataset.tip;
    const spot = to.getBoundingClientRect(), frame = chart.getBoundingClientRect();
    const x = spot.left - frame.left + spot.width / 2, y = spot.top - frame.top;
    const left = Math.min(Math.max(0, x + 12), Math.max(0, frame.width - tip.offsetWidth));
    tip.style.left = left + "px";
    tip.style.top = (y > tip.offsetHeight + 10 ? y - tip.offsetHeight - 8 : y + 18) + "px";
  }
  svg.addEventListener("pointermove", event => {
    let best = null, least = 40;
    for (const p of points) {
      if (p.classList.contains("off")) continue;
      const box = p.getBoundingClientRect();
      const far = Math.hypot(box.left + box.width / 2 - event.clientX, box.top + box.height / 2 - event.clientY);
      if (far < least) { least = far; best = p; }
    }
    point(best);
  });
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("click", () => { if (near && near.dataset.cell && window.show) show(near.dataset.cell, true); });
  for (const p of points) {
    p.addEventListener("focus", () => point(p));
    p.addEventListener("keydown", event => {
      if (event.key === "Enter" && p.dataset.cell && window.show) show(p.dataset.cell, true);
    });
  }
  chart.querySelectorAll("[data-entry]").forEach(entry => {
    const toggle = () => {
      const off = entry.classList.toggle("off");
      entry.setAttribute("aria-pressed", !off);
      svg.querySelectorAll(`[data-series="${entry.dataset.entry}"]`).forEach(e => e.classList.toggle("off", off));
    };
    entry.setAttribute("aria-pressed", true);
    entry.addEventListener("click", toggle);
    entry.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") toggle(); });
  });
}
"""

# Images by cell: the cell that is chosen appears next to the one that was shown before.
_SCRIPT = """
document.documentElement.classList.add("scripted");
const shownAtOnce = 2;
function show(key, scroll) {
  for (const block of document.querySelectorAll(".pictures")) {
    const figure = [...block.querySelectorAll("figure")].find(f => f.dataset.cell === key);
    if (!figure) continue;
    const kept = (block.dataset.kept || "").split("\\n").filter(k => k && k !== key);
    kept.push(key);
    while (kept.length > shownAtOnce) kept.shift();
    block.dataset.kept = kept.join("\\n");
    for (const f of block.querySelectorAll("figure")) {
      f.hidden = !kept.includes(f.dataset.cell);
      f.style.order = kept.indexOf(f.dataset.cell);
    }
    for (const b of block.querySelectorAll("button")) b.setAttribute("aria-pressed", kept.includes(b.dataset.cell));
    if (scroll) block.scrollIntoView({behavior: "smooth", block: "start"});
  }
}
for (const block of document.querySelectorAll(".pictures")) {
  block.querySelectorAll("figure").forEach(f => { f.hidden = true; });
  block.querySelectorAll("button").forEach(b => b.addEventListener("click", () => show(b.dataset.cell, false)));
  block.dataset.first.split("\\n").filter(Boolean).forEach(key => show(key, false));
}
"""
_SCRIPT += CHART_SCRIPT + 'document.querySelectorAll(".chart").forEach(enliven);\n'


# --- Pages ----------------------------------------------------------------------------------------------------------

_SIDE = 128  # pixels of an image's longer side on the page, at most
_MOST = 16  # images of a cell
BUDGET = 16 * 2**20  # bytes of all images of one block, about; more make each smaller
_QUALITY = 88


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
        return head + (f"<p{kind}>{html.escape(self.words)}</p>\n" if self.words else "")


@dataclass(frozen=True)
class Code:
    """Text to copy as it is; folded away where `folded` names it."""

    words: str
    folded: str = ""

    def html(self) -> str:
        inside = f"<pre>{html.escape(self.words)}</pre>"
        return f"<details><summary>{html.escape(self.folded)}</summary>{inside}</details>\n" if self.folded else inside


@dataclass(frozen=True)
class ImageCell:
    """The images of one cell; `key` is what a point of a chart names in `href`."""

    key: str
    images: Sequence[Image.Image]
    note: str = ""


@dataclass(frozen=True)
class Images:
    """Images by cell: two cells at a time, chosen by buttons or by a click on a chart. `first` are shown at once."""

    title: str
    cells: Sequence[ImageCell]
    note: str = ""
    first: Sequence[str] = ()
    side: int = _SIDE
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
            data = base64.b64encode(_encoded(sheet(cell.images, side, self.columns))).decode()
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
        total = len(self.cells) * len(_encoded(sheet(largest.images, self.side, self.columns))) * 4 / 3
        return self.side if total <= BUDGET else max(24, math.floor(self.side * math.sqrt(BUDGET / total)))


def sheet(images: Sequence[Image.Image], side: int, columns: int) -> Image.Image:
    """Thumbnails in rows with a thin gap; small images are enlarged in whole steps, so that pixels stay pixels."""
    chosen = [thumb(one.convert("RGB"), side) for one in images[:_MOST]]
    width, height = chosen[0].size
    columns = min(columns, len(chosen))
    gap, rows = 2, math.ceil(len(chosen) / columns)
    canvas = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), "white")
    for i, one in enumerate(chosen):
        canvas.paste(one, (i % columns * (width + gap), i // columns * (height + gap)))
    return canvas


def thumb(image: Image.Image, side: int) -> Image.Image:
    longest = max(image.size)
    if longest <= side:
        times = side // longest
        return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    scale = side / longest
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)


def _encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY, subsampling=0)  # optimize=True fails on noise
    return buffer.getvalue()


@dataclass
class Page:
    """A title, a sentence under it, and parts in order. Small charts that follow each other stand side by side."""

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
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<h1>{title}</h1>\n{lead}{self.body()}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
        )

    def body(self) -> str:
        parts, together = [], False
        for part in self.parts:
            chart = isinstance(part, Chart | Drawing) and not part.wide
            if chart != together:
                parts.append('<div class="charts">\n' if chart else "</div>\n")
            together = chart
            parts.append(part.html())
        return "".join(parts) + ("</div>" if together else "")

    def write(self, path: Path) -> Path:
        """A file that is whole or absent."""
        put(path, self.html())
        return path
