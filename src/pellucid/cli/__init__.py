"""The command line: it parses, calls a room and prints.

Nothing heavy is imported here, so that `pellucid --help` answers at once; the commands import what they call.
"""

from __future__ import annotations

import contextlib
import os
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
from pellucid.core.errors import PellucidError

# typer has click within it since 0.16 and beside it before: both name the class that all bad usage descends from.
UsageError: Any = typer.BadParameter.__mro__[1]
CANCELLED = 130  # what shells expect after Ctrl-C
# torch's threads spin while they wait for each other. Two processes on the same cores then wait for threads that cannot
# run: 59 s for a picture that takes 0.5 (bench/waiting_threads.py). So they spin for a short while, and then sleep.
SPINNING, SPIN = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}, "1000"
HELP = {"help_option_names": ["-h", "--help"]}


class OneLine(TyperGroup):
    """A group whose errors are one line on stderr and exit code 2, whoever calls it."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a terminal without λ gets a question mark, not a traceback
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="replace")
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except PellucidError as error:
            code = trouble(error.code, str(error))
        except UsageError as error:
            said = error.format_message().rstrip(".") or "Missing command"
            code = trouble("usage", f"{said}. {where_to_look(error)}")
        except typer.Abort:  # Ctrl-C
            print("cancelled", file=sys.stderr)
            code = CANCELLED
        except OSError as error:
            code = trouble("file", f"{error.filename or 'file'}: {error.strerror or error}")
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
    if not SPINNING & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN
    app(prog_name="pellucid")
