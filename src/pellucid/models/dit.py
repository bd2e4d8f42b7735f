"""Diffusion transformers: DiT, told a class (Peebles & Xie 2022), and PixArt, told a text (Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models import config as configs
from pellucid.models import ops
from pellucid.models.attention import Attention, count_text, text_layers
from pellucid.models.dit_blocks import (
    Block,
    PatchConfig,
    Patches,
    check_batch,
    check_indices,
    check_latents,
    check_time,
    unpatch,
)
from pellucid.models.embeddings import LabelEmbedding, TimeMLP, sinusoid
from pellucid.models.hoist import HoistedInputs, hoist
from pellucid.models.inputs import Inputs

_WAVES = 256  # channels of the sinusoid of a time or of a size
_NORM_EPS = 1e-6  # of the norms whose epsilon is no config key
_B = TypeVar("_B", bound=Block)


@dataclass(frozen=True, kw_only=True)
class DiTConfig(PatchConfig):
    """Keys and defaults of diffusers' DiTTransformer2DModel."""

    num_embeds_ada_norm: int = 1000

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PatchConfig.FIXED,
        "norm_type": ("ada_norm_zero",),
        "cross_attention_dim": (None,),
        "caption_channels": (None,),
        "interpolation_scale": (None, 1),
        "use_additional_conditions": (None, False),
    }

    @property
    def null_label(self) -> int:
        """The label that means "no class": the unconditional side of guidance."""
        return self.num_embeds_ada_norm


@dataclass(frozen=True, kw_only=True)
class PixArtConfig(PatchConfig):
    """Keys and defaults of diffusers' PixArtTransformer2DModel."""

    out_channels: int | None = 8
    sample_size: int = 128
    norm_eps: float = 1e-6
    cross_attention_dim: int = 1152
    caption_channels: int | None = None  # width of the text states; None: they come as wide as cross_attention_dim
    interpolation_scale: float | None = None
    use_additional_conditions: bool | None = None
    num_embeds_ada_norm: int | None = 1000  # without effect; kept because diffusers refuses a config without it

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**PatchConfig.FIXED, "norm_type": ("ada_norm_single",)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.caption_channels and self.cross_attention_dim != self.width:
            advice = "Captions are projected to the network's own width."
            raise PellucidError(
                rule("cross_attention_dim", f"{self.width}", self.cross_attention_dim, advice), "config-value"
            )
        if self.takes_sizes and self.width % 3:
            text = rule("num_attention_heads · attention_head_dim", "a multiple of 3", self.width)
            raise PellucidError(text + " Height, width and aspect ratio take a third each.", "config-value")

    @property
    def position_scale(self) -> float:
        return self.interpolation_scale or max(self.sample_size // 64, 1)

    @property
    def takes_sizes(self) -> bool:
        """Whether height, width and aspect ratio are told; unsaid, the 1024-pixel networks are."""
        return self.sample_size == 128 if self.use_additional_conditions is None else self.use_additional_conditions


class ClassEmbedder(nn.Module):
    """Time and class as one vector."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimeMLP(_WAVES, width)
        self.class_embedder = LabelEmbedding(num_classes, width)

    def forward(self, wave: Tensor, labels: Tensor) -> Tensor:
        return self.timestep_embedder(wave) + self.class_embedder(labels)  # (B, D)


class ClassBlock(Block):
    """adaLN-Zero: each block reads time and class with weights of its own, under the name norm1."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config, eps=(_NORM_EPS, config.norm_eps))
        embedder = ClassEmbedder(config.num_embeds_ada_norm, config.width)
        self.norm1 = nn.ModuleDict({"emb": embedder, "linear": nn.Linear(config.width, 6 * config.width)})


class DiT(nn.Module):
    """A transformer over latent patches that is told the time and a class."""

    CONDITIONS: ClassVar[tuple[str, ...]] = ("labels",)

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.pos_embed = Patches(config)
        self.transformer_blocks = nn.ModuleList(ClassBlock(config) for _ in range(config.num_layers))
        self.proj_out_1 = nn.Linear(config.width, 2 * config.width)
        self.proj_out_2 = nn.Linear(config.width, config.patch_size**2 * config.channels_out)

    def forward(
        self,
        x: Tensor,  # (B, C, H, W)
        time: Tensor | None = None,  # (B,)
        *,
        labels: Tensor | None = None,  # (B,)
        perturbed: tuple[int, ...] = (),
        skipped: tuple[int, ...] = (),
        hoisted: Tensor | None = None,  # (B, S): in place of time and labels, from `hoist`
    ) -> Tensor:
        """(B, out_channels, H, W). The self-attention of `perturbed` blocks is the identity; `skipped` are left out."""
        check_latents(x, self.config)
        if hoisted is None:
            labels = self.check_label_shape(labels, x.shape[0])
            hoisted = self.time_rows(check_time(time, x.shape[0]), labels=labels)
        rows = hoisted.split_with_sizes(self.row_widths, dim=1)
        patch, (height, width) = self.config.patch_size, x.shape[-2:]
        x, update = self.pos_embed(x), None  # (B, L, D)
        for index, block in _walk(cast("Sequence[ClassBlock]", self.transformer_blocks), perturbed, skipped):
            x, update = block(x, update, rows[index], identity=index in perturbed)
        shift, scale = rows[-1].chunk(2, dim=1)  # (B, D) each
        _, last = ops.residual_modulate(x, update, shift, scale, _NORM_EPS)
        return unpatch(ops.linear(last, self.proj_out_2), height // patch, width // patch, patch)

    @property
    def row_widths(self) -> tuple[int, ...]:
        return (6 * self.config.width,) * self.config.num_layers + (2 * self.config.width,)

    def hoisted_layers(self) -> tuple[list[nn.Linear]]:
        """What reads the time, where all blocks read it through one embedder."""
        norms = [block.norm1 for block in cast("Sequence[ClassBlock]", self.transformer_blocks)]
        return ([cast(nn.Linear, norm["linear"]) for norm in norms] + [self.proj_out_1],)

    def time_rows(self, time: Tensor, *, labels: Tensor) -> Tensor:
        """(T, S): the modulation (6 · D) of every block for times and labels (T,), and the last one (2 · D)."""
        wave = sinusoid(time.reshape(-1), _WAVES, shift=1).to(self.proj_out_2.weight.dtype)  # (T, 256), for all blocks
        embedders = [block.norm1["emb"] for block in cast("Sequence[ClassBlock]", self.transformer_blocks)]
        (layers,) = self.hoisted_layers()
        ends = F.silu(embedders[0](wave, labels))  # (T, D)
        if all(embedder is embedders[0] for embedder in embedders):  # see share_embedders
            return ops.beside(ends, *layers)
        conditions = [ends, *(F.silu(embedder(wave, labels)) for embedder in embedders[1:]), ends]
        return torch.cat([layer(told) for layer, told in zip(layers, conditions, strict=True)], dim=1)

    def text_tokens(self, context: Tensor) -> Any:
        raise PellucidError(rule("context", "left out of the inputs of a DiT", tuple(context.shape)), "network-input")

    def hoist(self, times: Tensor, inputs: Inputs) -> HoistedInputs | None:
        """What depends on the labels and the times (U,) alone, once for a run: see `hoist`."""
        return hoist(self, times, inputs)

    def check_label_shape(self, labels: Tensor | None, batch: int) -> Tensor:
        if labels is None or labels.is_floating_point():
            advice = f"The label {self.config.null_label} means no class."
            got = None if labels is None else labels.dtype
            raise PellucidError(rule("labels", "one integer an image", got, advice), "network-input")
        check_batch("labels", labels, batch)
        return labels

    def share_embedders(self) -> bool:
        """Keep one embedder where all blocks hold the same one, as in the published weights; says whether they did."""
        blocks = cast("Sequence[ClassBlock]", self.transformer_blocks)
        first, *others = (block.norm1["emb"] for block in blocks)
        state = first.state_dict()
        same = all(torch.equal(state[name], value) for emb in others for name, value in emb.state_dict().items())
        if same:
            for block in blocks:
                block.norm1["emb"] = first
        return same


class SizeEmbedder(nn.Module):
    """Time and, where `takes_sizes`, the height, width and aspect ratio of the image as one vector."""

    def __init__(self, config: PixArtConfig) -> None:
        super().__init__()
        self.timestep_embedder = TimeMLP(_WAVES, config.width)
        self.resolution_embedder = TimeMLP(_WAVES, config.width // 3) if config.takes_sizes else None
        self.aspect_ratio_embedder = TimeMLP(_WAVES, config.width // 3) if config.takes_sizes else None

    def forward(self, time: Tensor, sizes: Tensor | None, dtype: torch.dtype) -> Tensor:
        vector = self.timestep_embedder(sinusoid(time, _WAVES).to(dtype))  # (B, D)
        if sizes is None or self.resolution_embedder is None or self.aspect_ratio_embedder is None:
            return vector
        resolution, aspect = torch.split(sinusoid(sizes, _WAVES).to(dtype), [2, 1], dim=1)  # (B, 2, 256), (B, 1, 256)
        thirds = [self.resolution_embedder(resolution), self.aspect_ratio_embedder(aspect)]
        return vector + torch.cat(thirds, dim=1).flatten(1)  # (B, 3 · D/3)


class TextBlock(Block):
    """adaLN-single: one modulation for the whole network, and a table of its own to add to it."""

    def __init__(self, config: PixArtConfig) -> None:
        super().__init__(config, eps=(config.norm_eps, config.norm_eps), context=config.cross_attention_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(6, config.width) / config.width**0.5)


class CaptionProjection(nn.Module):
    """Text states brought to the network's width."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_width, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, context: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(context), approximate="tanh"))


class PixArt(nn.Module):
    """A transformer over latent patches that is told the time and a text, and by some weights the image's size."""

    CONDITIONS: ClassVar[tuple[str, ...]] = ("sizes",)

    def __init__(self, config: PixArtConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.pos_embed = Patches(config)
        self.transformer_blocks = nn.ModuleList(TextBlock(config) for _ in range(config.num_layers))
        self.adaln_single = nn.ModuleDict({"emb": SizeEmbedder(config), "linear": nn.Linear(width, 6 * width)})
        captions = config.caption_channels
        self.caption_projection = CaptionProjection(captions, width) if captions else nn.Identity()
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.proj_out = nn.Linear(width, config.patch_size**2 * config.channels_out)
        count_text(self.text_attentions())

    def forward(
        self,
        x: Tensor,  # (B, C, H, W)
        time: Tensor | None = None,  # (B,)
        context: Tensor | None = None,  # (B, S, caption_channels)
        *,
        context_mask: Tensor | None = None,  # (B, S): 1 where a token is seen
        sizes: Tensor | None = None,  # (B, 3): height and width in pixels, height / width
        perturbed: tuple[int, ...] = (),
        skipped: tuple[int, ...] = (),
        text: Tensor | None = None,  # (B, S, K): in place of context, from `hoist`
        hoisted: Tensor | None = None,  # (B, S): in place of time and sizes
    ) -> Tensor:
        """(B, out_channels, H, W). The self-attention of `perturbed` blocks is the identity; `skipped` are left out."""
        check_latents(x, self.config)
        if text is None:
            context = self.caption_projection(self.check_context(context, context_mask, x.shape[0]))  # (B, S, D)
        if hoisted is None:
            self.check_sizes(sizes, x.shape[0])
            hoisted = self.time_rows(check_time(time, x.shape[0]), sizes=sizes)
        rows = hoisted.split_with_sizes(self.row_widths, dim=1)
        patch, (height, width) = self.config.patch_size, x.shape[-2:]
        x, update = self.pos_embed(x), None  # (B, L, D)
        # added to the logits; finite, so that a text without any token seen is no division by zero
        mask = None if context_mask is None else (1 - context_mask[:, None, None].to(x.dtype)) * -10000.0
        for index, block in _walk(cast("Sequence[TextBlock]", self.transformer_blocks), perturbed, skipped):
            x, update = block(x, update, rows[index], context, mask, identity=index in perturbed, text=text)
        shift, scale = rows[-1].chunk(2, dim=1)  # (B, D) each
        _, last = ops.residual_modulate(x, update, shift, scale, _NORM_EPS)
        return unpatch(ops.linear(last, self.proj_out), height // patch, width // patch, patch)

    @property
    def row_widths(self) -> tuple[int, ...]:
        return (6 * self.config.width,) * self.config.num_layers + (2 * self.config.width,)

    def time_rows(self, time: Tensor, *, sizes: Tensor | None = None) -> Tensor:
        """(T, S): the modulation (6 · D) of every block for times (T,) and sizes (T, 3), and the last one (2 · D)."""
        condition = self.adaln_single["emb"](time.reshape(-1), sizes, self.proj_out.weight.dtype)  # (T, D)
        modulation = self.adaln_single["linear"](F.silu(condition)).unflatten(-1, (6, -1))  # (T, 6, D)
        blocks = cast("Iterable[TextBlock]", self.transformer_blocks)
        rows = [(block.scale_shift_table + modulation).flatten(1) for block in blocks]
        return torch.cat([*rows, (self.scale_shift_table + condition[:, None]).flatten(1)], dim=1)

    def text_attentions(self) -> list[Attention]:
        return [cast(Attention, block.attn2) for block in cast("Iterable[TextBlock]", self.transformer_blocks)]

    def hoisted_layers(self) -> tuple[list[nn.Linear]]:
        """What reads the text."""
        return (text_layers(self.text_attentions()),)

    def text_tokens(self, context: Tensor) -> Tensor:
        context = self.caption_projection(self.check_context(context, None, len(context)))  # (N, S, D)
        return ops.beside(context, *self.hoisted_layers()[0])

    def hoist(self, times: Tensor, inputs: Inputs) -> HoistedInputs | None:
        """What depends on the text alone or on the sizes and times (U,) alone, once for a run: see `hoist`."""
        return hoist(self, times, inputs)

    def check_context(self, context: Tensor | None, mask: Tensor | None, batch: int) -> Tensor:
        width = self.config.caption_channels or self.config.cross_attention_dim
        if context is None or context.ndim != 3 or context.shape[0] != batch or context.shape[2] != width:
            got = None if context is None else tuple(context.shape)
            raise PellucidError(rule("the shape of context", f"({batch}, tokens, {width})", got), "network-input")
        if mask is not None and mask.shape != context.shape[:2]:
            must = str(tuple(context.shape[:2]))
            raise PellucidError(rule("the shape of context_mask", must, tuple(mask.shape)), "network-input")
        return context

    def check_sizes(self, sizes: Tensor | None, batch: int) -> None:
        if (sizes is not None) != self.config.takes_sizes or (sizes is not None and sizes.shape != (batch, 3)):
            must = f"({batch}, 3): height, width, height / width" if self.config.takes_sizes else "None"
            got = None if sizes is None else tuple(sizes.shape)
            raise PellucidError(rule("the shape of sizes", must, got), "network-input")


def _walk(blocks: Sequence[_B], perturbed: tuple[int, ...], skipped: tuple[int, ...]) -> Iterator[tuple[int, _B]]:
    """The blocks that are not skipped, with their indices."""
    check_indices("perturbed", perturbed, len(blocks))
    check_indices("skipped", skipped, len(blocks))
    return ((index, block) for index, block in enumerate(blocks) if index not in skipped)


# Before diffusers 0.29 both were saved as Transformer2DModel, whose own defaults hold for what its config leaves out.
_TRANSFORMER_2D = {
    "attention_head_dim": 88,
    "out_channels": None,
    "num_layers": 1,
    "attention_bias": False,
    "activation_fn": "geglu",
    "norm_type": "layer_norm",
    "norm_elementwise_affine": True,
    "norm_eps": 1e-5,
    "cross_attention_dim": None,
}
_NORM_TYPES: dict[str, type[DiTConfig] | type[PixArtConfig]] = {
    "ada_norm_zero": DiTConfig,
    "ada_norm_single": PixArtConfig,
}
CLASSES = {"DiTTransformer2DModel": "ada_norm_zero", "PixArtTransformer2DModel": "ada_norm_single"}


def read(raw: Mapping[str, Any]) -> DiTConfig | PixArtConfig:
    """The config of a diffusers folder, of the classes of today or as a Transformer2DModel."""
    name = raw.get("_class_name", "DiTTransformer2DModel")
    if name == "Transformer2DModel":
        raw = {**_TRANSFORMER_2D, **raw}
    norm_type = raw.get("norm_type", CLASSES.get(name) if isinstance(name, str) else None)
    if not isinstance(norm_type, str) or norm_type not in _NORM_TYPES:
        raise PellucidError(rule(f"norm_type of {name}", " or ".join(_NORM_TYPES), norm_type), "config-unsupported")
    return configs.read(_NORM_TYPES[norm_type], raw)


def build(config: DiTConfig | PixArtConfig) -> DiT | PixArt:
    return DiT(config) if isinstance(config, DiTConfig) else PixArt(config)
