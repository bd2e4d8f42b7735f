"""From prompts to what the networks take: hidden states of one or two CLIP encoders, and a pooled vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIPTextEncoder, TextStates
from pellucid.pipeline.prompt import MAX_CHUNKS, MAX_WEIGHT, Chunk
from pellucid.pipeline.prompt import chunks as split

Prompt = str | tuple[str, ...]  # one text for all encoders, or one an encoder
Pair = tuple[float, float]  # height, width


@dataclass(frozen=True)
class Embedding:
    """Encoded prompts: `pooled` is None where the network takes none, `mask` where every token is seen."""

    context: Tensor  # (B, chunks · L, D)
    pooled: Tensor | None = None  # (B, P)
    mask: Tensor | None = None  # (B, chunks · L), 1 where a token is seen

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Embedding:
        pooled = None if self.pooled is None else self.pooled.to(device=device, dtype=dtype)
        mask = None if self.mask is None else self.mask.to(device=device)
        return Embedding(self.context.to(device=device, dtype=dtype), pooled, mask)

    def repeated(self, n: int) -> Embedding:
        """n images per prompt."""
        every = (None if one is None else one.repeat_interleave(n, dim=0) for one in (self.pooled, self.mask))
        return Embedding(self.context.repeat_interleave(n, dim=0), *every)


@dataclass(frozen=True)
class TextPart:
    """An encoder with its tokenizer, and which of its states a denoiser was trained on."""

    encoder: CLIPTextEncoder
    tokenizer: Tokenizer
    penultimate: bool

    def states(self, tokens: Tensor, skip: int | None) -> tuple[Tensor, Tensor]:
        """(B, L, D) of the layer asked for, and the pooled vector (B, P)."""
        states: TextStates = self.encoder(tokens)
        if self.penultimate:
            return states.hidden[-2 - (skip or 0)], states.pooled
        if skip is None:
            return states.last, states.pooled
        return self.encoder.text_model.final_layer_norm(states.hidden[-1 - skip]), states.pooled


def parts(encoders: Sequence[CLIPTextEncoder], tokenizers: Sequence[Tokenizer]) -> tuple[TextPart, ...]:
    """The encoders of a model. A projection at the end of the last one tells SDXL from Stable Diffusion 1 and 2.

    SDXL reads the layer before the last, without the final norm, of every encoder; Stable Diffusion the last layer.
    """
    if not encoders or len(encoders) != len(tokenizers):
        got = f"{len(encoders)} encoders, {len(tokenizers)} tokenizers"
        raise PellucidError(rule("text encoders", "at least one, each with a tokenizer", got), "text-parts")
    penultimate = encoders[-1].text_projection is not None
    windows = [min(t.length, e.config.max_position_embeddings) for e, t in zip(encoders, tokenizers, strict=True)]
    if len(set(windows)) > 1:
        raise PellucidError(rule("windows of the text encoders", "of one length", windows), "text-parts")
    return tuple(
        TextPart(encoder, replace(tokenizer, length=windows[0]), penultimate)
        for encoder, tokenizer in zip(encoders, tokenizers, strict=True)
    )


@torch.no_grad()
def encode_prompts(
    encoders: Sequence[CLIPTextEncoder],
    tokenizers: Sequence[Tokenizer],
    prompts: Sequence[Prompt],
    *,
    skip: int | None = None,
    weighting: bool = False,
    chunks: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Embedding:
    """The embedding of a batch of prompts; shorter ones are filled up with empty chunks, to `chunks` if it is given.

    `skip` leaves out so many of the last layers, as diffusers' clip_skip. The pooled vector is that of the first
    chunk: it was trained on one window, and a prompt begins with what it is about.
    """
    found = parts(encoders, tokenizers)
    check_skip(found, skip)
    split_texts = split_prompts(found, prompts, weighting)
    needed = max(len(text) for texts in split_texts for text in texts)
    count = needed if chunks is None else chunks
    if not needed <= count <= MAX_CHUNKS:
        raise PellucidError(rule("chunks", f"from {needed}, which the prompts need, to {MAX_CHUNKS}", count), "chunks")
    contexts, pooled = [], None
    for part, texts in zip(found, split_texts, strict=True):
        filled = [[*text, *((),) * (count - len(text))] for text in texts]
        encoded = [encode_chunk(part, column, skip) for column in zip(*filled, strict=True)]
        contexts.append(torch.cat([states for states, _ in encoded], dim=1))  # (B, chunks · L, D)
        pooled = encoded[0][1] if part.penultimate else None
    context = torch.cat([states.to(contexts[-1]) for states in contexts], dim=-1)  # (B, chunks · L, ΣD)
    return Embedding(context, pooled).to(device, dtype)


def encode_pair(
    encoders: Sequence[CLIPTextEncoder],
    tokenizers: Sequence[Tokenizer],
    prompts: Sequence[Prompt],
    negatives: Sequence[Prompt] | None = None,
    *,
    zero_negative: bool = False,
    skip: int | None = None,
    negative_skip: int | None = None,
    weighting: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Embedding, Embedding]:
    """Prompts and their negatives, equally long. Without negatives those are empty, or zeros (`zero_negative`).

    `zero_negative` is SDXL's force_zeros_for_empty_prompt. diffusers skips no layer of a negative prompt, whatever
    clip_skip says; `negative_skip` does.
    """
    options: dict[str, Any] = {"weighting": weighting, "device": device, "dtype": dtype}
    if negatives is None and zero_negative:
        cond = encode_prompts(encoders, tokenizers, prompts, skip=skip, **options)
        pooled = None if cond.pooled is None else torch.zeros_like(cond.pooled)
        return cond, Embedding(torch.zeros_like(cond.context), pooled)
    against = [""] * len(prompts) if negatives is None else negatives
    if len(against) != len(prompts):
        raise PellucidError(rule("negative prompts", f"{len(prompts)}, one per prompt", len(against)), "prompts")
    found = parts(encoders, tokenizers)
    count = max(len(text) for texts in split_prompts(found, [*prompts, *against], weighting) for text in texts)
    cond = encode_prompts(encoders, tokenizers, prompts, skip=skip, chunks=count, **options)
    return cond, encode_prompts(encoders, tokenizers, against, skip=negative_skip, chunks=count, **options)


def split_prompts(
    found: Sequence[TextPart], prompts: Sequence[Prompt], weighting: bool
) -> list[list[tuple[Chunk, ...]]]:
    """For each encoder, the chunks of each prompt."""
    if isinstance(prompts, str) or not prompts:
        raise PellucidError(rule("prompts", "a list with at least one", prompts), "prompts")
    for prompt in prompts:
        if isinstance(prompt, tuple) and len(prompt) != len(found):
            raise PellucidError(rule("texts of a prompt", f"{len(found)}, one an encoder", len(prompt)), "prompts")
    return [
        [split(part.tokenizer, p[n] if isinstance(p, tuple) else p, weighting=weighting) for p in prompts]
        for n, part in enumerate(found)
    ]


def long_notes(
    encoders: Sequence[CLIPTextEncoder],
    tokenizers: Sequence[Tokenizer],
    prompts: Mapping[str, Sequence[Prompt]],
    weighting: bool,
) -> list[str]:
    """A note for each kind of prompt that is longer than a window, which diffusers would cut; `prompts` are by name."""
    parts_found, found = parts(encoders, tokenizers), {}
    room = parts_found[0].tokenizer.room
    for name, texts in prompts.items():
        for n, split_texts in enumerate(split_prompts(parts_found, texts, weighting)):
            own = f"{name}_2" if n and isinstance(texts[0], tuple) else name
            tokens, count = max((sum(map(len, chunks)), len(chunks)) for chunks in split_texts)
            if count > 1:
                found[own] = (
                    f"{own} has {tokens} tokens, and all are encoded, in {count} chunks; "
                    f"diffusers cuts it after {room}: shorten it to {room} for the same image"
                )
    return list(found.values())


def encode_chunk(part: TextPart, column: Sequence[Chunk], skip: int | None) -> tuple[Tensor, Tensor]:
    """One chunk of every prompt: (B, L, D) and (B, P). All calls of a batch have one shape, so it compiles once."""
    table = part.encoder.text_model.embeddings.token_embedding
    windows = [part.tokenizer.window([i for i, _ in chunk]) for chunk in column]
    highest = max(max(window) for window in windows)
    if highest >= table.num_embeddings:
        must = f"below {table.num_embeddings}, the size of the text encoder's table"
        raise PellucidError(
            rule("token ids", must, highest, "Tokenizer and encoder do not belong together."), "token-id"
        )
    tokens = torch.tensor(windows, device=table.weight.device)  # (B, L)
    states, pooled = part.states(tokens, skip)
    if any(weight != 1.0 for chunk in column for _, weight in chunk):
        rows = [[1.0, *(w for _, w in chunk), *[1.0] * (tokens.shape[1] - 1 - len(chunk))] for chunk in column]
        states = weigh(states, torch.tensor(rows, device=states.device))
    return states, pooled


def weigh(states: Tensor, weights: Tensor) -> Tensor:
    """Every token's state times its weight, then all of them rescaled to the mean that they had before.

    This is the rule that weighted prompts in the wild were written for: without the mean restored, a weight would
    also turn up the whole prompt. The mean is over one chunk of one prompt, so that a batch equals its singles.
    The factor is a ratio of two means, and where positive and negative states cancel it says nothing; if all states
    had one sign it would lie between 1 / max(weight) and 1 / min(weight), so it is kept there.
    """
    before = states.float()  # (B, L, D)
    after = before * weights[..., None]
    most, least = weights.amax(1), weights.amin(1).clamp(min=1 / MAX_WEIGHT)
    ratio = before.mean((1, 2)) / after.mean((1, 2))
    ratio = ratio.nan_to_num(1.0).clamp(1 / most, 1 / least)  # (B,)
    return (after * ratio[:, None, None]).to(states.dtype)


def check_skip(found: Sequence[TextPart], skip: int | None) -> None:
    if skip is None:
        return
    limit = min(part.encoder.config.num_hidden_layers - part.penultimate for part in found)
    if isinstance(skip, bool) or not isinstance(skip, int) or not 0 <= skip <= limit:
        raise PellucidError(rule("clip skip", f"an integer from 0 to {limit}", skip), "clip-skip")


def size_ids(
    original: Pair | Sequence[Pair],
    crop: Pair | Sequence[Pair] = (0, 0),
    target: Pair | Sequence[Pair] | None = None,
    *,
    score: float | None = None,
) -> Tensor:
    """SDXL's size conditioning (B, 6): heights and widths of the original, the crop's top left, and the target.

    Each is one pair, or one per image; no target means the original's size. The refiner takes an aesthetic `score`
    in the place of the target: (B, 5).
    """
    last = (original if target is None else target) if score is None else None
    given = [pairs(value) for value in (original, crop, last) if value is not None]
    count = max(len(values) for values in given)
    if any(len(values) not in (1, count) for values in given):
        raise PellucidError(rule("sizes", "one for all images, or one per image", [len(v) for v in given]), "sizes")
    rows = [[n for values in given for n in values[i % len(values)]] for i in range(count)]
    return torch.tensor([row if score is None else [*row, score] for row in rows], dtype=torch.float32)


def pairs(value: Pair | Sequence[Pair]) -> list[Pair]:
    found: list[Any] = [value] if any(isinstance(n, int | float) for n in value) else list(value)
    if not found or not all(len(pair) == 2 and all(0 <= n < math.inf for n in pair) for pair in found):
        raise PellucidError(rule("a size", "a height and a width", value), "sizes")
    return found
