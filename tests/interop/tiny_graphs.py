"""Graphs of the tiny models, one a family, and one with everything that a graph can hold."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tiny_models as tiny

from pellucid.pipeline.inspection import Graph, GraphOptions
from pellucid.pipeline.inspection_graph import inspect

FAMILIES = ("sd1", "xl", "dit", "ddpm", "inpaint", "lcm", "everything")


def extras(folder: Path) -> dict[str, str]:
    """A ControlNet, an image encoder and an IP-Adapter for the tiny model, as the words of the command line."""
    control, eyes, ip = tiny.extras(folder)
    return {"control": str(control), "eyes": str(eyes), "ip": str(ip)}


@cache
def plain(name: str) -> Graph:
    return inspect(tiny.saved(name)[1], GraphOptions(steps=5))


def of(name: str, extras: dict[str, str]) -> Graph:
    if name != "everything":
        return plain(name)
    asked = GraphOptions(controlnets=(extras["control"],) * 2, ip_adapters=(extras["ip"],), batch=4, size=(128, 160))
    return inspect(tiny.saved("sd1")[1], asked, image_encoder=extras["eyes"])
