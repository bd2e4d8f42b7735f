"""The config of UNets, and of ControlNets, which are a UNet's first half: diffusers' keys and defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import typed
from pellucid.models import config as configs
from pellucid.models.config import per_block

DOWN = {"CrossAttnDownBlock2D": "cross", "AttnDownBlock2D": "self", "DownBlock2D": None}
UP = {"CrossAttnUpBlock2D": "cross", "AttnUpBlock2D": "self", "UpBlock2D": None}
_MAX_BLOCKS = 1_000  # of the way down; SDXL has 66 by this count
MID = {"UNetMidBlock2DCrossAttn": "cross", "UNetMidBlock2D": "self", None: None}

# UNet2DModel, the unconditional pixel UNet, where its defaults differ.
_PIXEL_DEFAULTS: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2D",
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (224, 448, 672, 896),
    "cross_attention_dim": None,
}
_CONTROL_DEFAULTS: dict[str, Any] = {"in_channels": 4, "up_block_types": ()}


@dataclass(frozen=True)
class UNetConfig:
    """What a UNet is made of. `attention_head_dim` counts heads in cross-attention blocks: an old misnomer, kept."""

    class_name: str = "UNet2DConditionModel"
    sample_size: int | tuple[int, int] | None = None
    in_channels: int = 4
    out_channels: int = 4
    center_input_sample: bool = False
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    down_block_types: tuple[str, ...] = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    mid_block_type: str | None = "UNetMidBlock2DCrossAttn"
    up_block_types: tuple[str, ...] = ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3)
    only_cross_attention: bool | tuple[bool, ...] = False
    mid_block_only_cross_attention: bool | None = None
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int | tuple[int, ...] = 2
    downsample_padding: int = 1
    mid_block_scale_factor: float = 1.0
    dropout: float = 0.0
    norm_num_groups: int = 32
    attn_norm_num_groups: int | None = None
    norm_eps: float = 1e-5
    cross_attention_dim: int | tuple[int, ...] | None = 1280
    transformer_layers_per_block: int | tuple[int | tuple[int, ...], ...] = 1
    reverse_transformer_layers_per_block: tuple[int | tuple[int, ...], ...] | None = None
    encoder_hid_dim: int | None = None
    encoder_hid_dim_type: str | None = None
    attention_head_dim: int | tuple[int, ...] | None = 8
    num_attention_heads: int | tuple[int, ...] | None = None
    use_linear_projection: bool = False
    class_embed_type: str | None = None
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    num_class_embeds: int | None = None
    resnet_time_scale_shift: str = "default"
    time_embedding_dim: int | None = None
    time_cond_proj_dim: int | None = None
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3
    projection_class_embeddings_input_dim: int | None = None
    add_attention: bool = True
    # ControlNets alone
    conditioning_channels: int = 3
    conditioning_embedding_out_channels: tuple[int, ...] = (16, 32, 96, 256)
    controlnet_conditioning_channel_order: str = "rgb"
    # no effect on the result: kept so that what was read can be written
    upcast_attention: bool = False
    addition_embed_type_num_heads: int = 64
    num_train_timesteps: int | None = None

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "act_fn": ("silu", "swish"),
        "attention_type": ("default",),
        "class_embeddings_concat": (False,),
        "cross_attention_norm": (None,),
        "downsample_type": ("conv",),
        "dual_cross_attention": (False,),
        "global_pool_conditions": (False,),
        "resnet_out_scale_factor": (1.0,),
        "resnet_skip_time_act": (False,),
        "time_embedding_act_fn": (None,),
        "time_embedding_type": ("positional",),
        "timestep_post_act": (None,),
        "upsample_type": ("conv",),
    }

    def __post_init__(self) -> None:
        for names, known in ((self.down_block_types, DOWN), (self.up_block_types, UP), ((self.mid_block_type,), MID)):
            for name in names:
                if name not in known:
                    allowed = ", ".join(str(k) for k in known)
                    raise PellucidError(
                        rule(f"a block of {self.class_name}", f"one of {allowed}", name), "config-unsupported"
                    )
        for key, values in (
            ("class_embed_type", (None, "timestep", "identity", "projection", "simple_projection")),
            ("addition_embed_type", (None, "text_time")),
            ("encoder_hid_dim_type", (None, "text_proj")),
            ("resnet_time_scale_shift", ("default", "scale_shift")),
        ):
            if getattr(self, key) not in values:
                must = " or ".join(repr(v) for v in values)
                raise PellucidError(rule(f"{key} of {self.class_name}", must, getattr(self, key)), "config-unsupported")
        levels = len(self.down_block_types)
        if not levels or len(self.block_out_channels) != levels or len(self.up_block_types) not in (0, levels):
            raise PellucidError(
                rule("block_out_channels, up_block_types", f"as many as down_block_types ({levels})", self.class_name),
                "config-length",
            )
        self.check_heads()
        depths = (self.transformer_layers_per_block, self.reverse_transformer_layers_per_block or 0)
        blocks = sum(self.each("layers_per_block")) * (1 + max(_numbers_in(depths)))
        if blocks > _MAX_BLOCKS:
            must = f"of at most {_MAX_BLOCKS} blocks, layers_per_block × transformer_layers_per_block"
            raise PellucidError(rule(self.class_name, must, blocks), "config-value")

    def check_heads(self) -> None:
        """An attention has a head at least, and each head a channel."""
        middle = (len(self.block_out_channels) - 1, MID[self.mid_block_type])
        for level, kind in (*enumerate(DOWN[name] for name in self.down_block_types), middle):
            channels = self.block_out_channels[level]
            asked = self.heads[level] if kind == "cross" else self.each("attention_head_dim")[level]
            if kind is not None and asked is not None and asked > channels:
                must = f"at most {channels}, the channels of level {level}"
                raise PellucidError(rule(f"heads of {self.class_name}", must, asked), "config-value")

    @property
    def time_width(self) -> int:
        return self.time_embedding_dim or self.block_out_channels[0] * 4

    def each(self, name: str) -> tuple[Any, ...]:
        """A key's values, one a down block."""
        return per_block(getattr(self, name), len(self.down_block_types))

    @property
    def heads(self) -> tuple[Any, ...]:
        return self.each("num_attention_heads" if self.num_attention_heads is not None else "attention_head_dim")


def _numbers_in(nested: Any) -> Iterator[int]:
    for one in nested if isinstance(nested, tuple) else (nested,):
        yield from _numbers_in(one) if isinstance(one, tuple) else (one,)


def read(raw: Mapping[str, Any]) -> UNetConfig:
    """A config from the parsed config.json of a UNet2DConditionModel, a UNet2DModel or a ControlNetModel."""
    name = typed(str, raw.get("_class_name", "UNet2DConditionModel"), "_class_name of a UNet")
    defaults = {"UNet2DModel": _PIXEL_DEFAULTS, "ControlNetModel": _CONTROL_DEFAULTS}.get(name, {})
    values = {**defaults, **raw}
    if values.get("mid_block_scale_factor") is None:  # early configs say null for 1
        values.pop("mid_block_scale_factor", None)
    if name == "UNet2DModel" and values.get("norm_num_groups") is None:
        widths = configs.of_field(
            tuple[int, ...], "block_out_channels", values["block_out_channels"], f"block_out_channels of {name}"
        )
        values["norm_num_groups"] = max(min(widths[0] // 4, 32), 1) if widths else 1
    return configs.read(UNetConfig, {**values, "class_name": name, "_class_name": name})
