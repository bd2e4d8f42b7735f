"""What a pipeline is made of and what flows through it, as plain data: its nodes, their blocks and their files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.interop import single_file, weights
from pellucid.interop.components import TEXT_PARTS, named_classes
from pellucid.interop.folder import index_of, place_of, reads

_SCHEMA = 1
Shape = tuple[int, ...]
Role = Literal[
    "input", "tokenizer", "text", "image", "control", "condition", "network", "guidance", "sampler", "vae", "output"
]
Stage = Literal["text", "encode", "denoise", "decode"]


@dataclass(frozen=True)
class GraphOptions:
    """What a graph is drawn for; None leaves it to the model. `depth`: levels of blocks inside of each network."""

    size: tuple[int, int] | None = None
    batch: int = 1
    steps: int | None = None
    guidance: Any = None
    depth: int = 1
    controlnets: tuple[str | os.PathLike[str], ...] = ()
    ip_adapters: tuple[str | os.PathLike[str], ...] = ()


@dataclass(frozen=True)
class Block:
    """A part of a network: its parameters, their share of the network's, and the shape that leaves it."""

    name: str
    kind: str
    parameters: int
    share: float
    shape: Shape | None = None
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a component as they lie on disk: their bytes, their dtypes, and the files that hold them."""

    size: int
    dtypes: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """A station of the pipeline. What holds weights has parameters; `half_of` marks half of another node.

    `kind` is our class and `peer` that of diffusers or transformers. `calls` counts the calls of one run, `memory`
    the bytes of the weights once loaded, `facts` what else is worth knowing, in order.
    """

    name: str
    role: Role
    kind: str = ""
    peer: str = ""
    stage: Stage | None = None
    parameters: int = 0
    dtype: str | None = None
    memory: int = 0
    stored: StoredWeights | None = None
    calls: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    half_of: str | None = None
    milliseconds: float | None = None


@dataclass(frozen=True)
class Flow:
    """What one node hands to another: a name, the shape of each tensor, their dtype. Text has no shape."""

    source: str
    goal: str
    what: str
    shapes: tuple[Shape, ...] = ()
    dtype: str | None = None


@dataclass(frozen=True)
class Times:
    """Milliseconds: medians by stage of warm runs, `step` being one call of the denoiser and its row; the whole run.

    `peaks` are the device's, in bytes by stage; empty on a CPU.
    """

    device: str
    text: float
    encode: float
    step: float
    decode: float
    whole: float
    runs: int
    peaks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """A pipeline for one request: its nodes in the order in which they act, and the flows between them."""

    name: str
    pipeline: str
    family: str | None
    size: tuple[int, int]
    batch: int
    steps: int
    calls: int
    nodes: tuple[Node, ...]
    flows: tuple[Flow, ...]
    notes: tuple[str, ...] = ()
    times: Times | None = None

    @property
    def parameters(self) -> int:
        return sum(node.parameters for node in self.components())

    @property
    def memory(self) -> int:
        return sum(node.memory for node in self.components())

    @property
    def stored(self) -> int:
        return sum(node.stored.size for node in self.components() if node.stored is not None)

    def components(self) -> Iterator[Node]:
        """The nodes that hold weights, each once."""
        return (node for node in self.nodes if node.parameters and node.half_of is None)

    def of(self, *roles: Role) -> list[Node]:
        return [node for node in self.nodes if node.role in roles]

    def node(self, name: str) -> Node:
        found = {node.name: node for node in self.nodes}
        if name not in found:
            names = [node.name for node in self.components()]
            raise PellucidError(
                rule("component", f"one of {', '.join(names)}", name, nearest(name, names)), "component"
            )
        return found[name]

    def between(self, source: str, goal: str) -> list[Flow]:
        return [flow for flow in self.flows if (flow.source, flow.goal) == (source, goal)]

    def into(self, name: str) -> list[Flow]:
        return [flow for flow in self.flows if flow.goal == name]

    def out_of(self, name: str) -> list[Flow]:
        return [flow for flow in self.flows if flow.source == name]

    def timed(self, times: Times, networks: dict[str, float]) -> Graph:
        """The same graph with what a run took: by stage, and by network in milliseconds per call."""
        nodes = tuple(replace(node, milliseconds=networks.get(node.name)) for node in self.nodes)
        return replace(self, nodes=nodes, times=times)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it, with the sums."""
        sums = {"parameters": self.parameters, "memory": self.memory, "stored": self.stored}
        return {"schema": _SCHEMA, "kind": "pellucid-graph", **asdict(self), **sums}


# --- Blocks of a network --------------------------------------------------------------------------------------------


def blocks_of(network: nn.Module, depth: int, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Block, ...]:
    """The parts of a network, `depth` levels of them. Shared weights count once, in the first part that holds them."""
    total = sum(weight.numel() for weight in network.parameters())
    return _BlockCounter(total, shapes or {}).parts(network, "", depth, set())


@dataclass(frozen=True)
class _BlockCounter:
    total: int
    shapes: Mapping[str, tuple[int, ...]]

    def parts(self, module: nn.Module, path: str, depth: int, counted: set[int]) -> tuple[Block, ...]:
        if depth < 1:
            return ()
        found = []
        for name, inner in _weighted_children(module, path):
            fresh = {id(w): w.numel() for w in inner.parameters() if id(w) not in counted}
            below = self.parts(inner, name, depth - 1, set(counted))
            counted |= set(fresh)
            count = sum(fresh.values())
            kind = type(inner).__name__
            found.append(Block(name, kind, count, count / self.total, self.shapes.get(name), below))
        for name, weight in module.named_parameters(path, recurse=False):
            if found and id(weight) not in counted:  # beside its blocks; the weights of a single layer are not listed
                found.append(Block(name, "Parameter", weight.numel(), weight.numel() / self.total))
                counted.add(id(weight))
        return tuple(found)


def _weighted_children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children with weights. A list stands for its items, and what holds all weights alone for its children."""
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    children = [(name, child) for name, child in children if next(child.parameters(), None) is not None]
    own = next(module.parameters(recurse=False), None)
    if len(children) == 1 and own is None and next(children[0][1].children(), None) is not None:
        yield from _weighted_children(children[0][1], children[0][0])
        return
    for name, child in children:
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for key, item in child.named_children():
                if next(item.parameters(), None) is not None:
                    yield f"{name}.{key}", item
        else:
            yield name, child


# --- Weights on disk ------------------------------------------------------------------------------------------------


def stored_in(path: Path, variant: str | None = None) -> dict[str, StoredWeights]:
    """What a model's folder or file holds, by the names of its components."""
    return _in_file(path) if path.is_file() else _in_folder(path, variant)


def _in_folder(folder: Path, variant: str | None) -> dict[str, StoredWeights]:
    listed = named_classes(index_of(folder))
    parts = {part: place_of(folder, part) for part, kind in listed.items() if reads(part, kind)}
    if "controlnet" in parts:
        parts |= {place.name: place for place in sorted(folder.glob("controlnet_[0-9]*")) if place.is_dir()}
    return {part: stored_component(place, variant) for part, place in parts.items()}


def _in_file(path: Path) -> dict[str, StoredWeights]:
    """A single file by its sections."""
    sections = single_file.split(weights.read(path), path.name)
    encoders = [prefix for prefix, _ in single_file.layout_of(sections, path.name).encoders]
    refiner = encoders == [single_file.REFINER_OPEN_CLIP]
    names = dict(zip(encoders, TEXT_PARTS[1:] if refiner else TEXT_PARTS, strict=False))
    names |= {single_file.UNET: "unet", single_file.VAE: "vae", single_file.CONTROL: "controlnet"}
    return {names[prefix]: _sum_of(held.values(), [path]) for prefix, held in sections.items() if prefix in names}


def stored_component(path: Path, variant: str | None = None) -> StoredWeights:
    """One component in its folder, or in a file of its own."""
    if path.is_file():
        return _sum_of(weights.read(path).values(), [path])
    tensors, found = weights.read_folder(path, variant)
    files = [found.path]
    if found.path.name.endswith(".json"):
        index: Mapping[str, str] = weights.read_json(found.path)["weight_map"]
        files = [path / shard for shard in sorted(set(index.values()))]
    return _sum_of(tensors.values(), files)


def _sum_of(tensors: Iterable[Tensor], files: Iterable[Path]) -> StoredWeights:
    held = list(tensors)
    sizes: dict[str, int] = {}
    for tensor in held:
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    widest_first = sorted(sizes, key=lambda name: -sizes[name])
    return StoredWeights(sum(sizes.values()), tuple(widest_first), tuple(path.name for path in files))
