"""What a page says to a person: errors in one line, numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import gradio as gr

from pellucid.core.errors import PellucidError, is_out_of_memory
from pellucid.core.loop import Cancelled
from pellucid.studio.html import status

Handler = Callable[..., Iterator[tuple[Any, Any]]]

GUARDED = "Caps the scale at 7 and rescales: above 7 colours may burn, shapes repeat and images grow alike."


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
        raise gr.Error(f"A defect of Pellucid: {type(error).__name__}: {error}", duration=None) from error


def settled(handler: Handler) -> Handler:
    """Of a handler that yields its status and one thing more: errors plainly, and a last status if it did not end."""

    @wraps(handler)
    def whole(*given: Any) -> Iterator[tuple[Any, Any]]:
        try:
            with plainly():
                yield from handler(*given)
        except Cancelled:
            yield status("cancelled"), gr.skip()
        except gr.Error:
            yield status("ready"), gr.skip()
            raise

    return whole


def seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s" if value < 60 else f"{value / 60:.1f} min"


def number(value: float) -> str:
    """Four digits, as a person would write them."""
    return f"{value:.4g}"
