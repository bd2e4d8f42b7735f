"""The memory and speed policy: one object, each field named with what it reduces and what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.pipeline.request import SPEED, flag

if TYPE_CHECKING:
    import torch

Offload = Literal["none", "component", "block"]
_OFFLOADS: tuple[Offload, ...] = get_args(Offload)
ON_CPU = ("auto", "flash", "math")  # the attention kernels that torch has for a CPU
LEAST_TILE = 16
FAST = ("channels_last", "fused", "graphs")  # what a policy does on CUDA unless it is told not to


class Effect(NamedTuple):
    """What a field of the policy does, when it is set."""

    reduces: str
    costs: str


EFFECTS = {
    "attention": Effect(
        "time, and with a fused kernel the maps of attention (length²); `math` holds them all",
        "memory with math; rounding differs between kernels",
    ),
    "vae_slicing": Effect(
        "activations of decoding, to those of one image", "a little time; nothing for a single image"
    ),
    "vae_tile": Effect(
        "activations of decoding and encoding, to bands of tile × tile latents and one image held",
        "1.2 to 2 times the time of decoding; the image is the untiled one except for rounding",
    ),
    "channels_last": Effect(
        "the copies that half-precision convolutions make of their input and output on a GPU, and their time",
        "a copy for each norm; on a CPU often time",
    ),
    "offload": Effect(
        "weights on the device: to the networks of one stage (component), or to one block of the denoiser (block)",
        "the weights cross the bus once a run (component), or once a step (block)",
    ),
    "compile": Effect("time of a step", "the first call of each shape, which compiles for a minute or more"),
    "without": Effect(
        "what the fast path on CUDA holds: graphs keep the activations of one call from run to run",
        "time: channels_last, fused (kernels that do several operations at once) and graphs (one launch per step)",
    ),
    "dtype": Effect(
        "weights and activations, by half from float32, and in fp8 the large linear layers by half again, and the "
        "time of their products; chosen when the model is loaded",
        "precision: 8 bits in bfloat16, 4 in the layers in fp8",
    ),
}


@dataclass(frozen=True)
class Policy:
    """How a pipeline spends memory and time. The default spends memory; `EFFECTS` says what each field changes.

    attention: the kernel of every attention. vae_slicing: images are decoded one at a time. vae_tile: latents a tile
    side when decoding and encoding, None for the whole image. channels_last: convolutions with the channels
    innermost. offload: networks wait on the CPU, whole or block by block, and come to the device when they are used.
    compile: the denoising network through torch.compile, for networks that have no fused operations. without: parts
    of the fast path on CUDA to leave out, of channels_last, fused and graphs. The dtype is the model's, chosen when it
    is loaded.
    """

    attention: str = flag("--attention", "NAME", "Attention: auto, flash, efficient, cudnn or math.", SPEED, "auto")
    vae_slicing: bool = flag("--vae-slicing", "", "Decode images one at a time.", SPEED, False, bool)
    vae_tile: int | None = flag("--vae-tile", "N", "Decode in tiles of N × N latents.", SPEED, kind=int)
    channels_last: bool = flag(
        "--channels-last", "", "Store activations with the channels innermost.", SPEED, False, bool
    )
    offload: Offload = flag(
        "--offload", "HOW", "Keep idle networks on the CPU: none, component or block.", SPEED, "none"
    )
    compile: bool = flag("--compile", "", "Compile the denoising network with torch.compile.", SPEED, False, bool)
    without: tuple[str, ...] = flag(
        "--without", "PARTS", "Parts of the fast path on CUDA to leave out: channels_last,fused,graphs.", SPEED, ()
    )

    def __post_init__(self) -> None:
        from pellucid.models.attention import BACKENDS  # torch comes with it

        for name, known in (("attention", tuple(BACKENDS)), ("offload", _OFFLOADS)):
            value = getattr(self, name)
            if value not in known:
                hint = nearest(value, known) if isinstance(value, str) else ""
                raise PellucidError(rule(name, f"one of {', '.join(known)}", value, hint), "policy")
        for name in ("vae_slicing", "channels_last", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise PellucidError(rule(name, "True or False", getattr(self, name)), "policy")
        without: Any = self.without  # a text where the command line gave it
        given = without.split(",") if isinstance(without, str) else list(without)
        for part in (part.strip() for part in given):
            if part not in FAST:
                raise PellucidError(rule("without", f"of {', '.join(FAST)}", part, nearest(part, FAST)), "policy")
        object.__setattr__(self, "without", tuple(part for part in FAST if part in {p.strip() for p in given}))
        tile = self.vae_tile
        if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < LEAST_TILE):
            raise PellucidError(rule("vae_tile", f"None or at least {LEAST_TILE} latents", tile), "policy")
        if self.compile and self.offload == "block":
            advice = "A compiled network runs as a whole: use offload='component'."
            raise PellucidError(rule("compile", "False with offload='block'", True, advice), "policy")

    def check(self, device: torch.device) -> None:
        """Refuses what the device cannot do, or where it would do nothing."""
        if device.type != "cpu":
            return
        if self.offload != "none":
            must = "none on the CPU, where the networks are already"
            raise PellucidError(rule("offload", must, self.offload), "policy")
        if self.attention not in ON_CPU:
            raise PellucidError(rule("attention", f"one of {', '.join(ON_CPU)} on the CPU", self.attention), "policy")

    def does(self, part: str, device: torch.device) -> bool:
        """Whether a part of the fast path is taken on a device."""
        if part == "channels_last" and self.channels_last:
            return True
        by_hand = self.compile or self.offload != "none"  # the weights move, or the code is made from the plain form
        return device.type == "cuda" and part not in self.without and not (part == "graphs" and by_hand)

    def ready(self, network: Any) -> Any:
        """The denoising network as the policy wants it called: compiled, or as it is.

        torch keeps compiled code by the code that it was made from, so a view of a network (LoRA) and the next run
        use what the first call compiled.
        """
        import torch

        return torch.compile(network, fullgraph=True) if self.compile else network

    def to_dict(self) -> dict[str, Any]:
        """What differs from the default."""
        plain = Policy()
        return {f.name: asdict(self)[f.name] for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)}

    def text(self) -> str:
        """What differs from the default, in words: "vae_tile=64, offload=block"."""
        return ", ".join(f"{name}={value}" for name, value in self.to_dict().items()) or "default"

    def effects(self) -> dict[str, Effect]:
        """What the fields that are set reduce, and what they cost."""
        return {name: EFFECTS[name] for name in self.to_dict()}
