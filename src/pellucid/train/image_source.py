"""Image files as batches: decoded in threads; what cannot be read is named, and the next example takes its place."""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import whole
from pellucid.pipeline.images import MAX_PIXELS, UNREADABLE, first_line, flatten, upright, words
from pellucid.train.draws import Draws
from pellucid.train.source import Batch

# --- One image ------------------------------------------------------------------------------------------------------

Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"
Crop = Literal["centre", "random"]
# Only plain formats: Pillow knows others that start programs (EPS) or that no data set holds.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MAX_BYTES = 256 * 2**20  # of one image file
_MAX_SIZE = 8192
_LONGEST = 20  # times the shorter side: what is longer is a strip, not an image
_REDUCING_GAP = 3.0  # box-reduce first, down to this many times the size: indistinguishable from Lanczos alone


@dataclass(frozen=True)
class Hint:
    """How a hint image is read: its channels, its range, and whether it is aligned with the image."""

    channels: Literal[1, 3] = 3
    low: Literal[-1, 0] = 0  # values are in [low, 1]
    aligned: bool = True  # cropped and mirrored with the image


_PLAIN_HINT = Hint()  # any other name: an image that a ControlNet follows
_HINTS: Mapping[str, Hint] = MappingProxyType(
    {
        "edges": Hint(channels=1),
        "depth": Hint(channels=1),
        "mask": Hint(channels=1),
        "reference": Hint(low=-1, aligned=False),  # an IP-Adapter's: used whole, and not aligned
    }
)


def hint_kind(name: str) -> Hint:
    return _HINTS.get(name, _PLAIN_HINT)


@dataclass(frozen=True)
class Framing:
    """The square to train on: the shorter side is resized to `size`, the longer one is cropped, at its centre or at a
    random place; `flip` mirrors half of the images at random."""

    size: int
    crop: Crop = "centre"
    flip: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= _MAX_SIZE:
            raise PellucidError(rule("size", f"from 1 to {_MAX_SIZE} pixels", self.size), "data-size")
        if self.crop not in ("centre", "random"):
            raise PellucidError(rule("crop", "centre or random", self.crop), "data-crop")


@dataclass(frozen=True)
class CropPlace:
    """The random numbers of one image: where the square lies along the free length, and whether it is mirrored."""

    across: float = 0.5
    down: float = 0.5
    mirrored: bool = False


def decode(data: bytes, size: int) -> Image.Image:
    """Bytes of a file → RGB, upright, transparency on white; a JPEG only as large as a good image of `size` needs.

    No warning is caught here: `warnings.catch_warnings` would disturb the other threads that decode.
    """
    try:
        found = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PellucidError(f"it has more than {MAX_PIXELS} pixels", "image-pixels") from None
    except UNREADABLE:
        raise PellucidError("it is no image file" if data else "it is empty", "image-file") from None
    with found:
        if found.width * found.height > MAX_PIXELS:
            raise PellucidError(f"it has {words(found.size)} pixels, more than {MAX_PIXELS}", "image-pixels")
        if max(found.size) > _LONGEST * min(found.size):
            raise PellucidError(f"it is a strip of {words(found.size)} pixels", "image-shape")
        if isinstance(found, JpegImageFile):
            found.draft(None, (2 * size, 2 * size))  # a JPEG decodes to 1/2, 1/4 or 1/8 of its size, and much faster
        try:
            found.load()
        except UNREADABLE as error:
            raise PellucidError(f"it is damaged: {_reason(error)}", "image-file") from None
        return flatten(upright(found))


def cut(image: Image.Image, framing: Framing, place: CropPlace) -> Array:
    """An RGB or grey image → (C, size, size) uint8: the square at its place, resized in one go, and mirrored."""
    side, size = min(image.size), (framing.size, framing.size)
    left, top = (
        int((free + 1) * drawn) if framing.crop == "random" else free // 2  # whole pixels: nothing is smeared
        for free, drawn in ((image.width - side, place.across), (image.height - side, place.down))
    )
    box = (left, top, left + side, top + side)
    square = image.resize(size, Image.Resampling.LANCZOS, box=box, reducing_gap=_REDUCING_GAP)
    pixels = np.asarray(square).reshape(framing.size, framing.size, -1).transpose(2, 0, 1)  # (C, size, size)
    return np.ascontiguousarray(pixels[:, :, ::-1] if place.mirrored and framing.flip else pixels)


def cut_hint(name: str, hint: Image.Image, image: Image.Image, framing: Framing, place: CropPlace) -> Array:
    """A hint → (1 or 3, size, size) uint8, cropped like its image if it is aligned with it."""
    kind = hint_kind(name)
    if not kind.aligned:
        framing, place = Framing(framing.size), CropPlace()
    elif not _same_shape(hint, image):
        raise PellucidError(f"its {name} is {words(hint.size)}, and it is {words(image.size)}", "image-shape")
    return cut(hint.convert("L") if kind.channels == 1 else hint, framing, place)


def _same_shape(a: Image.Image, b: Image.Image) -> bool:
    """Whether two images have the same shape, up to scale and a rounded pixel."""
    scale = a.width / b.width
    return abs(a.height - b.height * scale) <= max(1.0, scale)


def _reason(error: Exception) -> str:
    """Why an image could not be read, in a few words."""
    return first_line(error).rstrip(".") or type(error).__name__


# --- Batches of images ----------------------------------------------------------------------------------------------

MAX_SKIPPED = 1000  # unreadable examples of a run, after which it stops
_JUDGED = 8  # a batch smaller than this may be unlucky: only the count of all is asked
_RETRIES, PAUSE = 2, 0.2  # a network file system may fail for a moment: tried again after this many seconds
log = logging.getLogger("pellucid.train")


@dataclass(frozen=True)
class Example:
    """One example as it is stored: image files, a caption and a label."""

    image: bytes
    caption: str | None = None
    label: int | None = None
    hints: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodedExample:
    """One place of a batch, decoded, and which examples before it could not be."""

    image: Array  # (3, size, size)
    caption: str | None
    label: int | None
    hints: Mapping[str, Array]
    unread: Mapping[int, str]  # index → why


class ImageSource(ABC):
    """Examples whose images are decoded when they are needed.

    An example that cannot be read is named once and skipped: the next one in the order of the files that can be read
    takes its place. Which one that is depends on the files alone, so a resumed run, and ranks together, see the same.
    """

    endless = False

    def __init__(self, framing: Framing, hints: Sequence[str] = (), workers: int | None = None) -> None:
        if len(set(hints)) != len(hints) or not all(isinstance(name, str) and name for name in hints):
            raise PellucidError(rule("hints", "different names", list(hints)), "data-hints")
        if workers is not None and not 1 <= workers <= 256:
            raise PellucidError(rule("workers", "from 1 to 256 threads", workers), "data-workers")
        self.framing, self.hints = framing, tuple(hints)
        self.workers = workers or min(16, _available_cores())
        self.unreadable: dict[str, str] = {}  # name → why, as far as they were asked for
        self._unread: dict[int, str] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        Image.init()  # here, and not in all threads at once

    @property
    def flip(self) -> bool:
        return self.framing.flip

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """The example's name in messages: a path, or a shard and a key."""

    @abstractmethod
    def example(self, index: int) -> Example:
        """The stored bytes; a PellucidError says what is wrong with them."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Of all that shapes the batches: the files and how they are framed."""

    def batch(self, indices: Tensor, draws: Draws, device: torch.device | str = "cpu") -> Batch:
        """The examples at indices (B,), with what could not be read replaced."""
        across_down = draws.uniform("crop", (2,)).tolist()
        flips = (draws.uniform("flip") < 0.5).tolist()
        places = [CropPlace(x, y, mirrored) for (x, y), mirrored in zip(across_down, flips, strict=True)]
        asked = [int(i) for i in indices]
        if len(asked) != len(places) or any(not 0 <= i < len(self) for i in asked):
            must = f"{len(places)} indices from 0 to {len(self) - 1}"
            raise PellucidError(rule("indices", must, asked[:8]), "data-indices")
        seen = list(self.pool().map(self.see, asked, places))
        self.report(seen)
        return self.together(seen, torch.device(device))

    def see(self, index: int, place: CropPlace) -> DecodedExample:
        """The example at an index, or else the next that can be read."""
        unread: dict[int, str] = {}
        for step in range(len(self)):
            now = (index + step) % len(self)
            why = self._unread.get(now)
            if why is None:
                try:
                    return self.decoded(now, place, unread)
                except MemoryError:
                    raise  # says nothing about the file
                except Exception as error:  # a damaged file makes its reader fail in any way
                    why = _reason(error)
            unread[now] = why
            if len(unread) > MAX_SKIPPED:
                break
        shown = "; ".join(f"{self.name(i)}: {why}" for i, why in list(unread.items())[:3])
        raise PellucidError(f"data must have images that can be read; {len(unread)} in a row cannot: {shown}.", "data")

    def decoded(self, index: int, place: CropPlace, unread: Mapping[int, str]) -> DecodedExample:
        held = self.example(index)
        image = decode(held.image, self.framing.size)
        hints = {}
        for name in self.hints:
            try:
                hint = decode(held.hints[name], self.framing.size)
            except PellucidError as error:
                raise PellucidError(f"of its {name}, {error}", error.code) from None
            hints[name] = cut_hint(name, hint, image, self.framing, place)
        return DecodedExample(cut(image, self.framing, place), held.caption, held.label, hints, unread)

    def report(self, seen: Sequence[DecodedExample]) -> None:
        """Names what was found unreadable, once, and stops a run on data that is mostly damaged."""
        with self._lock:
            for index, why in sorted({i: why for one in seen for i, why in one.unread.items()}.items()):
                if index not in self._unread:
                    self._unread[index] = why
                    self.unreadable[self.name(index)] = why
                    log.warning("skipped %s: %s", self.name(index), why)
        replaced = sum(bool(one.unread) for one in seen)
        half = len(seen) >= _JUDGED and 2 * replaced > len(seen)
        if half or len(self.unreadable) > MAX_SKIPPED:
            what = f"{replaced} of a batch of {len(seen)}" if half else f"{len(self.unreadable)} examples"
            last = "; ".join(f"{name}: {why}" for name, why in list(self.unreadable.items())[-3:])
            raise PellucidError(f"data must be readable; {what} could not be read, such as {last}.", "data-damaged")

    def together(self, seen: Sequence[DecodedExample], device: torch.device) -> Batch:
        images = _moved(np.stack([one.image for one in seen]), device).float() / 127.5 - 1.0  # (B, 3, size, size)
        captions = tuple(one.caption for one in seen if one.caption is not None)
        labels = [one.label for one in seen if one.label is not None]
        hints = {}
        for name in self.hints:
            unit = _moved(np.stack([one.hints[name] for one in seen]), device).float() / 255.0
            hints[name] = unit * 2.0 - 1.0 if hint_kind(name).low == -1 else unit
        return Batch(
            images,
            _moved(np.array(labels, np.int64), device) if len(labels) == len(seen) else None,
            captions if len(captions) == len(seen) else None,
            hints,
        )

    def pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="pellucid-decode")
            return self._pool


def _moved(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The array on a device; to a GPU through pinned memory, without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _available_cores() -> int:
    """Cores of this process, shared with the other ranks of its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = whole(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, cores // (ranks or 1))


def steadily(read: Callable[[], bytes]) -> bytes:
    """What `read` returns, tried again if the system fails; a missing file is tried only once."""
    for attempt in range(_RETRIES + 1):
        try:
            return read()
        except OSError as error:
            gone = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)
            if gone or attempt == _RETRIES:
                raise PellucidError(f"it cannot be read from disk: {error.strerror or error}", "data-file") from None
            time.sleep(PAUSE)
    raise AssertionError
