"""What can be measured of finished images without a reference: one number an image, (N,) float64.

Images are (N, 3, H, W): floats in [0, 1], or bytes from 0 to 255. What each measure keeps still is in its docstring.
"""

from pellucid.evidence.qualities.bleed import bled, bleeding
from pellucid.evidence.qualities.borders import seams
from pellucid.evidence.qualities.colour import colourfulness, saturation
from pellucid.evidence.qualities.detail import residual_noise, sharpness
from pellucid.evidence.qualities.variety import diversity

__all__ = [
    "bled",
    "bleeding",
    "colourfulness",
    "diversity",
    "residual_noise",
    "saturation",
    "seams",
    "sharpness",
]
