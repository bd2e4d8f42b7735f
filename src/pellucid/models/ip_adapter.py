"""IP-Adapter: an image as a prompt, through keys and values of its own beside the text's in every cross-attention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models.attention import Attention, ImageTokens, split_heads
from pellucid.models.blocks import GELU, FeedForward, within
from pellucid.models.unet import UNet

Kind = Literal["plain", "full", "plus"]
_HEAD_WIDTH = 64  # of the Plus resampler; its files do not say it


class PlainProjection(nn.Module):
    """The pooled image embedding as a few tokens."""

    def __init__(self, image_width: int, width: int, count: int) -> None:
        super().__init__()
        self.image_embeds = nn.Linear(image_width, count * width)
        self.norm = nn.LayerNorm(width)
        self.count = count

    def forward(self, pooled: Tensor) -> Tensor:
        return self.norm(self.image_embeds(pooled).unflatten(-1, (self.count, -1)))  # (B, T, D)


class FullProjection(nn.Module):
    """Every patch of the image as a token."""

    def __init__(self, image_width: int, width: int) -> None:
        super().__init__()
        self.ff = FeedForward(GELU(image_width, image_width), nn.Linear(image_width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, patches: Tensor) -> Tensor:
        return self.norm(self.ff(patches))  # (B, T, D)


class ResamplerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln0, self.ln1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, _HEAD_WIDTH, out_bias=False)
        inner = 4 * width
        mlp = FeedForward(GELU(width, inner, bias=False), nn.Linear(inner, width, bias=False))
        self.ff = nn.ModuleList([nn.LayerNorm(width), mlp])

    def forward(self, patches: Tensor, queries: Tensor) -> Tensor:
        own = self.ln1(queries)
        queries = queries + self.attn(own, torch.cat([self.ln0(patches), own], dim=1))  # (B, T, W)
        return queries + self.ff[1](self.ff[0](queries))


class PlusProjection(nn.Module):
    """A few learned queries that read the patches (a perceiver)."""

    def __init__(self, image_width: int, width: int, inner: int, heads: int, count: int, depth: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(1, count, inner))
        self.proj_in = nn.Linear(image_width, inner)
        self.proj_out = nn.Linear(inner, width)
        self.norm_out = nn.LayerNorm(width)
        self.layers = nn.ModuleList(ResamplerBlock(inner, heads) for _ in range(depth))

    def forward(self, patches: Tensor) -> Tensor:
        patches = self.proj_in(patches)  # (B, P, W)
        queries = self.latents.expand(len(patches), -1, -1)
        for block in self.layers:
            queries = block(patches, queries)
        return self.norm_out(self.proj_out(queries))  # (B, T, D)


class Pair(nn.Module):
    """The keys and values of one cross-attention for image tokens."""

    def __init__(self, context: int, inner: int) -> None:
        super().__init__()
        self.to_k_ip = nn.Linear(context, inner, bias=False)
        self.to_v_ip = nn.Linear(context, inner, bias=False)


class IPAdapter(nn.Module):
    """A projection of image states into tokens, and a pair of weights for each cross-attention of a UNet."""

    def __init__(self, kind: Kind, projection: nn.Module, pairs: Sequence[Pair]) -> None:
        super().__init__()
        self.kind, self.image_proj, self.pairs = kind, projection, nn.ModuleList(pairs)

    @property
    def wants(self) -> Literal["pooled", "patches"]:
        """Which output of the image encoder it reads: the projected embedding, or the last but one hidden state."""
        return "pooled" if self.kind == "plain" else "patches"

    def tokens(
        self,
        unet: UNet,
        states: Tensor,  # (B, N, W) pooled or (B, N, P, W) patches of N image prompts per image
        *,
        scale: float | Mapping[str, float] = 1.0,
        masks: Tensor | None = None,  # (N, H, W) at any size, 1 where the prompt acts
        size: tuple[int, int] = (64, 64),  # of the latents
    ) -> tuple[tuple[ImageTokens, ...], ...]:
        """Keys and values for every cross-attention, made once a run. `scale` may name places: {"up_blocks.1": 1.0}."""
        places = unet.cross_attentions()
        if len(places) != len(self.pairs):
            raise PellucidError(
                f"the IP-Adapter must have one pair of weights a cross-attention ({len(places)}); "
                f"got {len(self.pairs)}. It was made for another base.",
                "ip-base",
            )
        batch, count = states.shape[:2]
        tokens = self.image_proj(states.flatten(0, 1)).unflatten(0, (batch, count))  # (B, N, T, D)
        return tuple(
            self.at(pair, tokens, block.attn2.heads, scale_at(scale, place), masks, _halved(size, halvings))
            for pair, (block, place, halvings) in zip(cast("Iterable[Pair]", self.pairs), places, strict=True)
        )

    def at(
        self, pair: Pair, tokens: Tensor, heads: int, scale: float, masks: Tensor | None, size: tuple[int, int]
    ) -> tuple[ImageTokens, ...]:
        if scale == 0.0:
            return ()
        weights = tokens.new_full((len(tokens), 1, 1), scale)
        groups = [tokens.flatten(1, 2)] if masks is None else list(tokens.unbind(1))  # (B, T, D) each
        return tuple(
            ImageTokens(
                split_heads(pair.to_k_ip(group), heads),
                split_heads(pair.to_v_ip(group), heads),
                weights,
                None if masks is None else _at_size(masks[i], size).to(tokens).expand(len(tokens), -1, -1),
            )
            for i, group in enumerate(groups)
        )


def scale_at(scale: float | Mapping[str, float], place: str) -> float:
    """The scale of a place: that of the longest name given which holds it, 0 where none does."""
    if not isinstance(scale, Mapping):
        return float(scale)
    fitting = [name for name in scale if within(place, (name,))]
    return float(scale[max(fitting, key=len)]) if fitting else 0.0


def _halved(size: tuple[int, int], times: int) -> tuple[int, int]:
    for _ in range(times):
        size = ((size[0] + 1) // 2, (size[1] + 1) // 2)
    return size


def _at_size(mask: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(mask[None, None].float(), size=size, mode="bicubic").reshape(1, -1, 1)  # (1, H·W, 1)


def from_state(state: Mapping[str, Tensor]) -> IPAdapter:
    """Builds an adapter from the tensors of its file; `image_proj.*` and `ip_adapter.N.to_k_ip.weight`."""
    image = {k.removeprefix("image_proj."): v for k, v in state.items() if k.startswith("image_proj.")}
    found = {k.removeprefix("ip_adapter."): v for k, v in state.items() if k.startswith("ip_adapter.")}
    firsts = {k.split(".")[0] for k in found}
    numbers = sorted(int(first) for first in firsts if re.fullmatch(r"[0-9]{1,9}", first))
    if not image or not numbers:
        heads = ", ".join(sorted({k.split(".")[0] for k in state})[:5])
        raise PellucidError(rule("IP-Adapter file", "one with image_proj and ip_adapter weights", heads), "ip-file")
    keys = [found.get(f"{n}.to_k_ip.weight") for n in numbers]
    if any(k is None or k.ndim != 2 or f"{n}.to_v_ip.weight" not in found for n, k in zip(numbers, keys, strict=True)):
        raise PellucidError("IP-Adapter file must have to_k_ip and to_v_ip for every number it uses.", "ip-file")
    adapter = IPAdapter(*_projection_of(image), [Pair(w.shape[1], w.shape[0]) for w in keys if w is not None])
    renamed = {f"image_proj.{k}": v for k, v in _modern_names(adapter.kind, image).items()}
    for index, number in enumerate(numbers):
        for name in ("to_k_ip", "to_v_ip"):
            renamed[f"pairs.{index}.{name}.weight"] = found.pop(f"{number}.{name}.weight")
    missing, unexpected = adapter.load_state_dict(renamed, strict=False)
    if missing or unexpected or found:
        odd = sorted([*missing, *unexpected, *found])[:5]
        raise PellucidError(
            f"IP-Adapter file must hold exactly its weights; these do not fit: {', '.join(odd)}.", "ip-file"
        )
    return adapter


def _projection_of(image: Mapping[str, Tensor]) -> tuple[Kind, nn.Module]:
    """The kind of projection, told by the names and shapes of its weights."""
    if "proj.weight" in image:
        width = image["norm.weight"].shape[0]
        out, inside = image["proj.weight"].shape
        return "plain", PlainProjection(inside, width, out // width)
    if "proj.3.weight" in image:
        return "full", FullProjection(image["proj.0.weight"].shape[1], image["proj.3.weight"].shape[0])
    if "latents" in image and "proj_in.weight" in image:
        inner, inside = image["proj_in.weight"].shape
        queries = next(v for k, v in image.items() if k.startswith("layers.0.") and k.endswith("to_q.weight"))
        depth = len({k.split(".")[1] for k in image if k.startswith("layers.")})
        width, count = image["proj_out.weight"].shape[0], image["latents"].shape[1]
        return "plus", PlusProjection(inside, width, inner, queries.shape[0] // _HEAD_WIDTH, count, depth)
    names = ", ".join(sorted(image)[:5])
    raise PellucidError(rule("IP-Adapter", "plain, full or Plus (FaceID is not supported)", names), "ip-kind")


def _modern_names(kind: Kind, image: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of the original files → ours, which are diffusers'."""
    if kind == "plain":
        return {k.replace("proj", "image_embeds"): v for k, v in image.items()}
    if kind == "full":
        swap = {"proj.0": "ff.net.0.proj", "proj.2": "ff.net.2", "proj.3": "norm"}
        return {swap[k.rsplit(".", 1)[0]] + "." + k.rsplit(".", 1)[1]: v for k, v in image.items()}
    renamed: dict[str, Tensor] = {}
    for key, value in image.items():
        if not key.startswith("layers."):
            renamed[key] = value
            continue
        _, layer, half, *rest = key.split(".")  # layers.L.0 is the attention, layers.L.1 the feed-forward
        name = ".".join(rest)
        if half not in ("0", "1"):
            renamed[key] = value  # modern already
        elif name == "to_kv.weight":
            for part, tensor in zip("kv", value.chunk(2), strict=True):
                renamed[f"layers.{layer}.attn.to_{part}.weight"] = tensor
        elif half == "0":
            names = {"norm1": "ln0", "norm2": "ln1", "to_q": "attn.to_q", "to_out": "attn.to_out.0"}
            renamed[f"layers.{layer}.{names[rest[0]]}.{rest[-1]}"] = value
        else:
            names = {"0": "ff.0", "1": "ff.1.net.0.proj", "3": "ff.1.net.2"}
            renamed[f"layers.{layer}.{names[rest[0]]}.{rest[-1]}"] = value
    return renamed
