"""X/Y sheets: requests read strictly, and images in which every cell and every label is where it belongs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from pellucid.core.errors import PellucidError
from pellucid.pipeline import sheet
from pellucid.pipeline.sheet import Axis, cells, draw_sheet, parse_axes

ALLOWED = {"steps": int, "seed": int, "guidance": float, "prompt": str, "sampler": str, "negative_prompt": str}


def refusal(code: str, call: Any, *args: Any) -> str:
    with pytest.raises(PellucidError) as caught:
        call(*args)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("steps=10,20,50 x guidance=3,5,7", {"steps": (10, 20, 50), "guidance": (3.0, 5.0, 7.0)}),
        ("  steps = 10 , 20   X   guidance=3.5  ", {"steps": (10, 20), "guidance": (3.5,)}),
        ("steps=10×seed=1,2", {"steps": (10,), "seed": (1, 2)}),
        ("steps=10..50/10", {"steps": (10, 20, 30, 40, 50)}),
        ("seed=1..4", {"seed": (1, 2, 3, 4)}),
        ("seed=4..1,7", {"seed": (4, 3, 2, 1, 7)}),
        ("steps=10..45/10", {"steps": (10, 20, 30, 40)}),
        ("guidance=0.1..0.5/0.1", {"guidance": (0.1, 0.2, 0.3, 0.4, 0.5)}),
        ("guidance=-1..1", {"guidance": (-1.0, 0.0, 1.0)}),
        ("guidance=1e-3,7", {"guidance": (0.001, 7.0)}),
        ("seed=18446744073709551615", {"seed": (2**64 - 1,)}),
        ("sampler=euler, dpmpp_2m", {"sampler": ("euler", "dpmpp_2m")}),
        ('prompt="a, b","c" x seed=1', {"prompt": ("a, b", "c"), "seed": (1,)}),
        ("prompt='say \"x\"', a cat x a dog", {"prompt": ('say "x"', "a cat x a dog")}),
        (r'prompt="a \"b\" \\",""', {"prompt": ('a "b" \\', "")}),
        ('prompt="a x steps=3" x steps=1..2', {"prompt": ("a x steps=3",), "steps": (1, 2)}),
        ("prompt=1..4", {"prompt": ("1..4",)}),
        ("prompt=1+1=2,b", {"prompt": ("1+1=2", "b")}),
        ("negative-prompt=a,b", {"negative_prompt": ("a", "b")}),
    ],
)
def test_a_request_becomes_axes(text: str, wanted: dict[str, tuple[Any, ...]]) -> None:
    found = parse_axes(text, ALLOWED)
    assert {axis.name: axis.values for axis in found} == wanted
    assert [axis.name for axis in found] == list(wanted)
    for axis in found:
        assert {type(value) for value in axis.values} == {ALLOWED[axis.name]}


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("", "grid-of", "Example"),
        ("steps", "grid-of", "Example"),
        ("=3", "grid-of", "Example"),
        ("steps=", "grid-of", "steps"),
        ("steps=10,,20", "grid-of", "steps"),
        ("steps=10,", "grid-of", "steps"),
        ('prompt="a" "b"', "grid-of", "commas"),
        ('prompt="a', "grid-quote", "closed"),
        ("stesp=10", "grid-axis", "steps"),
        ("steps=10 x guidence=3", "grid-axis", "guidance"),
        ("steps=ten", "grid-value", "whole numbers"),
        ("steps=10.5", "grid-value", "whole numbers"),
        ("steps=1.5..4", "grid-value", "whole"),
        ("guidance=nan", "grid-value", "numbers"),
        ("guidance=inf", "grid-value", "numbers"),
        ("guidance=1e999", "grid-value", "numbers"),
        ("steps=10,20,10", "grid-value", "10 twice"),
        ("steps=1..4/0", "grid-range", "1..4/0"),
        ("seed=1..1000000000000", "grid-range", "100"),
        ("guidance=1.2.3..4", "grid-range", "1.2.3..4"),
        ("steps=1..50 x seed=1..3", "grid-cells", "150"),
        ("steps=1 x steps=2", "grid-axes", "steps twice"),
        ("steps=1 x seed=1 x guidance=1", "grid-axes", "each value of guidance"),
        ("steps=" + "9" * 30_000, "grid-of", "characters"),
    ],
)
def test_a_request_that_makes_no_sheet_is_refused(text: str, code: str, word: str) -> None:
    assert word in refusal(code, parse_axes, text, ALLOWED)


@given(st.text("xX=,.\"'\\ 0123456789steps prompt-×\n", max_size=60))
def test_any_request_is_read_or_refused(text: str) -> None:
    try:
        axes = parse_axes(text, ALLOWED)
    except PellucidError:
        return
    assert 1 <= len(cells(axes)) <= sheet.MAX_CELLS


@given(st.lists(st.text(max_size=12), min_size=1, max_size=5, unique=True))
def test_quoted_values_may_hold_anything(values: list[str]) -> None:
    quoted = ",".join('"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values)
    found = parse_axes(f"prompt={quoted} x seed=1..2", ALLOWED)
    assert found == (Axis("prompt", tuple(values)), Axis("seed", (1, 2)))


def test_cells_run_along_the_first_axis() -> None:
    axes = parse_axes("steps=10,20 x guidance=3,5,7", ALLOWED)
    found = cells(axes)
    assert len(found) == 6
    assert found[:3] == [
        {"guidance": 3.0, "steps": 10},
        {"guidance": 3.0, "steps": 20},
        {"guidance": 5.0, "steps": 10},
    ]
    assert cells(axes[:1]) == [{"steps": 10}, {"steps": 20}]


@pytest.mark.parametrize(
    ("value", "shown"), [(7.0, "7"), (0.1 + 0.2, "0.30000000000000004"), (12, "12"), ("", "(none)"), ("a\n b", "a b")]
)
def test_labels_are_what_people_write(value: Any, shown: str) -> None:
    assert Axis("a", (value,)).labels() == [shown]


# --- images --------------------------------------------------------------------------------------------------


def colours(count: int) -> list[tuple[int, int, int]]:
    """Colours that no letter on white has."""
    return [(250, 40 + i * 2, 3 + i) for i in range(count)]


def place(image: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """The box of all pixels of a colour, which must fill it."""
    match = np.all(np.asarray(image) == colour, axis=-1)
    ys, xs = np.nonzero(match)
    assert len(ys), f"{colour} is nowhere"
    box = int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1
    assert match[box[1] : box[3], box[0] : box[2]].all()
    return box


TWO, ONE, SINGLE = "steps=10,20,50 x guidance=3,5", "seed=1..3", "seed=1"
SMALL = [(size, text) for size in ((32, 32), (20, 50), (128, 128), (300, 180)) for text in (TWO, ONE, SINGLE)]


@pytest.mark.parametrize(("size", "text"), [*SMALL, ((1024, 1024), "seed=1,2")])
def test_every_image_is_whole_in_its_cell(size: tuple[int, int], text: str) -> None:
    axes = parse_axes(text, ALLOWED)
    inks = colours(len(cells(axes)))
    found = draw_sheet([Image.new("RGB", size, ink) for ink in inks], axes, "Title", "footer · shared settings")
    boxes = [place(found, ink) for ink in inks]
    times = math.ceil(sheet.MIN_CELL / max(size))
    columns = len(axes[0].values)
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert (right - left, bottom - top) == (size[0] * times, size[1] * times)
        assert left == boxes[i % columns][0]
        assert top == boxes[i - i % columns][1]
        assert i % columns == 0 or left > boxes[i - 1][2]
        assert i < columns or top > boxes[i - columns][3]
    assert max(right for _, _, right, _ in boxes) < found.width
    assert max(bottom for _, _, _, bottom in boxes) < found.height
    edge = np.concatenate([np.asarray(found)[k] for k in (0, -1)] + [np.asarray(found)[:, k] for k in (0, -1)])
    assert (edge == 255).all()  # nothing touches the edge of the paper


def test_tiny_images_are_enlarged_pixel_by_pixel() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 200, (32, 32, 3), dtype=np.uint8))
    image.putpixel((0, 0), (250, 40, 3))
    found = draw_sheet([image], [Axis("seed", (1,))])
    left, top, right, bottom = place(found, (250, 40, 3))
    assert (right - left, bottom - top) == (4, 4)
    cell = np.asarray(found.crop((left, top, left + 128, top + 128)))
    assert np.array_equal(cell[::4, ::4], np.asarray(image))


def test_images_of_several_sizes_lie_in_the_middle_of_equal_cells() -> None:
    small, large = colours(2)
    images = [Image.new("RGB", (128, 64), small), Image.new("RGB", (256, 256), large)]
    found = draw_sheet(images, [Axis("size", ("a", "b"))])
    a, b = place(found, small), place(found, large)
    assert (a[2] - a[0], a[3] - a[1]) == (128, 64)
    assert a[1] + a[3] == b[1] + b[3]


def test_huge_sheets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole sheet, margins and words included, stays below the size at which Pillow warns of a bomb."""
    bound = 2**20
    monkeypatch.setattr(sheet, "SHEET_PIXELS", bound)
    found = draw_sheet([Image.new("RGB", (1024, 1024), ink) for ink in colours(2)], [Axis("seed", (1, 2))])
    boxes = [place(found, ink) for ink in colours(2)]
    shown = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
    assert 0.99 * bound < shown <= bound
    assert found.width * found.height < bound * Image.MAX_IMAGE_PIXELS / (48 * 2**20)


def test_labels_stand_over_their_columns_and_beside_their_rows() -> None:
    """A label that changes changes pixels over its own column, or left of its own row, and nowhere else."""
    images = [Image.new("RGB", (128, 128), ink) for ink in colours(4)]

    def drawn(columns: tuple[str, str], rows: tuple[str, str]) -> np.ndarray[Any, Any]:
        return np.asarray(draw_sheet(images, [Axis("sampler", columns), Axis("prompt", rows)], "T", "F")).astype(int)

    before = drawn(("aa", "bb"), ("cc", "dd"))
    sheet_before = Image.fromarray(before.astype(np.uint8))
    second, third = place(sheet_before, colours(4)[1]), place(sheet_before, colours(4)[2])
    for changed, box in (
        (drawn(("aa", "ee"), ("cc", "dd")), (second[0], 0, second[2], second[1])),
        (drawn(("aa", "bb"), ("cc", "od")), (0, third[1], third[0], third[3])),
    ):
        assert changed.shape == before.shape
        ys, xs = np.nonzero(np.abs(changed - before).sum(-1))
        assert len(ys) > 10
        assert box[0] <= xs.min()
        assert xs.max() < box[2]
        assert box[1] <= ys.min()
        assert ys.max() < box[3]


def test_title_footer_and_names_leave_their_ink() -> None:
    images, axes = [Image.new("RGB", (128, 128), colours(1)[0])], [Axis("seed", (1,))]
    bare = draw_sheet(images, axes)
    full = draw_sheet(images, axes, "A title", "steps 20 · guidance 7")
    assert full.height > bare.height
    top, bottom = place(full, colours(1)[0])[1::2]
    pixels = np.asarray(full.convert("L"))
    assert (pixels[:top] < 128).any()
    assert (pixels[bottom:] < 160).any()


def test_a_sheet_wants_a_image_a_cell() -> None:
    refusal("grid-cells", draw_sheet, [Image.new("RGB", (8, 8))] * 3, [Axis("a", (1, 2))])
    refusal("grid-axes", draw_sheet, [], [])
    refusal("grid-axes", draw_sheet, [], [Axis("a", ())])


# --- letters ---------------------------------------------------------------------------------------------------


@given(text=st.text(max_size=200), width=st.integers(20, 300), most=st.integers(1, 5))
def test_lines_fit_and_lose_no_word_without_an_ellipsis(text: str, width: int, most: int) -> None:
    font = ImageFont.load_default(14)
    lines = sheet.wrap(text, font, width, most)
    words = sheet.clean(text)
    assert len(lines) <= most
    assert all(font.getlength(line) <= width for line in lines)
    joined = "".join(lines).replace(" ", "")
    if joined != words.replace(" ", ""):
        assert joined.endswith("…")
        assert words.replace(" ", "").startswith(joined[:-1])


def test_words_are_kept_whole_where_they_fit() -> None:
    font = ImageFont.load_default(14)
    lines = sheet.wrap("a small red star above a large blue square", font, 110, 9)
    assert " ".join(lines) == "a small red star above a large blue square"
    assert len(lines) > 2


def test_the_longest_prompts_are_drawn_at_once() -> None:
    long = "wörd, " * 5000
    found = draw_sheet([Image.new("RGB", (64, 64))] * 2, [Axis("prompt", (long, "b"))], long, long)
    assert found.height < 1000


def test_plain_latin_uses_the_face_that_every_machine_has() -> None:
    assert sheet.face_for("steps 10, guidance=7.5") is sheet.faces()[0]
    if len(sheet.faces()) > 1:  # elsewhere there is none to borrow
        assert sheet.face_for("Käse") is not sheet.faces()[0]


def test_a_block_is_as_high_as_its_lines() -> None:
    block = sheet.Block(["ab", "cd"], ImageFont.load_default(20), "#000000")
    paper = Image.new("L", (block.width, block.height), 255)
    block.draw(ImageDraw.Draw(paper), 0, 0)
    rows = np.nonzero((np.asarray(paper) < 128).any(axis=1))[0]
    assert rows.min() >= 0
    assert rows.max() > block.pitch
    assert block.height == 2 * block.pitch
    turned = sheet.upward(block, "#ffffff")
    assert turned.size == (block.height, block.width + 2)
