"""The peers, in float64: diffusers' schedulers and k-diffusion's samplers, with their noise in our hands.

diffusers writes `torch.float32` and `np.float32` into its scheduler modules. Inside `in_float64` those names mean
float64, so a difference is one of formulas, not of rounding. k-diffusion's package imports its training code; only
its sampling module is loaded, past a stand-in for torchvision, of which there is no CPU build.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

from pellucid.interop.scheduler import Scheduler


class Wide:
    """A module in which float32 is called float64."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return self._names[name] if name in self._names else getattr(self._module, name)


WIDE_TORCH = Wide(torch, float32=torch.float64)
WIDE_NUMPY = Wide(np, float32=np.float64)


@contextmanager
def in_float64(class_name: str, noises: list[Tensor], clock: dict[str, int]) -> Iterator[None]:
    """float64 for one diffusers scheduler class, and its noise taken from a list, one entry a step."""
    module = importlib.import_module(getattr(diffusers, class_name).__module__)
    kept = {
        k: getattr(module, k) for k in ("torch", "np", "randn_tensor", "BrownianTreeNoiseSampler") if hasattr(module, k)
    }
    before = torch.get_default_dtype()

    def next_noise(*_: Any, **__: Any) -> Tensor:
        return noises[clock["step"]]

    try:
        torch.set_default_dtype(torch.float64)
        for name in kept:
            replacement: Any = {"torch": WIDE_TORCH, "np": WIDE_NUMPY}.get(name, next_noise)
            if name == "BrownianTreeNoiseSampler":
                replacement = lambda *_, **__: next_noise  # noqa: E731
            setattr(module, name, replacement)
        yield
    finally:
        torch.set_default_dtype(before)
        for name, value in kept.items():
            setattr(module, name, value)


def network(x: Tensor, time: Any) -> Tensor:
    """A smooth, bounded stand-in for a network: what it is does not matter, both sides call it."""
    t = float(time)
    return 0.6 * torch.sin(1.3 * x + 0.002 * t) + 0.3 * x


SHAPE = (1, 2, 3)


def peer_run(
    class_name: str,
    config: dict[str, Any],
    steps: int | None,
    setting: dict[str, Any],
    step_kwargs: dict[str, Any],
    nudge: float = 0.0,
) -> tuple[Tensor, list[float], float]:
    """(final x, told times, initial scale) of the diffusers class; `nudge` moves its start by that part."""
    noises, start = noise_list(4200)
    clock = {"step": 0}
    with in_float64(class_name, noises, clock):
        peer = getattr(diffusers, class_name)(**config)
        if steps is None:
            peer.set_timesteps(**setting)
        else:
            peer.set_timesteps(steps, **setting)
        times = [float(t) for t in peer.timesteps]
        if len(times) > 1 and times[0] == times[1] and hasattr(peer, "set_begin_index"):
            peer.set_begin_index(0)  # a repeated first timestep would start the peer at its second step
        scale = float(peer.init_noise_sigma) if hasattr(peer, "init_noise_sigma") else 1.0
        x = start * scale * (1.0 + nudge)
        for i, t in enumerate(peer.timesteps):
            clock["step"] = i
            shown = peer.scale_model_input(x, t) if hasattr(peer, "scale_model_input") else x
            x = peer.step(network(shown, t), t, x, **step_kwargs).prev_sample
    return x, times, scale


def our_run(
    class_name: str,
    config: dict[str, Any],
    steps: int | None,
    setting: dict[str, Any],
    step_kwargs: dict[str, Any],
) -> tuple[Tensor, list[float], float]:
    """The same with Pellucid's Scheduler in the diffusers dialect."""
    noises, start = noise_list(4200)
    ours = Scheduler.from_config({"_class_name": class_name, **config})
    ours.set_timesteps(steps, **setting)
    scale = float(ours.init_noise_sigma)
    x = start * scale
    times = ours.plan.timesteps
    for i, t in enumerate(times):
        shown = ours.scale_model_input(x, None)
        x = ours.step(network(shown, t), None, x, variance_noise=noises[i], **step_kwargs).prev_sample
    return x, list(times), scale


CACHE: dict[int, tuple[list[Tensor], Tensor]] = {}


def noise_list(count: int) -> tuple[list[Tensor], Tensor]:
    if count not in CACHE:
        generator = torch.Generator().manual_seed(11)
        drawn = torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64)
        CACHE[count] = list(drawn), torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return CACHE[count]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def k_diffusion() -> Any:
    """k_diffusion.sampling, without the rest of the package."""
    if "k_diffusion.sampling" in sys.modules:
        return sys.modules["k_diffusion.sampling"]
    spec = importlib.util.find_spec("k_diffusion")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    bare = types.ModuleType("k_diffusion")
    bare.__path__ = [str(Path(next(iter(spec.submodule_search_locations))))]
    stubs = {"torchvision": types.ModuleType("torchvision")}
    for name in ("transforms", "transforms.functional"):
        stubs[f"torchvision.{name}"] = types.ModuleType(f"torchvision.{name}")
    stubs["torchvision.transforms"].functional = stubs["torchvision.transforms.functional"]  # type: ignore[attr-defined]
    sys.modules["k_diffusion"] = bare
    sys.modules.update(stubs)
    try:
        return importlib.import_module("k_diffusion.sampling")
    finally:
        for name in stubs:
            del sys.modules[name]
