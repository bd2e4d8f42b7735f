"""The configs of CLIP's encoders: transformers' keys and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.models.config import check_fields, read

_ACTIVATION_NAMES = ("quick_gelu", "gelu")


class _AnyValue(tuple[Any, ...]):
    """The allowed values of a key that no forward reads."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return True


_ANY_VALUE = _AnyValue()

# transformers writes its whole base config: settings of text generation, of training, of what a call returns. None of
# them reaches the forward of an encoder, so a checkpoint may say what it likes.
_UNREAD = """
add_cross_attention attention_dropout attn_implementation bad_words_ids begin_suppress_tokens
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dropout dtype
early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
forced_eos_token_id gradient_checkpointing id2label initializer_factor initializer_range is_decoder
is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p
torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache
""".split()  # noqa: SIM905


def _fixed(model_type: str) -> Mapping[str, tuple[Any, ...]]:
    return {
        **dict.fromkeys(_UNREAD, _ANY_VALUE),
        "model_type": (model_type,),
        "pruned_heads": ({}, None),
        "use_attention_mask": (False, None),  # diffusers would mask the padding
        "tie_last_hidden_states": (False, None),
    }


def _check(config: CLIPTextConfig | CLIPVisionConfig) -> None:
    """What both encoders ask of their config."""
    check_fields(config)
    owner = type(config).__name__
    if config.hidden_act not in _ACTIVATION_NAMES:
        allowed, hint = " or ".join(_ACTIVATION_NAMES), nearest(str(config.hidden_act), _ACTIVATION_NAMES)
        raise PellucidError(rule(f"hidden_act of {owner}", allowed, config.hidden_act, hint), "config-unsupported")
    if config.hidden_size % config.num_attention_heads:
        must = f"a multiple of num_attention_heads, {config.num_attention_heads}"
        raise PellucidError(rule(f"hidden_size of {owner}", must, config.hidden_size), "config-unsupported")


@dataclass(frozen=True)
class CLIPTextConfig:
    """`architectures` says whether the encoder ends in a projection."""

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = _fixed("clip_text_model")

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    eos_token_id: int = 49407
    bos_token_id: int | None = 49406  # no effect on the result, like the next: kept so that it can be written back
    pad_token_id: int | None = 1
    architectures: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def projected(self) -> bool:
        return "CLIPTextModelWithProjection" in (self.architectures or ())


@dataclass(frozen=True)
class CLIPVisionConfig:
    """`architectures` says whether the encoder ends in a projection."""

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = _fixed("clip_vision_model")

    hidden_size: int = 768
    intermediate_size: int = 3072
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    architectures: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def projected(self) -> bool:
        return "CLIPVisionModelWithProjection" in (self.architectures or ())


@dataclass(frozen=True)
class CLIPConfig:
    """Both encoders' configs as config.json nests them; the older *_config_dict keys win, as in transformers."""

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_fixed("clip"), "architectures": _ANY_VALUE}

    text_config: Mapping[str, Any] | CLIPTextConfig | None = None
    vision_config: Mapping[str, Any] | CLIPVisionConfig | None = None
    text_config_dict: Mapping[str, Any] | None = None
    vision_config_dict: Mapping[str, Any] | None = None
    projection_dim: int = 512
    logit_scale_init_value: float = 2.6592

    @property
    def text(self) -> CLIPTextConfig:
        given = self.text_config_dict if self.text_config_dict is not None else self.text_config
        return given if isinstance(given, CLIPTextConfig) else read(CLIPTextConfig, given or {})

    @property
    def vision(self) -> CLIPVisionConfig:
        given = self.vision_config_dict if self.vision_config_dict is not None else self.vision_config
        return given if isinstance(given, CLIPVisionConfig) else read(CLIPVisionConfig, given or {})
