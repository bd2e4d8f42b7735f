"""RST as Markdown and as plain words."""

from __future__ import annotations

import re

import pytest

from pellucid.labs import script
from pellucid.labs.catalog import LABS, Lab

TEXT = r"""
Title
=====

**Question.** What *is* ``a**b`` in :math:`x = \sqrt{\bar\alpha}\,x_0`,
over two lines? See :doc:`/handbook/vae`, :doc:`lab 04 <lab_04_guidance>` and :func:`~pellucid.load`.

.. math:: \frac{\alpha}{\sigma} = \sqrt{\mathrm{SNR}}

.. code-block:: text

    pellucid lab 03

- one, with
  a second line
- x * y * z

A `paper <https://arxiv.org/abs/2006.11239>`_.
"""


def test_plain_words_for_a_terminal() -> None:
    assert script.plain(TEXT) == (
        "Title\n=====\n\n"
        "Question. What is a**b in x = √(ᾱ) x_0, over two lines? See docs/handbook/vae.md, lab 04 and load.\n\n"
        "    (α)/(σ) = √(SNR)\n\n"
        "    pellucid lab 03\n\n"
        "- one, with a second line\n- x * y * z\n\n"
        "A paper (https://arxiv.org/abs/2006.11239)."
    ).replace("ᾱ", "α\u0304")


def test_markdown_for_the_studio() -> None:
    made = script.markdown(TEXT)
    assert made.startswith("## Title\n\n**Question.** What *is* `a**b` in $x = \\sqrt{\\bar\\alpha}\\,x_0$,")
    assert "$$\n\\frac{\\alpha}{\\sigma} = \\sqrt{\\mathrm{SNR}}\n$$" in made
    assert "```text\npellucid lab 03\n```" in made
    assert "[paper](https://arxiv.org/abs/2006.11239)" in made


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_nothing_of_rst_is_left_in_a_page(lab: Lab) -> None:
    for block in script.read(lab.page):
        plain = script.plain(block.text)
        assert not re.search(r":\w+:`|``|^\.\. ", plain, re.M), plain
        assert not re.search(r"\\[a-zA-Z]|\*\*\w", plain), plain
        assert not re.search(r":\w+:`|^\.\. ", script.markdown(block.text), re.M)
