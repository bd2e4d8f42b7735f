"""One image: read safely, upright, on white; cut and resized to the square that is trained."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import bomb, damaged, painted, stored
from PIL import Image

from pellucid import PellucidError
from pellucid.train.image_source import CropPlace, Framing, cut, cut_hint, decode, hint_kind


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1)


@pytest.mark.parametrize("name", sorted(damaged()))
def test_damage_is_an_error_and_never_a_image(name: str) -> None:
    with pytest.raises(PellucidError):
        decode(damaged()[name], 32)


def test_a_bomb_is_refused_by_its_header_whatever_the_warnings() -> None:
    for action in ("ignore", "error"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            for side in (9_000, 11_000, 60_000):  # beyond ours, beyond Pillow's warning, beyond Pillow's error
                with pytest.raises(PellucidError) as error:
                    decode(bomb(side), 32)
                assert error.value.code == "image-pixels"


def test_a_image_of_its_size_is_itself() -> None:
    image = painted(4, (32, 32))
    assert np.array_equal(cut(decode(stored(image), 32), Framing(32), CropPlace()), pixels(image))


def test_orientation_and_transparency() -> None:
    image = painted(4, (32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: stored pixels go a quarter clockwise
    turned = decode(stored(image, exif=exif), 32)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), -1))
    clear = image.convert("RGBA")
    clear.putalpha(Image.fromarray(np.repeat(np.array([[0, 255]], np.uint8), 16, 1).repeat(32, 0)))
    seen = pixels(decode(stored(clear), 32))
    assert (seen[:, :, :16] == 255).all()
    assert np.array_equal(seen[:, :, 16:], pixels(image)[:, :, 16:])


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "LA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    seen = decode(stored(painted(1).convert("L" if mode == "LA" else "RGB").convert(mode), kind), 24)
    assert seen.mode == "RGB"
    assert seen.size == (24, 24)


@given(wide=st.booleans(), free=st.integers(1, 40), drawn=st.floats(0, 1, exclude_max=True))
def test_a_random_square_lies_inside_and_whole_pixels_are_kept(wide: bool, free: int, drawn: float) -> None:
    size = (16 + free, 16) if wide else (16, 16 + free)
    image = painted(free, size)
    seen = cut(image, Framing(16, "random"), CropPlace(drawn, drawn))
    start = int((free + 1) * drawn)
    whole = pixels(image)
    part = whole[:, :, start : start + 16] if wide else whole[:, start : start + 16]
    assert np.array_equal(seen, part)


def test_every_place_of_a_random_square_is_as_likely() -> None:
    drawn = (np.arange(1000) + 0.5) / 1000
    starts = [int((4 + 1) * u) for u in drawn]
    image = painted(0, (20, 16))
    seen = [cut(image, Framing(16, "random"), CropPlace(u, 0.0))[0, 0, 0] for u in drawn]
    first_row = pixels(image)[0, 0]
    assert [int(first_row[s]) for s in starts] == [int(s) for s in seen]
    assert np.bincount(starts).tolist() == [200] * 5


def test_the_centre_ignores_what_is_drawn_and_flip_must_be_asked_for() -> None:
    image = painted(0, (40, 16))
    centre = cut(image, Framing(16), CropPlace())
    assert np.array_equal(centre, pixels(image)[:, :, 12:28])
    assert np.array_equal(cut(image, Framing(16), CropPlace(0.9, 0.1, True)), centre)
    assert np.array_equal(cut(image, Framing(16, flip=True), CropPlace(0.9, 0.1, True)), centre[:, :, ::-1])
    assert np.array_equal(cut(image, Framing(16, flip=True), CropPlace(0.9, 0.1, False)), centre)


def test_a_large_jpeg_read_fast_is_the_image_read_in_full() -> None:
    """Decoded at 1/4 and resized, against decoded whole and resized: smooth images agree to a few levels."""
    image = painted(3, (1024, 1024)).resize((1024, 1024), box=(0, 0, 100, 100))
    data = stored(image, "JPEG", quality=95)
    assert decode(data, 64).size == (128, 128)
    fast = cut(decode(data, 64), Framing(64), CropPlace()).astype(int)
    slow = pixels(image.resize((64, 64), Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(fast - slow).max() <= 3  # JPEG's own error at this quality, and one rounding each


def test_a_hint_is_cut_with_its_image() -> None:
    image = painted(5, (48, 32))
    framing, place = Framing(16, "random", True), CropPlace(0.8, 0.3, True)
    whole = cut(image, framing, place)
    assert np.array_equal(cut_hint("conditioning_image", image, image, framing, place), whole)
    grey = cut_hint("edges", image, image, framing, place)
    assert grey.shape == (1, 16, 16)
    assert np.array_equal(grey, cut(image.convert("L"), framing, place))
    reference = cut_hint("reference", painted(6, (20, 90)), image, framing, place)
    assert np.array_equal(reference, cut(painted(6, (20, 90)), Framing(16), CropPlace()))
    assert not hint_kind("reference").aligned
    with pytest.raises(PellucidError, match="its edges is 32×48"):
        cut_hint("edges", painted(5, (32, 48)), image, framing, place)


@pytest.mark.parametrize("make", [lambda: Framing(0), lambda: Framing(10**6), lambda: Framing(8, "left")])
def test_bad_framing_is_one_line(make) -> None:
    with pytest.raises(PellucidError, match="must be"):
        make()
