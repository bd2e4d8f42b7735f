"""What leaves the command line: numbers for people, JSON for machines, and files that are whole or absent."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.cli import output
from pellucid.core import wording
from pellucid.core.errors import PellucidError


@given(st.floats())
def test_every_number_becomes_valid_json(value):
    text = json.dumps(output.plain({"a": [value, np.array([value])]}), allow_nan=False)
    back = json.loads(text)["a"][0]
    assert float(back) == value or math.isnan(value)


@given(st.floats(min_value=1e-300, max_value=1e300), st.sampled_from([1, -1]))
def test_short_numbers_keep_four_digits(size, sign):
    text = wording.short(sign * size).replace("−", "-")
    assert math.isclose(float(text), sign * size, rel_tol=5.01e-4)
    assert wording.short(sign * math.inf) == ("∞" if sign > 0 else "−∞")


def test_rounding_of_time_zero_is_zero():
    assert wording.time_text(1.3e-15) == "0"
    assert wording.time_text(-0.5) == "−0.5"


@pytest.mark.parametrize("name", ["picture.bmp", "picture", "missing/picture.png", "folder.png"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, name):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(PellucidError, match="must be"):
        output.plot_destination(tmp_path / name)


def test_matplotlib_is_an_extra(refuse, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    line = refuse("schedules", "linear", "--plot", "a.png")
    assert line.startswith("error[missing-extra]: matplotlib must be installed to draw")
    assert "pip install 'pellucid[plot]'" in line


def test_long_work_says_in_a_log_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    clock = iter([0.0, 10.0, 31.0, 45.0, 62.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress("tuning", 1000) as done:
        for count in (1, 399, 1, 599):
            done(count)
    assert capsys.readouterr().err == "tuning: 400 of 1,000 after 31 s\ntuning: 1,000 of 1,000 after 62 s\n"
