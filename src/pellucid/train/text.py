"""The text side of training: captions to tokens and states, exactly as a pipeline makes them of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import source
from pellucid.interop.components import KINDS, TEXT_PARTS, TOKENIZER_PARTS
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIPTextEncoder
from pellucid.pipeline.text import parts
from pellucid.train.draws import seeded
from pellucid.train.source import Batch
from pellucid.train.start_clip import start_clip
from pellucid.train.word_ids import tokens

FRESH = "CLIPTextModel"


@dataclass(frozen=True)
class TextConfig:
    """Where text becomes numbers. `folder` is a pipeline's, with text_encoder/ and tokenizer/. Or `encoder` is the
    config of a fresh CLIPTextModel, and the tokenizer in the folder `tokenizer` decides its vocabulary and window.

    `train`: the encoder learns together with the denoiser; else it stays as it was read.
    """

    folder: str = ""
    encoder: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    train: bool = False

    def __post_init__(self) -> None:
        if bool(self.folder) == bool(self.encoder) or bool(self.encoder) != bool(self.tokenizer):
            given = [name for name in ("folder", "encoder", "tokenizer") if getattr(self, name)]
            raise PellucidError(
                rule("text", "a folder, or an encoder with a tokenizer", ", ".join(given) or "none"), "config-value"
            )
        if self.encoder and not self.train:
            advice = "A fresh encoder that learns nothing says nothing."
            raise PellucidError(rule("text.train", "true for a fresh encoder", False, advice), "config-value")

    def build(self, seed: int) -> TextSide:
        if self.folder:
            folder = source.locate(self.folder)
            encoder = source.load_component(folder / TEXT_PARTS[0], dtype=torch.float32)
            tokenizer = Tokenizer.load(folder / TOKENIZER_PARTS[0])
        else:
            tokenizer = read_tokenizer(self.tokenizer)
            encoder = fresh_encoder(self.encoder, tokenizer, seed)
        if not isinstance(encoder, CLIPTextEncoder) or encoder.text_projection is not None:
            kind = type(encoder).__name__ if not isinstance(encoder, CLIPTextEncoder) else "one with a projection"
            raise PellucidError(rule("text encoder", "a CLIPTextModel", kind), "class")
        (part,) = parts([encoder], [tokenizer])  # a pipeline's own view of the two: one window for both
        check_vocabulary(part.tokenizer, encoder.config.vocab_size)
        return TextSide(encoder.eval().requires_grad_(self.train), part.tokenizer, self.train)


@dataclass(frozen=True)
class TextSide:
    """An encoder, its tokenizer, and whether the encoder is trained."""

    encoder: CLIPTextEncoder
    tokenizer: Tokenizer
    trained: bool

    @torch.no_grad()
    def context(self, ids: Tensor) -> Tensor:
        """(B, L, D) float32 of ids (B, L): the last layer after the final norm, as Stable Diffusion reads it."""
        return self.encoder(ids).last.float()


def read_tokenizer(folder: str) -> Tokenizer:
    if not Path(folder).is_dir():
        raise PellucidError(rule("tokenizer", "a folder that exists", folder), "tokenizer-files")
    return Tokenizer.load(folder)


def fresh_encoder(raw: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> CLIPTextEncoder:
    """A CLIPTextModel with random weights that a seed decides. What the tokenizer knows need not be said."""
    settings = KINDS[FRESH].read({**known_of(tokenizer), **raw})
    with seeded(seed):
        return start_clip(CLIPTextEncoder(settings))  # type: ignore[return-value]


def known_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a tokenizer says of the config of an encoder over it."""
    return {
        "vocab_size": tokenizer.size,
        "max_position_embeddings": tokenizer.length,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.pad,
    }


def check_vocabulary(tokenizer: Tokenizer, size: int) -> None:
    if tokenizer.size > size:
        must = f"at most {size}, the size of the text encoder's table"
        advice = "Tokenizer and encoder do not belong together."
        raise PellucidError(rule("entries of the tokenizer", must, tokenizer.size, advice), "token-id")


class CaptionIds:
    """The ids of a batch's captions by one tokenizer. Those that come with a batch are compared once, then taken."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.trusted = tokenizer, False

    def of(self, batch: Batch) -> Tensor:
        """(B, L) int64 on the images' device."""
        captions, given = captions_of(batch), batch.tokens
        if given is not None and self.trusted:
            return given
        own = tokens(self.tokenizer, captions)
        if given is None:
            return own.to(batch.images.device, non_blocking=True)
        if not torch.equal(given.cpu(), own):
            advice = "Make the cache again with the tokenizer of this config."
            raise PellucidError(f"tokens of the data must be of this tokenizer; got others. {advice}", "data-tokens")
        self.trusted = True
        return given


def captions_of(batch: Batch) -> tuple[str, ...]:
    if batch.captions is None or len(batch.captions) != len(batch.images):
        got = "none" if batch.captions is None else len(batch.captions)
        raise PellucidError(rule("data", "with one caption per image", got), "data-captions")
    return batch.captions
