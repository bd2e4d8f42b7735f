"""Tuned plans on a Gaussian mixture against all that is untuned: `python bench/tune_oracle.py`, minutes a case.

The network is exact and told its time: eps, F or the flow of the mixture at the level of the told time, as a trained
network would give it. Writes docs/results/tune_oracle.md; what was measured is kept in out/tune_oracle, and a run that
was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pellucid.core import oracle
from pellucid.core import schedule as schedules
from pellucid.core.plan import Plan
from pellucid.evidence.report import charts
from pellucid.evidence.report.page import Table
from pellucid.evidence.study.kernel import Records, claim
from pellucid.evidence.tune.descent import Descent
from pellucid.evidence.tune.model import TuningModel, oracle_model
from pellucid.evidence.tune.sweep import Sweep
from pellucid.evidence.tune.teacher import errors
from pellucid.evidence.tune.tuning import TuningConfig, ask_teacher, divide, gain, tune
from pellucid.interop.atomic_files import put

SCHEDULES = ("linear", "cosine", "edm", "flow")
WHATS = ("all", "both", "grid", "weights", "told")
BUDGETS = (8, 10, 14, 16)
SIFTED = 256  # held-out seeds on which all that is untuned is tried; the best of them on all
STEPS = 8
RIVALS = {
    "best 8": "the best untuned at 8 calls",
    "best 10": "the best untuned at 10",
    "best 14": "the best untuned at 14",
    "best 16": "the best untuned at 16",
    "usual 14": "DPM++ 2M Karras at 14",
    "usual 16": "DPM++ 2M Karras at 16",
}
ASKED: dict[str, Any] = {"steps": STEPS, "pairs": 1024, "watched": 1024, "held_out": 4096}
HOW: dict[str, Any] = {"batch": 256, "at_once": 4096, "iterations": 400}
HEAD = """# Tuned plans on a mixture, compared with all untuned ones

```text
python bench/tune_oracle.py      # makes this page, and resumes if it was stopped; do not edit
```

"""
CHART = "tune_oracle/errors.png"
Cells = dict[tuple[str, str], dict[str, Any]]  # by schedule and what was done there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/tune_oracle.md"))
    parser.add_argument("--folder", type=Path, default=Path("out/tune_oracle"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    claim(given.folder, json.dumps({"asked": ASKED, "how": HOW}, indent=1))
    records = Records(given.folder, ("schedule", "cell"))
    for what in ("untuned", *WHATS, "against"):
        for name in SCHEDULES:
            if not records.has({"schedule": name, "cell": what}):
                began = time.process_time()
                found = measured(name, what, given.folder, records)
                seconds = round(time.process_time() - began, 1)
                records.add({"schedule": name, "cell": what, "seconds": seconds, "found": found})
                print(f"{name}, {what}: {seconds:.0f} s", flush=True)
    (given.out.parent / CHART).parent.mkdir(exist_ok=True)
    draw(records, given.out.parent / CHART)
    put(given.out, page(records))
    print(given.out)


def measured(name: str, what: str, folder: Path, records: Records) -> dict[str, Any]:
    subject = oracle_model("sharp", oracle.sharp(), schedules.make(name))
    if what == "untuned":
        return untuned(question(subject, folder / f"sweep-{name}"))
    if what == "against":
        done = {row["cell"]: row["found"] for row in records.rows if row["schedule"] == name}
        plans = {what: Plan.from_dict(done[what]["plan"]) for what in ("all", "both")}
        return against(question(subject, folder / f"sweep-{name}"), plans)
    made = tune(subject, TuningConfig(**ASKED, descent=Descent(what=what, **HOW)))
    plan = replace(made.plan, evidence={}).to_dict()
    return {**made.evidence, "deviation": made.plan.deviation, "plan": plan}


def question(subject: TuningModel, folder: Path) -> Sweep:
    """All that is untuned, on the seeds that judge the tuned plans."""
    asked = TuningConfig(**ASKED, descent=Descent(**HOW))
    truth = ask_teacher(subject, divide(subject, asked).judge, asked, lambda: None)
    return Sweep(subject, truth, HOW["at_once"], folder, sifted=SIFTED)


def untuned(sweep: Sweep) -> dict[str, Any]:
    return {str(calls): {"best": vars(sweep.best(calls)[0]), "usual": vars(sweep.usual(calls))} for calls in BUDGETS}


def against(sweep: Sweep, plans: dict[str, Plan]) -> dict[str, Any]:
    """By how much the error of the plan that is tuned in all is less, seed by seed, with intervals."""
    rivals = {"both": plans["both"]}
    for calls in BUDGETS:
        rivals[f"best {calls}"] = sweep.plan(sweep.best(calls)[0])
        rivals[f"usual {calls}"] = sweep.plan(sweep.usual(calls))
    found = {key: errors(plan, sweep.model, sweep.truth, sweep.at_once) for key, plan in rivals.items()}
    mine = errors(plans["all"], sweep.model, sweep.truth, sweep.at_once)
    return {
        key: {**gain(mine, theirs), "nearer": float((mine < theirs).double().mean())} for key, theirs in found.items()
    }


def page(records: Records) -> str:
    """The page, made of the records alone."""
    cells = {(row["schedule"], row["cell"]): row["found"] for row in records.rows}
    tuned, watched, judges = (f"{ASKED[key]:,}" for key in ("pairs", "watched", "held_out"))
    paragraphs = (
        f"Are {STEPS} calls of a [tuned plan](../tune.md) as good as more calls of any untuned plan? The mixture "
        f"is `oracle.sharp`: 12 narrow modes in 8 dimensions, {rms():.2f} rms. The network is exact *at the timestep "
        "passed to it*, so passing another timestep changes its output, as with a trained network.",
        "The error is the rms distance of x0 from the converged one of the same seed (DPM++ 3M, 200 steps): the mean "
        f"over {judges} held-out seeds with its 95 % bootstrap interval. The plan was tuned on {tuned} seeds, with "
        f"{watched} others for validation. *Best untuned* is the best deterministic sampler, at every order on every "
        f"grid, with as many steps as the calls allow. All are tried on {SIFTED} of the held-out seeds, and the best "
        "of them on all. So the untuned plans are selected on the seeds that evaluate them, which favours them.",
    )
    head = HEAD + "\n\n".join(map(filled, paragraphs)) + "\n\n"
    parts = [first_table(cells), paired_table(cells), what_table(cells), start_table(cells)]
    took = sum(row["seconds"] for row in records.rows) / 60
    foot = f"\nAbout {took:.0f} minutes of one core of {platform.machine()}, torch {torch.__version__}, one thread.\n"
    shown = f"![Error against model calls, tuned and untuned, under four schedules]({CHART})\n\n"
    return head + shown + learnt(cells) + "\n" + "\n".join(part.markdown() for part in parts) + foot


def draw(records: Records, path: Path) -> None:
    """A panel a schedule: the best untuned and the usual plan over the calls, and the tuned one, with intervals."""
    cells = {(row["schedule"], row["cell"]): row["found"] for row in records.rows}
    figure = charts.canvas(10, 3.1)
    panels = figure.subplots(1, len(SCHEDULES), sharey=True)
    for axes, name in zip(panels, SCHEDULES, strict=True):
        base = cells[name, "untuned"]
        for number, (key, words) in enumerate((("best", "best untuned"), ("usual", "DPM++ 2M Karras"))):
            found = [base[str(calls)][key]["summary"] for calls in BUDGETS]
            axes.errorbar(BUDGETS, *spread(found), color=charts.COLOURS[number], marker="o", ms=4, label=words)
        mine = cells[name, "all"]["held_out"]["tuned"]
        axes.errorbar([STEPS], *spread([mine]), color=charts.COLOURS[2], marker="*", ms=12, ls="", label="tuned")
        axes.axhline(mine["mean"], color=charts.COLOURS[2], lw=0.8, ls=":")
        charts.quiet(axes, name, "model calls", "mean error" if axes is panels[0] else "")
        axes.set(yscale="log", xticks=BUDGETS)
    panels[-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    charts.save(figure, path)


def spread(found: list[dict[str, float]]) -> tuple[list[float], list[list[float]]]:
    """Means, and how far their intervals reach below and above."""
    means = [one["mean"] for one in found]
    return means, [[one["mean"] - one["low"] for one in found], [one["high"] - one["mean"] for one in found]]


def rms() -> float:
    drawn = oracle.sharp().sample(4096, torch.Generator().manual_seed(0))
    return float(drawn.square().mean().sqrt())


def learnt(cells: Cells) -> str:
    """What the tables say, by rule: better or worse only where the paired interval leaves 0 out."""
    own = [cells[name, "all"]["held_out"]["tuned"] for name in SCHEDULES]
    middle = listed([f"{one['median'] * 1e3:.2f}" for one in own])
    worst = max(one["worst"] for one in own)
    bare = listed([f"{cells[name, 'both']['held_out']['tuned']['mean'] * 1e3:.1f}" for name in SCHEDULES])
    best = [cells[name, "all"]["best_start"] for name in SCHEDULES]
    kept = [cells[name, "all"]["start"] for name in SCHEDULES]
    same = sum(a == b for a, b in zip(best, kept, strict=True))
    lines = [
        *(f"- Compared with {words}: {verdict(cells, key)}." for key, words in RIVALS.items()),
        f"- A few seeds dominate the mean: the medians of the tuned plans are {middle} × 10⁻³, and one seed is off by "
        f"{worst:.2f}.",
        f"- Without tuning the timesteps (grid and weights only) the mean is {bare} × 10⁻³. Compared with that, all "
        f"three together are {verdict(cells, 'both')}.",
        f"- The start that was best before tuning was kept in {same} of {len(SCHEDULES)} cases; the kept starts are "
        f"{listed(kept)}.",
        "- This is one mixture, and one draw of the seeds to tune on. A trained network has errors of its own.",
    ]
    order = (
        f"Figures are in the order {listed(list(SCHEDULES))}. Better or worse means that the interval of the paired "
        "difference excludes 0."
    )
    return "## Findings\n\n" + filled(order) + "\n\n" + "\n".join(filled(line) for line in lines) + "\n"


def verdict(cells: Cells, key: str) -> str:
    """On which schedules the tuned plan is better, worse, or cannot be told apart."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "not distinguishable": []}
    for name in SCHEDULES:
        one = cells[name, "against"][key]
        found["better" if one["low"] > 0 else "worse" if one["high"] < 0 else "not distinguishable"].append(name)
    if len(found["better"]) == len(SCHEDULES):
        return "better on all"
    return "; ".join(f"{word} on {listed(names)}" for word, names in found.items() if names)


def listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def filled(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def small(found: dict[str, float], digits: int = 1) -> str:
    """A mean with its interval, × 10³."""
    mean, low, high = (f"{found[key] * 1e3:.{digits}f}".replace("-", "−") for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def first_table(cells: Cells) -> Table:
    rows = []
    for name in SCHEDULES:
        base = cells[name, "untuned"]
        best = [base[str(calls)]["best"] for calls in (8, 10, 14)]
        usual = [base[str(calls)]["usual"] for calls in (14, 16)]
        named = [f"{small(cell['summary'])}, {' · '.join(cell['name'].split(':')[:2])}" for cell in best]
        mine = f"**{small(cells[name, 'all']['held_out']['tuned'])}**"
        rows.append((name, mine, *named, *(small(cell["summary"]) for cell in usual)))
    columns = ("schedule", "tuned 8", "best untuned 8", "best untuned 10", "best untuned 14", "2M Karras 14", "16")
    return Table("8 tuned calls against more untuned ones: mean error × 10³", columns, tuple(rows))


def paired_table(cells: Cells) -> Table:
    rows = []
    for name in SCHEDULES:
        apart = [cells[name, "against"][key] for key in RIVALS]
        rows.append((name, *(f"{small(one)}, {100 * one['nearer']:.1f} %" for one in apart)))
    note = "Untuned minus tuned, seed by seed, and the share of seeds for which the tuned plan is nearer."
    columns = ("schedule", "best untuned 8", "10", "14", "16", "2M Karras 14", "16")
    return Table("Reduction of the error × 10³", columns, tuple(rows), note)


def what_table(cells: Cells) -> Table:
    rows = []
    for name in SCHEDULES:
        held = {what: cells[name, what]["held_out"] for what in WHATS}
        shown = [held["all"]["best_start"], *(held[what]["tuned"] for what in reversed(WHATS))]
        rows.append((name, *(f"{one['mean'] * 1e3:.1f} / {one['median'] * 1e3:.2f}" for one in shown)))
    words = {"both": "grid and weights", "all": "all three", "told": "timesteps"}
    columns = ("schedule", "best start", *(words.get(what, what) for what in reversed(WHATS)))
    return Table("What is tuned: mean / median error of 8 calls × 10³", columns, tuple(rows))


def start_table(cells: Cells) -> Table:
    rows = []
    for name in SCHEDULES:
        found = cells[name, "all"]
        for one in found["starts"]:
            mark = " ←" if one["start"] == found["start"] else ""
            rows.append((name, one["start"] + mark, f"{one['watched'] * 1e3:.1f}", f"{one['tuned'] * 1e3:.1f}"))
    law = max(cells[name, what]["deviation"] for name in SCHEDULES for what in WHATS)
    note = (
        "Errors on the validation seeds; ← marks the kept start. After a quarter of the iterations the best two "
        "continued: their figures are the final ones, the others' are from that point. "
        f"The law holds to {law:.1g} in all {len(SCHEDULES) * len(WHATS)} plans."
    )
    return Table("Starts: mean error × 10³", ("schedule", "start", "untuned", "tuned"), tuple(rows), filled(note))


if __name__ == "__main__":
    main()
