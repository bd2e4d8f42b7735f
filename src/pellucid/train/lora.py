"""Training a LoRA: small matrices next to chosen layers of a frozen model (Hu et al. 2021)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.interop import components, lora_file, save
from pellucid.models.lora import Adapter, AdapterSet, copied
from pellucid.models.lora_delta import LoRA, Product
from pellucid.models.unet import UNet
from pellucid.pipeline.encoders.text import TextPart
from pellucid.train.adapters import AdapterConfig, AdapterTask, FrozenPart, encode
from pellucid.train.config import counts, positive
from pellucid.train.draws import Draws, seeded
from pellucid.train.source import Batch

FILE = "pytorch_lora_weights.safetensors"  # where diffusers looks in a folder
ATTENTION = ("*.to_q", "*.to_k", "*.to_v", "*.to_out.0")


@dataclass(frozen=True)
class LoraConfig(AdapterConfig):
    """`layers` are patterns of layer names (`*.attn2.to_v`, `mid_block.*`), of linear layers and convolutions; each
    must fit one. `text_layers` are those of the text encoders (`*.q_proj`); none are trained by default. ΔW = alpha /
    rank · up·down, where alpha is the rank if it is not given."""

    rank: int = 8
    alpha: float | None = None
    layers: tuple[str, ...] = ATTENTION
    text_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts(self, "rank", low=1)
        if self.alpha is not None:
            positive(self, "alpha")
        if not self.layers and not self.text_layers:
            raise PellucidError(rule("layers", "at least one pattern of layer names", []), "lora-layers")

    def build(self, seed: int, device: torch.device) -> LoraTask:
        return LoraTask(self, seed, device)


class LowRankUpdate(nn.Module):
    """up(down(x)) · factor, of the shape that a linear layer or a convolution makes of x; 0 at first."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        if isinstance(layer, nn.Conv2d):
            shape = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
            self.down: nn.Module = nn.Conv2d(layer.in_channels, rank, layer.kernel_size, bias=False, **shape)  # type: ignore
            self.up: nn.Module = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        else:
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x.to(self.down.weight.dtype))) * self.factor


class LayerWithUpdate(nn.Module):
    """A frozen layer and what is added to it."""

    def __init__(self, layer: nn.Module, change: LowRankUpdate) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    @property
    def weight(self) -> Tensor:
        """The frozen layer's: some networks ask their first layer for its dtype."""
        return self.layer.get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + self.change(x).to(y.dtype)


def chosen_layers(network: nn.Module, patterns: Sequence[str], where: str) -> dict[str, nn.Linear | nn.Conv2d]:
    """The linear layers and convolutions whose names fit a pattern, in the network's order."""
    layers = {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    }
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            hint = nearest(pattern, layers)
            raise PellucidError(rule(where, "patterns that fit a layer of the base", pattern, hint), "lora-layers")
    return {name: layer for name, layer in layers.items() if any(fnmatchcase(name, p) for p in patterns)}


class LoraNetwork(nn.Module):
    """A model with a LoRA. Its submodules are the small matrices; the model itself is frozen.

    The model is a copy of the module tree that shares the base's tensors, with a `LayerWithUpdate` in place of each
    chosen layer: a plain forward, which compiles, and whose gradients any wrapper of the small matrices sees.
    """

    def __init__(
        self, network: nn.Module, text: tuple[TextPart, ...], changes: nn.ModuleDict, parts: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.changes = changes  # by place: component/name/of/the/layer
        self.plain = FrozenPart((network, text, parts))
        trees = {part: _with_changes(one, _changes_of(changes, part)) for part, one in parts.items()}
        places = {id(one): part for part, one in parts.items()}
        self.base = FrozenPart(trees[places[id(network)]])
        self.text = FrozenPart(tuple(replace(one, encoder=trees[places[id(one.encoder)]]) for one in text))
        self.dtype = next(network.parameters()).dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> LoraNetwork:
        """The same base with copies of the matrices."""
        network, text, parts = self.plain.held
        return LoraNetwork(network, text, copy.deepcopy(self.changes, memo), parts).train(self.training)

    def forward(
        self, x: Tensor, time: Tensor, *, tokens: Tensor | None = None, kept: Tensor | None = None, **conditions: Tensor
    ) -> Tensor:
        """`tokens` (B, encoders, L) where the text encoders are trained too; else a `context` is given."""
        if tokens is not None:
            conditions |= encode(self.text.held, tokens, kept)
        conditions = {k: v.to(self.dtype) if k in ("context", "pooled") else v for k, v in conditions.items()}
        return self.base.held(x.to(self.dtype), time, **conditions)


def _with_changes(network: nn.Module, changes: Mapping[str, LowRankUpdate]) -> nn.Module:
    """A copy of the module tree that shares all tensors, with changes next to some layers."""
    if not changes:
        return network
    twin = copied(network, {})
    for name, change in changes.items():
        owner, _, leaf = name.rpartition(".")
        twin.get_submodule(owner)._modules[leaf] = LayerWithUpdate(network.get_submodule(name), change)
    return twin


def _changes_of(changes: nn.ModuleDict, part: str) -> dict[str, LowRankUpdate]:
    """The changes of one component, by the layers' names."""
    return {name: change for owner, name, change in _placed(changes) if owner == part}


def _placed(changes: nn.ModuleDict) -> Iterator[tuple[str, str, LowRankUpdate]]:
    for place, change in changes.items():
        part, _, name = place.partition("/")
        assert isinstance(change, LowRankUpdate)
        yield part, name.replace("/", "."), change


class LoraTask(AdapterTask):
    """A LoRA of a text-to-image model: UNet or PixArt, and its text encoders if asked."""

    def __init__(self, config: LoraConfig, seed: int, device: torch.device) -> None:
        super().__init__(config, device)
        base = self.base
        self.config = config
        self.denoiser = "unet" if isinstance(base.network, UNet) else "transformer"
        encoders = dict(zip(components.text_parts(base.parts), base.parts.text_encoders, strict=True))
        parts: dict[str, nn.Module] = {self.denoiser: base.network, **encoders}
        wanted = {self.denoiser: (config.layers, "layers")}
        wanted |= dict.fromkeys(encoders, (config.text_layers, "text_layers"))
        factor = (config.rank if config.alpha is None else config.alpha) / config.rank
        changes = nn.ModuleDict()
        with seeded(seed):
            for part, (patterns, where) in wanted.items():
                for name, layer in chosen_layers(parts[part], patterns, where).items():
                    changes[f"{part}/{name}".replace(".", "/")] = LowRankUpdate(layer, config.rank, factor)
        self.network = LoraNetwork(base.network, base.text, changes.to(device), parts)

    def inputs(self, batch: Batch, masks: Mapping[str, Tensor], draws: Draws | None) -> dict[str, Tensor]:
        without = masks["text"]
        if not self.config.text_layers:
            return self.base.conditions(self.base.windows(batch), without)
        kept = self.base.kept(without)
        tokens = self.base.asked_tokens(self.base.windows(batch), without)
        return {"tokens": tokens} if kept is None else {"tokens": tokens, "kept": kept}

    def save(self, network: nn.Module, folder: Path) -> None:
        """A folder with one file in diffusers' layout; alpha / rank goes into the matrices."""
        assert isinstance(network, LoraNetwork)
        dtype = self.saved_dtype
        layers: dict[str, dict[str, LoRA]] = {}
        for part, name, change in _placed(network.changes):
            down, up = (one.get_parameter("weight").detach().float().cpu() for one in (change.down, change.up))
            up = up.flatten(1) * change.factor  # (out, rank)
            layers.setdefault(part, {})[name] = LoRA(product=Product(up.to(dtype), down.to(dtype)))
        adapters = {part: Adapter(folder.name, found) for part, found in layers.items()}
        with save.replaced(folder, FILE, overwrite=True) as place:
            lora_file.save(AdapterSet(folder.name, adapters), place / FILE)
