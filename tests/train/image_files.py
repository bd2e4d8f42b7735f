"""Files of images for the tests of data: good ones, and every kind of damaged one."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from pellucid.train.draws import Draws


def painted(number: int, size: tuple[int, int] = (24, 24)) -> Image.Image:
    """An image like no other: smooth, so that a JPEG keeps it."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [np.sin(x / 5 + number * (c + 1)) + np.cos(y / 7 + number * 0.37 * (c + 1)) for c in range(3)]
    return Image.fromarray(((np.stack(waves, -1) + 2) * 63.75).astype(np.uint8))


def stored(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side: int = 60_000) -> bytes:
    """A PNG of a few hundred bytes that says it is `side` × `side` pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(200))) + chunk(b"IEND", b"")
    )


def damaged() -> dict[str, bytes]:
    """Files that no image can be read from, by name."""
    png, jpeg = stored(painted(1, (64, 64))), stored(painted(2, (256, 256)), "JPEG")
    middle = len(png) // 2
    return {
        "truncated.jpg": jpeg[: len(jpeg) * 3 // 4],
        "truncated.png": png[:middle],
        "flipped.png": png[:middle] + bytes([png[middle] ^ 0xFF]) + png[middle + 1 :],
        "empty.png": b"",
        "zeros.jpg": bytes(1000),
        "text.png": b"not an image at all\n",
        "bomb.png": bomb(),
        "large.png": bomb(9_000),  # below what Pillow warns of, beyond what we decode
        "strip.png": stored(painted(3, (900, 2))),
        "other.png": stored(painted(4), "PPM"),  # an image, of a format that is not taken
        "script.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }


def good_folder(folder: Path, count: int = 12) -> Path:
    """Pictures 000.png … of one size."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        painted(number).save(folder / f"{number:03d}.png")
    return folder


def plain(batch: int, step: int = 0, part: int = 0, parts: int = 1) -> Draws:
    return Draws(5, step, batch, part, parts)
