"""`pellucid samplers`."""

from __future__ import annotations

import math

import pytest

from pellucid.core.samplers import REGISTRY

ALIASES = [
    ("DPM++ 2M Karras", "dpmpp_2m", "karras"),
    ("Euler a", "euler_a", None),
    ("DPMSolverMultistepScheduler", "dpm_multistep", None),
]


def test_the_table_is_the_registry(tell):
    text = tell("samplers").out
    assert all(f" {name} " in text for name in REGISTRY)
    assert "DPM++ 2M SDE" in text
    assert "Karras et al. 2022" in text


def test_json_is_the_registry(tell):
    found = {entry["name"]: entry for entry in tell("samplers", "--json").json}
    assert list(found) == list(REGISTRY)
    for name, entry in REGISTRY.items():
        facts = found[name]
        for field in ("title", "family", "order", "deterministic", "calls", "suits", "paper"):
            assert facts[field] == getattr(entry, field)
        assert list(facts["options"]) == list(entry.options())
    assert float(found["euler"]["options"]["s_tmax"]) == math.inf


@pytest.mark.parametrize(("name", "meant", "grid"), ALIASES)
def test_any_name_resolves(tell, name, meant, grid):
    found = tell("samplers", name, "--json").json
    assert (found["name"], found["grid"]) == (meant, grid)
    page = tell("samplers", name).words
    entry = REGISTRY[meant]
    assert f"({meant})" in page
    assert entry.paper in page
    assert all(alias in page for alias in entry.aliases)
    assert all(f"{option} = {value!r}" in page for option, value in entry.options().items())
    assert ("--grid karras" in page) == (grid is not None)


def test_markup_in_a_name_is_text(tell):
    assert "'[/]euler karras'" in tell("samplers", "[/]euler karras").out


def test_an_unknown_name(refuse):
    line = refuse("samplers", "eular")
    assert line.startswith("error[unknown-sampler]: sampler must be a known name; got 'eular'. Nearest: euler")
