"""`pellucid lab`: the labs in a terminal: listed, run, begun and checked."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from rich.console import Console

    from pellucid.labs.catalog import Lab
    from pellucid.labs.checking import Outcome
    from pellucid.labs.running import Shown

EXAMPLES = (
    "Example: pellucid lab 03",
    "  pellucid lab 03 --starter answer.py",
    "  pellucid lab 03 --check answer.py",
    "  pellucid lab reading_a_scheduler --open",
)
EPILOG = "\n\n".join(EXAMPLES)
WIDTH = 100  # columns of words that are read
MARKS = {"passed": "[green]✓[/]", "wrong": "[red]✗[/]", "error": "[red]![/]", "not written yet": "[yellow]·[/]"}


def command(
    lab: Annotated[
        str | None,
        typer.Argument(
            metavar="LAB", help="Its number or name; all are listed when none is given.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where its figures go; out/labs/LAB when not given.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", metavar="", help="Run it in its smallest size.")] = False,
    starter: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the file with gaps; one that is there is kept.")
    ] = None,
    check: Annotated[Path | None, typer.Option(metavar="FILE", help="Check an answer.")] = None,
    in_studio: Annotated[bool, typer.Option("--open", metavar="", help="Open it in the studio.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print what came as JSON.")] = False,
) -> None:
    """Read and run a lab: a question about diffusion that is answered by code; then answer it yourself.

    Ends with 0 where all is well, with 1 where a check was not passed or a lab failed, and with 2 for bad input.
    """
    from pellucid.labs.catalog import find

    running = {"--out": out is not None, "--smoke": smoke}
    asked = {"--starter": starter is not None, "--check": check is not None, "--open": in_studio}
    check_options(lab, running, asked, as_json)
    if lab is None:
        show_list(as_json)
        return
    found = find(lab)
    if starter is not None:
        write_starter(found, starter)
    elif check is not None:
        check_answer(found, check, as_json)
    elif in_studio:
        from pellucid.cli import studio

        studio.page().serve([], port=0, open_browser=True, lab=found)
    else:
        run_lab(found, out or Path("out") / "labs" / found.code, smoke, as_json)


def check_options(lab: str | None, running: dict[str, bool], asked: dict[str, bool], as_json: bool) -> None:
    """Refuses what would do nothing."""
    named = [name for name, given in asked.items() if given]
    how = [name for name, given in running.items() if given]
    if lab is None and (named or how):
        raise PellucidError(f"{', '.join(named + how)} must come with a LAB; got none.", "usage")
    if len(named) > 1:
        raise PellucidError(rule("what to do", "one of " + ", ".join(asked), ", ".join(named)), "usage")
    if named and how:
        raise PellucidError(f"{', '.join(how)} must be left out with {named[0]}: no lab is run.", "usage")
    if as_json and named and named != ["--check"]:
        raise PellucidError(f"--json must be left out with {named[0]}: there is nothing to print.", "usage")


# --- the list ----------------------------------------------------------------------------------------------------


def facts(lab: Lab) -> dict[str, Any]:
    return {name: getattr(lab, name) for name in ("number", "slug", "title", "question", "section")}


def show_list(as_json: bool) -> None:
    from pellucid.labs.catalog import LABS

    if as_json:
        output.print_json([facts(lab) for lab in LABS])
        return
    made = output.table("lab", "title", "question")
    for lab in LABS:
        made.add_row(f"[bold]{lab.code}[/]", lab.title, lab.question)
    screen = output.console()
    screen.print(made)
    screen.print("Run one: pellucid lab 03. Begin an answer: --starter FILE; check it: --check FILE.")


# --- a run -------------------------------------------------------------------------------------------------------


def run_lab(lab: Lab, out: Path, smoke: bool, as_json: bool) -> None:
    from pellucid.labs import running, script

    require_matplotlib()
    if out.exists() and not out.is_dir():
        raise PellucidError(rule("--out", "a folder", str(out)), "file")
    out.mkdir(parents=True, exist_ok=True)
    screen, told = output.console(), []
    error = None
    with output.progress(lab.stem, len(script.read(lab.page)) if as_json else 0) as done:
        for shown in running.run(lab.page, smoke):
            paths = written(shown, out)
            error = shown.error
            if as_json:
                told.append(as_record(shown, paths))
                done()
            else:
                show_block(screen, shown, paths)
    if as_json:
        output.print_json({**facts(lab), "smoke": smoke, "blocks": told})
    if error is not None:
        raise typer.Exit(1)


def require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        advice = "Install it: pip install 'pellucid[plot]'."
        raise PellucidError(rule("lab", "run with matplotlib", "none", advice), "lab-matplotlib")


def written(shown: Shown, out: Path) -> list[Path]:
    """The figures of a block as files: 05.png, and 05_2.png where there are more."""
    paths = []
    for i, file in enumerate(shown.figures, 1):
        paths.append(out / f"{shown.number:02d}{'' if i == 1 else f'_{i}'}.png")
        paths[-1].write_bytes(file)
    return paths


def as_record(shown: Shown, paths: Sequence[Path]) -> dict[str, Any]:
    names = ("number", "text", "code", "printed", "seconds", "error")
    return {**{name: getattr(shown, name) for name in names}, "figures": [str(path) for path in paths]}


def show_block(screen: Console, shown: Shown, paths: Sequence[Path]) -> None:
    from rich.text import Text

    from pellucid.labs import words

    if shown.text:
        screen.print(Text(words.plain(shown.text)), width=min(screen.width, WIDTH))
        screen.print()
    if shown.code:
        screen.print(coloured(screen, shown.code), soft_wrap=True)
        screen.print()
    if shown.printed.strip():
        screen.print(Text(shown.printed.rstrip("\n")), soft_wrap=True)
        screen.print()
    for path in paths:
        screen.print(Text(f"figure: {path}"), soft_wrap=True)
        screen.print()
    if shown.error is not None:
        screen.print(Text(f"block {shown.number} of {shown.count} failed: {shown.error}", style="red"), soft_wrap=True)


def coloured(screen: Console, code: str) -> Any:
    """Code set off by a bar, with colours on a terminal."""
    from rich.syntax import Syntax
    from rich.text import Text

    text = Syntax(code, "python", theme="ansi_dark").highlight(code) if screen.is_terminal else Text(code)
    return Text("\n").join(Text("│ ", style="dim") + line for line in text.split("\n", allow_blank=False))


# --- an answer ---------------------------------------------------------------------------------------------------


def write_starter(lab: Lab, place: Path) -> None:
    output.destination(place, "--starter", (".py",))
    if place.exists():
        advice = "It may hold your answer: name another file."
        raise PellucidError(rule("--starter", "a new file", str(place), advice), "file-exists")
    shutil.copyfile(lab.starter, place)
    print(f"{place}: fill its gaps, then: pellucid lab {lab.code} --check {place}")


def check_answer(lab: Lab, answer: Path, as_json: bool) -> None:
    from pellucid.labs.checking import check

    found = check(lab, answer)
    passed = all(one.verdict == "passed" for one in found)
    if as_json:
        checks = [
            {"name": one.name, "verdict": one.verdict, "sentence": one.sentence, "printed": one.printed}
            for one in found
        ]
        output.print_json({"lab": lab.code, "answer": str(answer), "passed": passed, "checks": checks})
    else:
        show_outcomes(found)
    if not passed:
        raise typer.Exit(1)


def show_outcomes(found: Sequence[Outcome]) -> None:
    from rich.markup import escape
    from rich.text import Text

    screen = output.console()
    for one in found:
        screen.print(f"{MARKS[one.verdict]} {escape(one.name)}: {one.verdict}", soft_wrap=True)
        if one.sentence:
            screen.print(Text(f"    {one.sentence}"), soft_wrap=True)
        if one.printed.strip():
            screen.print(Text("    it printed: " + one.printed.strip().replace("\n", "\n    ")), soft_wrap=True)
    passed = sum(one.verdict == "passed" for one in found)
    screen.print(f"{passed} of {len(found)} checks passed")
