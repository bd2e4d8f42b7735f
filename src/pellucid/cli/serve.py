"""`pellucid serve`: models behind OpenAI's images API."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pellucid.cli.options import Device, flag, option
from pellucid.core.errors import PellucidError, rule


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[[NAME=]MODEL]…", help="Models: folders, files, hub ids or bundles."),
    ] = None,
    host: Annotated[str | None, option("HOST", "Where it listens (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, option("N", "The port (default: 8000); 0 takes a free one.")] = None,
    api_keys: Annotated[
        Path | None, option("FILE", "Keys, one `name key` per line; without a key nobody gets in.")
    ] = None,
    queue: Annotated[int | None, option("N", "Images that may be unanswered at once (default: 64).")] = None,
    capacity: Annotated[int | None, option("N", "Images in a step batch (default: 8).")] = None,
    memory: Annotated[float | None, option("GIB", "Memory for the models and all that runs.")] = None,
    lora: Annotated[list[str] | None, option("NAME=FILE", "A LoRA that requests may name; may be repeated.")] = None,
    candidates: Annotated[
        list[str] | None, option("DIR", "A folder from which new versions may be rolled out; may be repeated.")
    ] = None,
    records: Annotated[str | None, option("DIR", "Where roll-outs write what they decided and why.")] = None,
    config: Annotated[Path | None, option("FILE", "Settings in TOML; what is given here counts more.")] = None,
    dtype: Annotated[str | None, option("NAME", "float32, float16, bfloat16, fp8 or auto.")] = None,
    open: Annotated[bool, flag("--open", "Answer everybody, without keys, also beyond this machine.")] = False,
    ray: Annotated[bool, flag("--ray", "Run the engines as replicas of a Ray Serve deployment.")] = False,
    replicas: Annotated[int | None, option("N", "Engines, with --ray (default: 1).")] = None,
    ray_address: Annotated[str | None, option("ADDRESS", "Ray's cluster (default: a local one).")] = None,
    device: Device = None,
) -> None:
    """Serve models over HTTP, for the `openai` client and others; requests of all kinds share step batches.

    Example: [bold]pellucid serve --port 8000[/]; without a model it serves scenes-128.
    """
    try:
        import uvicorn

        from pellucid.serve.api import make_app
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "prometheus_client", "multipart", "starlette", "pydantic"):
            raise
        advice = "Install it: pip install 'pellucid[serve]'."
        raise PellucidError(rule("serve", "run with fastapi and uvicorn", error.name, advice), "serve-extra") from None
    from pellucid.serve.settings import is_loopback, read_keys, read_settings

    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "queue": queue,
        "capacity": capacity,
        "memory": memory,
        "device": device,
        "dtype": dtype,
        "open": open or None,
        "models": named(models) or None,
        "loras": named(lora) or None,
        "candidates": tuple(candidates or ()) or None,
        "records": records,
        "replicas": replicas,
        "ray_address": ray_address,
        "keys": None if api_keys is None else read_keys(api_keys),
    }
    settings = read_settings(config, given)
    if not is_loopback(settings.host) and not settings.keys and not settings.open:
        advice = "Give --api-keys FILE, or --open to answer everybody."
        raise PellucidError(rule("--host", "127.0.0.1 without keys", settings.host, advice), "serve-keys")
    if not ray and (replicas is not None or ray_address is not None):
        raise PellucidError("--replicas and --ray-address must come with --ray.", "usage")
    app = make_app(settings, engines_of_ray()) if ray else make_app(settings)
    log_as_lines()

    class Server(uvicorn.Server):
        """Says its address once the port is open, and ends with 0 after a signal that it has obeyed."""

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                port = self.servers[0].sockets[0].getsockname()[1]
                line = {"address": f"http://{settings.host}:{port}", "models": list(settings.models)}
                print(json.dumps({"event": "listening", **line}), flush=True)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, self.handle_exit)
            yield

    server = Server(uvicorn.Config(app, host=settings.host, port=settings.port, log_config=None, access_log=False))
    server.run()
    if not server.started:
        raise PellucidError(rule("--port", "one that is free", settings.port), "serve-port")


def engines_of_ray() -> Any:
    try:
        from pellucid.serve.ray import RayEngines
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        advice = "Install it: pip install 'pellucid[serve,ray]'."
        raise PellucidError(rule("--ray", "run with ray", "none", advice), "serve-extra") from None
    return RayEngines


def named(given: list[str] | None) -> dict[str, str]:
    """NAME=PATH pairs; a path alone goes by its last part, or by itself where it is a bundle's or the hub's name."""
    found: dict[str, str] = {}
    for one in given or ():
        name, separator, path = one.partition("=")
        path = path if separator else one
        name = name if separator else Path(one).name if Path(one).exists() else one
        if name in found:
            raise PellucidError(rule("models", "of different names", name, "Give NAME=MODEL."), "serve-settings")
        found[name] = path
    return found


class Lines(logging.Formatter):
    """A JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(time.time(), 3), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_lines() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
