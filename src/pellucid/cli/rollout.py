"""`pellucid rollout`: a new version of a model into a running server, step by step."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.console import Console

from pellucid.cli.options import flag, option
from pellucid.core.errors import PellucidError, rule

_FAILED = 1  # the exit code of a version that was rolled back


def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    version: Annotated[
        str, typer.Argument(metavar="MODEL", help="The new version: a bundle, or a folder it may load.")
    ],
    of: Annotated[str | None, option("NAME", "The model that it replaces (default: the server's first).")] = None,
    canary: Annotated[str, option("SHARE", "The share of the traffic that it gets first, as 5% or 0.05.")] = "5%",
    shadow: Annotated[
        bool, flag("--shadow", "Before that, send it copies of requests, whose images nobody sees.")
    ] = False,
    requests: Annotated[int, option("N", "Requests that it must answer in each stage.")] = 20,
    slowdown: Annotated[float, option("X", "The most that its median may take, of the old version's.")] = 1.5,
    distance: Annotated[float | None, option("D", "The most that images of fixed seeds may differ, of 255.")] = None,
    adherence: Annotated[float | None, option("A", "The most adherence to scenes' prompts that it may lose.")] = None,
    api_key: Annotated[str | None, option("KEY", "The server's key (default: $PELLUCID_API_KEY).")] = None,
    timeout: Annotated[float, option("S", "Seconds until it is rolled back.")] = 3600.0,
    as_json: Annotated[bool, flag("--json", "Print the record as JSON.")] = False,
) -> None:
    """Roll out a new version of a model: examine it, try it on traffic, then promote it or roll it back.

    Example: [bold]pellucid rollout http://127.0.0.1:8000 ./my-model-v2 --canary 5% --shadow[/]
    """
    server = Client(url.rstrip("/"), api_key or os.environ.get("PELLUCID_API_KEY"))
    asked: dict[str, Any] = {
        "path": os.path.realpath(version) if os.path.exists(version) else version,
        "model": of,
        "canary": share(canary),
        "shadow": shadow,
        "requests": requests,
        "slowdown": slowdown,
        "distance": distance,
        "adherence": adherence,
    }
    found = server.ask("POST", "/v1/rollouts", asked)
    console, until = Console(stderr=True), time.monotonic() + timeout
    place = f"/v1/rollouts/{found['id']}"
    with console.status("loading") as status:
        while found["stage"] not in ("promoted", "rolled back"):
            if time.monotonic() > until:
                server.ask("DELETE", place)
            time.sleep(0.3)
            found = server.ask("GET", place)
            status.update(line_of(found))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(f"{found['stage']}: {found['why']}.")
    if found["stage"] != "promoted":
        raise typer.Exit(_FAILED)


def share(text: str) -> float:
    """5% or 0.05."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise PellucidError(rule("--canary", "a share as 5% or 0.05", text), "usage") from None
    if not 0 <= value <= 1:
        raise PellucidError(rule("--canary", "from 0 to 100%", text), "usage")
    return value


def line_of(found: dict[str, Any]) -> str:
    arms = found["stages"].get(found["stage"], {})
    counts = ", ".join(f"{name} {arm['answers']} answers, {arm['errors']} errors" for name, arm in arms.items())
    return f"{found['stage']}  {counts}"


class Client:
    """A server's JSON."""

    def __init__(self, url: str, key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise PellucidError(rule("URL", "one that begins with http:// or https://", url), "usage")
        self.url, self.headers = url, {"content-type": "application/json"}
        if key:
            self.headers["authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            try:
                said = json.load(error)["error"]
            except (ValueError, KeyError, TypeError):
                said = {"message": f"HTTP {error.code}", "code": "http"}
            raise PellucidError(said["message"], str(said["code"])) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise PellucidError(
                rule("URL", "that of a server that answers", self.url, f"{reason}."), "server"
            ) from None
