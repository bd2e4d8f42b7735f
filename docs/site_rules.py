"""What the site does that Sphinx does not: formulas as MathML, and docstrings that are plain text."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from PIL import Image
from sphinx.application import Sphinx
from sphinx.util import logging

import pellucid

log = logging.getLogger(__name__)
MATHML = "http://www.w3.org/1998/Math/MathML"
ACCENTS = set("ˆˉ˜˙¨→^¯~")
WIDE = 1200  # pixels
ElementTree.register_namespace("", MATHML)


def formula(tex: str, node: nodes.Element, *, block: bool) -> str:
    """MathML: browsers draw it themselves, and no script comes from another machine."""
    known = re.sub(r"\\[bB]igg?[lrm]?(?![a-zA-Z])", "", tex).replace(
        r"\dots", r"\ldots"
    )  # delimiters grow by themselves
    try:
        return hats_on(tex2mathml(known, as_block=block))
    except MathError as error:
        log.warning("this formula cannot be drawn (%s): %s", error, tex, location=node)
        return f"<code>{nodes.unescape(tex)}</code>"


def hats_on(mathml: str) -> str:
    """docutils puts the index of \\hat{x}_0 below the x, as that of a sum: it goes beside, under no hat.

    No hat is an accent to the browser: with the fonts that most machines have, an accent is drawn into its letter.
    """
    known = re.sub(r"&(?!amp;|lt;|gt;|quot;)\w+;", lambda name: html.unescape(name.group()), mathml)  # &nbsp; is no XML
    tree = ElementTree.fromstring(known)
    for found in list(tree.iter(f"{{{MATHML}}}munderover")):
        base, index, accent = found
        if (accent.text or "") in ACCENTS:
            found.clear()
            found.tag = f"{{{MATHML}}}msub"
            over = ElementTree.SubElement(found, f"{{{MATHML}}}mover")
            over.extend([base, accent])
            found.append(index)
    for over in tree.iter(f"{{{MATHML}}}mover"):
        if (over[1].text or "") in ACCENTS:
            over.set("accent", "false")
    return ElementTree.tostring(tree, encoding="unicode")


def inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(formula(node.astext(), node, block=False))
    raise nodes.SkipNode


def display(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{formula(node.astext(), node, block=True)}</div>\n')
    raise nodes.SkipNode


def plain(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text: outside of backticks nothing is markup, and indented lines are shown as they are."""
    text = "\n".join(lines)
    told: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if all(line.startswith("  ") for line in paragraph.splitlines()):
            told += ["::", "", *("    " + line for line in paragraph.splitlines()), ""]
        else:
            told += [*escaped(paragraph).splitlines(), ""]
    lines[:] = told


def escaped(paragraph: str) -> str:
    """`code` stays code, a *word* is stressed; all else loses its power: stars, bars, `_` after words, indents."""
    pieces = re.split(r"(`[^`]+`|(?<![\w*])(?:\*\w+\*|\*\*\w+\*\*)(?![\w*]))", paragraph)
    for place, piece in enumerate(pieces):
        if piece.startswith("`"):
            pieces[place] = f"``{piece.strip('` ')}``".replace("\n", " ") + "\\ "
        elif not re.fullmatch(r"\*+\w+\*+", piece):
            pieces[place] = re.sub(r"([*|\\]|_(?=\W|$)|``?)", r"\\\1", piece)
    lines = [line.strip().removesuffix("\\") for line in "".join(pieces).splitlines()]
    return "\n".join(("| " if is_list(lines) else "") + line for line in lines)


def is_list(lines: list[str]) -> bool:
    return any(re.match(r"[-–•] |\d+\. ", line) for line in lines)


def parsable(
    app: Sphinx, what: str, name: str, thing: object, options: object, arguments: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """A dataclass's default that is made anew reads `<factory>`, which is no Python: `...` is, and is laid out well."""
    return (None if arguments is None else arguments.replace("<factory>", "...")), result


def told_elsewhere(app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object) -> bool | None:
    """Public names are on the page of the public API; the pages of the rooms list the rest.

    Fields of named tuples are in the signature, and say no more than their number.
    """
    told = what == "module" and getattr(pellucid, name, None) is thing
    return True if told or type(thing).__name__ == "_tuplegetter" else None


def large(app: Sphinx, doctree: nodes.document) -> None:
    """An image wider than the page leads to itself in full size: Sphinx links those that have a width."""
    for image in doctree.findall(nodes.image):
        path = Path(app.srcdir, image["uri"])
        if "width" not in image and path.is_file() and Image.open(path).width > WIDE:
            image["width"] = "100%"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    app.connect("autodoc-process-docstring", plain)
    app.connect("autodoc-process-signature", parsable)
    app.connect("autodoc-skip-member", told_elsewhere)
    app.connect("doctree-read", large)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
