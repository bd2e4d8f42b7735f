"""Prompts → tokens → what the networks take: weights, chunks, hidden states, and words of textual inversion."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import weights
from pellucid.interop.components import Components
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIPTextEncoder, TextStates
from pellucid.models.lora import AdapterSet

# --- Prompts as tokens ----------------------------------------------------------------------------------------------

_STEP = 1.1  # what one pair of brackets multiplies or divides by
_MAX_WEIGHT = 10.0
_MAX_DEPTH = 24  # one bracket more and even 1.1 to that power is too heavy
MAX_CHUNKS = 10  # 750 tokens of CLIP's 77-token window, about 3,000 characters of English
_MAX_CHARACTERS = 100_000  # beyond this a text is refused before it is tokenized

# An escaped bracket; an opening one; a weight that closes; a closing one; plain text.
_MARKS = re.compile(
    r"\\[()\[\]\\]|[(\[]|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*\)|[)\]]|[^\\()\[\]:]+|.", re.DOTALL
)


Chunk = tuple[tuple[int, float], ...]  # (id, weight) of the text's tokens in one window, without BOS and EOS


def weighted_runs(prompt: str) -> list[tuple[str, float]]:
    r"""The runs of a prompt with their weights.

    `(word)` weighs 1.1, `[word]` 1 / 1.1 and `(word:1.3)` 1.3; nested brackets multiply; `\(` is a bracket of the
    text. As in the interface that brought this grammar up, a bracket that is never closed reaches to the end, and
    one that closes nothing is text.
    """
    runs: list[tuple[str, float]] = []
    open_at: dict[str, list[int]] = {"(": [], "[": []}

    def scale(start: int, factor: float) -> None:
        runs[start:] = [(text, weight * factor) for text, weight in runs[start:]]

    for mark in _MARKS.finditer(prompt):
        text, weight = mark[0], mark["weight"]
        if text in open_at:
            open_at[text].append(len(runs))
            _check_depth(len(open_at[text]))
        elif weight is not None and open_at["("]:
            scale(open_at["("].pop(), float(weight))
        elif text == ")" and open_at["("]:
            scale(open_at["("].pop(), _STEP)
        elif text == "]" and open_at["["]:
            scale(open_at["["].pop(), 1 / _STEP)
        else:
            runs.append((text[1:] if len(text) == 2 and text[0] == "\\" else text, 1.0))
    for start in open_at["("]:
        scale(start, _STEP)
    for start in open_at["["]:
        scale(start, 1 / _STEP)
    return _join_runs(runs)


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        advice = r"A bracket of the text is written \( or \[."
        raise PellucidError(rule("brackets of a prompt", f"at most {_MAX_DEPTH} deep", depth, advice), "prompt-weight")


def _join_runs(runs: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Neighbours of one weight are one run, so that a weight of 1 changes no token."""
    out: list[tuple[str, float]] = []
    for text, weight in runs:
        if not 0 <= weight <= _MAX_WEIGHT:
            must = f"between 0 and {_MAX_WEIGHT:g}"
            raise PellucidError(rule(f"weight of {text.strip()[:40]!r}", must, round(weight, 4)), "prompt-weight")
        if out and out[-1][1] == weight:
            out[-1] = (out[-1][0] + text, weight)
        else:
            out.append((text, weight))
    return out


def chunks_of(tokenizer: Tokenizer, prompt: str, *, weighting: bool = False) -> tuple[Chunk, ...]:
    """The tokens of a prompt, at most `tokenizer.room` a chunk; a prompt that needs over 10 chunks is an error.

    A chunk ends between two words, or inside one only where that word alone is longer than a chunk. The vectors of
    one embedding count as a word. An empty prompt is one empty chunk.
    """
    if isinstance(prompt, str) and len(prompt) > _MAX_CHARACTERS:
        raise PellucidError(rule("prompt", f"at most {_MAX_CHARACTERS} characters", len(prompt)), "prompt-length")
    runs = weighted_runs(prompt) if weighting and isinstance(prompt, str) else [(prompt, 1.0)]
    words = [(word, weight) for text, weight in runs for word in tokenizer.words(text)]
    found: list[list[tuple[int, float]]] = [[]]
    for piece, weight in _word_pieces(words, tokenizer.room):
        if len(found[-1]) + len(piece) > tokenizer.room:
            found.append([])
        found[-1] += [(i, weight) for i in piece]
    if len(found) > MAX_CHUNKS:
        count = sum(len(word) for word, _ in words)
        raise PellucidError(
            f"prompt must be at most {MAX_CHUNKS} chunks of {tokenizer.room} tokens; got {count} tokens, "
            f"{len(found)} chunks. Shorten it: nothing is cut off silently.",
            "prompt-length",
        )
    return tuple(tuple(chunk) for chunk in found)


def _word_pieces(words: Iterable[tuple[tuple[int, ...], float]], room: int) -> Iterator[tuple[tuple[int, ...], float]]:
    for word, weight in words:
        for start in range(0, len(word), room):
            yield word[start : start + room], weight


# --- Encoding -------------------------------------------------------------------------------------------------------

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
        """(B, L, D) of the chosen layer, and the pooled vector (B, P)."""
        states: TextStates = self.encoder(tokens)
        if self.penultimate:
            return states.hidden[-2 - (skip or 0)], states.pooled
        if skip is None:
            return states.last, states.pooled
        return self.encoder.text_model.final_layer_norm(states.hidden[-1 - skip]), states.pooled


def text_parts_of(encoders: Sequence[CLIPTextEncoder], tokenizers: Sequence[Tokenizer]) -> tuple[TextPart, ...]:
    """The encoders of a model. A projection at the end of the last one marks SDXL, unlike Stable Diffusion 1 and 2.

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
    found = text_parts_of(encoders, tokenizers)
    _check_skip(found, skip)
    split_texts = _split_prompts(found, prompts, weighting)
    needed = max(len(text) for texts in split_texts for text in texts)
    count = needed if chunks is None else chunks
    if not needed <= count <= MAX_CHUNKS:
        raise PellucidError(rule("chunks", f"from {needed}, which the prompts need, to {MAX_CHUNKS}", count), "chunks")
    contexts, pooled = [], None
    for part, texts in zip(found, split_texts, strict=True):
        filled = [[*text, *((),) * (count - len(text))] for text in texts]
        encoded = [_encode_chunk(part, column, skip) for column in zip(*filled, strict=True)]
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
    found = text_parts_of(encoders, tokenizers)
    count = max(len(text) for texts in _split_prompts(found, [*prompts, *against], weighting) for text in texts)
    cond = encode_prompts(encoders, tokenizers, prompts, skip=skip, chunks=count, **options)
    return cond, encode_prompts(encoders, tokenizers, against, skip=negative_skip, chunks=count, **options)


def _split_prompts(
    found: Sequence[TextPart], prompts: Sequence[Prompt], weighting: bool
) -> list[list[tuple[Chunk, ...]]]:
    """For each encoder, the chunks of each prompt."""
    if isinstance(prompts, str) or not prompts:
        raise PellucidError(rule("prompts", "a list with at least one", prompts), "prompts")
    for prompt in prompts:
        if isinstance(prompt, tuple) and len(prompt) != len(found):
            raise PellucidError(rule("texts of a prompt", f"{len(found)}, one per encoder", len(prompt)), "prompts")
    return [
        [chunks_of(part.tokenizer, p[n] if isinstance(p, tuple) else p, weighting=weighting) for p in prompts]
        for n, part in enumerate(found)
    ]


def long_notes(
    encoders: Sequence[CLIPTextEncoder],
    tokenizers: Sequence[Tokenizer],
    prompts: Mapping[str, Sequence[Prompt]],
    weighting: bool,
) -> list[str]:
    """A note for each kind of prompt that is longer than a window, which diffusers would cut; `prompts` are by name."""
    parts_found, found = text_parts_of(encoders, tokenizers), {}
    room = parts_found[0].tokenizer.room
    for name, texts in prompts.items():
        for n, split_texts in enumerate(_split_prompts(parts_found, texts, weighting)):
            own = f"{name}_2" if n and isinstance(texts[0], tuple) else name
            tokens, count = max((sum(map(len, chunks)), len(chunks)) for chunks in split_texts)
            if count > 1:
                found[own] = (
                    f"{own} has {tokens} tokens, and all are encoded, in {count} chunks; "
                    f"diffusers cuts it after {room}: shorten it to {room} for the same image"
                )
    return list(found.values())


def _encode_chunk(part: TextPart, column: Sequence[Chunk], skip: int | None) -> tuple[Tensor, Tensor]:
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
    most, least = weights.amax(1), weights.amin(1).clamp(min=1 / _MAX_WEIGHT)
    ratio = before.mean((1, 2)) / after.mean((1, 2))
    ratio = ratio.nan_to_num(1.0).clamp(1 / most, 1 / least)  # (B,)
    return (after * ratio[:, None, None]).to(states.dtype)


def _check_skip(found: Sequence[TextPart], skip: int | None) -> None:
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
    given = [_pairs(value) for value in (original, crop, last) if value is not None]
    count = max(len(values) for values in given)
    if any(len(values) not in (1, count) for values in given):
        raise PellucidError(rule("sizes", "one for all images, or one per image", [len(v) for v in given]), "sizes")
    rows = [[n for values in given for n in values[i % len(values)]] for i in range(count)]
    return torch.tensor([row if score is None else [*row, score] for row in rows], dtype=torch.float32)


def _pairs(value: Pair | Sequence[Pair]) -> list[Pair]:
    found: list[Any] = [value] if any(isinstance(n, int | float) for n in value) else list(value)
    if not found or not all(len(pair) == 2 and all(0 <= n < math.inf for n in pair) for pair in found):
        raise PellucidError(rule("a size", "a height and a width", value), "sizes")
    return found


# --- Textual inversion ----------------------------------------------------------------------------------------------

_SDXL_KEYS = ("clip_l", "clip_g")  # the first and the second encoder
_UNNAMED = "emb_params"  # the key of files that leave the name to the file's own
_FOLDER_FILES = ("learned_embeds.safetensors", "learned_embeds.bin")  # of a repository on the hub
_MAX_VECTORS = 75  # what one window holds


@dataclass(frozen=True)
class Inversion:
    """A word and its vectors (count, D), for each text encoder in the order of the pipeline."""

    name: str
    vectors: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        return len(self.vectors[0])


def read_inversion(source: str | Path | Mapping[str, Any], name: str | None = None) -> Inversion:
    """From a .safetensors, .pt or .bin file, a folder with learned_embeds, or what a file holds.

    `name` overrules the name that it carries. Layouts: {name: vectors} as diffusers writes it; emb_params, named
    like the file; clip_l and clip_g for SDXL; string_to_param in pickles, with the name in `name`.
    """
    if isinstance(source, Mapping):
        return _name_vectors(source, name, stem=None)
    path = Path(source)
    if path.is_dir():
        path = next((path / file for file in _FOLDER_FILES if (path / file).is_file()), path)
    if not path.is_file():
        raise PellucidError(rule("textual inversion", "a .safetensors, .pt or .bin file", path.name), "inversion-file")
    return _name_vectors(_tensors_in(path), name, stem=path.stem)


def _tensors_in(path: Path) -> Mapping[str, Any]:
    """The tensors of a file by name; those of a pickle may be nested, or one without a name."""
    kind = weights.kind_of(path)
    if kind == "safetensors":
        return weights.read_safetensors(path)
    held = weights.read_pickle(path, zipped=kind == "zip", what="textual inversion")
    return held if isinstance(held, Mapping) else {_UNNAMED: held}


def _name_vectors(held: Mapping[str, Any], name: str | None, stem: str | None) -> Inversion:
    """The word and its vectors, whichever layout they came in."""
    if isinstance(held.get("string_to_param"), Mapping):
        found, tensors = held.get("name"), list(held["string_to_param"].values())[:1]
    elif set(held) == set(_SDXL_KEYS):
        found, tensors = None, [held[key] for key in _SDXL_KEYS]
    elif len(held) == 1:
        key, tensor = next(iter(held.items()))
        found, tensors = None if key == _UNNAMED else key, [tensor]
    else:
        must = "{name: vectors}, emb_params, clip_l with clip_g, or string_to_param"
        raise PellucidError(
            f"keys of a textual inversion must be {must}; got {weights.some(map(str, held))}.", "inversion-keys"
        )
    word = name or found or stem
    if not isinstance(word, str):
        raise PellucidError("name of a textual inversion must be given; got vectors without one.", "inversion-name")
    return Inversion(word, tuple(_vector_rows(tensor, word) for tensor in tensors))


def _vector_rows(tensor: Any, name: str) -> Tensor:
    """(count, D) of finite numbers."""
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    if not isinstance(tensor, Tensor) or tensor.ndim not in (1, 2) or not tensor.is_floating_point():
        raise PellucidError(rule(f"textual inversion {name!r}", "vectors (count, width)", shape), "inversion-shape")
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    if not 1 <= len(rows) <= _MAX_VECTORS:
        must = f"1 to {_MAX_VECTORS} vectors, which a window holds"
        raise PellucidError(rule(f"textual inversion {name!r}", must, len(rows)), "inversion-shape")
    if not rows.isfinite().all():
        raise PellucidError(rule(f"textual inversion {name!r}", "finite numbers", "NaN or infinity"), "inversion-nan")
    return rows


def add_inversions(
    encoders: Sequence[CLIPTextEncoder], tokenizers: Sequence[Tokenizer], inversions: Sequence[Inversion]
) -> tuple[tuple[CLIPTextEncoder, ...], tuple[Tokenizer, ...]]:
    """Encoders and tokenizers that know these words: new ones, that share every other tensor with the given."""
    for inversion in inversions:
        widths = [vectors.shape[-1] for vectors in inversion.vectors]
        wanted = [encoder.config.hidden_size for encoder in encoders]
        if widths != wanted or len({len(vectors) for vectors in inversion.vectors}) > 1:
            raise _wrong_width(inversion, wanted)
    grown = [
        _extend_encoder(encoder, tokenizer, [(one.name, one.vectors[n]) for one in inversions])
        for n, (encoder, tokenizer) in enumerate(zip(encoders, tokenizers, strict=True))
    ]
    return tuple(encoder for encoder, _ in grown), tuple(tokenizer for _, tokenizer in grown)


def with_tokens(parts: Components, loras: Sequence[AdapterSet]) -> Components:
    """The components with the tokens that came with LoRAs, and a note that names them."""
    given = [
        Inversion(word, tuple(_vector_rows(v, word) for v in held))
        for one in loras
        for word, held in one.tokens.items()
    ]
    if not given:
        return parts
    encoders, tokenizers = add_inversions(parts.text_encoders, parts.tokenizers, given)
    notes = [f"LoRA {one.name} came with tokens for the prompt: {', '.join(one.tokens)}" for one in loras if one.tokens]
    return replace(parts, text_encoders=encoders, tokenizers=tokenizers, notes=(*parts.notes, *notes))


def _wrong_width(inversion: Inversion, wanted: Sequence[int]) -> PellucidError:
    shapes = [tuple(vectors.shape) for vectors in inversion.vectors]
    must = " and ".join(str(width) for width in wanted) + " wide, as the text encoder" + "s" * (len(wanted) > 1)
    advice = "It was trained for another kind of model."
    if [width for _, width in shapes] == list(wanted):
        must, advice = "as many vectors for each text encoder", ""
    got = " and ".join(f"{count} × {width}" for count, width in shapes)
    return PellucidError(rule(f"textual inversion {inversion.name!r}", must, got, advice), "inversion-width")


def _extend_encoder(
    encoder: CLIPTextEncoder, tokenizer: Tokenizer, words: Sequence[tuple[str, Tensor]]
) -> tuple[CLIPTextEncoder, Tokenizer]:
    if not words:
        return encoder, tokenizer
    tokenizer = _extend_tokenizer(tokenizer, tuple((name, len(vectors)) for name, vectors in words))
    ids = [i for name, _ in words for i in tokenizer.ids(name)]
    return encoder.with_tokens(ids, torch.cat([v.to("cpu", torch.float32) for _, v in words]), tokenizer.eos), tokenizer


@lru_cache(maxsize=8)
def _extend_tokenizer(tokenizer: Tokenizer, words: tuple[tuple[str, int], ...]) -> Tokenizer:
    """A tokenizer that knows these words. CLIP's takes 0.1 s for each, and a LoRA brings them to every call."""
    for name, count in words:
        tokenizer = tokenizer.add(name, count)
    return tokenizer
