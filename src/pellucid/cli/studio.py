"""`pellucid studio`: Pellucid as a page in the browser, on this machine alone."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

import typer

from pellucid.cli.options import Device, flag, option
from pellucid.core.errors import PellucidError, rule


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]…", help="Models to offer first: folders, files, hub ids or bundles."),
    ] = None,
    port: Annotated[int, option("N", "Where it listens on 127.0.0.1; 0 takes a free port.")] = 7860,
    no_open: Annotated[bool, flag("--no-open", "Do not open the page in a browser.")] = False,
    device: Device = None,
) -> None:
    """Open the studio: generate, trace, compare, inspect, study and diagnose in the browser.

    Example: [bold]pellucid studio ./my-model --port 0[/]; without a model the ones that come with Pellucid are offered.
    """
    if not 0 <= port < 2**16:
        raise PellucidError(rule("--port", "from 0 to 65535", port), "usage")
    page().serve(models or [], port=port, open_browser=not no_open, device=device)


def page() -> ModuleType:
    """The studio's own room, where what it stands on is installed."""
    try:
        from pellucid.studio import app
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        advice = "Install it: pip install 'pellucid[studio]'."
        raise PellucidError(rule("studio", "run with gradio", "none", advice), "studio-gradio") from None
    return app
