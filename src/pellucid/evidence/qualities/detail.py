"""Fine detail: how sharp the edges are, and how much noise is left where nothing is drawn."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.qualities.colour import at_end
from pellucid.evidence.qualities.given import LEAST, checked, each

WINDOW = 7  # pixels along the side of what "local" means
EDGES = 0.1  # of the strongest local contrast: what is less is not an edge
STRONGEST = 0.99  # the quantile that is called so
VISIBLE = 1e-6  # a variance of a quarter of one of 255 steps: what is less is no edge, however relative
SOFTENED = 1.5  # pixels: the blur under which flat parts are looked for
FLAT = 0.5  # the share of an image that is taken as flat: its least steep half
ENOUGH = 2**20  # values for a quantile
MEDIAN = 0.6744897501960817  # of |z|, z normal

LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))
GRAIN = ((1.0, -2.0, 1.0), (-2.0, 4.0, -2.0), (1.0, -2.0, 1.0))  # Immerkær 1996
LAPLACIAN_GAIN, GRAIN_GAIN = 20.0, 36.0  # sums of squares: what they make of the variance of white noise


def filtered(x: Tensor, kernel: tuple[tuple[float, ...], ...]) -> Tensor:
    """(B, 3, H − 2, W − 2): every channel under a kernel, without what would reach over the border."""
    weight = torch.tensor(kernel, dtype=x.dtype, device=x.device).expand(3, 1, 3, 3)
    return F.conv2d(x, weight, groups=3)


# Noise


def residual_noise(pixels: Tensor, scale: int = 1) -> Tensor:
    """The standard deviation of noise (root of the mean square over channels), from the flat half of an image.

    Immerkær's kernel (1996) sees neither planes nor straight edges along an axis; its median over the least steep half
    of the pixels, clipped ones left out, is the noise. Steepness is measured by odd filters under a blur, which white
    noise leaves independent of the even kernel, so that the choice adds no bias. Where an image is textured all over,
    the texture counts as noise. `scale` s looks at means over s × s pixels, for grain that is coarser than a pixel.

    Kept still by: brightness, while nothing is clipped. Contrast scales it.
    """
    if isinstance(scale, bool) or not isinstance(scale, int) or scale < 1:
        raise PellucidError(rule("scale", "a whole number from 1", scale), "qualities")
    if min(checked(pixels).shape[2:]) < LEAST * scale:
        raise PellucidError(rule("scale", f"such that {LEAST} pixels are left of a side", scale), "qualities")
    return each(pixels, partial(noise_of, scale=scale))


def noise_of(x: Tensor, scale: int = 1) -> Tensor:
    return channel_noise(F.avg_pool2d(x, scale) if scale > 1 else x).square().mean(1).sqrt()


def channel_noise(x: Tensor) -> Tensor:
    """(B, 3): sigma of every channel; 0 where all of it is clipped."""
    grain = filtered(x, GRAIN).abs()
    clipped = F.max_pool2d(at_end(x).float(), 3, 1).flatten(2) > 0  # (B, 3, P)
    steep = steepness(x)[:, 1:-1, 1:-1].flatten(1).masked_fill(clipped.all(1), torch.nan)
    flat = (steep <= quantile(steep, FLAT))[:, None]  # (B, 1, P)
    kept = torch.where(flat & ~clipped, grain.flatten(2), torch.nan)
    return kept.nanmedian(2).values.nan_to_num(0.0) / (MEDIAN * math.sqrt(GRAIN_GAIN))


def quantile(values: Tensor, share: float) -> Tensor:
    """(B, 1) of (B, P), without NaN; of very many values, of evenly spaced ones."""
    return values[:, :: 1 + values.shape[1] // ENOUGH].nanquantile(share, dim=1, keepdim=True)


def steepness(x: Tensor) -> Tensor:
    """(B, H, W): the square of the gradient under a Gaussian blur, all channels together."""
    reach = math.ceil(3 * SOFTENED)
    at = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    bell = torch.exp(-at.square() / (2 * SOFTENED**2))
    bell, slope = bell / bell.sum(), at * bell / (at.square() * bell).sum()
    wide = F.pad(x, (reach, reach, reach, reach), mode="replicate")
    across = separable(wide, slope, bell)
    down = separable(wide, bell, slope)
    return (across.square() + down.square()).sum(1)


def separable(x: Tensor, along_x: Tensor, along_y: Tensor) -> Tensor:
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
    return each(pixels, sharpness_of)


def sharpness_of(x: Tensor) -> Tensor:
    noise = channel_noise(x).square().sum(1)[:, None, None]
    x = x - x.mean((2, 3), keepdim=True)
    margin = (WINDOW - 3) // 2
    fine = filtered(x, LAPLACIAN)[:, :, margin:-margin, margin:-margin].square().sum(1) - LAPLACIAN_GAIN * noise
    mean, square = F.avg_pool2d(x, WINDOW, 1), F.avg_pool2d(x.square(), WINDOW, 1)
    contrast = (square - mean.square()).sum(1) - (1 - 1 / WINDOW**2) * noise
    strongest = quantile(contrast.flatten(1), STRONGEST)[:, :, None]
    edge = contrast >= (EDGES * strongest).clamp(min=VISIBLE)
    above, below = (torch.where(edge, part, 0.0).double().sum((1, 2)) for part in (fine, contrast))
    return torch.where(below > 0, above / below.clamp(min=VISIBLE), 0.0).clamp(min=0)
