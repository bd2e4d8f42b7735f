"""Adapters: weight differences by layer, applied as a view that leaves the base alone, or merged and taken back.

Stacks add up: every difference is taken against the base weight, W' = W + Σ ΔWᵢ(W), so the order does not matter.
For DoRA, whose difference depends on W, this means that it does not see the other adapters of the stack; a single
one equals PEFT's. A scale of 0 leaves the layers it covers untouched.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.models.lora_delta import Delta

Scale = float | Mapping[str, float]  # one for all layers, or by prefix of their names: the longest prefix decides
ROUNDING = 2.0**-22  # a relative change below this is float32's own rounding (DoRA makes some even when it is off)
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Adapter:
    """What one adapter changes in one network: a difference by layer, and the keys of the file that it came from."""

    name: str
    layers: Mapping[str, Delta]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of one file by component (`unet`, `text_encoder`, …), and the keys that fit none of them."""

    name: str
    adapters: Mapping[str, Adapter]
    unused: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for adapter in self.adapters.values() for key in adapter.keys)


@dataclass(frozen=True)
class Receipt:
    """What a stack of adapters did: the keys read, those unused, and ‖ΔW‖/‖W‖ of each layer (biases by name)."""

    adapters: tuple[str, ...]
    read: tuple[str, ...]
    unused: tuple[str, ...]
    change: Mapping[str, float]

    def __str__(self) -> str:
        most = max(self.change, key=lambda layer: self.change[layer])
        left = f"{len(self.unused)} unused" + (f" ({', '.join(self.unused)})" if self.unused else "")
        return (
            f"{' + '.join(self.adapters)}: {len(self.read)} keys read, {left}; {len(self.change)} layers changed, "
            f"most {most} by {self.change[most]:.3g} of its norm"
        )


class Term(NamedTuple):
    """One difference in a stack: whose it is, and at what scale."""

    index: int
    delta: Delta
    scale: float


class Change(NamedTuple):
    """One layer after a stack: its new weight and bias, and how far they went, relative to the base."""

    layer: str
    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    moved: dict[str, float]  # of the weight under the layer's name, of the bias under its own
    owners: set[int]  # which adapters of the stack moved it


def apply(network: M, stack: Sequence[tuple[Adapter, Scale]]) -> tuple[M, Receipt]:
    """A view of a network with adapters: it shares every untouched tensor, and the network stays as it is."""
    work = Work(network, stack)
    swaps = {change.layer: change for change in work.changes()}
    return view(network, swaps), work.receipt()


def apply_all(
    networks: Mapping[str, nn.Module], stack: Sequence[tuple[AdapterSet, Scale]]
) -> tuple[dict[str, nn.Module], Receipt]:
    """Views of all components that a stack of files touches; the prefixes of a scale begin with the component.

    A component that nothing touches is returned itself.
    """
    views, change, owners = dict(networks), {}, set()
    for adapters, scale in stack:
        check_scale(adapters.name, scale, [f"{c}.{name}" for c, a in adapters.adapters.items() for name in a.layers])
        if unknown := sorted(set(adapters.adapters) - set(networks)):
            raise PellucidError(
                rule(f"a component of adapter {adapters.name}", f"one of {', '.join(networks)}", unknown[0]),
                "lora-component",
            )
    for component, network in networks.items():
        part = [
            (s.adapters.get(component, Adapter(s.name, {})), within(component, scale)) for s, scale in stack
        ]
        work = Work(network, part)
        swaps = {c.layer: c for c in work.changes()}
        if swaps:
            views[component] = view(network, swaps)
        change.update({f"{component}.{layer}": moved for layer, moved in work.moved.items()})
        owners |= work.owners
    refuse_idle([s.name for s, _ in stack], owners)
    read = tuple(key for s, _ in stack for key in s.keys)
    return views, Receipt(tuple(s.name for s, _ in stack), read, tuple(k for s, _ in stack for k in s.unused), change)


def merge(network: nn.Module, stack: Sequence[tuple[Adapter, Scale]]) -> Merged:
    """Adapters written into a network's own weights; `unmerge` of what this returns puts the old ones back exactly."""
    work = Work(network, stack)
    merged = Merged(work)
    try:
        for change in work.changes():
            merged.write(change)
        merged.receipt = work.receipt()
    except BaseException:
        merged.unmerge(checked=False)
        raise
    return merged
