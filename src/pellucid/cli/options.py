"""What several commands have in common: options that mean the same, and groups of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from pellucid.pipeline.request import Flag

HELP = {"help_option_names": ["-h", "--help"]}
MODEL_HELP = "A folder, a single file, a hub id (owner/name) or a bundle."
_C = TypeVar("_C", bound=Callable[..., Any])
CANCELLED = 130  # the exit code that shells expect after Ctrl-C


def option(metavar: str, help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option with a value, which the help calls `metavar`; its name is that of the parameter where none is given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def flag(name: str, help: str, panel: str | None = None) -> Any:
    """An option without a value, which the help does not call a bool."""
    return typer.Option(name, metavar="", help=help, rich_help_panel=panel)


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


_COMPLETIONS: dict[str, Callable[[str], list[str]]] = {"samplers": sampler_names, "grids": grid_names}


def _typed(flag: Flag) -> Any:
    """The flag of a field, as a type for typer."""
    complete, help = _COMPLETIONS.get(flag.names_of), flag.help.replace("[", r"\[")
    more = {"show_default": False, "autocompletion": complete}
    found = option(flag.metavar, help, *flag.names, panel=flag.panel, **more)
    return Annotated[flag.kind if flag.kind is bool else flag.kind | None, found]


def with_flags(flags: Mapping[str, Flag]) -> Callable[[_C], _C]:
    """Gives a command these flags, in place of its `**words`, under the names of their fields."""

    def give(command: _C) -> _C:
        own = signature(command, eval_str=True)
        kept = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        for name, flag in flags.items():
            unset = False if flag.kind is bool else None
            kept.append(Parameter(name, Parameter.KEYWORD_ONLY, default=unset, annotation=_typed(flag)))
        command.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
        return command

    return give


def comma_words(text: str) -> tuple[str, ...]:
    """`ddim, heun`"""
    return tuple(word.strip() for word in text.split(","))


def numbers(option: str, text: str, kind: type[Any] = int) -> tuple[Any, ...]:
    """`5,10,20`"""
    try:
        return tuple(map(kind, comma_words(text)))
    except ValueError:
        must = f"{'whole ' if kind is int else ''}numbers with commas between them"
        raise PellucidError(rule(option, must, text), "usage") from None


def given_only(**values: Any) -> dict[str, Any]:
    """What was given on the command line; a config has the defaults of the rest."""
    return {name: value for name, value in values.items() if value is not None}


class _FlagsWithoutType:
    """The help names no type for options that take no value, those of typer included."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Command(_FlagsWithoutType, TyperCommand):
    pass


class CommandGroup(_FlagsWithoutType, TyperGroup):
    pass


class CommandTree(typer.Typer):
    """A command of commands of our class."""

    def command(self, *args: Any, **options: Any) -> Any:
        return super().command(*args, **{"cls": Command, **options})


def group(words: str) -> CommandTree:
    """A command of commands, which shows its help when it is called alone."""
    return CommandTree(cls=CommandGroup, help=words, context_settings=HELP, no_args_is_help=True)


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=model_names)]
Device = Annotated[str | None, option("NAME", "cuda or cpu (default: cuda if there is one).")]
Dtype = Annotated[str | None, option("NAME", "float32, bfloat16, float16 or fp8 (default: the model's own).")]
Size = Annotated[str | None, option("WxH", "Pixels, as 768x512 or 512 (default: the model's own).")]
Out = Annotated[Path | None, option("FOLDER", "Output folder (default: out/NAME of the config).")]
Plot = Annotated[Path | None, option("FILE", "Draw a chart into this file (.png, .svg, .pdf).", "--plot")]
Overwrite = Annotated[bool, flag("--overwrite", "Replace an existing file.")]
AsJson = Annotated[bool, flag("--json", "Print the result as JSON.")]
