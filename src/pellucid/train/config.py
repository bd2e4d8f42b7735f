"""A training run as one file: TOML, read strictly into frozen dataclasses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.reader import naming, read_toml
from pellucid.core.reader import table as read
from pellucid.train.objective import Objective, Times, Weighting

_T = TypeVar("_T")
MAX_BYTES = 1 << 20
_MAX_COUNT, _MAX_BATCH, _MAX_SEED = 10**12, 1 << 20, 2**63 - 1


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective of a denoiser. `schedule` is a name and its options, as `schedules.from_dict` takes them."""

    schedule: Mapping[str, Any]
    target: str = "eps"
    times: Times = field(default_factory=Times)
    weighting: Weighting = field(default_factory=Weighting)
    noise_offset: float = 0.0
    dropout: float = 0.0

    def build(self) -> Objective:
        if "name" not in self.schedule:
            raise PellucidError(rule("schedule", "a table with a name", dict(self.schedule)), "config-missing")
        curve, target = schedules.from_dict(dict(self.schedule)), targets.named(self.target)
        return Objective(curve, target, self.times, self.weighting, self.noise_offset, self.dropout)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. The rate rises over `warmup` steps and then stays, or falls to 0 along a cosine; `clip` is the largest
    norm of the gradient (0: not clipped)."""

    rate: float = 1e-4
    warmup: int = 0
    decay: Literal["constant", "cosine"] = "constant"
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "rate", "eps")
        counts(self, "warmup")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise PellucidError(rule("betas", "two numbers from 0 to below 1", list(self.betas)), "config-value")
        if self.weight_decay < 0 or self.clip < 0:
            raise PellucidError(rule("weight_decay, clip", "0 or more", (self.weight_decay, self.clip)), "config-value")


@dataclass(frozen=True)
class EngineConfig:
    """How it runs. `capture` replays a whole step as one CUDA graph (one GPU, no other rank)."""

    dtype: Literal["float32", "bf16"] = "float32"
    accumulate: int = 1
    recompute: bool = False  # activations are computed again in the backward pass instead of kept
    compile: bool = False
    capture: bool = False
    strategy: Literal["ddp", "fsdp"] = "ddp"

    def __post_init__(self) -> None:
        counts(self, "accumulate", low=1)


@dataclass(frozen=True)
class LogConfig:
    """How often things are written, in steps; 0 means never. The newest checkpoints are kept."""

    every: int = 50
    checkpoint_every: int = 1000
    keep: int = 2
    pictures_every: int = 0
    pictures: int = 64
    tensorboard: bool = True

    def __post_init__(self) -> None:
        counts(self, "every", "keep", "pictures", low=1)
        counts(self, "checkpoint_every", "pictures_every")
        if self.checkpoint_every % self.every:
            must = f"a multiple of log.every ({self.every}), so that a resumed log is the same"
            raise PellucidError(rule("log.checkpoint_every", must, self.checkpoint_every), "config-value")


@dataclass(frozen=True)
class TrainConfig:
    """A run. `task` and `data` are tables with a `kind`; the rest of them belongs to that kind."""

    task: Mapping[str, Any]
    data: Mapping[str, Any]
    steps: int
    batch: int  # images of a step, of all ranks together
    seed: int = 0
    ema: tuple[float, ...] = ()  # lengths in images: an image counts half as much after so many more
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        counts(self, "steps", low=1)
        counts(self, "batch", low=1, high=_MAX_BATCH)
        counts(self, "seed", high=_MAX_SEED)

    @staticmethod
    def load(path: str | Path) -> TrainConfig:
        """From a TOML file."""
        with naming(Path(path).name):
            return read(TrainConfig, parse(Path(path)), "config")

    def fingerprint(self) -> str:
        """Of all that shapes the weights: a run is resumed with the same, or refused. A longer run is the same run."""
        return hashlib.sha256(json.dumps(self.shaping(to_plain(self)), sort_keys=True).encode()).hexdigest()[:16]

    def shaping(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """What of a plain config shapes the weights of this run."""
        free = ("log", "steps") if self.optimizer.decay == "constant" else ("log",)
        return {key: value for key, value in plain.items() if key not in free}

    def unlike(self, plain: Mapping[str, Any]) -> list[str]:
        """The keys (`optimizer.rate`) by which a plain config would shape other weights."""
        mine, theirs = (_leaves(self.shaping(one)) for one in (to_plain(self), plain))
        return [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]


def check_beginning(network: Mapping[str, Any], start: str) -> None:
    """A network is made from a config or read from a folder."""
    if bool(network) == bool(start):
        raise PellucidError(rule("network, start", "one of them", "both" if start else "neither"), "config-value")


def parse(path: Path) -> dict[str, Any]:
    """A TOML file as plain values."""
    return read_toml(path, "config", MAX_BYTES, "config-file")


def to_plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    return [to_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _leaves(plain: Mapping[str, Any], under: str = "") -> dict[str, str]:
    """The values of nested tables, as JSON, by their keys joined with dots."""
    found: dict[str, str] = {}
    for key, value in plain.items():
        deeper = isinstance(value, Mapping) and value
        found |= _leaves(value, f"{under}{key}.") if deeper else {under + key: json.dumps(value)}
    return found


def chosen(table: Mapping[str, Any], kinds: Mapping[str, type[_T]], where: str) -> _T:
    """The dataclass that a table's `kind` names, from the rest of the table."""
    rest = dict(table)
    kind = rest.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        advice = nearest(str(kind), kinds)
        raise PellucidError(rule(f"{where}.kind", "one of " + ", ".join(kinds), kind, advice), "config-value")
    return read(kinds[kind], rest, where)


def counts(config: Any, *names: str, low: int = 0, high: int = _MAX_COUNT) -> None:
    for name in names:
        if not low <= getattr(config, name) <= high:
            must = f"at least {low}" if getattr(config, name) < low else f"at most {high}"
            raise PellucidError(rule(name, must, getattr(config, name)), "config-value")


def positive(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise PellucidError(rule(name, "above 0", getattr(config, name)), "config-value")
