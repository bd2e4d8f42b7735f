"""A page as blocks, without Sphinx."""

from __future__ import annotations

import pytest

from pellucid.labs import script
from pellucid.labs.catalog import LABS, Lab
from pellucid.labs.script import Block

PAGE = '''"""
Title
=====

Words.
"""

import os

# %%
# Heading
# -------
# More words.
x = 1  # a comment
# and another

# sphinx_gallery_thumbnail_number = 2
y = 2

# %% on the line itself

# %%
# Only words.
'''


def test_words_and_code_go_in_pairs() -> None:
    assert script.parse(PAGE) == [
        Block("Title\n=====\n\nWords.", "import os", 8),
        Block("Heading\n-------\nMore words.", "x = 1  # a comment\n# and another\n\ny = 2", 14),
        Block("on the line itself", "", 21),
        Block("Only words.", "", 24),
    ]


def test_a_script_without_words_is_one_block() -> None:
    assert script.parse("x = 1\n") == [Block("", "x = 1", 1)]
    assert script.parse("") == []


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_no_line_of_code_is_lost(lab: Lab) -> None:
    """The blocks one after the other are the program."""
    source = lab.page.read_text("utf-8")
    lines = source.splitlines()
    for block in script.parse(source):
        if block.code:
            assert lines[block.line - 1] == block.code.splitlines()[0]
            compile(block.code, lab.page.name, "exec")


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_sphinx_gallery_reads_the_same_blocks(lab: Lab) -> None:
    """The oracle, where it is installed."""
    parser = pytest.importorskip("sphinx_gallery.py_source_parser")
    _, found = parser.split_code_and_text_blocks(str(lab.page))
    theirs = [block.content.strip() for block in found if block.type == "code" and block.content.strip()]
    ours = [block.code.strip() for block in script.read(lab.page) if block.code]
    assert ours == theirs
