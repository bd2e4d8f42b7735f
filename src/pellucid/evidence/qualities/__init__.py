"""What can be measured of finished pictures without a reference: one number a picture, (N,) float64.

Pictures are (N, 3, H, W): floats in [0, 1], or bytes from 0 to 255. What each measure keeps still is in its docstring.
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
