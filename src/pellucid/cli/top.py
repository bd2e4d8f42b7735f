"""`pellucid top`: what a server does now, in the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from pellucid.cli import output
from pellucid.cli.bench_serve import ApiKey, Url
from pellucid.cli.options import AsJson, flag, option
from pellucid.core.errors import PellucidError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pellucid.serve.client import Remote

_BAR = 24  # characters of a full lane
_STAGES = ("wait", "encode", "denoise", "decode", "total")


def command(
    url: Url,
    interval: Annotated[float, option("SECONDS", "Between two looks.", min=0.1, max=3600)] = 1.0,
    once: Annotated[bool, flag("--once", "Look once, print it and stop.")] = False,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Watch a server: its queues, its step batches and its latencies, until Ctrl-C.

    Example: [bold]pellucid top http://127.0.0.1:8000[/]
    """
    from pellucid.serve.client import Remote

    remote = Remote.of(url, api_key)
    with suppress(KeyboardInterrupt):
        first = asyncio.run(remote.status())
        if once:
            show(first, remote, as_json)
        elif as_json or not sys.stdout.isatty():
            for state, note in looks(remote, interval, first):
                show({"error": note} if note else state, remote, as_json, note)
        else:
            watch(remote, interval, first)


def looks(remote: Remote, interval: float, state: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The server's state, again and again; where it does not answer, the last one and why."""
    note = ""
    while True:
        yield state, note
        time.sleep(interval)
        try:
            state, note = asyncio.run(remote.status()), ""
        except PellucidError as error:
            note = str(error)


def show(state: Mapping[str, Any], remote: Remote, as_json: bool, note: str = "") -> None:
    """A look in print: a frame, or JSON on a line."""
    if as_json:
        print(json.dumps(output.plain(state)), flush=True)
    else:
        output.console().print(note or frame(state, remote.url))
        sys.stdout.flush()


def watch(remote: Remote, interval: float, first: dict[str, Any]) -> None:
    """A frame in its place on the terminal."""
    from rich.live import Live

    with Live(console=output.console(), auto_refresh=False) as live:
        for state, note in looks(remote, interval, first):
            live.update(frame(state, remote.url, note), refresh=True)


# --- The frame ----------------------------------------------------------------------------------------------------


def frame(state: Mapping[str, Any], url: str, note: str = "") -> RenderableType:
    """All of a state: a head, the lanes, the queues, the percentiles."""
    from rich.console import Group
    from rich.text import Text

    engine = state.get("engine", {})
    lanes = ("step batch", "images", "full", "step, ms")
    queues = ("queue", "images", "oldest, s")
    stages = ("seconds", "p50", "p95", "p99")
    parts: list[RenderableType] = [head(state, url)]
    if note:
        parts.append(Text(f"note: {note} What follows is from before.", style="yellow"))
    parts += [
        output.table(*lanes, right=("step, ms",), rows=lane_rows(engine)),
        output.table(*queues, right=queues[1:], rows=queue_rows(engine)),
        output.table(*stages, right=stages[1:], rows=stage_rows(state)),
    ]
    return Group(*parts)


def head(state: Mapping[str, Any], url: str) -> RenderableType:
    from rich.text import Text

    ready, speed = state.get("ready"), state.get("images_per_second")
    word = "draining" if state.get("draining") else "ready" if ready else "not ready"
    text = Text.assemble(f"{url} · pellucid {state.get('version', '?')} · {', '.join(state.get('models', ()))} · ")
    text.append(word, style="bold green" if word == "ready" else "bold red")
    if state.get("why"):
        text.append(f" ({state['why']})")
    text.append(f"\n{state.get('unanswered', 0)} of {state.get('queue', '?')} unanswered · ")
    text.append("– images/s" if speed is None else f"{speed:.2f} images/s")
    text.append(f" · engine restarts: {state.get('restarts', 0)}\n")
    return text


def lane_rows(engine: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The step batches, with how full they are, and what a step of so many images takes."""
    lanes = engine.get("lanes", ())
    for lane in lanes:
        images, limit, took = lane["images"], max(lane["limit"], 1), lane.get("step_ms", {})
        milliseconds = took.get(str(images), next(reversed(took.values()), None))
        shape = "×".join(map(str, lane.get("shape", ())))
        yield shape, f"{images} of {limit}", bar(images / limit), number(milliseconds, 1)
    if not lanes:
        yield "none", "", bar(0.0), "–"


def queue_rows(engine: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    ages = engine.get("ages", {})
    for stage, count in engine.get("queues", {}).items():
        yield stage, str(count), number(ages.get(stage), 1)


def stage_rows(state: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    found = state.get("seconds", {})
    for stage in _STAGES:
        yield stage, *(number(found.get(stage, {}).get(p), 3) for p in ("p50", "p95", "p99"))


def bar(share: float) -> str:
    """How much of a whole, as a line of blocks."""
    full = round(_BAR * min(max(share, 0.0), 1.0))
    return "█" * full + "·" * (_BAR - full)


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
