"""What a load on a server shows: counts, throughput, percentiles and their split, as plain data and as a chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid._version import __version__
from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_json
from pellucid.serve.bench import BenchRun, Outcome, Sample
from pellucid.serve.metrics import STAGES, percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND = "pellucid-bench-serve"
PARTS = (*STAGES, "rest")
_PERCENTS = (50, 90, 95, 99)
_DIGITS = 4  # of seconds after the point
_PART_COLOURS = ("#c9d1da", "#f2b01e", "#12a4af", "#8d6e3f", "#5f6b7a")  # none that the first kinds have


# --- Arithmetic ---------------------------------------------------------------------------------------------------


def spread(values: Iterable[float]) -> dict[str, float]:
    """Percentiles, mean and largest; nothing of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {f"p{percent}": percentile(ordered, percent) for percent in _PERCENTS}
    found |= {"max": ordered[-1], "mean": sum(ordered) / len(ordered)}
    return {name: round(value, _DIGITS) for name, value in found.items()}


def report(run: BenchRun) -> dict[str, Any]:
    """All that was found, as JSON has it."""
    outcomes, load = run.outcomes, run.load
    seconds = max(one.done for one in outcomes)
    made = sum(one.images for one in outcomes if one.result == "ok")
    asked = sum(one.images for one in outcomes)
    refused = [one for one in outcomes if one.result == "refused"]
    return {
        "kind": KIND,
        "schema": 1,
        "pellucid": __version__,
        "url": run.url,
        "began": run.began,
        "server": {
            "version": run.server.get("version"),
            "models": list(run.server.get("models", ())),
            "queue": run.server.get("queue"),
        },
        "load": {
            "rate": load.rate,
            "requests": load.requests,
            "seed": load.seed,
            "timeout": load.timeout,
            "mix": [{"name": kind.name, "weight": kind.weight, **kind.body} for kind in load.mix],
        },
        "seconds": round(seconds, _DIGITS),
        "images": made,
        "images_per_second": round(made / seconds, _DIGITS),
        "images_per_second_asked": round(asked / max(one.due for one in outcomes), _DIGITS),
        "all": figures(outcomes),
        "kinds": {kind.name: figures([one for one in outcomes if one.kind == kind.name]) for kind in load.mix},
        "refusals": {
            "by_code": dict(Counter(one.code for one in refused)),
            "seconds": spread(one.from_sending for one in refused),
            "retry_after": spread(one.retry_after for one in refused if one.retry_after is not None),
        },
        "lag": spread(one.lag for one in outcomes),
        "server_load": load_of(run.samples),
        "samples": [{name: rounded(value) for name, value in vars(one).items()} for one in run.samples],
        "answers": [
            {**{name: rounded(value) for name, value in vars(one).items()}, "result": one.result} for one in outcomes
        ],
    }


def rounded(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts by outcome; the latency of what was answered, and where it went."""
    results = Counter(one.result for one in outcomes)
    answered = [one for one in outcomes if one.result == "ok"]
    split = [one.split for one in answered if one.split]
    return {
        "sent": len(outcomes),
        "ok": results.pop("ok", 0),
        "refused": results.pop("refused", 0),
        "timeouts": results.pop("timeout", 0),
        "errors": dict(sorted(results.items())),
        "latency": spread(one.latency for one in answered),
        "from_sending": spread(one.from_sending for one in answered),
        "split": {part: spread(one.get(part, 0.0) for one in split) for part in PARTS},
    }


def load_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """How full the server was: of its samples, and by its own count of steps."""
    full = [one.running / one.room for one in samples if one.room]
    first, last = (samples[0], samples[-1]) if samples else (None, None)
    steps = images = restarts = 0
    if first is not None and last is not None:
        steps, images = last.steps - first.steps, last.step_images - first.step_images
        restarts = last.restarts - first.restarts
    return {
        "samples": len(samples),
        "occupancy": spread(full),
        "images_per_step": round(images / steps, _DIGITS) if steps > 0 and not restarts else None,
        "unanswered": spread(float(one.unanswered) for one in samples),
        "waiting": spread(float(one.waiting) for one in samples),
        "restarts": restarts,
    }


# --- Comparison ---------------------------------------------------------------------------------------------------

_COMPARED = {  # what is compared, and where it stands in a report
    "images/s": "images_per_second",
    "answered": "all.ok",
    "refused": "all.refused",
    "timeouts": "all.timeouts",
    **{f"latency {p}, s": f"all.latency.{p}" for p in ("p50", "p90", "p95", "p99", "max")},
    **{f"{part}, mean s": f"all.split.{part}.mean" for part in PARTS},
    "occupancy": "server_load.occupancy.mean",
    "images per step": "server_load.images_per_step",
    "unanswered, mean": "server_load.unanswered.mean",
}


def read_report(path: str | Path, option: str = "--compare") -> dict[str, Any]:
    """A report that was written before."""
    found = read_json(path, code="bench-file")
    if found.get("kind") != KIND:
        raise PellucidError(rule(option, "a bench-serve.json", found.get("kind", str(path))), "bench-file")
    return found


def number_at(found: Any, place: str) -> float | None:
    """The number at `all.latency.p50`, where there is one."""
    for key in place.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def comparison(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each figure of both, and how many times the other's ours is."""
    rows: list[dict[str, Any]] = []
    for name, place in _COMPARED.items():
        ours, theirs = number_at(mine, place), number_at(other, place)
        ratio = round(ours / theirs, _DIGITS) if ours is not None and theirs else None
        rows.append({"figure": name, "this": ours, "other": theirs, "ratio": ratio})
    return rows


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """How the loads differ, in words; ratios of different loads compare little."""
    ours, theirs = mine["load"], other.get("load")
    theirs = theirs if isinstance(theirs, Mapping) else {}
    found = [
        f"{name} {ours[name]} against {theirs.get(name)}"
        for name in ("rate", "requests", "seed")
        if ours[name] != theirs.get(name)
    ]
    return found + (["another mix"] if ours["mix"] != theirs.get("mix") else [])


# --- Chart --------------------------------------------------------------------------------------------------------


def draw(found: Mapping[str, Any]) -> Figure:
    """Latencies over time by kind, with what was refused or failed; the server's queue; where the time went."""
    from pellucid.evidence.report import charts

    figure = charts.canvas(11.5, 5.2)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.7, 1), height_ratios=(3, 1))
    latency = figure.add_subplot(grid[0, 0])
    queue = figure.add_subplot(grid[1, 0], sharex=latency)
    split = figure.add_subplot(grid[:, 1])
    with charts.LOCK:
        draw_latencies(latency, found)
        latency.set_xlim(0, 1.01 * found["seconds"])
        charts.quiet(latency, "Latency of each request", "", "seconds since it was due")
        latency.tick_params(labelbottom=False)
        draw_queue(queue, found)
        charts.quiet(queue, "", "seconds since the load began", "images")
        draw_split(split, found)
        charts.quiet(split, "Where the time went", "seconds, mean of a request")
        split.grid(visible=False, axis="y")
        split.tick_params(axis="y", length=0)
        rate, speed = found["load"]["rate"], found["images_per_second"]
        note = f"{found['load']['requests']} requests at {rate:g}/s · {speed:.2f} images/s"
        charts.legend(figure, [split, queue, latency], f"{note} · {found['url']} · {found['began']}")
    return figure


def draw_latencies(axes: Axes, found: Mapping[str, Any]) -> None:
    """A point for each answer; crosses along the top for what was refused or failed."""
    from pellucid.evidence.report.charts import COLOURS, INK, MARKS

    answers = found["answers"]
    for number, name in enumerate(found["kinds"]):
        those = [one for one in answers if one["kind"] == name and one["result"] == "ok"]
        look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)]}
        x, y = [one["due"] for one in those], [one["done"] - one["due"] for one in those]
        axes.scatter(x, y, s=16, alpha=0.75, linewidths=0, label=name, **look)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # with room for the crosses
    refused = [one["due"] for one in answers if one["result"] == "refused"]
    failed = [one["due"] for one in answers if one["result"] not in ("ok", "refused")]
    crosses = ((refused, "refused", 0.97, "x", INK), (failed, "failed", 0.92, "+", INK))
    for times, label, height, mark, colour in crosses:
        if times:
            place = axes.get_xaxis_transform()  # seconds across, parts of the frame's height up
            look = {"marker": mark, "color": colour, "linewidths": 1.2, "transform": place}
            axes.scatter(times, [height] * len(times), s=26, label=label, **look)


def draw_queue(axes: Axes, found: Mapping[str, Any]) -> None:
    """Images that were accepted and not answered, and those of them in step batches."""
    from pellucid.evidence.report.charts import FAINT, INK

    times = [one["seconds"] for one in found["samples"]]
    for name, label, colour in (("unanswered", "unanswered", FAINT), ("running", "in step batches", INK)):
        axes.step(times, [one[name] for one in found["samples"]], where="post", color=colour, label=label)
    axes.set_ylim(bottom=0)


def draw_split(axes: Axes, found: Mapping[str, Any]) -> None:
    """A bar for each kind, of the mean seconds of each part."""
    from pellucid.evidence.report.charts import INK

    rows = {"all": found["all"], **found["kinds"]}
    left = [0.0] * len(rows)
    for part, colour in zip(PARTS, _PART_COLOURS, strict=True):
        width = [number_at(row, f"split.{part}.mean") or 0.0 for row in rows.values()]
        axes.barh(range(len(rows)), width, left=left, height=0.62, color=colour, label=part)
        left = [a + b for a, b in zip(left, width, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.2f}" if total else " –", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.15)
