"""What several commands have in common: options that mean the same, and groups of commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pellucid.core.errors import PellucidError, rule

Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="cuda or cpu; cuda where there is one when not given.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace a file that is there.")]
Out = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where it writes; out/NAME of the config when not given.")
]


def model_names(incomplete: str) -> list[str]:
    """For the shell's completion: the models that come with Pellucid; files are the shell's own business."""
    from pellucid.interop.source import pipelines

    return [name for name in pipelines() if name.startswith(incomplete)]


def sampler_names(incomplete: str) -> list[str]:
    """For the shell's completion: the samplers."""
    from pellucid.core.samplers import REGISTRY

    return [name for name in REGISTRY if name.startswith(incomplete)]


def grid_names(incomplete: str) -> list[str]:
    """For the shell's completion: the grids."""
    from pellucid.core.grid import OVER_SIGMA, OVER_TIME

    return [name for name in (*OVER_TIME, *OVER_SIGMA) if name.startswith(incomplete)]


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """`5,10,20`"""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise PellucidError(rule(option, "whole numbers with commas between them", text), "usage") from None


def group(words: str) -> typer.Typer:
    """A command of commands, which shows its help when it is called alone."""
    return typer.Typer(help=words, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
