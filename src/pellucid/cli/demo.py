"""`pellucid demo`: images from prompts by the model that Pellucid brings with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli.options import Overwrite


def command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The image.")] = Path("demo.png"),
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", min=2, max=100, help="Steps of each image; 20 when not given."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print what was found as JSON.")] = False,
) -> None:
    """Make images of twelve prompts on the CPU, and show one of them on its way from noise.

    Example: [bold]pellucid demo --steps 10 --out pictures.png[/]
    """
    from pellucid.cli import demo_scenes

    demo_scenes.show(out, steps or demo_scenes.STEPS, overwrite, as_json)
