"""Stages: encode text, encode the image, denoise, decode. Each is timed, measured, and owns what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from pellucid.core.errors import PellucidError, is_out_of_memory, rule
from pellucid.models import attention
from pellucid.pipeline.offload import guests_of, slots_of
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.tracker import METER

NAMES = ("text", "encode", "denoise", "decode")
NO_KERNEL = "No available kernel"  # how torch says that a backend cannot do an attention


@dataclass(frozen=True)
class Stage:
    """One stage of a run: what it took. `peak` is the device's peak in bytes while it ran; None where unmeasured.

    `began` is when, on the clock of `time.perf_counter`.
    """

    name: str
    seconds: float
    peak: int | None = None
    began: float = 0.0


@dataclass
class Stages:
    """Runs stages on a device under a policy, and keeps what each took.

    `explain(stage)` says who owns the peak of a stage and what would lower it; it is asked when memory runs out.
    """

    policy: Policy
    device: torch.device
    explain: Callable[[str], str] | None = None
    taken: list[Stage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy.check(self.device)

    @contextmanager
    def run(self, name: str, *networks: nn.Module | None) -> Iterator[None]:
        """Inside, the networks are on the device; with offload they leave it afterwards."""
        used = [network for network in networks if network is not None]
        began = self.begin()
        try:
            with ExitStack() as inside:
                if (meter := METER.get()) is not None:
                    inside.enter_context(meter.stage(name))
                inside.enter_context(self.present(name, used))
                inside.enter_context(attention.backend(self.policy.attention))
                yield
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise PellucidError(self.trouble(name), "out-of-memory") from error
            if NO_KERNEL in str(error):
                advice = "Use auto, which takes another where this one cannot."
                must = "a kernel that this device, dtype and head width allow"
                raise PellucidError(rule("attention", must, self.policy.attention, advice), "attention") from error
            raise
        self.end(name, began)

    def begin(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        return time.perf_counter()

    def end(self, name: str, began: float) -> None:
        peak = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        elif (meter := METER.get()) is not None:
            peak = meter.stages[name].total
        self.taken.append(Stage(name, time.perf_counter() - began, peak, began))

    @contextmanager
    def present(self, name: str, networks: list[nn.Module]) -> Iterator[None]:
        """The networks on the device: all of each, or of the denoising ones what stands outside of their blocks."""
        if self.policy.offload == "none":
            yield
            return
        guests = guests_of(self.device)
        by_block = self.policy.offload == "block" and name == "denoise"
        slots = [slot for one in networks for slot in (guests.attach(one) if by_block else slots_of(one))]
        with guests.staying(slots):
            yield

    def trouble(self, name: str) -> str:
        rehearsed = METER.get() is not None  # or the explanation, which rehearses, would explain itself
        told = "" if self.explain is None or rehearsed else self.explain(name)
        return f"memory must suffice for stage {name}; the device ran out of it. {told}".strip()
