"""Checks of a folder's components: all there, of the classes that are listed, and made for each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pellucid.core.errors import PellucidError
from pellucid.evidence.doctor.checks import Finding, check
from pellucid.evidence.doctor.subject import Component, Subject
from pellucid.interop.components import INDEX, KINDS, TEXT_PARTS, TOKENIZER_PARTS
from pellucid.interop.family import INPAINT_CHANNELS
from pellucid.interop.folder import IGNORED, OTHERS, STABLE_DIFFUSION
from pellucid.interop.tokenizer import LENGTH, Tokenizer
from pellucid.models.clip import LEGACY_EOS

# One class under several names, and classes that stand for what they are made of.
_SAME = (
    {"Transformer2DModel", "DiTTransformer2DModel", "PixArtTransformer2DModel"},
    {"MultiControlNetModel", "ControlNetModel"},
)


@check("components")
def listed(subject: Subject, components: Mapping[str, Component]) -> Iterator[Finding]:
    """Listed, and not there or not readable."""
    for part, one in components.items():
        needs_config = one.kind in KINDS or one.kind.endswith("Scheduler")
        if one.there and (one.config is not None or not needs_config):
            continue
        yield Finding(
            "component-missing",
            "note" if part in IGNORED else "error",
            f"{part} is listed and cannot be read",
            (("part", part), ("class", one.kind)),
            f"{INDEX} lists {part} ({one.kind}), but {one.trouble or 'it is not there'}.",
            f'Download the whole model, or set "{part}": [null, null] in {INDEX} if it is not wanted.',
        )


@check("classes")
def classes(subject: Subject, components: Mapping[str, Component]) -> Iterator[Finding]:
    """The index names one class and the component's own config another."""
    for part, one in components.items():
        own = one.own_kind
        sampler = part == "scheduler"
        ours = sampler or own in KINDS or one.kind in KINDS  # what fits the others is not known
        if own is None or not ours or part in IGNORED or same(one.kind, own):
            continue
        entry = (subject.index or {}).get(part)
        library = entry[0] if isinstance(entry, list) and entry else "diffusers"
        yield Finding(
            "class-mismatch",
            "warning" if sampler else "error",
            f"{part} is listed as {one.kind}, and its config is that of {own}",
            (("part", part), (f"class in {INDEX}", one.kind), ("class in its config", own)),
            f"diffusers makes a {one.kind} of the config of a {own}"
            + (": it samples otherwise than the config says." if sampler else ", whose weights it cannot take."),
            f'"{part}": ["{library}", "{own}"] in {INDEX}',
        )


def same(a: str, b: str) -> bool:
    """One class by two names; a whole CLIP's config is also that of its halves, and Flax's classes read torch's."""
    halves = "CLIPModel" in (a, b) and a.startswith("CLIP") and b.startswith("CLIP")
    return halves or a == b.removeprefix("Flax") or any({a, b} <= names for names in _SAME)


# --- what belongs together -------------------------------------------------------------------------------------


@check("fit of the components")
def fit(subject: Subject, components: Mapping[str, Component]) -> Iterator[Finding]:
    """Widths and channels that must be equal, and the pipeline that must know what the network wants."""
    configs = {part: one.config for part, one in components.items() if one.config is not None}
    pipeline = str((subject.index or {}).get("_class_name"))
    if "unet" in configs and STABLE_DIFFUSION.fullmatch(pipeline):
        yield from _pipeline_fits(pipeline, configs["unet"])
        yield from _text_fits(configs)
    network = configs.get("unet") or configs.get("transformer")
    read = STABLE_DIFFUSION.fullmatch(pipeline) or pipeline in OTHERS  # others pack latents, or add maps to them
    if read and network is not None and "latent_channels" in configs.get("vae", {}):
        yield from _latents_fit(network, configs["vae"])


def _pipeline_fits(pipeline: str, unet: Mapping[str, Any]) -> Iterator[Finding]:
    sized = unet.get("addition_embed_type") == "text_time"
    channels = int(unet.get("in_channels", 4))
    if sized != ("XL" in pipeline):
        wants, gives = ("sizes and a pooled text", "neither") if sized else ("neither sizes nor a pooled text", "both")
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


def _text_fits(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    unet = configs["unet"]
    encoders = [configs[part] for part in TEXT_PARTS if part in configs and "hidden_size" in configs[part]]
    reads = unet.get("encoder_hid_dim") or unet.get("cross_attention_dim", 1280)
    if not encoders or reads is None:
        return
    wide = sum(int(encoder["hidden_size"]) for encoder in encoders)
    if {wide} != set(reads if isinstance(reads, list) else [reads]):
        yield Finding(
            "text-width",
            "error",
            "the text encoders do not have the width that the UNet expects",
            (("width of the text", wide), ("cross_attention_dim", str(reads))),
            f"The text comes {wide} wide and the UNet's attention takes {reads}: they belong to different models.",
            "Use the text encoders of the model that the UNet was trained with.",
        )
    if unet.get("addition_embed_type") == "text_time":
        yield from _pooled_fits(unet, encoders[-1])


def _pooled_fits(unet: Mapping[str, Any], encoder: Mapping[str, Any]) -> Iterator[Finding]:
    """SDXL's UNet takes the pooled text and six sizes, its refiner five numbers."""
    waves, takes = unet.get("addition_time_embed_dim"), unet.get("projection_class_embeddings_input_dim")
    pooled = encoder.get("projection_dim", 512)
    if waves is None or takes is None or takes - pooled in (6 * waves, 5 * waves):
        return
    yield Finding(
        "pooled-width",
        "error",
        "the pooled text and the sizes do not have the width that the UNet expects",
        (("projection_dim", pooled), ("addition_time_embed_dim", waves),
         ("projection_class_embeddings_input_dim", takes)),
        f"{pooled} of the pooled text and 6 × {waves} of the sizes are {pooled + 6 * waves}; the UNet takes {takes}.",
        "Use the second text encoder of the model that the UNet was trained with.",
    )  # fmt: skip


def _latents_fit(network: Mapping[str, Any], vae: Mapping[str, Any]) -> Iterator[Finding]:
    latent, channels = int(vae["latent_channels"]), network.get("in_channels", 4)
    if channels in (latent, 2 * latent, 2 * latent + 1):  # alone, with an image, with a mask and an image
        return
    yield Finding(
        "latent-channels",
        "error",
        "the VAE's latents are not what the network takes",
        (("latent_channels", latent), ("in_channels", channels)),
        f"The VAE makes {latent} channels and the network takes {channels}: they belong to different models.",
        "Use the VAE of the model that the network was trained with.",
    )


# --- text ------------------------------------------------------------------------------------------------------


@check("tokenizers")
def tokenizers(subject: Subject, components: Mapping[str, Component]) -> Iterator[Finding]:
    """Windows, vocabularies and end marks that differ from those of the encoder."""
    for text_part, token_part in zip(TEXT_PARTS, TOKENIZER_PARTS, strict=True):
        text, tokens = components.get(text_part), components.get(token_part)
        if text is None or tokens is None or text.config is None or not tokens.there:
            continue
        if "max_position_embeddings" not in text.config:  # not CLIP's: T5 has no window
            continue
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
        yield from _window_fits(token_part, read, text.config)
        yield from _vocabulary_fits(token_part, read, text.config)
        yield from _end_fits(token_part, read, text)


def _window_fits(part: str, tokens: Tokenizer, text: Mapping[str, Any]) -> Iterator[Finding]:
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


def _vocabulary_fits(part: str, tokens: Tokenizer, text: Mapping[str, Any]) -> Iterator[Finding]:
    table = int(text.get("vocab_size", 49408))
    if tokens.size > table:
        yield Finding(
            "tokenizer-vocabulary",
            "error",
            f"{part} knows tokens that the encoder has no vector for",
            (("tokens", tokens.size), ("vocab_size", table)),
            f"Ids go up to {tokens.size - 1}, and the encoder's table ends at {table - 1}: such a token fails the run.",
            "Use the tokenizer of this encoder, or resize the encoder's table.",
        )


def _end_fits(part: str, tokens: Tokenizer, text: Component) -> Iterator[Finding]:
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
