"""What can be measured of finished images without a reference: one number an image, (N,) float64.

Images are (N, 3, H, W): floats in [0, 1], or bytes from 0 to 255. What each measure keeps still is in its docstring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence.judging import bleeding
from pellucid.scenes.grammar import Query

__all__ = ["bled", "bleeding", "colourfulness", "diversity", "residual_noise", "saturation", "seams", "sharpness"]


# --- Images as they are passed in -----------------------------------------------------------------------------------

_LEAST = 16  # pixels along a side
_SLACK = 1e-3  # what resampling and half precision may leave outside of [0, 1]
_AT_ONCE = 2**17  # pixels: what fits into caches, and 25 MB with all that is made of it


def _checked(pixels: Tensor) -> Tensor:
    """The same images where they can be measured."""
    if not isinstance(pixels, Tensor):
        raise PellucidError(rule("images", "a tensor", type(pixels).__name__), "qualities")
    shape = tuple(pixels.shape)
    if len(shape) != 4 or shape[0] < 1 or shape[1] != 3 or min(shape[2:]) < _LEAST:
        raise PellucidError(rule("images", f"(N, 3, H, W), {_LEAST} pixels or more", shape), "qualities")
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.is_floating_point():
        raise PellucidError(rule("images", "floats in [0, 1] or uint8", str(pixels.dtype)), "qualities")
    low, high = (float(end) for end in pixels.detach().aminmax())
    if not (low >= -_SLACK and high <= 1 + _SLACK):  # NaN fails too
        advice = "From [-1, 1] take (x + 1) / 2." if -1.01 <= low < 0 else ""
        raise PellucidError(rule("images", "in [0, 1]", (low, high), advice), "qualities")
    return pixels


def unit(pixels: Tensor) -> Tensor:
    """Float32 in [0, 1]."""
    found = pixels.float()
    return found / 255 if pixels.dtype == torch.uint8 else found.clamp(0, 1)


def each(pixels: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """(N,) float64 on the CPU: a measure of (B, 3, H, W) float32, some images at a time."""
    known = _checked(pixels)
    size = max(1, _AT_ONCE // (known.shape[2] * known.shape[3]))
    with torch.no_grad():
        return torch.cat([measure(unit(part)).double().cpu() for part in known.split(size)])


# --- Colour ---------------------------------------------------------------------------------------------------------

_END = 0.5 / 255  # what rounds to 0 or to 255


def saturation(pixels: Tensor) -> Tensor:
    """The share of an image's values, channel by channel, that are 0 or 255 in eight bits.

    Too much guidance pushes predictions out of range, and the image is clipped there. A true image may have such
    values too, so compare with true ones. Kept still by: the order of pixels and of channels.
    """
    return each(pixels, lambda x: _at_end(x).flatten(1).double().mean(1))


def _at_end(x: Tensor) -> Tensor:
    """Bool: values that are an end of the range in eight bits."""
    return (x <= _END) | (x >= 1 - _END)


def colourfulness(pixels: Tensor) -> Tensor:
    """Hasler and Süsstrunk's M (2003), of values from 0 to 1: spread and mean of red − green and of yellow − blue.

    0 for grey; their seven steps from "not" to "extremely" colourful lie at 15, 33, 45, 59, 82 and 109 / 255. Kept
    still by: the order of pixels, and brightness (the same added to all channels). Contrast scales it.
    """
    return each(pixels, _colourfulness_of)


def _colourfulness_of(x: Tensor) -> Tensor:
    red, green, blue = x.flatten(2).double().unbind(1)  # (B, H·W)
    opponents = torch.stack([red - green, (red + green) / 2 - blue], 1)
    spread = opponents.var(2, correction=0).sum(1).sqrt()
    return spread + 0.3 * opponents.mean(2).square().sum(1).sqrt()


# --- Detail and noise -----------------------------------------------------------------------------------------------

_WINDOW = 7  # pixels along the side of what "local" means
_EDGES = 0.1  # of the strongest local contrast: what is less is not an edge
_STRONGEST = 0.99  # the quantile that is called so
_VISIBLE = 1e-6  # a variance of a quarter of one of 255 steps: what is less is no edge, however relative
_SOFTENED = 1.5  # pixels: the blur under which flat parts are looked for
_FLAT = 0.5  # the share of an image that is taken as flat: its least steep half
_ENOUGH = 2**20  # values for a quantile
_MEDIAN = 0.6744897501960817  # of |z|, z normal

_LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))
_GRAIN = ((1.0, -2.0, 1.0), (-2.0, 4.0, -2.0), (1.0, -2.0, 1.0))  # Immerkær 1996
_LAPLACIAN_GAIN, _GRAIN_GAIN = 20.0, 36.0  # sums of squares: what they make of the variance of white noise


def _filtered(x: Tensor, kernel: tuple[tuple[float, ...], ...]) -> Tensor:
    """(B, 3, H − 2, W − 2): every channel under a kernel, without what would reach over the border."""
    weight = torch.tensor(kernel, dtype=x.dtype, device=x.device).expand(3, 1, 3, 3)
    return F.conv2d(x, weight, groups=3)


# Noise


def residual_noise(pixels: Tensor, scale: int = 1) -> Tensor:
    """The standard deviation of noise (root of the mean square over channels), from the flat half of an image.

    Immerkær's kernel (1996) sees neither planes nor straight edges along an axis; its median over the least steep half
    of the pixels, clipped ones left out, is the noise. Steepness is measured by odd filters under a blur, which white
    noise leaves independent of the even kernel, so that the choice adds no bias. Where an image is textured all over,
    the texture counts as noise. `scale` s measures means over s × s pixels, for grain that is coarser than a pixel.

    Kept still by: brightness, while nothing is clipped. Contrast scales it.
    """
    if isinstance(scale, bool) or not isinstance(scale, int) or scale < 1:
        raise PellucidError(rule("scale", "a whole number from 1", scale), "qualities")
    if min(_checked(pixels).shape[2:]) < _LEAST * scale:
        raise PellucidError(rule("scale", f"such that {_LEAST} pixels are left of a side", scale), "qualities")
    return each(pixels, partial(_noise_of, scale=scale))


def _noise_of(x: Tensor, scale: int = 1) -> Tensor:
    return _channel_noise(F.avg_pool2d(x, scale) if scale > 1 else x).square().mean(1).sqrt()


def _channel_noise(x: Tensor) -> Tensor:
    """(B, 3): sigma of every channel; 0 where all of it is clipped."""
    grain = _filtered(x, _GRAIN).abs()
    clipped = F.max_pool2d(_at_end(x).float(), 3, 1).flatten(2) > 0  # (B, 3, P)
    steep = _steepness(x)[:, 1:-1, 1:-1].flatten(1).masked_fill(clipped.all(1), torch.nan)
    flat = (steep <= _quantile(steep, _FLAT))[:, None]  # (B, 1, P)
    kept = torch.where(flat & ~clipped, grain.flatten(2), torch.nan)
    return kept.nanmedian(2).values.nan_to_num(0.0) / (_MEDIAN * math.sqrt(_GRAIN_GAIN))


def _quantile(values: Tensor, share: float) -> Tensor:
    """(B, 1) of (B, P), without NaN; of very many values, of evenly spaced ones."""
    return values[:, :: 1 + values.shape[1] // _ENOUGH].nanquantile(share, dim=1, keepdim=True)


def _steepness(x: Tensor) -> Tensor:
    """(B, H, W): the square of the gradient under a Gaussian blur, all channels together."""
    reach = math.ceil(3 * _SOFTENED)
    at = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    bell = torch.exp(-at.square() / (2 * _SOFTENED**2))
    bell, slope = bell / bell.sum(), at * bell / (at.square() * bell).sum()
    wide = F.pad(x, (reach, reach, reach, reach), mode="replicate")
    across = _separable(wide, slope, bell)
    down = _separable(wide, bell, slope)
    return (across.square() + down.square()).sum(1)


def _separable(x: Tensor, along_x: Tensor, along_y: Tensor) -> Tensor:
    found = F.conv2d(x, along_x.reshape(1, 1, 1, -1).expand(3, 1, 1, -1), groups=3)
    return F.conv2d(found, along_y.reshape(1, 1, -1, 1).expand(3, 1, -1, 1), groups=3)


# Sharpness


def sharpness(pixels: Tensor) -> Tensor:
    """How narrow the edges are: the square of the Laplacian over the local variance, summed where there are edges.

    An ideal step between two flat halves has 1.75, whatever its height; blurred by one pixel it has about 0.18. Edges
    are where the variance in a window of 7 × 7 is at least a tenth of the strongest. What noise adds to both sums is
    taken off, by the noise of the flat parts. 0 where there is no edge.

    Kept still by: brightness and contrast, while nothing is clipped.
    """
    return each(pixels, _sharpness_of)


def _sharpness_of(x: Tensor) -> Tensor:
    noise = _channel_noise(x).square().sum(1)[:, None, None]
    x = x - x.mean((2, 3), keepdim=True)
    margin = (_WINDOW - 3) // 2
    fine = _filtered(x, _LAPLACIAN)[:, :, margin:-margin, margin:-margin].square().sum(1) - _LAPLACIAN_GAIN * noise
    mean, square = F.avg_pool2d(x, _WINDOW, 1), F.avg_pool2d(x.square(), _WINDOW, 1)
    contrast = (square - mean.square()).sum(1) - (1 - 1 / _WINDOW**2) * noise
    strongest = _quantile(contrast.flatten(1), _STRONGEST)[:, :, None]
    edge = contrast >= (_EDGES * strongest).clamp(min=_VISIBLE)
    above, below = (torch.where(edge, part, 0.0).double().sum((1, 2)) for part in (fine, contrast))
    return torch.where(below > 0, above / below.clamp(min=_VISIBLE), 0.0).clamp(min=0)


# --- Tile seams -----------------------------------------------------------------------------------------------------

_FLOOR = 1 / 255  # a jump that eight bits cannot show
_LEAST_PERIOD = 4
_ALONG = 1 / 3  # a jump of a border is exceeded along two thirds of it: objects in a row are not so long


def seams(pixels: Tensor, period: int) -> Tensor:
    """How much larger the jumps at every `period`-th pixel are than any within half a period of them; 1 is no seam.

    The jump between two columns is what two thirds of the rows exceed, so that the edges of objects do not count and a
    border along the whole image does. A pattern of 2, 4, … to a period has jumps beside the border that are as
    large: only one of just that period looks like a seam. Rows likewise; the larger of both counts. Jumps that eight
    bits cannot show count for nothing. Tiles that were blended leave no jump, and are not found. Of 2,000 true renders
    of scenes none has 1.5, at periods of 24, 32, 40 and 64.

    Kept still by: brightness, and the order of channels.
    """
    if isinstance(period, bool) or not isinstance(period, int) or period < _LEAST_PERIOD:
        raise PellucidError(rule("period", f"a whole number of pixels from {_LEAST_PERIOD}", period), "qualities")
    high, wide = _checked(pixels).shape[2:]
    if period >= max(high, wide):
        raise PellucidError(rule("period", f"below {max(high, wide)}, so that tiles meet", period), "qualities")
    return each(pixels, partial(_seams_of, period=period))


def _seams_of(x: Tensor, period: int) -> Tensor:
    sides = [side for side in (x, x.transpose(2, 3)) if side.shape[3] > period]
    return torch.stack([_standing_out(side, period) for side in sides]).amax(0)


def _standing_out(x: Tensor, period: int) -> Tensor:
    """(B,): of the columns of images."""
    apart = x.diff(dim=3).square().mean(1).sqrt()  # (B, H, W − 1): before columns 1, 2, …
    jumps = apart.kthvalue(max(1, int(_ALONG * x.shape[2])), dim=1).values
    at, beside = [], []
    for border in range(period, x.shape[3], period):
        own = border - 1
        first = max(0, own - period // 2)
        near = torch.cat([jumps[:, first:own], jumps[:, own + 1 : own + 1 + period // 2]], 1)
        at.append(jumps[:, own])
        beside.append(near.amax(1))
    return (torch.stack(at, 1).mean(1) + _FLOOR) / (torch.stack(beside, 1).mean(1) + _FLOOR)


# --- Diversity ------------------------------------------------------------------------------------------------------

_SIDE = 32  # images are compared at this size: what is finer is grain, not another image


def diversity(samples: Tensor, groups: Sequence[Hashable] | None = None) -> Tensor:
    """(N,): the mean distance of each to the others of its group; the mean over a group is that over all its pairs.

    Of images (N, 3, H, W) it is the root of the mean square of their difference at 32 × 32; of features (N, D) it is
    Euclidean. `groups` names the prompt of each; without it all are of one. Every group needs two.

    Kept still by: whatever keeps distances, such as brightness, and the order within a group. Contrast scales it.
    """
    rows = _features(samples)
    names = [0] * len(rows) if groups is None else list(groups)
    if len(names) != len(rows):
        raise PellucidError(rule("groups", f"one for each of {len(rows)} images", len(names)), "qualities")
    members: dict[Hashable, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    found = torch.zeros(len(rows), dtype=torch.float64)
    for name, own in members.items():
        if len(own) < 2:
            raise PellucidError(rule(f"images of {name!r}", "at least two", len(own)), "qualities")
        apart = torch.cdist(rows[own], rows[own], compute_mode="donot_use_mm_for_euclid_dist")
        found[own] = apart.sum(1) / (len(own) - 1)
    return found


def _features(samples: Tensor) -> Tensor:
    """(N, D) float64: features as they are, or images such that distances are roots of mean squares."""
    if isinstance(samples, Tensor) and samples.ndim == 2:
        if not samples.is_floating_point() or not torch.isfinite(samples).all():
            raise PellucidError(rule("features", "finite floats", str(samples.dtype)), "qualities")
        return samples.double().cpu()
    known = _checked(samples)
    size = min(_SIDE, known.shape[2]), min(_SIDE, known.shape[3])
    some = max(1, _AT_ONCE // (known.shape[2] * known.shape[3]))
    parts = [F.adaptive_avg_pool2d(unit(part), size).flatten(1).cpu() for part in known.split(some)]
    small = torch.cat(parts).double()
    return small / math.sqrt(small.shape[1])


# --- Colour bleeding ------------------------------------------------------------------------------------------------


def bled(pixels: Tensor, queries: Sequence[Query]) -> Tensor:
    """(N,) float64: 1 where colours bled, 0 where not, NaN where it is unknown: `bleeding` of every reading."""
    known = _checked(pixels)
    if len(queries) != len(known):
        raise PellucidError(rule("queries", f"one for each of {len(known)} images", len(queries)), "qualities")
    readings = scenes.read(2 * unit(known) - 1)
    found = [bleeding(reading, query) for reading, query in zip(readings, queries, strict=True)]
    return torch.tensor([math.nan if one is None else float(one) for one in found], dtype=torch.float64)
