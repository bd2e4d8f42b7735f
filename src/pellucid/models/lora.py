"""Adapters: weight differences by layer, applied as a view that leaves the base alone, or merged and taken back.

Stacks add up: every difference is taken against the base weight, W' = W + Σ ΔWᵢ(W), so the order does not matter.
For DoRA, whose difference depends on W, this means that it does not see the other adapters of the stack; a single
one equals PEFT's. A scale of 0 leaves the layers that it covers untouched.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.models import ops
from pellucid.models.attention import Attention
from pellucid.models.blocks import within
from pellucid.models.lora_delta import Delta
from pellucid.models.quantize import Fp8Linear, dithered

Scale = float | Mapping[str, float]  # of all layers, or by prefix of their names: the longest decides, "" is the rest
_ROUNDING = 2.0**-22  # a relative change below this is float32's own rounding; a DoRA that is off makes some
_AT_ONCE = 32  # layers
_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class Adapter:
    """What one adapter changes in one network: a difference by layer, and the keys of the file that it came from."""

    name: str
    layers: Mapping[str, Delta]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of one file by component (`unet`, `text_encoder`, …), and the keys that fit none of them.

    `tokens` are words that were trained with them: their vectors (count, D) or (D,), for each text encoder in turn.
    """

    name: str
    adapters: Mapping[str, Adapter]
    unused: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for adapter in self.adapters.values() for key in adapter.keys)

    @property
    def layers(self) -> dict[str, Delta]:
        """All differences, under names that begin with the component."""
        return {f"{part}.{layer}": delta for part, a in self.adapters.items() for layer, delta in a.layers.items()}


@dataclass(frozen=True)
class Receipt:
    """What a stack of adapters did: the keys read, those unused, and ‖ΔW‖/‖W‖ of each layer (of a bias by its name)."""

    adapters: tuple[str, ...]
    read: tuple[str, ...]
    unused: tuple[str, ...]
    change: Mapping[str, float]

    def __str__(self) -> str:
        most = max(self.change, key=lambda layer: self.change[layer])
        left = f"{len(self.unused)} unused" + (f" ({', '.join(self.unused)})" if self.unused else "")
        return (
            f"{' + '.join(self.adapters)}: {len(self.read)} keys read, {left}; {len(self.change)} layers changed, "
            f"most {most}, by {self.change[most]:.3g} of its norm"
        )


class _Term(NamedTuple):
    """One difference in a layer's stack: whose it is, and at what scale."""

    owner: int
    delta: Delta
    scale: float


class Change(NamedTuple):
    """One layer after a stack: its new tensors, how far they went relative to the base, and by whose differences."""

    layer: str
    tensors: dict[str, Tensor]  # "weight", "bias"
    moved: dict[str, float]
    owners: set[int]


@dataclass
class _Tally:
    """Counts changes while they pass, for the receipt."""

    names: list[str]
    moved: dict[str, float] = field(default_factory=dict)
    owners: set[int] = field(default_factory=set)

    def count(self, changes: Iterable[Change], prefix: str = "") -> Iterator[Change]:
        for change in changes:
            self.moved.update({prefix + name: ratio for name, ratio in change.moved.items()})
            self.owners |= change.owners
            yield change

    def receipt(self, read: Iterable[str], unused: Iterable[str] = ()) -> Receipt:
        """The receipt, or the error that a member of the stack changed nothing."""
        if not self.names:
            raise PellucidError(rule("a stack of adapters", "one adapter or more", []), "lora-nothing")
        for index, name in enumerate(self.names):
            if index not in self.owners:
                raise PellucidError(
                    f"adapter {name} must change a layer; got no change at all. Its scale is 0 everywhere, "
                    "or its differences are zero or too small for the dtype of the base.",
                    "lora-nothing",
                )
        return Receipt(tuple(self.names), tuple(read), tuple(unused), self.moved)


def apply(network: _M, stack: Sequence[tuple[Adapter, Scale]]) -> tuple[_M, Receipt]:
    """A view of a network with adapters: it shares every untouched tensor, and the network stays as it is."""
    tally = _Tally([adapter.name for adapter, _ in stack])
    swaps = {change.layer: change.tensors for change in tally.count(_changes(network, stack))}
    return view(network, swaps), tally.receipt(key for adapter, _ in stack for key in adapter.keys)


def apply_all(
    networks: Mapping[str, nn.Module], stack: Sequence[tuple[AdapterSet, Scale]]
) -> tuple[dict[str, nn.Module], Receipt]:
    """Views of all components that a stack of files touches; the prefixes of a scale begin with the component.

    A component that nothing touches is returned as it came.
    """
    tally = _Tally([adapters.name for adapters, _ in stack])
    views = dict(networks)
    for part, mine in _by_part(networks, stack).items():
        swaps = {c.layer: c.tensors for c in tally.count(_changes(networks[part], mine), f"{part}.")}
        views[part] = view(networks[part], swaps) if swaps else networks[part]
    return views, _receipt_of(tally, stack)


def stack_key(networks: Iterable[nn.Module], stack: Sequence[tuple[AdapterSet, Scale]]) -> Hashable:
    """What the views of a stack depend on: the adapters, their scales, and the weights as they are now."""
    scales = [tuple(sorted(scale.items())) if isinstance(scale, Mapping) else scale for _, scale in stack]
    weights = hash(tuple((p.data_ptr(), p._version) for network in networks for p in network.parameters()))
    return tuple(id(adapters) for adapters, _ in stack), tuple(scales), weights


def _by_part(
    networks: Mapping[str, nn.Module], stack: Sequence[tuple[AdapterSet, Scale]]
) -> dict[str, list[tuple[Adapter, Scale]]]:
    """What a stack of files is for each component."""
    for adapters, scale in stack:
        _check_scale(adapters.name, scale, adapters.layers)
        if unknown := sorted(set(adapters.adapters) - set(networks)):
            rules = rule(f"a component of adapter {adapters.name}", f"one of {', '.join(networks)}", unknown[0])
            raise PellucidError(rules, "lora-component")
    return {
        part: [(a.adapters.get(part, Adapter(a.name, {})), _scale_within(part, scale)) for a, scale in stack]
        for part in networks
    }


def _receipt_of(tally: _Tally, stack: Sequence[tuple[AdapterSet, Scale]]) -> Receipt:
    read = (key for adapters, _ in stack for key in adapters.keys)
    return tally.receipt(read, (key for adapters, _ in stack for key in adapters.unused))


_RUNS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # in progress, by network
_RUNNING = threading.RLock()


@contextmanager
def running(networks: Iterable[nn.Module]) -> Iterator[None]:
    """A run with these networks, whichever pipelines share them: inside, nothing is merged into them."""
    held = list(networks)
    with _RUNNING:
        for network in held:
            _RUNS[network] = _RUNS.get(network, 0) + 1
    try:
        yield
    finally:
        with _RUNNING:
            for network in held:
                _RUNS[network] -= 1


@contextmanager
def _idle(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Refuses networks that a run is using; inside, runs wait to begin."""
    with _RUNNING:
        busy = max((_RUNS.get(network, 0) for network in networks), default=0)
        if busy:
            advice = "Wait for it to end, or give the request its own loras, which leave the model as it is."
            must = "of a model without a run in progress"
            raise PellucidError(rule("merge or unmerge", must, f"{busy} in progress", advice), "merge-running")
        yield


def merge_all(networks: Mapping[str, nn.Module], stack: Sequence[tuple[AdapterSet, Scale]]) -> MergeSet:
    """A stack of files written into the weights of all components that it touches, until `unmerge`."""
    tally = _Tally([adapters.name for adapters, _ in stack])
    merged = MergeSet()
    with _idle(networks.values()):
        try:
            for part, mine in _by_part(networks, stack).items():
                merged.parts.append(Merge(networks[part]))
                for change in tally.count(_changes(networks[part], mine), f"{part}."):
                    merged.parts[-1].write(change)
            merged.receipt = _receipt_of(tally, stack)
        except BaseException:
            merged.unmerge()
            raise
    return merged


def merge(network: nn.Module, stack: Sequence[tuple[Adapter, Scale]]) -> Merge:
    """Adapters written into a network's own weights; the result's `unmerge` puts the old ones back bit for bit."""
    tally = _Tally([adapter.name for adapter, _ in stack])
    merged = Merge(network)
    try:
        for change in tally.count(_changes(network, stack)):
            merged.write(change)
        merged.receipt = tally.receipt(key for adapter, _ in stack for key in adapter.keys)
    except BaseException:
        merged.unmerge()
        raise
    return merged


class Merge:
    """Adapters inside a network, and the originals of what they changed. As a context it unmerges at its end."""

    receipt: Receipt

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.originals: dict[str, dict[str, Tensor | None]] = {}
        self.written: dict[str, int] = {}

    @torch.no_grad()
    def write(self, change: Change) -> None:
        module = self.network.get_submodule(change.layer)
        old = {name: getattr(module, name) for name in change.tensors}
        self.originals[change.layer] = {k: None if v is None else v.detach().clone() for k, v in old.items()}
        for name, tensor in change.tensors.items():
            if old[name] is None:
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                old[name].copy_(tensor)  # in place: whatever holds the parameter sees the change
        self.written[change.layer] = checksum(module.get_parameter("weight"))

    @torch.no_grad()
    def unmerge(self) -> None:
        """The originals, back in place. Several merges of one layer are undone last first."""
        for layer, written in self.written.items():
            if checksum(self.network.get_submodule(layer).get_parameter("weight")) != written:
                must, advice = "as its merge left it", "Unmerge the last merge first."
                raise PellucidError(rule(f"weight of {layer}", must, "other values", advice), "lora-unmerge")
        while self.originals:
            layer, tensors = self.originals.popitem()
            module = self.network.get_submodule(layer)
            for name, tensor in tensors.items():
                if tensor is None:
                    module.register_parameter(name, None)
                else:
                    module.get_parameter(name).copy_(tensor)
        self.written.clear()

    def __enter__(self) -> Merge:
        return self

    def __exit__(self, *error: object) -> None:
        self.unmerge()


def checksum(tensor: Tensor) -> int:
    """The sum of the bits of all elements, read as integers."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().view(bits).sum(dtype=torch.int64))


class MergeSet:
    """Merges of several components. As a context it unmerges at its end."""

    receipt: Receipt

    def __init__(self) -> None:
        self.parts: list[Merge] = []

    def unmerge(self) -> None:
        with _idle([part.network for part in self.parts]):
            while self.parts:
                self.parts.pop().unmerge()

    def __enter__(self) -> MergeSet:
        return self

    def __exit__(self, *error: object) -> None:
        self.unmerge()


def view(network: _M, swaps: Mapping[str, Mapping[str, Tensor]]) -> _M:
    """A copy of the module tree that shares all tensors but those in `swaps`, by layer and name.

    Where an attention is packed, its other two projections are copied with the one that is swapped.

    Only what torch knows as a submodule is copied: a module kept in a plain list would stay the base's.
    """
    twin = copied(network, {})
    packed = [m for m in twin.modules() if isinstance(m, Attention) and ops.packed(*m.projections)]
    for layer, tensors in swaps.items():
        module = twin.get_submodule(layer)
        trained = module.get_parameter("weight").requires_grad
        for name, tensor in tensors.items():
            module._parameters[name] = nn.Parameter(tensor, requires_grad=trained)
    for attention in packed:
        ops.pack(*attention.projections)  # again, where one was swapped
    return twin


def copied(module: _M, seen: dict[int, nn.Module]) -> _M:
    """A module with registries of its own and the same tensors in them; one reached twice is copied once."""
    if id(module) not in seen:
        twin = module.__class__.__new__(module.__class__)
        seen[id(module)] = twin
        twin.__dict__ = {k: v.copy() if type(v) in (dict, OrderedDict) else v for k, v in module.__dict__.items()}
        twin._modules = {name: None if m is None else copied(m, seen) for name, m in module._modules.items()}
    return cast(_M, seen[id(module)])


@torch.no_grad()
def _changes(network: nn.Module, stack: Sequence[tuple[Adapter, Scale]]) -> Iterator[Change]:
    """The layers that a stack changes, in the network's order; a tensor that keeps its bits is left out.

    Some layers at a time, so that a device is asked once for the sizes of all of them, and few are held at once.
    """
    waiting: list[tuple[str, dict[str, _Sum]]] = []
    for layer, terms in _terms_by_layer(network, stack).items():
        waiting.append((layer, _sums_of(network.get_submodule(layer), layer, terms)))
        if len(waiting) == _AT_ONCE:
            yield from _settled(network, waiting)
            waiting = []
    yield from _settled(network, waiting)


def _sums_of(module: nn.Module, layer: str, terms: Sequence[_Term]) -> dict[str, _Sum]:
    """The new weight of a layer, and its new bias where a difference has one."""
    weight = module.wide() if isinstance(module, Fp8Linear) else module.get_parameter("weight").detach()
    found = {"weight": _Sum(layer, weight, [(t.owner, t.delta.weight(weight, t.scale)) for t in terms])}
    shifts = [
        (t.owner, t.delta.bias.to(weight.device, torch.float32) * t.scale) for t in terms if t.delta.bias is not None
    ]
    if shifts:
        bias = module._parameters["bias"]
        kind = torch.bfloat16 if isinstance(module, Fp8Linear) else weight.dtype
        before = weight.new_zeros(len(weight), dtype=kind) if bias is None else bias.detach()
        found["bias"] = _Sum(f"{layer}.bias", before, shifts)
    return found


def _settled(network: nn.Module, waiting: Sequence[tuple[str, dict[str, _Sum]]]) -> Iterator[Change]:
    """The layers of which a tensor has changed, after one look at the sizes of all."""
    sums = [total for _, found in waiting for total in found.values()]
    sizes = torch.cat([total.sizes for total in sums]).tolist() if sums else []
    for total in sums:
        total.settle([sizes.pop(0) for _ in range(len(total.sizes))])
    for layer, found in waiting:
        moved = {name: total for name, total in found.items() if total.owners}
        if moved:
            tensors = {name: total.tensor for name, total in moved.items()}
            if "weight" in tensors and isinstance(network.get_submodule(layer), Fp8Linear):
                tensors |= dithered(tensors["weight"])
            owners = set[int]().union(*(total.owners for total in moved.values()))
            yield Change(layer, tensors, {total.name: total.moved for total in moved.values()}, owners)


class _Sum:
    """A tensor plus differences: the new tensor, its relative distance, and which moved it by more than rounding."""

    def __init__(self, name: str, before: Tensor, deltas: list[tuple[int, Tensor]]) -> None:
        total = torch.stack([delta for _, delta in deltas]).sum(0) if len(deltas) > 1 else deltas[0][1]
        self.name, self.all_owners = name, [owner for owner, _ in deltas]
        self.tensor = torch.empty_like(before).copy_(before.float() + total)  # of the base's dtype and memory format
        norms = [before.float().norm(), total.norm(), (self.tensor != before).any().float()]
        self.sizes = torch.stack([*norms, *(delta.norm() for _, delta in deltas)])
        self.moved, self.owners = 0.0, set[int]()

    def settle(self, sizes: Sequence[float]) -> None:
        """Takes `sizes` as numbers."""
        size, length, changed, *each = sizes
        if not math.isfinite(length):
            raise PellucidError(rule(f"the change of {self.name}", "finite", length), "lora-finite")
        self.moved = length / size if size else math.inf
        if changed:
            self.owners = {o for o, own in zip(self.all_owners, each, strict=True) if own > _ROUNDING * size}


def _terms_by_layer(network: nn.Module, stack: Sequence[tuple[Adapter, Scale]]) -> dict[str, list[_Term]]:
    """All differences at scales other than 0, by layer in the network's order; layers and shapes are checked first."""
    weights = layer_weights(network)
    for adapter, scale in stack:
        _check_scale(adapter.name, scale, adapter.layers)
        check_layers(adapter, weights)
    found: dict[str, list[_Term]] = {}
    for layer in weights:
        terms = [_Term(i, a.layers[layer], scale_at(s, layer)) for i, (a, s) in enumerate(stack) if layer in a.layers]
        if terms := [term for term in terms if term.scale != 0.0]:
            found[layer] = terms
    return found


def layer_weights(network: nn.Module) -> dict[str, Tensor]:
    """The weight of each layer that has one, by the layer's name."""
    found = ((name, module._parameters.get("weight")) for name, module in network.named_modules())
    return {name: weight for name, weight in found if weight is not None}


def check_layers(adapter: Adapter, weights: Mapping[str, Tensor]) -> None:
    """Every layer of an adapter must be in the network and of its shape."""
    for layer in adapter.layers:
        if layer not in weights:
            advice = nearest(layer, weights)
            raise PellucidError(
                rule(f"a layer of adapter {adapter.name}", "one of the network", layer, advice), "lora-layer"
            )
    for layer, weight in weights.items():
        delta = adapter.layers.get(layer)
        if delta is not None and (got := delta.misfit(tuple(weight.shape))) is not None:
            must, advice = f"{tuple(weight.shape)} as in the base", "The adapter was made for another base model."
            raise PellucidError(rule(f"{layer} of adapter {adapter.name}", must, got, advice), "lora-base")


def _check_scale(name: str, scale: Scale, layers: Iterable[str]) -> None:
    """A scale is finite, and each of its prefixes covers a layer."""
    by_prefix = scale if isinstance(scale, Mapping) else {"": scale}
    for prefix, value in by_prefix.items():
        where = f"scale of adapter {name}" + (f" at {prefix}" if prefix else "")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PellucidError(rule(where, "a finite number", value), "lora-scale")
        if prefix and not any(_covers(prefix, layer) for layer in layers):
            starts = {".".join(layer.split(".")[:n]) for layer in layers for n in (1, 2)}
            raise PellucidError(
                rule(where, "at a prefix of layers that the adapter has", prefix, nearest(prefix, starts)), "lora-scale"
            )


def _covers(prefix: str, layer: str) -> bool:
    return not prefix or within(layer, (prefix,))


def scale_at(scale: Scale, layer: str) -> float:
    """The scale of one layer: that of the longest prefix, and 1 where none covers it."""
    if not isinstance(scale, Mapping):
        return float(scale)
    prefixes = [prefix for prefix in scale if _covers(prefix, layer)]
    return float(scale[max(prefixes, key=len)]) if prefixes else 1.0


def _scale_within(component: str, scale: Scale) -> Scale:
    """A scale over all components as one component sees it."""
    if not isinstance(scale, Mapping):
        return scale
    rest = {"": scale_at(scale, component)}
    start = f"{component}."
    return rest | {prefix.removeprefix(start): value for prefix, value in scale.items() if prefix.startswith(start)}
