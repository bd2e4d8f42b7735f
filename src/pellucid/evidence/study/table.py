"""A table of a report, as Markdown and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells of text under columns; `note` says how to read them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")

    def html(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "\n".join(line(row, "td") for row in self.rows)
        note = f"<p class=note>{html.escape(self.note)}</p>" if self.note else ""
        title = html.escape(self.title)
        return f"<h2>{title}</h2>\n<table>\n{line(self.columns, 'th')}\n{body}\n</table>\n{note}"
