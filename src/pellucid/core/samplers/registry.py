"""The registry: what each sampler is, and the names by which people know it."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pellucid.core.errors import PellucidError, PlanError, nearest, rule
from pellucid.core.grid import Path
from pellucid.core.plan import Clock, Row
from pellucid.core.schedule import Level, Target

Family = Literal[
    "ddpm", "euler", "runge-kutta", "multistep", "dpm-solver", "exponential", "flow", "distilled", "inversion"
]
# How diffusers lays the grid of the class that implements a sampler (core/dialect_diffusers.py).
PeerGrid = Literal["k", "solver", "training", "flow", "ipndm", "none"]


@dataclass(frozen=True)
class Draft:
    """What a sampler function returns: rows over a history kept in `basis`."""

    rows: Sequence[Row]
    basis: Target = "x0"
    end: Level | None = None
    declared: str = ""


@dataclass(frozen=True)
class Sampler:
    """A sampler: the function that writes its rows, and what people want to know of it."""

    name: str
    title: str
    make: Callable[..., Draft]
    family: Family
    order: int
    deterministic: bool
    suits: str
    paper: str
    frame: Literal["line", "native"] = "native"
    straight: bool = False
    calls: int = 1
    clock: Clock = "snr"
    peer: PeerGrid = "solver"
    aliases: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """The options and their defaults."""
        parameters = list(inspect.signature(self.make).parameters.values())[1:]
        return {p.name: p.default for p in parameters}

    def draft(self, path: Path, options: dict[str, Any]) -> Draft:
        known = self.options()
        for name in options:
            if name not in known:
                hint = f"Known: {', '.join(known) or 'none'}."
                raise PlanError(rule("option", f"one that {self.name} reads", name, hint), "option")
        try:
            with np.errstate(divide="raise", invalid="raise", over="raise"):
                return self.make(path, **options)
        except (ZeroDivisionError, OverflowError, FloatingPointError, np.linalg.LinAlgError):
            raise PlanError(
                f"levels must differ from call to call for {self.name}; got a step that repeats one or is too long to "
                "compute. Use fewer steps, or another grid.",
                "repeated-level",
            ) from None


def value_of(entry: Sampler, key: str, text: Any) -> Any:
    """The text of an option as the type of its default. What the sampler does not know is left to it to refuse."""
    known = entry.options()
    if key not in known or not isinstance(text, str):
        return text
    default = known[key]
    hint = str(inspect.signature(entry.make).parameters[key].annotation)
    try:
        if isinstance(default, bool):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        if isinstance(default, (int, float)):
            return _number(text, type(default))
        if isinstance(default, str):
            return text
        if hint.startswith("tuple[int"):
            return tuple(_number(part, int) for part in text.split(",") if part.strip())
        if hint.startswith("tuple[float"):
            return tuple(_number(part, float) for part in text.split(",") if part.strip())
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            type(default), "numbers, as in 1,2"
        )
        raise PellucidError(rule(f"option {key}", kind, text), "option") from None
    raise PellucidError(f"option {key} must be set by a dialect; got {text!r}. It has no words here.", "option")


def _number(text: str, kind: type) -> Any:
    found = kind(text)
    if math.isnan(found):
        raise ValueError(text)
    return found


REGISTRY: dict[str, Sampler] = {}
NAMES: dict[str, str] = {}  # squeezed alias → name


def _squeeze(name: str) -> str:
    """Names are compared without case, blanks and punctuation, but `+` counts: DPM++ 2M = dpmpp_2m."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("++", "pp"))


def _register(sampler: Sampler) -> Sampler:
    if sampler.name in REGISTRY:
        raise AssertionError(f"two samplers are called {sampler.name}")
    REGISTRY[sampler.name] = sampler
    for alias in (sampler.name, sampler.title, *sampler.aliases):
        owner = NAMES.setdefault(_squeeze(alias), sampler.name)
        if owner != sampler.name:
            raise AssertionError(f"{alias} means {owner} and {sampler.name}")
    return sampler


def sampler(**about: Any) -> Callable[[Callable[..., Draft]], Callable[..., Draft]]:
    """Registers the decorated function as a sampler."""

    def wrap(make: Callable[..., Draft]) -> Callable[..., Draft]:
        _register(Sampler(make=make, **about))
        return make

    return wrap


def resolve(name: str) -> tuple[Sampler, str | None]:
    """The sampler that a name means, and the grid that the name asks for ("DPM++ 2M Karras" → karras)."""
    key = _squeeze(name)
    for suffix, grid in (
        ("", None),
        ("karras", "karras"),
        ("exponential", "exponential"),
        ("sgmuniform", "sgm_uniform"),
    ):
        stem = key[: len(key) - len(suffix)] if suffix and key.endswith(suffix) else key
        if (not suffix or stem != key) and stem in NAMES:
            return REGISTRY[NAMES[stem]], grid
    known = [*REGISTRY, *(s.title.lower() for s in REGISTRY.values())]
    raise PlanError(rule("sampler", "a known name", name, nearest(name, known)), "unknown-sampler")
