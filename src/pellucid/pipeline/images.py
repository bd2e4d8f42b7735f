"""Images in and out: PIL images, arrays and files ↔ tensors in [−1, 1]; masks; sizes.

A size is (width, height), as PIL has it. Floats given as images lie in [0, 1], as in diffusers and torchvision.
"""

from __future__ import annotations

import hashlib
import math
import struct
import warnings
import zlib
from collections.abc import Sequence
from os import PathLike, fspath
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import check_file

MAX_PIXELS = 64 * 2**20  # 8192 × 8192: a file that claims more is not decoded
_SLACK = 1e-3  # what resampling and half precision may leave outside of [0, 1]
_UNMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
Size: TypeAlias = tuple[int, int]
ImageLike: TypeAlias = "Image.Image | np.ndarray[Any, Any] | Tensor | str | PathLike[str]"
_KINDS = "a PIL image, a path, an array or a tensor"
# What Pillow raises on files that are damaged or made to harm.
UNREADABLE = (
    OSError, ValueError, SyntaxError, EOFError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
    struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip


# --- files -----------------------------------------------------------------------------------------------------


def open_bounded(source: str | PathLike[str] | IO[bytes], what: str = "image") -> Image.Image:
    """Opens an image file and reads its header only; refuses what is no image or has too many pixels."""
    shown = fspath(source) if isinstance(source, str | PathLike) else "a buffer"
    if isinstance(source, str | PathLike):
        check_file(source, what)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            found = Image.open(source)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PellucidError(rule(what, f"at most {MAX_PIXELS} pixels", shown), "image-pixels") from None
    except UNREADABLE as error:
        raise PellucidError(rule(what, "an image file", shown, first_line(error)), "image-file") from None
    if found.width * found.height > MAX_PIXELS:
        found.close()
        raise PellucidError(rule(what, f"at most {MAX_PIXELS} pixels", words(found.size)), "image-pixels")
    return found


def read(source: str | PathLike[str] | IO[bytes], what: str = "image") -> Image.Image:
    """An image file, decoded and turned upright; its mode is as stored."""
    with open_bounded(source, what) as found:
        return upright(found, what)


def upright(image: Image.Image, what: str = "image") -> Image.Image:
    """The decoded image, turned as its EXIF orientation asks."""
    try:
        image.load()
    except UNREADABLE as error:
        raise PellucidError(rule(what, "a whole image", words(image.size), first_line(error)), "image-file") from None
    try:
        return ImageOps.exif_transpose(image)
    except UNREADABLE:
        return image.copy()  # damaged EXIF says nothing about the orientation


def first_line(error: BaseException) -> str:
    """What a foreign error says, as the end of our sentence."""
    text = (str(error).splitlines() or [""])[0].strip()
    return f"{text[:200].rstrip('.')}." if text else ""


# --- modes -----------------------------------------------------------------------------------------------------


def flatten(image: Image.Image, paper: str = "white") -> Image.Image:
    """Any mode → 8-bit RGB: 16 bits rounded to 8, palettes looked up, transparency laid on `paper`."""
    if image.mode.startswith("I"):  # PIL's own conversion would clip at 255
        deep = np.asarray(image).astype(np.float64)
        return Image.fromarray(np.clip(np.rint(deep / 257.0), 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        advice = "Pass it as a numpy array with values in [0, 1]."
        raise PellucidError(rule("image", "of a mode with a known range", image.mode, advice), "image-mode")
    image = image.convert(_UNMULTIPLIED.get(image.mode, image.mode))
    if "transparency" in image.info or image.mode in ("LA", "PA", "RGBA"):
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, paper), clear).convert("RGB")
    return image.convert("RGB")


def as_image(image: ImageLike, what: str) -> Image.Image | None:
    """The PIL image that a file or a PIL image is; None for arrays and tensors."""
    if isinstance(image, str | PathLike):
        return read(image, what)
    if isinstance(image, Image.Image):
        if image.width * image.height > MAX_PIXELS:
            raise PellucidError(rule(what, f"at most {MAX_PIXELS} pixels", words(image.size)), "image-pixels")
        return upright(image, what)
    return None


# --- images → tensors ----------------------------------------------------------------------------------------


def to_tensor(image: ImageLike | Sequence[ImageLike], size: Size | None = None) -> Tensor:
    """Images → (B, 3, H, W) float32 in [−1, 1], resized to `size` where given.

    PIL images resize with Lanczos, as in diffusers; arrays (H, W, C) and tensors (C, H, W) bicubically, antialiased.
    """
    return _stack([_one_tensor(p, size, "image") for p in listed(image, "image")], "image") * 2.0 - 1.0


def to_mask(mask: ImageLike | Sequence[ImageLike], size: Size | None = None) -> Tensor:
    """Masks → (B, 1, H, W) of 0 (keep) and 1 (regenerate): grey, 0.5 and above is 1; what is transparent is kept."""
    grey = _stack([_one_tensor(p, size, "mask") for p in listed(mask, "mask")], "mask")
    return (grey >= 0.5).float()


def mask_to_latents(mask: Tensor, factor: int = 8) -> Tensor:
    """(B, 1, H, W) → (B, 1, H/factor, W/factor): the nearest pixel, the upper left of each patch."""
    check_size((mask.shape[-1], mask.shape[-2]), factor, "mask")
    return interpolate(mask, size=(mask.shape[-2] // factor, mask.shape[-1] // factor))


def inpaint_pair(
    image: ImageLike | Sequence[ImageLike], mask: ImageLike | Sequence[ImageLike], size: Size | None = None
) -> tuple[Tensor, Tensor]:
    """An image and its mask as tensors; refuses two of differing size, also where both would be resized."""
    sizes = [[size_of(p, what) for p in listed(ps, what)] for ps, what in ((image, "image"), (mask, "mask"))]
    for found in sizes[1]:
        if found not in sizes[0]:
            wanted = f"as large as the image ({words(sizes[0][0])})"
            raise PellucidError(rule("mask", wanted, words(found), "Resize one to the other."), "mask-size")
    if len(sizes[1]) not in (1, len(sizes[0])) and len(sizes[0]) != 1:
        raise PellucidError(rule("masks", f"1 or {len(sizes[0])}, one per image", len(sizes[1])), "mask-count")
    return to_tensor(image, size), to_mask(mask, size)


def listed(images: Any, what: str) -> list[Any]:
    """One image, a batch or a list of images → a list of single ones."""
    if isinstance(images, np.ndarray | Tensor):
        if images.ndim not in (2, 3, 4):
            shape = tuple(images.shape)
            raise PellucidError(rule(what, "an array of 2, 3 or 4 dimensions", shape), "image-shape")
        found = list(images) if images.ndim == 4 else [images]
    elif isinstance(images, list | tuple):
        found = [one for p in images for one in listed(p, what)]
    else:
        found = [images]
    if not found:
        raise PellucidError(rule(what, "at least one image", "none"), "image-count")
    return found


def _one_tensor(image: Any, size: Size | None, what: str) -> Tensor:
    """One image → (3, H, W), or (1, H, W) for a mask, float32 in [0, 1]."""
    if size is not None:
        check_size(size)
    pil = as_image(image, what)
    if pil is None:
        found = _unit_range(_channels_first(image, what), what)
        found = found if size is None or _wide(found) == size else _resized(found, size)
        return _to_channels(found, 1 if what == "mask" else 3, what)
    rgb = flatten(pil, "black" if what == "mask" else "white")
    if size is not None and rgb.size != size:
        rgb = rgb.resize(size, Image.Resampling.LANCZOS)
    pixels = np.asarray(rgb.convert("L"))[..., None] if what == "mask" else np.asarray(rgb)
    return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(255.0))


def _channels_first(image: Any, what: str) -> Tensor:
    """An array (H, W[, C]) or a tensor ([C,] H, W) → a tensor (C, H, W)."""
    if isinstance(image, np.ndarray):
        found, order = _from_array(image, what), "(height, width, channels)"
        found = found.permute(2, 0, 1) if found.ndim == 3 else found[None]
    elif isinstance(image, Tensor):
        found, order = image.detach().cpu(), "(channels, height, width)"
        found = found if found.ndim == 3 else found[None]
    else:
        raise PellucidError(rule(what, _KINDS, type(image).__name__), "image-type")
    if found.shape[0] not in (1, 3, 4) or 0 in found.shape:
        must = f"of shape {order} with 1, 3 or 4 channels"
        raise PellucidError(rule(what, must, tuple(image.shape)), "image-shape")
    return found


def _from_array(array: np.ndarray[Any, Any], what: str) -> Tensor:
    """An array of any layout and byte order → a tensor of its own; 16-bit images become floats in [0, 1]."""
    if array.dtype.kind not in "buif":
        raise PellucidError(rule(what, "an array of numbers", str(array.dtype)), "image-type")
    native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(native / np.float32(65535.0) if native.dtype == np.uint16 else native)


def _unit_range(found: Tensor, what: str) -> Tensor:
    """uint8 and floats → float32 in [0, 1]; refuses floats that lie elsewhere rather than guess what they mean."""
    if found.dtype == torch.uint8:
        return found.float() / 255.0
    if found.dtype != torch.bool and not found.dtype.is_floating_point:
        raise PellucidError(rule(what, "of 8-bit, 16-bit or floating numbers", str(found.dtype)), "image-type")
    found = found.float()
    low, high = float(found.min()), float(found.max())
    if not (low >= -_SLACK and high <= 1.0 + _SLACK):  # also refuses NaN
        advice = "For values in [−1, 1] pass (x + 1) / 2; for 0 to 255 pass uint8."
        raise PellucidError(rule(f"floats of the {what}", "in [0, 1]", (low, high), advice), "image-range")
    return found.clamp(0.0, 1.0)


def _resized(found: Tensor, size: Size) -> Tensor:
    wanted = (size[1], size[0])
    return interpolate(found[None], size=wanted, mode="bicubic", antialias=True, align_corners=False)[0].clamp(0, 1)


def _to_channels(found: Tensor, count: int, what: str) -> Tensor:
    """(1, 3 or 4, H, W) → `count` channels; alpha lies on white, for a mask on black."""
    if found.shape[0] == 4:
        found = found[:3] * found[3:] + (0.0 if what == "mask" else 1.0) * (1.0 - found[3:])
    if found.shape[0] == count:
        return found
    if count == 1:
        return (found * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True)
    return found.expand(count, -1, -1)


def _stack(found: list[Tensor], what: str) -> Tensor:
    sizes = list(dict.fromkeys(_wide(f) for f in found))
    if len(sizes) > 1:
        shown = " and ".join(words(s) for s in sizes[:3])
        raise PellucidError(rule(f"{what}s of one batch", "of one size", shown, "Give size, or resize them."), "size")
    return torch.stack(found)


# --- tensors → images ----------------------------------------------------------------------------------------


def to_images(tensor: Tensor) -> list[Image.Image]:
    """(B, 3 or 1, H, W) in [−1, 1] → PIL images, rounded half to even as diffusers does; what lies outside is cut."""
    if not isinstance(tensor, Tensor) or tensor.ndim not in (3, 4):
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise PellucidError(rule("images", "a tensor (batch, channels, height, width)", shape), "image-shape")
    batch = tensor.detach() if tensor.ndim == 4 else tensor.detach()[None]
    if batch.shape[1] not in (1, 3):
        raise PellucidError(rule("channels of the images", "1 or 3", batch.shape[1]), "image-shape")
    check_finite("images", batch, "The autoencoder or the network overflowed: run it in float32 or bfloat16.")
    unit = (batch * 0.5 + 0.5).clamp(0, 1)  # in the network's own dtype, as diffusers: half precision rounds here
    if unit.is_meta:
        return []  # a rehearsal, which has no numbers: pixels of its size would take memory and time for nothing
    pixels = (unit.cpu().permute(0, 2, 3, 1).float().numpy() * 255).round().astype(np.uint8)
    return [Image.fromarray(one[..., 0] if one.shape[-1] == 1 else one) for one in pixels]


def check_finite(what: str, batch: Tensor, advice: str = "") -> None:
    """Refuses NaN and infinities in a batch, and names the images that have them."""
    if not _finite(batch):
        bad = [str(i) for i, one in enumerate(batch) if not _finite(one)]
        found = "NaN" if bool(batch.isnan().any()) else "infinity"
        got = f"{found} in image {', '.join(bad[:8])}{', …' if len(bad) > 8 else ''}"
        raise PellucidError(f"{what} must be finite numbers; got {got}. {advice}".rstrip(), "nan")


def _finite(numbers: Tensor) -> bool:
    """Whether all of them are: by the least and the most, which are NaN where one is, and take no memory."""
    return not numbers.numel() or all(math.isfinite(float(end)) for end in numbers.aminmax())


# --- sizes -----------------------------------------------------------------------------------------------------


def _wide(found: Tensor) -> Size:
    return int(found.shape[-1]), int(found.shape[-2])


def words(size: Size) -> str:
    return f"{size[0]}×{size[1]}"


def size_of(image: ImageLike, what: str = "image") -> Size:
    """The (width, height) of one image, as it stands upright."""
    pil = as_image(image, what)
    return _wide(_channels_first(image, what)) if pil is None else pil.size


def check_size(size: Size, factor: int = 1, what: str = "size") -> Size:
    """Refuses a size that the autoencoder cannot divide, and names the nearest that it can."""
    whole = isinstance(size, list | tuple) and len(size) == 2
    if not whole or any(isinstance(s, bool) or not isinstance(s, int | np.integer) or s < 1 for s in size):
        raise PellucidError(rule(what, "(width, height) in whole pixels", size), "size")
    width, height = int(size[0]), int(size[1])
    if width * height > MAX_PIXELS:
        raise PellucidError(rule(what, f"at most {MAX_PIXELS} pixels", words((width, height))), "image-pixels")
    if width % factor or height % factor:
        near = " or ".join(map(words, _nearest_sizes((width, height), factor)))
        must = f"a multiple of {factor} on both sides"
        raise PellucidError(rule(what, must, words((width, height)), f"Nearest: {near}."), "size-multiple")
    return width, height


def _nearest_sizes(size: Size, factor: int) -> list[Size]:
    """The sizes below and above that a factor divides, the nearer first."""
    down, up = (tuple(max(r(s / factor), 1) * factor for s in size) for r in (math.floor, math.ceil))
    found = dict.fromkeys(((down[0], down[1]), (up[0], up[1])))
    return sorted(found, key=lambda near: sum(abs(a - b) for a, b in zip(near, size, strict=True)))


def digest(image: ImageLike | Sequence[ImageLike]) -> str:
    """A name for pixels: the same for one image in any lossless file; of arrays and tensors, their numbers."""
    found = hashlib.sha256()
    several: list[Any] = list(image) if isinstance(image, list | tuple) else [image]
    for one in several:
        pil = as_image(one, "image")
        if pil is None and not isinstance(one, np.ndarray | Tensor):
            raise PellucidError(rule("image", _KINDS, type(one).__name__), "image-type")
        pixels = np.asarray(flatten(pil)) if pil is not None else _bare(one)
        found.update(repr((pixels.shape, str(pixels.dtype))).encode())
        found.update(np.ascontiguousarray(pixels).tobytes())
    return f"sha256:{found.hexdigest()}"


def _bare(numbers: np.ndarray[Any, Any] | Tensor) -> np.ndarray[Any, Any]:
    """An array's or a tensor's numbers; numpy has no bfloat16, whose numbers float32 holds exactly."""
    if isinstance(numbers, Tensor):
        own = numbers.detach().cpu()
        return np.asarray(own.float() if own.dtype == torch.bfloat16 else own)
    return numbers
