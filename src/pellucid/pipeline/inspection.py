"""What a pipeline is made of and what flows through it, as plain data: who draws it, and how, is not its business."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pellucid.core.errors import PellucidError, nearest, rule

SCHEMA = 1
Shape = tuple[int, ...]
Role = Literal[
    "input", "tokenizer", "text", "image", "control", "condition", "network", "guidance", "sampler", "vae", "output"
]
Stage = Literal["text", "encode", "denoise", "decode"]


@dataclass(frozen=True)
class Asked:
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
class Stored:
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
    stored: Stored | None = None
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

    def branches(self) -> list[list[Node]]:
        """Chains of nodes from an input to where they are joined: text, image prompts, sizes, labels, masks."""
        held = {node.name: node for node in self.nodes}
        found = []
        for node in self.of("input", "tokenizer", "text", "image", "vae"):
            goals = {held[flow.goal].role for flow in self.out_of(node.name)}
            waits = node.role == "image" and not goals  # an image encoder without an adapter
            if not waits and not goals & {"condition", "network"}:
                continue
            chain = [node]
            while sources := [flow.source for flow in self.into(chain[0].name)]:
                chain.insert(0, held[sources[0]])
            found.append(chain)
        return found

    def timed(self, times: Times, networks: dict[str, float]) -> Graph:
        """The same graph with what a run took: by stage, and by network in milliseconds per call."""
        nodes = tuple(replace(node, milliseconds=networks.get(node.name)) for node in self.nodes)
        return replace(self, nodes=nodes, times=times)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it, with the sums."""
        sums = {"parameters": self.parameters, "memory": self.memory, "stored": self.stored}
        return {"schema": SCHEMA, "kind": "pellucid-graph", **asdict(self), **sums}
