"""A comparison of two plans for people: the plans, a line a row of what differs, and what it does; or as JSON."""

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
    Effect,
    change,
    compare,
    facts,
    kind_of,
    relative,
    size_of,
)

RUNS = 12  # about as many as a comparison makes


def show(mine: Plan, theirs: Plan, as_json: bool) -> None:
    with output.progress("running both on the oracle", RUNS) as seen:
        found = compare(mine, theirs, seen)
    if as_json:
        output.print_json(to_dict(found, theirs))
        return
    screen = output.console()
    screen.print(facts_table(mine, theirs))
    if mine.frame != theirs.frame:
        screen.print(
            f"The other plan is rewritten from the frame {theirs.frame} to {mine.frame}; its results stay the same."
        )
    by_row = [d for d in found.differences if d.row >= 0]
    if by_row:
        screen.print("Rows that differ", style="bold")
        screen.print(rows_table(by_row))
    elif mine.nfe == found.theirs.nfe:
        screen.print(f"The rows are the same (to {TOLERANCE:g}).")
    screen.print("What it does: the relative distance between the final results", style="bold")
    screen.print(effects_table(found.effects))
    screen.print(f"{POINTS} points of a smooth mixture through its exact denoiser, float64; each kind alone, then all.")


def to_dict(found: Comparison, theirs: Plan) -> dict[str, Any]:
    def value(v: Any) -> Any:
        return [v.alpha, v.sigma] if isinstance(v, Level) else v

    return {
        "mine": without_rows(found.mine),
        "theirs": without_rows(theirs),
        "compared_in_frame": found.mine.frame,
        "tolerance": TOLERANCE,
        "differences": [
            {"row": d.row, "field": d.field, "mine": value(d.mine), "theirs": value(d.theirs), "relative": relative(d)}
            for d in found.differences
        ],
        "effects": [vars(effect) for effect in found.effects],
    }


def without_rows(plan: Plan) -> dict[str, Any]:
    """A plan without its rows."""
    return {key: value for key, value in {**plan.to_dict(), "nfe": plan.nfe}.items() if key != "rows"}


def facts_table(mine: Plan, theirs: Plan) -> Table:
    """What the two plans are, side by side; what differs stands out."""
    made = output.table("", "this plan", "the other")
    theirs_facts = facts(theirs)
    for label, left in facts(mine).items():
        right = theirs_facts[label]
        if left or right:
            made.add_row(label, Text(left), Text(right, style="" if left == right else "yellow"))
    return made


def rows_table(differences: Sequence[Difference]) -> Table:
    """A row for each that differs; `old → new (relative size)` in the column of its kind."""
    kinds = [k for k in ("told time", "level", "churn", "weights") if any(kind_of(d) == k for d in differences)]
    made = output.table("#", *kinds, right=("#",))
    for index in sorted({d.row for d in differences}):
        here = [d for d in differences if d.row == index]
        made.add_row(str(index), *(Text("\n".join(change(d) for d in here if kind_of(d) == k)) for k in kinds))
    return made


def effects_table(found: Sequence[Effect]) -> Table:
    made = output.table("swapped in", "rows", "distance", "", right=("rows",))
    for effect in found:
        made.add_row(effect.kind, "" if effect.rows is None else str(effect.rows), size_of(effect), Text(effect.note))
    return made
