"""`pellucid bench-serve`: an open-loop load on a server, its latencies and where they go."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import CANCELLED, AsJson, Overwrite, given_only, option
from pellucid.core.errors import PellucidError, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pellucid.serve.bench import Load
    from pellucid.serve.client import Remote

_LATE = 0.05  # seconds; a client that sends later than this is too slow for the load
_KEY = "Where the server has keys: one of them."
_EXAMPLES = (
    "pellucid bench-serve http://127.0.0.1:8000 --rate 8 --requests 500 --mix mix.toml --out out/eight",
    "pellucid bench-serve http://127.0.0.1:8000 --out out/after --compare out/before/bench-serve.json",
    "A mix has a table [[request]] for each kind: weight, name, and fields of a request as prompt, steps, sampler, n.",
)
EPILOG = "\n\n".join(("More:", *_EXAMPLES)).replace("[", r"\[")

Url = Annotated[str, typer.Argument(metavar="URL", help="The server, as http://127.0.0.1:8000.")]
ApiKey = Annotated[str | None, option("KEY", _KEY, "--api-key", envvar="PELLUCID_API_KEY")]


def command(
    url: Url,
    rate: Annotated[float | None, option("N", "Requests per second, on average (default: 4).")] = None,
    requests: Annotated[int | None, option("N", "Requests in all (default: 200).")] = None,
    mix: Annotated[
        Path | None, option("FILE", r"Kinds of requests in TOML (default: five kinds for scenes-128).")
    ] = None,
    seed: Annotated[int | None, option("N", "Seed of the arrival times, kinds and images (default: 0).")] = None,
    api_key: ApiKey = None,
    timeout: Annotated[float | None, option("SECONDS", "Of a request (default: 120).")] = None,
    out: Annotated[Path | None, option("FOLDER", "Output folder (default: out/bench-serve).")] = None,
    overwrite: Overwrite = False,
    compare: Annotated[Path | None, option("FILE", "A bench-serve.json to compare with.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load a server with requests at random times, and show latencies and where they go.

    The load is open: each request is sent at its time, whether or not those before it were answered.

    Example: [bold]pellucid bench-serve http://127.0.0.1:8000 --rate 4 --requests 200[/]
    """
    try:
        from pellucid.serve.bench import Load, read_mix
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        advice = "Install it: pip install 'pellucid[serve]'."
        must = "run with pydantic"
        raise PellucidError(rule("bench-serve", must, error.name, advice), "serve-extra") from None
    from pellucid.serve.bench_report import comparison, differences, draw, read_report
    from pellucid.serve.client import Remote

    remote = Remote.of(url, api_key)
    given = {"rate": rate, "requests": requests, "seed": seed, "timeout": timeout}
    load = Load(**given_only(**given, mix=None if mix is None else read_mix(mix)))
    other = None if compare is None else read_report(compare)
    table_file, chart_file = destinations(out or Path("out/bench-serve"), overwrite)
    found = measured(remote, load)
    if other is not None:
        found["compared"] = {"with": str(compare), "figures": comparison(found, other)}
        found["compared"]["loads_differ"] = differences(found, other)
    table_file.write(json.dumps(output.plain(found), indent=1))
    chart_file.write(partial(save, draw(found)))
    if as_json:
        output.print_json({name: value for name, value in found.items() if name not in ("samples", "answers")})
    else:
        show(found)
    for file in (table_file, chart_file):
        output.wrote(file, as_json)


def destinations(folder: Path, overwrite: bool) -> tuple[output.Destination, output.Destination]:
    """The files of a report, refused before the load where they could not be written."""
    from pellucid.evidence.report.charts import require

    require()
    if folder.exists() and not folder.is_dir():
        raise PellucidError(rule("--out", "a folder", str(folder)), "file")
    folder.mkdir(parents=True, exist_ok=True)
    names = ("bench-serve.json", "bench-serve.png")
    first, second = (output.destination(folder / name, "--out", overwrite=overwrite) for name in names)
    return first, second


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)


def measured(remote: Remote, load: Load) -> dict[str, Any]:
    """The report of a load, with a bar while it lasts."""
    import asyncio

    from pellucid.serve.bench import run
    from pellucid.serve.bench_report import report

    try:
        with output.progress("requests", load.requests) as done:
            return report(asyncio.run(run(remote, load, done)))
    except KeyboardInterrupt:
        print("cancelled: nothing was written", file=sys.stderr)
        raise typer.Exit(CANCELLED) from None


# --- Tables -------------------------------------------------------------------------------------------------------


def show(found: Mapping[str, Any]) -> None:
    """What happened, latencies by kind, where they went, and the server's load."""
    console, load, whole = output.console(), found["load"], found["all"]
    output.say(f"{found['url']} · pellucid {found['server']['version']} · {', '.join(found['server']['models'])}")
    output.say(f"{load['requests']} requests at {load['rate']:g}/s, seed {load['seed']} · {words_of(whole)}")
    speed = f"{found['images']} images in {found['seconds']:.1f} s: {found['images_per_second']:.2f}/s"
    output.say(f"{speed}; {found['images_per_second_asked']:.2f}/s were asked for")
    rows = {"all": whole, **found["kinds"]}
    columns = ("latency, s", "sent", "ok", "refused", "failed", "p50", "p90", "p95", "p99", "max")
    console.print(output.table(*columns, right=columns[1:], rows=latency_rows(rows)))
    parts = ("mean, s", "wait", "encode", "denoise", "decode", "rest", "together")
    console.print(output.table(*parts, right=parts[1:], rows=split_rows(rows)))
    for line in notes(found):
        output.say(line)
    if "compared" in found:
        show_comparison(found["compared"])


def words_of(row: Mapping[str, Any]) -> str:
    """`190 ok, 8 refused, 1 timeout, 1 of 500 internal_error`"""
    parts = [f"{row['ok']} ok", f"{row['refused']} refused", f"{row['timeouts']} timed out"]
    return ", ".join([*parts, *(f"{count} × {name}" for name, count in row["errors"].items())])


def latency_rows(rows: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for name, row in rows.items():
        failed = row["timeouts"] + sum(row["errors"].values())
        counts = (str(count) for count in (row["sent"], row["ok"], row["refused"], failed))
        yield (name, *counts, *(seconds(row["latency"].get(p)) for p in ("p50", "p90", "p95", "p99", "max")))


def split_rows(rows: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for name, row in rows.items():
        means = [part.get("mean") for part in row["split"].values()]
        known = [mean for mean in means if mean is not None]
        yield (name, *map(seconds, means), seconds(sum(known) if known else None))


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def notes(found: Mapping[str, Any]) -> Iterator[str]:
    """The server's load, its refusals, and whether this client kept up."""
    server, refusals = found["server_load"], found["refusals"]
    if server["occupancy"]:
        each = server["images_per_step"]
        words = f"step batches: {server['occupancy']['mean']:.0%} full on average"
        yield words + ("" if each is None else f", {each:.2f} images a step")
    if server["unanswered"]:
        most, mean = server["unanswered"]["max"], server["unanswered"]["mean"]
        yield f"queue: {mean:.1f} images unanswered on average, {most:.0f} at most, of {found['server']['queue']}"
    if refusals["by_code"]:
        codes = ", ".join(f"{count} × {code}" for code, count in refusals["by_code"].items())
        after = refusals["retry_after"]
        words = f"; retry after {after['p50']:g} s (median), {after['max']:g} s at most" if after else ""
        yield f"refusals: {codes}, answered in {refusals['seconds']['p50']:.3f} s (median){words}"
    if server["restarts"]:
        yield f"note: the engine was restarted {server['restarts']} times during the load"
    lag = found["lag"]["max"]
    late = f"; over {_LATE:g} s, this machine is too slow for the load" if lag > _LATE else ""
    yield f"sending: at most {1000 * lag:.1f} ms late{late}"


def show_comparison(compared: Mapping[str, Any]) -> None:
    columns = ("figure", "this", "other", "this / other")
    rows = [
        (
            row["figure"],
            figure(row["this"]),
            figure(row["other"]),
            "–" if row["ratio"] is None else f"{row['ratio']:.3f}",
        )
        for row in compared["figures"]
    ]
    output.say(f"compared with {compared['with']}")
    output.console().print(output.table(*columns, right=columns[1:], rows=rows))
    if compared["loads_differ"]:
        output.say(f"note: the loads differ: {'; '.join(compared['loads_differ'])}")


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
