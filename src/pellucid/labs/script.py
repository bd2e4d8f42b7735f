"""A lab's page as blocks: the script is one that Sphinx-Gallery reads too, and needs no Sphinx here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

MARK = "# %%"
HIDDEN = "# sphinx_gallery_"  # settings of the gallery, of no interest to a reader


@dataclass(frozen=True)
class Block:
    """Words (RST) and the code that follows them; `line` is where the code begins in the file."""

    text: str
    code: str
    line: int


def parse(source: str) -> list[Block]:
    """The module's docstring with the code after it; then each `# %%`, its comment and its code."""
    lines = source.splitlines()
    tree = ast.parse(source)
    text, start = ast.get_docstring(tree) or "", 0
    if text:
        start = tree.body[0].end_lineno or 0
    marks = [i for i in range(start, len(lines)) if lines[i].startswith(MARK)]
    blocks = [block(text, lines, start, marks[0] if marks else len(lines))]
    for here, end in pairwise([*marks, len(lines)]):
        words = list(comment(lines, here, end))
        blocks.append(block("\n".join(words).strip(), lines, here + max(1, len(words)), end))
    return [one for one in blocks if one.text or one.code]


def read(path: Path) -> list[Block]:
    return parse(path.read_text("utf-8"))


def comment(lines: list[str], start: int, end: int) -> Iterator[str]:
    """The words of the mark's own line and of the comment below it."""
    yield lines[start].removeprefix(MARK).strip()
    for line in lines[start + 1 : end]:
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").removeprefix(" ")


def block(text: str, lines: list[str], start: int, end: int) -> Block:
    """The lines from `start` up to `end` as code, without what is empty around them."""
    kept = [i for i in range(start, end) if not lines[i].startswith(HIDDEN)]
    while kept and not lines[kept[0]].strip():
        kept.pop(0)
    while kept and not lines[kept[-1]].strip():
        kept.pop()
    return Block(text, "\n".join(lines[i] for i in kept), kept[0] + 1 if kept else start + 1)
