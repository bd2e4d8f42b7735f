"""Hooks on every module of a model: what goes in, what comes out, and which one first makes a number that is none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SENSE = 1e6  # what no activation of a sound network passes


@dataclass(frozen=True)
class Range:
    """Of the finite numbers of some tensors; `broken` counts the others."""

    low: float = 0.0
    high: float = 0.0
    broken: int = 0

    @property
    def most(self) -> float:
        return max(abs(self.low), abs(self.high))

    def text(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}" + (f", {self.broken} not finite" if self.broken else "")


@dataclass(frozen=True)
class Broken:
    """The first output that was not finite: which module made it, from what, in which dtype.

    `between` says that no module made it, but the code of this one, between its parts. `in_float32` is the largest
    number that the module makes of the same input in float32, where it could be asked."""

    path: str
    kind: str
    dtype: torch.dtype
    inputs: Range
    outputs: Range
    between: bool = False
    weights: int = 0  # numbers of its own weights that are not finite
    in_float32: float | None = None
    grew: str = ""  # the first module before it whose numbers were already beyond any sense


@dataclass
class Watch:
    """What the hooks saw: the first broken output, and the largest finite number of each module."""

    first: Broken | None = None
    largest: dict[str, float] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def see(self, path: str, module: nn.Module, given: Any, made: Any) -> None:
        if self.first is not None:
            return
        outputs = range_of(made)
        dtype = next((t.dtype for t in tensors(made)), torch.float32)
        self.largest[path] = max(outputs.most, self.largest.get(path, 0.0))
        self.dtypes[path] = dtype
        if not outputs.broken:
            return
        inputs = range_of(given)
        if inputs.broken:  # no module before this one made it: the code around it did
            around = path.rpartition(".")[0] or path
            self.first = Broken(around, type(module).__name__, dtype, inputs, outputs, between=True)
            return
        held = sum(int((~torch.isfinite(p)).sum()) for p in module.parameters())
        wider = None if held else largest_in_float32(module, given)
        grew = next((one for one, most in self.largest.items() if one != path and most > SENSE), "")
        self.first = Broken(path, type(module).__name__, dtype, inputs, outputs, False, held, wider, grew)


def tensors(tree: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a tree of tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point() and tree.numel():
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors(value)


def range_of(tree: Any) -> Range:
    lows, highs, broken = [0.0], [0.0], 0
    for tensor in tensors(tree):
        low, high = (float(end) for end in tensor.aminmax())
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            finite = tensor[torch.isfinite(tensor)]
            broken += tensor.numel() - finite.numel()
            if not finite.numel():
                continue
            low, high = (float(end) for end in finite.aminmax())
        lows.append(low)
        highs.append(high)
    return Range(min(lows[1:], default=0.0), max(highs[1:], default=0.0), broken)


@torch.no_grad()
def largest_in_float32(module: nn.Module, given: Any) -> float | None:
    """The largest number that a module makes of an input in float32; None where it makes none that is finite."""
    args, kwargs = given
    try:
        # forward itself: the copy carries the hooks of the module, which are not to see this
        made = range_of(copy.deepcopy(module).float().forward(*widened(args), **widened(kwargs)))
    except (RuntimeError, TypeError, ValueError):
        return None
    return None if made.broken else made.most


def widened(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.float() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {name: widened(value) for name, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(widened(value) for value in tree))
    return type(tree)(widened(value) for value in tree) if isinstance(tree, tuple | list) else tree


@contextmanager
def watched(networks: Mapping[str, nn.Module]) -> Iterator[Watch]:
    """Inside, every module of the networks is seen as it is done, inner ones before those that hold them."""
    watch, handles = Watch(), []

    def hook(path: str) -> Any:
        def seen(module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
            watch.see(path, module, (args, kwargs), made)

        return seen

    try:
        for name, network in networks.items():
            for inner, module in network.named_modules():
                path = f"{name}.{inner}" if inner else name
                handles.append(module.register_forward_hook(hook(path), with_kwargs=True))
        yield watch
    finally:
        for handle in handles:
            handle.remove()
