"""A schedule study as tables and sentences for people, and as JSON for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import combinations
from typing import Any

from pellucid.evidence.study.schedules_results import Point, Results, places
from pellucid.evidence.study.significance import in_words, spread
from pellucid.evidence.study.table import Table

METRICS = (("fid", "FID", 1.0), ("kid", "KID × 10³", 1e3))
LAST_CALL = "last call alone"


def number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def told(point: Point, scale: float = 1.0) -> str:
    """One seed: the figure and its interval; several: their mean and standard deviation."""
    if len(point.values) > 1:
        mean, deviation = spread(point.values)
        return f"{number(mean * scale)} ± {number(deviation * scale)}"
    words = number(point.mean * scale)
    if point.low is None or point.high is None:
        return words
    return f"{words} ({number(point.low * scale)} to {number(point.high * scale)})"


def last_call(held: list[dict[str, Any]]) -> str:
    known = [row for row in held if "kid_last_call" in row]
    return told(Point.of(known, "kid_last_call"), 1e3) if known else "–"


def tables(found: Results) -> list[Table]:
    made = [final(found), on_the_way(found), others(found)]
    return [table for table in made if table.rows]


def final(found: Results) -> Table:
    """The last point that each schedule has reached, and how its training went at the end."""
    rows = []
    for name in found.study.schedules:
        step = found.last(name)
        if step is None:
            continue
        here = list(found.at(name, step).values())
        shares = [number(Point.of(here, metric).mean, 3) for metric in ("precision", "recall")]
        seconds = found.seconds(name) / max(1, sum(bool(found.logs[name, seed]) for seed in found.study.seeds))
        rows.append(
            (
                name,
                f"{step:,}",
                f"{here[0]['samples']:,}",
                *(told(Point.of(here, metric), scale) for metric, _, scale in METRICS),
                *shares,
                last_call(here),
                number(found.at_end(name, "loss"), 4),
                number(found.at_end(name, "grad_norm"), 3),
                number(found.at_end(name, "grad_norm_std") / found.at_end(name, "grad_norm")),
                f"{seconds:,.0f} s",
            )
        )
    columns = ("schedule", "step", "images", *(title for _, title, _ in METRICS), "precision", "recall")
    last = (LAST_CALL, "loss", "gradient norm", "its spread", "training")
    note = (
        "± is one standard deviation over the seeds; brackets hold 95 % of other images of one run. The last call "
        "alone: KID × 10³ of training images that are noised to its level and denoised by it, which is what the end "
        "of the grid costs, however good the way to it. Loss, gradient norm and its spread within a window (standard "
        "deviation ÷ mean) are of the last tenth of training. Losses of different schedules are means over different "
        "noise levels and cannot be compared."
    )
    return Table("At the end", (*columns, *last), tuple(rows), note)


def on_the_way(found: Results) -> Table:
    """FID and KID at every point that is known of any schedule."""
    rows = []
    for metric, title, scale in METRICS:
        for name in found.study.schedules:
            by_images = {point.images: told(point, scale) for point in found.curve(name, metric)}
            if by_images:
                rows.append((f"{title}, {name}", *(by_images.get(images, "–") for images in places(found))))
    columns = ("", *(f"{images:,} images" for images in places(found)))
    return Table("On the way", columns, tuple(rows), f"FID of {found.study.samples:,} images at every point.")


def others(found: Results) -> Table:
    """The last point again with the other EMA lengths and grids, at the same count of images."""
    rows = []
    for name in found.study.schedules:
        for held in found.variants(name):
            metric = "fid_few" if all("fid_few" in row for row in held) else "fid"
            first = held[0]
            fid, kid = Point.of(held, metric), Point.of(held, "kid")
            rows.append((name, f"{first['ema']:,.0f}", first["grid"], told(fid), told(kid, 1e3), last_call(held)))
    if len(rows) <= len(found.study.schedules):
        rows = []  # there are no others
    columns = ("schedule", "EMA, images", "grid", "FID", "KID × 10³", LAST_CALL)
    note = f"FID of {found.study.samples:,} images. An image of the EMA counts half as much so many images later."
    return Table("Other running means and grids, at the last point", columns, tuple(rows), note)


def verdicts(found: Results) -> list[dict[str, Any]]:
    """Each pair of schedules under each metric: the difference, its interval, and a sentence."""
    made = []
    for a, b in combinations(found.study.schedules, 2):
        for metric, title, scale in METRICS:
            apart = found.difference(a, b, metric)
            if apart is None:
                continue
            step, difference = apart
            words = in_words(a, b, difference, title, scale)
            if step != found.study.points[-1]:
                words = f"At step {step:,}: {words}"
            made.append({"a": a, "b": b, "metric": metric, "step": step, "words": words, **asdict(difference)})
            made[-1]["significant"] = difference.significant
    return made


def plain(found: Results) -> dict[str, Any]:
    """All of it for programs."""
    scored, wanted = found.done
    schedules: dict[str, Any] = {}
    for name in found.study.schedules:
        step = found.last(name)
        points = {metric: [asdict(point) for point in found.curve(name, metric)] for metric, _, _ in METRICS}
        lam, error = found.levels(name)
        schedules[name] = {
            "last_step": step,
            "last": [] if step is None else list(found.at(name, step).values()),
            "points": points,
            "levels": {"lam": lam.tolist(), "error": error.tolist()},
            "seconds": found.seconds(name),
        }
        for column in ("loss", "loss_std", "grad_norm", "grad_norm_std"):
            value = found.at_end(name, column)
            schedules[name][column] = value if math.isfinite(value) else None
    return {"cells": {"scored": scored, "wanted": wanted}, "schedules": schedules, "comparisons": verdicts(found)}
