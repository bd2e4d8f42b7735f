"""A pipeline's graph in words and tables, which the terminal, the image and the studio share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.evidence.report.charts import COLOURS, FAINT

if TYPE_CHECKING:
    from pellucid.pipeline.inspection import Block, Flow, Graph, Node, Shape

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE = COLOURS[:5]
ROLE_COLOURS = {
    "input": FAINT,
    "tokenizer": _BLUE,
    "text": _BLUE,
    "image": _PURPLE,
    "control": _RED,
    "condition": _BLUE,
    "network": _ORANGE,
    "guidance": _ORANGE,
    "sampler": _ORANGE,
    "vae": _GREEN,
    "output": FAINT,
}


def count(number: int) -> str:
    """859.5 M, 2.57 B, 12.4 K, 640."""
    for unit, size, digits in (("B", 10**9, 2), ("M", 10**6, 1), ("K", 10**3, 1)):
        if number >= size * (1 - 0.5 * 10 ** -(digits + 3)):
            return f"{number / size:.{digits}f} {unit}"
    return str(number)


def size(number: int) -> str:
    """Bytes in powers of ten: 1.72 GB, 246 MB."""
    for unit, scale, digits in (("GB", 10**9, 2), ("MB", 10**6, 0), ("kB", 10**3, 0)):
        if number >= scale:
            return f"{number / scale:.{digits}f} {unit}"
    return f"{number} B"


def milliseconds(value: float) -> str:
    """1.53 s, 44.1 ms, 0.21 ms."""
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def _shape(found: Shape) -> str:
    return "(" + ", ".join(str(n) for n in found) + ("," if len(found) == 1 else "") + ")"


def _shapes(found: Sequence[Shape]) -> str:
    """One shape, or how many tensors and the first and last of them."""
    if len(found) < 2:
        return _shape(found[0]) if found else ""
    ends = dict.fromkeys((_shape(found[0]), _shape(found[-1])))
    return f"{len(found)} × {' … '.join(ends)}"


def flow_text(flow: Flow) -> str:
    return f"{flow.what} {_shapes(flow.shapes)}".rstrip()


def title(graph: Graph) -> str:
    """The model's name; of a path its last part."""
    path = Path(graph.name)
    return path.name if path.is_absolute() or graph.name.startswith((".", "~")) else graph.name


def subtitle(graph: Graph) -> list[str]:
    calls = f"{graph.steps} steps" + (f", {graph.calls} calls" if graph.calls != graph.steps else "")
    pixels = f"{graph.size[0]} × {graph.size[1]} pixels"
    words = [graph.pipeline, *([graph.family] if graph.family else []), pixels, f"batch {graph.batch}", calls]
    return [*words, f"{count(graph.parameters)} parameters", f"{size(graph.memory)} in memory"]


def classes(node: Node) -> list[str]:
    """Our class and its peer's, once where they are the same."""
    return [] if node.role == "guidance" else list(dict.fromkeys(word for word in (node.kind, node.peer) if word))


def weight(node: Node) -> list[str]:
    """Parameters, dtype and bytes; what the file has is said where it differs."""
    if not node.parameters:
        return []
    if node.half_of is not None:
        return [f"{count(node.parameters)} of {node.half_of}'s parameters"]
    words = [f"{count(node.parameters)} parameters"]
    held = node.stored
    if held is None:
        return [*words, f"{node.dtype}", f"{size(node.memory)} in memory"]
    if held.dtypes == (node.dtype,) and abs(held.size - node.memory) < 0.005 * node.memory:
        return [*words, f"{node.dtype}", size(node.memory)]
    return [
        *words,
        f"{' and '.join(held.dtypes)}, {size(held.size)} on disk",
        f"{node.dtype}, {size(node.memory)} in memory",
    ]


def remarks(node: Node) -> list[str]:
    """What else a node's box says."""
    f = node.facts
    if node.role == "tokenizer":
        return [f"{f['entries']:,} entries", f"window {f['window']}"]
    if node.role == "condition":
        return [f["sides"]]
    if node.role == "guidance":
        scale = "scale " if f["guidance"][0].isdigit() else ""
        return [scale + f["guidance"], *dict.fromkeys(f"in {space} space" for space in f["spaces"].values())]
    if node.role == "sampler":
        words = [f"{f['schedule']} schedule", f"{f['grid']} grid", f"predicts {f['target']}", f"{f['dialect']} dialect"]
        words += ["fresh noise"] if f["noise"].startswith("fresh") else []
        return words + ([f["x0 filter"]] if f["x0 filter"] != "none" else [])
    return [f"sees {_shape(f['sees'])}"] if "sees" in f else []


def pace(graph: Graph) -> str:
    """What the loop's frame says."""
    if graph.calls == graph.steps:
        return f"× {graph.steps} steps"
    return f"× {graph.calls} calls in {graph.steps} steps"


def duration(node: Node) -> str:
    """Milliseconds per call, and how often where it is more than once."""
    if node.milliseconds is None:
        return ""
    return milliseconds(node.milliseconds) + (f" × {node.calls}" if node.calls > 1 else "")


# --- Tables ---------------------------------------------------------------------------------------------------------

_COMPONENTS = ("component", "parameters", "share", "dtype in file", "on disk", "in memory", "as", "calls")
ANATOMY = ("block", "class", "parameters", "share", "leaves as")
CLOCK = ("stage", "a run", "of it", "peak memory")
NUMBERS = ("parameters", "share", "on disk", "in memory", "calls", "a call", "a run", "of it", "peak memory")


def component_columns(graph: Graph) -> tuple[str, ...]:
    return _COMPONENTS if graph.times is None else (*_COMPONENTS, "a call")


def components(graph: Graph) -> list[tuple[str, ...]]:
    """A row a component, and the sums in the last one."""
    rows: list[tuple[str, ...]] = []
    for node in graph.components():
        held = node.stored
        dtypes, disk = ("–", "–") if held is None else (", ".join(held.dtypes), size(held.size))
        share = f"{100 * node.parameters / graph.parameters:.1f} %"
        cells = [node.name, count(node.parameters), share, dtypes, disk, size(node.memory), str(node.dtype)]
        cells.append(str(node.calls))
        if graph.times is not None:
            cells.append("–" if node.milliseconds is None else milliseconds(node.milliseconds))
        rows.append(tuple(cells))
    disk = size(graph.stored) if graph.stored else "–"
    return [*rows, ("all", count(graph.parameters), "", "", disk, size(graph.memory), "", "")]


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
        number = count(block.parameters)
        leaves = "" if block.shape is None else _shape(block.shape)
        parameters = f"{times} × {number}" if times > 1 else number
        rows.append(BlockRow(level, block.name, block.kind, parameters, block.share * times, leaves))
    return rows


def anatomy_cells(node: Node) -> list[tuple[str, ...]]:
    """The same as text, each level further to the right."""
    return [
        ("\u2003" * row.level + row.name, row.kind, row.parameters, row.percent, row.leaves) for row in anatomy(node)
    ]


def listed(blocks: Sequence[Block], level: int = 0, inside: str = "") -> Iterator[tuple[int, Block, int]]:
    """Blocks with their level and how often they stand in a row: equal neighbours are one line.

    Below the first level names are those within the block above.
    """
    for _, run in groupby(blocks, key=_alike):
        same = list(run)
        first, last = same[0], same[-1]
        name = first.name.removeprefix(f"{inside}.")
        if len(same) > 1:
            name = f"{name} … {last.name.rpartition('.')[2]}"
        yield level, replace(first, name=name, shape=last.shape), len(same)
        yield from listed(first.blocks, level + 1, first.name)


def _alike(block: Block) -> tuple[str, str, int, object]:
    stem = block.name.rpartition(".")[0]
    return stem, block.kind, block.parameters, block.shape


def clock(graph: Graph) -> list[tuple[str, ...]]:
    """Milliseconds by stage, and of the whole run in the last row."""
    times = graph.times
    assert times is not None
    loop_time = times.step * graph.calls
    stages = [("text", times.text, "text"), ("encode images", times.encode, "encode")]
    stages += [(f"{graph.calls} × one step of {milliseconds(times.step)}", loop_time, "denoise")]
    stages += [("decode", times.decode, "decode")]
    total = sum(value for _, value, _ in stages) or 1.0
    rows = []
    for name, value, stage in stages:
        peak = times.peaks.get(stage)
        rows.append((name, milliseconds(value), f"{100 * value / total:.1f} %", size(peak) if peak else "–"))
    return [*rows, (f"the whole run on {times.device}, measured", milliseconds(times.whole), "", "")]


def links(graph: Graph, node: Node) -> list[tuple[str, str, str, str]]:
    """What comes and goes: an arrow, the node at the other end, what flows, its dtype."""
    return [
        *(("←", flow.source, flow_text(flow), flow.dtype or "") for flow in graph.into(node.name)),
        *(("→", flow.goal, flow_text(flow), flow.dtype or "") for flow in graph.out_of(node.name)),
    ]
