"""A pipeline's graph as rows of words: its components, the blocks of one, milliseconds by stage. Who prints them, a
terminal or a page, is not their business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from pellucid.evidence.drawing import graph_words as words

if TYPE_CHECKING:
    from pellucid.pipeline.inspection import Block, Graph, Node

COMPONENTS = ("component", "parameters", "share", "dtype in file", "on disk", "in memory", "as", "calls")
CLOCK = ("stage", "a run", "of it", "peak memory")
NUMBERS = ("parameters", "share", "on disk", "in memory", "calls", "a call", "a run", "of it", "peak memory")


def component_columns(graph: Graph) -> tuple[str, ...]:
    return COMPONENTS if graph.times is None else (*COMPONENTS, "a call")


def components(graph: Graph) -> list[tuple[str, ...]]:
    """A row a component, and the sums in the last one."""
    rows: list[tuple[str, ...]] = []
    for node in graph.components():
        held = node.stored
        dtypes, disk = ("–", "–") if held is None else (", ".join(held.dtypes), words.size(held.size))
        share = f"{100 * node.parameters / graph.parameters:.1f} %"
        cells = [node.name, words.count(node.parameters), share, dtypes, disk, words.size(node.memory), str(node.dtype)]
        cells.append(str(node.calls))
        if graph.times is not None:
            cells.append("–" if node.milliseconds is None else words.milliseconds(node.milliseconds))
        rows.append(tuple(cells))
    disk = words.size(graph.stored) if graph.stored else "–"
    return [*rows, ("all", words.count(graph.parameters), "", "", disk, words.size(graph.memory), "", "")]


@dataclass(frozen=True)
class BlockRow:
    """A block, or equal neighbours on one line: `share` is that of all of them."""

    level: int
    name: str
    kind: str
    parameters: str
    share: float
    leaves: str

    @property
    def percent(self) -> str:
        return f"{100 * self.share:.1f} %" if self.share >= 0.0005 else "< 0.1 %"


def anatomy(node: Node) -> list[BlockRow]:
    """A network's blocks: class, parameters, share, and the shape that leaves each."""
    rows = []
    for level, block, times in listed(node.blocks):
        number = words.count(block.parameters)
        leaves = "" if block.shape is None else words.shape(block.shape)
        parameters = f"{times} × {number}" if times > 1 else number
        rows.append(BlockRow(level, block.name, block.kind, parameters, block.share * times, leaves))
    return rows


def listed(blocks: Sequence[Block], level: int = 0, inside: str = "") -> Iterator[tuple[int, Block, int]]:
    """Blocks with their level and how often they stand in a row: equal neighbours are one line.

    Below the first level names are those within the block above.
    """
    for _, run in groupby(blocks, key=alike):
        same = list(run)
        first, last = same[0], same[-1]
        name = first.name.removeprefix(f"{inside}.")
        if len(same) > 1:
            name = f"{name} … {last.name.rpartition('.')[2]}"
        yield level, replace(first, name=name, shape=last.shape), len(same)
        yield from listed(first.blocks, level + 1, first.name)


def alike(block: Block) -> tuple[str, str, int, object]:
    stem = block.name.rpartition(".")[0]
    return stem, block.kind, block.parameters, block.shape


def clock(graph: Graph) -> list[tuple[str, ...]]:
    """Milliseconds by stage, and of the whole run in the last row."""
    times = graph.times
    assert times is not None
    loop_time = times.step * graph.calls
    stages = [("text", times.text, "text"), ("encode images", times.encode, "encode")]
    stages += [(f"{graph.calls} × one step of {words.milliseconds(times.step)}", loop_time, "denoise")]
    stages += [("decode", times.decode, "decode")]
    total = sum(value for _, value, _ in stages) or 1.0
    rows = []
    for name, value, stage in stages:
        peak = times.peaks.get(stage)
        rows.append(
            (name, words.milliseconds(value), f"{100 * value / total:.1f} %", words.size(peak) if peak else "–")
        )
    return [*rows, (f"the whole run on {times.device}, measured", words.milliseconds(times.whole), "", "")]


def links(graph: Graph, node: Node) -> list[tuple[str, str, str, str]]:
    """What comes and goes: an arrow, the node at the other end, what flows, its dtype."""
    return [
        *(("←", flow.source, words.flowing(flow), flow.dtype or "") for flow in graph.into(node.name)),
        *(("→", flow.goal, words.flowing(flow), flow.dtype or "") for flow in graph.out_of(node.name)),
    ]
