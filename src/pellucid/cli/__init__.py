"""The command line: it parses, calls a room and prints.

Nothing heavy is imported here, so that `pellucid --help` answers at once; the commands import what they call.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pellucid import __version__
from pellucid.cli import (
    data,
    demo,
    doctor,
    inspect,
    lab,
    memory,
    models,
    plan,
    sample,
    samplers,
    schedules,
    score,
    studio,
    study,
    trace,
    train,
    tune,
)
from pellucid.core.errors import PellucidError, is_out_of_memory, system_error

# typer has click within it since 0.16 and beside it before: both name the class that all bad usage descends from.
UsageError: Any = typer.BadParameter.__mro__[1]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SMALLER = "Ask for a smaller size, or for fewer images at once."
CANCELLED = 130  # what shells expect after Ctrl-C
HELP = {"help_option_names": ["-h", "--help"]}


class OneLine(TyperGroup):
    """A group whose errors are one line on stderr and exit code 2, whoever calls it."""

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
            code = trouble("usage", f"{said}. {where_to_look(error)}")
        except typer.Abort:  # Ctrl-C
            print("cancelled", file=sys.stderr)
            code = CANCELLED
        except Exception as error:
            if is_out_of_memory(error):
                code = trouble("out-of-memory", f"memory must suffice for what was asked; it ran out. {SMALLER}")
            elif refused := system_error(error):
                unnamed = "standard output" if refused.errno in FULL else "file"  # files are named by who writes them
                code = trouble("file", f"{refused.filename or unnamed}: {refused.strerror}")
            else:
                raise
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def trouble(code: str, message: str) -> int:
    """One line on stderr; the exit code of bad input."""
    print(f"error[{code}]: {' '.join(message.split())}", file=sys.stderr)
    return 2


def where_to_look(error: Any) -> str:
    path = error.ctx.command_path if getattr(error, "ctx", None) else "pellucid"
    return f"See: {path} --help"


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"pellucid {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=OneLine,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def pellucid(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=show_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Pellucid: the diffusion engine that you can see through.

    Example: [bold]pellucid sample scenes-128 "a large striped red star on a grey background"[/]
    """


MAKE, LOOK, CHOOSE, TRAIN, LEARN = "Make images", "Look inside", "Choose with evidence", "Train", "See and learn"
for name, room, panel in (
    ("sample", sample, MAKE),
    ("models", models, MAKE),
    ("plan", plan, LOOK),
    ("samplers", samplers, LOOK),
    ("schedules", schedules, LOOK),
    ("inspect", inspect, LOOK),
    ("memory", memory, LOOK),
    ("tune", tune, CHOOSE),
    ("doctor", doctor, CHOOSE),
    ("score", score, CHOOSE),
    ("train", train, TRAIN),
    ("studio", studio, LEARN),
    ("lab", lab, LEARN),
    ("demo", demo, LEARN),
):
    epilog = getattr(room, "EPILOG", None)
    app.command(name, context_settings=HELP, epilog=epilog, rich_help_panel=panel)(room.command)
app.add_typer(trace.app, name="trace", rich_help_panel=LOOK)
app.add_typer(study.app, name="study", rich_help_panel=CHOOSE)
app.add_typer(data.app, name="data", rich_help_panel=TRAIN)


def main() -> None:
    """The console script."""
    app(prog_name="pellucid")
