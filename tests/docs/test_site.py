"""The site builds without a warning, its links lead somewhere, and the handbook keeps its form."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("sphinx_gallery", reason="the extra `docs` is not installed")

ROOT = Path(__file__).parents[2]
HANDBOOK = ROOT / "docs" / "handbook"
SECTIONS = (
    "overview",
    "objective",
    "forward_and_reverse",
    "backbone",
    "scheduler_and_sampler",
    "guidance",
    "vae",
    "text_conditioning",
    "pipeline_anatomy",
    "inference_loop",
    "memory_and_speed",
    "adapters",
    "serving",
)
PARTS = (
    "The problem",
    "The mechanism",
    "Side by side",
    "What is often misunderstood",
    "In an interview",
    "Labs and results",
)
MEASURED = set(SECTIONS)  # all of them show something that the engine made
MADE = ("_build", "labs", "made", "__pycache__")


def copied(folder: Path) -> Path:
    """The sources of the site, without what builds leave, beside links to the rest of the repository."""
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns(*MADE))
    for beside in ROOT.iterdir():
        if beside.name != "docs" and not beside.name.startswith("."):
            (folder / beside.name).symlink_to(beside)
    return folder / "docs"


def build(docs: Path, *options: str, smoke: bool = False, timeout: int) -> Path:
    """The pages, or a failed test with what Sphinx said."""
    out = docs / "_build" / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", *options, str(docs), str(out)]
    environment = {**os.environ, **({"PELLUCID_LAB_SMOKE": "1"} if smoke else {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


class Links(HTMLParser):
    """What a page points at, and what can be pointed at in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and name == "id":
                self.anchors.add(value)
            if value and (tag, name) in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")):
                self.targets.append(value)


def dead(site: Path) -> Iterator[str]:
    pages = {page: Links(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    for page, found in pages.items():
        for target in found.targets:
            parts = urlsplit(target)
            if parts.scheme:
                continue
            goal = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            name = f"{page.relative_to(site)} → {target}"
            if not goal.exists():
                yield name
            elif goal in pages and unquote(parts.fragment) not in pages[goal].anchors:
                yield f"{name}: no such anchor"


def test_the_site_builds_and_holds_together(tmp_path: Path) -> None:
    """One test, so that workers do not each build it."""
    docs = copied(tmp_path)
    site = build(docs, "-t", "quick", timeout=300)
    assert list(dead(site)) == []
    for page in site.rglob("*.html"):
        found = re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?://[^"]+"', page.read_text(encoding="utf-8"))
        assert found == [], f"{page.name} asks another machine for a script"
    written = {p.relative_to(docs).with_suffix("") for p in docs.rglob("*.md") if "made" not in p.parts}
    assert {str(name) for name in written if not (site / f"{name}.html").exists()} == set()
    formulas = (site / "handbook" / "objective.html").read_text(encoding="utf-8").count("<math")
    assert formulas > 10


def test_the_pages_of_the_handbook_are_those_of_its_index() -> None:
    index = (HANDBOOK / "index.md").read_text(encoding="utf-8")
    pages = {page.stem for page in HANDBOOK.glob("*.md")} - {"index"}
    assert pages == {*SECTIONS, "interview"}
    for page in pages:
        assert re.search(rf"^{page}$", index, re.M), f"{page} is not in the index"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_its_parts_in_order(section: str) -> None:
    text = (HANDBOOK / f"{section}.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.+)$", text, re.M)
    assert tuple(heads) == PARTS
    parts = dict(zip(heads, re.split(r"^## .+$", text, flags=re.M)[1:], strict=True))
    assert "$" in parts["The mechanism"], "no formula"
    assert "|---" in parts["Side by side"], "no table"
    assert parts["What is often misunderstood"].count("- **") >= 2
    assert parts["In an interview"].strip().startswith(">")
    assert f"made/labs_{section}.md" in parts["Labs and results"]


@pytest.mark.parametrize("section", sorted(MEASURED))
def test_a_section_shows_what_the_engine_made(section: str) -> None:
    text = (HANDBOOK / f"{section}.md").read_text(encoding="utf-8")
    assert re.search(r"^```\{(figure|include)\} made/(?!labs_)", text, re.M)


def test_interview_questions_have_answers() -> None:
    text = (HANDBOOK / "interview.md").read_text(encoding="utf-8")
    asked = re.split(r"^### .+\?$|^### .+\.$", text, flags=re.M)[1:]
    assert len(asked) >= 12
    assert all("\n> " in answer for answer in asked)


@pytest.mark.slow
def test_the_whole_site_builds_with_its_figures_and_labs(tmp_path: Path) -> None:
    out = build(copied(tmp_path), smoke=True, timeout=1200)
    assert list(dead(out)) == []
    made = list((tmp_path / "docs" / "handbook" / "made").glob("*.png"))
    assert len(made) >= 10
    assert min(image.stat().st_size for image in made) > 5_000
