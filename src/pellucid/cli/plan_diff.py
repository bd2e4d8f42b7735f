"""`pellucid plan --diff`: two plans side by side, the rows that differ, and what the difference does; or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from pellucid.cli import output
from pellucid.core.plan import Difference, Plan
from pellucid.core.schedule import Level
from pellucid.evidence.plan_diff import (
    POINTS,
    TOLERANCE,
    Comparison,
    change,
    compare,
    facts,
    kind_of,
    relative,
    size_of,
)

_RUNS = 12  # about as many as a comparison makes


def show(mine: Plan, theirs: Plan, as_json: bool) -> None:
    with output.progress("running both on the oracle", _RUNS) as seen:
        found = compare(mine, theirs, seen)
    if as_json:
        output.print_json(_to_dict(found, theirs))
        return
    screen = output.console()
    pairs = [(label, left, facts(theirs)[label]) for label, left in facts(mine).items()]
    sides = [(k, Text(a), Text(b, style="" if a == b else "yellow")) for k, a, b in pairs if a or b]
    screen.print(output.table("", "this plan", "the other", rows=sides))
    if mine.frame != theirs.frame:
        screen.print(
            f"The other plan is converted from frame {theirs.frame} to {mine.frame}; its results stay the same."
        )
    by_row = [d for d in found.differences if d.row >= 0]
    if by_row:
        screen.print("Rows that differ", style="bold")
        screen.print(_rows_table(by_row))
    elif mine.nfe == found.theirs.nfe:
        screen.print(f"The rows are equal (to {TOLERANCE:g}).")
    screen.print("Effect: the relative distance between the final results", style="bold")
    effects = [(e.kind, "" if e.rows is None else str(e.rows), size_of(e), Text(e.note)) for e in found.effects]
    screen.print(output.table("swapped in", "rows", "distance", "", right=("rows",), rows=effects))
    screen.print(
        f"{POINTS} points of a smooth mixture, exact denoiser, float64: each kind of difference alone, then all."
    )


def _to_dict(found: Comparison, theirs: Plan) -> dict[str, Any]:
    def value(v: Any) -> Any:
        return [v.alpha, v.sigma] if isinstance(v, Level) else v

    return {
        "mine": _without_rows(found.mine),
        "theirs": _without_rows(theirs),
        "compared_in_frame": found.mine.frame,
        "tolerance": TOLERANCE,
        "differences": [
            {"row": d.row, "field": d.field, "mine": value(d.mine), "theirs": value(d.theirs), "relative": relative(d)}
            for d in found.differences
        ],
        "effects": [vars(effect) for effect in found.effects],
    }


def _without_rows(plan: Plan) -> dict[str, Any]:
    """A plan without its rows."""
    return {key: value for key, value in {**plan.to_dict(), "nfe": plan.nfe}.items() if key != "rows"}


def _rows_table(differences: Sequence[Difference]) -> Table:
    """A row for each that differs; `old → new (relative size)` in the column of its kind."""
    kinds = [k for k in ("time passed", "level", "churn", "weights") if any(kind_of(d) == k for d in differences)]
    rows = []
    for index in sorted({d.row for d in differences}):
        here = [d for d in differences if d.row == index]
        rows.append((str(index), *(Text("\n".join(change(d) for d in here if kind_of(d) == k)) for k in kinds)))
    return output.table("#", *kinds, right=("#",), rows=rows)
