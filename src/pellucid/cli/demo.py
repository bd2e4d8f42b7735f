"""`pellucid demo`: pictures from prompts by the model that Pellucid brings with it; without it, a ring of points."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The picture.")] = Path("demo.png"),
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", min=2, max=100, help="Steps of each picture; 20 when not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print what was found as JSON.")] = False,
) -> None:
    """Make pictures of twelve prompts on the CPU, and show one of them on its way from noise.

    Example: [bold]pellucid demo --steps 10 --out pictures.png[/]
    """
    from pellucid.cli import demo_scenes
    from pellucid.interop import source

    # Until the bundle is here. Then this branch goes, and with it demo_ring, draw_ring and test_demo_ring.
    if demo_scenes.MODEL not in source.bundles():
        from pellucid.cli import demo_ring

        demo_ring.show(out, steps or demo_ring.STEPS, as_json)
        return
    demo_scenes.show(out, steps or demo_scenes.STEPS, as_json)
