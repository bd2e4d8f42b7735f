"""`pellucid lab`: the list, a run, a starter, a check, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from pellucid.labs import catalog
from pellucid.labs.catalog import LABS, Lab, find

RIGHT = Path(__file__).parents[1] / "labs" / "answers" / f"{find('01').stem}.py"
PAGE = '''r"""
Lab 01: Small
=============

**Question.** What is :math:`\\sqrt{\\bar\\alpha}`?
"""

# %%
# Heading
# -------
# Words, and ``code``.
import matplotlib.pyplot as plt

print("[one]")
figure = plt.figure()
'''


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lab 01 that takes no time, and a folder for its figures."""
    path = tmp_path / "small.py"
    path.write_text(PAGE, "utf-8")
    monkeypatch.setattr(Lab, "page", property(lambda lab: path))
    return path


def test_all_labs_are_listed(tell):
    text = tell("lab").words
    assert all(f"{lab.code} {lab.title} {lab.question}" in text for lab in LABS)
    found = tell("lab", "--json").json
    assert [one["slug"] for one in found] == [lab.slug for lab in LABS]
    assert set(found[0]) == {"number", "slug", "title", "question", "section"}


def test_a_lab_is_shown_as_it_runs(tell, small, tmp_path):
    out = tell("lab", "1", "--smoke").out
    assert "Question. What is √(α\u0304)?" in out
    assert "Words, and code." in out
    assert "│ figure = plt.figure()" in out
    assert "[one]" in out
    figure = Path("out/labs/01/02.png")
    assert f"figure: {figure}" in out
    with Image.open(tmp_path / figure) as image:
        assert image.format == "PNG"


def test_a_run_as_json(tell, small, tmp_path):
    found = tell("lab", "01", "--json", "--out", "figures").json
    assert found["slug"] == "forward_noise"
    assert [block["printed"] for block in found["blocks"]] == ["", "[one]\n"]
    assert found["blocks"][1]["figures"] == ["figures/02.png"]
    assert (tmp_path / "figures" / "02.png").is_file()


def test_a_lab_that_fails_ends_with_1(ask, small):
    small.write_text(PAGE + "\n# %%\n# More.\n1 / 0\n", "utf-8")
    answer = ask("lab", "1")
    assert answer.code == 1
    assert "block 3 of 3 failed: ZeroDivisionError: division by zero (small.py, line 19)" in answer.out


def test_a_starter_is_written_once(tell, refuse, tmp_path):
    assert "pellucid lab 01 --check mine.py" in tell("lab", "1", "--starter", "mine.py").out
    assert (tmp_path / "mine.py").read_text("utf-8") == find("01").starter.read_text("utf-8")
    (tmp_path / "mine.py").write_text("my work", "utf-8")
    assert "--starter must be a file that does not exist yet" in refuse("lab", "1", "--starter", "mine.py")
    assert (tmp_path / "mine.py").read_text("utf-8") == "my work"


@pytest.mark.parametrize("text", ["", "\n  \n", "# to do\n", '"""My answer."""\n'])
def test_an_answer_without_code_is_one_line(refuse, tmp_path, text):
    (tmp_path / "mine.py").write_text(text, "utf-8")
    line = refuse("lab", "1", "--check", "mine.py")
    assert line.startswith("error[answer-empty]: answer must have code; mine.py has none. Write one: pellucid lab ")


def test_an_answer_is_checked(ask, tell, tmp_path):
    assert "4 of 4 checks passed" in tell("lab", "forward_noise", "--check", str(RIGHT)).out
    wrong = tmp_path / "wrong.py"
    wrong.write_text(RIGHT.read_text("utf-8").replace("(1 - betas).cumprod(0)", "1 - betas"), "utf-8")
    answer = ask("lab", "1", "--check", "wrong.py")
    assert answer.code == 1
    assert "take the product of all up to it" in answer.out
    assert "3 of 4 checks passed" in answer.out
    told = ask("lab", "1", "--check", "wrong.py", "--json")
    assert told.code == 1
    assert told.json["passed"] is False
    assert [one["verdict"] for one in told.json["checks"]] == ["wrong", "passed", "passed", "passed"]


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["99"], "error[lab-name]: lab must be a number from 1 to 15 or the name of a lab; got '99'"),
        (["--smoke"], "error[usage]: --smoke must come with a LAB"),
        (["--check", "a.py"], "error[usage]: --check must come with a LAB"),
        (["1", "--check", "a.py", "--starter", "b.py"], "error[usage]: what to do must be one of"),
        (["1", "--check", "a.py", "--smoke"], "error[usage]: --smoke must be left out with --check"),
        (["1", "--starter", "a.py", "--json"], "error[usage]: --json must be left out with --starter"),
        (["1", "--check", "missing.py"], "error[answer-file]: answer must be a file that exists"),
        (["1", "--starter", "a.txt"], "error[file-type]: --starter must be a file that ends in .py"),
        (["1", "--starter", "missing/a.py"], "error[file]: --starter must be in a folder that exists"),
    ],
)
def test_bad_input(refuse, args, start):
    assert refuse("lab", *args).startswith(start)


def test_figures_do_not_go_into_a_file(refuse, small, tmp_path):
    (tmp_path / "taken").write_text("x", "utf-8")
    assert refuse("lab", "1", "--out", "taken").startswith("error[file]: --out must be a folder")


def test_open_starts_the_studio_at_this_lab(tell, monkeypatch):
    from pellucid.cli import studio

    asked = {}

    class Page:
        @staticmethod
        def serve(models, **options):
            asked.update(options, models=models)

    monkeypatch.setattr(studio, "page", lambda: Page)
    tell("lab", "11", "--open")
    assert asked == {"models": [], "port": 0, "open_browser": True, "lab": catalog.find("11")}


def test_the_list_needs_nothing_heavy(burden):
    assert burden("lab")[1] == "[]\n"
