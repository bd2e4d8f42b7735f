"""Pieces of the page as HTML: images, tables, drawings, a status; errors in one line, numbers in readable form."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any

import gradio as gr
from PIL import Image
from torch import Tensor

from pellucid.core.errors import Cancelled, PellucidError, is_out_of_memory
from pellucid.evidence.report.charts import LOCK
from pellucid.evidence.report.page import CHART_SCRIPT, CHART_STYLE
from pellucid.pipeline.images import to_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --- Pieces ---------------------------------------------------------------------------------------------------------

_SIDE = 512  # pixels of an image's longer side on the page, about; smaller ones are enlarged in whole steps

CSS = """
.gradio-container { max-width: 1360px !important; width: 100% !important; margin: 0 auto !important; }
.gradio-container > * { width: 100%; }
.plc { font-variant-numeric: tabular-nums; }
.plc figure { margin: 0; }
.plc figcaption { font-size: 13px; opacity: .8; padding-top: 4px; min-height: 20px; }
.plc .frame { aspect-ratio: 1; width: 100%; max-width: 512px; margin: 0 auto; display: grid; place-items: center;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); border-radius: 8px;
  overflow: hidden; color: var(--body-text-color-subdued); }
.plc .frame img { width: 100%; height: 100%; object-fit: contain; image-rendering: pixelated; }
.plc .four { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.plc .two { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 16px; }
.plc .bar { height: 6px; border-radius: 3px; background: var(--border-color-primary); overflow: hidden; margin: 6px 0; }
.plc .bar i { display: block; height: 100%; background: var(--color-accent); }
.plc .wide { overflow-x: auto; }
.plc table { border-collapse: collapse; width: 100%; font-size: 14px; border: 0 !important; margin: 0; }
.plc th, .plc td { text-align: left; padding: 4px 12px 4px 0 !important; border: 0 !important; vertical-align: top;
  border-bottom: 1px solid var(--border-color-primary) !important; }
.plc tr, .plc thead, .plc tbody { border: 0 !important; }
.plc td.n, .plc th.n { text-align: right; white-space: nowrap; }
.plc tr.here { background: var(--color-accent-soft); }
.plc .note { opacity: .75; font-size: 14px; }
.plc .chart { background: #fff; border-radius: 8px; padding: 8px; color: #1c2530; }
.plc h2, .plc h3 { font-size: 15px; margin: 4px 0; }
.plc { @@ }
#labs-page img { max-width: 100%; background: #fff; border-radius: 6px; }
#labs-page pre { overflow-x: auto; max-width: 100%; }
#labs-page .katex-display { overflow-x: auto; overflow-y: hidden; padding: 2px 0; }
#labs-page li, #labs-page p { overflow-wrap: anywhere; }
""".replace("@@", CHART_STYLE)

# Charts come and go while people look: each is made to answer the pointer when it appears.
HEAD = """<script>@@
new MutationObserver(() => document.querySelectorAll(".plc .chart:not([data-live])").forEach(chart => {
  chart.dataset.live = "yes";
  enliven(chart);
})).observe(document, {childList: true, subtree: true});
</script>""".replace("@@", CHART_SCRIPT)


def block(inside: str) -> str:
    return f'<div class="plc">{inside}</div>'


def text(words: object) -> str:
    return html.escape(str(words))


def source(image: Image.Image, side: int = _SIDE) -> str:
    """An image as an address that holds it, enlarged in whole steps to `side`. Noise does not compress: 0 for it."""
    times = max(1, side // max(image.size))
    large = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    held = io.BytesIO()
    large.convert("RGB").save(held, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def frame(image: Image.Image | None, alt: str, words: str = "", empty: str = "") -> str:
    """A square that keeps its place whether there is an image or not."""
    inside = f"<span>{text(empty)}</span>" if image is None else f'<img alt="{text(alt)}" src="{source(image)}">'
    return f'<figure><div class="frame">{inside}</div><figcaption>{text(words)}</figcaption></figure>'


def of_unit(images: Tensor) -> Image.Image:
    """The first of (N, 3, H, W) in [0, 1]."""
    return to_images(images[:1].float() * 2 - 1)[0]


def _bar(part: float) -> str:
    return f'<div class="bar" role="progressbar" aria-valuenow="{part:.0%}"><i style="width:{part:.1%}"></i></div>'


def status(said: str, part: float = 0.0) -> str:
    """How far something is, as a bar and in words."""
    return block(_bar(part) + f'<span role="status">{text(said)}</span>')


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1, marks: Sequence[str] = ()) -> str:
    """Rows of text; columns from the `words`-th on hold numbers. `marks` are the rows' classes, if they have any."""

    def line(cells: Sequence[object], tag: str) -> str:
        shown = (text(cell).replace("\n", "<br>") for cell in cells)
        return "".join(f"<{tag}{' class=n' if i >= words else ''}>{cell}</{tag}>" for i, cell in enumerate(shown))

    kinds = [f' class="{mark}"' if mark else "" for mark in marks] or [""] * len(rows)
    body = "".join(f"<tr{kind}>{line(row, 'td')}</tr>" for kind, row in zip(kinds, rows, strict=True))
    return f'<div class="wide"><table><thead><tr>{line(heads, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


# --- Drawings -------------------------------------------------------------------------------------------------------

_LEAST = 0.58  # of the full size; smaller, no word of a drawing can be read, and it is scrolled instead
_INCH = 84  # pixels of an inch in full size
_NUMBERS = count(1)


def _svg_source(figure: Figure) -> str:
    """A drawing as an address that holds it."""
    held = io.BytesIO()
    with LOCK:
        figure.savefig(held, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(held.getvalue()).decode()


def figure(figure: Figure, alt: str) -> str:
    """As wide as the page or, if a box is ticked, in full size."""
    full = round(figure.get_figwidth() * _INCH)
    mark = f"drawn-{next(_NUMBERS)}"
    style = (
        f"<style>#{mark} img {{ width: 100%; min-width: {round(_LEAST * full)}px; max-width: {full}px; }} "
        f"#{mark}:has(input:checked) img {{ width: {full}px; min-width: {full}px; }}</style>"
    )
    image = f'<img alt="{text(alt)}" src="{_svg_source(figure)}">'
    switch = '<label class="note"><input type="checkbox" style="border: 1px solid #8894a3"> full size</label>'
    return f'{style}<div id="{mark}">{switch}<div class="wide" tabindex="0">{image}</div></div>'


# --- Errors and numbers ---------------------------------------------------------------------------------------------

Handler = Callable[..., Iterator[tuple[Any, ...]]]

GUARDED = "Caps the scale at 7 and rescales: above 7 colours may burn, shapes repeat and images look alike."


@contextmanager
def plainly() -> Iterator[None]:
    """Errors become a message on the page, in one line and without a traceback."""
    try:
        yield
    except (gr.Error, Cancelled):
        raise
    except PellucidError as error:
        raise gr.Error(str(error), title="This cannot be done", duration=None, print_exception=False) from None
    except Exception as error:  # a defect: said as such, and printed where the studio runs
        if is_out_of_memory(error):
            raise gr.Error("Not enough memory. Ask for fewer or smaller images.", duration=None) from None
        raise gr.Error(f"This is a bug in Pellucid: {type(error).__name__}: {error}", duration=None) from error


def settled(count: int = 2, place: int = 0) -> Callable[[Handler], Handler]:
    """For a handler of `count` outputs, the one at `place` being its status: shows errors, and resets the status."""

    def alone(said: str) -> tuple[Any, ...]:
        return tuple(status(said) if i == place else gr.skip() for i in range(count))

    def wrap(handler: Handler) -> Handler:
        @wraps(handler)
        def whole(*given: Any) -> Iterator[tuple[Any, ...]]:
            try:
                with plainly():
                    yield from handler(*given)
            except Cancelled:
                yield alone("cancelled")
            except gr.Error:
                yield alone("ready")
                raise

        return whole

    return wrap


def done(result: Any) -> str:
    """The status of a result with its `seconds` and `notes`."""
    return status(" · ".join([f"done in {seconds(result.seconds)}", *result.notes]), 1.0)


def seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s" if value < 60 else f"{value / 60:.1f} min"


def number(value: float) -> str:
    """Four digits, as a person would write them."""
    return f"{value:.4g}"
