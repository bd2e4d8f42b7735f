"""A lab's page as blocks of words and code; its words are RST, shown as Markdown or plain."""

from __future__ import annotations

import ast
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

# --- Blocks ---------------------------------------------------------------------------------------------------------

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


# --- Words ----------------------------------------------------------------------------------------------------------

Kind = Literal["heading", "math", "code", "note", "words"]
UNDERLINES = "=-~^"
DIRECTIVE = re.compile(r"^\.\. ([\w-]+)::\s*(.*)$")
INLINE = re.compile(
    r"``(?P<literal>.+?)``"
    r"|:(?P<role>[\w:+.-]+):`(?P<target>[^`]+)`"
    r"|`(?P<link>[^`<]+?)\s*<(?P<address>[^`>]+)>`__?"
    r"|`(?P<loose>[^`]+)`"
    r"|\*\*(?P<strong>[^*]+)\*\*"
    r"|(?<![\w*])\*(?![\s*])(?P<emphasis>[^*]+?)(?<!\s)\*(?![\w*])",
    re.S,
)
ITEM = r"^\s*([-*|+=]|#\.|\d+\.)(\s|=|$)"  # of a list, or a line of a table
TITLED = re.compile(r"^(?P<title>.+?)\s*<(?P<target>[^>]+)>$", re.S)
ACCENTS = {"bar": "\u0304", "hat": "\u0302", "tilde": "\u0303"}
# What a terminal shows for LaTeX's names; those of letters are found below, other names stay as they are.
SYMBOLS = {
    "cdot": "·", "times": "×", "approx": "≈", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠",
    "to": "→", "infty": "∞", "sum": "Σ", "odot": "⊙", "partial": "∂", "nabla": "∇", "sim": "∼", "in": "∈", "pm": "±",
    "mapsto": "↦", "dots": "…", "ldots": "…", "cdots": "…", "left": "", "right": "", "quad": " ", "qquad": " ",
    "lVert": "‖", "rVert": "‖", "|": "‖", "varepsilon": "ε", "varphi": "φ", "lambda": "λ",
}  # fmt: skip


@dataclass(frozen=True)
class Passage:
    """A stretch of a text: `level` of a heading, `name` of a code's language or of a note."""

    kind: Kind
    body: str
    level: int = 0
    name: str = ""


def parts(text: str) -> Iterator[Passage]:
    """The text cut where its kind changes."""
    lines = text.splitlines()
    words: list[str] = []

    def flushed() -> Iterator[Passage]:
        if body := "\n".join(words).strip("\n"):
            yield Passage("words", body)
        words.clear()

    at = 0
    while at < len(lines):
        line, below = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
        found = DIRECTIVE.match(line)
        if underlined(line, below):
            yield from flushed()
            yield Passage("heading", line.strip(), UNDERLINES.index(below[0]) + 1)
            at += 2
        elif found:
            yield from flushed()
            body, at = indented(lines, at + 1)
            yield directive(found[1], found[2], body)
        elif line.startswith(".. "):  # a comment or a target
            at += 1
        elif line.rstrip().endswith("::") and not below.strip():
            words.append(line.rstrip()[:-1])
            yield from flushed()
            body, at = indented(lines, at + 1)
            yield Passage("code", body)
        else:
            words.append(line)
            at += 1
    yield from flushed()


def underlined(line: str, below: str) -> bool:
    below = below.rstrip()
    return bool(line.strip()) and len(below) >= 3 and below[0] in UNDERLINES and set(below) == {below[0]}


def indented(lines: list[str], at: int) -> tuple[str, int]:
    """The block that stands further in, without its margin, and where it ends."""
    end = at
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
        end += 1
    return textwrap.dedent("\n".join(lines[at:end])).strip("\n"), end


def directive(name: str, argument: str, body: str) -> Passage:
    held = [line for line in body.splitlines() if not re.match(r"^:[\w-]+:", line)]  # without its options
    whole = "\n".join([argument, *held] if argument and name not in ("code-block", "code") else held).strip("\n")
    if name == "math":
        return Passage("math", whole.strip())
    if name in ("code-block", "code"):
        return Passage("code", whole, name=argument)
    return Passage("note", whole, name=name)


# --- Markdown ----------------------------------------------------------------------------------------------------


def markdown(text: str) -> str:
    return "\n\n".join(map(marked, parts(text)))


def marked(part: Passage) -> str:
    if part.kind == "heading":
        return f"{'#' * (part.level + 1)} {inline(part.body, markdown_of)}"
    if part.kind == "math":
        return f"$$\n{part.body}\n$$"
    if part.kind == "code":
        return f"```{part.name}\n{part.body}\n```"
    if part.kind == "note":
        return "\n".join(f"> {line}" for line in inline(part.body, markdown_of).splitlines())
    return inline(part.body, markdown_of)


def markdown_of(kind: str, words: str, target: str) -> str:
    if kind == "math":
        return f"${words}$"
    if kind == "link":
        return f"[{words}]({target})"
    mark = {"literal": "`", "strong": "**"}.get(kind, "*")
    return f"{mark}{words}{mark}"


# --- plain -------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """For a terminal: no marks, formulas in letters that a terminal has."""
    return "\n\n".join(map(flat, parts(text)))


def flat(part: Passage) -> str:
    if part.kind == "heading":
        return f"{part.body}\n{'=-~'[min(part.level, 3) - 1] * len(part.body)}"
    if part.kind in ("math", "code"):
        body = formula(part.body) if part.kind == "math" else part.body
        return textwrap.indent(body, "    ")
    body = inline(unwrapped(part.body), plain_of)
    return textwrap.indent(body, "  ") if part.kind == "note" else body


def unwrapped(text: str) -> str:
    """Paragraphs and items as one line each, so that a terminal of any width can wrap them."""
    lines: list[str] = []
    for line in text.splitlines():
        goes_on = bool(lines and lines[-1].strip() and line.strip()) and not re.match(ITEM, line)
        if goes_on:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line.rstrip())
    return "\n".join(lines)


def plain_of(kind: str, words: str, target: str) -> str:
    if kind == "math":
        return formula(words)
    return f"{words} ({target})" if kind == "link" else words


def formula(latex: str) -> str:
    """A formula that is read in a terminal: \\sqrt{\\bar\\alpha}\\,x_0 is √(ᾱ) x_0."""
    text = re.sub(r"\\\\|\\begin\{\w+\*?\}|\\end\{\w+\*?\}", "", latex).replace("&", "")
    text = re.sub(r"\\(bar|hat|tilde)\s*(?:\{(\\?[A-Za-z]+)\}|(\\[A-Za-z]+|[A-Za-z]))", accented, text)
    text = re.sub(r"\\(?:mathrm|text|operatorname|mathbf|mathcal)\s*\{([^{}]*)\}", r"\1", text)
    for _ in range(3):  # what is within goes first
        text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"√(\1)", text)
        text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: letter(found[1]), text)
    text = re.sub(r"\\[,;:! ]", " ", text)
    text = re.sub(r"\{([^{}]*)\}", lambda found: found[1] if len(found[1]) < 2 else f"({found[1]})", text)
    return re.sub(r"[ \t]+", " ", text).strip()


def accented(found: re.Match[str]) -> str:
    """The letter and, as a terminal draws it, the mark above it."""
    return (found[2] or found[3]) + ACCENTS[found[1]]


def letter(name: str) -> str:
    """`alpha` is α, `Delta` is Δ."""
    if name in SYMBOLS:
        return SYMBOLS[name]
    try:
        return unicodedata.lookup(f"GREEK {'CAPITAL' if name[0].isupper() else 'SMALL'} LETTER {name.upper()}")
    except KeyError:
        return name


# --- both --------------------------------------------------------------------------------------------------------


def inline(text: str, shown: Callable[[str, str, str], str]) -> str:
    """Literals, roles and links, each as `shown` writes it: (kind, words, target)."""

    def replaced(found: re.Match[str]) -> str:
        if found["literal"]:
            return shown("literal", found["literal"], "")
        if found["role"] == "math":
            return shown("math", " ".join(found["target"].split()), "")
        if found["role"]:
            return shown("name", named(found["role"], found["target"]), "")
        if found["link"]:
            return shown("link", " ".join(found["link"].split()), found["address"])
        for kind in ("strong", "emphasis"):
            if found[kind]:
                return shown(kind, inline(found[kind], shown), "")
        return shown("name", found["loose"], "")

    return INLINE.sub(replaced, text)


def named(role: str, target: str) -> str:
    """What a reader can look for: a title, a file of the docs, or the last name of a path."""
    if found := TITLED.match(target):
        return " ".join(found["title"].split())
    if role == "doc":
        path = target.strip("/")
        return f"docs/{path}.md" if path.split("/")[0] in ("handbook", "results", "decisions") else path.split("/")[-1]
    return target.rpartition(".")[2] if target.startswith("~") else target
