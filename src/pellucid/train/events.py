"""TensorBoard's event files, written without TensorBoard: framed records of a few protobuf fields.

A record is its length (u64), a checksum of that, the bytes, a checksum of those. A checksum is CRC-32C, masked.
An event has wall_time (1, double), step (2, varint), file_version (3, string), session_log (7) or summary (5): values
with tag (1), simple_value (2, float) or image (4: height 1, width 2, colorspace 3, encoded 4).
"""

from __future__ import annotations

import io
import os
import struct
import time
from pathlib import Path

import numpy as np
from PIL import Image

from pellucid.interop.atomic_files import writing

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected


def crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = crc_table()


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: bytes | str | int | float, *, double: bool = False) -> bytes:
    """One protobuf field: bytes and text by length, whole numbers as varints, others as floats."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | (1 if double else 5)) + struct.pack("<d" if double else "<f", value)


class Events:
    """An event file of one process, appended to and flushed at each write. It goes on after step `first`: TensorBoard
    forgets what an earlier process wrote of later steps."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        self.file = self.path.open("ab")
        self.record(field(1, time.time(), double=True) + field(3, "brain.Event:2"))
        started = field(1, 1)  # SessionLog.status is START
        self.record(field(1, time.time(), double=True) + field(2, first + 1) + field(7, started))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.summary(step, b"".join(field(1, field(1, tag) + field(2, float(v))) for tag, v in values.items()))

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None:
        """(H, W, 3) uint8."""
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, "PNG")
        height, width, _ = pixels.shape
        image = field(1, height) + field(2, width) + field(3, 3) + field(4, encoded.getvalue())
        self.summary(step, field(1, field(1, tag) + field(4, image)))

    def summary(self, step: int, values: bytes) -> None:
        self.record(field(1, time.time(), double=True) + field(2, step) + field(5, values))

    def record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        check = struct.pack("<I", masked_crc(length)), struct.pack("<I", masked_crc(data))
        with writing(self.path):
            self.file.write(length + check[0] + data + check[1])
            self.file.flush()

    def close(self) -> None:
        with writing(self.path):
            self.file.close()
