"""`pellucid plan`: a sampler as a table that a person can read, save, draw and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from pellucid.cli import output, plan_words
from pellucid.cli.options import AsJson, Overwrite, Plot, option, sampler_names, with_flags
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import REGISTERS, Plan, Row, Weights, kept
from pellucid.core.samplers import REGISTRY
from pellucid.core.schedule import Level
from pellucid.core.wording import named, short, time_text
from pellucid.pipeline.request import Request, flags_of

_FRAMES = {"vp": "alpha² + sigma² = 1", "ve": "alpha = 1", "flow": "alpha + sigma = 1"}
_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01)  # standard deviations of what an image is made of
_FIELDS = {"grid": "grid", "option": "options"}  # of a request, which are options here too
_COLUMNS = ("#", "time", "alpha", "sigma", "λ")


@with_flags({name: flags_of(Request)[field]._replace(panel=None) for name, field in _FIELDS.items()})
def command(
    ctx: typer.Context,
    sampler: Annotated[
        str,
        typer.Argument(
            metavar="SAMPLER",
            help="A sampler by any of its names, or a plan file (.json).",
            autocompletion=sampler_names,
        ),
    ],
    schedule: Annotated[str | None, option("NAME", "Noise schedule (default: scaled_linear).")] = None,
    target: Annotated[
        str | None, option("NAME", "What the network predicts (default: the schedule's usual one).")
    ] = None,
    steps: Annotated[int | None, option("N", "Steps (default: 20).")] = None,
    dialect: Annotated[
        str | None, option("DIALECT", "exact, or the conventions of diffusers, k-diffusion or comfyui.", "--as")
    ] = None,
    final: Annotated[str | None, option("END", "Where the last step ends: zero or sigma_min.")] = None,
    as_json: AsJson = False,
    plot: Plot = None,
    diff: Annotated[
        str | None, option("WORDS", "Compare with another plan, given in these options; the rest is inherited.")
    ] = None,
    save: Annotated[Path | None, option("FILE", "Write the plan into this JSON file.")] = None,
    overwrite: Overwrite = False,
    **request_words: Any,
) -> None:
    """Show a sampler as its table: one row is one model call, then linear updates.

    Example: [bold]pellucid plan dpmpp_2m --grid karras --steps 10 --diff "--as diffusers"[/]
    """
    if plot is not None and (as_json or diff is not None):
        must = f"given without {'--json' if as_json else '--diff'}"
        raise PellucidError(rule("--plot", must, str(plot), "Run the command twice, once for each."), "usage")
    output.check_overwrite(overwrite, "--save or --plot", save is not None or plot is not None)
    goal = None if save is None else output.destination(save, "--save", (".json",), overwrite=overwrite)
    image = None if plot is None else output.plot_destination(plot, overwrite=overwrite)
    words = plan_words.PlanWords.of(ctx.params)
    plan = plan_words.plan_of(words)
    if diff is not None:
        from pellucid.cli import plan_diff

        other = plan_words.inherit(plan_words.parse_words(diff, ctx.command), words, plan)
        plan_diff.show(plan, plan_words.plan_of(other), as_json)
    elif as_json:
        print(plan.to_json())
    elif image is not None:
        from pellucid.evidence.drawing.plan import draw_plan

        image.write(partial(draw_plan, plan))
        output.wrote(image)
    else:
        for line in (*_header(plan), "", *_rows(plan), "", *_legend(plan)):
            output.say(line)
    if goal is not None:
        goal.write(plan.to_json() + "\n")
        output.wrote(goal, as_json)


# --- A plan as text -------------------------------------------------------------------------------------------------


def _header(plan: Plan) -> Iterator[Text]:
    """What the plan is, one fact per line."""
    title = REGISTRY[plan.name].title if plan.name in REGISTRY else plan.name
    calls = "1 model call" if plan.nfe == 1 else f"{plan.nfe} model calls"
    yield Text(f"{title} ({plan.name}): {calls} (NFE)", style="bold")
    for label, value in _facts(plan):
        yield Text.assemble((f"  {label:<9}", "dim"), value)


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "schedule", named(plan.schedule)
    yield "target", f"{plan.target}: what the network predicts"
    yield "grid", named(plan.grid)
    yield "dialect", plan.dialect
    yield "frame", f"{plan.frame}: {_FRAMES[plan.frame]}"
    yield "basis", f"{plan.basis}: what p0, p1, … are kept as"
    if plan.options:
        yield "options", ", ".join(f"{k} = {v}" for k, v in plan.options.items())
    yield "start", f"{_level(plan.start)}; initial scale {short(plan.initial_scale, 6)}"
    yield "end", _level(plan.end)
    law = f"declared: {plan.declared}" if plan.declared else "each row lands on its level"
    yield "law", f"deviation {short(plan.deviation, 3)}, {law}"
    if plan.end.sigma == 0:
        yield "keeps", _detail(plan)
    if "says" in plan.evidence:
        yield "evidence", str(plan.evidence["says"])


def _detail(plan: Plan) -> str:
    """How much contrast is left of large and of small structures."""
    parts = zip(_SCALES, kept(plan, _SCALES), strict=True)
    shares = [f"{short(100 * float(part), 3)} % at {scale:g}" for scale, part in parts]
    return f"{', '.join(shares)}: the contrast of Gaussian data by its standard deviation"


def _level(at: Level) -> str:
    return f"alpha {short(at.alpha, 6)}, sigma {short(at.sigma, 6)}, λ {short(at.lam)}"


def _rows(plan: Plan) -> Iterator[Text]:
    """The table: #, time, alpha, sigma, λ, and the update as a formula whose terms stand in columns."""
    levels = [(r.level.alpha, r.level.sigma, r.level.lam) for r in plan.rows]
    cells = [(str(i), time_text(r.time), *map(short, levels[i])) for i, r in enumerate(plan.rows)]
    widths = [max(len(c[k]) for c in (_COLUMNS, *cells)) for k in range(len(_COLUMNS))]
    updates = _formulas([r.x for r in plan.rows])
    if any(r.anchor is not None for r in plan.rows):
        kept = _formulas([r.anchor for r in plan.rows])
        wide = max(map(len, updates))
        updates = [f"{x:<{wide}}   anchor ← {a}" if a else x for x, a in zip(updates, kept, strict=True)]
    yield Text("  ".join(name.rjust(w) for name, w in zip(_COLUMNS, widths, strict=True)) + "   update", style="dim")
    for cell, r, update in zip(cells, plan.rows, updates, strict=True):
        line = "  ".join(text.rjust(w) for text, w in zip(cell, widths, strict=True))
        yield Text.assemble((line, "cyan"), "   x ← ", update, (_marks(r), "yellow"))


def _marks(r: Row) -> str:
    """What is unusual of a row: a prediction that is held out of the history, noise before the call."""
    held = "   held: p0 does not enter the history" if r.held else ""
    churn = f"   churn: x + {short(r.pre_noise)}·z before the call" if r.pre_noise else ""
    return held + churn


def _term(weight: float, register: int) -> str:
    """`0.9300·x`; a weight of exactly 1 is not written."""
    if abs(weight) == 1.0:
        return REGISTERS[register]
    return f"{abs(weight):#.4g}".rstrip(".").replace("-", "−") + f"·{REGISTERS[register]}"


def formula(weights: Weights) -> str:
    """`0.93·x + 0.07·p0 − 0.01·p1`; 0 when nothing is left."""
    return _formulas([weights])[0]


def _formulas(every: Sequence[Weights | None]) -> list[str]:
    """One formula a row, each register's terms in one column; empty where there is no update."""
    widest: dict[int, int] = {}
    for weights in every:
        for register, weight in weights or ():
            widest[register] = max(widest.get(register, 0), len(_term(weight, register)))
    out = ["" if weights is None else _align(dict(weights), widest) for weights in every]
    spare = 2 if all(line[:2] in ("", "  ") for line in out) else 0  # room for a leading minus that no row needs
    return [line[spare:].rstrip() for line in out]


def _align(weights: dict[int, float], widest: dict[int, int]) -> str:
    if not weights:
        return "  0"
    out, first = "", True
    for register in sorted(widest):
        if register not in weights:
            out += " " * (widest[register] + 3)
            continue
        sign = "−" if weights[register] < 0 else " " if first else "+"
        out += f"{sign} {_term(weights[register], register):<{widest[register]}} "
        first = False
    return out


def _legend(plan: Plan) -> Iterator[Text]:
    """What the letters mean, for the registers that this plan uses."""
    used = [name for name in REGISTERS if any(r.uses(name) for r in plan.rows)]
    said = {
        "x": "x: the state",
        "anchor": "anchor: a kept copy of x",
        "p0": f"p0: this call's {plan.basis}",
        "p1": ", ".join(f"p{k}" for k in range(1, plan.depth + 1)) + ": of earlier calls",
        "u": "u: the unconditional x0",
        "z": "z: fresh noise",
    }
    yield Text(
        "time is what is passed to the network.  " + "  ".join(said[name] for name in used if name in said), style="dim"
    )
