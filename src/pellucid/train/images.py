"""One image of a data set: bytes that may be damaged or made to harm → 8-bit RGB of the size that is trained."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from pellucid.core.errors import PellucidError, rule
from pellucid.pipeline.images import MAX_PIXELS, UNREADABLE, first_line, flatten, upright, words

Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"
Crop = Literal["centre", "random"]
# Only plain formats: Pillow knows others that start programs (EPS) or that no data set holds.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MAX_BYTES = 256 * 2**20  # of one image file
MAX_SIZE = 8192
LONGEST = 20  # times the shorter side: what is longer is a strip, not an image
REDUCING_GAP = 3.0  # box-reduce first, down to this many times the size: not to be told from Lanczos alone


@dataclass(frozen=True)
class Hint:
    """How an image beside the image is read: its channels, its range, and whether it lies on the image."""

    channels: Literal[1, 3] = 3
    low: Literal[-1, 0] = 0  # values are in [low, 1]
    aligned: bool = True  # cropped and mirrored with the image


PLAIN_HINT = Hint()  # any other name: an image that a ControlNet follows
HINTS: Mapping[str, Hint] = MappingProxyType(
    {
        "edges": Hint(channels=1),
        "depth": Hint(channels=1),
        "mask": Hint(channels=1),
        "reference": Hint(low=-1, aligned=False),  # an IP-Adapter's: seen whole, and not in the same place
    }
)


def hint_kind(name: str) -> Hint:
    return HINTS.get(name, PLAIN_HINT)


@dataclass(frozen=True)
class Framing:
    """The square that is trained: the shorter side becomes `size`, the longer one is cut to it at its centre or at a
    place that is drawn; `flip` mirrors every other image by chance."""

    size: int
    crop: Crop = "centre"
    flip: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= MAX_SIZE:
            raise PellucidError(rule("size", f"from 1 to {MAX_SIZE} pixels", self.size), "data-size")
        if self.crop not in ("centre", "random"):
            raise PellucidError(rule("crop", "centre or random", self.crop), "data-crop")


@dataclass(frozen=True)
class Place:
    """What was drawn for one place of a batch: where along its free way the square lies, and whether it is mirrored."""

    across: float = 0.5
    down: float = 0.5
    mirrored: bool = False


def decode(data: bytes, size: int) -> Image.Image:
    """Bytes of a file → RGB, upright, transparency on white; a JPEG only as large as a good image of `size` needs.

    No warning is caught here: `warnings.catch_warnings` would disturb the other threads that decode.
    """
    try:
        found = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PellucidError(f"it has more than {MAX_PIXELS} pixels", "image-pixels") from None
    except UNREADABLE:
        raise PellucidError("it is no image file" if data else "it is empty", "image-file") from None
    with found:
        if found.width * found.height > MAX_PIXELS:
            raise PellucidError(f"it has {words(found.size)} pixels, more than {MAX_PIXELS}", "image-pixels")
        if max(found.size) > LONGEST * min(found.size):
            raise PellucidError(f"it is a strip of {words(found.size)} pixels", "image-shape")
        if isinstance(found, JpegImageFile):
            found.draft(None, (2 * size, 2 * size))  # a JPEG decodes to 1/2, 1/4 or 1/8 of its size, and much faster
        try:
            found.load()
        except UNREADABLE as error:
            raise PellucidError(f"it is damaged: {reason(error)}", "image-file") from None
        return flatten(upright(found))


def cut(image: Image.Image, framing: Framing, place: Place) -> Array:
    """An RGB or grey image → (C, size, size) uint8: the square at its place, resized in one go, and mirrored."""
    side, size = min(image.size), (framing.size, framing.size)
    left, top = (
        int((free + 1) * drawn) if framing.crop == "random" else free // 2  # whole pixels: nothing is smeared
        for free, drawn in ((image.width - side, place.across), (image.height - side, place.down))
    )
    box = (left, top, left + side, top + side)
    square = image.resize(size, Image.Resampling.LANCZOS, box=box, reducing_gap=REDUCING_GAP)
    pixels = np.asarray(square).reshape(framing.size, framing.size, -1).transpose(2, 0, 1)  # (C, size, size)
    return np.ascontiguousarray(pixels[:, :, ::-1] if place.mirrored and framing.flip else pixels)


def cut_hint(name: str, hint: Image.Image, image: Image.Image, framing: Framing, place: Place) -> Array:
    """A hint → (1 or 3, size, size) uint8, cut as its image where it lies on it."""
    kind = hint_kind(name)
    if not kind.aligned:
        framing, place = Framing(framing.size), Place()
    elif not same_shape(hint, image):
        raise PellucidError(f"its {name} is {words(hint.size)}, and it is {words(image.size)}", "image-shape")
    return cut(hint.convert("L") if kind.channels == 1 else hint, framing, place)


def same_shape(a: Image.Image, b: Image.Image) -> bool:
    """Whether two images have the same sides, but for scale and a rounded pixel."""
    scale = a.width / b.width
    return abs(a.height - b.height * scale) <= max(1.0, scale)


def reason(error: Exception) -> str:
    """Why an image could not be read, in a few words."""
    return first_line(error).rstrip(".") or type(error).__name__
