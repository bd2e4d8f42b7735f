"""The memory and speed policy: one object, each field named by what it reduces."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pellucid.core.errors import PellucidError, rule
from pellucid.models.attention import BACKENDS

Offload = Literal["none", "component", "block"]
OFFLOADS = ("none", "component", "block")


@dataclass(frozen=True)
class Policy:
    """How a pipeline spends memory and time. The default spends memory.

    attention: the kernel of every attention. vae_slicing: images are decoded one at a time. vae_tile: latents a tile
    side when decoding and encoding, None for the whole picture. channels_last: convolutions with the channels
    innermost. offload: networks wait on the CPU, whole or block by block, and come to the device when they are used.
    compile: the denoising network through torch.compile.
    """

    attention: str = "auto"
    vae_slicing: bool = False
    vae_tile: int | None = None
    channels_last: bool = False
    offload: Offload = "none"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.attention not in BACKENDS:
            raise PellucidError(rule("attention", f"one of {', '.join(BACKENDS)}", self.attention), "policy")
        if self.offload not in OFFLOADS:
            raise PellucidError(rule("offload", f"one of {', '.join(OFFLOADS)}", self.offload), "policy")
        if self.vae_tile is not None and not (isinstance(self.vae_tile, int) and self.vae_tile >= 16):
            raise PellucidError(rule("vae_tile", "None or at least 16 latents", self.vae_tile), "policy")

    def to_dict(self) -> dict[str, Any]:
        """What differs from the default."""
        plain = Policy()
        return {f.name: asdict(self)[f.name] for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)}
