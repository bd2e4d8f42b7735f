"""Images as CLIP's vision encoder takes them: shorter side to its size, the middle, its mean and deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pellucid.pipeline import images

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def clip_pixels(images: Sequence[Any], size: int = 224) -> Tensor:
    """(N, 3, size, size), normalised as CLIP was trained (Radford et al. 2021)."""
    return torch.stack([one(image, size) for image in images])


def one(image: Any, size: int) -> Tensor:
    rgb = images.as_image(image, "image prompt") or images.to_images(images.to_tensor(image))[0]
    deep = rgb.mode.startswith("I")  # 16 bits, which PIL's own conversion would clip at 255
    rgb = images.flatten(rgb) if deep else rgb.convert("RGB")
    short = min(rgb.size)
    width, height = (int(side * size / short) for side in rgb.size)
    rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    rgb = rgb.crop((left, top, left + size, top + size))
    pixels = torch.from_numpy(np.asarray(rgb).astype(np.float32) / 255).permute(2, 0, 1)  # (3, S, S)
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
