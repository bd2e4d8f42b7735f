"""Memory before and after: the peak of each stage and its owner, predicted by a rehearsal and measured by a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from pellucid.interop.components import Components, text_parts
from pellucid.models import lora
from pellucid.models.unet import UNet
from pellucid.pipeline import image_inputs, workspace
from pellucid.pipeline.adapters import Control
from pellucid.pipeline.conditions import takes_labels, takes_text
from pellucid.pipeline.ghost import META, Kernels, Rehearsal, Shadows
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.request import Request
from pellucid.pipeline.tracker import Peak, Tracker, metered

if TYPE_CHECKING:
    from pellucid.pipeline.pipeline import Pipeline, Result

STEPS = 2  # rows of a rehearsal: the second has a history
PROMPT = "a"


@dataclass(frozen=True)
class Forecast:
    """The predicted peak of each stage."""

    stages: dict[str, Peak]
    policy: Policy

    @property
    def stage(self) -> str:
        """Where the peak of the whole run is."""
        return max(self.stages, key=lambda name: self.stages[name].total)

    @property
    def peak(self) -> Peak:
        return self.stages[self.stage]


@dataclass(frozen=True)
class Measured:
    """What a real run took: bytes at the peak of each stage, its seconds, and what it made."""

    peaks: dict[str, int]
    seconds: dict[str, float]
    result: Result

    @property
    def stage(self) -> str:
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def peak(self) -> int:
        return self.peaks[self.stage]


# --- what to run ---------------------------------------------------------------------------------------------------


def request_for(
    pipe: Pipeline,
    *,
    size: tuple[int, int] | None = None,
    batch: int = 1,
    steps: int = STEPS,
    controlnets: Sequence[Any] = (),
    loras: Sequence[Any] = (),
) -> Request:
    """A request of a size and a batch, for any kind of model; what it shows does not matter for memory."""
    width, height = size if size is not None else pipe.size_of(Request())
    asked: dict[str, Any] = {
        "n": batch,
        "steps": steps,
        "sampler": "euler",
        "seed": 0,
        "width": width,
        "height": height,
    }
    network = pipe.components.network
    grey = Image.new("RGB", (width, height), "grey")
    if takes_text(network):
        asked["prompt"] = PROMPT
    if takes_labels(network):
        asked["label"] = 0
    if image_inputs.is_inpainting(pipe.components):
        asked |= {"image": grey, "mask": Image.new("L", (width, height), 255)}
    controls = tuple(Control(network, grey) for network in controlnets)
    return Request(**asked, controls=controls, loras=tuple(loras))


def networks_by_name(components: Components) -> dict[str, nn.Module]:
    """The networks of a model under the names of its folders."""
    found: dict[str, nn.Module | None] = {
        "unet" if isinstance(components.network, UNet) else "transformer": components.network,
        **dict(zip(text_parts(components), components.text_encoders, strict=True)),
        "vae": components.vae,
        "image_encoder": components.image_encoder,
    }
    return {name: network for name, network in found.items() if network is not None}


def guests_by_name(pipe: Pipeline, request: Request) -> dict[str, nn.Module]:
    """The networks that a request brings with it."""
    controls = [image_inputs.controlnet_of(pipe, control) for control in request.controls]
    adapters = [image_inputs.adapter_of(pipe, prompt) for prompt in request.image_prompts]
    named = {f"controlnet_{i}" if i else "controlnet": network for i, network in enumerate(controls)}
    named |= {f"ip_adapter_{i}" if i else "ip_adapter": network for i, network in enumerate(adapters)}
    return named if request.weak is None else {**named, "weak": request.weak.components.network}


# --- prediction ----------------------------------------------------------------------------------------------------


def predict(
    pipe: Pipeline,
    request: Request,
    *,
    policy: Policy | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    beside: Sequence[Tensor] = (),
    steps: int | None = None,
) -> Forecast:
    """The peak of each stage of a request, without running it: its own code on networks without data.

    `policy`, `device` ("cuda" or "cpu") and `dtype` are the pipeline's where they are left out; `beside` are tensors
    that lie on the device besides the networks.
    """
    policy = pipe.policy if policy is None else policy
    where = torch.device(pipe.device if device is None else device)
    policy.check(where)
    cuda = where.type != "cpu"
    shadows = Shadows("cuda" if cuda else "cpu", waits=policy.offload != "none", dtype=dtype)
    few = min(request.steps or STEPS, STEPS) if steps is None else steps
    cast = Cast.of(pipe, replace(request, plan=None, steps=few), shadows)
    if policy.channels_last and policy.offload == "none":
        cast.channels_last()
    tracker = Rehearsal(
        ["meta"] if cuda else ["meta", "cpu"],
        grain=workspace.GRAIN if cuda else 1,
        scratch=workspace.scratch(policy.channels_last) if cuda else None,
    )
    tracker.hold(cast.resident, [shadows.shadow(tensor) for tensor in beside])
    eager = replace(policy, compile=False)  # compiled code holds no more than this
    with metered(tracker), Kernels(shadows.device, policy.attention), tracker.following(cast.named):
        cast.pipeline(eager).run(cast.request)
    standing = workspace.standing(where)
    stages = {name: replace(peak, workspace=peak.workspace + standing) for name, peak in tracker.stages.items()}
    return Forecast(stages, policy)


@dataclass(frozen=True)
class Cast:
    """The ghosts of a rehearsal: those that act, those that only take room, and what they are asked."""

    components: Components
    named: dict[str, nn.Module]
    resident: list[nn.Module]
    request: Request

    @classmethod
    def of(cls, pipe: Pipeline, request: Request, shadows: Shadows) -> Cast:
        guests = {name: shadows.ghost(network) for name, network in guests_by_name(pipe, request).items()}
        seeing = (image_inputs.eyes_of(pipe, prompt) for prompt in request.image_prompts)
        eyes = next((one for one in seeing if one is not None), pipe.components.image_encoder)
        base = ghosts_of(replace(pipe.components, image_encoder=eyes), shadows)
        acting = dressed(base, pipe, request)
        named = {**networks_by_name(acting), **guests}
        resident = [*networks_by_name(base).values(), *named.values()]
        return cls(acting, named, resident, ghostly(request, guests, shadows))

    def pipeline(self, policy: Policy) -> Pipeline:
        from pellucid.pipeline.pipeline import Pipeline

        return Pipeline(self.components, policy, META)

    def channels_last(self) -> None:
        for network in (self.components.network, self.components.vae):
            if network is not None:
                network.to(memory_format=torch.channels_last)


def dressed(base: Components, pipe: Pipeline, request: Request) -> Components:
    """Views of ghosts with the LoRAs of a request: a new tensor for each weight that one of them changes."""
    views = networks_by_name(base)
    for one in request.loras:
        for part, adapter in pipe.lora_of(one).adapters.items():
            weights = {layer: views[part].get_submodule(layer).get_parameter("weight") for layer in adapter.layers}
            swaps = {layer: {"weight": twin(weight)} for layer, weight in weights.items()}
            views[part] = lora.view(views[part], swaps)
    network = views.get("unet", views.get("transformer"))
    encoders = tuple(views[name] for name in text_parts(base))
    return replace(base, network=network, text_encoders=encoders)


def twin(weight: Tensor) -> Tensor:
    """Another tensor without data, of the same form."""
    if weight.is_meta:
        return torch.empty_like(weight)
    return weight.new_zeros(()).expand(weight.shape)


def ghosts_of(parts: Components, shadows: Shadows) -> Components:
    return replace(
        parts,
        network=shadows.ghost(parts.network),
        vae=None if parts.vae is None else shadows.ghost(parts.vae),
        text_encoders=tuple(shadows.ghost(encoder) for encoder in parts.text_encoders),
        image_encoder=None if parts.image_encoder is None else shadows.ghost(parts.image_encoder),
        controlnets=(),
    )


def ghostly(request: Request, guests: dict[str, nn.Module], shadows: Shadows) -> Request:
    """The same request, of few steps, with ghosts for its networks and nobody watching."""
    controlnets = [guest for name, guest in guests.items() if name.startswith("controlnet")]
    adapters = [guest for name, guest in guests.items() if name.startswith("ip_adapter")]
    weak = (
        None if request.weak is None else replace(request.weak, components=ghosts_of(request.weak.components, shadows))
    )
    return replace(
        request,
        controls=[replace(c, network=ghost) for c, ghost in zip(request.controls, controlnets, strict=True)],
        image_prompts=[replace(p, adapter=ghost) for p, ghost in zip(request.image_prompts, adapters, strict=True)],
        weak=weak,
        loras=(),
        **{"plan": None, "sampler": "euler", "grid": None, "options": {}, "dialect": None},
        **{"observers": (), "constraints": (), "cancelled": None, "noise": None, "seed": 0},
    )


# --- measurement ---------------------------------------------------------------------------------------------------


def measure(pipe: Pipeline, request: Request, beside: Sequence[Tensor] = ()) -> Measured:
    """Runs a request and measures the peak of each stage: torch's own count on CUDA, living tensors on the CPU.

    The CPU's figure does not see what kernels borrow inside of themselves. Tensors of others are not counted.
    """
    pipe.run(request)  # reads adapters, compiles, warms up
    own = Tracker([pipe.device.type], grain=workspace.GRAIN if pipe.device.type == "cuda" else 1)
    networks = {**networks_by_name(pipe.components), **guests_by_name(pipe, request)}
    own.hold(networks.values(), beside)
    if pipe.device.type == "cuda":
        return measured(pipe.run(request), others_on(pipe.device, own.weights))
    with metered(own):
        result = pipe.run(request)
    return measured(result, 0)


def measured(result: Result, others: int) -> Measured:
    peaks = {stage.name: (stage.peak or 0) - others for stage in result.stages}
    return Measured(peaks, {stage.name: stage.seconds for stage in result.stages}, result)


def others_on(device: torch.device, own: int) -> int:
    """Bytes on a GPU that are neither the networks' nor the run's."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # else the workspace of the first run would count as somebody else's
        clear()
    return max(torch.cuda.memory_allocated(device) - own, 0)


def timed(pipe: Pipeline, request: Request, repeats: int = 3) -> float:
    """Seconds of the fastest of some whole runs, which must have been warmed up: others on the machine only add."""
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        pipe.run(request)
        took.append(time.perf_counter() - began)
    return min(took)


def in_words(size: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.3g} {unit}" if size < 1000 * 2**power else f"{size / 2**power:.0f} {unit}"
    return f"{size:.0f} B"
