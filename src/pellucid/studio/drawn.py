"""Drawings of matplotlib on the page: crisp at any width, whole or in their full size."""

from __future__ import annotations

import base64
import io
import threading
from itertools import count
from typing import TYPE_CHECKING

from pellucid.studio import html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 0.58  # of the full size; smaller, no word of a drawing can be read, and it is scrolled instead
INCH = 84  # pixels of an inch in full size
ONE = threading.Lock()  # matplotlib writes one file at a time; a drawing takes part of a second
NUMBERS = count(1)


def source(figure: Figure) -> str:
    """A drawing as an address that holds it."""
    held = io.BytesIO()
    with ONE:
        figure.savefig(held, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(held.getvalue()).decode()


def shown(figure: Figure, alt: str) -> str:
    """As wide as the page, or, by a switch, so large that all of it can be read."""
    full = round(figure.get_figwidth() * INCH)
    mark = f"drawn-{next(NUMBERS)}"
    style = (
        f"<style>#{mark} img {{ width: 100%; min-width: {round(LEAST * full)}px; max-width: {full}px; }} "
        f"#{mark}:has(input:checked) img {{ width: {full}px; min-width: {full}px; }}</style>"
    )
    image = f'<img alt="{html.text(alt)}" src="{source(figure)}">'
    switch = '<label class="note"><input type="checkbox" style="border: 1px solid #8894a3"> full size</label>'
    return f'{style}<div id="{mark}">{switch}<div class="wide" tabindex="0">{image}</div></div>'
