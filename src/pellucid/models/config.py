"""Configs: frozen dataclasses whose fields are the keys of diffusers' config.json, read strictly and written back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, Protocol, TypeVar

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.reader import Bound, hints_of, typed


class Config(Protocol):
    """A dataclass; FIXED names the keys that exist in the wild but are supported at these values only."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]]

    def __init__(self, **values: Any) -> None: ...


_C = TypeVar("_C", bound=Config)


# The least and the most of every number in a config, far beyond any network that there is: checked before one is built.
_LAYERS, _CHANNELS, _SIDE, _ENTRIES = (1, 1_000), (1, 65_536), (1, 16_384), (1, 10_000_000)
_BOUNDS: dict[str, Bound] = {
    **dict.fromkeys(("num_layers", "num_hidden_layers"), _LAYERS),
    **dict.fromkeys(("layers_per_block", "upsampling_scaling_factor"), (1, 100)),
    **dict.fromkeys(
        (
            "transformer_layers_per_block", "reverse_transformer_layers_per_block", "num_encoder_blocks",
            "num_decoder_blocks", "downsample_padding",
        ),
        (0, 100),
    ),
    **dict.fromkeys(("conv_in_kernel", "conv_out_kernel"), (1, 99)),
    **dict.fromkeys(
        (
            "in_channels", "out_channels", "latent_channels", "num_channels", "block_out_channels",
            "encoder_block_out_channels", "decoder_block_out_channels", "conditioning_channels",
            "conditioning_embedding_out_channels", "cross_attention_dim", "caption_channels", "encoder_hid_dim",
            "time_embedding_dim", "time_cond_proj_dim", "addition_time_embed_dim", "addition_embed_type_num_heads",
            "projection_class_embeddings_input_dim", "hidden_size", "intermediate_size", "projection_dim",
            "attention_head_dim", "num_attention_heads", "norm_num_groups", "attn_norm_num_groups",
        ),
        _CHANNELS,
    ),
    **dict.fromkeys(("sample_size", "image_size", "patch_size"), _SIDE),
    **dict.fromkeys(
        ("vocab_size", "max_position_embeddings", "num_class_embeds", "num_embeds_ada_norm", "num_train_timesteps"),
        _ENTRIES,
    ),
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), (-1, 10_000_000)),
    **dict.fromkeys(("norm_eps", "layer_norm_eps", "dropout"), (0, 1)),
    **dict.fromkeys(("scaling_factor", "latents_std", "latent_magnitude", "mid_block_scale_factor"), (1e-6, 1e6)),
}  # fmt: skip
_ANY_NUMBER: Bound = (-1e6, 1e6)
_MAX_BLOCKS = 64  # of a list: levels, and what they have each


def frozen(value: Any) -> Any:
    return tuple(frozen(v) for v in value) if isinstance(value, list | tuple) else value


def read(cls: type[_C], raw: Mapping[str, Any]) -> _C:
    """A config from a parsed config.json. A key that would have an effect but is unknown here is an error, as is a
    value of another type than its field's, or out of its bounds."""
    owner = str(raw.get("_class_name", cls.__name__))[:80]
    known = {f.name: f for f in fields(cls)}
    hints = hints_of(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key.startswith("_"):
            continue
        if key in known:
            values[key] = of_field(hints[key], key, value, f"{key} of {owner}")
        elif key in cls.FIXED:
            if frozen(value) not in cls.FIXED[key]:
                allowed = " or ".join(repr(v) for v in cls.FIXED[key])
                raise PellucidError(rule(f"{key} of {owner}", allowed, value), "config-unsupported")
        elif value is not None and value is not False:
            hint = nearest(key[:80], [*known, *cls.FIXED])
            raise PellucidError(rule(f"{key[:80]} of {owner}", "a known config key", value, hint), "config-key")
    missing = [k for k, f in known.items() if k not in values and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise PellucidError(f"config of {owner} must have {', '.join(missing)}; got none.", "config-missing")
    return cls(**values)


def of_field(hint: Any, key: str, value: Any, where: str) -> Any:
    """A value of a config, of its field's type and in its bounds; null is false, as diffusers has it."""
    if value is None and hint is bool:
        return None
    if isinstance(value, list | tuple) and len(value) > _MAX_BLOCKS and key not in ("latents_mean", "latents_std"):
        raise PellucidError(rule(where, f"a list of at most {_MAX_BLOCKS}", len(value)), "config-length")
    return typed(hint, value, where, _BOUNDS.get(key, _ANY_NUMBER))


def check_fields(config: Config) -> None:
    """Types and bounds of a config that was made in Python: the same as those of one that was read."""
    hints = hints_of(type(config))
    for f in fields(config):
        of_field(hints[f.name], f.name, getattr(config, f.name), f"{f.name} of {type(config).__name__}")


def per_block(value: Any, count: int) -> tuple[Any, ...]:
    """One value for all blocks, or one a block."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise PellucidError(rule("a value a block", f"{count} values", value), "config-length")
        return tuple(value)
    return (value,) * count
