"""The Inception-v3 that FID is defined by (Szegedy et al. 2015; the TensorFlow graph of 2015-12-05): 2,048 features.

It differs from the Inception-v3 of model zoos: average pools do not count their padding, the last block pools by
maximum, the input is resized as TensorFlow 1 did and scaled as (pixel − 128) / 128. Names of weights are those of
pytorch-fid's file, so that one network reads any copy of it.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import weights
from pellucid.interop.atomic_files import put

_SIDE = 299  # pixels of the input
FEATURES = 2048
_EPS = 1e-3  # of every batch norm
BATCH = 64  # images at once: 69 MB of input, about 1 GB of activations


class Shape(NamedTuple):
    """One convolution: kernel and padding are (height, width)."""

    out: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: tuple[int, int] = (0, 0)


def _square(out: int, side: int, stride: int = 1, padding: int = 0) -> Shape:
    return Shape(out, (side, side), stride, (padding, padding))


def _wide(out: int, length: int) -> Shape:
    return Shape(out, (1, length), 1, (0, length // 2))


def _tall(out: int, length: int) -> Shape:
    return Shape(out, (length, 1), 1, (length // 2, 0))


_mean_pool = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
_max_pool = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
_halve = partial(F.max_pool2d, kernel_size=3, stride=2)
Pool = Callable[[Tensor], Tensor]
Step = dict[str, Shape]  # units side by side on one input: one, but in the forks of the last two blocks


class Norm(nn.Module):
    """The four vectors of a batch norm that has stopped learning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(width) if name in ("weight", "running_var") else torch.zeros(width))


class Unit(nn.Module):
    """Convolution, batch norm, ReLU. The norm is folded into the convolution: one pass over the activations less."""

    def __init__(self, channels: int, shape: Shape) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, shape.out, shape.kernel, shape.stride, shape.padding, bias=False)
        self.bn = Norm(shape.out)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.bn.weight * (self.bn.running_var + _EPS).rsqrt()
        weight, bias = self.conv.weight * scale[:, None, None, None], self.bn.bias - self.bn.running_mean * scale
        return F.conv2d(x, weight, bias, self.conv.stride, self.conv.padding).relu_()


class InceptionBlock(nn.Module):
    """Chains of units on one input, joined by channel; the last chain begins with a pool, and may be only that."""

    def __init__(self, channels: int, chains: list[list[Step]], pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.chains = [[tuple(step) for step in chain] for chain in chains]  # names
        self.width = 0
        for chain in chains:
            width = channels
            for step in chain:
                for name, shape in step.items():
                    self.add_module(name, Unit(width, shape))
                width = sum(shape.out for shape in step.values())
            self.width += width

    def forward(self, x: Tensor) -> Tensor:
        ends = []
        for number, chain in enumerate(self.chains, 1):
            y = self.pool(x) if number == len(self.chains) else x
            for step in chain:
                units = [self.get_submodule(name)(y) for name in step]
                y = units[0] if len(units) == 1 else torch.cat(units, 1)
            ends.append(y)
        return torch.cat(ends, 1)


def _block_35(channels: int, pooled: int) -> InceptionBlock:
    """At 35 × 35: 1×1, 5×5, two 3×3, pool."""
    return InceptionBlock(
        channels,
        [
            [{"branch1x1": _square(64, 1)}],
            [{"branch5x5_1": _square(48, 1)}, {"branch5x5_2": _square(64, 5, padding=2)}],
            [
                {"branch3x3dbl_1": _square(64, 1)},
                {"branch3x3dbl_2": _square(96, 3, padding=1)},
                {"branch3x3dbl_3": _square(96, 3, padding=1)},
            ],
            [{"branch_pool": _square(pooled, 1)}],
        ],
        _mean_pool,
    )


def _block_35_to_17(channels: int) -> InceptionBlock:
    return InceptionBlock(
        channels,
        [
            [{"branch3x3": _square(384, 3, stride=2)}],
            [
                {"branch3x3dbl_1": _square(64, 1)},
                {"branch3x3dbl_2": _square(96, 3, padding=1)},
                {"branch3x3dbl_3": _square(96, 3, stride=2)},
            ],
            [],
        ],
        _halve,
    )


def _block_17(channels: int, inner: int) -> InceptionBlock:
    """At 17 × 17: 1×1, 7×7 in two strips, twice 7×7 in four strips, pool."""
    return InceptionBlock(
        channels,
        [
            [{"branch1x1": _square(192, 1)}],
            [{"branch7x7_1": _square(inner, 1)}, {"branch7x7_2": _wide(inner, 7)}, {"branch7x7_3": _tall(192, 7)}],
            [
                {"branch7x7dbl_1": _square(inner, 1)},
                {"branch7x7dbl_2": _tall(inner, 7)},
                {"branch7x7dbl_3": _wide(inner, 7)},
                {"branch7x7dbl_4": _tall(inner, 7)},
                {"branch7x7dbl_5": _wide(192, 7)},
            ],
            [{"branch_pool": _square(192, 1)}],
        ],
        _mean_pool,
    )


def _block_17_to_8(channels: int) -> InceptionBlock:
    return InceptionBlock(
        channels,
        [
            [{"branch3x3_1": _square(192, 1)}, {"branch3x3_2": _square(320, 3, stride=2)}],
            [
                {"branch7x7x3_1": _square(192, 1)},
                {"branch7x7x3_2": _wide(192, 7)},
                {"branch7x7x3_3": _tall(192, 7)},
                {"branch7x7x3_4": _square(192, 3, stride=2)},
            ],
            [],
        ],
        _halve,
    )


def _block_8(channels: int, pool: Pool) -> InceptionBlock:
    """At 8 × 8: 1×1, 3×3 forked into strips, two 3×3 of which the last is forked, pool."""
    return InceptionBlock(
        channels,
        [
            [{"branch1x1": _square(320, 1)}],
            [{"branch3x3_1": _square(384, 1)}, {"branch3x3_2a": _wide(384, 3), "branch3x3_2b": _tall(384, 3)}],
            [
                {"branch3x3dbl_1": _square(448, 1)},
                {"branch3x3dbl_2": _square(384, 3, padding=1)},
                {"branch3x3dbl_3a": _wide(384, 3), "branch3x3dbl_3b": _tall(384, 3)},
            ],
            [{"branch_pool": _square(192, 1)}],
        ],
        pool,
    )


class Inception(nn.Module):
    """Images (N, 3, H, W) uint8 → features (N, 2048) float32, in full float32 whatever torch is allowed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Unit(3, _square(32, 3, stride=2))
        self.Conv2d_2a_3x3 = Unit(32, _square(32, 3))
        self.Conv2d_2b_3x3 = Unit(32, _square(64, 3, padding=1))
        self.Conv2d_3b_1x1 = Unit(64, _square(80, 1))
        self.Conv2d_4a_3x3 = Unit(80, _square(192, 3))
        self.Mixed_5b = _block_35(192, 32)
        self.Mixed_5c = _block_35(256, 64)
        self.Mixed_5d = _block_35(288, 64)
        self.Mixed_6a = _block_35_to_17(288)
        self.Mixed_6b = _block_17(768, 128)
        self.Mixed_6c = _block_17(768, 160)
        self.Mixed_6d = _block_17(768, 160)
        self.Mixed_6e = _block_17(768, 192)
        self.Mixed_7a = _block_17_to_8(768)
        self.Mixed_7b = _block_8(1280, _mean_pool)
        self.Mixed_7c = _block_8(2048, _max_pool)

    @property
    def device(self) -> torch.device:
        return self.Conv2d_1a_3x3.conv.weight.device

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 299, 299) as `prepare` makes them → (N, 2048)."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))  # (N, 64, 147, 147)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(_halve(x)))  # (N, 192, 71, 71)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(_halve(x))))  # (N, 288, 35, 35)
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))  # (N, 768, 17, 17)
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))  # (N, 2048, 8, 8)
        return x.mean((2, 3))

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) uint8, wherever they are → (N, 2048) float32 on the network's device, in one batch."""
        with _exact(self.device):
            return self(self.laid_out(prepare(images.to(self.device))))

    def laid_out(self, x: Tensor) -> Tensor:
        """In the memory format of the weights: `network.to(memory_format=torch.channels_last)` is enough."""
        last = self.Conv2d_2a_3x3.conv.weight.is_contiguous(memory_format=torch.channels_last)
        return x.contiguous(memory_format=torch.channels_last) if last else x

    def digest(self) -> str:
        """A name for these weights: SHA-256 over all of them."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


def features(
    images: Tensor | Iterable[Tensor],
    network: Inception,
    batch: int = BATCH,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Features (N, 2048) float32, on the network's device, of images (N, 3, H, W) uint8 or of a stream of such.

    Images of a stream may differ in size from one tensor to the next: they are resized, then go `batch` by `batch`.
    `progress` is called with the number of images that were done.
    """
    found = list(feature_batches(images, network, batch, progress))
    return torch.cat(found) if found else torch.empty(0, FEATURES, device=network.device)


@torch.no_grad()
def feature_batches(
    images: Tensor | Iterable[Tensor],
    network: Inception,
    batch: int = BATCH,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Tensor]:
    """The same, one batch after the other, for those who keep only sums."""
    if batch < 1:
        raise PellucidError(rule("batch", "at least 1", batch), "batch")
    for pixels in _batched(images, network.device, batch):
        with _exact(network.device):
            found = network(network.laid_out(pixels))
        yield found
        if progress is not None:
            progress(len(found))


def _batched(images: Tensor | Iterable[Tensor], device: torch.device, batch: int) -> Iterator[Tensor]:
    """Prepared inputs, `batch` at a time whatever the sizes of the images are."""
    waiting: list[Tensor] = []
    room = batch
    for pixels in (images,) if isinstance(images, Tensor) else images:
        rest = pixels
        while len(rest):
            taken, rest = rest[:room], rest[room:]
            with _exact(device):
                waiting.append(prepare(taken.to(device)))
            room -= len(taken)
            if room == 0:
                yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
                waiting, room = [], batch
    if waiting:
        yield torch.cat(waiting)


def prepare(images: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 → (N, 3, 299, 299) float32: resized, then (pixel − 128) / 128."""
    if images.dtype != torch.uint8:
        raise PellucidError(rule("dtype of images", "uint8", str(images.dtype), "See to_bytes."), "picture-dtype")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise PellucidError(rule("shape of images", "(N, 3, H, W)", tuple(images.shape)), "picture-shape")
    return (resize(images.float()) - 128.0) / 128.0


def resize(pixels: Tensor, side: int = _SIDE) -> Tensor:
    """(N, C, H, W) float → (N, C, side, side), as TensorFlow 1's bilinear resize: no antialias, no pixel centres."""
    rows, columns = (_taps(size, side, pixels.device, pixels.dtype) for size in pixels.shape[2:])
    return rows @ pixels @ columns.T


@lru_cache(maxsize=64)
def _taps(size: int, side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(side, size): output i is taken at i · size / side, between the pixel below and the next or the last."""
    place = torch.arange(side, dtype=torch.float64) * (size / side)
    low = place.long().clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    share = (place - low)[:, None]
    index = torch.arange(size)
    found = (index == low[:, None]) * (1 - share) + (index == high[:, None]) * share
    return found.to(device, dtype)


def to_bytes(images: Tensor) -> Tensor:
    """Images in [0, 1] → uint8, as a PNG would hold them: rounded to the nearest."""
    return (images.float().clamp(0, 1) * 255).round().to(torch.uint8)


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """Full float32: neither TF32 nor autocast, which move FID by more than its third digit; then as it was before."""
    places: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    name, full = "allow_tf32", False
    if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 and later: reading the old names fails where both were used
        places, name, full = (torch.backends.cudnn.conv, torch.backends.cuda.matmul), "fp32_precision", "ieee"
    before = [getattr(place, name) for place in places]
    tried = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = False  # a hundred convolutions tried for each size of a batch: a minute
        for place in places:
            setattr(place, name, full)
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.benchmark = tried
        for place, value in zip(places, before, strict=True):
            setattr(place, name, value)


# --- Weights --------------------------------------------------------------------------------------------------------

_WEIGHTS_URL = (
    "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
)
WEIGHTS_NAME = _WEIGHTS_URL.rpartition("/")[2]
_CHECKSUM = re.compile(r"-([0-9a-f]{8,64})\.")  # in the name, as torch.hub has it: how its SHA-256 begins
MAX_BYTES = 128 * 2**20  # the file has 96 MB
_TIMEOUT = 30.0  # seconds without a byte
_PIECE = 2**20
_NOT_READ = re.compile(r"^(fc|AuxLogits)\.|\.num_batches_tracked$")  # the classifier, and a count of training


def cache_folder() -> Path:
    """$PELLUCID_CACHE, or ~/.cache/pellucid."""
    folder = os.environ.get("PELLUCID_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "pellucid"


def load_inception(
    path: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Inception:
    """The network with the weights of this file (.safetensors or pytorch-fid's .pth), of the cache, or downloaded."""
    place = find_weights(progress) if path is None else Path(path)
    if not place.is_file():
        raise PellucidError(rule("Inception weights", "a file that exists", str(place)), "file")
    tensors = {name: tensor for name, tensor in weights.read(place).items() if not _NOT_READ.search(name)}
    return weights.load(Inception, tensors, name=place.name, dtype=torch.float32, device=device)


def find_weights(progress: Callable[[int, int], object] | None = None, url: str = _WEIGHTS_URL) -> Path:
    """The cached file; it is downloaded where there is none."""
    return cached_weights() or download_weights(url, cache_folder() / WEIGHTS_NAME, progress)


def cached_weights() -> Path | None:
    places = (cache_folder() / name for name in ("inception.safetensors", WEIGHTS_NAME))
    return next((place for place in places if place.is_file()), None)


def download_weights(url: str, goal: Path, progress: Callable[[int, int], object] | None = None) -> Path:
    """The file at `url`, whole and with the checksum that its name says, or not at all; at most 128 MiB.

    `progress` is called with the bytes that came and those that are expected, 0 where the server does not say.
    """
    if not url.startswith(("https://", "http://")):
        raise PellucidError(rule("address of weights", "one of http or https", url), "weights-address")
    goal.parent.mkdir(parents=True, exist_ok=True)

    def write(part: Path) -> None:
        digest = _receive(url, part, progress)
        wanted = _CHECKSUM.search(url.rpartition("/")[2])
        if wanted is None or not digest.startswith(wanted[1]):
            must = f"of SHA-256 {wanted[1]}…" if wanted else "named after its SHA-256"
            raise PellucidError(rule(f"download of {goal.name}", must, f"{digest[:8]}…"), "weights-checksum")

    try:
        put(goal, write)
    except (OSError, http.client.HTTPException) as error:
        raise _out_of_reach(goal, error) from None
    return goal


def _receive(url: str, part: Path, progress: Callable[[int, int], object] | None) -> str:
    """Writes what the server sends into `part`; its SHA-256."""
    digest, came = hashlib.sha256(), 0
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer, part.open("wb") as file:
        expected = int(answer.headers.get("Content-Length") or 0)
        while piece := answer.read(_PIECE):
            came += len(piece)
            if max(came, expected) > MAX_BYTES:
                must = f"at most {MAX_BYTES} bytes"
                raise PellucidError(rule(f"download of {part.name}", must, max(came, expected)), "weights-size")
            digest.update(piece)
            file.write(piece)
            if progress is not None:
                progress(came, expected)
        if came < expected:  # urllib takes a connection that broke for the end of the file
            raise http.client.IncompleteRead(b"", expected - came)
    return digest.hexdigest()


def _out_of_reach(goal: Path, error: Exception) -> PellucidError:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(error, urllib.error.HTTPError):
        cause = f"{error.code} {error.reason}"
        error.close()  # it is the answer, with its connection
    words = (str(cause) or type(cause).__name__).splitlines()[0][:120]
    return PellucidError(
        f"Inception weights must be given as a path, be in {goal.parent}, or be downloadable; "
        f"the download failed ({words}). Fetch {WEIGHTS_NAME} elsewhere and name it with --inception.",
        "weights-network",
    )
