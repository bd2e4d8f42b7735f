"""Words of a pipeline's graph that its text and its image share: counts, bytes, shapes, what a node is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.evidence.study.charts import COLOURS, FAINT

if TYPE_CHECKING:
    from pellucid.pipeline.inspection import Flow, Graph, Node, Shape

BLUE, ORANGE, GREEN, RED, PURPLE = COLOURS[:5]
ROLE_COLOURS = {
    "input": FAINT,
    "tokenizer": BLUE,
    "text": BLUE,
    "image": PURPLE,
    "control": RED,
    "condition": BLUE,
    "network": ORANGE,
    "guidance": ORANGE,
    "sampler": ORANGE,
    "vae": GREEN,
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


def shape(found: Shape) -> str:
    return "(" + ", ".join(str(n) for n in found) + ("," if len(found) == 1 else "") + ")"


def shapes(found: Sequence[Shape]) -> str:
    """One shape, or how many tensors and the first and last of them."""
    if len(found) < 2:
        return shape(found[0]) if found else ""
    ends = dict.fromkeys((shape(found[0]), shape(found[-1])))
    return f"{len(found)} × {' … '.join(ends)}"


def flowing(flow: Flow) -> str:
    return f"{flow.what} {shapes(flow.shapes)}".rstrip()


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
    return [f"sees {shape(f['sees'])}"] if "sees" in f else []


def pace(graph: Graph) -> str:
    """What the loop's frame says."""
    if graph.calls == graph.steps:
        return f"× {graph.steps} steps"
    return f"× {graph.calls} calls in {graph.steps} steps"


def took(node: Node) -> str:
    """Milliseconds per call, and how often where it is more than once."""
    if node.milliseconds is None:
        return ""
    return milliseconds(node.milliseconds) + (f" × {node.calls}" if node.calls > 1 else "")
