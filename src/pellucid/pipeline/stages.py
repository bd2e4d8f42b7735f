"""Stages: encode text, encode the picture, denoise, decode. Each is timed, measured, and owns what it holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from pellucid.core.errors import PellucidError
from pellucid.models import attention
from pellucid.pipeline.policy import Policy

ADVICE = {
    "text": "offload='component'",
    "encode": "vae_tile=64 or vae_slicing",
    "denoise": "fewer images at once, a smaller size, or offload='block'",
    "decode": "vae_slicing, vae_tile=64 or offload='component'",
}


@dataclass(frozen=True)
class Stage:
    """One stage of a run: what it took. `peak` is the device's peak in bytes while it ran; None on a CPU."""

    name: str
    seconds: float
    peak: int | None = None


@dataclass
class Stages:
    """Runs stages on a device under a policy, and keeps what each took."""

    policy: Policy
    device: torch.device
    taken: list[Stage] = field(default_factory=list)

    @contextmanager
    def run(self, name: str, *networks: nn.Module | None) -> Iterator[None]:
        """Inside, the networks are on the device; with offload by component they leave it afterwards."""
        used = [network for network in networks if network is not None]
        moves = self.policy.offload == "component"
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        try:
            if moves:
                for network in used:
                    network.to(self.device)
            with attention.backend(self.policy.attention):
                yield
        except torch.OutOfMemoryError as error:
            raise PellucidError(
                f"memory must suffice for stage {name}, which owns the peak; the device is out of it. "
                f"Turn on {ADVICE.get(name, 'offload')}.",
                "out-of-memory",
            ) from error
        finally:
            if moves:
                for network in used:
                    network.to("cpu")
            if cuda:
                torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else None
        self.taken.append(Stage(name, time.perf_counter() - began, peak))
