"""The tab Labs: a page as Markdown, outcomes as cards, answers that are refused, and a run that is told as it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid.core.errors import PellucidError
from pellucid.labs import answers
from pellucid.labs.answers import Outcome
from pellucid.labs.catalog import Lab, find
from pellucid.labs.process import BlockResult
from pellucid.labs.script import Block
from pellucid.studio import labs_tab as tab
from pellucid.studio.visitors import Job

LAB = find("01")


def shown(**told: object) -> BlockResult:
    return BlockResult(
        **{"number": 1, "count": 2, "text": "", "code": "x", "printed": "", "figures": (), "seconds": 0, **told}
    )


def test_what_came_of_a_block_stands_below_it() -> None:
    blocks = [Block("Title\n=====", "x = 1", 1), Block("More.", "y = 2", 2)]
    made = tab.page_of(blocks, [shown(printed="one\n", figures=(b"png",))])
    assert made.split("\n\n") == [
        "## Title",
        "```python\nx = 1\n```",
        "```text\none\n```",
        "![figure 1 of block 1](data:image/png;base64,cG5n)",
        "More.",
        "```python\ny = 2\n```",
    ]
    assert "failed: NameError" in tab.page_of(blocks, [shown(error="NameError: y")])


def test_code_with_fences_stays_code() -> None:
    assert tab.fenced("```\nx\n```", "text").startswith("````text\n")


def test_outcomes_are_escaped_and_counted() -> None:
    found = [Outcome("one <b>", "wrong", "expected <i>", "said <u>"), Outcome("two", "passed")]
    made = tab.outcomes(found)
    for word in ("one &lt;b&gt;", "expected &lt;i&gt;", "said &lt;u&gt;", "outcome-wrong", "outcome-passed"):
        assert word in made
    assert tab.summary(found) == "1 of 2 checks passed"


def test_a_failed_run_says_where() -> None:
    assert "block 1 of 2 failed: NameError" in tab.ended([shown(error="NameError: y")])
    assert "done in" in tab.ended([shown()])


def test_a_run_s_temporary_files_are_in_the_session_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.py"
    page.write_text('"""\nTitle\n=====\n"""\n\n# %%\n# A.\nimport tempfile\nprint(tempfile.gettempdir())\n', "utf-8")
    monkeypatch.setattr(Lab, "page", page)
    *_, last = tab.ran(LAB, False, tmp_path, Job())
    assert Path(last.printed.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == [page]


def test_a_starter_is_checked_from_its_text(tmp_path: Path) -> None:
    found = tab.checked(LAB, LAB.starter.read_text("utf-8"), tmp_path, Job())
    assert {one.verdict for one in found} == {"not written yet"}


@pytest.mark.parametrize("answer", ["def f(:", "#" * (answers.MOST_BYTES + 1)])
def test_what_is_no_answer_is_refused(answer: str, tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="answer must be"):
        tab.checked(LAB, answer, tmp_path, Job())
    path = tmp_path / "sent.py"
    path.write_text(answer, "utf-8")
    with pytest.raises(PellucidError, match="answer must be"):
        tab.read_answer(str(path))
