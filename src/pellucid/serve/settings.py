"""What a server is started with: from the command line, over a TOML file."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_text, read_toml

_MOST_BYTES = 1 << 20
_LIMITS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "queue": (1, 100_000),
    "capacity": (1, 256),
    "max_pixels": (64, 1 << 26),
    "max_steps": (1, 10_000),
    "memory": (0.001, 1 << 20),
    "step_timeout": (0.1, 86_400),
    "start_timeout": (1, 86_400),
    "kept_seconds": (1, 86_400),
    "replicas": (1, 1000),
}
_WHOLE = frozenset({"port", "queue", "capacity", "max_pixels", "max_steps", "replicas"})


@dataclass(frozen=True)
class ServeSettings:
    """`models` and `loras` are paths by name. `queue` is how many images may be unanswered at once."""

    models: Mapping[str, str] = field(default_factory=lambda: {"scenes-128": "scenes-128"})
    loras: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    queue: int = 64
    capacity: int = 8  # images in a step batch
    memory: float | None = None  # GiB for the models and all that runs
    device: str | None = None
    dtype: str | None = None
    max_pixels: int = 2048 * 2048
    max_steps: int = 200
    step_timeout: float = 120.0  # seconds; a step that takes longer is ended with its engine
    start_timeout: float = 600.0
    kept_seconds: float = 600.0  # that the result of an asynchronous job waits to be fetched
    keys: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of keys, by name
    open: bool = False
    candidates: tuple[str, ...] = ()  # folders from which new versions of models may be loaded
    records: str | None = None  # a folder for what roll-outs decided
    replicas: int = 1  # of the engine, with Ray
    ray_address: str | None = None  # of a cluster; a local one is started without

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
            whole = isinstance(value, int) or name not in _WHOLE
            if value is not None and not (good and whole):
                must = f"{'a whole number ' if name in _WHOLE else ''}from {low:g} to {high:g}"
                raise PellucidError(rule(name, must, value), "serve-settings")
        if not isinstance(self.host, str) or not self.host:
            raise PellucidError(rule("host", "a name or an address", self.host), "serve-settings")
        for name in ("models", "loras"):
            held = getattr(self, name)
            if not all(isinstance(k, str) and isinstance(v, str) and k and v for k, v in dict(held).items()):
                raise PellucidError(rule(name, "paths by name", held), "serve-settings")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        if not all(isinstance(folder, str) and folder for folder in self.candidates):
            raise PellucidError(rule("candidates", "folders", self.candidates), "serve-settings")
        if not self.models:
            raise PellucidError(rule("models", "at least one", 0), "serve-settings")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound to the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_settings(path: str | Path | None, given: Mapping[str, Any]) -> ServeSettings:
    """The settings of a file, where there is one, with those of the command line over them."""
    found: dict[str, Any] = {}
    if path is not None:
        found = read_toml(Path(path), "config", _MOST_BYTES, "serve-settings")
    keys = found.pop("api_keys", None)
    if keys is not None:
        found["keys"] = read_keys(Path(path or ".").parent / keys)
    known = [one.name for one in fields(ServeSettings)]
    unknown = [name for name in found if name not in known or (name == "keys" and keys is None)]
    if unknown:
        raise PellucidError(rule("config", f"of {', '.join(known)}", unknown[0]), "serve-settings")
    return ServeSettings(**found | {name: value for name, value in given.items() if value is not None})


def read_keys(path: str | Path) -> dict[str, str]:
    """Keys by name, of a file with `name key` in each line; what is kept are their hashes."""
    found: dict[str, str] = {}
    for number, line in enumerate(read_text(Path(path), "api-keys", _MOST_BYTES, "api-keys").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, key = words if len(words) == 2 else (f"key-{number}", words[0])
        if len(words) > 2 or len(key) < 16:
            must = "`name key`, with keys of at least 16 characters"
            raise PellucidError(rule(f"line {number} of the key file", must, f"{len(words)} words"), "api-keys")
        found[name] = hashlib.sha256(key.encode()).hexdigest()
    if not found:
        raise PellucidError(rule("the key file", "one with at least one key", "none"), "api-keys")
    return found


def owner_of(keys: Mapping[str, str], given: str) -> str | None:
    """The name of the key that was given; it takes as long whichever it is."""
    own, found = hashlib.sha256(given.encode()).hexdigest(), None
    for name, digest in keys.items():
        if hmac.compare_digest(own, digest):
            found = name
    return found
