"""The catalogue of the labs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid.core.errors import PellucidError
from pellucid.labs.catalog import LABS, Lab, find

DOCS = Path(__file__).parents[2] / "docs"


def test_numbers_run_from_one_and_names_are_unlike() -> None:
    assert [lab.number for lab in LABS] == list(range(1, 16))
    assert len({lab.slug for lab in LABS}) == len({lab.title for lab in LABS}) == len(LABS)


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_every_file_of_a_lab_is_there(lab: Lab) -> None:
    assert lab.page.is_file()
    assert lab.starter.is_file()
    assert lab.check.is_file()
    assert (DOCS / "handbook" / f"{lab.section}.md").is_file()
    assert lab.question.endswith("?")


@pytest.mark.parametrize(
    "name", ["3", "03", "reading_a_scheduler", "Reading-a-scheduler", "lab_03_reading_a_scheduler"]
)
def test_a_lab_is_found_by_number_and_name(name: str) -> None:
    assert find(name).number == 3


@pytest.mark.parametrize("name", ["", "0", "16", "three", "contrlnet"])
def test_what_is_no_lab_is_refused_with_the_nearest_name(name: str) -> None:
    with pytest.raises(PellucidError, match="lab must be a number from 1 to 15 or the name of a lab") as found:
        find(name)
    assert found.value.code == "lab-name"
    assert "Nearest: " in str(found.value)
    if name == "contrlnet":
        assert "controlnet" in str(found.value)
