"""A network taken apart: the blocks that it is made of, their parameters and their shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from pellucid.pipeline.inspection import Block


def blocks_of(network: nn.Module, depth: int, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Block, ...]:
    """The parts of a network, `depth` levels of them. Shared weights count once, in the first part that holds them."""
    total = sum(weight.numel() for weight in network.parameters())
    return Dissection(total, shapes or {}).parts(network, "", depth, set())


@dataclass(frozen=True)
class Dissection:
    total: int
    shapes: Mapping[str, tuple[int, ...]]

    def parts(self, module: nn.Module, path: str, depth: int, counted: set[int]) -> tuple[Block, ...]:
        if depth < 1:
            return ()
        found = []
        for name, inner in limbs(module, path):
            fresh = {id(w): w.numel() for w in inner.parameters() if id(w) not in counted}
            below = self.parts(inner, name, depth - 1, set(counted))
            counted |= set(fresh)
            count = sum(fresh.values())
            kind = type(inner).__name__
            found.append(Block(name, kind, count, count / self.total, self.shapes.get(name), below))
        for name, weight in module.named_parameters(path, recurse=False):
            if found and id(weight) not in counted:  # beside its blocks; the weights of a single layer are not told
                found.append(Block(name, "Parameter", weight.numel(), weight.numel() / self.total))
                counted.add(id(weight))
        return tuple(found)


def limbs(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children with weights. A list stands for its items, and what holds all weights alone for its children."""
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    children = [(name, child) for name, child in children if next(child.parameters(), None) is not None]
    own = next(module.parameters(recurse=False), None)
    if len(children) == 1 and own is None and next(children[0][1].children(), None) is not None:
        yield from limbs(children[0][1], children[0][0])
        return
    for name, child in children:
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for key, item in child.named_children():
                if next(item.parameters(), None) is not None:
                    yield f"{name}.{key}", item
        else:
            yield name, child
