"""`pellucid lab`: the labs in a terminal: listed, run, begun and checked."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import AsJson, Overwrite, flag, option
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from rich.console import Console

    from pellucid.labs.answers import Outcome
    from pellucid.labs.catalog import Lab
    from pellucid.labs.process import BlockResult

_EXAMPLES = (
    "Example: pellucid lab 03",
    "  pellucid lab 03 --starter answer.py",
    "  pellucid lab 03 --check answer.py",
    "  pellucid lab reading_a_scheduler --open",
)
EPILOG = "\n\n".join(_EXAMPLES)
_BLOCK = (
    "number",
    "text",
    "code",
    "printed",
    "seconds",
    "error",
)  # what --json says of a block, apart from its figures
_WIDTH = 100  # columns of words that are read
_MARKS = {"passed": "[green]✓[/]", "wrong": "[red]✗[/]", "error": "[red]![/]", "not written yet": "[yellow]·[/]"}


def command(
    lab: Annotated[
        str | None,
        typer.Argument(
            metavar="LAB", help="The lab's number or name; without one, all are listed.", show_default=False
        ),
    ] = None,
    out: Annotated[Path | None, option("FOLDER", "Folder for the figures (default: out/labs/LAB).")] = None,
    smoke: Annotated[bool, flag("--smoke", "Run it in its smallest size.")] = False,
    starter: Annotated[Path | None, option("FILE", "Write the file with gaps.")] = None,
    check: Annotated[Path | None, option("FILE", "Check an answer.")] = None,
    overwrite: Overwrite = False,
    in_studio: Annotated[bool, flag("--open", "Open it in the studio.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read and run a lab, a question about diffusion answered by code; then answer it yourself.

    Exit code 0: all is well; 1: a check or the lab failed; 2: bad input.
    """
    from pellucid.labs.catalog import find

    running = {"--out": out is not None, "--smoke": smoke}
    actions = {"--starter": starter is not None, "--check": check is not None, "--open": in_studio}
    _check_options(lab, running, actions, as_json)
    output.check_overwrite(overwrite, "a LAB that is run, or --starter", lab is not None and not (check or in_studio))
    if lab is None:
        _show_list(as_json)
        return
    found = find(lab)
    if starter is not None:
        goal = output.destination(starter, "--starter", (".py",), overwrite=overwrite)
        goal.write(partial(shutil.copyfile, found.starter))
        output.wrote(goal)
        print(f"Fill its gaps, then: pellucid lab {found.code} --check {starter}")
    elif check is not None:
        _check_answer(found, check, as_json)
    elif in_studio:
        from pellucid.cli import studio

        studio.page().serve([], port=0, open_browser=True, lab=found)
    else:
        figures = FigureFolder(out or Path("out") / "labs" / found.code, overwrite)
        _run_lab(found, figures if out is not None else figures.free(), smoke, as_json)


def _check_options(lab: str | None, running: dict[str, bool], actions: dict[str, bool], as_json: bool) -> None:
    """Refuses what would do nothing."""
    named = [name for name, is_given in actions.items() if is_given]
    how = [name for name, is_given in running.items() if is_given]
    if lab is None and (named or how):
        raise PellucidError(f"{', '.join(named + how)} must come with a LAB; got none.", "usage")
    if len(named) > 1:
        raise PellucidError(rule("what to do", "one of " + ", ".join(actions), ", ".join(named)), "usage")
    if named and how:
        raise PellucidError(f"{', '.join(how)} must be left out with {named[0]}: no lab is run.", "usage")
    if as_json and named and named != ["--check"]:
        raise PellucidError(f"--json must be left out with {named[0]}: there is nothing to print.", "usage")


# --- the list ----------------------------------------------------------------------------------------------------


def _facts(lab: Lab) -> dict[str, Any]:
    return {name: getattr(lab, name) for name in ("number", "slug", "title", "question", "section")}


def _show_list(as_json: bool) -> None:
    from pellucid.labs.catalog import LABS

    if as_json:
        output.print_json([_facts(lab) for lab in LABS])
    else:
        rows = [(f"[bold]{lab.code}[/]", lab.title, lab.question) for lab in LABS]
        screen = output.console()
        screen.print(output.table("lab", "title", "question", rows=rows))
        screen.print("Run one: pellucid lab 03. Begin an answer: --starter FILE; check it: --check FILE.")


# --- a run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FigureFolder:
    """The folder of a lab's figures: 05.png is the figure of block 5, and 05_2.png its second one."""

    folder: Path
    overwrite: bool

    def there(self) -> list[Path]:
        found = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return [path for path in found if re.fullmatch(r"\d\d(_\d+)?\.png", path.name)]

    def free(self) -> FigureFolder:
        """The same, or the next without figures: 03, 03-2, …"""
        numbers = (replace(self, folder=self.folder.with_name(f"{self.folder.name}-{i}")) for i in count(2))
        return next(one for one in chain([self], numbers) if one.overwrite or not one.there())

    def open(self) -> None:
        """Refuses, before the lab is run, figures that are there."""
        if self.folder.exists() and not self.folder.is_dir():
            raise PellucidError(rule("--out", "a folder", str(self.folder)), "file")
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.there():
            output.destination(path, "--out", overwrite=self.overwrite)

    def write(self, block: BlockResult) -> list[Path]:
        names = (f"{block.number:02d}{'' if i == 1 else f'_{i}'}.png" for i in range(1, len(block.figures) + 1))
        paths = [self.folder / name for name in names]
        for path, figure in zip(paths, block.figures, strict=True):
            output.Destination(path, "--out", self.overwrite).write(partial(Path.write_bytes, data=figure))
        return paths


def _run_lab(lab: Lab, figures: FigureFolder, smoke: bool, as_json: bool) -> None:
    from pellucid.labs import process, script

    if find_spec("matplotlib") is None:
        advice = "Install it: pip install 'pellucid[plot]'."
        raise PellucidError(rule("lab", "run with matplotlib", "none", advice), "lab-matplotlib")
    figures.open()
    screen, records = output.console(), []
    error = None
    with output.progress(lab.stem, len(script.read(lab.page)) if as_json else 0) as done:
        for shown in process.run_page(lab.page, smoke):
            paths = figures.write(shown)
            error = shown.error
            if as_json:
                record = {name: getattr(shown, name) for name in _BLOCK}
                records.append({**record, "figures": [str(path) for path in paths]})
                done()
            else:
                _show_block(screen, shown, paths)
    if as_json:
        output.print_json({**_facts(lab), "smoke": smoke, "blocks": records})
    if error is not None:
        raise typer.Exit(1)


def _show_block(screen: Console, block: BlockResult, paths: Sequence[Path]) -> None:
    from pellucid.labs import script

    if block.text:
        screen.print(script.plain(block.text), markup=False, width=min(screen.width, _WIDTH))
        screen.print()
    parts = [_highlighted(screen, block.code)] if block.code else []
    parts += [block.printed.rstrip("\n")] if block.printed.strip() else []
    for part in (*parts, *(f"figure: {path}" for path in paths)):
        output.say(part)
        output.say("")
    if block.error is not None:
        output.say(f"block {block.number} of {block.count} failed: {block.error}", style="red")


def _highlighted(screen: Console, code: str) -> Any:
    """Code set off by a bar, with colours on a terminal."""
    from rich.syntax import Syntax
    from rich.text import Text

    text = Syntax(code, "python", theme="ansi_dark").highlight(code) if screen.is_terminal else Text(code)
    return Text("\n").join(Text("│ ", style="dim") + line for line in text.split("\n", allow_blank=False))


# --- an answer ---------------------------------------------------------------------------------------------------


def _check_answer(lab: Lab, answer: Path, as_json: bool) -> None:
    from pellucid.labs.answers import check

    found = check(lab, answer)
    passed = all(one.verdict == "passed" for one in found)
    if as_json:
        names = ("name", "verdict", "sentence", "printed")
        checks = [{name: getattr(one, name) for name in names} for one in found]
        output.print_json({"lab": lab.code, "answer": str(answer), "passed": passed, "checks": checks})
    else:
        _show_outcomes(found)
    if not passed:
        raise typer.Exit(1)


def _show_outcomes(found: Sequence[Outcome]) -> None:
    from rich.markup import escape

    for one in found:
        output.console().print(f"{_MARKS[one.verdict]} {escape(one.name)}: {one.verdict}", soft_wrap=True)
        if one.sentence:
            output.say(f"    {one.sentence}")
        if one.printed.strip():
            output.say("    it printed: " + one.printed.strip().replace("\n", "\n    "))
    print(f"{sum(one.verdict == 'passed' for one in found)} of {len(found)} checks passed")
