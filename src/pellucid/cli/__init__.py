"""The command line: it parses, calls a room and prints.

A command's module is imported when the command is called, so that `pellucid --help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from pellucid._version import __version__
from pellucid.cli.options import CANCELLED, HELP, Command, CommandGroup, CommandTree
from pellucid.core.errors import PellucidError, is_out_of_memory, system_error

# typer has click inside it since 0.16 and depended on it before: both name the class that all bad usage descends from.
UsageError: Any = typer.BadParameter.__mro__[1]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SMALLER = "Ask for a smaller size, or for fewer images at once."
_MAKE, _LOOK, _CHOOSE, _TRAIN, _LEARN = "Make images", "Look inside", "Choose with evidence", "Train", "See and learn"
_COMMANDS = {  # its place in the help, and what it does in a line
    "sample": (_MAKE, "Make images from a prompt, or repeat one from the recipe inside it."),
    "models": (_MAKE, "List the models on this machine."),
    "serve": (_MAKE, "Serve models over HTTP, as OpenAI's images API."),
    "rollout": (_MAKE, "Bring a new version of a model into a running server, step by step."),
    "bench-serve": (_MAKE, "Load a server with requests, and show its latencies."),
    "top": (_MAKE, "Watch a server: queues, step batches, latencies."),
    "plan": (_LOOK, "Show a sampler as its table: one row is one model call."),
    "samplers": (_LOOK, "List the samplers, or show one."),
    "schedules": (_LOOK, "Show how β, ᾱ, SNR, λ and σ run over training time."),
    "inspect": (_LOOK, "Draw a model's pipeline: components, shapes, bytes, milliseconds."),
    "memory": (_LOOK, "Predict and measure peak memory by stage; compare what each saving costs."),
    "trace": (_LOOK, "Show, compare and replay recorded runs."),
    "tune": (_CHOOSE, "Tune a plan of few steps against converged images."),
    "doctor": (_CHOOSE, "Find what is wrong with a model, a config, a run or its images."),
    "score": (_CHOOSE, "Score images: FID, KID, precision, recall, CLIP."),
    "study": (_CHOOSE, "Compare set-ups, with evidence."),
    "train": (_TRAIN, "Train from one config file."),
    "data": (_TRAIN, "Make training data, and look at it."),
    "studio": (_LEARN, "Open Pellucid as a page in the browser."),
    "lab": (_LEARN, "Read, run and answer a lab about diffusion."),
    "demo": (_LEARN, "Make images of twelve prompts on the CPU."),
}


class OneLineErrors(CommandGroup):
    """A group whose errors are one line on stderr and exit code 2, for every caller."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a terminal without λ gets a question mark, not a traceback
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="replace")
        try:
            code = super().main(*args, standalone_mode=False, **extra)
            sys.stdout.flush()  # what waits in its buffer may not fit the disk either
        except PellucidError as error:
            code = trouble(error.code, str(error))
        except UsageError as error:
            said = error.format_message().rstrip(".") or "Missing command"
            path = error.ctx.command_path if getattr(error, "ctx", None) else "pellucid"
            code = trouble("usage", f"{said}. See: {path} --help")
        except typer.Abort:  # Ctrl-C
            print("cancelled", file=sys.stderr)
            code = CANCELLED
        except Exception as error:
            if is_out_of_memory(error):
                code = trouble("out-of-memory", f"out of memory. {_SMALLER}")
            elif refused := system_error(error):
                unnamed = "standard output" if refused.errno in _FULL else "file"  # files are named by who writes them
                code = trouble("file", f"{refused.filename or unnamed}: {refused.strerror}")
            else:
                raise
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


class LazyCommands(Mapping[str, Any]):
    """The commands by name, each imported when it is used."""

    def __getitem__(self, name: str) -> Any:
        panel, _ = _COMMANDS[name]
        room = import_module(f"pellucid.cli.{name.replace('-', '_')}")
        alone = CommandTree(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        if hasattr(room, "app"):
            alone.add_typer(room.app, name=name, rich_help_panel=panel)
        else:
            epilog = getattr(room, "EPILOG", None)
            alone.command(name, context_settings=HELP, epilog=epilog, rich_help_panel=panel)(room.command)
        command = typer.main.get_command(alone)
        return command.commands[name] if hasattr(room, "app") else command

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class Pellucid(OneLineErrors):
    """The group of all commands; its help lists them without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LazyCommands()

    @contextlib.contextmanager
    def outlined(self) -> Iterator[None]:
        """Inside, commands have names and summaries alone."""
        self.commands = {
            name: Command(name, help=summary, rich_help_panel=panel) for name, (panel, summary) in _COMMANDS.items()
        }
        try:
            yield
        finally:
            self.commands = LazyCommands()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self.outlined():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self.outlined():
            return super().shell_complete(ctx, incomplete)


def trouble(code: str, message: str) -> int:
    """One line on stderr; the exit code of bad input."""
    print(f"error[{code}]: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pellucid {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Pellucid,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def pellucid(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Pellucid: the diffusion engine that you can see through.

    Example: [bold]pellucid sample scenes-128 "a large striped red star on a grey background"[/]
    """


def main() -> None:
    """The console script."""
    app(prog_name="pellucid")
