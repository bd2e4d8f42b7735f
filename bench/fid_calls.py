"""FID of a CIFAR-10 model at a number of calls, tuned plans beside all that is untuned.

    pellucid tune --model assets/cifar10-cosine --steps 8 --held-out 1000 --sweep 8 --records out/swept --out plan.json
    python bench/fid_calls.py --model assets/cifar10-cosine --plan plan.json --swept out/swept --calls 8 --out out/fid8

`--swept` is what `pellucid tune --sweep` has kept: the `--keep` set-ups that end nearest to the converged images are
judged by their FID, and those of `--names` too. All are tried with `--first` images; the best untuned and the given
plans with `--last`, with intervals. A run that was stopped goes on. `--charts` is a folder for fid.png, and for
pictures.png: the first images of the given plans, the best untuned ones, the set-ups of `--names`, and the teacher.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import pellucid
from detail_kept import draw_rows
from pellucid.cli import trouble
from pellucid.core.errors import PellucidError
from pellucid.core.plan import Plan
from pellucid.evidence.metrics.inception import load_inception, to_bytes
from pellucid.evidence.report import charts
from pellucid.evidence.report.page import Table
from pellucid.evidence.study.kernel import Records, claim
from pellucid.evidence.study.schedules import TrainingJudge
from pellucid.evidence.tune import sweep, teacher
from pellucid.evidence.tune.model import Pairs, TuningModel, model_of
from pellucid.evidence.tune.teacher import NoisePairs, ends
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.prepare import read_plan
from pellucid.train.cifar10 import CIFAR10

SEED = 1_000_000  # far from those that plans are tuned on
NEIGHBOURS, RESAMPLES = 10_000, 20
SHOWN, BEST = 12, 2  # images of a row; untuned set-ups that have one
KEYS = ("name", "plan", "pictures")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--plan", action="append", default=[], help="a plan file; may be repeated")
    parser.add_argument("--swept", type=Path, help="a folder of --records of pellucid tune --sweep")
    parser.add_argument("--keep", type=int, default=16, help="set-ups that are taken from it")
    parser.add_argument("--names", default="", help="more of them, such as ddim:beta,unipc-2:karras")
    parser.add_argument("--first", type=int, default=10_000)
    parser.add_argument("--last", type=int, default=50_000)
    parser.add_argument("--finalists", type=int, default=1, help="untuned set-ups that are judged on --last images")
    parser.add_argument("--reference", type=int, default=50_000, help="training images to compare with")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dtype", help="float32, float16, bfloat16; as pellucid.load when not given")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--data", default="data/cifar10")
    parser.add_argument("--inception", default="data/inception.safetensors")
    parser.add_argument("--features", type=Path, default=Path("out/features"), help="what Inception says of the data")
    parser.add_argument("--charts", type=Path, help="a folder for fid.png and pictures.png")
    parser.add_argument("--out", type=Path, default=Path("out/fid_calls"))
    given = parser.parse_args()
    try:
        print(work(given).markdown())
    except PellucidError as error:
        return trouble(error.code, str(error))
    return 0


def work(given: argparse.Namespace) -> Table:
    pipe = pellucid.load(given.model, dtype=given.dtype, policy=Policy(compile=given.compile))
    subject = model_of(pipe)
    plans = chosen(given, subject)
    kept = {"model": subject.fingerprint, "calls": given.calls, "seed": SEED, "reference": given.reference}
    claim(given.out, json.dumps(kept, sort_keys=True))
    records = Records(given.out, KEYS)
    judge = cache(lambda: judge_of(given, subject.device))  # minutes, where there is something to score
    for name, plan in plans.items():
        score(records, name, plan, subject, judge, given.first, given.batch)
    marks = {(name, mark_of(plan)) for name, plan in plans.items()}
    rows = [row for row in records.rows if row["pictures"] == given.first and (row["name"], row["plan"]) in marks]
    untuned = sorted((row for row in rows if row["name"] not in given.plan), key=lambda row: row["fid"])
    names = given.plan + [row["name"] for row in untuned[: given.finalists]]
    if given.last > given.first:
        for name in names:
            score(records, name, plans[name], subject, judge, given.last, given.batch)
    if given.charts is not None:
        draw(rows, given.plan, given.charts / "fid.png")
        asked = [*given.plan, *(row["name"] for row in untuned[:BEST]), *given.names.split(",")]
        draw_images({name: plans[name] for name in asked if name in plans}, subject, given.charts / "pictures.png")
    return table(records)


def chosen(given: argparse.Namespace, subject: TuningModel) -> dict[str, Plan]:
    """The plans to judge, by name: those of files, and of the set-ups that are asked for."""
    known = {one.text: one for one in sweep.candidates()}
    names = [name for name in given.names.split(",") if name]
    if given.swept is not None:
        rows = [row for row in Records(given.swept, sweep.KEYS).rows if row["calls"] == given.calls]
        few = min((row["pairs"] for row in rows), default=0)
        finite = [row for row in rows if row["pairs"] == few and not row.get("refused")]
        if not finite:
            raise PellucidError(f"--swept must hold a sweep at {given.calls} calls; got {given.swept}.", "usage")
        names += [row["name"] for row in sorted(finite, key=lambda row: row["mean"])[: given.keep]]
    plans = {name: read_plan(name) for name in given.plan}
    for name in dict.fromkeys(names):
        if name not in known:
            raise PellucidError(f"--names must be set-ups such as ddim:beta; got {name!r}.", "usage")
        plans[name] = known[name].plan(subject.schedule, subject.target, given.calls)
    return plans


def judge_of(given: argparse.Namespace, device: torch.device) -> TrainingJudge:
    images = CIFAR10.read(given.data).images.to(device)
    return TrainingJudge.of(
        images, load_inception(given.inception, device), given.reference, NEIGHBOURS, given.features
    )


def score(
    records: Records,
    name: str,
    plan: Plan,
    subject: TuningModel,
    judge: Callable[[], TrainingJudge],
    count: int,
    batch: int,
) -> None:
    """Makes so many images and keeps their scores; nothing where they are known."""
    mark = mark_of(plan)
    if records.has({"name": name, "plan": mark, "pictures": count}):
        return
    seeds = range(SEED, SEED + count)
    found = judge().features(images(plan, subject, seeds, batch))
    told: dict[str, Any] = judge().score(found)
    if count > NEIGHBOURS:
        spread = judge().fid_interval(found, told["fid"], RESAMPLES)
        told |= {"fid_low": spread.low, "fid_high": spread.high}
    records.add({"name": name, "plan": mark, "pictures": count, "nfe": plan.nfe, **told})
    print(f"{name}, {count:,} images: FID {told['fid']:.2f}, KID {1e3 * told['kid']:.2f}e-3", flush=True)


def mark_of(plan: Plan) -> str:
    """A plan of the same name may be another."""
    return hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def images(plan: Plan, subject: TuningModel, seeds: Sequence[int], batch: int) -> torch.Tensor:
    """(N, 3, H, W) uint8."""
    made = []
    for start in range(0, len(seeds), batch):
        drawn = NoisePairs.of(subject, Pairs(tuple(seeds[start : start + batch])))
        made.append(to_bytes(ends(plan, subject, drawn, batch).add(1).div(2)))
    return torch.cat(made).to(subject.device)


def draw(rows: Sequence[dict[str, Any]], tuned: Sequence[str], path: Path) -> Path:
    """A bar a plan, the least FID on top."""
    ordered = sorted(rows, key=lambda row: -row["fid"])
    figure = charts.canvas(7, 0.3 * len(ordered) + 0.9)
    axes = figure.subplots()
    colours = [charts.COLOURS[2 if row["name"] in tuned else 0] for row in ordered]
    words = ["tuned" if [row["name"]] == list(tuned) else row["name"] for row in ordered]
    bars = axes.barh(words, [row["fid"] for row in ordered], color=colours, height=0.65)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    title = f"FID of {ordered[0]['pictures']:,} images with {max(row['nfe'] for row in ordered)} model calls"
    charts.quiet(axes, title, "less is better", "")
    axes.tick_params(axis="y", labelsize=8)
    figure.tight_layout()
    return charts.save(figure, path)


def draw_images(plans: dict[str, Plan], subject: TuningModel, path: Path) -> Path:
    """The first noises, a row a plan; below them where they converge to."""
    seeds = range(SEED, SEED + SHOWN)
    shown = {f"{name}\n{plan.nfe} calls": images(plan, subject, seeds, SHOWN) for name, plan in plans.items()}
    truth = teacher.teach(subject, Pairs(tuple(seeds)), teacher.STEPS, SHOWN)
    shown[f"converged\n{teacher.STEPS} calls"] = to_bytes(truth.x0.add(1).div(2))
    return draw_rows(shown, path)


def table(records: Records) -> Table:
    rows = sorted(records.rows, key=lambda row: (-row["pictures"], row["fid"]))
    shown = []
    for row in rows:
        wide = f" ({row['fid_low']:.2f} to {row['fid_high']:.2f})" if "fid_low" in row else ""
        kid = f"{1e3 * row['kid']:.2f} ({1e3 * row['kid_low']:.2f} to {1e3 * row['kid_high']:.2f})"
        closeness = (f"{row[key]:.3f}" for key in ("precision", "recall"))
        shown.append((row["name"], str(row["nfe"]), f"{row['pictures']:,}", f"{row['fid']:.2f}{wide}", kid, *closeness))
    columns = ("plan", "calls", "pictures", "FID", "KID × 10³", "precision", "recall")
    return Table("FID at so many calls", columns, tuple(shown))


if __name__ == "__main__":
    sys.exit(main())
