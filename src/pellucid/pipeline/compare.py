"""Strategies side by side: what each saves and what it costs, in bytes, milliseconds and changed pixels."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.interop.components import Components
from pellucid.models.captured import StepGraphs
from pellucid.models.graph_memory import GraphMemory
from pellucid.pipeline import stages
from pellucid.pipeline.memory import guests_by_name, predict
from pellucid.pipeline.model import map_networks, networks_by_name, set_memory_format
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.policy import LEAST_TILE, ON_CPU, Policy
from pellucid.pipeline.request import Request
from pellucid.pipeline.result import Result
from pellucid.pipeline.shelf import AdapterShelf
from pellucid.pipeline.tracker import GRAIN, Tracker, metered

BASE = "as it is"
_TILES = (64, 32, LEAST_TILE)


@dataclass(frozen=True)
class Strategy:
    """One way to run the same request. `against` names the row that its image is compared with."""

    name: str
    policy: Policy
    request: Request
    dtype: torch.dtype | None = None
    merged: bool = False  # LoRAs written into the weights for the run, instead of a view a request
    against: str = BASE


@dataclass(frozen=True)
class StrategyCost:
    """What a strategy took: peaks by stage, predicted and measured, and seconds of a run.

    `times` is the ratio to runs of the first strategy just before and after, so that a busy machine counts for both.
    Differences are in 255ths of the range of a pixel. `trouble` says why a strategy did not run.
    """

    strategy: Strategy
    predicted: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None
    times: float | None = None
    largest: float | None = None
    mean: float | None = None
    trouble: str = ""


@dataclass(frozen=True)
class MemoryUse:
    """What a real run took: bytes at the peak of each stage, its seconds, what it made, and what graphs keep."""

    peaks: dict[str, int]
    seconds: dict[str, float]
    result: Result
    graphs: GraphMemory = field(default_factory=GraphMemory)

    @property
    def stage(self) -> str:
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def peak(self) -> int:
        return self.peaks[self.stage]


def strategies(pipe: Pipeline, bare: Request, dressed: Request) -> tuple[list[Strategy], list[str]]:
    """Each field of the policy alone, half precision, then each adapter of `dressed`; and what is left out here."""
    policy, device = pipe.policy, pipe.device.type
    found = [Strategy(BASE, policy, bare)]
    for name, value in _changes(pipe, bare):
        found.append(Strategy(f"{name}={value}", replace(policy, **{name: value}), bare))
    if next(pipe.components.network.parameters()).dtype == torch.float32:
        found.append(Strategy("dtype=bfloat16", policy, bare, dtype=torch.bfloat16))
    if dressed.controls:
        found.append(Strategy("ControlNet", policy, replace(bare, controls=dressed.controls)))
    if dressed.loras:
        with_loras = replace(bare, loras=dressed.loras)
        found.append(Strategy("LoRA, view", policy, with_loras))
        found.append(Strategy("LoRA, merged", policy, with_loras, merged=True, against="LoRA, view"))
    left = ["offload: the networks are on the CPU already", "compile: it takes minutes here"] if device == "cpu" else []
    return found, left


def _changes(pipe: Pipeline, request: Request) -> Iterator[tuple[str, Any]]:
    """The fields of a policy that can be set on this device for this request and are not yet set."""
    policy, cpu = pipe.policy, pipe.device.type == "cpu"
    wide, high = pipe.size_of(request)
    for name in ON_CPU if cpu else ("flash", "efficient", "cudnn", "math"):
        if name not in ("auto", policy.attention):
            yield "attention", name
    if pipe.components.vae is not None:
        if request.n > 1 and not policy.vae_slicing:
            yield "vae_slicing", True
        for tile in _TILES:
            if tile < max(wide, high) // pipe.factor and policy.vae_tile is None:
                yield "vae_tile", tile
                break
    if not policy.channels_last:
        yield "channels_last", True
    if not cpu and policy.offload == "none":
        yield "offload", "component"
        yield "offload", "block"
    if not cpu and not policy.compile:
        yield "compile", True


def compare(
    pipe: Pipeline, found: Sequence[Strategy], seen: Callable[[], None], repeats: int = 3
) -> list[StrategyCost]:
    """Runs every strategy, the first of which is what the others are compared with; one that fails says why."""
    by_name: dict[str, list[Image.Image]] = {}
    rows: list[StrategyCost] = []
    for strategy in found:
        try:
            before = _fastest_run(pipe, found[0].request, 1) if rows else math.inf
            row, seconds, images = _cost_of(pipe, strategy, repeats)
            after = _fastest_run(pipe, found[0].request, 1) if rows else seconds
            by_name[strategy.name] = images
            largest, mean = _difference(images, by_name[strategy.against])
            rows.append(replace(row, times=seconds / min(before, after), largest=largest, mean=mean))
        except PellucidError as error:
            if not rows:  # there is nothing to compare with
                raise
            rows.append(StrategyCost(strategy, trouble=f"{error.code}: {error}"))
        seen()
    return rows


def _cost_of(pipe: Pipeline, strategy: Strategy, repeats: int) -> tuple[StrategyCost, float, list[Image.Image]]:
    with arrange(pipe, strategy) as (ready, request, beside):
        predicted = {name: peak.total for name, peak in predict(ready, request, beside=beside).stages.items()}
        found = measure(ready, request, beside)
        seconds = _fastest_run(ready, request, repeats)
    # What torch.compile makes allocates behind the back of a tracker.
    blind = strategy.policy.compile and pipe.device.type == "cpu"
    cost = StrategyCost(strategy, predicted, {} if blind else found.peaks, seconds)
    return cost, seconds, found.result.images


def _difference(images: Sequence[Image.Image], others: Sequence[Image.Image]) -> tuple[float, float]:
    """The largest and the mean difference of pixels, in 255ths."""
    apart = [
        np.abs(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64))
        for a, b in zip(images, others, strict=True)
    ]
    return float(max(one.max() for one in apart)), float(np.mean([one.mean() for one in apart]))


# --- measurement ---------------------------------------------------------------------------------------------------


def measure(pipe: Pipeline, request: Request, beside: Sequence[Tensor] = ()) -> MemoryUse:
    """Runs a request and measures the peak of each stage: torch's own count on CUDA, living tensors on the CPU.

    The CPU's figure does not see what kernels borrow inside of themselves. Tensors of others are not counted.
    """
    pipe.run(request)  # reads adapters, compiles, captures, warms up
    own = Tracker([pipe.device.type], grain=GRAIN if pipe.device.type == "cuda" else 1)
    networks = {**networks_by_name(pipe.components), **guests_by_name(pipe, request)}
    views = networks_by_name(pipe.with_loras(request)[0])  # which are kept, with the weights that LoRAs change
    own.hold([*networks.values(), *views.values()], beside)
    if pipe.device.type == "cuda":
        kept = pipe.graph_memory()
        others = _others_on(pipe.device, own.weights + kept.total - kept.idle)
        return replace(_memory_use(pipe.run(request), others), graphs=pipe.graph_memory())
    with metered(own):
        result = pipe.run(request)
    return _memory_use(result, 0)


def _memory_use(result: Result, others: int) -> MemoryUse:
    peaks = {stage.name: (stage.peak or 0) - others for stage in result.stages}
    return MemoryUse(peaks, {stage.name: stage.seconds for stage in result.stages}, result)


def _others_on(device: torch.device, own: int) -> int:
    """Bytes on a GPU that are neither the networks' nor the run's."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # else the workspace of the first run would count as somebody else's
        clear()
    return max(torch.cuda.memory_allocated(device) - own, 0)


def _fastest_run(pipe: Pipeline, request: Request, repeats: int = 3) -> float:
    """Seconds of the fastest of some whole runs, which must have been warmed up: others on the machine only add."""
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        pipe.run(request)
        took.append(time.perf_counter() - began)
    return min(took)


# --- arranging a pipeline for a strategy, and back ------------------------------------------------------------------


@contextmanager
def arrange(pipe: Pipeline, strategy: Strategy) -> Iterator[tuple[Pipeline, Request, list[Tensor]]]:
    """The pipeline under a strategy, the request to run on it, and the tensors that it keeps besides its networks."""
    with ExitStack() as until:
        ready, request, kept = replace(pipe, policy=strategy.policy, graphs=StepGraphs()), strategy.request, []
        if strategy.dtype is not None:
            ready = replace(ready, components=in_dtype(pipe.components, strategy.dtype), shelf=AdapterShelf())
        if strategy.merged:
            kept = until.enter_context(_merge_loras(ready, request))
            request = replace(request, loras=())
        if strategy.policy.channels_last and not pipe.policy.channels_last:
            until.enter_context(_channels_innermost(ready))
        if strategy.policy.offload != "none" and pipe.policy.offload == "none":
            until.enter_context(_wait_on_cpu(ready))
        yield ready, request, kept


def in_dtype(components: Components, dtype: torch.dtype) -> Components:
    """The same model in another precision."""
    return map_networks(replace(components, controlnets=()), lambda network: copy.deepcopy(network).to(dtype))


@contextmanager
def _merge_loras(pipe: Pipeline, request: Request) -> Iterator[list[Tensor]]:
    """LoRAs in the weights; yields the originals, which are kept to put back."""
    with pipe.merge(*request.named_loras) as inside:
        held = [tensors.values() for part in inside.parts for tensors in part.originals.values()]
        yield [tensor for tensors in held for tensor in tensors if tensor is not None]


@contextmanager
def _channels_innermost(pipe: Pipeline) -> Iterator[None]:
    """Channels innermost in the networks that convolve."""
    set_memory_format(pipe.components, torch.channels_last)
    try:
        yield
    finally:
        set_memory_format(pipe.components, torch.contiguous_format)


@contextmanager
def _wait_on_cpu(pipe: Pipeline) -> Iterator[None]:
    """All networks on the CPU, where offload expects them."""
    networks = networks_by_name(pipe.components).values()
    for network in networks:
        network.to("cpu")
    try:
        yield
    finally:
        for network in networks:
            stages.detach_hooks(network)
            network.to(pipe.device)
