"""The components of a model's folder: what is there, and whether it fits together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from pellucid.core.errors import PellucidError
from pellucid.evidence.doctor.checks import Finding, check
from pellucid.evidence.doctor.subject import Subject
from pellucid.interop import folder, weights
from pellucid.interop.components import (
    INDEX,
    KINDS,
    NETWORK_PARTS,
    TEXT_PARTS,
    TOKENIZER_PARTS,
    named_classes,
    read_config,
)
from pellucid.interop.family import INPAINT_CHANNELS
from pellucid.interop.folder import IGNORED, OTHERS, STABLE_DIFFUSION
from pellucid.interop.tokenizer import LENGTH, Tokenizer
from pellucid.models.clip import LEGACY_EOS

# --- What is there --------------------------------------------------------------------------------------------------

# How a component's config is called, by what its class is; networks keep theirs in config.json.
CONFIGS = {
    "Scheduler": folder.SCHEDULER,
    "Tokenizer": "tokenizer_config.json",
    "Processor": "preprocessor_config.json",
    "Extractor": "preprocessor_config.json",
}


@dataclass(frozen=True)
class Component:
    """A component of model_index.json."""

    part: str
    kind: str  # the class that the index names
    place: Path
    there: bool
    config: Mapping[str, Any] | None = None
    trouble: str = ""  # why there is no config

    @property
    def own_kind(self) -> str | None:
        """The class that its own config names."""
        if self.config is None:
            return None
        made = self.config.get("architectures")
        named = self.config.get("_class_name") or (made[0] if isinstance(made, list) and made else None)
        return None if named is None else str(named)

    @property
    def needs_config(self) -> bool:
        """Whether nothing can be made of it without a config: our networks, and schedulers."""
        return self.kind in KINDS or self.kind.endswith("Scheduler")

    @property
    def network_kind(self) -> str | None:
        """The class of ours that it is, where we have it."""
        kind = self.kind if self.kind in KINDS else self.own_kind
        return kind if kind in KINDS else None


def inventory(subject: Subject) -> dict[str, Component]:
    """Every component that the index lists, by its part."""
    assert subject.folder is not None
    assert subject.index is not None
    root = subject.folder
    return {part: find_component(root, part, kind) for part, kind in named_classes(subject.index).items()}


def find_component(root: Path, part: str, kind: str) -> Component:
    place = folder.place_of(root, part)
    name = next((name for word, name in CONFIGS.items() if word in kind), folder.CONFIG)
    there = place != root or (root / name).is_file()
    if part in NETWORK_PARTS and place == root:
        there = folder.class_in(root) == kind
    if not there or not (place / name).is_file():
        return Component(part, kind, place, there, trouble=f"{part}/{name} is not there")
    try:
        return Component(part, kind, place, there, weights.read_json(place / name))
    except PellucidError as error:
        return Component(part, kind, place, there, trouble=str(error))


def sketch(listed: Component) -> nn.Module:
    """The network of a component on the meta device, from its config alone."""
    assert listed.network_kind is not None
    return sketched(listed.network_kind, json.dumps(listed.config), listed.part)


@lru_cache(maxsize=16)  # several checks ask for the same
def sketched(kind: str, config: str, name: str) -> nn.Module:
    settings = read_config(kind, json.loads(config), name)
    return weights.sketch(lambda: KINDS[kind].build(settings), name)


def network_of(subject: Subject) -> nn.Module | None:
    """The denoising network: loaded, or sketched from its config."""
    if subject.pipeline is not None:
        return subject.pipeline.components.network
    if subject.folder is None:
        return None
    parts = inventory(subject)
    listed = next((parts[part] for part in NETWORK_PARTS if part in parts), None)
    if listed is None or listed.config is None or listed.network_kind is None:
        return None
    try:
        return sketch(listed)
    except PellucidError:
        return None


# --- Checks ---------------------------------------------------------------------------------------------------------

# One class under several names, and classes that stand for what they are made of.
SAME = (
    {"Transformer2DModel", "DiTTransformer2DModel", "PixArtTransformer2DModel"},
    {"MultiControlNetModel", "ControlNetModel"},
)


@check("components", needs=("folder",))
def components(subject: Subject) -> Iterator[Finding]:
    """Listed, and not there or not readable."""
    for part, listed in inventory(subject).items():
        extra = part in IGNORED
        if listed.there and (listed.config is not None or not listed.needs_config):
            continue
        yield Finding(
            "component-missing",
            "note" if extra else "error",
            f"{part} is listed and cannot be read",
            (("part", part), ("class", listed.kind)),
            f"{INDEX} lists {part} ({listed.kind}), but {listed.trouble or 'it is not there'}.",
            f'Download the whole model, or set "{part}": [null, null] in {INDEX} if it is not wanted.',
        )


@check("classes", needs=("folder",))
def classes(subject: Subject) -> Iterator[Finding]:
    """The index names one class and the component's own config another."""
    for part, listed in inventory(subject).items():
        own = listed.own_kind
        sampler = part == "scheduler"
        ours = sampler or own in KINDS or listed.kind in KINDS  # of others we do not know what fits
        if own is None or not ours or part in IGNORED or same(listed.kind, own):
            continue
        yield Finding(
            "class-mismatch",
            "warning" if sampler else "error",
            f"{part} is listed as {listed.kind}, and its config is that of {own}",
            (("part", part), (f"class in {INDEX}", listed.kind), ("class in its config", own)),
            f"diffusers makes a {listed.kind} of the config of a {own}"
            + (": it samples otherwise than the config says." if sampler else ", whose weights it cannot take."),
            f'"{part}": ["{library(subject, part)}", "{own}"] in {INDEX}',
        )


def same(a: str, b: str) -> bool:
    """One class by two names; a whole CLIP's config is also that of its halves, and Flax's classes read torch's."""
    halves = "CLIPModel" in (a, b) and a.startswith("CLIP") and b.startswith("CLIP")
    return halves or a == b.removeprefix("Flax") or any({a, b} <= names for names in SAME)


def library(subject: Subject, part: str) -> str:
    named = (subject.index or {}).get(part)
    return str(named[0]) if isinstance(named, list) and named else "diffusers"


# --- what belongs together -------------------------------------------------------------------------------------


@check("fit of the components", needs=("folder",))
def fit(subject: Subject) -> Iterator[Finding]:
    """Widths and channels that must be equal, and the pipeline that must know what the network wants."""
    held = {part: listed.config for part, listed in inventory(subject).items() if listed.config is not None}
    pipeline = str((subject.index or {}).get("_class_name"))
    if "unet" in held and STABLE_DIFFUSION.fullmatch(pipeline):
        yield from pipeline_fits(pipeline, held["unet"])
        yield from text_fits(held)
    network = held.get("unet") or held.get("transformer")
    read = STABLE_DIFFUSION.fullmatch(pipeline) or pipeline in OTHERS  # others pack latents, or add maps to them
    if read and network is not None and "latent_channels" in held.get("vae", {}):
        yield from latents_fit(network, held["vae"])


def pipeline_fits(pipeline: str, unet: Mapping[str, Any]) -> Iterator[Finding]:
    told = unet.get("addition_embed_type") == "text_time"
    channels = int(unet.get("in_channels", 4))
    if told != ("XL" in pipeline):
        wants, gives = ("sizes and a pooled text", "neither") if told else ("neither sizes nor a pooled text", "both")
        other = pipeline.replace("XL", "") if "XL" in pipeline else pipeline.replace("Diffusion", "DiffusionXL", 1)
        yield Finding(
            "pipeline-class",
            "error",
            f"{pipeline} is not the pipeline of this UNet",
            (("pipeline", pipeline), ("addition_embed_type", str(unet.get("addition_embed_type")))),
            f"The UNet takes {wants}, and {pipeline} gives {gives}.",
            f'"_class_name": "{other}" in {INDEX}',
        )
    if channels == INPAINT_CHANNELS and "Inpaint" not in pipeline:
        yield Finding(
            "pipeline-class",
            "error",
            f"{pipeline} is not the pipeline of an inpainting UNet",
            (("pipeline", pipeline), ("in_channels", channels)),
            f"The UNet takes {channels} channels: noisy latents, a mask and the masked image; {pipeline} gives 4.",
            f'"_class_name": "{re.sub("(Img2Img)?Pipeline$", "InpaintPipeline", pipeline)}" in {INDEX}',
        )


def text_fits(held: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    unet = held["unet"]
    encoders = [held[part] for part in TEXT_PARTS if part in held and "hidden_size" in held[part]]
    reads = unet.get("encoder_hid_dim") or unet.get("cross_attention_dim", 1280)
    if not encoders or reads is None:
        return
    wide = sum(int(encoder["hidden_size"]) for encoder in encoders)
    if {wide} != set(reads if isinstance(reads, list) else [reads]):
        yield Finding(
            "text-width",
            "error",
            "the text encoders are not as wide as the UNet reads",
            (("width of the text", wide), ("cross_attention_dim", str(reads))),
            f"The text comes {wide} wide and the UNet's attention takes {reads}: they belong to different models.",
            "Take the text encoders of the model that the UNet was trained with.",
        )
    if unet.get("addition_embed_type") == "text_time":
        yield from pooled_fits(unet, encoders[-1])


def pooled_fits(unet: Mapping[str, Any], encoder: Mapping[str, Any]) -> Iterator[Finding]:
    """SDXL's UNet takes the pooled text and six sizes, its refiner five numbers."""
    waves, takes = unet.get("addition_time_embed_dim"), unet.get("projection_class_embeddings_input_dim")
    pooled = encoder.get("projection_dim", 512)
    if waves is None or takes is None or takes - pooled in (6 * waves, 5 * waves):
        return
    yield Finding(
        "pooled-width",
        "error",
        "the pooled text and the sizes are not as wide as the UNet reads",
        (("projection_dim", pooled), ("addition_time_embed_dim", waves),
         ("projection_class_embeddings_input_dim", takes)),
        f"{pooled} of the pooled text and 6 × {waves} of the sizes are {pooled + 6 * waves}; the UNet takes {takes}.",
        "Take the second text encoder of the model that the UNet was trained with.",
    )  # fmt: skip


def latents_fit(network: Mapping[str, Any], vae: Mapping[str, Any]) -> Iterator[Finding]:
    latent, channels = int(vae["latent_channels"]), network.get("in_channels", 4)
    if channels in (latent, 2 * latent, 2 * latent + 1):  # plain, told an image, told a mask and an image
        return
    yield Finding(
        "latent-channels",
        "error",
        "the VAE's latents are not what the network takes",
        (("latent_channels", latent), ("in_channels", channels)),
        f"The VAE makes {latent} channels and the network takes {channels}: they belong to different models.",
        "Take the VAE of the model that the network was trained with.",
    )


# --- text ------------------------------------------------------------------------------------------------------


@check("tokenizers", needs=("folder",))
def tokenizers(subject: Subject) -> Iterator[Finding]:
    """Windows, vocabularies and end marks that differ from those of the encoder."""
    parts = inventory(subject)
    for text_part, token_part in zip(TEXT_PARTS, TOKENIZER_PARTS, strict=True):
        text, tokens = parts.get(text_part), parts.get(token_part)
        if text is None or tokens is None or text.config is None or not tokens.there:
            continue
        if "max_position_embeddings" not in text.config:
            continue  # not CLIP's: T5 has no window
        try:
            read = Tokenizer.load(tokens.place)
        except PellucidError as error:
            yield Finding(
                "tokenizer-files",
                "error",
                f"{token_part} cannot be read",
                (("error", error.code),),
                str(error),
                "Download its files again.",
            )
            continue
        yield from window_fits(token_part, read, text.config)
        yield from vocabulary_fits(token_part, read, text.config)
        yield from end_fits(token_part, read, text)


def window_fits(part: str, tokens: Tokenizer, text: Mapping[str, Any]) -> Iterator[Finding]:
    window = int(text.get("max_position_embeddings", LENGTH))
    if tokens.length == window:
        return
    longer = tokens.length > window
    effect = (
        "a prompt that fills the tokenizer's window has no position for its last tokens, and the run fails"
        if longer
        else f"only {tokens.length} of the encoder's {window} places are ever used, otherwise than in training"
    )
    yield Finding(
        "tokenizer-length",
        "error" if longer else "warning",
        f"{part} makes windows of {tokens.length} tokens for an encoder of {window}",
        (("model_max_length", tokens.length), ("max_position_embeddings", window)),
        f"The two differ: {effect}.",
        f'"model_max_length": {window} in {part}/tokenizer_config.json',
    )


def vocabulary_fits(part: str, tokens: Tokenizer, text: Mapping[str, Any]) -> Iterator[Finding]:
    table = int(text.get("vocab_size", 49408))
    if tokens.size > table:
        yield Finding(
            "tokenizer-vocabulary",
            "error",
            f"{part} knows tokens that the encoder has no vector for",
            (("tokens", tokens.size), ("vocab_size", table)),
            f"Ids go up to {tokens.size - 1}, and the encoder's table ends at {table - 1}: such a token fails the run.",
            "Take the tokenizer of this encoder, or resize the encoder's table.",
        )


def end_fits(part: str, tokens: Tokenizer, text: Component) -> Iterator[Finding]:
    """The pooled text is taken at the end mark."""
    end = (text.config or {}).get("eos_token_id")
    if end is None or end in (LEGACY_EOS, tokens.eos) or text.kind != "CLIPTextModelWithProjection":
        return
    yield Finding(
        "tokenizer-end",
        "warning",
        f"{part} ends texts with another token than the encoder looks for",
        (("end of the tokenizer", tokens.eos), ("eos_token_id", end)),
        "The pooled text is read where the end mark stands; without it the encoder pools at the first token.",
        f'"eos_token_id": {tokens.eos} in {text.part}/config.json',
    )
