"""Every Python snippet of the README and of the docs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
        found += [(f"{page.relative_to(ROOT)}:{i}", code) for i, code in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("place", "code"), snippets(), ids=lambda value: value if ".md" in value[:60] else "")
def test_snippet_runs(place: str, code: str) -> None:
    exec(compile(code, place, "exec"), {"__name__": "snippet"})


def test_there_are_snippets() -> None:
    assert len(snippets()) >= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
