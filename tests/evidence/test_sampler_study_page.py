"""The page of reports: whole in one file, safe with any text, hover data for every point, images of bounded size."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pellucid.core.errors import PellucidError
from pellucid.evidence.report import page
from pellucid.evidence.report.charts import Axis, Chart, Mark, Scale, Series, log_ticks, number_text
from pellucid.evidence.report.page import Code, ImageCell, Images, Page, Table, Text

NASTY = "</script><b>&\"'"
VOID = {"meta", "img", "circle", "path", "br"}


class Tags(HTMLParser):
    """All elements with their attributes; every one that opens must close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            a for t, a in self.found if t == tag and all(a.get(k.replace("_", "-")) == v for k, v in wanted.items())
        ]


def line(name: str = "a", **changes: Any) -> Series:
    given = {"x": [1.0, 10.0, 100.0], "y": [3.0, 2.0, 1.0], "low": [2.5, 1.5, 0.5], "high": [3.5, 2.5, 1.5]}
    return Series(name, **given | {"href": ["c1", "", "c2"], "labels": ["one", "two", "three"]} | changes)


def chart(*series: Series, **changes: Any) -> Chart:
    return Chart("T", series or (line(),), Axis("calls", True), Axis("loss"), **changes)


def noise(seed: int, side: int = 16) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


def whole() -> Page:
    cells = [ImageCell("c1", [noise(1), noise(2)], "first"), ImageCell("c2", [noise(3)], NASTY)]
    parts = [Text("words", "Head"), Table("T", ("a", "b"), (("1", NASTY),)), chart(), chart(), Code("x = 1", "more")]
    return Page(f"Title {NASTY}", "lead").add(*parts).add(Images("P", cells, first=("c2",)))


def test_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    text = whole().write(tmp_path / "r.html").read_text("utf-8")
    tags = Tags(text)
    assert tags.open == []
    for _, attributes in tags.found:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#"))
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert text.count("<script>") == text.count("</script>") == 1


def test_any_text_is_only_text() -> None:
    text = whole().html()
    assert NASTY not in text
    assert text.count("&lt;/script&gt;&lt;b&gt;&amp;") >= 3


def test_every_point_tells_its_numbers_and_names_its_cell() -> None:
    points = [a for a in Tags(chart(line(labels=["one", NASTY, "three"])).html()).all("circle") if "data-tip" in a]
    assert [a["data-tip"] for a in points] == [
        "a\ncalls: 1\nloss: 3 (2.5 to 3.5)\none",
        f"a\ncalls: 10\nloss: 2 (1.5 to 2.5)\n{NASTY}",
        "a\ncalls: 100\nloss: 1 (0.5 to 1.5)\nthree",
    ]
    assert [a.get("data-cell") for a in points] == ["c1", None, "c2"]
    assert all(a["tabindex"] == "0" for a in points)  # with the keyboard too


def test_points_are_where_their_numbers_are() -> None:
    """A log axis: equal factors are equal distances; more is higher up."""
    points = [a for a in Tags(chart().html()).all("circle") if "data-tip" in a]
    xs, ys = ([float(a[k] or "nan") for a in points] for k in ("cx", "cy"))
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] < ys[1] < ys[2]
    ((_, _, width, height),) = ([float(v) for v in a["viewbox"].split()] for a in Tags(chart().html()).all("svg"))
    assert all(0 < x < width for x in xs)
    assert all(0 < y < height for y in ys)


def test_what_answers_the_pointer_lies_over_what_is_drawn() -> None:
    """On a linear and on a logarithmic axis; also where the legend has made the drawing higher."""
    many = chart(*(line(f"series {i}", y=[3.0 + i, 2.0, 1.0]) for i in range(9)))
    for given in (chart(), many):
        tags = Tags(given.html())
        drawn = [(float(a["x"] or "nan"), float(a["y"] or "nan")) for a in tags.all("use") if "x" in a and "y" in a]
        for a in tags.all("circle"):
            x, y = float(a["cx"] or "nan"), float(a["cy"] or "nan")
            assert min(math.hypot(x - u, y - v) for u, v in drawn) < 0.1


def test_a_page_is_the_same_at_every_run_and_draws_no_chart_twice(tmp_path: Path) -> None:
    assert whole().html() == whole().html()
    given = chart()
    given.png(tmp_path / "a.png")
    assert given.drawing is given.drawing
    assert chart().html() == given.html()


def test_a_click_on_a_name_hides_its_line() -> None:
    tags = Tags(chart(line("a"), line("b")).html())
    assert [a["data-entry"] for a in tags.all("g") if "data-entry" in a] == ["0", "1"]
    assert {a["data-series"] for a in tags.all("g") if "data-series" in a} == {"0", "1"}
    assert [a["data-series"] for a in tags.all("circle")] == ["0"] * 3 + ["1"] * 3


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    given = chart(line(y=[math.nan, 2.0, math.inf], low=[math.nan] * 3, high=[math.nan] * 3))
    assert len([a for a in Tags(given.html()).all("circle") if "data-tip" in a]) == 1
    assert "nan" not in given.html()
    given.png(tmp_path / "c.png")
    below = Chart("T", [line(y=[-1.0, 0.0, 5.0], low=None, high=None)], Axis("x"), Axis("y", True))
    assert len([a for a in Tags(below.html()).all("circle") if "data-tip" in a]) == 1
    empty = Chart("T", [Series("a", [], [])], Axis("x", True), Axis("y"))
    assert "<svg" in empty.html()
    empty.png(tmp_path / "e.png")


def test_an_interval_that_reaches_zero_ends_at_the_frame_of_a_log_axis() -> None:
    given = Chart("T", [line(low=[-1.0, 1.5, 0.5])], Axis("x"), Axis("y", True))
    assert "nan" not in given.html()


@pytest.mark.parametrize("name", ["y", "low", "high", "labels", "href"])
def test_a_series_needs_one_of_each(name: str) -> None:
    with pytest.raises(PellucidError, match=f"{name} of series a must be as many as x, 3; got 2"):
        line(**{name: ["a", "b"]})


def test_marks_are_drawn(tmp_path: Path) -> None:
    given = chart(marks=[Mark("knee", 10.0, 2.0), Mark("floor", y=1.0), Mark("now", x=10.0)])
    assert all(f">{name}</text>" in given.html() for name in ("knee", "floor", "now"))
    path = given.png(tmp_path / "c.png")
    with Image.open(path) as image:
        assert min(image.size) > 400


@pytest.mark.parametrize("low_high", [(5, 100), (0.0021, 0.16), (0.9, 1.1), (1e-9, 1e9), (3.0, 3.0001)])
def test_ticks_are_few_round_and_inside(low_high: tuple[float, float]) -> None:
    for log in (True, False):
        scale = Scale.over(Axis("x", log), low_high)
        found = scale.ticks()
        assert 2 <= len(found) <= 9
        assert all(scale.low <= v <= scale.high for v in found)
        assert found == sorted(found)
    assert log_ticks(1, 1000, 7) == [1, 3, 10, 30, 100, 300, 1000]


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "0"), (12345.678, "12346"), (0.012345, "0.01235"), (-2.5, "−2.5"), (1e-9, "1.00e−9")]
)
def test_numbers_for_people(value: float, words: str) -> None:
    assert number_text(value) == words


def test_charts_stand_together() -> None:
    text = whole().html()
    assert text.count('<div class="charts">') == 1
    assert Tags(text).all("figure", **{"class": "chart"}).__len__() == 2


def test_images_by_cell_and_which_are_shown_first() -> None:
    tags = Tags(whole().html())
    assert [a["data-cell"] for a in tags.all("figure") if "data-cell" in a] == ["c1", "c2"]
    (block,) = tags.all("div", **{"class": "pictures"})
    assert block["data-first"] == "c2"
    assert len(tags.all("img")) == 2


def test_small_images_keep_their_pixels_and_large_ones_shrink() -> None:
    small = page.thumb(noise(1, 16), 128)
    assert small.size == (128, 128)
    assert np.asarray(small)[::8, ::8].tolist() == np.asarray(noise(1, 16)).tolist()
    assert page.thumb(noise(1, 300), 128).size == (128, 128)
    assert page.sheet([noise(i) for i in range(40)], 16, 4).size == (4 * 18 - 2, 4 * 18 - 2)  # sixteen at most


def test_many_images_keep_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [ImageCell(str(i), [noise(i, 128)] * 8) for i in range(12)]
    given = Images("P", cells)
    full = len(given.html())
    monkeypatch.setattr(page, "BUDGET", full // 4)
    assert len(given.html()) < full / 3
    with pytest.raises(PellucidError, match="cells of images must be of different keys"):
        Images("P", [cells[0], cells[0]])
