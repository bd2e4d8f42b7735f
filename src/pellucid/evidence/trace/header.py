"""The header of a trace: what ran, on what, and how far it came."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch

from pellucid._version import __version__
from pellucid.core.batch import Work
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import Brownian, NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.core.reader import parse_object
from pellucid.core.reader import table as read_table
from pellucid.evidence.trace.layout import KIND, SCHEMA
from pellucid.pipeline.recipe import Recipe

State = Literal["recording", "whole", "broken off"]
_MOST = 10_000_000
_LIMITS = {"images": (1, _MOST), "steps": (1, _MOST), "done": (0, _MOST), "every": (1, _MOST), "plan_of": (0, _MOST)}
TENSORS = ("x", "x0", "eps", "delta")
WORKS: tuple[Work, ...] = get_args(Work)  # what the loop may be at
MARKS = 10  # that one step may have; a row has eight at most


@dataclass(frozen=True)
class StageTime:
    """A stage of the pipeline (text, encode, denoise, decode); `began` counts from the beginning of the run."""

    name: str
    began: float
    seconds: float
    peak: int | None = None


@dataclass(frozen=True)
class Header:
    """What a trace says of its run. `state` is "recording" in a file whose run was killed.

    `plan_tables` are the plans that occur, `plan_of` which of them each image ran. `steps` are the rows of the longest
    plan, `done` those that were recorded. `kept` are the tensors by step, of every `every`-th one and the last. `limit`
    is where saturation begins. `start` are digests of the first x. Seconds count from the beginning of the run.
    """

    state: State
    images: int
    shape: tuple[int, ...]
    dtype: str
    steps: int
    done: int
    kept: tuple[str, ...]
    every: int
    limit: float
    plan_tables: tuple[dict[str, Any], ...]
    plan_of: tuple[int, ...]
    noise: dict[str, Any]
    start: tuple[int, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    recipes: tuple[dict[str, Any], ...] = ()
    stages: tuple[StageTime, ...] = ()
    seconds: float | None = None  # of the whole run
    ended: str | None = None  # why a run broke off
    notes: tuple[str, ...] = ()

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """One per image; images of one plan share it."""
        plans = [Plan.from_dict(table, ran=True) for table in self.plan_tables]
        return tuple(plans[which] for which in self.plan_of)

    @cached_property
    def recipe(self) -> Recipe | None:
        """That of the first image; None for a run of a bare denoiser."""
        return Recipe.from_dict(self.recipes[0]) if self.recipes else None

    @property
    def numbers(self) -> int:
        """Numbers per image."""
        return int(np.prod(self.shape, dtype=np.int64))

    def kept_at(self, index: int) -> tuple[str, ...]:
        """The tensors that are kept of a step."""
        return self.kept if index % self.every == 0 or index == self.steps - 1 else ()

    def to_words(self) -> dict[str, str]:
        """As safetensors keeps them: text under names."""
        table = {f.name: getattr(self, f.name) for f in fields(self)} | {"stages": [vars(s) for s in self.stages]}
        text = json.dumps(table, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return {"kind": KIND, "schema": str(SCHEMA), "pellucid": __version__, "state": self.state, "trace": text}

    @staticmethod
    def from_words(words: dict[str, str]) -> Header:
        table = parse_object(words.get("trace", ""), "header of the trace", "trace")
        try:
            found = read_table(Header, table, "header of the trace", _LIMITS, "trace")
        except PellucidError as error:
            raise PellucidError(str(error), "trace") from None
        for which in found.plan_of:
            if which >= len(found.plan_tables) or not isinstance(found.plan_tables[which].get("rows"), list):
                raise _wrong("a plan is missing")
        lengths = [len(found.plan_tables[which]["rows"]) for which in found.plan_of]
        if not (len(lengths) == found.images and max(lengths) == found.steps):
            raise _wrong("its plans do not fit its images and steps")
        if found.done > found.steps:
            raise _wrong("it has more steps than its plans")
        if len(found.recipes) not in (0, found.images) or len(found.start) not in (0, found.images):
            raise _wrong("its recipes or its first digests are not those of its images")
        return found


def _wrong(why: str) -> PellucidError:
    return PellucidError(rule("header of the trace", "of one run", why), "trace")


def versions() -> dict[str, str]:
    python = platform.python_version()
    return {"pellucid": __version__, "torch": str(torch.__version__), "numpy": np.__version__, "python": python}


def machine(device: torch.device) -> dict[str, Any]:
    """What may change the last bits of a run."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": device.type, "name": name, "system": platform.system(), "threads": torch.get_num_threads()}


def noise_words(source: NoiseSource) -> dict[str, Any]:
    """A noise source by its kind, its seeds and what else makes it."""
    kinds = {Philox: "philox", Brownian: "brownian", TorchStream: "torch"}
    kind = kinds.get(type(source), type(source).__name__)
    seeds = [int(seed) for seed in getattr(source, "seeds", ())]
    return {"kind": kind, "seeds": seeds, **({"clock": source.clock} if isinstance(source, Brownian) else {})}


def noise_source(words: dict[str, Any]) -> NoiseSource:
    """The noise source of these words; one of the caller's own cannot be made again."""
    kind, seeds = words.get("kind"), words.get("seeds")
    if kind == "brownian":
        return Brownian(seeds, words.get("clock", "snr"))
    if kind not in ("philox", "torch"):
        advice = "It was made with a noise source of its own: give it again, in Python."
        raise PellucidError(rule("noise of the trace", "philox, brownian or torch", kind, advice), "trace-noise")
    return Philox(seeds) if kind == "philox" else TorchStream(seeds)


def distinct(plans: Sequence[Plan]) -> tuple[list[Plan], tuple[int, ...]]:
    """The plans that occur, and which of them each image has."""
    known = {id(plan): plan for plan in plans}
    order = list(known)
    return list(known.values()), tuple(order.index(id(plan)) for plan in plans)
