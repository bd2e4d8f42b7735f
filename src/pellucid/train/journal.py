"""What a run writes while it runs: one JSON line per window, TensorBoard events, sheets of images, a progress bar."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from pellucid.interop.atomic_files import put, read_lines, writing
from pellucid.train.config import LogConfig

# --- TensorBoard events ---------------------------------------------------------------------------------------------

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
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
    """An event file of one process, appended to and flushed at each write. It continues after step `first`: TensorBoard
    discards what an earlier process wrote about later steps."""

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


# --- The log of a run -----------------------------------------------------------------------------------------------

FILE = "log.jsonl"


class Journal:
    """The log of one run in its folder. After a kill it continues from the checkpoint; later lines are removed."""

    def __init__(self, folder: Path, config: LogConfig, *, first: int, steps: int, batch: int, quiet: bool) -> None:
        self.folder, self.batch, self.steps = folder, batch, steps
        cut(folder / FILE, first)
        self.file = (folder / FILE).open("a", encoding="utf-8")
        self.events = Events(folder / "tensorboard", first) if config.tensorboard else None
        self.bar = _Bar(first, steps, quiet)
        self.since, self.last = time.perf_counter(), first

    def window(self, step: int, values: dict[str, Any]) -> None:
        """The means of the steps since the last window, after `step` steps."""
        now = time.perf_counter()
        speed = (step - self.last) * self.batch / max(now - self.since, 1e-9)
        self.since, self.last = now, step
        line = {"step": step, "images": step * self.batch, **values, "images_per_s": round(speed, 1)}
        with writing(self.folder / FILE):
            self.file.write(json.dumps(_known(line), allow_nan=False) + "\n")
            self.file.flush()
        if self.events is not None:
            numbers = {k: v for k, v in line.items() if isinstance(v, float) and math.isfinite(v)}
            levels = {f"loss by level/λ {row['lam']:+.1f}": row["mean"] for row in values.get("levels", ())}
            self.events.scalars(step, {**numbers, **levels})
        self.bar.show(step, values["loss"], speed, (self.steps - step) * self.batch / max(speed, 1e-9))

    def images(self, step: int, images: Tensor) -> Path:
        """A sheet of images, (N, 3, H, W) in [0, 1]."""
        pixels = sheet(images)
        path = self.folder / "pictures" / f"step-{step:08d}.png"
        path.parent.mkdir(exist_ok=True)
        put(path, Image.fromarray(pixels).save)
        if self.events is not None:
            self.events.image(step, "pictures", pixels)
        return path

    def say(self, text: str) -> None:
        self.bar.say(text)

    def note(self, step: int, text: str) -> None:
        """A line of words in the log, after `step` steps."""
        with writing(self.folder / FILE):
            self.file.write(json.dumps({"step": step, "note": text}, ensure_ascii=False) + "\n")
            self.file.flush()
        self.say(text)

    def close(self) -> None:
        self.bar.close()
        with writing(self.folder / FILE):
            self.file.close()
        if self.events is not None:
            self.events.close()


def _known(value: Any) -> Any:
    """The same with null for numbers that JSON cannot express."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_known(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut(path: Path, step: int) -> None:
    """Keeps only the lines up to a step: what a killed run wrote after its last checkpoint will be written again."""
    if path.exists():
        kept = [row for row in read_lines(path) if isinstance(row.get("step"), int) and row["step"] <= step]
        put(path, "".join(json.dumps(row) + "\n" for row in kept))


def sheet(images: Tensor, gap: int = 1) -> np.ndarray:
    """Images side by side, as nearly square as possible: (N, 3, H, W) in [0, 1] → (H', W', 3) uint8."""
    pixels = (images.detach().float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    columns = math.ceil(math.sqrt(len(pixels)))
    rows = math.ceil(len(pixels) / columns)
    _, height, width, _ = pixels.shape
    whole = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, image in enumerate(pixels):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        whole[top : top + height, left : left + width] = image
    return whole


class _Bar:
    """Loss, images per second and the time left, on a terminal's stderr; a line now and then elsewhere."""

    def __init__(self, first: int, steps: int, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True, highlight=False)
        words = TextColumn("loss {task.fields[loss]} · {task.fields[speed]} images/s")
        columns = (BarColumn(), MofNCompleteColumn(), words, TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=quiet or not sys.stderr.isatty())
        self.progress.start()
        self.task = self.progress.add_task("train", total=steps, completed=first, loss="–", speed="–")
        self.quiet, self.steps, self.printed = quiet, steps, 0.0

    def show(self, step: int, loss: float, speed: float, left: float) -> None:
        self.progress.update(self.task, completed=step, loss=f"{loss:.4f}", speed=f"{speed:,.0f}")
        due = time.monotonic() - self.printed > 10 or step == self.steps
        if due and not self.quiet and not sys.stderr.isatty():
            self.printed = time.monotonic()
            end = f"{timedelta(seconds=round(left))} left" if left else "done"
            self.say(f"step {step}/{self.steps} · loss {loss:.4f} · {speed:,.0f} images/s · {end}")

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()
