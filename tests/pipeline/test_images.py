"""Pictures ↔ tensors: the same numbers as diffusers, and every odd file read right or refused in one line."""

from __future__ import annotations

import io
import re
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionInpaintPipeline
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pellucid.core.errors import PellucidError
from pellucid.pipeline import images

torch.set_num_threads(1)  # tiny tensors gain nothing from threads

PROCESSOR = VaeImageProcessor(vae_scale_factor=8)
MASK_PROCESSOR = VaeImageProcessor(
    vae_scale_factor=8, do_normalize=False, do_binarize=True, do_convert_grayscale=True
)  # as the inpaint pipelines make it


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width, channels) if channels > 1 else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def refusal(code: str, call: Any, *args: Any, **kwargs: Any) -> str:
    """The one line with which a call refuses its input."""
    with pytest.raises(PellucidError) as caught:
        call(*args, **kwargs)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- parity with diffusers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, (64, 48), (16, 24)])
def test_images_become_the_tensors_of_diffusers(size: tuple[int, int] | None) -> None:
    given = [noise(40, 32, seed=1), noise(40, 32, seed=2)]
    width, height = size or (40, 32)
    theirs = PROCESSOR.preprocess(given, height=height, width=width)
    assert torch.equal(images.to_tensor(given, size), theirs)


def test_float_arrays_and_tensors_become_the_tensors_of_diffusers() -> None:
    batch = np.random.default_rng(0).random((2, 16, 24, 3), dtype=np.float32)
    assert torch.equal(images.to_tensor(batch), PROCESSOR.preprocess(batch))
    tensor = torch.from_numpy(batch).permute(0, 3, 1, 2)
    assert torch.equal(images.to_tensor(tensor), PROCESSOR.preprocess(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3])
def test_tensors_become_the_pixels_of_diffusers(dtype: torch.dtype, channels: int) -> None:
    ties = (torch.arange(256) + 0.5) / 127.5 - 1.0  # halfway between two pixels, and one beyond the range
    values = torch.cat([ties, torch.randn(768, generator=torch.Generator().manual_seed(0))])
    tensor = values.reshape(1, 1, 32, 32).expand(2, channels, 32, 32).to(dtype)
    if channels == 1:  # diffusers passes PIL a parameter that PIL has removed: compare its arrays
        theirs = (PROCESSOR.postprocess(tensor, output_type="np")[..., 0] * 255).round().astype(np.uint8)
    else:
        theirs = np.stack([np.asarray(i) for i in PROCESSOR.postprocess(tensor, output_type="pil")])
    ours = images.to_images(tensor)
    assert [i.mode for i in ours] == [{1: "L", 3: "RGB"}[channels]] * 2
    assert np.array_equal(np.stack([np.asarray(i) for i in ours]), theirs)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [None, (64, 48)])
def test_masks_are_those_of_diffusers(mode: str, size: tuple[int, int] | None) -> None:
    mask = noise(40, 32, mode)
    width, height = size or (40, 32)
    theirs = MASK_PROCESSOR.preprocess(mask, height=height, width=width)
    ours = images.to_mask(mask, size)
    assert ours.shape == (1, 1, height, width)
    assert set(ours.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(ours, theirs)


def test_the_mask_of_the_latents_is_that_of_the_inpaint_pipeline() -> None:
    mask = images.to_mask(noise(64, 48, "L"))
    latents = torch.zeros(1, 4, 6, 8)  # already encoded: the pipeline asks no autoencoder
    pipeline: Any = SimpleNamespace(vae_scale_factor=8)
    theirs, _ = StableDiffusionInpaintPipeline.prepare_mask_latents(
        pipeline, mask, latents, 1, 48, 64, torch.float32, "cpu", None, False
    )
    assert torch.equal(images.mask_to_latents(mask, 8), theirs)


def test_a_grey_of_exactly_one_half_is_painted_anew() -> None:
    found = images.to_mask(np.array([[0.0, 0.49], [0.5, 1.0]]))
    assert found.tolist() == [[[[0.0, 0.0], [1.0, 1.0]]]]
    assert images.to_mask(Image.fromarray(np.array([[127, 128]], np.uint8))).flatten().tolist() == [0.0, 1.0]


# --- laws ------------------------------------------------------------------------------------------------------


@given(width=st.integers(1, 9), height=st.integers(1, 9), seed=st.integers(0, 99))
def test_pixels_survive_the_way_there_and_back(width: int, height: int, seed: int) -> None:
    image = noise(width, height, seed=seed)
    tensor = images.to_tensor(image)
    assert tensor.shape == (1, 3, height, width)
    assert float(tensor.min()) >= -1.0
    assert float(tensor.max()) <= 1.0
    assert np.array_equal(np.asarray(images.to_images(tensor)[0]), np.asarray(image))


def test_every_form_of_one_image_is_one_tensor(tmp_path: Path) -> None:
    image = noise(24, 16)
    image.save(tmp_path / "picture.png")
    pixels = np.asarray(image)
    wanted = images.to_tensor(image)
    forms = (
        tmp_path / "picture.png", str(tmp_path / "picture.png"), [image], pixels, pixels[None], [pixels],
        torch.from_numpy(pixels.copy()).permute(2, 0, 1), pixels.astype(np.float64) / 255.0,
        pixels.astype(np.uint16) * 257, (pixels / np.float32(255)).astype(">f4"), np.asfortranarray(pixels),
    )  # fmt: skip
    for form in forms:
        torch.testing.assert_close(images.to_tensor(form), wanted, rtol=0, atol=1e-6)  # a few roundings of float32


def test_arrays_are_resized_nearly_as_images_are() -> None:
    """Two antialiased filters of a smooth image agree to a few levels of 255."""
    y, x = np.mgrid[0:64, 0:64] / 63.0
    smooth = (np.stack([x, y, 0.5 + 0.5 * np.sin(4 * x)], -1) * 255).astype(np.uint8)
    one, two = images.to_tensor(Image.fromarray(smooth), (32, 24)), images.to_tensor(smooth, (32, 24))
    assert one.shape == two.shape == (1, 3, 24, 32)
    assert float((one - two).abs().max()) < 0.03


# --- odd images ----------------------------------------------------------------------------------------------


def test_transparency_lies_on_white_and_keeps_a_mask() -> None:
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 255, 255))
    assert np.asarray(images.flatten(clear))[0].tolist() == [[255, 255, 255], [0, 0, 255]]
    white = Image.new("RGBA", (1, 1), (255, 255, 255, 0))
    assert images.to_mask(white).item() == 0.0
    half = np.full((1, 1, 4), 0.5)
    assert images.to_tensor(half).flatten().tolist() == pytest.approx([0.5] * 3)  # 0.75 of white


def test_opaque_alpha_changes_nothing() -> None:
    image = noise(8, 8)
    opaque = image.convert("RGBA")
    assert torch.equal(images.to_tensor(opaque), images.to_tensor(image))
    assert torch.equal(images.to_mask(opaque), images.to_mask(image))


def test_palettes_are_looked_up_with_their_transparent_colour(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    assert np.asarray(images.flatten(image))[0].tolist() == [[10, 20, 30], [200, 100, 50]]
    image.save(tmp_path / "p.png", transparency=0)
    assert np.asarray(images.flatten(images.read(tmp_path / "p.png")))[0].tolist() == [[255] * 3, [200, 100, 50]]


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    deep = np.array([[0, 257, 32896, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    found = images.flatten(images.read(tmp_path / "deep.png"))
    assert np.asarray(found)[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "La", "CMYK", "YCbCr", "HSV", "RGBX", "RGBa", "I", "PA"])
def test_every_mode_becomes_three_channels(mode: str) -> None:
    assert images.to_tensor(Image.new(mode, (3, 2))).shape == (1, 3, 2, 3)


def test_a_mode_without_a_range_is_refused() -> None:
    assert "[0, 1]" in refusal("image-mode", images.to_tensor, Image.new("F", (2, 2)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_image(tmp_path: Path, orientation: int) -> None:
    """The stored pixels are such that the upright image has red at its upper left."""
    upright = Image.new("RGB", (32, 16))
    upright.paste((255, 0, 0), (0, 0, 8, 8))
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(back[orientation]) if orientation in back else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "turned.png", exif=exif)
    assert images.size_of(tmp_path / "turned.png") == (32, 16)
    assert np.array_equal(np.asarray(images.read(tmp_path / "turned.png")), np.asarray(upright))


# --- refusals --------------------------------------------------------------------------------------------------


def header(width: int, height: int) -> io.BytesIO:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return io.BytesIO(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [8193, 12_000, 30_000, 2**31 - 1])
def test_a_file_that_claims_too_many_pixels_is_not_decoded(side: int) -> None:
    assert str(images.MAX_PIXELS) in refusal("image-pixels", images.read, header(side, side))


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "words.png").write_text("no image")
    noise(64, 64).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:5000])
    refusal("image-file", images.to_tensor, tmp_path / "words.png")
    refusal("image-file", images.to_tensor, tmp_path / "cut.png")
    assert "a folder" in refusal("file", images.to_tensor, tmp_path)
    refusal("file", images.to_tensor, tmp_path / "none.png")


@pytest.mark.parametrize(
    ("image", "code"),
    [
        (None, "image-type"),
        (3, "image-type"),
        ([], "image-count"),
        (np.zeros((4, 4, 3), np.complex64), "image-type"),
        (np.array([["a"]]), "image-type"),
        (np.zeros((4, 4, 3), np.int64), "image-type"),
        (np.zeros((3, 8, 8)), "image-shape"),
        (np.zeros((0, 8, 3)), "image-shape"),
        (np.zeros(8), "image-shape"),
        (torch.zeros(2, 8, 8), "image-shape"),
        (torch.full((3, 8, 8), -0.5), "image-range"),
        (torch.full((3, 8, 8), 255.0), "image-range"),
        (torch.full((3, 8, 8), float("nan")), "image-range"),
        ([Image.new("RGB", (8, 8)), Image.new("RGB", (8, 16))], "size"),
    ],
)
def test_what_cannot_be_read_as_images_is_refused(image: Any, code: str) -> None:
    refusal(code, images.to_tensor, image)


@pytest.mark.parametrize("size", [(0, 8), (8,), (8.0, 8), (True, 8), "8x8", (8, -8), None])
def test_a_size_is_two_whole_numbers(size: Any) -> None:
    refusal("size", images.check_size, size)


@given(width=st.integers(1, 2000), height=st.integers(1, 2000), factor=st.sampled_from([8, 16, 64]))
def test_a_size_is_kept_or_its_refusal_names_good_ones_nearby(width: int, height: int, factor: int) -> None:
    if width % factor == 0 and height % factor == 0:
        assert images.check_size((width, height), factor) == (width, height)
        return
    message = refusal("size-multiple", images.check_size, (width, height), factor)
    near = re.findall(r"(\d+)×(\d+)", message.split("Nearest:")[1])
    assert near
    for a, b in near:
        assert images.check_size((int(a), int(b)), factor) == (int(a), int(b))
        assert abs(int(a) - width) < factor
        assert abs(int(b) - height) < factor


def test_the_sizes_below_and_above_are_offered_the_nearer_first() -> None:
    assert refusal("size-multiple", images.check_size, (33, 33), 8).endswith("Nearest: 32×32 or 40×40.")
    assert refusal("size-multiple", images.check_size, (39, 64), 8).endswith("Nearest: 40×64 or 32×64.")
    assert refusal("size-multiple", images.check_size, (3, 3), 8).endswith("Nearest: 8×8.")


def test_a_mask_of_another_size_is_refused_even_where_both_would_be_resized() -> None:
    image, mask = noise(32, 16), noise(16, 32, "L")
    message = refusal("mask-size", images.inpaint_pair, image, mask, (64, 64))
    assert "32×16" in message
    assert "16×32" in message
    tensor, found = images.inpaint_pair(image, noise(32, 16, "L"), (64, 32))
    assert tensor.shape == (1, 3, 32, 64)
    assert found.shape == (1, 1, 32, 64)
    refusal("mask-count", images.inpaint_pair, [image] * 3, [noise(32, 16, "L")] * 2)


def test_what_is_no_number_or_no_batch_makes_no_image() -> None:
    bad = torch.zeros(3, 3, 4, 4)
    bad[1, 0, 0, 0] = float("nan")
    assert "image 1." in refusal("nan", images.to_images, bad)
    refusal("image-shape", images.to_images, torch.zeros(1, 4, 8, 8))
    refusal("image-shape", images.to_images, torch.zeros(8, 8))
    refusal("image-shape", images.to_images, np.zeros((3, 8, 8)))
    bad[1, 0, 0, 0], bad[2, 0, 0, 0] = float("-inf"), float("inf")
    assert "infinity in image 1, 2." in refusal("nan", images.to_images, bad)


# --- digests ---------------------------------------------------------------------------------------------------


def test_a_digest_names_pixels_not_files(tmp_path: Path) -> None:
    image = noise(8, 8)
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "b.bmp")
    names = {images.digest(p) for p in (image, tmp_path / "a.png", tmp_path / "b.bmp", image.convert("RGBA"))}
    assert len(names) == 1
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", names.pop())
    assert images.digest(image.transpose(Image.Transpose.ROTATE_90)) != images.digest(image)
    assert images.digest(torch.zeros(3, 2, 4)) != images.digest(torch.zeros(3, 4, 2))


def test_a_digest_takes_lists_and_tensors_of_any_range() -> None:
    a, b = noise(8, 8, seed=1), noise(8, 8, seed=2)
    assert len({images.digest(p) for p in (a, b, [a, b], [b, a])}) == 4
    assert images.digest([a]) == images.digest(a)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert images.digest(latents) == images.digest(latents.clone())
    assert images.digest(latents) == images.digest(latents.numpy())
    assert images.digest(latents.bfloat16()) != images.digest(latents)
    refusal("image-type", images.digest, 3)
