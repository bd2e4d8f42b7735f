"""Inputs of the network besides x and time: text, sizes, labels, hints and image tokens, with and without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.interop.components import Components
from pellucid.models.dit import DiT, PixArt
from pellucid.models.embeddings import sinusoid
from pellucid.models.unet import UNet
from pellucid.pipeline.encoders.text import Embedding, encode_pair, long_notes, size_ids
from pellucid.pipeline.request import SECOND, Request

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Conditions:
    """The inputs with the prompt, those without it (None where the model knows no such thing), and their shape."""

    cond: Inputs
    uncond: Inputs | None

    def to(self, device: torch.device) -> Conditions:
        """Where the network will be called; with offload it is elsewhere now."""
        cond, uncond = (
            None if i is None else {k: v.to(device) for k, v in i.items()} for i in (self.cond, self.uncond)
        )
        return Conditions(cond or {}, uncond)

    def plus(self, name: str, cond: Any, uncond: Any) -> Conditions:
        """One more input on both sides."""
        return Conditions({**self.cond, name: cond}, None if self.uncond is None else {**self.uncond, name: uncond})


def takes_text(network: nn.Module) -> bool:
    if isinstance(network, UNet):
        return network.config.class_name != "UNet2DModel" and network.config.cross_attention_dim is not None
    return isinstance(network, PixArt)


def takes_labels(network: nn.Module) -> bool:
    if isinstance(network, UNet):
        return network.class_embedding is not None
    return isinstance(network, DiT)


def takes_guidance(network: nn.Module) -> bool:
    """Whether a network was trained with its guidance as an input, as distilled ones are."""
    return isinstance(network, UNet) and network.config.time_cond_proj_dim is not None


def _check_words(components: Components, request: Request) -> None:
    """A prompt for a model without text, a label for one without classes: refused by name."""
    network = components.network
    if not takes_text(network):
        for name in ("prompt", "negative_prompt", "prompt_embeds", "negative_prompt_embeds"):
            held = getattr(request, name)
            if held is not None and (isinstance(held, Tensor) or held):
                raise PellucidError(f"{name} must be left out: {components.name} takes no text.", "no-text")
    for name in _unused_fields(components):
        if getattr(request, name) != getattr(Request, name):
            got = getattr(request, name)
            raise PellucidError(rule(name, f"left out: {components.name} does not take it", got), "no-effect")
    if request.label is not None and not takes_labels(network):
        raise PellucidError(rule("label", f"left out: {components.name} has no classes", request.label), "no-labels")


def _unused_fields(components: Components) -> list[str]:
    """The fields of a request that say nothing to this model."""
    network, scored = components.network, bool(components.extra.get("requires_aesthetics_score"))
    found = [] if takes_text(network) else ["clip_skip", "weighting"]
    found += [] if len(components.text_encoders) > 1 else list(SECOND)
    if not wants_sizes(network):
        return [*found, "original_size", "crop", "target_size", "aesthetic"]
    return [*found, "target_size" if scored else "aesthetic"]


def make_conditions(
    components: Components, request: Request, size: tuple[int, int], scale: float, guided: bool
) -> Conditions:
    """Inputs for the whole batch. `guided`: whether the network is also called without the prompt."""
    network = components.network
    _check_words(components, request)
    cond: Inputs = {}
    uncond: Inputs = {}
    possible = True
    if takes_text(network):
        positive, negative = _embeddings(components, request, guided)
        cond["context"], uncond["context"] = positive.context, negative.context
        if positive.mask is not None or negative.mask is not None:
            cond["context_mask"], uncond["context_mask"] = _mask_of(positive), _mask_of(negative)
        if wants_sizes(network):
            cond |= {"pooled": positive.pooled, "sizes": sizes_of(components, request, size, 0)}
            uncond |= {"pooled": negative.pooled, "sizes": sizes_of(components, request, size, 1)}
            for name, one in (("prompt_embeds", positive), ("negative_prompt_embeds", negative)):
                if one.pooled is None:
                    raise PellucidError(f"{name} must have a pooled vector for this model; got none.", "pooled")
    if isinstance(network, PixArt) and network.config.takes_sizes:
        width, height = size
        row = torch.tensor([[float(height), float(width), height / width]])
        cond["sizes"] = uncond["sizes"] = row.expand(len(request.prompts) * request.n, -1)
    if takes_labels(network):
        labels = labels_of(components, request)
        cond["labels"] = labels
        if isinstance(network, DiT):
            uncond["labels"] = torch.full_like(labels, network.config.null_label)
        else:
            possible = possible and takes_text(network)
            uncond["labels"] = labels
    elif not takes_text(network):
        possible = False
    if isinstance(network, UNet) and (wide := network.config.time_cond_proj_dim) is not None:
        count = len(request.prompts) * request.n
        wave = sinusoid(torch.full((count,), (scale - 1.0) * 1000.0), wide, flip=False, shift=1)
        cond["guidance_embedding"] = uncond["guidance_embedding"] = wave
    return Conditions(_on_network(cond, network), _on_network(uncond, network) if possible else None)


def _mask_of(embedding: Embedding) -> Tensor:
    """Which tokens are seen: all, where nothing is said."""
    return torch.ones(embedding.context.shape[:2]) if embedding.mask is None else embedding.mask


def wants_sizes(network: nn.Module) -> bool:
    return isinstance(network, UNet) and network.config.addition_embed_type == "text_time"


def _on_network(inputs: Inputs, network: nn.Module) -> Inputs:
    """On the network's device, and floats in its precision."""
    weight = next(network.parameters())
    out = {}
    for name, value in inputs.items():
        exact = name in ("labels", "sizes") and not (name == "labels" and value.is_floating_point())
        out[name] = value.to(weight.device) if exact else value.to(weight)
    return out


def _embeddings(components: Components, request: Request, guided: bool) -> tuple[Embedding, Embedding]:
    """The prompts and their negatives, n images each."""
    zero = bool(components.extra.get("force_zeros_for_empty_prompt")) and request.negative_prompt is None
    given = _as_embedding("prompt_embeds", request.prompt_embeds)
    against = _as_embedding("negative_prompt_embeds", request.negative_prompt_embeds)
    for name, one in (("prompt_embeds", given), ("negative_prompt_embeds", against)):
        if one is not None:
            _check_widths(components.network, name, one)
    if given is not None and (against is not None or not guided or zero):
        if against is None:
            pooled = None if given.pooled is None else torch.zeros_like(given.pooled)
            against = Embedding(torch.zeros_like(given.context), pooled)
        return given.repeated(request.n), against.repeated(request.n)
    if not components.text_encoders:
        raise PellucidError(
            f"prompt_embeds and negative_prompt_embeds must be given: {components.name} has no text encoder here.",
            "no-encoder",
        )
    if given is None and request.prompt is None:
        raise PellucidError("prompt must be given to a text-to-image model; got nothing.", "prompt")
    pair = encode_pair(
        components.text_encoders,
        components.tokenizers,
        request.by_encoder("prompt"),
        None if zero else request.by_encoder("negative_prompt"),
        zero_negative=zero,
        skip=request.clip_skip or None,
        weighting=request.weighting,
    )
    positive = pair[0] if given is None else given
    negative = pair[1] if against is None else against
    if positive.context.shape != negative.context.shape:
        raise PellucidError(
            rule(
                "negative_prompt_embeds",
                f"of the shape of prompt_embeds, {tuple(positive.context.shape)}",
                tuple(negative.context.shape),
            ),
            "prompt",
        )
    return positive.repeated(request.n), negative.repeated(request.n)


def text_notes(components: Components, request: Request) -> list[str]:
    """What the result says of the prompts: those that are longer than a window."""
    if not takes_text(components.network) or not components.text_encoders:
        return []
    prompts = {name: request.by_encoder(name) for name in ("prompt", "negative_prompt")}
    return long_notes(components.text_encoders, components.tokenizers, prompts, request.weighting)


def _as_embedding(name: str, given: Embedding | Tensor | None) -> Embedding | None:
    if given is None or isinstance(given, Embedding):
        return given
    if not isinstance(given, Tensor) or given.ndim != 3:
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise PellucidError(rule(name, "a tensor (prompts, tokens, width)", shape), "prompt")
    return Embedding(given, None)


def _check_widths(network: Any, name: str, given: Embedding) -> None:
    """Embeddings made for another base have other widths; named here, before a layer fails on a shape."""
    config = network.config
    if isinstance(network, UNet):
        wide = {config.encoder_hid_dim or each for each in config.each("cross_attention_dim")}
        if given.context.shape[-1] not in wide:
            raise PellucidError(rule(f"width of {name}", f"one of {sorted(wide)}", given.context.shape[-1]), "prompt")
    if wants_sizes(network) and given.pooled is not None:
        numbers = config.projection_class_embeddings_input_dim - given.pooled.shape[-1]
        if numbers not in (5 * config.addition_time_embed_dim, 6 * config.addition_time_embed_dim):
            must = "as wide as this model reads"
            raise PellucidError(rule(f"pooled vector of {name}", must, given.pooled.shape[-1]), "pooled")


def sizes_of(components: Components, request: Request, size: tuple[int, int], which: int) -> Tensor:
    """SDXL's numbers (B, 6), or the refiner's with an aesthetic score (B, 5); `which`: 0 with the prompt, 1 without."""
    width, height = size
    target = request.target_size or (width, height)
    original = request.original_size or (width, height)
    pairs = [(h, w) for w, h in (original, target)]
    crop = (request.crop[1], request.crop[0])
    if components.extra.get("requires_aesthetics_score"):
        made = size_ids(pairs[0], crop, score=request.aesthetic[which])
    else:
        made = size_ids(pairs[0], crop, pairs[1])
    return made.expand(len(request.prompts) * request.n, -1)


def labels_of(components: Components, request: Request) -> Tensor:
    """Class numbers, one per image; names are looked up."""
    if request.label is None:
        raise PellucidError(f"label must be given: {components.name} makes images of a class.", "labels")
    many = isinstance(request.label, Sequence) and not isinstance(request.label, str)
    labels: list[int | str] = list(request.label) if many else [request.label] * len(request.prompts)  # type: ignore
    numbers = [_label_number(components, one) for one in labels]
    network = components.network
    count = (
        network.config.num_class_embeds if isinstance(network, UNet) else getattr(network.config, "null_label", None)
    )
    for number in numbers:
        if count is not None and not 0 <= number < count:
            raise PellucidError(rule("label", f"from 0 to {count - 1}", number), "labels")
    return torch.tensor(numbers).repeat_interleave(request.n)


def _label_number(components: Components, label: int | str) -> int:
    if isinstance(label, int) and not isinstance(label, bool):
        return label
    for number, names in components.labels.items():
        if str(label).lower() in [name.strip().lower() for name in names.split(",")]:
            return number
    known = [name.strip() for names in components.labels.values() for name in names.split(",")]
    raise PellucidError(
        rule("label", "a class number or name", label, nearest(str(label), known) if known else ""), "labels"
    )
