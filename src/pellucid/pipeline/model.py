"""A loaded model, the adapters that are read for it, and what it decides of a request before a network is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.noise import NoiseSource
from pellucid.core.plan import Plan
from pellucid.interop import lora_file, source, weights
from pellucid.interop.components import Components, text_parts
from pellucid.models import attention, graph_memory, ip_adapter, lora
from pellucid.models.captured import DeviceStepper, StepGraphs
from pellucid.models.clip import CLIPVisionEncoder
from pellucid.models.controlnet import ControlledUNet, ControlNet
from pellucid.models.dit import DiT
from pellucid.models.graph_memory import GraphMemory
from pellucid.models.guidance import Guidance, guarded
from pellucid.models.ip_adapter import IPAdapter
from pellucid.models.lora import AdapterSet, Receipt
from pellucid.models.unet import UNet
from pellucid.pipeline import images
from pellucid.pipeline.encoders.conditions import takes_text
from pellucid.pipeline.encoders.text import with_tokens
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request
from pellucid.pipeline.result import Result
from pellucid.pipeline.shelf import AdapterShelf, PathLike, adapter_encoder, adapter_file

_VIEWS = 2  # with adapters that a model keeps; each holds the weights that they change
_CONTROLLED = 4  # UNets with their ControlNets that a model keeps; these hold no weights of their own
_CLASS_GUIDANCE = 4.0  # of class-conditional models: DiT's own setting


@dataclass(repr=False)
class Model:
    """Components on a device under a policy. Requests share nothing but its weights and what its shelf holds."""

    components: Components
    policy: Policy = field(default_factory=Policy)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shelf: AdapterShelf = field(default_factory=AdapterShelf)
    graphs: StepGraphs = field(default_factory=StepGraphs)
    _views: dict[Any, Any] = field(default_factory=dict, init=False)
    _controlled: list[ControlledUNet] = field(default_factory=list, init=False)

    def stepper(self, networks: Sequence[nn.Module]) -> DeviceStepper | None:
        """What steps a batch with these networks as captured graphs, where the policy wants that."""
        return self.graphs.stepper(networks) if self.policy.does("graphs", self.device) else None

    def why_plain(self) -> str:
        """Why no step is captured, in a word; nothing where the policy and the device allow it."""
        if self.policy.does("graphs", self.device):
            return ""
        if self.device.type != "cuda":
            return "device"
        return "compile" if self.policy.compile else "offload" if self.policy.offload != "none" else "policy"

    def graph_memory(self) -> GraphMemory:
        """What the captured graphs keep on the device between runs."""
        return graph_memory.held(self.graphs)

    # --- what a request leaves open -------------------------------------------------------------------------------

    @property
    def factor(self) -> int:
        """Pixels per latent, along one side."""
        return 1 if self.components.vae is None else self.components.vae.config.factor

    @property
    def channels(self) -> int:
        """Channels of x: those of the latents, or of the pixels."""
        vae, network = self.components.vae, self.components.network
        return network.config.in_channels if vae is None else vae.config.latent_channels

    def is_latent(self, image: Any) -> bool:
        """A tensor (B, C, H, W) with the channels of the latents is taken as latents."""
        return (
            self.components.vae is not None
            and isinstance(image, torch.Tensor)
            and image.ndim == 4
            and image.shape[1] == self.channels
        )

    def size_of(self, request: Request) -> tuple[int, int]:
        """(width, height) in pixels: the request's, the image's, or what the network was trained on."""
        image, sample = request.image, self.components.network.config.sample_size or 64
        high, wide = (sample, sample) if isinstance(sample, int) else sample
        own = (wide * self.factor, high * self.factor)
        if isinstance(image, Result) or (self.factor > 1 and self.is_latent(image)):
            latents = image.latents if isinstance(image, Result) else image
            own = (latents.shape[-1] * self.factor, latents.shape[-2] * self.factor)
        elif image is not None:
            own = images.size_of(images.listed(image, "image")[0])
        return images.check_size((request.width or own[0], request.height or own[1]), self.factor)

    def guidance_of(self, request: Request) -> Guidance:
        """The request's; otherwise the guarded preset where there is something to guide by."""
        if request.guidance is not None:
            return Guidance.parse(request.guidance)
        network = self.components.network
        if takes_text(network):
            return guarded()
        return Guidance(_CLASS_GUIDANCE) if isinstance(network, DiT) else Guidance(1.0)

    # --- adapters -------------------------------------------------------------------------------------------------

    def networks(self) -> dict[str, nn.Module]:
        """The networks that adapters may change, by their names in files."""
        return _denoising_networks(self.components)

    def load_lora(self, path: PathLike, name: str | None = None) -> AdapterSet:
        """Reads a LoRA file once; requests then name it with their own scale: `loras=[Lora(adapter, 0.8)]`."""
        place = source.bundled(path)
        if name is None and place != Path(path):
            name = os.fspath(path)  # of a bundle's: what finds it again
        return lora_file.load(place, self.networks(), name)

    def lora_of(self, one: Lora) -> AdapterSet:
        """The adapter of a request's LoRA: given, or read once from its file."""
        return one.source if isinstance(one.source, AdapterSet) else self.shelf.read("lora", one.source, self.load_lora)

    def controlnet_of(self, control: Control) -> ControlNet:
        """The ControlNet of a control: given, or read once from its folder or file."""
        if isinstance(control.network, ControlNet):
            return control.network
        return self.shelf.read("controlnet", control.network, self.read_controlnet)

    def controlled(self, network: UNet, controls: Sequence[Control]) -> ControlledUNet:
        """A UNet with the ControlNets of a request; the last are kept, so that requests share what was captured."""
        controlnets = [self.controlnet_of(control) for control in controls]
        for held in [*self._controlled]:
            if len(held.parts) == 1 + len(controlnets) and all(
                mine is own for mine, own in zip(held.parts, (network, *controlnets), strict=True)
            ):
                return held
        made = ControlledUNet(network, controlnets)
        self._controlled.append(made)
        for old in self._controlled[:-_CONTROLLED]:
            self._let_go(old)
        return made

    def _let_go(self, controlled: ControlledUNet) -> None:
        with suppress(ValueError):  # another thread has done it
            self._controlled.remove(controlled)
            self.graphs.forget(controlled)

    def read_controlnet(self, path: PathLike) -> ControlNet:
        dtype = next(self.components.network.parameters()).dtype
        device = self.device if self.policy.offload == "none" else None
        found = source.load_component(path, dtype=dtype, device=device)
        if not isinstance(found, ControlNet):
            raise PellucidError(rule("ControlNet", "a folder or file of one", type(found).__name__), "control-kind")
        return found

    def ip_adapter_of(self, prompt: ImagePrompt) -> IPAdapter:
        """The IP-Adapter of an image prompt: given, or read once from its folder or file."""
        if isinstance(prompt.adapter, IPAdapter):
            return prompt.adapter
        weight = next(self.components.network.parameters())

        def read(path: str) -> IPAdapter:
            return ip_adapter.from_state(weights.read(adapter_file(path))).to(weight).eval()

        return self.shelf.read("ip_adapter", prompt.adapter, read)

    def image_encoder_of(self, prompt: ImagePrompt) -> CLIPVisionEncoder | None:
        """The image encoder that was loaded with the model, or else the one that the IP-Adapter brings."""
        if self.components.image_encoder is not None or isinstance(prompt.adapter, IPAdapter):
            return self.components.image_encoder
        place, weight = adapter_encoder(prompt.adapter), next(self.components.network.parameters())

        def read(path: str) -> CLIPVisionEncoder:
            return source.load_image_encoder(path, dtype=weight.dtype, device=weight.device).eval()

        return None if place is None else self.shelf.read("image_encoder", place, read)

    def with_loras(self, request: Request) -> tuple[Components, Receipt | None]:
        """The components with the request's LoRAs: views that share every other tensor; the model stays as it is.

        The last views are kept, so that requests with the same adapters share their weights, and what was captured.
        """
        if not request.loras:
            return self.components, None
        adapters = [(self.lora_of(one), one.scale) for one in request.named_loras]
        key = lora.stack_key(self.networks().values(), adapters)
        held = self._views.get(key)
        if held is None:
            views, receipt = lora.apply_all(self.networks(), adapters)
            parts = with_tokens(with_views(self.components, views), [adapter for adapter, _ in adapters])
            held = self._views[key] = parts, receipt, adapters  # held too: their identities are part of the key
            while len(self._views) > _VIEWS:
                with suppress(KeyError, StopIteration, RuntimeError):  # another thread has changed it
                    self._forget(self._views.pop(next(iter(self._views)))[0].network)
        else:
            with suppress(KeyError):  # those used last stay
                self._views[key] = self._views.pop(key)
        return held[0], held[1]

    def _forget(self, network: nn.Module) -> None:
        """Lets go of what was captured of a view, unless something else calls the same network."""
        called = [self.components.network, *(parts.network for parts, *_ in list(self._views.values()))]
        if all(network is not one for one in called):
            self.graphs.forget(network)
            for controlled in [one for one in self._controlled if one.unet is network]:
                self._let_go(controlled)


@dataclass(frozen=True)
class RunSettings:
    """All that is decided of a run before a network is called. `components` have the LoRAs of the request."""

    model: Model
    request: Request
    components: Components
    plan: Plan
    x0_filter: Filter | None
    guidance: Guidance
    noise: NoiseSource
    size: tuple[int, int]
    seeds: tuple[int, ...]
    receipt: Receipt | None = None

    @property
    def count(self) -> int:
        return len(self.seeds)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one x."""
        (width, height), factor = self.size, self.model.factor
        return self.model.channels, height // factor, width // factor


def _denoising_networks(components: Components) -> dict[str, nn.Module]:
    """The denoiser and the text encoders, by their names in files."""
    name = "unet" if isinstance(components.network, UNet) else "transformer"
    encoders = zip(text_parts(components), components.text_encoders, strict=True)
    return {name: components.network, **dict(encoders)}


def networks_by_name(components: Components) -> dict[str, nn.Module]:
    """The networks of a model under the names of its folders."""
    others = {"vae": components.vae, "image_encoder": components.image_encoder}
    return _denoising_networks(components) | {name: network for name, network in others.items() if network is not None}


def networks_of(components: Components) -> list[nn.Module]:
    """Every network of a model."""
    return [*networks_by_name(components).values(), *components.controlnets]


def set_memory_format(components: Components, memory_format: torch.memory_format) -> None:
    """Channels innermost, or not, in the networks that convolve."""
    for network in (components.network, components.vae):
        if network is not None:
            network.to(memory_format=memory_format)  # type: ignore[call-overload]  # missing from torch's annotations


def lay_out(components: Components, policy: Policy, device: torch.device) -> None:
    """The weights in the order in which the policy's operations read them on a device."""
    if policy.does("channels_last", device):
        set_memory_format(components, torch.channels_last)
    if policy.does("fused", device) and policy.offload == "none":
        for network in networks_of(components):
            attention.pack(network)


def map_networks(components: Components, change: Callable[[Any], Any]) -> Components:
    """The components with another network in the place of each."""
    return replace(
        components,
        network=change(components.network),
        vae=None if components.vae is None else change(components.vae),
        text_encoders=tuple(change(encoder) for encoder in components.text_encoders),
        image_encoder=None if components.image_encoder is None else change(components.image_encoder),
        controlnets=tuple(change(controlnet) for controlnet in components.controlnets),
    )


def with_views(components: Components, views: Mapping[str, nn.Module]) -> Components:
    """The components with other networks in the places of `_denoising_networks`."""
    encoders: tuple[Any, ...] = tuple(views[name] for name in text_parts(components))
    network: Any = views.get("unet", views.get("transformer"))
    return replace(components, network=network, text_encoders=encoders)
