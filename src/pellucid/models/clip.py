"""CLIP: the text encoders of Stable Diffusion, the vision encoder of image prompts, and the pair that scores both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models.attention import attend, join_heads, split_heads
from pellucid.models.clip_config import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from pellucid.models.lora import view


def _quick_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x): OpenAI's approximation of GELU, which its weights were trained with."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"quick_gelu": _quick_gelu, "gelu": F.gelu}
LEGACY_EOS = 2  # old configs say 2 whatever the vocabulary: then the end of the text is the highest id


class TextStates(NamedTuple):
    """What a prompt became."""

    hidden: tuple[Tensor, ...]  # (B, L, D) each: the embeddings, then the output of every layer
    last: Tensor  # (B, L, D), the last of them after the final norm
    pooled: Tensor  # (B, P) of the end-of-text token, projected where the network has a projection, else (B, D)


class VisionStates(NamedTuple):
    """What an image became."""

    hidden: tuple[Tensor, ...]  # (B, 1 + patches, D) each
    last: Tensor  # (B, 1 + patches, D), the last of them: no norm
    pooled: Tensor  # (B, P) of the class token after the final norm, projected where there is a projection


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(project(x), self.heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(join_heads(attend(q, k, v, causal=self.causal)))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, *, causal: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn = SelfAttention(width, config.num_attention_heads, causal=causal)
        self.layer_norm1 = nn.LayerNorm(width, eps=eps)
        self.mlp = MLP(width, config.intermediate_size, config.hidden_act)
        self.layer_norm2 = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Layers(nn.Module):
    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, *, causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, causal=causal) for _ in range(config.num_hidden_layers)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return tuple(hidden)


class TextEmbeddings(nn.Module):
    def __init__(self, config: CLIPTextConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        longest, length = self.position_embedding.num_embeddings, tokens.shape[1]
        if length > longest:
            raise PellucidError(rule("length of the tokens", f"at most {longest}", length), "text-length")
        return self.token_embedding(tokens) + self.position_embedding.weight[:length]  # (B, L, D)


class TextTransformer(nn.Module):
    def __init__(self, config: CLIPTextConfig) -> None:
        super().__init__()
        self.embeddings = TextEmbeddings(config)
        self.encoder = Layers(config, causal=True)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.eos = config.eos_token_id

    def forward(self, tokens: Tensor) -> TextStates:
        hidden = self.encoder(self.embeddings(tokens))  # N + 1 × (B, L, D)
        last = self.final_layer_norm(hidden[-1])  # (B, L, D)
        marks = tokens if self.eos == LEGACY_EOS else (tokens == self.eos).int()  # (B, L)
        end = marks.argmax(-1)  # (B,), the first of equals
        return TextStates(hidden, last, last[torch.arange(len(tokens), device=last.device), end])


class VisionEmbeddings(nn.Module):
    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        self.size = config.image_size
        self.class_embedding = nn.Parameter(torch.randn(config.hidden_size))
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, config.patch_size, stride=config.patch_size, bias=False
        )
        self.position_embedding = nn.Embedding((self.size // config.patch_size) ** 2 + 1, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        want = (self.patch_embedding.in_channels, self.size, self.size)
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != want:
            raise PellucidError(rule("shape of an image for CLIP", f"(batch, {want})", tuple(pixels.shape)), "shape")
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))  # (B, D, H/p, W/p)
        first = self.class_embedding.expand(len(pixels), 1, -1)  # (B, 1, D)
        return torch.cat([first, patches.flatten(2).transpose(1, 2)], dim=1) + self.position_embedding.weight


class VisionTransformer(nn.Module):
    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)  # misspelt in every checkpoint
        self.encoder = Layers(config, causal=False)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixels: Tensor) -> VisionStates:
        hidden = self.encoder(self.pre_layrnorm(self.embeddings(pixels)))  # N + 1 × (B, 1 + patches, D)
        return VisionStates(hidden, hidden[-1], self.post_layernorm(hidden[-1][:, 0]))


class CLIPTextEncoder(nn.Module):
    """transformers' CLIPTextModel, or CLIPTextModelWithProjection where the config, or `projection`, says so."""

    def __init__(self, config: CLIPTextConfig, *, projection: bool | None = None) -> None:
        super().__init__()
        projected = config.projected if projection is None else projection
        # The class is named, so that a saved config.json says what it is.
        self.config = replace(config, architectures=("CLIPTextModelWithProjection" if projected else "CLIPTextModel",))
        self.text_model = TextTransformer(config)
        self.text_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False) if projected else None

    def forward(self, tokens: Tensor) -> TextStates:
        states = self.text_model(tokens)  # tokens (B, L) int64
        if self.text_projection is None:
            return states
        return states._replace(pooled=self.text_projection(states.pooled))

    def with_tokens(self, ids: list[int], vectors: Tensor, eos: int) -> CLIPTextEncoder:
        """A view of this encoder with these rows (len(ids), D) in its table of tokens; all else is shared."""
        table = self.text_model.embeddings.token_embedding.weight.detach()
        size, width = table.shape
        if vectors.shape[-1] != width:
            raise PellucidError(rule("width of the vectors", f"{width}, the encoder's", vectors.shape[-1]), "width")
        larger = torch.cat([table, table.new_zeros(max(0, max(ids, default=0) + 1 - size), width)])
        larger[ids] = vectors.to(larger)
        twin = view(self, {"text_model.embeddings.token_embedding": {"weight": larger}})
        twin.text_model.embeddings.token_embedding.num_embeddings = len(larger)
        # Under the legacy rule a new token, having the highest id, would pass for the end of the text.
        legacy = self.config.eos_token_id == LEGACY_EOS and eos == size - 1
        twin.config = replace(
            self.config, vocab_size=len(larger), eos_token_id=eos if legacy else self.config.eos_token_id
        )
        twin.text_model.eos = twin.config.eos_token_id
        return twin


class CLIPVisionEncoder(nn.Module):
    """transformers' CLIPVisionModel, or CLIPVisionModelWithProjection where the config, or `projection`, says so."""

    def __init__(self, config: CLIPVisionConfig, *, projection: bool | None = None) -> None:
        super().__init__()
        projected = config.projected if projection is None else projection
        # The class is named, so that a saved config.json says what it is.
        self.config = replace(
            config, architectures=("CLIPVisionModelWithProjection" if projected else "CLIPVisionModel",)
        )
        self.vision_model = VisionTransformer(config)
        self.visual_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False) if projected else None

    def forward(self, pixels: Tensor) -> VisionStates:
        states = self.vision_model(pixels)  # pixels (B, C, H, W)
        if self.visual_projection is None:
            return states
        return states._replace(pooled=self.visual_projection(states.pooled))


class CLIP(nn.Module):
    """Both encoders in one space: transformers' CLIPModel."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.config = config
        text, vision = config.text, config.vision
        self.text_model = TextTransformer(text)
        self.vision_model = VisionTransformer(vision)
        self.visual_projection = nn.Linear(vision.hidden_size, config.projection_dim, bias=False)
        self.text_projection = nn.Linear(text.hidden_size, config.projection_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(float(config.logit_scale_init_value)))

    def vision_encoder(self) -> CLIPVisionEncoder:
        """Its vision half with the projection, as an encoder of its own; the weights are the same tensors."""
        with torch.device("meta"):
            settings = replace(self.config.vision, projection_dim=self.config.projection_dim)
            half = CLIPVisionEncoder(settings, projection=True)
        half.vision_model, half.visual_projection = self.vision_model, self.visual_projection
        return half.train(self.training)

    def embed_text(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.text_projection(self.text_model(tokens).pooled), dim=-1)  # (B, P)

    def embed_image(self, pixels: Tensor) -> Tensor:
        return F.normalize(self.visual_projection(self.vision_model(pixels).pooled), dim=-1)  # (B, P)

    def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """Scaled cosines of every image with every text (images, texts)."""
        return self.logit_scale.exp() * self.embed_image(pixels) @ self.embed_text(tokens).T


def modern_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights under the names of the networks above, whichever release of transformers wrote them.

    Releases before 4.31 saved the buffer position_ids, and 5.x leaves the text_model. or vision_model. prefix
    away when there is no projection.
    """
    kept = {name: value for name, value in state.items() if not name.endswith("embeddings.position_ids")}
    if any(name.startswith(("text_model.", "vision_model.")) for name in kept):
        return kept
    prefix = "text_model." if "embeddings.token_embedding.weight" in kept else "vision_model."
    return {prefix + name: value for name, value in kept.items()}
